"""Query heads that share keys

The KV cache makes long texts expensive. So many models have fewer heads of keys and
values than of queries: `H` query heads share `Hk` key heads, in groups of `g = H / Hk`.
Query head `h` uses key head

    h // g

so heads 0 … g-1 share the first, the next `g` heads the second, and so on. With 6
query heads and 2 key heads, `g` is 3 and the key heads are `0 0 0 1 1 1`. SmolLM2 has
9 query heads and 3 key heads, so its cache is a third of the size.

Using `h % Hk` instead gives `0 1 0 1 0 1`: the right shape, but other numbers. A
published standard had to be corrected because of this. With `Hk = 1` all heads share
one key head; `Hk = H` is ordinary multi-head attention.

Write `grouped_attention(q, k, v)`: `q` is `(H, N, d)`, `k` is `(Hk, M, d)`, `v` is
`(Hk, M, dv)`, the output `(H, N, dv)`. The `softmax` in the stub works with any number
of axes.

Next: mask_algebra.py
"""

import math

import numpy as np

NAME = "grouped_attention"
MINUTES = 12
NEEDS = ("multi_head",)
EXTRA = ""
STUB = '''import numpy as np


def softmax(scores):
    """Return the weights of each row along the last axis."""
    parts = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return parts / parts.sum(axis=-1, keepdims=True)


def grouped_attention(q, k, v):
    """Return attention (H, N, dv) of q (H, N, d), where heads share k and v."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Give every query head a copy of its k and v, then compute attention as before.",
    "np.repeat(k, g, axis=0) repeats each head g times in a row; np.tile does not.",
    "softmax(q @ k.swapaxes(1, 2) / np.sqrt(d)) @ v, with the repeated k and v.",
)


def softmax(scores):  # as in the stub
    parts = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return parts / parts.sum(axis=-1, keepdims=True)


def spec(q, k, v):
    H, N, d = q.shape
    out = np.zeros((H, N, v.shape[2]))
    for h in range(H):
        shared = h // (H // len(k))
        for i in range(N):
            scores = [q[h, i] @ key / math.sqrt(d) for key in k[shared]]
            parts = [math.exp(score - max(scores)) for score in scores]
            for part, value in zip(parts, v[shared], strict=True):
                out[h, i] += part / sum(parts) * value
    return out


def reference(q, k, v):
    k, v = (np.repeat(x, len(q) // len(x), axis=0) for x in (k, v))
    return softmax(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[2])) @ v


def draw(rng):
    shapes = [(2, 2, 1, 2, 2), (2, 1, 2, 2, 2), (4, 2, 1, 2, 2), (6, 2, 3, 4, 2)]
    long = [(18, 18, 1, 2, 2), (18, 1, 1, 2, 2), (2, 1, 18, 2, 2), (2, 1, 2, 18, 2)]
    long += [(2, 2, 2, 2, 18), (36, 18, 1, 2, 2)]
    for H, Hk, N, M, d in (*shapes, (9, 3, 2, *rng.integers(2, 6, size=2)), *long):
        q, k = rng.normal(size=(H, N, d)) * 2, rng.normal(size=(Hk, M, d))
        yield q, k, rng.normal(size=(Hk, M, d + 1))
    for Hk, M, d in ((1, 1, 1), (3, 2, 3)):
        for q_size, k_size in ((20, 0.05), (0.05, 20)):
            q, k = rng.normal(size=(Hk, 2, d)), rng.normal(size=(Hk, M, d))
            yield q * q_size, k * k_size, 1e5 * rng.normal(size=(Hk, M, 1))


def pick(q, k, v, order):
    return softmax(q @ k[order].swapaxes(1, 2) / np.sqrt(q.shape[2])) @ v[order]


def mistake_modulo(q, k, v):
    """The key heads are assigned as h % Hk: a group is g consecutive heads, h // g, so
    use np.repeat and not np.tile."""
    return pick(q, k, v, np.arange(len(q)) % len(k))


def mistake_first_only(q, k, v):
    """All query heads use the first key head: head h uses key head h // g."""
    return pick(q, k, v, np.zeros(len(q), int))


def mistake_values_not_grouped(q, k, v):
    """The keys are shared by groups, but the values are assigned as h % Hk: use head
    h // g for both."""
    H = len(q)
    weights = softmax(
        q @ np.repeat(k, H // len(k), 0).swapaxes(1, 2) / q.shape[2] ** 0.5
    )
    return weights @ v[np.arange(H) % len(v)]


def mistake_scaled_by_value_width(q, k, v):
    """The scores are divided by the square root of dv, the width of the values: use d,
    the width of queries and keys."""
    return reference(q * np.sqrt(q.shape[2] / v.shape[2]), k, v)


def mistake_averaged(q, k, v):
    """All query heads use the mean of the key heads: head h uses key head h // g."""
    keys, values = (np.repeat(x.mean(0, keepdims=True), len(q), 0) for x in (k, v))
    return softmax(q @ keys.swapaxes(1, 2) / np.sqrt(q.shape[2])) @ values


def mistake_divided_by_key_heads(q, k, v):
    """Head h uses key head h // Hk, which runs out of range: divide by the size of a
    group, g = H // Hk."""
    return pick(q, k, v, np.arange(len(q)) // len(k))


def mistake_no_scale(q, k, v):
    """The scores are not scaled: divide them by the root of d."""
    return reference(q * np.sqrt(q.shape[2]), k, v)


def mistake_scaled_twice(q, k, v):
    """The scores are divided by d, or twice by its root: divide them once by the
    root."""
    return reference(q / np.sqrt(q.shape[2]), k, v)
