"""Attention on devices whose fused kernel returns no lse.

    out    scaled_dot_product_attention
    lse    one more pass over the scores, a few hundred rows at a time
    dq …   P = exp(scores - lse),  dS = P (grad_out vᵀ - grad_out · out)

Both calls have the signature of an Operator (device_operators.py).

Next: device_operators.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

ROWS = 512  # whose scores are held at a time


def attend_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return out and lse; an empty row has 0 and -inf."""
    grouped = q.shape[1] != k.shape[1]
    mask = None if bias is None else bias.to(q.dtype)
    out = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    scores = list_scores(q, k, bias, causal=causal, scale=scale)
    lse = torch.cat([x.logsumexp(-1) for _, x in scores], 2)
    return out.masked_fill(lse[..., None] == -math.inf, 0), lse


def differentiate_by_formula(
    grad: Tensor,
    arrays: tuple[Tensor, Tensor, Tensor],
    whole: tuple[Tensor, Tensor],
    bias: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the lse of the whole row."""
    (q, k, v), (out, lse) = arrays, whole
    wide = lse.dtype
    grad, out, lse = grad.to(wide), out.to(wide), lse[..., None]
    dot = (grad * out).sum(-1, keepdim=True)
    lse = lse.masked_fill(lse == -math.inf, 0)  # exp(-inf - 0) is 0, as required
    k_wide, v_wide = (repeat_heads(x, q).to(wide) for x in (k, v))
    dq = torch.empty_like(q)
    dk, dv = torch.zeros_like(k_wide), torch.zeros_like(v_wide)
    for rows, scores in list_scores(q, k, bias, causal=causal, scale=scale):
        weights = torch.exp(scores - lse[:, :, rows])
        slope = weights * (grad[:, :, rows] @ v_wide.mT - dot[:, :, rows]) * scale
        dq[:, :, rows] = (slope @ k_wide).to(q.dtype)
        dk += slope.mT @ q[:, :, rows].to(wide)
        dv += weights.mT @ grad[:, :, rows]
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2).to(q.dtype) for x in (dk, dv))
    return dq, dk, dv


def list_scores(
    q: Tensor, k: Tensor, bias: Tensor | None, *, causal: bool, scale: float
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the scores (B, H, rows, Nk) of some rows at a time, at least float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k = repeat_heads(k, q).to(wide)
    at = torch.arange(k.shape[2], device=q.device)
    for first in range(0, q.shape[2], ROWS):
        rows = slice(first, min(first + ROWS, q.shape[2]))
        scores = q[:, :, rows].to(wide) @ k.mT * scale
        if bias is not None:
            scores = scores + bias[:, :, rows]
        if causal:
            later = at > torch.arange(first, rows.stop, device=q.device)[:, None]
            scores = scores.masked_fill(later, -math.inf)
        yield rows, scores


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Return k or v with a head for every head of q."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)
