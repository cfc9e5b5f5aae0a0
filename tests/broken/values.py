"""Mistakes that only some values or dtypes show."""

import numpy as np

from broken.registry import allow, breaks, hide, right, scores, softmax


@breaks("large_scores_differ")
def caps_scores(q, k, v):
    return softmax(scores(q, k).clip(None, 500)) @ v


@breaks("values_of_any_size")
def clips_values(q, k, v):
    return right(q, k, v.clip(-100, 100))


@breaks("values_of_any_size")
def flushes_small_values(q, k, v):
    return right(q, k, np.where(np.abs(v) < 1e-4, 0, v))


@breaks("scale_of_any_sign", scale="scale")
def takes_zero_for_none(q, k, v, scale=None):
    return softmax(q @ k.swapaxes(-1, -2) * (scale or q.shape[-1] ** -0.5)) @ v


@breaks("scale_of_any_sign", scale="scale")
def scales_by_the_root_twice(q, k, v, scale=None):
    root = abs(q.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    return softmax((q * root) @ (k * root).swapaxes(-1, -2)) @ v


@breaks("precisions_agree")
def takes_another_path_in_single(q, k, v):
    out = right(q, k, v).copy()
    if q.dtype == np.float32:
        out[..., 64:, :] = 0
    return out


@breaks("masked_precisions_agree", mask="mask")
def masks_by_a_filler_in_single(q, k, v, mask=None):
    allowed = allow(q, k, mask, causal=False)
    if q.dtype == np.float32 and q.shape[-2] > 64:
        return softmax(np.where(allowed, scores(q, k), -1)) @ v
    return softmax(hide(scores(q, k), allowed)) @ v


@breaks("nan_is_not_hidden")
def repairs_nan(q, k, v):
    return np.nan_to_num(right(q, k, v))
