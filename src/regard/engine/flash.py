"""One call of torch's fused CPU kernel, with lse, made safe.

    out, lse       = attend_part(q, k, v, bias)
    dq, dk, dv     = differentiate_part(...)        from the lse of the whole row

The kernel is the one behind scaled_dot_product_attention on a CPU. It never holds more
than a few rows of scores, returns lse, and shares heads of K without copying. Asked
directly it has traps; each is guarded in this file, the bias in tiles.py:

    no keys at all           kills the process          -> 0 and -inf, without a call
    a row that sees nothing  lse is 0                   -> -inf
    a bias of another dtype  wrong numbers              -> written as wide as lse
    NaN behind the mask      NaN + -inf is NaN          -> blind rows, unseen keys are 0
    Dv other than D          refused                    -> padded with zeros
    a last axis with gaps    wrong numbers              -> copied
    causal, scale <= 0       -inf times scale           -> the sign goes into q
    scores beyond its dtype  NaN, or a row of nothing   -> RangeError; see choose.py
    NaN in a key             reaches rows without it    -> RangeError

Next: sdpa.py
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.arrays import accumulator, namespace

kernels = torch.ops.aten
forward = kernels._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001
backward = kernels._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001


class RangeError(ArithmeticError):
    """The kernel met numbers that it cannot handle; the definition can."""


def attend_part(
    q: Tensor,  # (B, H, Nq, D)
    k: Tensor,  # (B, Hk, Nk, D)
    v: Tensor,  # (B, Hk, Nk, Dv)
    bias: Tensor | None = None,  # (B or 1, H or 1, Nq, Nk), -inf where masked
    *,
    causal: bool = False,  # query i sees the keys 0 … i
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return out (B, H, Nq, Dv) and lse (B, H, Nq) over these keys."""
    if k.shape[-2] == 0 or q.shape[-2] == 0:
        wide = accumulator(namespace(q=q), q)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        return out, out.new_full(q.shape[:-1], -math.inf, dtype=wide)
    q, scale, _ = move_sign(q, scale, causal=causal)
    if bias is None and q.shape[-1] == v.shape[-1]:
        q, k, v = (close(x) for x in (q, k, v))
        out, lse = forward(q, k, v, 0.0, causal, scale=scale)
        check_range(q, k, out, lse)
        return out, lse
    width = max(q.shape[-1], v.shape[-1])
    empty = None
    if bias is not None:
        empty = find_empty(bias)
        q, k, v = hide_blind(q, empty), hide_unseen(k, bias), hide_unseen(v, bias)
    out, lse = forward(
        pad(q, width),
        pad(k, width),
        pad(v, width),
        0.0,
        causal,
        attn_mask=bias,
        scale=scale,
    )
    check_range(q, k, out, lse, empty)
    if empty is not None:
        lse = lse.masked_fill(empty, -math.inf)
    return out[..., : v.shape[-1]], lse


def differentiate_part(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    arrays: tuple[Tensor, Tensor, Tensor],  # q, k, v of this part
    whole: tuple[Tensor, Tensor],  # out and lse over all keys, for the rows of q
    bias: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what this part of the keys adds to the gradients of q, k and v.

    With P = exp(logits - lse) the kernel computes dlogits = P (grad_out vᵀ - D), where
    D = grad_out · out. A gradient of lse adds P grad_lse, that is, D - grad_lse in the
    place of D: one more column, 1 in grad_out, -grad_lse in out and 0 in v, does it.
    """
    (q, k, v), (out, lse) = arrays, whole
    if k.shape[-2] == 0 or q.shape[-2] == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    width = max(q.shape[-1], v.shape[-1] + (grad_lse is not None))
    q, scale, sign = move_sign(q, scale, causal=causal)
    if bias is not None:
        q = hide_blind(q, find_empty(bias))
        k, v = hide_unseen(k, bias), hide_unseen(v, bias)
    if grad_lse is not None:
        column = grad_lse[..., None].to(out.dtype)
        out = torch.cat([out, -column], -1)
        grad_out = torch.cat([grad_out, torch.ones_like(column)], -1)
    lse = lse.masked_fill(lse == -math.inf, 0)  # exp(-inf - 0) is 0, as it should
    wide = [pad(x, width) for x in (grad_out, q, k, v, out)]
    dq, dk, dv = backward(*wide, lse, 0.0, causal, attn_mask=bias, scale=scale)
    d = q.shape[-1]
    dq = dq if sign == 1 else dq * sign
    return dq[..., :d], dk[..., :d], dv[..., : v.shape[-1]]


def move_sign(q: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, float, int]:
    """Return q times -1, 0 or 1, a scale above 0, and that factor.

    The kernel multiplies by the scale after it has written -inf ahead of the diagonal.
    """
    if scale > 0 or not causal:
        return q, scale, 1
    sign = -1 if scale < 0 else 0
    return q * sign, -scale or 1.0, sign


def check_range(
    q: Tensor, k: Tensor, out: Tensor, lse: Tensor, empty: Tensor | None = None
) -> None:
    """Raise RangeError if scores or sums overflowed, or NaN spread from a masked key.

    If all scores of a row overflow to -inf, the kernel gives it an lse of 0. Compilers
    and vmap have no numbers to look at: there such rows stay as the kernel left them.
    """
    if torch.compiler.is_compiling():
        return
    known = lse if empty is None else lse.masked_fill(empty, 1)
    try:  # one sum is quick to look at, and finite if all is well and no lse is 0
        if math.isfinite((known + known.reciprocal()).sum() + out.sum(dtype=lse.dtype)):
            return
    except RuntimeError:
        return
    largest = q.abs().amax().double() * k.abs().amax().double() * q.shape[-1]
    in_range = largest < torch.finfo(lse.dtype).max
    if not (in_range & torch.isfinite(known).all() & torch.isfinite(out).all()):
        raise RangeError


def hide_blind(q: Tensor, empty: Tensor) -> Tensor:
    """Put 0 where a query is blind, that is, sees nothing."""
    return torch.where(empty[..., None], 0, q)


def find_empty(bias: Tensor) -> Tensor:
    """Tell which rows (B or 1, H or 1, Nq) see nothing."""
    return (bias == -math.inf).all(-1)


def hide_unseen(x: Tensor, bias: Tensor) -> Tensor:
    """Put 0 where no query may look; x is k or v."""
    seen = (bias != -math.inf).any(-2).any(-2)  # (B or 1, Nk)
    return torch.where(seen[:, None, :, None], x, 0)


def pad(x: Tensor, width: int) -> Tensor:
    """Fill the last axis up with zeros; scores and sums do not notice."""
    missing = width - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else close(x)


def close(x: Tensor) -> Tensor:
    """Return x with the numbers of its last axis side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
