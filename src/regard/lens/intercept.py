"""Where attention calls are edited for an ablation, above autograd.

    F.scaled_dot_product_attention    the mask, and the output of a removed head
    nn.MultiheadAttention             the same, inside of its function
    FlexAttention                     the function of its scores, and the output
    a softmax                         its logits, and the weights of a removed head

A mode intercepts these functions of torch while a module of the model is running.
Whether a softmax is attention is told by the witness (witness.py), who hears the
operators below. The patches are undone when the `with` is left.

Next: huggingface.py
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from regard.lens.captured_call import CapturedCall, arrange, compute_weights
from regard.lens.edit import (
    CUTTERS,
    PASSING,
    PendingCall,
    bend_less,
    drop_axes,
    edited,
    find_hidden,
    hide,
    lower,
    run_safely,
)
from regard.lens.whereabouts import CLOSED, Whereabouts
from regard.lens.witness import Witness

SDPA = F.scaled_dot_product_attention
SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}


class Silence(threading.local):
    """Whether calls of this thread are our own, and not edited (thread-local)."""

    def __init__(self) -> None:
        self.on = False

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Edit no call of this thread in the `with`, and let no one hear it."""
        before, self.on = self.on, True
        try:
            with _disable_current_modes():
                yield
        finally:
            self.on = before


SILENCE = Silence()


class Mode(TorchFunctionMode):  # type: ignore[misc]
    """Intercepts every torch function of this thread while it is active."""

    def __init__(self, here: Whereabouts, witness: Witness) -> None:
        super().__init__()
        self.here, self.witness = here, witness
        self.doors: dict[Any, Callable[[Any, Any, Any], Any]] = {
            SDPA: lambda _, args, named: self.run_sdpa(*args, **named),
            F.multi_head_attention_forward: self.run_mha,
            torch.ops.higher_order.flex_attention: self.run_flex,
            **dict.fromkeys(SOFTMAX, self.run_softmax),
        }

    def __enter__(self) -> Any:
        self.witness.enter()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.witness.leave()

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), named: Any = None
    ) -> Any:
        named = named or {}
        if PASSING.is_safe and func in SOFTMAX:
            return run_safely(args, named)
        deaf = self.here.held or SILENCE.on
        door = None if deaf else self.doors.get(func)
        return func(*args, **named) if door is None else door(func, args, named)

    def run_sdpa(  # noqa: PLR0917 (the signature of the kernel)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        keep: list[CapturedCall] | None = None,  # a call of nn.MultiheadAttention
    ) -> Tensor:
        """Run the kernel with an edited mask."""
        mask, causal = attn_mask, is_causal
        call = PendingCall(
            like=query,
            heads=query.shape[1] if query.ndim == 4 else None,
            n_q=query.shape[-2],
            n_k=key.shape[-2],
            aligned=causal or keep is not None,
            find_hidden=partial(find_hidden, mask, causal=causal),
        )
        with edited(call) as edit:
            if edit.cells is not None:
                mask = drop_axes(hide(mask, edit.cells, causal=causal), query.ndim)
                causal = False
            options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
            out = SDPA(query, key, value, mask, dropout_p, causal, **options)
        if keep is not None:
            q, k, v, mask = arrange(query, key, value, mask)
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            kept = CapturedCall(
                via="",
                q=q,
                k=k,
                v=v,
                out=None,
                lse=None,
                scale=scale,
                mask=mask,
                causal=causal,
            )
            keep.append(kept)
        return edit.clear(out)

    def run_mha(self, func: Any, args: Any, named: Any) -> Any:
        """Edit the kernel call inside nn.MultiheadAttention.

        Its function hides its calls from modes, so the kernel is monkeypatched while it
        runs. With need_weights it would call no kernel: it is run without, and its
        weights are computed again.
        """
        if not any(cutter.is_running() for cutter in CUTTERS):
            return func(*args, **named)
        kept: list[CapturedCall] = []
        thread, asked = threading.get_ident(), named.get("need_weights", True)

        def make(before: Any) -> Any:
            def stand_in(*args: Any, **named: Any) -> Any:
                if threading.get_ident() != thread:  # other threads are unaffected
                    return before(*args, **named)
                return self.run_sdpa(*args, **named, keep=kept)

            return stand_in

        with put(F, "scaled_dot_product_attention", make):
            out, _ = func(*args, **{**named, "need_weights": False})
        if not asked:
            return out, None
        with SILENCE.keep():
            weights = compute_weights(kept[-1])
        if named.get("average_attn_weights", True):
            weights = weights.mean(1)
        return out, weights if out.ndim == 3 else weights[0]

    def run_softmax(self, func: Any, args: Any, named: Any) -> Tensor:
        """Edit a softmax over keys: the last resort, if nothing else is called."""
        logits = args[0] if args else named["input"]
        axis = named.get("dim", args[1] if len(args) > 1 else None)
        last = axis in (-1, logits.ndim - 1) and logits.shape[-1] > 1
        if (
            not last
            or logits.ndim not in (3, 4)
            or not self.witness.is_attention(logits)
        ):
            return func(*args, **named)
        n_q, n_k = logits.shape[-2:]
        call = PendingCall(
            like=logits,
            heads=None if logits.ndim == 3 else logits.shape[1],
            n_q=n_q,
            n_k=n_k,
            sure=False,
            find_hidden=partial(find_hidden, logits),
        )
        with edited(call) as edit:
            if edit.cells is None:
                weights = func(*args, **named)
            else:
                logits, _ = lower(logits, drop_axes(edit.cells, logits.ndim))
                named = {name: x for name, x in named.items() if name != "input"}
                weights = run_safely((logits, *args[1:]), named)
        return edit.clear(weights)

    def run_flex(self, func: Any, args: Any, named: Any) -> Any:
        """Edit FlexAttention: its masks are functions."""
        q, k, v, bend, block_mask, scale, *rest = args

        def find_hidden() -> Tensor:
            shape = (*q.shape[:3], k.shape[2])
            places = (
                torch.arange(n, device=q.device).reshape(
                    [-1 if a == b else 1 for b in range(4)]
                )
                for a, n in enumerate(shape)
            )
            return ~block_mask[-1](*places).expand(shape)

        call = PendingCall(
            like=q,
            heads=q.shape[1],
            n_q=q.shape[2],
            n_k=k.shape[2],
            find_hidden=find_hidden,
        )
        with edited(call) as edit:
            if edit.cells is not None:
                bend = bend_less(bend, edit.cells.expand(*q.shape[:2], -1, -1))
            done = func(q, k, v, bend, block_mask, scale, *rest, **named)
        return (edit.clear(done[0]), *done[1:])


def name_closed(
    original: Callable[..., Any],
    names: Mapping[int, str],
    mode: Mode,
    here: Whereabouts,
) -> Callable[..., Any]:
    """Return a `forward` for modules that torch runs differently when hooked.

    While a mode is active, torch leaves their fast path.
    """

    def forward(module: nn.Module, *args: Any, **named: Any) -> Any:
        name = names.get(id(module))
        if name is None:
            return original(module, *args, **named)
        with here.inside(name, mode):
            return original(module, *args, **named)

    return forward


@contextmanager
def open_modules(model: nn.Module, mode: Mode, here: Whereabouts) -> Iterator[None]:
    """Follow the torch modules that have a fast path."""
    names = {
        id(module): name
        for name, module in model.named_modules()
        if isinstance(module, CLOSED)
    }
    with ExitStack() as stack:
        for kind in CLOSED if names else ():
            make = partial(name_closed, names=names, mode=mode, here=here)
            stack.enter_context(put(kind, "forward", make))
        yield


Make = Callable[[Any], Any]
LOCK = threading.RLock()
PATCHED: dict[tuple[int, str], tuple[Any, list[tuple[bool, Make]]]] = {}


@contextmanager
def put(
    owner: Any, name: str, make: Make, *, is_outermost: bool = False
) -> Iterator[None]:
    """Monkeypatch an attribute with `make(value)` while the `with` lasts.

    Several patches may overlap and end in any order: the value is always the original
    with the remaining patches applied. Without any, it is the original itself. A patch
    that edits a call is outermost, so that those that hear it hear it as edited.
    """
    key, entry = (id(owner), name), (is_outermost, make)
    with LOCK:
        original, makers = PATCHED.setdefault(key, (vars(owner)[name], []))
        makers.append(entry)
        setattr(owner, name, compose(original, makers))
    try:
        yield
    finally:
        with LOCK:
            makers.remove(entry)
            setattr(owner, name, compose(original, makers))
            if not makers:
                del PATCHED[key]


def compose(original: Any, makers: Sequence[tuple[bool, Make]]) -> Any:
    """Return the original with all patches applied."""
    value = original
    for _, make in sorted(makers, key=lambda entry: entry[0]):
        value = make(value)
    return value
