"""One call of attention as it passed a door: what a lens is told.

    weights[i, j] = exp(scale * q_i · k_j - lse_i)        where the mask allows

Next: edit.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.engine.choose import attend


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


def see_logits(door: str, logits: Tensor) -> Sight:
    """Return a call of which only the logits (B, H, Nq, Nk) are known."""
    keys = torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    allowed = may_see(logits)
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


def weigh(sight: Sight) -> Tensor:
    """Return the weights (B, H, Nq, Nk) of a call that did not write them down."""
    mask, bias = sight.mask, None
    if mask is not None and mask.is_floating_point():
        mask, bias = mask > -math.inf, mask.masked_fill(mask == -math.inf, 0)
    if sight.causal:
        mask = torch.ones(sight.q.shape[2], sight.k.shape[2], dtype=torch.bool).tril()
    see = ("weights",)
    done = attend(
        sight.q, sight.k, sight.k, mask, bias=bias, scale=sight.scale, see=see
    )
    return done.weights


def may_see(mask: Tensor) -> Tensor:
    """Return a mask as truth values; the lowest numbers, and -inf, hide a cell."""
    if not mask.is_floating_point():
        return mask.bool()
    return mask > torch.finfo(mask.dtype).min / 2


def make_four(x: Tensor) -> Tensor:
    """Return x as (B, H, N, D): axes are added in front, or put together there."""
    if x.ndim == 4:
        return x
    return x.flatten(0, -4) if x.ndim > 4 else x.reshape((1,) * (4 - x.ndim) + x.shape)
