"""Query heads that share keys

The cache of keys and values is what makes long texts expensive. So many models have
fewer heads of keys and values than of queries: `H` query heads share `Hk` heads of
keys, in groups of `g = H / Hk`. Query head `h` looks at key head

    h // g

so heads 0 … g-1 share the first, the next `g` heads the second, and so on. With 6
query heads and 2 key heads, `g` is 3 and the key heads are `0 0 0 1 1 1`. SmolLM2 has
9 query heads and 3 key heads, and keeps a third of the numbers it would need
otherwise.

Taking `h % Hk` instead gives `0 1 0 1 0 1`: the right shape, other numbers. A
published standard had to be corrected because of it. `Hk = 1` is the special case in
which all share one, and `Hk = H` is attention as before.

Write `grouped_attention(q, k, v)`: `q` is `(H, N, d)`, `k` is `(Hk, M, d)`, `v` is
`(Hk, M, dv)`, the output `(H, N, dv)`. The `softmax` of the stub works on any number
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
    "Give every query head its own copy of k and v, then do attention as before.",
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
    """The heads are dealt out in turn, h % Hk: a group is g heads in a row, h // g, so
    use np.repeat and not np.tile."""
    return pick(q, k, v, np.arange(len(q)) % len(k))


def mistake_first_only(q, k, v):
    """All query heads look at the first head of keys: head h looks at head h // g."""
    return pick(q, k, v, np.zeros(len(q), int))


def mistake_values_not_grouped(q, k, v):
    """The keys are shared by groups, but the values are dealt out in turn: both belong
    to head h // g."""
    H = len(q)
    weights = softmax(
        q @ np.repeat(k, H // len(k), 0).swapaxes(1, 2) / q.shape[2] ** 0.5
    )
    return weights @ v[np.arange(H) % len(v)]


def mistake_scaled_by_value_width(q, k, v):
    """The scores are divided by the square root of dv, the width of the values: the
    width of queries and keys counts."""
    return reference(q * np.sqrt(q.shape[2] / v.shape[2]), k, v)
