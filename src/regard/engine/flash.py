"""A safe wrapper around torch's fused attention kernels, with lse.

    out, lse       = attend_part(q, k, v, bias)
    dq, dk, dv     = differentiate_part(...)        given the lse of the whole row

This is the kernel behind scaled_dot_product_attention on a CPU; on other devices,
device_operators.py finds one that behaves like it. It holds only a few rows of scores
at a time, returns lse, and shares heads of K without copies. Called directly it has
pitfalls, which this file (for the bias dtype, tiles.py) works around:

    zero keys                crashes the process        -> 0 and -inf, without a call
    a fully masked row       lse is 0                   -> -inf
    a bias of another dtype  wrong results              -> converted to the dtype of lse
    NaN in masked positions  NaN + -inf is NaN          -> masked rows and keys set to 0
    Dv different from D      raises an error            -> padded with zeros
    last axis not contiguous wrong results              -> copied
    causal, scale <= 0       -inf times scale           -> the sign is moved into q
    any scale <= 0, on GPUs  the wrong maximum          -> the same
    shared heads, old torch  reads other memory         -> repeated
    scores overflow          NaN, or an empty row       -> RangeError; see choose.py
    NaN in a key             affects masked rows        -> RangeError

Next: device_operators.py
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.arrays import accumulator, namespace
from regard.engine.device_operators import (
    Arrays,
    Operator,
    find_operator,
    round_width,
    sum_heads,
)
from regard.engine.sdpa_with_lse import repeat_heads

kernels = torch.ops.aten
forward = kernels._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001
backward = kernels._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001


class RangeError(ArithmeticError):
    """The values are outside of the kernel's range; the definition can handle them."""


def run_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of the CPU's kernel."""
    if not SHARES_HEADS and q.shape[1] > k.shape[1]:
        k, v = repeat_heads(k, q), repeat_heads(v, q)
    out, lse = forward(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out, lse


def differentiate_cpu(
    grad: Tensor,
    arrays: Arrays,
    whole: tuple[Tensor, Tensor],
    bias: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> Arrays:
    """Return the gradients of q, k and v by the CPU's kernel."""
    q, k, v = arrays
    repeated = not SHARES_HEADS and q.shape[1] > k.shape[1]
    wide = (repeat_heads(k, q), repeat_heads(v, q)) if repeated else (k, v)
    given = (grad, q, *wide, *whole, 0.0, causal)
    dq, dk, dv = backward(*given, attn_mask=bias, scale=scale)
    return (dq, *sum_heads(k, dk, dv)) if repeated else (dq, dk, dv)


def detect_shared_heads() -> bool:
    """Return whether the CPU's kernel shares heads of K; old ones read behind them."""
    x = torch.arange(2.0, device="cpu").reshape(1, 2, 1, 1)  # a head behind the given
    return not forward(x, x[:, :1], x[:, :1])[0].any()


SHARES_HEADS = detect_shared_heads()
CPU = Operator("the CPU's kernel", run_cpu, differentiate_cpu)


def attend_part(
    q: Tensor,  # (B, H, Nq, D)
    k: Tensor,  # (B, Hk, Nk, D)
    v: Tensor,  # (B, Hk, Nk, Dv)
    bias: Tensor | None = None,  # (B or 1, H or 1, Nq, Nk), -inf where masked
    *,
    causal: bool = False,  # query i attends to keys 0 … i
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return out (B, H, Nq, Dv) and lse (B, H, Nq) over these keys."""
    if k.shape[-2] == 0 or q.shape[-2] == 0:
        wide = accumulator(namespace(q=q), q)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        return out, out.new_full(q.shape[:-1], -math.inf, dtype=wide)
    kernel, width = CPU, max(q.shape[-1], v.shape[-1])
    if q.device.type != "cpu":
        kernel, width = expect_operator(q, k, v, bias), round_width(width)
    q, scale, _ = move_sign(q, scale, masked=causal or kernel is not CPU)
    if bias is None and width == q.shape[-1] == v.shape[-1]:
        q, k, v = (make_contiguous(x) for x in (q, k, v))
        out, lse = kernel.forward(q, k, v, None, causal=causal, scale=scale)
        check_range(q, k, out, lse)
        return out, lse
    empty = None
    if bias is not None:
        empty = find_masked_rows(bias)
        q, k, v = zero_masked_rows(q, empty), zero_unseen(k, bias), zero_unseen(v, bias)
    wide = [pad(x, width) for x in (q, k, v)]
    out, lse = kernel.forward(*wide, bias, causal=causal, scale=scale)
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
    """Return the contribution of these keys to the gradients of q, k and v.

    With P = exp(logits - lse) the kernel computes dlogits = P (grad_out vᵀ - D), where
    D = grad_out · out. The gradient of lse adds P grad_lse, so D becomes D - grad_lse.
    An extra column achieves this: 1 in grad_out, -grad_lse in out, 0 in v.
    """
    (q, k, v), (out, lse) = arrays, whole
    if k.shape[-2] == 0 or q.shape[-2] == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    width = max(q.shape[-1], v.shape[-1] + (grad_lse is not None))
    kernel = CPU
    if q.device.type != "cpu":
        width = round_width(width)
        kernel = expect_operator(q, k, pad(v, width), bias, backward=True)
    q, scale, sign = move_sign(q, scale, masked=causal or kernel is not CPU)
    if bias is not None:
        q = zero_masked_rows(q, find_masked_rows(bias))
        k, v = zero_unseen(k, bias), zero_unseen(v, bias)
    if grad_lse is not None:
        column = grad_lse[..., None].to(out.dtype)
        out = torch.cat([out, -column], -1)
        grad_out = torch.cat([grad_out, torch.ones_like(column)], -1)
    lse = lse.masked_fill(lse == -math.inf, 0)  # exp(-inf - 0) is 0, as required
    # torch 2.15 compiles no generator here
    grad_out, out, *wide = [pad(x, width) for x in (grad_out, out, q, k, v)]
    known = (grad_out, wide, (out, lse), bias)
    dq, dk, dv = kernel.backward(*known, causal=causal, scale=scale)
    d = q.shape[-1]
    dq = dq if sign == 1 else dq * sign
    return dq[..., :d], dk[..., :d], dv[..., : v.shape[-1]]


def expect_operator(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, backward: bool = False
) -> Operator:
    """Return the operator for arrays of a device; RangeError if there is none."""
    found = find_operator(q, k, v, bias, backward=backward)
    if found is None:
        raise RangeError
    return found


def move_sign(q: Tensor, scale: float, *, masked: bool) -> tuple[Tensor, float, int]:
    """Return q times the sign of the scale, a positive scale, and the sign.

    The causal kernel multiplies by the scale after masking with -inf.
    """
    if scale > 0 or not masked:
        return q, scale, 1
    sign = -1 if scale < 0 else 0
    return q * sign, -scale or 1.0, sign


def check_range(
    q: Tensor, k: Tensor, out: Tensor, lse: Tensor, empty: Tensor | None = None
) -> None:
    """Raise RangeError if scores or sums overflowed, or NaN spread from a masked key.

    If all scores of a row overflow to -inf, the kernel returns an lse of 0. Under
    torch.compile and vmap no values are available, so nothing is checked.
    """
    if torch.compiler.is_compiling():
        return
    known = lse if empty is None else lse.masked_fill(empty, 1)
    try:  # a cheap test: this sum is finite if all values are and no lse is 0
        if math.isfinite((known + known.reciprocal()).sum() + out.sum(dtype=lse.dtype)):
            return
    except RuntimeError:
        return
    largest = q.abs().amax().double() * k.abs().amax().double() * q.shape[-1]
    in_range = largest < torch.finfo(lse.dtype).max
    if not (in_range & torch.isfinite(known).all() & torch.isfinite(out).all()):
        raise RangeError


def zero_masked_rows(q: Tensor, empty: Tensor) -> Tensor:
    """Return q with 0 in fully masked rows."""
    return torch.where(empty[..., None], 0, q)


def find_masked_rows(bias: Tensor) -> Tensor:
    """Return which rows (B or 1, H or 1, Nq) are fully masked."""
    return (bias == -math.inf).all(-1)


def zero_unseen(x: Tensor, bias: Tensor) -> Tensor:
    """Return k or v with 0 at keys that no query may attend to."""
    seen = (bias != -math.inf).any(-2).any(-2)  # (B or 1, Nk)
    return torch.where(seen[:, None, :, None], x, 0)


def pad(x: Tensor, width: int) -> Tensor:
    """Pad the last axis with zeros, which do not change scores and sums."""
    missing = width - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else make_contiguous(x)


def make_contiguous(x: Tensor) -> Tensor:
    """Return x with a contiguous last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()
