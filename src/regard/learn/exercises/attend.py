"""Attention of one sequence

Each key j comes with a value v[j], and the output of query i is the average of all
values, weighted by how well their keys answer the query:

    weights = softmax(q kᵀ / √d)          (N, M), a softmax for each row
    out     = weights v                   (N, e)

q is (N, d), k is (M, d), v is (M, e). Keys and values come in pairs, so both have M
rows, but values may have another width e: they are averaged, not compared.

For example, a query with equal scores for two keys has the weights [0.5, 0.5], and
the values [[2, 0, 0], [0, 4, 0]] then give the output [[1, 2, 0]].

Write `attend(q, k, v)`. You may copy your softmax into the file. Scores can be large
here too.

Next: causal_mask.py
"""

import numpy as np

NAME = "attend"
MINUTES = 10
NEEDS = ("softmax", "scaling")
EXTRA = ""
STUB = '''import numpy as np


def attend(q, k, v):
    """Return the output (N, e) of q (N, d), k (M, d) and v (M, e)."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Four lines: scaled scores, exp after subtracting the largest of each row, "
    "weights, output.",
    "Row i of weights @ v is the sum of weights[i, j] * v[j] over all keys j.",
    "scores = q @ k.T / np.sqrt(q.shape[-1]); weights = softmax(scores), row by row; "
    "return weights @ v.",
)


def spec(q, k, v):
    out = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        scores = [q[i] @ k[j] / q.shape[1] ** 0.5 for j in range(len(k))]
        parts = [np.exp(score - max(scores)) for score in scores]
        for j in range(len(k)):
            out[i] += parts[j] / sum(parts) * v[j]
    return out


def softmax(scores, axis=-1):
    parts = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return parts / parts.sum(axis=axis, keepdims=True)


def reference(q, k, v):
    scores = q @ k.T / np.sqrt(q.shape[-1])
    parts = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return parts / parts.sum(axis=-1, keepdims=True) @ v


def draw(rng):
    sizes = ((1, 1, 2, 1), (1, 2, 2, 3), (2, 3, 2, 1), (3, 3, 4, 2), (4, 2, 3, 5))
    for n, m, d, e in sizes:
        q, k, v = (rng.normal(size=x).round(1) for x in ((n, d), (m, d), (m, e)))
        yield q + 1, k * 2, v
    q, k = 100 + rng.normal(size=(2, 5, 4)).round(1)
    yield q, k, rng.normal(size=(5, 3)).round(1)
    yield -q, k, rng.normal(size=(5, 3)).round(1)
    for n, m, d, e in ((18, 2, 2, 2), (2, 18, 2, 2), (2, 2, 18, 2), (2, 2, 1, 18)):
        q, k, v = (rng.normal(size=shape) for shape in ((n, d), (m, d), (m, e)))
        yield q, k, v * 1e5
        yield q / 100, k * 200, v / 100
        yield q * 200, k * 10, v


def mistake_no_scale(q, k, v):
    """The scores are not scaled: divide them by the root of the width of q and k."""
    return softmax(q @ k.T) @ v


def mistake_scale_of_values(q, k, v):
    """That scales by the width of the values: the score is computed from q and k, so
    divide by the root of q.shape[-1]."""
    return softmax(q @ k.T / np.sqrt(v.shape[-1])) @ v


def mistake_overflow(q, k, v):
    """exp of a large score is infinite, or all of a row are 0, and the output is
    NaN: subtract the largest score of each row before exp."""
    parts = np.exp(q @ k.T / np.sqrt(q.shape[-1]))
    return parts / parts.sum(axis=-1, keepdims=True) @ v


def mistake_over_queries(q, k, v):
    """Your softmax runs over the queries, so the weights of a query do not sum to 1:
    it must run over the keys, axis=-1."""
    return softmax(q @ k.T / np.sqrt(q.shape[-1]), axis=0) @ v


def mistake_scores_only(q, k, v):
    """The scores are used as weights: turn each row into weights with softmax first."""
    return q @ k.T / np.sqrt(q.shape[-1]) @ v


def mistake_keys_averaged(q, k, v):
    """That averages the keys: the weights are computed from the keys, and multiplied
    by the values v."""
    return softmax(q @ k.T / np.sqrt(q.shape[-1])) @ k


def mistake_weights(q, k, v):
    """Those are the weights: multiply them by the values, weights @ v."""
    return softmax(q @ k.T / np.sqrt(q.shape[-1]))


def mistake_best_only(q, k, v):
    """That returns only the value of the best key: attention is the average of all
    values with the weights of softmax."""
    return v[np.argmax(q @ k.T, axis=-1)]


def mistake_scaled_twice(q, k, v):
    """The scores are divided by d, or twice by its root: divide them once by the root
    of q.shape[-1]."""
    return softmax(q @ k.T / q.shape[-1]) @ v


def mistake_scaled_after(q, k, v):
    """The weights are divided by the root of d, after the softmax: divide the scores,
    before it."""
    return softmax(q @ k.T) / np.sqrt(q.shape[-1]) @ v


def mistake_scaled_by_keys(q, k, v):
    """That scales by the number of keys: divide by the root of the width,
    q.shape[-1]."""
    return softmax(q @ k.T / np.sqrt(len(k))) @ v


def mistake_not_normalized(q, k, v):
    """The weights of a query do not sum to 1: divide the exponentials by their sum."""
    scores = q @ k.T / np.sqrt(q.shape[-1])
    return np.exp(scores - scores.max(axis=-1, keepdims=True)) @ v


def mistake_equal_weights(q, k, v):
    """Every value has the same weight: the weights are the softmax of the scores."""
    return np.repeat(v.mean(axis=0, keepdims=True), len(q), axis=0)


def mistake_output_and_weights(q, k, v):
    """Both the output and the weights are returned: return the output only."""
    weights = softmax(q @ k.T / np.sqrt(q.shape[-1]))
    return weights @ v, weights


def mistake_width_of_queries(q, k, v):
    """The output has the width of q: it has the width of the values, (N, dv)."""
    return np.zeros(q.shape) + mistake_output_and_weights(q, k, v)[0][:, :1]
