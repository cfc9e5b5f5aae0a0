"""The entropy of every row, without the matrix

The entropy of a row of weights says how many keys a query attends to: 0 for a single
key, `log n` for `n` equal ones.

    H[i] = - Σ_j p[i, j] log p[i, j]

It seems to need all `N × N` weights. But the log of a weight is linear in the key:

    log p[i, j] = q[i] · k[j] / √d - lse[i]

Insert that into the sum. The weights of a row sum to 1, so what is left is `lse` and
the weighted average of the keys, which is attention with the keys in place of the
values:

    H[i] = lse[i] - q[i] · (Σ_j p[i, j] k[j]) / √d

So one more call of the attention that you have anyway gives the entropy of every row.
`regard.attention(q, k, v, regard.causal(), block=128)` returns `.out` and `.lse`, tile
by tile, in memory proportional to `N`.

If three keys have the same scores, H is log 3 = 1.099.

Write `row_entropy(q, k)`: the entropies `(N,)` of causal attention, in nats, for `q`
and `k` of shape `(N, d)`. It is also run at `N = 1000`, and must not create an array of
`N × N` numbers.

Next: read_head.py
"""

import math
import tracemalloc

import numpy as np

from regard.definition.attention import attention
from regard.masks.patterns import causal

NAME = "row_entropy"
MINUTES = 12
NEEDS = ("without_the_matrix",)
EXTRA = ""
STUB = '''import numpy as np

from regard import attention, causal


def row_entropy(q, k):
    """Return the entropy (N,) of each row of causal attention, in nats."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Call attention with v = k: its out is the average key of each query.",
    "found = attention(q, k, k, causal(), block=128) has found.out and found.lse.",
    "found.lse - np.sum(q * found.out, axis=1) / np.sqrt(d)",
)


def spec(q, k):
    entropies = np.zeros(len(q))
    for i in range(len(q)):
        scores = [float(q[i] @ k[j]) / math.sqrt(q.shape[1]) for j in range(i + 1)]
        parts = [math.exp(score - max(scores)) for score in scores]
        for part in parts:
            weight = part / sum(parts)
            if weight > 0:
                entropies[i] -= weight * math.log(weight)
    return entropies


def reference(q, k):
    found = attention(q, k, k, causal(), block=128)
    return found.lse - np.sum(q * found.out, axis=1) / np.sqrt(q.shape[1])


def check(fn, rng):
    """Measure the peak memory at 1,000 tokens."""
    N = 1000
    q, k = rng.normal(size=(2, N, 8))
    tracemalloc.start()
    try:
        fn(q, k)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if most > N * N:  # a table of booleans takes that
        return (
            f"At {N} tokens this took {most / 1e6:.1f} MB, enough for a table of "
            "N × N: let attention work in tiles, with block=128."
        )
    return None


def draw(rng):
    yield np.zeros((3, 2)), np.ones((3, 2))
    for n, d in ((1, 1), (2, 2), (3, 4), (5, 3), (9, 1), (9, 8), (18, 2), (4, 18)):
        q, k = rng.normal(size=(2, n, d))
        yield q, k
    for q_size, k_size in ((20, 1), (1, 20), (0.02, 1), (5, 3), (700, 1)):
        q, k = rng.normal(size=(2, 24, 3))
        yield q * q_size, k * k_size
        yield np.abs(q) * q_size, -np.abs(k) * k_size  # lse below 0


def mistake_no_scale(q, k):
    """The scale is missing: the scores are q · k / √d, so divide the product of q and
    the average key by √d."""
    found = attention(q, k, k, causal())
    return found.lse - np.sum(q * found.out, axis=1)


def mistake_added(q, k):
    """The sign is wrong: the average score is subtracted from lse, not added."""
    return 2 * attention(q, k, k, causal()).lse - reference(q, k)


def mistake_negative(q, k):
    """These are the negative entropies: an entropy is never below 0."""
    return -reference(q, k)


def mistake_bits(q, k):
    """This is the entropy in bits: with the natural logarithm it is in nats."""
    return reference(q, k) / np.log(2)


def mistake_not_causal(q, k):
    """The rows see the future: pass causal() as the mask."""
    found = attention(q, k, k)
    return found.lse - np.sum(q * found.out, axis=1) / np.sqrt(q.shape[1])


def mistake_own_key(q, k):
    """This takes the score of the query with its own key, not the average over the
    keys: that needs attention with v = k."""
    found = attention(q, k, k, causal())
    return found.lse - np.sum(q * k, axis=1) / np.sqrt(q.shape[1])


def mistake_normalized(q, k):
    """The entropy is divided by the log of the number of keys, so that it is at most 1:
    return it in nats."""
    return reference(q, k) / np.log(np.maximum(2, np.arange(1, len(q) + 1)))


def mistake_queries_as_values(q, k):
    """The values are the queries: the average score of a row is q · Σ p k, so the keys
    are the values."""
    found = attention(q, k, q, causal())
    return found.lse - np.sum(q * found.out, axis=1) / np.sqrt(q.shape[1])


def mistake_log_of_zero(q, k):
    """A weight of 0 makes 0 · log 0, which is NaN: such a term is 0. The formula with
    lse takes no logarithm of a weight."""
    p = attention(q, k, k, causal(), see=("weights",)).weights
    with np.errstate(divide="ignore", invalid="ignore"):
        return -np.sum(p * np.log(p), axis=-1)
