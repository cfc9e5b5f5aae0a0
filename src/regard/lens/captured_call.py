"""One attention call, as it is reported to a lens.

    weights[i, j] = exp(capped(scale q_i · k_j) + bias_ij - lse_i)     where allowed

Next: assemble.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.engine.choose import attend
from regard.masks.patterns import causal
from regard.recording.evidence import LseOrigin
from regard.run.attention_interface import unpack_heads
from regard.run.cells import make_four, may_see

SAMPLED = 8  # numbers of a key, its fingerprint
PIECE = "its queries are a piece of an array that this module attends with in pieces"


@dataclass(frozen=True, kw_only=True)
class CapturedCall:
    """One intercepted attention call."""

    via: str = ""
    q: Tensor  # (B, H, Nq, D)
    k: Tensor  # (B, Hk, Nk, D)
    v: Tensor | None = None  # (B, Hk, Nk, Dv)
    out: Tensor | None = None  # (B, H, Nq, Dv)
    lse: Tensor | None = None  # (B, H, Nq), None if not computed yet
    scale: float
    mask: Tensor | None = None  # bool, or numbers to add
    causal: bool = False  # query i may attend to keys 0 … i
    softcap: float | None = None
    sink: Tensor | None = None  # (H,)
    blind: Tensor | None = None  # (B, Nq), rows that may see no key, and average
    valid: Tensor | None = None  # (B, N), tokens that exist, if the call knows
    weights_taken: bool = False  # by a product: `out` is what its softmax gave
    keys_are_new: bool = False  # all keys were computed in this pass, none is cached
    origin: LseOrigin = LseOrigin.KERNEL  # of lse, if there is one
    from_outside: bool = False  # another module computed the operands of its softmax
    has_logits: bool = False  # k is the identity, and q the logits
    is_moved: bool = False  # its operator has these axes in another order
    is_cross: bool = False  # the name of its module says that keys are of another text
    note: str = ""  # what a reader must know
    error: float = 0.0  # of the weights, rebuilt from q and k, if they were compared
    rounding: float = 0.0  # how much of an error the rounding of logits explains

    @cached_property
    def key_fingerprint(self) -> Tensor:
        """A fingerprint of each key, (B, Nk, SAMPLED): numbers of all heads.

        Keys that are not known are NaN, so that they equal none.
        """
        k = self.k.detach()
        if self.has_logits:
            return k.new_full((k.shape[0], k.shape[2], 1), math.nan)
        heads, width = k.shape[1], k.shape[3]
        at = torch.linspace(0, heads * width - 1, min(SAMPLED, heads * width)).long()
        at = at.to(k.device)
        return k[:, at // width, :, at % width].movedim(0, -1).contiguous()


def join_samples(calls: Sequence[CapturedCall]) -> CapturedCall | None:
    """Return the calls of several samples as one, None if they are not alike."""
    joined: dict[str, Any] = {}
    for field in fields(CapturedCall):
        values = [getattr(call, field.name) for call in calls]
        if field.name == "note":  # that samples are pieces of one array is no news
            told = dict.fromkeys(part for x in values for part in x.split("; "))
            values = ["; ".join(part for part in told if part and part != PIECE)]
        if field.name in {
            "error",
            "rounding",
        }:  # each sample has its own; the worst is told
            values = [max(values)]
        if not all(isinstance(x, Tensor) for x in values):
            if any(isinstance(x, Tensor) for x in values) or len(set(values)) != 1:
                return None
            joined[field.name] = values[0]
            continue
        if field.name == "mask":  # of all sequences of a sample
            values = [
                make_four(x).expand(call.q.shape[0], -1, -1, -1)
                for x, call in zip(values, calls, strict=True)
            ]
        if len({x.shape[1:] for x in values}) != 1:
            return None
        joined[field.name] = torch.cat(values)
    return CapturedCall(**joined)


def see_logits(via: str, logits: Tensor) -> CapturedCall:
    """Return a call of which only the logits (B, H, Nq, Nk) are known."""
    keys = torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    allowed = may_see(logits)
    return CapturedCall(
        via=via,
        q=torch.where(allowed, logits, 0),
        k=keys.expand(logits.shape[0], 1, *keys.shape),
        v=None,
        out=None,
        lse=torch.logsumexp(wide, -1),
        origin=LseOrigin.RECORD,
        scale=1.0,
        mask=None if bool(allowed.all()) else allowed,
        has_logits=True,
    )


def unpack_rows(call: CapturedCall) -> CapturedCall:
    """Return a call with the axes of the query, if its q is packed."""
    q, mask = unpack_heads(call.q, call.mask)
    if q.shape == call.q.shape:
        return call
    b, heads, n, _ = q.shape
    out = None if call.out is None else call.out.reshape(b, heads, n, -1)
    lse = None if call.lse is None else call.lse.reshape(b, heads, n)
    blind = None if call.blind is None else call.blind.reshape(b, -1, n).any(1)
    return replace(call, q=q, mask=mask, out=out, lse=lse, blind=blind)


def compute_weights(call: CapturedCall) -> Tensor:
    """Return the weights (B, H, Nq, Nk) of a call that did not return them."""
    allowed, bias = split_mask(call)
    done = attend(
        call.q,
        call.k,
        call.k,
        allowed,
        bias=bias,
        scale=call.scale,
        q_start=0,
        see=("weights",),
    )
    return done.weights


def split_mask(call: CapturedCall) -> tuple[Any, Tensor | None]:
    """Return a call's mask as the engine takes it: a bool mask and a bias."""
    mask = call.mask
    if mask is None:
        return (causal() if call.causal else None), None
    mask = make_four(mask.detach())
    allowed = may_see(mask)
    if mask.dtype == torch.bool:
        return allowed, None
    return allowed, torch.where(allowed, mask, 0).to(call.q.dtype)


def arrange(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the arrays of a call with four axes, broadcast in front as in torch."""
    if q.ndim > 4 or any(x.shape[:-3] != q.shape[:-3] for x in (k, v)):
        lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
        q, k, v = (x.expand(*lead, *x.shape[-3:]) for x in (q, k, v))
        if mask is not None and mask.ndim > 3:
            mask = mask.expand(*lead, *mask.shape[-3:])
    q, k, v = (make_four(x) for x in (q, k, v))
    if q.shape[1] == 1:  # one head of queries for several of keys
        q = q.expand(-1, k.shape[1], -1, -1)
    return q, k, v, None if mask is None else make_four(mask)
