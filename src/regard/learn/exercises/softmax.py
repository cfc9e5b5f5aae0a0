"""Softmax: scores become weights

A row of scores says how well each key answers one query. Softmax converts it to
weights, which are positive and sum to 1:

    weights[i, j] = exp(scores[i, j]) / Σ exp(scores[i, :])

Each row is a separate softmax. For example [0, log 3] gives [0.25, 0.75].

## Large scores

exp(1000) overflows: it becomes infinity, and infinity / infinity is NaN. Adding the
same number to all scores of a row does not change the weights, because it cancels. So
subtract the largest score of the row first. Then the largest exp is exp(0) = 1.

The sum is then at least 1, so there is no need to add a small epsilon to it.

Write `softmax(scores)` for scores of shape (N, M). Do not modify the argument.

Next: scaling.py
"""

import numpy as np

NAME = "softmax"
MINUTES = 10
NEEDS = ("scores",)
EXTRA = ""
STUB = '''import numpy as np


def softmax(scores):
    """Return the weights of each row of scores (N, M)."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Three steps: subtract the largest score of each row, take exp, divide each row "
    "by its sum.",
    "A row is along the last axis: use axis=-1, and keepdims=True so that (N, 1) "
    "broadcasts with (N, M).",
    "parts = np.exp(scores - scores.max(axis=-1, keepdims=True)); then divide parts by "
    "their sum along the same axis.",
)
ATOL = 1e-12  # detects an epsilon in the denominator


def spec(scores):
    weights = np.zeros(scores.shape)
    for i in range(scores.shape[0]):
        largest = max(scores[i])
        total = sum(np.exp(x - largest) for x in scores[i])
        for j in range(scores.shape[1]):
            weights[i, j] = np.exp(scores[i, j] - largest) / total
    return weights


def reference(scores):
    parts = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return parts / parts.sum(axis=-1, keepdims=True)


def draw(rng):
    for n, m in ((1, 1), (1, 2), (2, 2), (2, 3), (3, 2), (4, 5)):
        yield (rng.normal(size=(n, m)).round(2),)
    yield (rng.normal(size=(3, 3)).round(1) + 1000,)
    yield (rng.normal(size=(3, 4)).round(1) - 1000,)
    far = np.array([[0], [1000], [-1000], [3000]])  # rows far from each other
    yield ((rng.normal(size=(4, 4)) * 500).round() + far,)
    for n, m in ((18, 2), (2, 18), (2, 18)):
        yield (rng.normal(size=(n, m)) / 10,)


def mistake_overflow(scores):
    """exp of a large score is infinite, or all of a row are 0, and the division
    gives NaN: subtract the largest score of each row before exp."""
    parts = np.exp(scores)
    return parts / parts.sum(axis=-1, keepdims=True)


def mistake_columns(scores):
    """That makes the columns sum to 1: each row belongs to a query, so sum over the
    keys with axis=-1."""
    parts = np.exp(scores - scores.max(axis=0, keepdims=True))
    return parts / parts.sum(axis=0, keepdims=True)


def mistake_all_at_once(scores):
    """That makes the whole table sum to 1: each row is a separate softmax, so sum with
    axis=-1 and keepdims=True."""
    parts = np.exp(scores - scores.max())
    return parts / parts.sum()


def mistake_one_largest(scores):
    """That subtracts the largest score of the whole table, and a row far below it
    becomes 0 / 0: subtract the largest of each row, with axis=-1 and keepdims=True."""
    parts = np.exp(scores - scores.max())
    return parts / parts.sum(axis=-1, keepdims=True)


def mistake_no_keepdims(scores):
    """The sums of the rows have shape (N,), which broadcasts along the columns: write
    keepdims=True, which makes them (N, 1)."""
    parts = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return parts / parts.sum(axis=-1)


def mistake_bare_no_keepdims(scores):
    """The sums of the rows have shape (N,), which broadcasts along the columns: write
    keepdims=True, which makes them (N, 1)."""
    parts = np.exp(scores)
    return parts / parts.sum(axis=-1)


def mistake_keepdims_nowhere(scores):
    """The largest scores have shape (N,), which broadcasts along the columns: write
    keepdims=True, in max and in sum, which makes them (N, 1)."""
    parts = np.exp(scores - scores.max(axis=-1))
    return parts / parts.sum(axis=-1)


def mistake_epsilon(scores):
    """The rows sum to slightly less than 1: after subtracting the largest score the sum
    is at least 1, so do not add a small number to it."""
    parts = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return parts / (parts.sum(axis=-1, keepdims=True) + 1e-10)


def mistake_no_exp(scores):
    """That divides the scores themselves by their sum, which negative scores break:
    take exp first."""
    return scores / scores.sum(axis=-1, keepdims=True)


def mistake_no_division(scores):
    """The rows do not sum to 1: divide each row by its sum."""
    return np.exp(scores - scores.max(axis=-1, keepdims=True))


def mistake_base_two(scores):
    """These are powers of 2: softmax takes powers of e, with np.exp."""
    parts = np.exp2(scores - scores.max(axis=-1, keepdims=True))
    return parts / parts.sum(axis=-1, keepdims=True)


def mistake_sign_reversed(scores):
    """The smallest score gets the largest weight: subtract the largest score from the
    scores, and not the scores from it."""
    parts = np.exp(scores.max(axis=-1, keepdims=True) - scores)
    return parts / parts.sum(axis=-1, keepdims=True)


def mistake_mean(scores):
    """That divides by the mean of a row, so that it sums to the number of keys: divide
    by the sum."""
    parts = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return parts / parts.mean(axis=-1, keepdims=True)


def mistake_smallest_subtracted(scores):
    """The smallest score of a row is subtracted, and exp of the others can overflow:
    subtract the largest."""
    parts = np.exp(scores - scores.min(axis=-1, keepdims=True))
    return parts / parts.sum(axis=-1, keepdims=True)


def mistake_max_without_keepdims(scores):
    """The largest scores have shape (N,), which broadcasts along the columns: write
    keepdims=True in max, too."""
    parts = np.exp(scores - scores.max(axis=-1))
    return parts / parts.sum(axis=-1, keepdims=True)


def mistake_logarithm(scores):
    """These are the logarithms of the weights: apply np.exp to them."""
    scores = scores - scores.max(axis=-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))


def mistake_largest_only(scores):
    """All weight is on the largest score: softmax gives every key a weight, by exp of
    its score."""
    return (scores == scores.max(axis=-1, keepdims=True)).astype(float)


def mistake_multiplied(scores):
    """The exponentials are multiplied by their sum: divide by it."""
    parts = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return parts * parts.sum(axis=-1, keepdims=True)
