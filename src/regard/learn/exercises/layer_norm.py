"""Layer norm

Numbers grow as they pass through many layers. A norm rescales every token to the same
size before the next layer reads it. Layer norm shifts the `D` numbers of each token to
mean 0 and scales them to variance 1:

    mean = Σ x[n, i] / D
    var  = Σ (x[n, i] - mean)² / D               divided by D, not by D - 1
    y    = (x[n, i] - mean) / √(var + eps)       eps inside the root
    out  = y · weight[i] + bias[i]               learned, one of each for every column

`eps` avoids 0 / 0 for a token whose numbers are all equal: it becomes `bias`.

For the token `[1, 3]` the mean is 2 and the variance is 1, so `y` is nearly `[-1, 1]`.

Write `layer_norm(x, weight, bias, eps)`: for `x` of shape `(N, D)`, `weight` and
`bias` of shape `(D,)`.

Next: rms_norm.py
"""

import math

import numpy as np

NAME = "layer_norm"
MINUTES = 10
NEEDS = ("softmax",)
EXTRA = ""
STUB = '''import numpy as np


def layer_norm(x, weight, bias, eps):
    """Return every row of x (N, D) with mean 0 and variance 1, then weight and bias."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Mean and variance belong to a row: take them along the last axis.",
    "x.mean(axis=-1, keepdims=True) keeps an axis of size 1, so that x - mean works.",
    "(x - mean) / np.sqrt(x.var(axis=-1, keepdims=True) + eps) * weight + bias",
)
ATOL = 1e-9


def spec(x, weight, bias, eps):
    N, D = x.shape
    out = np.zeros((N, D))
    for n in range(N):
        mean = sum(x[n]) / D
        var = sum((x[n, i] - mean) ** 2 for i in range(D)) / D
        for i in range(D):
            y = (x[n, i] - mean) / math.sqrt(var + eps)
            out[n, i] = y * weight[i] + bias[i]
    return out


def reference(x, weight, bias, eps):
    mean = x.mean(axis=-1, keepdims=True)
    var = x.var(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(var + eps) * weight + bias


def draw(rng):
    for N, D in ((1, 2), (2, 2), (2, 3), (3, 4), (4, int(rng.integers(5, 9)))):
        weight, bias = rng.normal(size=(2, D))
        yield 1 + rng.normal(size=(N, D)), weight, bias, 1e-2
    weight, bias = rng.normal(size=(2, 5))
    yield 100 + 0.001 * rng.normal(size=(3, 5)), weight, bias, 1e-5
    yield np.full((2, 5), 7.0), weight, bias, 1e-5
    for N, D in ((18, 2), (2, 18)):
        weight, bias = rng.normal(size=(2, D))
        for size, eps, much in ((1e-3, 1e-6, 1e-2), (1, 1e-1, 1), (1e5, 1e-6, 1e3)):
            yield rng.normal(size=(N, D)) * size, weight * much, bias * much, eps


def mistake_over_tokens(x, weight, bias, eps):
    """Mean and variance are taken over the tokens: normalize each row separately, with
    axis=-1 and keepdims=True."""
    return (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + eps) * weight + bias


def mistake_d_minus_one(x, weight, bias, eps):
    """The variance is divided by D - 1: divide it by D, so leave out ddof=1."""
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True, ddof=1)
    return (x - mean) / np.sqrt(var + eps) * weight + bias


def mistake_eps_outside(x, weight, bias, eps):
    """eps is added to the standard deviation: add it to the variance, inside the square
    root."""
    mean, std = x.mean(-1, keepdims=True), x.std(-1, keepdims=True)
    return (x - mean) / (std + eps) * weight + bias


def mistake_no_root(x, weight, bias, eps):
    """The numbers are divided by the variance: divide by its square root."""
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / (var + eps) * weight + bias


def mistake_bias_first(x, weight, bias, eps):
    """The bias is added before multiplying by the weight: it is y · weight + bias."""
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return ((x - mean) / np.sqrt(var + eps) + bias) * weight


def mistake_no_eps(x, weight, bias, eps):
    """eps is not used: without it, a token of equal numbers gives 0 / 0."""
    mean, std = x.mean(-1, keepdims=True), x.std(-1, keepdims=True)
    return (x - mean) / np.where(std == 0, np.nan, std) * weight + bias


def mistake_no_weight_no_bias(x, weight, bias, eps):
    """Weight and bias are not used: the result is y · weight + bias."""
    return reference(x, np.ones_like(weight), np.zeros_like(bias), eps)


def mistake_no_weight(x, weight, bias, eps):
    """The weight is missing: multiply every column by its weight."""
    return reference(x, np.ones_like(weight), bias, eps)


def mistake_no_bias(x, weight, bias, eps):
    """The bias is missing: add it at the end."""
    return reference(x, weight, np.zeros_like(bias), eps)


def mistake_mean_not_removed(x, weight, bias, eps):
    """The mean is not subtracted: it is (x - mean) that is divided."""
    return x / np.sqrt(x.var(-1, keepdims=True) + eps) * weight + bias


def mistake_rms(x, weight, bias, eps):
    """That is RMS norm: subtract the mean, and divide by the root of the variance."""
    square = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(square + eps) * weight + bias
