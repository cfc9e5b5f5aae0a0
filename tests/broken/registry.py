"""Where broken attentions are listed, and the right pieces that they are made of."""

from typing import NamedTuple

import numpy as np

from regard.judge.convention import Convention

BROKEN = []


class Broken(NamedTuple):
    name: str
    fn: object
    case: str  # the pitfall that must be named
    convention: Convention


def breaks(case, **words):
    """List a function under the case that must catch it."""

    words.setdefault("precisions", ("float64", "float32"))  # else 16 bits fail as well

    def keep(fn):
        BROKEN.append(Broken(fn.__name__, fn, case, Convention(**words)))
        return fn

    return keep


def scores(q, k):
    return q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5


def softmax(x):
    """Stable, and 0 where nothing may be seen."""
    top = x.max(-1, keepdims=True)
    parts = np.exp(x - np.where(np.isneginf(top), 0, top))
    total = parts.sum(-1, keepdims=True)
    return parts / np.where(total == 0, 1, total)


def causal_mask(n_q, n_k, start=0):
    return (np.arange(n_k) <= np.arange(n_q)[:, None] + start)[None, None]


def hide(x, allowed):
    return np.where(allowed, x, -np.inf)


def allow(q, k, mask=None, causal=False):
    n_q, n_k = q.shape[-2], k.shape[-2]
    if mask is not None and mask.ndim < q.ndim:
        raise ValueError("padding or rows?")
    allowed = np.ones((n_q, n_k), bool) if mask is None else mask
    return allowed & causal_mask(n_q, n_k)[(0, 0)[q.ndim - 2 :]] if causal else allowed


def four(mask):
    """Return a mask with all its axes."""
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def repeat(x, heads):
    return np.repeat(x, heads // x.shape[-3], axis=-3)


def right(q, k, v, mask=None, causal=False):
    """The same without a mistake."""
    dtype = q.dtype
    wide = [x.astype(np.promote_types(x.dtype, np.float32)) for x in (q, k, v)]
    q, k, v = wide[0], *(repeat(x, q.shape[-3]) if q.ndim > 2 else x for x in wide[1:])
    allowed = allow(q, k, mask, causal)
    unseen = ~np.broadcast_to(allowed, (*q.shape[:-1], k.shape[-2])).any(-2)
    v = np.where(unseen[..., None], 0, v)  # 0 · NaN
    return (softmax(hide(scores(q, k), allowed)) @ v).astype(dtype)
