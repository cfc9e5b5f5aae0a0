"""Interception points ("doors") for attention calls; results do not change.

    door                 what is captured                           lse
    sdpa                 q, k, v, mask of F.scaled_dot_product_…    from the same kernel
    nn.MultiheadAttention  the same, inside its function            from the same kernel
    transformers eager   q, k, v, mask, softcap, sinks              from the definition
    softmax              the logits                                 from the logits

The first uses a mode that intercepts every torch function. On a CPU the public function
runs a kernel that also computes lse and drops it; we call that kernel with the same
arguments, so the model gets the same bits and lse costs nothing. For an ablation
(edit.py), the call is edited first and recorded as edited. Nothing else is patched, and
the patches are undone when the `with` is left.

Next: huggingface.py
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from regard.engine.flash import forward as flash
from regard.lens.edit import (
    CUTTERS,
    PendingCall,
    add_of,
    bend_less,
    drop_axes,
    edited,
    hide,
    lower,
)
from regard.lens.sight import Sight, arrange, compute_weights, make_four, see_logits
from regard.lens.whereabouts import CLOSED, Whereabouts

FLASH = 1  # what torch calls the fused kernel
SDPA = F.scaled_dot_product_attention
SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}
Given = tuple[Tensor, Tensor, Tensor, Tensor | None, float, bool]  # to the kernel


class Inside(threading.local):
    """Listeners for attention calls made inside nn.MultiheadAttention, per thread."""

    def __init__(self) -> None:
        self.waiting: list[list[Sight]] = []
        self.deaf = False  # ignore calls that a lens makes itself

    def tell(self, sight: Sight) -> None:
        """Pass a call to all listeners."""
        for sights in self.waiting:
            sights.append(sight)

    @contextmanager
    def wait(self, sights: list[Sight]) -> Iterator[None]:
        """Append calls to `sights` while the `with` lasts."""
        self.waiting.append(sights)
        try:
            yield
        finally:
            self.waiting.pop()

    @contextmanager
    def compute(self) -> Iterator[None]:
        """Ignore all calls of this thread while the `with` lasts."""
        before, self.deaf = self.deaf, True
        try:
            yield
        finally:
            self.deaf = before


INSIDE = Inside()


class Mode(TorchFunctionMode):  # type: ignore[misc]
    """Intercepts every torch function of this thread while it is active."""

    def __init__(
        self,
        listen: Callable[[Sight], None],
        here: Whereabouts,
        *,
        aligned: bool = False,  # query 0 is at key 0
    ) -> None:
        super().__init__()
        self.listen, self.here, self.aligned = listen, here, aligned
        self.doors: dict[Any, Callable[[Any, Any, Any], Any]] = {
            SDPA: lambda _, args, named: self.run_sdpa(*args, **named),
            flash: lambda _, args, named: self.run_kernel(*args, **named),
            F.multi_head_attention_forward: self.run_mha,
            torch.ops.higher_order.flex_attention: self.run_flex,
            **dict.fromkeys(SOFTMAX, self.run_softmax),
        }

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), named: Any = None
    ) -> Any:
        named = named or {}
        deaf = self.here.held or INSIDE.deaf
        door = None if deaf else self.doors.get(func)
        return func(*args, **named) if door is None else door(func, args, named)

    def tell(self, sight: Sight) -> None:
        """Report a call to the listener."""
        with INSIDE.compute():
            self.listen(sight)

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
    ) -> Tensor:
        """Run the kernel that torch would run, and keep its lse."""
        query, key, value = (cast_as_autocast(x) for x in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = cast_as_autocast(attn_mask)
        with edited(self.describe(query, key, is_causal=is_causal)) as edit:
            if edit.cells is not None:
                attn_mask = hide(attn_mask, edit.cells, causal=is_causal)
                attn_mask, is_causal = drop_axes(attn_mask, query.ndim), False
            options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
            given = (query, key, value, attn_mask, dropout_p, is_causal)
            choice = -1
            if query.device.type == "cpu" and query.ndim == 4 and key.shape[-2] > 0:
                choice = torch._fused_sdp_choice(*given, **options)  # noqa: SLF001
            if choice == FLASH:
                given = (*given[:3], add_of(attn_mask, query), *given[4:])
                out, _ = self.run_flash(given, scale)
            else:
                out = SDPA(*given, **options)
                self.tell_kernel(given, scale, out, None)
        return edit.clear(out)

    def run_kernel(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the kernel when it is called directly, as a nested lens does."""
        with edited(self.describe(query, key, is_causal=is_causal)) as edit:
            if edit.cells is not None:
                attn_mask = hide(attn_mask, edit.cells, causal=is_causal)
                attn_mask, is_causal = add_of(attn_mask, query), False
            given = (query, key, value, attn_mask, dropout_p, is_causal)
            out, lse = self.run_flash(given, scale)
        return edit.clear(out), lse

    def run_flash(self, given: Given, scale: float | None) -> tuple[Tensor, Tensor]:
        """Run the fused kernel, and keep its lse."""
        query, key, value, mask, dropout, causal = given
        out, lse = flash(
            query, key, value, dropout, causal, attn_mask=mask, scale=scale
        )
        self.tell_kernel(given, scale, out, lse)
        return out, lse

    def tell_kernel(
        self, given: Given, scale: float | None, out: Tensor, lse: Tensor | None
    ) -> None:
        """Report a kernel call, with the keys before they were repeated."""
        query, key, value, mask, dropout, causal = given
        shared = self.here.shared
        k, v = (key, value) if shared is None else shared
        q, k, v, mask = arrange(query, k, v, mask)
        self.tell(
            Sight(
                door="sdpa" if shared is None else "transformers sdpa",
                q=q,
                k=k,
                v=v,
                out=None if dropout else make_four(out),
                lse=lse,
                scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
                mask=mask,
                causal=causal,
            )
        )

    def describe(self, query: Tensor, key: Tensor, *, is_causal: bool) -> PendingCall:
        """Return what is known of a kernel call before it runs."""
        return PendingCall(
            like=query,
            heads=query.shape[1] if query.ndim == 4 else None,
            n_q=query.shape[-2],
            n_k=key.shape[-2],
            aligned=is_causal or self.aligned,
        )

    def run_mha(self, func: Any, args: Any, named: Any) -> Any:
        """Intercept the kernel call inside nn.MultiheadAttention.

        Its function hides its calls from modes, so the kernel is monkeypatched while it
        runs. With need_weights it calls no kernel: it is then run once more without,
        only to capture q, k and v; or, if it is edited, only without.
        """
        sights: list[Sight] = []
        inner = Mode(INSIDE.tell, Whereabouts(), aligned=True)
        thread, without = threading.get_ident(), {**named, "need_weights": False}
        asked = named.get("need_weights", True)

        def make(before: Any) -> Any:
            def stand_in(*args: Any, **named: Any) -> Any:
                mine = threading.get_ident() == thread  # other threads are unaffected
                return (inner.run_sdpa if mine else before)(*args, **named)

            return stand_in

        with INSIDE.wait(sights), put(F, "scaled_dot_product_attention", make):
            if asked and any(cutter.is_running() for cutter in CUTTERS):
                out, _ = func(*args, **without)
                with INSIDE.compute():
                    weights = compute_weights(sights[-1])
                if named.get("average_attn_weights", True):
                    weights = weights.mean(1)
                done = out, weights if out.ndim == 3 else weights[0]
            else:
                done = func(*args, **named)
            if not sights:
                state = torch.get_rng_state()
                with torch.no_grad():
                    func(*args, **without)
                torch.set_rng_state(state)
        for sight in sights:
            self.tell(replace(sight, door="nn.MultiheadAttention"))
        return done

    def run_softmax(self, func: Any, args: Any, named: Any) -> Tensor:
        """Intercept a softmax over keys: the last resort, if nothing else is called.

        The record of its logits: q := logits, k := the identity, scale 1.
        """
        logits = args[0] if args else named["input"]
        axis = named.get("dim", args[1] if len(args) > 1 else None)
        last = axis in (-1, logits.ndim - 1) and logits.shape[-1] > 1
        flat = logits.ndim == 3 and "att" in self.here.name.lower()  # not a router's
        if not last or not (logits.ndim == 4 or flat):
            return func(*args, **named)
        heads, blank = None if flat else logits.shape[1], None
        n_q, n_k = logits.shape[-2:]
        call = PendingCall(like=logits, heads=heads, n_q=n_q, n_k=n_k, sure=False)
        with edited(call) as edit:
            if edit.cells is not None:
                logits, blank = lower(logits, drop_axes(edit.cells, logits.ndim))
            named = {name: x for name, x in named.items() if name != "input"}
            weights = func(logits, *args[1:], **named)
            self.tell(see_logits("softmax", make_four(logits.detach())))
        return edit.clear(weights, blank)

    def run_flex(self, func: Any, args: Any, named: Any) -> Any:
        """Intercept FlexAttention: lse has base 2, mask and score_mod are code."""
        q, k, v, bend, block_mask, scale, *rest = args
        b, h, i, j = (
            torch.arange(n).reshape([-1 if axis == a else 1 for axis in range(4)])
            for a, n in enumerate((*q.shape[:3], k.shape[2]))
        )
        with edited(self.describe(q, k, is_causal=False)) as edit:
            if edit.cells is not None:
                bend = bend_less(bend, edit.cells.expand(*q.shape[:2], -1, -1))
            done = func(q, k, v, bend, block_mask, scale, *rest, **named)
            seen = block_mask[-1](b, h, i, j).expand(*q.shape[:3], k.shape[2])
            with torch.no_grad():
                shared = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
                scores = q @ shared.transpose(-1, -2) * scale
                bent = bend(scores, b, h, i, j)
            if torch.equal(scores, bent):
                self.tell(
                    Sight(
                        door="flex",
                        q=q,
                        k=k,
                        v=v,
                        out=done[0],
                        lse=done[1] * math.log(2),
                        scale=scale,
                        mask=seen,
                    )
                )
            else:
                self.tell(see_logits("flex", bent.masked_fill(~seen, -math.inf)))
        return (edit.clear(done[0]), *done[1:])


def cast_as_autocast(x: Tensor) -> Tensor:
    """Return x in the dtype that autocast would give it before the kernel."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def watch_closed(
    original: Callable[..., Any],
    names: Mapping[int, str],
    mode: Mode,
    here: Whereabouts,
) -> Callable[..., Any]:
    """Return a `forward` for modules that torch runs differently when hooked.

    In eval mode it runs with all modes off, so that torch takes its fast path, and then
    again only to be recorded. In training there is no fast path: one run is enough.
    """

    def forward(module: nn.Module, *args: Any, **named: Any) -> Any:
        name = names.get(id(module))
        if name is None or here.closed:
            return original(module, *args, **named)
        cut = any(cutter.owns(module) for cutter in CUTTERS)  # leaves the fast path
        if module.training or here.shadow or cut:
            with here.inside(name, mode):
                return original(module, *args, **named)
        here.closed = True
        try:
            with torch._C.DisableTorchFunction():  # noqa: SLF001
                done = original(module, *args, **named)
        finally:
            here.closed = False
        here.shadow = True
        try:
            with torch.no_grad(), here.inside(name, mode):
                original(module, *args, **named)
        finally:
            here.shadow = False
        return done

    return forward


@contextmanager
def open_modules(model: nn.Module, mode: Mode, here: Whereabouts) -> Iterator[None]:
    """Hook the torch modules that have a fast path."""
    names = {
        id(module): name
        for name, module in model.named_modules()
        if isinstance(module, CLOSED)
    }
    with ExitStack() as stack:
        for kind in CLOSED if names else ():
            make = partial(watch_closed, names=names, mode=mode, here=here)
            stack.enter_context(put(kind, "forward", make))
        yield


Make = Callable[[Any], Any]
LOCK = threading.RLock()
PATCHED: dict[tuple[int, str], tuple[Any, list[Make]]] = {}


@contextmanager
def put(owner: Any, name: str, make: Make) -> Iterator[None]:
    """Monkeypatch an attribute with `make(value)` while the `with` lasts.

    Several patches may overlap and end in any order: the value is always the original
    with the remaining patches applied. Without any, it is the original itself.
    """
    key = id(owner), name
    with LOCK:
        original, makers = PATCHED.setdefault(key, (vars(owner)[name], []))
        makers.append(make)
        setattr(owner, name, compose(original, makers))
    try:
        yield
    finally:
        with LOCK:
            makers.remove(make)
            setattr(owner, name, compose(original, makers))
            if not makers:
                del PATCHED[key]


def compose(original: Any, makers: Sequence[Make]) -> Any:
    """Return the original with all patches applied."""
    value = original
    for make in makers:
        value = make(value)
    return value
