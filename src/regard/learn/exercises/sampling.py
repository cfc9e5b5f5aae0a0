"""From logits to the probabilities of the next token

A model gives one logit for each token of the vocabulary. Two options change the
probabilities before a token is sampled. The temperature divides the logits: below 1 the
likely tokens become likelier, above 1 all become more alike. Top-k keeps the `k`
largest logits and gives the others probability 0.

    z = logits / temperature
    z = -inf for all but the k largest
    p = softmax(z)                             sums to 1 over the remaining tokens

Temperature 0 would divide by 0. It means greedy: probability 1 for the token with the
largest logit.

With logits `[0, log 3]` and temperature 1 the probabilities are `[0.25, 0.75]`; with
temperature 0.5 they are `[0.1, 0.9]`, because the odds of 3 are squared; with
temperature 0, or top-k 1, they are `[0, 1]`.

Write `chances(logits, temperature, top_k)`: the probabilities `(V,)`. `top_k` may be as
large as the vocabulary or larger, which keeps all. No two logits are equal. Logits may
be as large as 1000.

Next: kv_cache.py
"""

import math

import numpy as np

NAME = "chances"
MINUTES = 12
NEEDS = ("softmax", "decoder_logits")
EXTRA = ""
STUB = '''import numpy as np


def chances(logits, temperature, top_k):
    """Return the probability of each token, given logits (V,)."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Handle temperature 0 first and return. The rest is divide, cut, softmax.",
    "The k-th largest logit is np.sort(z)[-k]; set everything below it to -np.inf.",
    "z = np.where(z < np.sort(z)[-min(top_k, z.size)], -np.inf, z), then np.exp(z - "
    "z.max()) divided by its sum.",
)


def spec(logits, temperature, top_k):
    V = len(logits)
    order = sorted(range(V), key=lambda i: -logits[i])  # the largest first
    p = np.zeros(V)
    if temperature == 0:
        p[order[0]] = 1
        return p
    for i in order[:top_k]:
        p[i] = math.exp((logits[i] - logits[order[0]]) / temperature)
    return p / sum(p)


def reference(logits, temperature, top_k):
    if temperature == 0:
        return (np.arange(logits.size) == logits.argmax()).astype(float)
    z = logits / temperature
    z = np.where(z < np.sort(z)[-min(top_k, z.size)], -np.inf, z)
    parts = np.exp(z - z.max())
    return parts / parts.sum()


def draw(rng):
    yield np.array([0.0, math.log(3)]), 1.0, 2
    yield np.array([0.0, math.log(3)]), 0.5, 2
    for V, temperature, top_k in ((3, 0.7, 2), (4, 0.0, 4), (5, 2.0, 9), (6, 1.5, 1)):
        yield rng.permutation(V) - 1.5 + rng.random(), temperature, top_k
    V = int(rng.integers(7, 20))
    yield rng.permutation(V) / 2 + rng.random(), 0.8, int(rng.integers(2, V - 2))
    yield 1000 + rng.permutation(8), 1.0, 4
    for temperature, top_k in ((0.0, 3), (0.1, 24), (3.0, 17), (1.0, 2)):
        yield rng.permutation(24) * 0.1 + rng.random(), temperature, top_k
        yield rng.permutation(24) * 0.1 - 1000 - rng.random(), temperature, top_k


def soften(z):
    parts = np.exp(z - z.max())
    return parts / parts.sum()


def cut(z, top_k):
    return np.where(z < np.sort(z)[-min(top_k, z.size)], -np.inf, z)


def mistake_multiplied(logits, temperature, top_k):
    """The logits are multiplied by the temperature: divide by it, so that a low
    temperature makes likely tokens likelier."""
    return soften(cut(logits * temperature, top_k))


def mistake_temperature_last(logits, temperature, top_k):
    """The temperature is applied to the probabilities, where it cancels: divide the
    logits by it, before the softmax."""
    p = reference(logits, float(temperature != 0), top_k)
    return p / p.sum()


def mistake_not_summed_again(logits, temperature, top_k):
    """The probabilities of the kept tokens do not sum to 1: cut the logits before the
    softmax, or divide by the sum again."""
    z = logits / (temperature or 1e-9)
    return np.where(cut(z, top_k) == -np.inf, 0, soften(z))


def mistake_cut_to_zero(logits, temperature, top_k):
    """The other logits are set to 0, which still has a probability: set them to
    -inf."""
    z = logits / (temperature or 1e-9)
    return soften(np.where(cut(z, top_k) == -np.inf, 0, z))


def mistake_smallest_kept(logits, temperature, top_k):
    """The k smallest logits are kept: keep the k largest."""
    z = logits / (temperature or 1e-9)
    return soften(np.where(z > np.sort(z)[min(top_k, z.size) - 1], -np.inf, z))


def mistake_zero_ignored(logits, temperature, top_k):
    """Temperature 0 is ignored: it means greedy, probability 1 for the largest
    logit."""
    return soften(cut(logits / (temperature or 1), top_k))


def mistake_all_kept(logits, temperature, top_k):
    """top_k is not used: set all logits but the k largest to -inf."""
    return reference(logits, temperature, logits.size)


def mistake_divided_by_zero(logits, temperature, top_k):
    """Temperature 0 is divided by: handle it first, it means probability 1 for the
    largest logit."""
    return soften(cut(np.array([z / temperature for z in logits.tolist()]), top_k))


def mistake_nan_at_zero(logits, temperature, top_k):
    """Temperature 0 is divided by, which gives NaN: handle it first, it means
    probability 1 for the largest logit."""
    with np.errstate(all="ignore"):
        return soften(cut(logits / np.float64(temperature), top_k))


def mistake_more_than_there_are(logits, temperature, top_k):
    """top_k may be larger than the number of logits: then all are kept, so use
    min(top_k, len(logits))."""
    if temperature == 0:
        return reference(logits, temperature, top_k)
    z = logits / temperature
    return soften(np.where(z < np.sort(z)[::-1][top_k - 1], -np.inf, z))


def mistake_one_too_many(logits, temperature, top_k):
    """One logit too many is kept: keep exactly k."""
    return reference(logits, temperature, top_k + 1)
