"""All queries and all keys

A sequence has many queries and keys. They are stacked as the rows of two matrices, q
of shape (N, d) and k of shape (M, d), and every query is compared with every key:

    scores[i, j] = q[i] · k[j]        a table of shape (N, M)

Row i belongs to query i, column j to key j. N and M may differ: a word of one
sentence can attend to all words of another. As a matrix product the table is

    scores = q kᵀ

For example q = [[1, 0]] and k = [[2, 5], [3, 7]] give [[2, 3]]: one query, two keys.

Write `scores(q, k)`. Return the table.

Next: softmax.py
"""

import numpy as np

NAME = "scores"
MINUTES = 5
NEEDS = ("one_score",)
EXTRA = ""
STUB = '''import numpy as np


def scores(q, k):
    """Return the table of scores (N, M) of the queries q (N, d) and keys k (M, d)."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Start with two loops: scores[i, j] is one_score(q[i], k[j]).",
    "q @ x multiplies each row of q by each column of x. Which x has the keys as its "
    "columns?",
    "The keys are the rows of k, so they are the columns of `k.T`.",
)


def spec(q, k):
    table = np.zeros((len(q), len(k)))
    for i in range(len(q)):
        for j in range(len(k)):
            for n in range(q.shape[1]):
                table[i, j] += q[i, n] * k[j, n]
    return table


def reference(q, k):
    return q @ k.T


def draw(rng):
    sizes = ((1, 1, 2), (1, 2, 2), (2, 3, 2), (3, 3, 3), (4, 2, 3), (5, 6, 4))
    for n, m, d in sizes:
        yield rng.normal(size=(n, d)).round(2) + 0.5, rng.normal(size=(m, d)).round(2)
    for n, m, d in ((18, 2, 2), (2, 18, 2), (2, 2, 18), (2, 2, 1)):
        for q_size, k_size in ((1e-3, 1e5), (1e5, 1), (1, 1e-3)):
            yield rng.normal(size=(n, d)) * q_size, rng.normal(size=(m, d)) * k_size


def mistake_no_transpose(q, k):
    """That multiplies by the columns of k, but the keys are its rows: transpose k, as
    in q @ k.T."""
    return q @ k


def mistake_transposed(q, k):
    """That has the keys as rows and the queries as columns: row i must belong to
    query i, so put q first, as in q @ k.T."""
    return k @ q.T


def mistake_same_row(q, k):
    """That compares query i only with key i: compare every query with every key, which
    gives a table of shape (N, M)."""
    return np.sum(q * k, axis=-1)


def mistake_own_keys(q, k):
    """That compares the queries with themselves: the keys are in k."""
    return q @ q.T


def mistake_one_loop(q, k):
    """One loop compares query i only with key i: compare every query with every key,
    with two loops and a table of shape (N, M)."""
    return np.array([q[i] @ k[i] for i in range(len(q))])


def mistake_integers(q, k):
    """The scores are rounded to integers: make the table with np.zeros((N, M)), which
    holds fractions, and do not convert it."""
    return (q @ k.T).astype(int)


def mistake_first_key(q, k):
    """Every query is compared with the first key only: column j belongs to k[j]."""
    return np.repeat(q @ k[:1].T, len(k), axis=1)


def mistake_square_table(q, k):
    """The table has one column for each query: it needs one for each key, so its shape
    is (len(q), len(k))."""
    table = np.zeros((len(q), len(q)))
    for i in range(len(q)):
        for j in range(min(len(q), len(k))):
            table[i, j] = q[i] @ k[j]
    return table


def mistake_scaled(q, k):
    """The scores are divided by the root of d: that is the exercise after the next;
    here they are plain dot products."""
    return q @ k.T / np.sqrt(q.shape[-1])
