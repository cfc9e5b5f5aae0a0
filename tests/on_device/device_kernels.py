"""The attention operators of the simulated device, which is what SDPA calls there.

    overrideable     what torch calls on a device that it does not know: the CPU's
                     kernel, so the bits are those of the CPU
    flash            stand-ins for CUDA's operators, computed by a formula, with their
    efficient        signatures, shapes and refusals: torch/_meta_registrations.py has
    cudnn            the shapes; kernel_forward.h and FlashAttention 2 have the rest

CALLS counts the calls of each. Next: conftest.py
"""

import math
from collections import Counter

import torch
from torch.nn import functional as F  # noqa: N812

ATEN = torch.library.Library("aten", "IMPL")
HALF = (torch.float16, torch.bfloat16)
CALLS = Counter()
on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
on_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def put_beside(out, lse, q, k):
    """Return a result of nine parts, of which only the first two mean anything."""
    none = torch.empty(0, dtype=torch.long, device=q.device)
    return out, lse, none, none, q.shape[2], k.shape[2], none, none, none


def attend_overrideable(
    q, k, v, bias=None, dropout=0.0, causal=False, debug=False, *, scale=None
):
    CALLS["overrideable"] += 1
    out, lse = on_cpu(q, k, v, dropout, causal, attn_mask=bias, scale=scale)
    return put_beside(out, lse, q, k)


def differentiate_overrideable(grad, q, k, v, bias, asked, out, lse, *rest, scale=None):
    CALLS["overrideable backward"] += 1
    _, _, _, _, dropout, causal, _, _ = rest
    known = (grad, q, k, v, out, lse, dropout, causal)
    found = on_cpu_backward(*known, attn_mask=bias, scale=scale)
    return *found, torch.zeros_like(q[..., 0])


# --- formulas -------------------------------------------------------------------------


def refuse(*, that, because):
    """Raise as an operator does that was given what it does not take."""
    if that:
        raise RuntimeError(because)


def check_widths(q, k, v, widest, dtypes):
    refuse(that=q.dtype not in dtypes, because=f"{q.dtype} is not supported")
    refuse(that=q.shape[-1] % 8, because="head_size should be a multiple of 8")
    refuse(that=q.shape[-1] > widest, because=f"head_size of at most {widest}")
    refuse(
        that=any(x.stride(-1) != 1 for x in (q, k, v)),
        because="the last axis must be contiguous",
    )
    refuse(that=len({x.dtype for x in (q, k, v)}) > 1, because="one dtype")


def score(q, k, bias, offset, scale):
    """Return scores (B, H, Nq, Nk); offset: query i attends to keys up to i + offset."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.float() @ k.float().mT * scale
    if bias is not None:
        scores = scores + bias.float()
    if offset is not None:
        n_q, n_k = scores.shape[-2:]
        later = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device).triu(offset + 1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def attend(q, k, v, bias, offset, scale):
    """Return out, 0 in an empty row, and lse."""
    scores = score(q, k, bias, offset, scale)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[..., None])
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (weights @ v.float()).to(q.dtype), lse


def differentiate(grad, arrays, out, lse, bias, offset, scale):
    """Return the gradients, with the weights exp(scores - lse)."""
    q, k, v = arrays
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    weights = torch.exp(score(q, k, bias, offset, scale) - lse[..., None])
    times = q.shape[1] // k.shape[1]
    shared = [x.repeat_interleave(times, 1).float() for x in (k, v)]
    dot = (grad.float() * out.float()).sum(-1, keepdim=True)
    slope = weights * (grad.float() @ shared[1].mT - dot) * factor
    dk, dv = slope.mT @ q.float(), weights.mT @ grad.float()
    dk, dv = (x.unflatten(1, (-1, times)).sum(2) for x in (dk, dv))
    return (slope @ shared[0]).to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


# --- flash: half precision, no bias, causal from the lower right, inf in empty rows -----


def attend_flash(q, k, v, dropout=0.0, causal=False, debug=False, *, scale=None):
    CALLS["flash"] += 1
    check_widths(q, k, v, 256, HALF)
    refuse(that=q.shape[-1] != v.shape[-1], because="one head_size")
    # it subtracts scale times the largest product, which is the smallest score
    refuse(that=scale is not None and scale <= 0, because="a positive scale")
    out, lse = attend(q, k, v, None, k.shape[2] - q.shape[2] if causal else None, scale)
    return put_beside(out, lse.masked_fill(lse == -math.inf, math.inf), q, k)


def differentiate_flash(grad, q, k, v, out, lse, *rest, scale=None):
    CALLS["flash backward"] += 1
    check_widths(q, k, v, 192, HALF)
    refuse(that=lse.shape != q.shape[:3], because="lse is (B, H, N)")
    *_, causal, _, _ = rest
    offset = k.shape[2] - q.shape[2] if causal else None
    return differentiate(grad, (q, k, v), out, lse, None, offset, scale)


# --- efficient: a head of keys for each of q, aligned bias, padded lse ------------------


def check_efficient(q, k, v, bias):
    check_widths(q, k, v, math.inf, (*HALF, torch.float32))
    refuse(that=q.shape[1] != k.shape[1], because="as many heads of k as of q")
    if bias is None:
        return
    refuse(that=bias.dtype != q.dtype, because="bias has the dtype of q")
    refuse(that=bias.shape != (*q.shape[:3], k.shape[2]), because="bias has four axes")
    refuse(that=bias.stride(-1) != 1, because="the last axis must be contiguous")
    for axis in range(3):
        odd = bias.shape[axis] > 1 and bias.stride(axis) % 8
        refuse(that=odd, because="attn_bias is not correctly aligned")


def attend_efficient(
    q, k, v, bias, compute_lse, dropout=0.0, causal=False, *, scale=None
):
    CALLS["efficient"] += 1
    check_efficient(q, k, v, bias)
    out, lse = attend(q, k, v, bias, 0 if causal else None, scale)
    lse = lse.masked_fill(lse == -math.inf, 0)
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    none = torch.zeros((), dtype=torch.long, device=q.device)
    return out, lse if compute_lse else lse[..., :0].contiguous(), none, none


def differentiate_efficient(
    grad, q, k, v, bias, out, lse, seed, offset, dropout, asked, causal=False, *, scale
):
    CALLS["efficient backward"] += 1
    check_efficient(q, k, v, bias)
    refuse(that=lse.shape[-1] % 32, because="lse is padded to a multiple of 32")
    lse = lse[..., : q.shape[2]]
    found = differentiate(grad, (q, k, v), out, lse, bias, 0 if causal else None, scale)
    return *found, torch.zeros_like(q[..., 0])


# --- cuDNN: half precision, narrow heads, an axis behind lse ----------------------------


def attend_cudnn(
    q,
    k,
    v,
    bias,
    compute_lse,
    dropout=0.0,
    causal=False,
    debug=False,
    *,
    scale=None,
):
    CALLS["cudnn"] += 1
    check_widths(q, k, v, 128, HALF)
    refuse(that=causal and q.shape[2] != k.shape[2], because="a square causal mask")
    out, lse = attend(q, k, v, bias, 0 if causal else None, scale)
    lse = lse[..., None] if compute_lse else lse[..., :0]
    return put_beside(out, lse.contiguous(), q, k)


def differentiate_cudnn(grad, q, k, v, out, lse, seed, offset, bias, *rest, scale=None):
    CALLS["cudnn backward"] += 1
    check_widths(q, k, v, 128, HALF)
    refuse(that=lse.shape != (*q.shape[:3], 1), because="lse is (B, H, N, 1)")
    *_, causal = rest
    known = (out, lse[..., 0], bias, 0 if causal else None)
    return differentiate(grad, (q, k, v), *known, scale)


def count_values(x, bins=100, min=0, max=0):  # noqa: A002
    """Count values; GPUs do this for integers, too, the CPU does not."""
    out = torch.empty(0, device=x.device)
    return torch.ops.aten.histc.out(x.float(), bins, min, max, out=out)


def register_kernels():
    """Make the operators known to torch."""
    ATEN.impl("histc", count_values, "PrivateUse1")
    operators = {
        "fused_attention_overrideable": (
            attend_overrideable,
            differentiate_overrideable,
        ),
        "flash_attention": (attend_flash, differentiate_flash),
        "efficient_attention": (attend_efficient, differentiate_efficient),
        "cudnn_attention": (attend_cudnn, differentiate_cudnn),
    }
    for name, (forward, backward) in operators.items():
        full = f"_scaled_dot_product_{name}"
        ATEN.impl(full, forward, "PrivateUse1")
        ATEN.impl(f"{full}_backward", backward, "PrivateUse1")
