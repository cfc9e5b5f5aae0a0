"""The doors that attention goes through, watched without changing what passes.

    door                 what it is handed                          lse
    sdpa                 q, k, v, mask of F.scaled_dot_product_…    from the same kernel
    nn.MultiheadAttention  the same, inside of its own function     from the same kernel
    transformers eager   q, k, v, mask, softcap, sinks              from the definition
    softmax              the logits themselves                      from them

The first is the base: a mode that sees every torch function. On a CPU the public
function runs a kernel that also computes lse and drops it; the door calls that kernel
with the same arguments, so the model gets the same bits and lse costs nothing.

This is the only file that patches anything: inside of `with`, and undone after it.

Next: huggingface.py
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from regard.engine.flash import forward as flash
from regard.lens.whereabouts import CLOSED, Whereabouts

FLASH = 1  # what torch calls the fused kernel
SDPA = F.scaled_dot_product_attention
SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}


@dataclass(frozen=True, kw_only=True)
class Sight:
    """One call of attention, as it passed through a door."""

    door: str
    q: Tensor  # (B, H, Nq, D)
    k: Tensor  # (B, Hk, Nk, D)
    v: Tensor | None  # (B, Hk, Nk, Dv)
    out: Tensor | None  # (B, H, Nq, Dv)
    lse: Tensor | None  # (B, H, Nq), None if nobody computed it yet
    scale: float
    mask: Tensor | None = None  # bool, or numbers to add
    causal: bool = False  # query i sees the keys 0 … i
    softcap: float | None = None
    sink: Tensor | None = None  # (H,)


class Mode(TorchFunctionMode):  # type: ignore[misc]
    """Sees every torch function of this thread while it is on."""

    def __init__(self, tell: Callable[[Sight], None], here: Whereabouts) -> None:
        super().__init__()
        self.tell, self.here = tell, here
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
        door = None if self.here.held else self.doors.get(func)
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
    ) -> Tensor:
        """Run the kernel that torch would run, and keep its lse."""
        query, key, value = (cast_as_autocast(x) for x in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = cast_as_autocast(attn_mask)
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        choice = -1
        if query.device.type == "cpu" and query.ndim == 4 and key.shape[-2] > 0:
            choice = torch._fused_sdp_choice(*given, **options)  # noqa: SLF001
        if choice == FLASH:
            bias = add_of(attn_mask, query)
            out, _ = self.run_kernel(
                *given[:3], dropout_p, is_causal, attn_mask=bias, scale=scale
            )
            return out
        out = SDPA(*given, **options)
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        shared = self.here.shared
        k, v = (key, value) if shared is None else shared
        self.tell(
            Sight(
                door="sdpa" if shared is None else "transformers sdpa",
                q=make_four(query),
                k=make_four(k),
                v=make_four(v),
                out=None if dropout_p else make_four(out),
                lse=None,
                scale=factor,
                mask=None if attn_mask is None else make_four(attn_mask),
                causal=is_causal,
            )
        )
        return out

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
        """Run the kernel, and keep its lse; a second lens sees only this one called."""
        out, lse = flash(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )
        shared = self.here.shared
        k, v = (key, value) if shared is None else shared
        self.tell(
            Sight(
                door="sdpa" if shared is None else "transformers sdpa",
                q=query,
                k=k,
                v=v,
                out=None if dropout_p else out,
                lse=lse,
                scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
                mask=attn_mask,
                causal=is_causal,
            )
        )
        return out, lse

    def run_mha(self, func: Any, args: Any, named: Any) -> Any:
        """Look inside of torch's own multi-head attention.

        Its function hides what it calls from modes, so the kernel's name is replaced
        while it runs. Asked for weights it calls no kernel: then it is run once more
        without, only to see q, k and v.
        """
        sights: list[Sight] = []
        inner, thread = Mode(sights.append, Whereabouts()), threading.get_ident()

        def make(before: Any) -> Any:
            def stand_in(*args: Any, **named: Any) -> Any:
                mine = threading.get_ident() == thread  # others go their own way
                return (inner.run_sdpa if mine else before)(*args, **named)

            return stand_in

        with put(F, "scaled_dot_product_attention", make):
            done = func(*args, **named)
            if not sights:
                state = torch.get_rng_state()
                with torch.no_grad():
                    func(*args, **{**named, "need_weights": False})
                torch.set_rng_state(state)
        for sight in sights:
            self.tell(replace(sight, door="nn.MultiheadAttention"))
        return done

    def run_softmax(self, func: Any, args: Any, named: Any) -> Tensor:
        """See a softmax over keys: the last resort, where nothing else is called.

        Its logits are a record too: q := logits, k := the identity, scale 1.
        """
        weights: Tensor = func(*args, **named)
        logits = args[0] if args else named["input"]
        axis = named.get("dim", args[1] if len(args) > 1 else None)
        last = axis in (-1, logits.ndim - 1) and logits.shape[-1] > 1
        flat = logits.ndim == 3 and "att" in self.here.name.lower()  # not a router's
        if last and (logits.ndim == 4 or flat):
            self.tell(see_logits("softmax", make_four(logits.detach())))
        return weights

    def run_flex(self, func: Any, args: Any, named: Any) -> Any:
        """See FlexAttention: its lse is to the base 2, its mask and edits are code."""
        done = func(*args, **named)
        q, k, v, edit, block_mask, scale, *_ = args
        b, h, i, j = (
            torch.arange(n).reshape([-1 if axis == a else 1 for axis in range(4)])
            for a, n in enumerate((*q.shape[:3], k.shape[2]))
        )
        seen = block_mask[-1](b, h, i, j).expand(*q.shape[:3], k.shape[2])
        with torch.no_grad():
            shared = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
            scores = q @ shared.transpose(-1, -2) * scale
            edited = edit(scores, b, h, i, j)
        if torch.equal(scores, edited):
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
            self.tell(see_logits("flex", edited.masked_fill(~seen, -math.inf)))
        return done


def see_logits(door: str, logits: Tensor) -> Sight:
    """Return a call of which only the logits (B, H, Nq, Nk) are known."""
    keys = torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    allowed = logits > torch.finfo(logits.dtype).min / 2
    return Sight(
        door=door,
        q=torch.where(allowed, logits, 0),
        k=keys.expand(logits.shape[0], 1, *keys.shape),
        v=None,
        out=None,
        lse=torch.logsumexp(wide, -1),
        scale=1.0,
        mask=None if bool(allowed.all()) else allowed,
    )


def cast_as_autocast(x: Tensor) -> Tensor:
    """Return x in the dtype that autocast would give it before the kernel."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def make_four(x: Tensor) -> Tensor:
    """Return x as (B, H, N, D): axes are added in front, or put together there."""
    return x.flatten(0, -4) if x.ndim > 4 else x.reshape((1,) * (4 - x.ndim) + x.shape)


def watch_closed(
    original: Callable[..., Any],
    names: Mapping[int, str],
    mode: Mode,
    here: Whereabouts,
) -> Callable[..., Any]:
    """Return the forward pass of a module that torch runs otherwise when watched.

    In eval it runs with all modes off, so that torch takes its fast path; then once
    more, only to be seen. In training there is no fast path, and one run is enough.
    """

    def forward(module: nn.Module, *args: Any, **named: Any) -> Any:
        name = names.get(id(module))
        if name is None or here.closed:
            return original(module, *args, **named)
        if module.training or here.shadow:
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
    """Look into the modules of torch that have a fast path of their own."""
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


def add_of(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return a mask as the numbers that torch adds for it."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros_like(mask, dtype=like.dtype)
    return zeros.masked_fill_(mask.logical_not(), -math.inf)


Make = Callable[[Any], Any]
LOCK = threading.RLock()
PATCHED: dict[tuple[int, str], tuple[Any, list[Make]]] = {}


@contextmanager
def put(owner: Any, name: str, make: Make) -> Iterator[None]:
    """Give something the value that `make` makes of it, for a while.

    Several may do so at once and end in any order: what is left is always the original,
    seen through those who still look. When nobody does, it is the original itself.
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
    """Return the original as all of them see it."""
    value = original
    for make in makers:
        value = make(value)
    return value
