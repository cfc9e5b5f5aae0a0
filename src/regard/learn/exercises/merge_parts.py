"""Merge attention over parts of the keys

Split the keys into two parts and run attention on each. Can the two outputs be merged
without the scores? Yes, if each part also returns the log of its sum of exponentials,
`lse = log Σ exp(score)`. Then `exp(lse)` is the weight of a part:

    lse = log(exp(lse_a) + exp(lse_b))
    out = exp(lse_a - lse) · out_a + exp(lse_b - lse) · out_b

So a long sequence can be distributed over machines, and a kernel can work tile by tile.
The factors sum to 1, and the order of the parts does not matter.

As with softmax, subtract the larger of the two before `exp`: exp(1000) is infinite. A
part without any unmasked key has `lse = -inf` and `out = 0`, and must change nothing.
If both parts are like this, the result is `out = 0` and `lse = -inf`, not NaN.

Two parts with lse 0 merge to the mean of their outs, with lse = log 2 = 0.693.

Write `merge_parts(out_a, lse_a, out_b, lse_b)`: the tuple `out, lse`. `out_a` and
`out_b` are `(N, dv)`, `lse_a` and `lse_b` are `(N,)`, one number for each query.

Next: grouped_heads.py
"""

import math

import numpy as np

NAME = "merge_parts"
MINUTES = 18
NEEDS = ("online_softmax",)
EXTRA = ""
STUB = '''import numpy as np


def merge_parts(out_a, lse_a, out_b, lse_b):
    """Return out (N, dv) and lse (N,) over the keys of both parts."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "top = np.maximum(lse_a, lse_b) is subtracted before exp and added after log.",
    "np.logaddexp(lse_a, lse_b) is that in one call, and gives -inf if both are -inf.",
    "In np.exp(lse_a - lse), replace lse by 0 where it is -inf: both factors become 0.",
)


def spec(out_a, lse_a, out_b, lse_b):
    out, lse = np.zeros(out_a.shape), np.full(len(lse_a), -math.inf)
    for n in range(len(lse_a)):
        top = max(lse_a[n], lse_b[n])
        if top == -math.inf:  # no unmasked key in either part
            continue
        a, b = math.exp(lse_a[n] - top), math.exp(lse_b[n] - top)
        lse[n] = top + math.log(a + b)
        for i in range(out.shape[1]):
            out[n, i] = (a * out_a[n, i] + b * out_b[n, i]) / (a + b)
    return out, lse


def reference(out_a, lse_a, out_b, lse_b):
    lse = np.logaddexp(lse_a, lse_b)
    safe = np.where(lse == -np.inf, 0, lse)[:, None]  # no -inf - -inf
    a, b = np.exp(lse_a[:, None] - safe), np.exp(lse_b[:, None] - safe)
    return a * out_a + b * out_b, lse


def draw(rng):
    for N, dv in ((1, 1), (2, 2), (2, 3), (4, int(rng.integers(3, 6)))):
        (out_a, out_b), (lse_a, lse_b) = rng.normal(size=(2, N, dv)), rng.random((2, N))
        yield out_a, lse_a + 0.5, out_b, lse_b + 2
    out_a, out_b = rng.normal(size=(2, 3, 4))
    yield out_a, np.array([1000, 1.0, -1000]), out_b, np.array([1001, 1000.0, -1001])
    seen = np.array([[1.0], [0], [0], [1]])  # no key: out 0, lse -inf
    out_a, lse_a = rng.normal(size=(4, 4)) * seen, np.array([0.5, -np.inf, -np.inf, 2])
    out_b, lse_b = rng.normal(size=(4, 4)) * seen[[1, 0, 2, 0]], lse_a[[1, 0, 2, 3]]
    yield out_a, lse_a, out_b, lse_b
    yield out_a[[2, 3]], lse_a[[2, 3]], out_b[[2, 3]], lse_b[[2, 3]]
    for N, dv in ((18, 2), (2, 18), (2, 18)):
        (out_a, out_b), (lse_a, lse_b) = rng.normal(size=(2, N, dv)), rng.random((2, N))
        yield out_a * 1e5, lse_a * 20, out_b / 100, lse_b * 20
        yield out_a / 100, -lse_a, out_b * 1e5, -lse_b
        yield out_a, lse_a / 100, out_b, lse_b / 100


def mistake_mean(out_a, lse_a, out_b, lse_b):
    """Both parts have the same weight: multiply each by exp(its lse - lse of both)."""
    return (out_a + out_b) / 2, np.logaddexp(lse_a, lse_b)


def mistake_no_exp(out_a, lse_a, out_b, lse_b):
    """The parts are weighted by lse itself, which is a logarithm: use exp(lse)."""
    total = np.where(np.isfinite(lse_a + lse_b), lse_a + lse_b, 1)
    a, b = (np.where(np.isfinite(x), x, 0) / total for x in (lse_a, lse_b))
    return a[:, None] * out_a + b[:, None] * out_b, np.logaddexp(lse_a, lse_b)


def mistake_lse_added(out_a, lse_a, out_b, lse_b):
    """The two lse are added, but the sums inside the logarithms should be: lse =
    log(exp(lse_a) + exp(lse_b))."""
    return reference(out_a, lse_a, out_b, lse_b)[0], lse_a + lse_b


def mistake_overflow(out_a, lse_a, out_b, lse_b):
    """exp of a large lse is infinite, or both are 0, and the division gives NaN:
    subtract the larger lse first."""
    with np.errstate(all="ignore"):
        a, b = np.exp(lse_a)[:, None], np.exp(lse_b)[:, None]
        return (a * out_a + b * out_b) / (a + b), np.log(a + b)[:, 0]


def mistake_both_empty(out_a, lse_a, out_b, lse_b):
    """A query without unmasked keys in either part becomes NaN, because -inf minus -inf
    is NaN: its out must be 0 and its lse -inf."""
    with np.errstate(all="ignore"):
        top = np.maximum(lse_a, lse_b)
        a, b = np.exp(lse_a - top)[:, None], np.exp(lse_b - top)[:, None]
        return (a * out_a + b * out_b) / (a + b), top + np.log(a + b)[:, 0]


def mistake_outputs_added(out_a, lse_a, out_b, lse_b):
    """The outputs are added: both are averages already, so weight each by exp(its lse -
    lse of both)."""
    return out_a + out_b, np.logaddexp(lse_a, lse_b)


def mistake_base_two(out_a, lse_a, out_b, lse_b):
    """These are powers of 2: lse is a natural logarithm, so use np.exp and
    np.logaddexp."""
    lse = np.logaddexp2(lse_a, lse_b)
    safe = np.where(np.isfinite(lse), lse, 0)
    a, b = np.exp2(lse_a - safe)[:, None], np.exp2(lse_b - safe)[:, None]
    return a * out_a + b * out_b, lse


def mistake_larger_wins(out_a, lse_a, out_b, lse_b):
    """Only the part with the larger lse is kept: both contribute, by exp(lse)."""
    first = lse_a > lse_b
    return np.where(first[:, None], out_a, out_b), np.maximum(lse_a, lse_b)


def mistake_largest_lse(out_a, lse_a, out_b, lse_b):
    """The outputs are right, but lse is the larger of the two: it is log(exp(lse_a) +
    exp(lse_b))."""
    return reference(out_a, lse_a, out_b, lse_b)[0], np.maximum(lse_a, lse_b)


def mistake_parts_swapped(out_a, lse_a, out_b, lse_b):
    """Each part has the weight of the other one: multiply out_a by exp(lse_a - lse)."""
    return reference(out_b, lse_a, out_a, lse_b)
