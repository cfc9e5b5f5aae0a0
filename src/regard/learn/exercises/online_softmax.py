"""Softmax in one pass, with a running maximum

Softmax subtracts the largest score, so it seems to need the whole row first. It does
not. Go through the keys one by one and keep three things: the largest score so far
(`top`), the sum of `exp(score - top)`, and the sum of `exp(score - top) · value`. When
a larger score comes, the sums so far were computed with the old maximum, and are
corrected by one factor:

    new   = max(top, score)
    total = total · exp(top - new) + exp(score - new)
    mix   = mix · exp(top - new) + exp(score - new) · value
    top   = new

At the end `mix / total` is the output of attention. Fast kernels work this way: no row
is ever stored.

Before the first key `top` is -inf, `total` is 0 and `mix` is 0. A masked key has the
score -inf and changes nothing; take care if both are -inf, because -inf minus -inf is
NaN.

From `top = 0, total = 1`, the score log 2 gives `total = 1 · 1/2 + 1 = 1.5`.

Write `add_key(top, total, mix, score, value)`: the new `top, total, mix`, after one
more key.

Next: merge_parts.py
"""

import math

import numpy as np

NAME = "add_key"
MINUTES = 15
NEEDS = ("softmax", "kv_cache")
EXTRA = ""
STUB = '''import numpy as np


def add_key(top, total, mix, score, value):
    """Return top, total and mix (dv,) after one more key of this score and value."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Two factors are enough: one for the sums so far, one for the new key.",
    "old = np.exp(top - new) and now = np.exp(score - new); if score is -inf, return "
    "the arguments unchanged.",
    "return new, total * old + now, mix * old + now * value",
)


def spec(top, total, mix, score, value):
    if score == -math.inf:
        return top, total, mix
    new = max(top, score)
    old = math.exp(top - new)  # 0 before the first key
    now = math.exp(score - new)
    added = np.zeros(len(mix))
    for i in range(len(mix)):
        added[i] = mix[i] * old + now * value[i]
    return new, total * old + now, added


def reference(top, total, mix, score, value):
    if score == -np.inf:
        return top, total, mix
    new = max(top, score)
    old, now = np.exp(top - new), np.exp(score - new)
    return new, total * old + now, mix * old + now * value


def draw(rng):
    inf, value = np.inf, rng.normal(size=2)
    for top, total, score in (
        (0.0, 1.0, -1.0),
        (0.0, 1.0, math.log(2)),
        (1.0, 2.0, 1.5),
    ):
        yield top, total, rng.normal(size=2), score, value
    yield -inf, 0.0, np.zeros(2), 0.5, value
    yield 0.3, 1.2, value, -inf, rng.normal(size=2)
    yield -inf, 0.0, np.zeros(3), -inf, rng.normal(size=3)
    yield 1000.0, 1.5, rng.normal(size=3), 1001.0, rng.normal(size=3)
    yield -900.0, 1.5, rng.normal(size=4), -1000.0, rng.normal(size=4)
    top, score = 3 * rng.normal(size=2)
    yield top, 1 + rng.random(), rng.normal(size=5), score, rng.normal(size=5)
    yield 0.005, 1.5, rng.normal(size=1), 0.008, rng.normal(size=1)
    for top, score in ((0.5, 0.25), (-300.0, 400.0), (400.0, -300.0)):
        mix, value = rng.normal(size=(2, 18))
        yield top, 1 + 5 * rng.random(), mix * 1e5, score, value * 1e5
        yield top, 1 + 5 * rng.random(), mix / 100, score, value / 100


def mistake_not_corrected(top, total, mix, score, value):
    """The old sums are not corrected for the new maximum: multiply both by exp(top -
    new)."""
    new = max(top, score)
    now = np.exp(score - new) if score > -np.inf else 0.0
    return new, total + now, mix + now * value


def mistake_mix_not_corrected(top, total, mix, score, value):
    """total is corrected for the new maximum, but mix is not: multiply it by exp(top -
    new), too."""
    new, total, _ = reference(top, total, mix, score, value)
    now = np.exp(score - new) if score > -np.inf else 0.0
    return new, total, mix + now * value


def mistake_factor_inverted(top, total, mix, score, value):
    """The factor of the old sums is inverted: it is exp(top - new), which is at most 1,
    not exp(new - top)."""
    new = max(top, score)
    old = np.exp(new - top) if -np.inf < top else 0.0
    now = np.exp(score - new) if score > -np.inf else 0.0
    return new, total * old + now, mix * old + now * value


def mistake_both_infinite(top, total, mix, score, value):
    """-inf minus -inf is NaN if the first key is masked: if the score is -inf, return
    the arguments unchanged."""
    new = max(top, score)
    old, now = (
        math.nan if x == new == -np.inf else np.exp(x - new) for x in (top, score)
    )
    return new, total * old + now, mix * old + now * value


def mistake_no_maximum(top, total, mix, score, value):
    """The exp of the new key uses the old maximum, so a large score overflows: use
    exp(score - new), and correct the old sums."""
    now = np.exp(min(score - top, 700.0)) if -np.inf < top else 1.0
    return max(top, score), total + now, mix + now * value


def mistake_divided(top, total, mix, score, value):
    """mix is divided by total in every step: keep the sums, and divide once at the
    end."""
    new, total, mix = reference(top, total, mix, score, value)
    return new, total, mix / total if score > -np.inf else mix


def mistake_newest_is_largest(top, total, mix, score, value):
    """The maximum is replaced by the new score, even if that is smaller: it is
    max(top, score)."""
    if score == -np.inf:
        return top, total, mix
    old = np.exp(min(top - score, 700.0))
    return score, total * old + 1, mix * old + value


def mistake_value_not_weighted(top, total, mix, score, value):
    """The value is added without its weight: multiply it by exp(score - new)."""
    new, total, _ = reference(top, total, mix, score, value)
    if score == -np.inf:
        return top, total, mix
    return new, total, mix * np.exp(top - new) + value
