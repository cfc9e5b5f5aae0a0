"""The fused operators of accelerators, with the conventions of the CPU's kernel.

torch has several, and `scaled_dot_product_attention` chooses one of them for each call.
So does this file, with torch's own function, and calls it directly: each returns lse,
which the public function drops. What differs between them is made equal here, and
nowhere else; flash.py and the lens see one convention only.

                   flash        efficient           cudnn          overrideable
    dtypes         half         half, float32       half           any
    shared heads   yes          repeated            yes            yes
    causal mask    square: the two others align it differently     square
    bias           no           dtype of q, rows    not used       yes
                                at multiples of 16
    widths         multiples of 8, and the same for k and v
    lse            (B, H, N)    (B, H, 32 n)        (B, H, N, 1)   (B, H, N)
    lse, empty     inf          0, filled with inf  never empty    0

"Half" is float16 and bfloat16. Overrideable is what torch calls on devices that it does
not know. Apple's and Intel's devices return no lse: `scaled_dot_product_attention` runs
there, and lse is one more pass over the scores (sdpa_with_lse.py).

Next: sdpa_with_lse.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from regard.engine.sdpa_with_lse import (
    attend_with_lse,
    differentiate_by_formula,
    repeat_heads,
)

kernels = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
STEP = 8  # of widths; SDPA pads to it, too
LSE_STEP, BIAS_STEP = 32, 16  # of the efficient operator
WITHOUT_LSE = ("mps", "xpu")
MATH, FLASH, EFFICIENT, CUDNN, OVERRIDEABLE = range(5)  # torch.nn.attention.SDPBackend

Pair = tuple[Tensor, Tensor]
Arrays = tuple[Tensor, Tensor, Tensor]  # q, k, v, or their gradients


@dataclass(frozen=True)
class Operator:
    """A fused operator.

    out, lse   = forward(q, k, v, bias, causal=…, scale=…)
    dq, dk, dv = backward(grad_out, (q, k, v), (out, lse), bias, causal=…, scale=…)
    """

    name: str
    forward: Callable[..., Pair]
    backward: Callable[..., Arrays]
    dtypes: tuple[torch.dtype, ...] = HALF
    widest: float = math.inf  # head width
    widest_backward: float = math.inf


def run_flash(
    q: Tensor, k: Tensor, v: Tensor, _bias: None, *, causal: bool, scale: float
) -> Pair:
    """Return out and lse of flash attention."""
    op = kernels._scaled_dot_product_flash_attention.default  # noqa: SLF001
    out, lse, *_ = op(q, k, v, 0.0, causal, scale=scale)
    return out, read_lse(lse, q.shape[2])


def differentiate_flash(
    grad: Tensor,
    arrays: Arrays,
    whole: Pair,
    _bias: None,
    *,
    causal: bool,
    scale: float,
) -> Arrays:
    """Return the gradients of q, k and v by flash attention."""
    (q, k, _), (out, lse) = arrays, whole
    op = kernels._scaled_dot_product_flash_attention_backward.default  # noqa: SLF001
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # nothing is dropped
    sizes = (None, None, q.shape[2], k.shape[2])
    given = (grad, *arrays, out, write_lse(lse), *sizes, 0.0, causal, seed, seed[0])
    found: Arrays = op(*given, scale=scale)
    return found


def run_efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> Pair:
    """Return out and lse of memory-efficient attention."""
    op = kernels._scaled_dot_product_efficient_attention.default  # noqa: SLF001
    wide = prepare_efficient((q, k, v), bias)
    with_lse = True
    given = (*wide, align_bias(bias, *wide[:2]), with_lse, 0.0, causal)
    out, lse, *_ = op(*given, scale=scale)
    return out.to(q.dtype), read_lse(lse, q.shape[2])


def differentiate_efficient(
    grad: Tensor,
    arrays: Arrays,
    whole: Pair,
    bias: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> Arrays:
    """Return the gradients of q, k and v by memory-efficient attention."""
    (q, k, _), (out, lse) = arrays, whole
    op = kernels._scaled_dot_product_efficient_attention_backward.default  # noqa: SLF001
    wide = prepare_efficient(arrays, bias)
    dtype, bias = wide[0].dtype, align_bias(bias, *wide[:2])
    seed = torch.zeros((), dtype=torch.long, device=q.device)  # nothing is dropped
    known = (bias, out.to(dtype), write_lse(lse, LSE_STEP), seed, seed, 0.0)
    asked = [True, True, True, False]
    dq, dk, dv, _ = op(grad.to(dtype), *wide, *known, asked, causal, scale=scale)
    dk, dv = sum_heads(k, dk, dv)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def prepare_efficient(arrays: Arrays, bias: Tensor | None) -> Arrays:
    """Return q, k and v with a head of keys for every query, as wide as the bias.

    A bias with more digits than q is not rounded: q, k and v are widened instead.
    """
    q, k, v = arrays
    if q.shape[1] > k.shape[1]:
        k, v = repeat_heads(k, q), repeat_heads(v, q)
    if bias is not None and bias.dtype != q.dtype:
        q, k, v = (x.to(bias.dtype) for x in (q, k, v))
    return q, k, v


def sum_heads(k: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the shared heads of k and v."""
    heads = (k.shape[1], -1)
    return dk.unflatten(1, heads).sum(2), dv.unflatten(1, heads).sum(2)


def align_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return a bias (B, H, Nq, Nk) whose rows begin at multiples of BIAS_STEP."""
    if bias is None:
        return None
    n_k = k.shape[2]
    missing = -n_k % BIAS_STEP
    if missing:
        bias = F.pad(bias, (0, missing))[..., :n_k]
    elif bias.stride(-1) != 1 or any(x % BIAS_STEP for x in bias.stride()[:-1]):
        bias = bias.contiguous()
    return bias.expand(*q.shape[:3], n_k)


def run_cudnn(
    q: Tensor, k: Tensor, v: Tensor, _bias: None, *, causal: bool, scale: float
) -> Pair:
    """Return out and lse of cuDNN's attention."""
    op = kernels._scaled_dot_product_cudnn_attention.default  # noqa: SLF001
    with_lse = True
    out, lse, *_ = op(q, k, v, None, with_lse, 0.0, causal, scale=scale)
    return out, read_lse(lse, q.shape[2])


def differentiate_cudnn(
    grad: Tensor,
    arrays: Arrays,
    whole: Pair,
    _bias: None,
    *,
    causal: bool,
    scale: float,
) -> Arrays:
    """Return the gradients of q, k and v by cuDNN's attention."""
    (q, k, _), (out, lse) = arrays, whole
    op = kernels._scaled_dot_product_cudnn_attention_backward.default  # noqa: SLF001
    seed = torch.zeros((), dtype=torch.long, device=q.device)  # nothing is dropped
    known = (out, write_lse(lse)[..., None], seed, seed, None)
    sizes = (None, None, q.shape[2], k.shape[2])
    found: Arrays = op(grad, *arrays, *known, *sizes, 0.0, causal, scale=scale)
    return found


def run_overrideable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> Pair:
    """Return out and lse of the operator of a device that torch does not know."""
    op = kernels._scaled_dot_product_fused_attention_overrideable.default  # noqa: SLF001
    out, lse, *_ = op(q, k, v, bias, 0.0, causal, scale=scale)
    return out, read_lse(lse, q.shape[2])


def differentiate_overrideable(
    grad: Tensor,
    arrays: Arrays,
    whole: Pair,
    bias: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> Arrays:
    """Return the gradients of q, k and v on a device that torch does not know."""
    (q, k, _), (out, lse) = arrays, whole
    op = kernels._scaled_dot_product_fused_attention_overrideable_backward.default  # noqa: SLF001
    seed = torch.zeros((), dtype=torch.long, device=q.device)  # nothing is dropped
    asked, sizes = [True, True, True, False], (None, None, q.shape[2], k.shape[2])
    known = (bias, asked, out, write_lse(lse), *sizes, 0.0, causal, seed, seed)
    dq, dk, dv, _ = op(grad, *arrays, *known, scale=scale)
    return dq, dk, dv


def read_lse(lse: Tensor, n_q: int) -> Tensor:
    """Return the lse of any operator as (B, H, Nq), with -inf for an empty row.

    Rows that the efficient operator and the CPU's kernel leave empty have 0, which is
    a possible lse: the caller knows the mask.
    """
    lse = lse[..., 0] if lse.ndim == 4 else lse[..., :n_q]
    return lse.masked_fill(lse == math.inf, -math.inf)


def write_lse(lse: Tensor, step: int = 1) -> Tensor:
    """Return lse for a backward pass: inf gives an empty row the weights 0."""
    lse = F.pad(lse, (0, -lse.shape[-1] % step), value=math.inf)
    return lse.masked_fill(lse == -math.inf, math.inf).contiguous()


def allow_tall(forward: Callable[..., Pair]) -> Callable[..., Pair]:
    """Return a forward pass whose causal mask may have more rows than keys.

    Rows behind the last key attend to all keys: they are a call without a mask.
    """

    def run(
        q: Tensor, k: Tensor, v: Tensor, bias: Any, *, causal: bool, scale: float
    ) -> Pair:
        n = k.shape[2]
        if not causal or q.shape[2] <= n:
            k, v = (x[:, :, : q.shape[2]] for x in (k, v)) if causal else (k, v)
            return forward(q, k, v, bias, causal=causal, scale=scale)
        near = forward(q[:, :, :n], k, v, None, causal=True, scale=scale)
        far = forward(q[:, :, n:], k, v, None, causal=False, scale=scale)
        return torch.cat([near[0], far[0]], 2), torch.cat([near[1], far[1]], 2)

    return run


def allow_tall_backward(backward: Callable[..., Arrays]) -> Callable[..., Arrays]:
    """Return a backward pass whose causal mask may have more rows than keys."""

    def run(
        grad: Tensor,
        arrays: Arrays,
        whole: Pair,
        bias: Any,
        *,
        causal: bool,
        scale: float,
    ) -> Arrays:
        q, k, v = arrays
        n, more = k.shape[2], k.shape[2] - q.shape[2]
        if not causal or more == 0:
            return backward(grad, arrays, whole, bias, causal=causal, scale=scale)
        if more > 0:
            seen = (q, *(x[:, :, : q.shape[2]] for x in (k, v)))
            dq, *others = backward(grad, seen, whole, None, causal=True, scale=scale)
            dk, dv = (F.pad(x, (0, 0, 0, more)) for x in others)
            return dq, dk, dv
        near, far = slice(0, n), slice(n, None)
        parts = [
            backward(
                grad[:, :, rows],
                (q[:, :, rows], k, v),
                (whole[0][:, :, rows], whole[1][:, :, rows]),
                None,
                causal=rows is near,
                scale=scale,
            )
            for rows in (near, far)
        ]
        (first, dk, dv), (rest, more_k, more_v) = parts
        return torch.cat([first, rest], 2), dk + more_k, dv + more_v

    return run


def make_operator(name: str, forward: Any, backward: Any, **about: Any) -> Operator:
    """Return an operator that takes causal masks of any shape."""
    return Operator(name, allow_tall(forward), allow_tall_backward(backward), **about)


EVERY = (*HALF, torch.float32, torch.float64)
OPERATORS = {
    FLASH: make_operator(
        # its backward pass refuses more on consumer cards
        "flash attention",
        run_flash,
        differentiate_flash,
        widest=256,
        widest_backward=192,
    ),
    EFFICIENT: make_operator(
        "memory-efficient attention",
        run_efficient,
        differentiate_efficient,
        dtypes=(*HALF, torch.float32),
    ),
    CUDNN: make_operator(
        "cuDNN's attention",
        run_cudnn,
        differentiate_cudnn,
        widest=128,
        widest_backward=128,
    ),
    OVERRIDEABLE: make_operator(
        "the device's fused attention",
        run_overrideable,
        differentiate_overrideable,
        dtypes=EVERY,
    ),
}
BY_SDPA = make_operator(
    "scaled_dot_product_attention, and lse in a pass of its own",
    attend_with_lse,
    differentiate_by_formula,
    dtypes=EVERY,
)


def find_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    backward: bool = False,
) -> Operator | None:
    """Return the operator that SDPA would choose for arrays of a device, or None.

    A bias, and heads that are too wide, are left to the efficient operator.
    """
    if q.device.type in WITHOUT_LSE:
        return BY_SDPA
    width = round_width(max(q.shape[-1], v.shape[-1]))
    sized = [
        x if x.shape[-1] == width else x.new_empty(*x.shape[:-1], width)
        for x in (q, k, v)
    ]
    choice = torch._fused_sdp_choice(  # noqa: SLF001
        *sized, bias, scale=1.0, enable_gqa=q.shape[1] != k.shape[1]
    )
    if choice == MATH or choice not in OPERATORS:
        return None
    found = OPERATORS[choice]
    widest = found.widest_backward if backward else found.widest
    takes = bias is None or choice == OVERRIDEABLE
    if not takes or width > widest or q.dtype not in found.dtypes:
        found = OPERATORS[EFFICIENT]
    return found if q.dtype in found.dtypes else None


def round_width(width: int) -> int:
    """Return the width to which arrays of a device are padded."""
    return -(-width // STEP) * STEP
