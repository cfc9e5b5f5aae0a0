"""A causal mask: nobody sees the future

A language model predicts the next word, so token i must not see the tokens after it.
It may see those before it, and itself: query i sees key j if j ≤ i. All other scores
become minus infinity *before* the softmax, because exp(−∞) = 0:

    scores[i, j] = −∞ where j > i
    weights      = softmax(scores)

So the first token has the weights [1, 0, 0, …], and every row still sums to 1. Scores
that are all alike give

    1    0    0
    1/2  1/2  0
    1/3  1/3  1/3

To hide the weights after the softmax and divide each row by what is left gives the
same numbers. To hide them and not divide does not.

Mind that 0 · ∞ is NaN: choose with np.where instead of multiplying.

Write `causal_weights(scores)` for scores of shape (N, N).

Next: masks.py
"""

import numpy as np

NAME = "causal_weights"
MINUTES = 10
NEEDS = ("softmax",)
EXTRA = ""
STUB = '''import numpy as np


def causal_weights(scores):
    """Return the weights (N, N) of scores (N, N) if no query sees a later key."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Make a table of truth values first: seen[i, j] is True where j <= i. "
    "np.tril(np.ones((N, N), bool)) is such a table.",
    "np.where(seen, scores, -np.inf) takes the score where it is seen, and -inf "
    "elsewhere.",
    "Then softmax as before: exp of that minus its largest of each row, divided by the "
    "sum of each row.",
)


def spec(scores):
    weights = np.zeros(scores.shape)
    for i in range(len(scores)):
        seen = [scores[i, j] for j in range(len(scores)) if j <= i]
        total = sum(np.exp(x - max(seen)) for x in seen)
        for j in range(i + 1):
            weights[i, j] = np.exp(scores[i, j] - max(seen)) / total
    return weights


def softmax(scores):
    parts = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return parts / parts.sum(axis=-1, keepdims=True)


def reference(scores):
    seen = np.tril(np.ones(scores.shape, bool))
    logits = np.where(seen, scores, -np.inf)
    parts = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return parts / parts.sum(axis=-1, keepdims=True)


def draw(rng):
    for n in (1, 2, 3, 4, 6):
        yield (rng.normal(size=(n, n)).round(1) * 2,)
    yield (rng.normal(size=(3, 3)).round(1) + 1000,)
    yield (rng.normal(size=(4, 4)) - 4e9,)  # below any number that stands for -inf
    for shift, size in ((0, 0.01), (0, 1), (0, 20), (-1000, 1)):
        yield (rng.normal(size=(18, 18)) * size + shift,)


def mistake_not_itself(scores):
    """Token i does not see itself there, and the first one sees nothing at all,
    which is 0 / 0: allow j <= i, not j < i."""
    return softmax(np.where(np.tri(len(scores), k=-1) > 0, scores, -np.inf))


def mistake_one_ahead(scores):
    """Token i sees the token after it: allow j <= i, which is np.tril without a
    shift."""
    return softmax(np.where(np.tri(len(scores), k=1) > 0, scores, -np.inf))


def mistake_past_hidden(scores):
    """The past is hidden and the future is seen: what must become -inf lies above
    the diagonal, where j > i."""
    return softmax(np.where(np.triu(np.ones(scores.shape)) > 0, scores, -np.inf))


def mistake_finite(scores):
    """Hidden scores are a negative number that is not below every score: where all that
    is seen scores less, the future is seen. Hide with -np.inf."""
    return softmax(np.where(np.tri(len(scores)) > 0, scores, -100))


def mistake_zeros(scores):
    """Hidden scores are 0, and exp(0) = 1 is a weight like any other: make them
    -inf."""
    return softmax(np.tril(scores))


def mistake_no_division(scores):
    """The weights are hidden after the softmax and the rows no longer sum to 1: hide
    the scores before it, or divide each row by what is left."""
    return np.tril(softmax(scores))


def mistake_zero_times_infinity(scores):
    """A mask of 0 and 1 is multiplied with -inf, and 0 · ∞ is NaN: choose with
    np.where instead."""
    return softmax(scores + np.triu(np.ones(scores.shape), 1) * -np.inf)


def mistake_no_mask(scores):
    """Every token sees the future: hide scores[i, j] where j > i before the softmax."""
    return softmax(scores)
