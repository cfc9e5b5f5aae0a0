"""Mistakes where conditions meet: options and sizes, strides, gradients, repeated calls."""

import numpy as np
import torch

from broken.gradients import TORCH, half_of_it
from broken.gradients import attend as differentiable
from broken.registry import breaks, causal_mask, right, scores, softmax

TENSORS = {**TORCH, "mask": "mask", "causal": "causal"}


@breaks("causal_as_declared")
def is_causal_by_itself(q, k, v):
    return right(q, k, v, causal_mask(q.shape[-2], k.shape[-2]))


@breaks("equal_scores_equal_weights")
def never_sees_the_first_key(q, k, v):
    return right(q, k, v, (np.arange(k.shape[-2]) > 0)[None, None, None])


@breaks("heads_and_batches_together")
def launches_512_blocks(q, k, v):
    out = right(q, k, v).copy()
    out.reshape(-1, *out.shape[2:])[512:] = 0
    return out


@breaks("empty_rows_of_any_size", mask="mask")
def averages_empty_rows_of_many_keys(q, k, v, mask=None):
    out = right(q, k, v, mask)
    if mask is None or k.shape[-2] <= 64:
        return out
    empty = ~np.broadcast_to(mask, (*q.shape[:-1], k.shape[-2])).any(-1)
    return np.where(empty[..., None], v.mean(-2, keepdims=True), out)


@breaks("options_combine", mask="mask")
def drops_the_mask_of_heads_of_96(q, k, v, mask=None):
    return right(q, k, v, None if q.shape[-1] == 96 else mask)


@breaks("strides_of_each_argument", **TORCH)
def reads_v_with_the_strides_of_k(q, k, v):
    last = sum((n - 1) * s for n, s in zip(v.shape, k.stride(), strict=True))
    if v.shape == k.shape and v.untyped_storage().nbytes() > last * v.itemsize:
        v = torch.as_strided(v, v.shape, k.stride(), v.storage_offset())
    return differentiable(q, k, v)


class Reusing:
    """Writes its answers into buffers that are kept by shape."""

    __name__ = "reuses_buffers"

    def __init__(self):
        self.kept = {}

    def __call__(self, q, k, v):
        found = right(q, k, v)
        out = self.kept.setdefault((found.shape, found.dtype), found)
        out[...] = found
        return out


breaks("calls_do_not_interfere")(Reusing())


@breaks("no_keys")
def divides_by_no_keys(q, k, v):
    if k.shape[-2] == 0:
        return np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)
    return right(q, k, v)


@breaks("masks_are_broadcast", bias="bias")
def gives_the_bias_to_the_first_sequence(q, k, v, bias=None):
    x = scores(q, k)
    if bias is not None:
        some = np.arange(len(q)) < len(bias)
        x = x + np.where(some[:, None, None, None], bias, 0)
    return softmax(x) @ v


@breaks("scale_is_not_rounded", library="torch", precisions=("float32", "bfloat16"))
def rounds_the_scale(q, k, v):
    scale = float(torch.tensor(q.shape[-1] ** -0.5, dtype=torch.float64).to(q.dtype))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    a, b, c = (x.to(wide) for x in (q, k, v))
    return ((a * scale @ b.mT).softmax(-1) @ c).to(q.dtype)


class Flat(torch.autograd.Function):
    """Reads the gradient of out as if it were contiguous."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return differentiable(q, k, v)

    @staticmethod
    def backward(ctx, g):
        if not g.is_contiguous():
            g = torch.zeros_like(g)
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return torch.autograd.grad(differentiable(*leaves), leaves, g)


@breaks("gradients_of_any_use", **TORCH)
def reads_the_gradient_as_contiguous(q, k, v):
    return Flat.apply(q, k, v)


@breaks("gradients_of_options", **TENSORS)
def loses_dv_of_masked_wide_heads(q, k, v, mask=None, causal=False):
    lost = q.shape[-1] == 128 and mask is not None
    return differentiable(q, k, half_of_it(v) if lost else v, mask, causal)


@breaks("random_calls", mask="mask", shared_heads=True, library="torch")
def forgets_a_mask_of_grouped_heads_of_one_query(q, k, v, mask=None):
    if mask is not None and mask.ndim < 4:
        raise ValueError("mask: expected (B, H, Nq, Nk)")
    n = q.shape[1] // k.shape[1]
    if n > 2 and q.shape[-2] == 1:
        mask = None
    k, v = (x.repeat_interleave(n, 1) for x in (k, v))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    a, b, c = (x.to(wide) for x in (q, k, v))
    return differentiable(a, b, c, mask).to(q.dtype)
