"""One query, one key

Attention begins with a question: how well does this key answer that query? Both are
vectors of the same width d, and the answer is their dot product:

    score = q[0] k[0] + q[1] k[1] + … + q[d-1] k[d-1]

It is large if the two point in the same direction, 0 if they are orthogonal, and
negative if they point in opposite directions. It also grows with their lengths.

For example q = [1, 2] and k = [3, 4] give 1 · 3 + 2 · 4 = 11.

Write `one_score(q, k)`. Both arguments are NumPy arrays of shape (d,). Return one
number.

Next: scores.py
"""

import numpy as np

NAME = "one_score"
MINUTES = 3
NEEDS = ()
EXTRA = ""
STUB = '''import numpy as np


def one_score(q, k):
    """Return how well the key k (d,) answers the query q (d,): one number."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Multiply the two vectors number by number first: q * k has shape (d,).",
    "A score is one number, so add up those d products.",
    "NumPy has an operator for both at once: `q @ k`.",
)


def spec(q, k):
    score = 0.0
    for i in range(len(q)):
        score += q[i] * k[i]
    return score


def reference(q, k):
    return q @ k


def draw(rng):
    for d in (1, 2, 2, 3, 5, 8):
        yield rng.normal(size=d).round(2) + 0.5, rng.normal(size=d).round(2) - 0.5
    yield (rng.normal(size=4) * 1e3).round(), (rng.normal(size=4) * 1e3).round()
    for q_size, k_size in ((1, 1), (1e-3, 1e5), (1e5, 1e-3)):
        yield rng.normal(size=18) * q_size, rng.normal(size=18) * k_size


def mistake_no_sum(q, k):
    """That gives the d products of the pairs of numbers: a score is one number, their
    sum."""
    return q * k


def mistake_outer(q, k):
    """That multiplies every number of q by every number of k, which gives a table: a
    score is the sum of q[i] k[i], with the same i."""
    return np.outer(q, k)


def mistake_cosine(q, k):
    """That is the cosine, which divides by the lengths of q and k: a score does not,
    so leave the lengths in."""
    return q @ k / (np.linalg.norm(q) * np.linalg.norm(k))


def mistake_mean(q, k):
    """That is the mean of the products: add them up and do not divide by d."""
    return np.mean(q * k)


def mistake_added(q, k):
    """That adds q and k: multiply them number by number, and add up the products."""
    return np.sum(q + k)


def mistake_last_left_out(q, k):
    """The last pair of numbers is left out: range(len(q)) already ends before len(q),
    so do not subtract 1."""
    return sum(q[i] * k[i] for i in range(len(q) - 1))


def mistake_distance(q, k):
    """That is the distance of q and k, which is small where they agree: multiply the
    numbers instead of subtracting them."""
    return np.linalg.norm(q - k)


def mistake_scaled(q, k):
    """That is divided by the root of d: here a score is the dot product itself, and
    scaling is a later exercise."""
    return q @ k / np.sqrt(len(q))
