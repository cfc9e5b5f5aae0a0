"""RMS norm

Llama and similar models omit half of layer norm: no mean is subtracted, and there is no
bias. A token is only scaled, so that the mean of its squares becomes 1:

    rms[n]    = √(Σ x[n, i]² / D + eps)          root mean square
    out[n, i] = x[n, i] / rms[n] · weight[i]

The token keeps its direction; before the weight is applied, its length is `√D`. RMS
norm saves one pass over the numbers, and models learn about as well.

For the token `[3, 4]` the mean square is 12.5 and its root 3.54, so the result is
`[0.85, 1.13]`. Its length is 1.41, which is the root of 2.

Write `rms_norm(x, weight, eps)`: for `x` of shape `(N, D)` and `weight` of shape
`(D,)`.

Next: feed_forward.py
"""

import math

import numpy as np

NAME = "rms_norm"
MINUTES = 6
NEEDS = ("layer_norm",)
EXTRA = ""
STUB = '''import numpy as np


def rms_norm(x, weight, eps):
    """Return every row of x (N, D) with a mean square of 1, times weight."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Square, take the mean of each row, add eps, take the root, divide.",
    "np.mean(x * x, axis=-1, keepdims=True) is the mean square, (N, 1).",
    "x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight",
)
ATOL = 1e-9


def spec(x, weight, eps):
    N, D = x.shape
    out = np.zeros((N, D))
    for n in range(N):
        square = sum(x[n, i] ** 2 for i in range(D)) / D
        for i in range(D):
            out[n, i] = x[n, i] / math.sqrt(square + eps) * weight[i]
    return out


def reference(x, weight, eps):
    square = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(square + eps) * weight


def draw(rng):
    for N, D in ((1, 2), (2, 2), (2, 3), (3, 4), (4, int(rng.integers(5, 9)))):
        yield 1 + rng.normal(size=(N, D)), rng.normal(size=D), 1e-2
    yield 0.001 * rng.normal(size=(3, 5)), rng.normal(size=5), 1e-5
    yield np.zeros((2, 5)), rng.normal(size=5), 1e-5
    for N, D in ((18, 2), (2, 18)):
        for size, eps, much in ((1e-3, 1e-6, 1e-2), (1, 1e-1, 1), (1e5, 1e-6, 1e3)):
            yield rng.normal(size=(N, D)) * size, rng.normal(size=D) * much, eps


def mistake_mean_removed(x, weight, eps):
    """The mean is subtracted, as in layer norm: RMS norm only scales."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return reference(centred, weight, eps)


def mistake_sum(x, weight, eps):
    """The squares are summed, not averaged: divide their sum by D, so that the length
    becomes √D and not 1."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps) * weight


def mistake_over_tokens(x, weight, eps):
    """The mean square is taken over the tokens: normalize each row separately, with
    axis=-1 and keepdims=True."""
    return x / np.sqrt(np.mean(x * x, axis=0) + eps) * weight


def mistake_eps_outside(x, weight, eps):
    """eps is added after the root: add it to the mean square, inside the root."""
    return x / (np.sqrt(np.mean(x * x, axis=-1, keepdims=True)) + eps) * weight


def mistake_no_root(x, weight, eps):
    """The numbers are divided by the mean square: divide by its square root."""
    return x / (np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def mistake_no_weight(x, weight, eps):
    """The weight is missing: multiply every column by its weight."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def mistake_mean_of_sizes(x, weight, eps):
    """That divides by the mean of the absolute values: square the numbers, average, and
    take the root."""
    return x / (np.abs(x).mean(axis=-1, keepdims=True) + eps) * weight


def mistake_no_eps(x, weight, eps):
    """eps is not used: without it, a token of zeros gives 0 / 0."""
    root = np.sqrt(np.mean(x * x, axis=-1, keepdims=True))
    return x / np.where(root == 0, np.nan, root) * weight


def mistake_whole_table(x, weight, eps):
    """The mean square is taken over all tokens at once: normalize each row separately,
    with axis=-1 and keepdims=True."""
    return x / np.sqrt(np.mean(x * x) + eps) * weight


def mistake_divided_by_weight(x, weight, eps):
    """The result is divided by the weight: multiply by it."""
    return reference(x, np.ones_like(weight), eps) / weight
