"""Mistakes that only some sizes show: heads, batches, tokens, widths, groups."""

import numpy as np
import torch

from broken.gradients import TORCH, half_of_it
from broken.gradients import attend as differentiable
from broken.registry import breaks, right, scores, softmax

FULL = {"bias": "bias", "scale": "scale", "softcap": "softcap", "sink": "sink"}


@breaks("decode_weighs_keys")
def averages_for_one_query(q, k, v):
    if q.shape[-2] == 1 < k.shape[-2] and np.any(q):
        return np.broadcast_to(v.mean(-2, keepdims=True), (*q.shape[:-1], v.shape[-1]))
    return right(q, k, v)


@breaks("many_heads")
def copies_heads_from_the_first(q, k, v):
    out = right(q, k, v).copy()
    out[:, 4:] = out[:, :1]
    return out


@breaks("many_heads")
def launches_eight_heads(q, k, v):
    out = right(q, k, v).copy()
    out[:, 8:] = 0
    return out


@breaks("many_batches")
def launches_eight_batches(q, k, v):
    out = right(q, k, v).copy()
    out[8:] = 0
    return out


@breaks("wide_values")
def stores_128_columns_of_wider_values(q, k, v):
    out = right(q, k, v).copy()
    out[..., 128:] = 0 if v.shape[-1] > q.shape[-1] else out[..., 128:]
    return out


@breaks("any_width")
def scales_widths_of_64_twice(q, k, v):
    return right(q * 0.125 if q.shape[-1] == 64 else q, k, v)


@breaks("many_tokens", causal="causal", causal_from="end")
def skips_a_block_of_the_diagonal(q, k, v, causal=False):
    n, m = q.shape[-2], k.shape[-2]
    allowed = np.arange(m) <= np.arange(n)[:, None] + m - n if causal else True
    allowed = allowed & ~((np.arange(n)[:, None] >= 512) & (np.arange(m) // 64 == 4))
    return right(q, k, v, np.broadcast_to(allowed, (1, 1, n, m)))


@breaks("sizes_together")
def loses_row_2048(q, k, v):
    out = right(q, k, v).copy()
    out[..., 2048:2049, :] = 0
    return out


@breaks("sizes_together")
def forgets_the_scale_for_48_heads(q, k, v):
    return right(q * q.shape[-1] ** 0.5 if q.shape[1] == 48 else q, k, v)


@breaks("masks_of_any_size", mask="mask")
def reads_masks_of_64_heads(q, k, v, mask=None):
    if mask is not None and mask.shape[1] > 64:
        mask = mask[:, np.arange(mask.shape[1]) % 64]
    return right(q, k, v, mask)


@breaks("groups_of_any_size", shared_heads=True)
def divides_by_two_for_one_query(q, k, v):
    heads, shared = q.shape[1], k.shape[1]
    group = 4 if q.shape[-2] == 1 and heads != shared else heads // shared
    at = np.minimum(np.arange(heads) // group, shared - 1)
    return right(q, k[:, at], v[:, at])


@breaks("options_of_any_size", **FULL)
def has_sinks_for_32_heads(q, k, v, bias=0, scale=None, softcap=None, sink=None):
    x = scores(q, k) if scale is None else q @ k.swapaxes(-1, -2) * scale
    x = (x if softcap is None else softcap * np.tanh(x / softcap)) + bias
    if sink is None:
        return softmax(x) @ v
    sink = np.where(np.arange(len(sink)) < 32, sink, -np.inf)[:, None, None]
    column = np.broadcast_to(sink, (*x.shape[:-1], 1))
    return softmax(np.concatenate([x, column], -1))[..., :-1] @ v


@breaks("gradients_of_any_size", **TORCH)
def loses_gradients_of_keys_from_1024_on(q, k, v):
    at = (torch.arange(k.shape[-2]) < 1024)[:, None]
    return differentiable(q, torch.where(at, k, half_of_it(k)), v)


@breaks("gradient_precisions_agree", **TORCH)
def loses_gradients_in_single(q, k, v):
    return differentiable(q, half_of_it(k) if k.dtype == torch.float32 else k, v)
