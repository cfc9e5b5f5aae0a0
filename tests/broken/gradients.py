"""Mistakes of backward passes; each forward pass is right."""

import torch

from broken.registry import breaks

TORCH = {"library": "torch", "precisions": ("float64", "float32")}


def attend(q, k, v, mask=None, causal=False):
    x = q * q.shape[-1] ** -0.5 @ k.mT
    if causal:
        x = x.masked_fill(torch.ones(x.shape[-2:]).triu(1).bool(), -torch.inf)
    if mask is None:
        return x.softmax(-1) @ v
    empty = ~mask.any(-1, keepdim=True)
    x = x.masked_fill(~mask, -torch.inf).masked_fill(empty, 0)
    return x.softmax(-1).masked_fill(empty, 0) @ v


def half_of_it(x):
    """Return x, of which half of the gradient is lost."""
    return (x + x.detach()) / 2


@breaks("gradient_of_q", **TORCH)
def loses_half_of_dq(q, k, v):
    return attend(half_of_it(q), k, v)


@breaks("gradient_of_k", **TORCH)
def loses_dk(q, k, v):
    return attend(q, k.detach(), v)


@breaks("gradient_of_v", causal="causal", **TORCH)
def loses_half_of_dv_if_causal(q, k, v, causal=False):
    return attend(q, k, half_of_it(v) if causal else v, causal=causal)


@breaks("gradient_under_mask", mask="mask", **TORCH)
def forgets_the_mask_backwards(q, k, v, mask=None):
    free = attend(q, k, v)
    return free + (attend(q, k, v, mask) - free).detach()


@breaks("empty_row_grad_finite", mask="mask", **TORCH)
def repairs_nan_forwards_only(q, k, v, mask=None):
    x = q * q.shape[-1] ** -0.5 @ k.mT
    x = x if mask is None else x + torch.where(mask, 0.0, -torch.inf)
    return x.softmax(-1).nan_to_num(0) @ v


@breaks("gradient_sums_over_shared_heads", shared_heads=True, **TORCH)
def learns_from_one_head_of_a_group(q, k, v):
    n = q.shape[1] // k.shape[1]

    def spread(x):
        many = [x, *([x.detach()] * (n - 1))]
        return torch.stack(many, 2).flatten(1, 2)

    return attend(q, spread(k), spread(v))


class Unstable(torch.autograd.Function):
    """Right forwards; backwards the weights are computed without the maximum."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return attend(q, k, v)

    @staticmethod
    def backward(ctx, g):
        q, k, v = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        parts = (q @ k.mT * scale).exp()
        w = parts / parts.sum(-1, keepdim=True)
        turn = w * (g @ v.mT - (w @ v * g).sum(-1, keepdim=True))
        return scale * turn @ k, scale * turn.mT @ q, w.mT @ g


@breaks("gradient_of_large_scores", **TORCH)
def overflows_backwards(q, k, v):
    return Unstable.apply(q, k, v)
