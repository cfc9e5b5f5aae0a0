"""A causal mask hides the future

A language model predicts the next word, so token i must not see the tokens after it.
It may see those before it, and itself: query i may attend to key j if j ≤ i. All other
scores are set to minus infinity *before* the softmax, because exp(−∞) = 0:

    scores[i, j] = −∞ where j > i
    weights      = softmax(scores)

So the first token has the weights [1, 0, 0, …], and every row still sums to 1. Equal
scores give

    1    0    0
    1/2  1/2  0
    1/3  1/3  1/3

Masking the weights after the softmax and dividing each row by its new sum gives the
same numbers. Masking without dividing does not.

Note that 0 · ∞ is NaN: select with np.where instead of multiplying.

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
    "Make a boolean table first: seen[i, j] is True where j <= i. "
    "np.tril(np.ones((N, N), bool)) is such a table.",
    "np.where(seen, scores, -np.inf) is the score where seen is True, and -inf "
    "elsewhere.",
    "Then softmax as before: subtract the largest of each row, take exp, divide by the "
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
    yield (rng.normal(size=(4, 4)) - 4e9,)  # below any finite substitute for -inf
    for shift, size in ((0, 0.01), (0, 1), (0, 20), (-1000, 1)):
        yield (rng.normal(size=(18, 18)) * size + shift,)
    future = np.triu(np.full((4, 4), 4e9), 1)  # by more than any finite substitute
    yield (rng.integers(-3, 4, (4, 4)) + future,)  # whole: x - max is exact


def mistake_not_itself(scores):
    """Token i does not see itself, and the first token sees nothing at all, which
    gives 0 / 0: allow j <= i, not j < i."""
    return softmax(np.where(np.tri(len(scores), k=-1) > 0, scores, -np.inf))


def mistake_one_ahead(scores):
    """Token i sees the token after it: allow j <= i, which is np.tril without an
    offset."""
    return softmax(np.where(np.tri(len(scores), k=1) > 0, scores, -np.inf))


def mistake_past_hidden(scores):
    """The past is hidden and the future is visible: set scores above the diagonal to
    -inf, where j > i."""
    return softmax(np.where(np.triu(np.ones(scores.shape)) > 0, scores, -np.inf))


def mistake_finite(scores):
    """Hidden scores are set to a finite negative number: where all visible scores are
    lower, the future gets the weight. Use -np.inf."""
    return softmax(np.where(np.tri(len(scores)) > 0, scores, -100))


def mistake_zeros(scores):
    """Hidden scores are 0, and exp(0) = 1 is a weight like any other: make them
    -inf."""
    return softmax(np.tril(scores))


def mistake_no_division(scores):
    """The weights are masked after the softmax and the rows no longer sum to 1: mask
    the scores before it, or divide each row by its new sum."""
    return np.tril(softmax(scores))


def mistake_zero_times_infinity(scores):
    """A mask of 0 and 1 is multiplied by -inf, and 0 · ∞ is NaN: select with np.where
    instead."""
    return softmax(scores + np.triu(np.ones(scores.shape), 1) * -np.inf)


def mistake_subtracted(scores):
    """A finite number is subtracted from the hidden scores: where the future is higher
    by more than that, it gets the weight. Set these scores to -np.inf."""
    return softmax(scores - np.triu(np.full(scores.shape, 100.0), 1))


def mistake_no_mask(scores):
    """Every token sees the future: hide scores[i, j] where j > i before the softmax."""
    return softmax(scores)


def mistake_two_tokens(scores):
    """A token sees only itself and the one before it: it sees all tokens before it,
    j <= i."""
    near = np.tri(len(scores)) - np.tri(len(scores), k=-2)
    return softmax(np.where(near > 0, scores, -np.inf))


def mistake_overflow(scores):
    """exp of a large score is infinite, or all of a row are 0, and the division
    gives NaN: subtract the largest visible score of each row before exp."""
    parts = np.exp(np.where(np.tri(len(scores)) > 0, scores, -np.inf))
    return parts / parts.sum(axis=-1, keepdims=True)


def mistake_largest_of_all(scores):
    """The largest score is taken before masking, so a row can be 0 / 0: hide the future
    first, then subtract the largest visible score."""
    parts = np.exp(scores - scores.max(axis=-1, keepdims=True)) * np.tri(len(scores))
    return parts / parts.sum(axis=-1, keepdims=True)


def mistake_plus_infinity(scores):
    """Hidden scores are +inf, which gives NaN: make them -inf, whose exp is 0."""
    return softmax(np.where(np.tri(len(scores)) > 0, scores, np.inf))


def mistake_plus_finite(scores):
    """Hidden scores are a large positive number, so the future gets all of the weight:
    make them -inf."""
    return softmax(np.where(np.tri(len(scores)) > 0, scores, 1e9))


def mistake_added(scores):
    """A large number is added above the diagonal, or subtracted elsewhere, so the
    future gets all of the weight: set the scores above the diagonal to -inf."""
    return softmax(scores + np.triu(np.full(scores.shape, 1e9), 1))


def mistake_not_itself_finite(scores):
    """Token i does not see itself, and the first token sees all tokens equally, because
    its whole row is one finite number: allow j <= i, and use -np.inf."""
    return softmax(np.where(np.tri(len(scores), k=-1) > 0, scores, -1e9))


def mistake_not_itself_subtracted(scores):
    """A large number is subtracted on the diagonal too, so token i does not see itself:
    hide only j > i, np.triu with k=1, and use -np.inf."""
    return softmax(scores - np.triu(np.full(scores.shape, 1e9)))


def mistake_equal_weights(scores):
    """All visible tokens have the same weight: it comes from the softmax of their
    scores."""
    return np.tri(len(scores)) / np.arange(1, len(scores) + 1)[:, None]


def mistake_over_queries(scores):
    """Your softmax runs over the queries, so the columns sum to 1: it must run over the
    keys, axis=-1."""
    hidden = np.where(np.tri(len(scores)) > 0, scores, -np.inf)
    return softmax(hidden.T).T
