"""Scaling: why scores are divided by √d

A dot product adds up d products, so it grows with the width: if the numbers of q and
k are random with standard deviation 1, their score has a standard deviation of √d. At
d = 512 scores differ by some 20, and softmax gives nearly all weight to one key. Then
the gradient vanishes, because a small change of a score does not change the weights.

So every score is divided by the square root of the width:

    scores[i, j] = q[i] · k[j] / √d

Now the standard deviation is 1 at every width. d is the width of queries and keys,
not the number of keys, and not the width of the values.

For example q = [[1, 1, 1, 1]] and k = [[1, 2, 3, 4]] have d = 4: the score is
10 / 2 = 5.

Write `scaled_scores(q, k)` for q of shape (N, d) and k of shape (M, d).

Next: attend.py
"""

import numpy as np

NAME = "scaled_scores"
MINUTES = 5
NEEDS = ("scores",)
EXTRA = ""
STUB = '''import numpy as np


def scaled_scores(q, k):
    """Return the scores (N, M) of q (N, d) and k (M, d), divided by the root of d."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Compute the table of scores as before, then divide it by one number.",
    "d is the size of the last axis of q, and also of k: q.shape[-1].",
    "Divide q @ k.T by np.sqrt(q.shape[-1]).",
)


def spec(q, k):
    d = q.shape[1]
    table = np.zeros((len(q), len(k)))
    for i in range(len(q)):
        for j in range(len(k)):
            table[i, j] = sum(q[i, n] * k[j, n] for n in range(d)) / d**0.5
    return table


def reference(q, k):
    return q @ k.T / np.sqrt(q.shape[-1])


def draw(rng):
    sizes = ((1, 1, 2), (1, 2, 3), (2, 3, 4), (3, 3, 2), (4, 2, 5), (3, 5, 16))
    for n, m, d in sizes:
        yield rng.normal(size=(n, d)).round(2) + 0.5, rng.normal(size=(m, d)).round(2)
    for n, m, d in ((18, 2, 2), (2, 18, 2), (2, 2, 18), (2, 2, 1)):
        for q_size, k_size in ((1e-3, 1e5), (1e5, 1), (1, 1e-3)):
            yield rng.normal(size=(n, d)) * q_size, rng.normal(size=(m, d)) * k_size


def mistake_no_scale(q, k):
    """The scores are not scaled: divide them by the root of the width, q.shape[-1]."""
    return q @ k.T


def mistake_by_width(q, k):
    """That divides by d itself, or twice by its root, so the scores of wide vectors
    become too small: divide once by the root."""
    return q @ k.T / q.shape[-1]


def mistake_multiplied(q, k):
    """That multiplies by the root of d, which makes wide vectors worse: divide by
    it."""
    return q @ k.T * np.sqrt(q.shape[-1])


def mistake_by_keys(q, k):
    """That divides by the root of the number of keys: the width is what makes a dot
    product grow, so use q.shape[-1]."""
    return q @ k.T / np.sqrt(len(k))


def mistake_by_queries(q, k):
    """That divides by the root of the number of queries: len(q) counts rows, and the
    width d is q.shape[-1]."""
    return q @ k.T / np.sqrt(len(q))


def mistake_by_square(q, k):
    """That divides by the square of d: divide by its root, np.sqrt(q.shape[-1])."""
    return q @ k.T / q.shape[-1] ** 2


def mistake_rounded_up(q, k):
    """The root of d is rounded up to an integer: divide by np.sqrt(q.shape[-1]) as it
    is."""
    return q @ k.T / np.ceil(np.sqrt(q.shape[-1]))


def mistake_rounded_down(q, k):
    """The root of d is rounded down to an integer: divide by np.sqrt(q.shape[-1]) as it
    is."""
    return q @ k.T / np.floor(np.sqrt(q.shape[-1]))
