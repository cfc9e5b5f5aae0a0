"""Attention from one sequence to another

A translation attends to the original text, a caption to a picture. The queries come
from one sequence, `x`, the keys and the values from another, `context`:

    q = x wqᵀ                     (N, d)     one query for each token of x
    k = context wkᵀ               (M, d)     one key for each token of the context
    v = context wvᵀ               (M, dv)
    out = softmax(q kᵀ / √d) v    (N, dv)

The weights are `(N, M)`: each of the `N` rows sums to 1 over the `M` tokens of the
context. A row of the output belongs to a token of `x`, and is an average of values of
the context. If the context has only one token, every weight is 1 and every row of the
output is its value.

A widely read implementation swaps the matrices of query and key here. All shapes are
still right, and its tests checked nothing else.

Write `cross_attention(x, context, wq, wk, wv)`: the output, `(N, dv)`.

Next: sinusoidal.py
"""

import math

import numpy as np

from regard.definition.attention import attention

NAME = "cross_attention"
MINUTES = 10
NEEDS = ("multi_head",)
EXTRA = ""
STUB = '''import numpy as np

from regard import attention


def cross_attention(x, context, wq, wk, wv):
    """Let x (N, D) attend to context (M, D); return (N, dv)."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "q comes from the sequence that attends, k and v from the one it attends to.",
    "q = x @ wq.T has N rows; k = context @ wk.T and v = context @ wv.T have M rows.",
    "attention(x @ wq.T, context @ wk.T, context @ wv.T).out",
)


def spec(x, context, wq, wk, wv):
    out = np.zeros((len(x), len(wv)))
    for i in range(len(x)):
        scores = []
        for j in range(len(context)):
            scores.append((wq @ x[i]) @ (wk @ context[j]) / math.sqrt(len(wq)))
        parts = [math.exp(score - max(scores)) for score in scores]
        for j in range(len(context)):
            out[i] += parts[j] / sum(parts) * (wv @ context[j])
    return out


def reference(x, context, wq, wk, wv):
    return attention(x @ wq.T, context @ wk.T, context @ wv.T).out


def draw(rng):
    same = [(2, 2, 2, 2, 2), (3, 3, 2, 3, 2), (2, 2, 3, 2, 4), (4, 4, 3, 2, 2)]
    other = [(3, 1, 2, 2, 2), (4, 2, 3, 3, 2), (1, 5, 3, 2, 3)]
    more = (*rng.integers(1, 6, size=2), 4, 3, 2)
    long = [(18, 2, 2, 2, 2), (2, 18, 2, 2, 2), (2, 2, 18, 2, 2), (2, 2, 2, 18, 2)]
    for N, M, D, d, dv in (*same, *other, more, *long, (2, 2, 2, 2, 18)):
        x, context = rng.normal(size=(N, D)), rng.normal(size=(M, D))
        wq, wk = 2 * rng.normal(size=(2, d, D))
        yield x, context, wq, wk, rng.normal(size=(dv, D))
    for D, d, dv in ((1, 1, 1), (3, 2, 2)):
        for sizes in SIZES:
            shapes = ((3, D), (4, D), (d, D), (d, D), (dv, D))
            yield tuple(
                size * rng.normal(size=shape)
                for size, shape in zip(sizes, shapes, strict=True)
            )


SIZES = ((20, 0.05, 200, 0.005, 1), (0.05, 20, 0.005, 200, 30), (1, 1, 1, 1, 0.003))


def look(q, k, v):
    scores = q @ k.T / np.sqrt(q.shape[1])
    parts = np.exp(scores - scores.max(axis=1, keepdims=True))
    return parts / parts.sum(axis=1, keepdims=True) @ v


def mistake_matrices_exchanged(x, context, wq, wk, wv):
    """The matrices of query and key are swapped: wq belongs to x, wk to context."""
    return look(x @ wk.T, context @ wq.T, context @ wv.T)


def mistake_context_asks(x, context, wq, wk, wv):
    """Here the context attends to x: queries come from x, keys and values from the
    context."""
    return look(context @ wq.T, x @ wk.T, x @ wv.T)


def mistake_only_itself(x, context, wq, wk, wv):
    """This attends to x and not to the context: compute k and v from the context."""
    return look(x @ wq.T, x @ wk.T, x @ wv.T)


def mistake_own_keys(x, context, wq, wk, wv):
    """The values come from the context, but the keys from x: both must come from the
    context."""
    return look(x @ wq.T, x @ wk.T, context @ wv.T)


def mistake_own_values(x, context, wq, wk, wv):
    """The values come from x, but the keys from the context: both must come from the
    context."""
    return look(x @ wq.T, context @ wk.T, x @ wv.T)


def mistake_no_softmax(x, context, wq, wk, wv):
    """The scores are used as weights: turn each row into weights with softmax first."""
    q, k, v = x @ wq.T, context @ wk.T, context @ wv.T
    return q @ k.T / math.sqrt(len(wq)) @ v


def mistake_no_scale(x, context, wq, wk, wv):
    """The scores are not scaled: divide them by the root of the width of q, which is
    len(wq)."""
    return look(x @ wq.T * math.sqrt(len(wq)), context @ wk.T, context @ wv.T)


def mistake_scaled_twice(x, context, wq, wk, wv):
    """The scores are divided twice by the root of the width: attention scales them
    already."""
    return look(x @ wq.T / math.sqrt(len(wq)), context @ wk.T, context @ wv.T)
