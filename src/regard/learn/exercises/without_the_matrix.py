"""The same statistic without the matrix

At 131,072 tokens one head has 17 billion weights. Storing them takes 69 GB, and is not
needed: it is enough to keep the queries, the keys, and for each query the log of the
sum of its exponentials, `lse`. Every weight follows from these:

    weights[i, j] = exp(q[i] · k[j] / √d - lse[i])

A statistic that reads one weight per query needs one dot product per query. Memory and
time are proportional to `N`, not `N²`, and the numbers are exact.

If `q · k / √d` is 2 and lse is 2.693, the weight is exp(-0.693) = 0.5.

Write `induction_from_keys(q, k, lse, tokens)`: the same score as before, the mean
weight on the key after the last earlier same token. `q` and `k` are `(N, d)`, `lse`
and `tokens` are `(N,)`. At least one token occurs twice. It is also run at `N = 2000`,
and must not create an array of `N × N` numbers, not even of booleans.

This is how `regard.stats` works: the map of a head at any length, exactly, on a
laptop.

Next: tile_proofs.py
"""

import math
import tracemalloc

import numpy as np

NAME = "induction_from_keys"
MINUTES = 15
NEEDS = ("induction_head", "merge_parts")
EXTRA = ""
STUB = '''import numpy as np


def induction_from_keys(q, k, lse, tokens):
    """Return the mean weight on the key after the last earlier same token."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "First find which keys are read: a list of queries and a list of their keys j + 1.",
    "Then compute one dot product per pair: np.sum(q[rows] * k[keys], axis=1).",
    "np.mean(np.exp(np.sum(q[rows] * k[keys], axis=1) / np.sqrt(d) - lse[rows]))",
)


def spec(q, k, lse, tokens):
    found = []
    for i in range(len(tokens)):
        for j in reversed(range(i)):
            if tokens[j] == tokens[i]:
                score = sum(q[i, n] * k[j + 1, n] for n in range(q.shape[1]))
                found.append(math.exp(score / math.sqrt(q.shape[1]) - lse[i]))
                break
    return sum(found) / len(found)


def reference(q, k, lse, tokens):
    rows, keys, last = [], [], {}
    for i, token in enumerate(tokens):
        if token in last:
            rows.append(i)
            keys.append(last[token] + 1)
        last[token] = i
    scores = np.sum(q[rows] * k[keys], axis=1) / np.sqrt(q.shape[1])
    return np.mean(np.exp(scores - lse[rows]))


def check(fn, rng):
    """Measure the peak memory at 2,000 tokens."""
    N = 2000
    q, k = rng.normal(size=(2, N, 8))
    arguments = q, k, np.full(N, 9.0), rng.integers(500, size=N)
    tracemalloc.start()
    try:
        fn(*arguments)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if most > N * N / 2:  # a table of booleans takes twice that
        return (
            f"The number is right, but at {N} tokens it took {most / 1e6:.1f} MB, "
            "enough for a table of N × N: compute only the weights that are read."
        )
    return None


def draw(rng):
    yield make_call(rng, 2, np.array([5, 9, 5]))
    yield make_call(rng, 3, np.array([7, 8, 7, 7, 3]))
    for N, d in ((6, 2), (9, 4), (12, 3), (int(rng.integers(13, 30)), 8)):
        yield make_call(rng, d, np.append(rng.integers(3, size=N - 4), [1, 0, 1, 1]))
    for words, d in ((2, 2), (9, 18), (60, 1)):
        tokens = rng.integers(words, size=24)
        tokens[-1] = tokens[0]
        yield make_call(rng, d, tokens)
    tokens = rng.integers(4, size=24)
    for q_size, k_size in ((20, 1), (1, 20)):
        q, k = rng.normal(size=(2, 24, 2))
        yield measure_lse(q * q_size, k * k_size, tokens)
        yield measure_lse(np.abs(q), -np.abs(k) * k_size, tokens)  # lse below 0


def make_call(rng, d, tokens):
    q, k = rng.normal(size=(2, len(tokens), d))
    return measure_lse(q, k, tokens)


def measure_lse(q, k, tokens):
    N, d = q.shape
    scores = np.where(np.tri(N) > 0, q @ k.T / np.sqrt(d), -np.inf)
    return q, k, np.logaddexp.reduce(scores, axis=1), tokens


def mistake_no_scale(q, k, lse, tokens):
    """The scale is missing: divide the dot product by √d before subtracting lse."""
    return reference(q * np.sqrt(q.shape[1]), k, lse, tokens)


def mistake_no_lse(q, k, lse, tokens):
    """These are exponentials of scores, not weights: subtract lse before exp."""
    return reference(q, k, np.zeros_like(lse), tokens)


def mistake_divided_by_lse(q, k, lse, tokens):
    """The exponential is divided by lse, but lse is the logarithm of the sum: subtract
    it inside exp."""
    return reference(q, k, np.log(np.abs(lse)), tokens)


def mistake_same_token(q, k, lse, tokens):
    """This reads the weight on the earlier same token itself: read the key after it."""
    return reference(q, np.concatenate([k[:1], k[:-1]]), lse, tokens)


def mistake_all_queries(q, k, lse, tokens):
    """The sum is divided by the number of all queries: divide by the number of those
    with an earlier same token."""
    count = len(tokens) - len(set(tokens.tolist()))
    return reference(q, k, lse, tokens) * count / len(tokens)


def mistake_lse_of_the_key(q, k, lse, tokens):
    """The lse of the key is subtracted: the weights of query i are divided by its own
    sum, so subtract lse[i]."""
    return np.mean([np.exp(s - lse[j]) for _, j, s in list_scores(q, k, tokens)])


def list_scores(q, k, tokens):  # query, key and score of each pair, for the mistakes
    found, last = [], {}
    for i, token in enumerate(tokens.tolist()):
        if token in last:
            j = last[token] + 1
            found.append((i, j, q[i] @ k[j] / math.sqrt(q.shape[1])))
        last[token] = i
    return found


def mistake_sum(q, k, lse, tokens):
    """That is the sum of the weights: divide it by their number."""
    return np.sum([np.exp(s - lse[i]) for i, _, s in list_scores(q, k, tokens)])


def mistake_logarithm(q, k, lse, tokens):
    """These are logarithms of the weights: apply exp before the mean."""
    return np.mean([s - lse[i] for i, _, s in list_scores(q, k, tokens)])
