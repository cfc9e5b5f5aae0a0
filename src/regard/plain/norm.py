"""Softmax, layer norm and rms norm over the last axis.

    softmax(x)    = exp(x - max x) / sum exp(x - max x)      a row sums to 1
    layer_norm(x) = (x - mean x) / sqrt(var x + eps)         mean 0, variance 1
    rms_norm(x)   = x / sqrt(mean x² + eps)                  length sqrt(D)

The norms are followed by an elementwise weight, and layer norm also by a bias. They are
computed in at least float32, because sums in half precision lose small terms.

Next: feedforward.py
"""

from __future__ import annotations

import math

from regard.arrays import Array, accumulator, constant, namespace


def softmax(x: Array) -> Array:
    """Return the softmax over the last axis; a row of only -inf gives a row of 0.

    >>> import numpy as np
    >>> softmax(np.asarray([1000.0, 1000.0, -np.inf]))
    array([0.5, 0.5, 0. ])
    """
    xp = namespace(x=x)
    top = xp.max(x, axis=-1, keepdims=True)
    top = xp.where(top == -math.inf, constant(0, top), top)
    parts = xp.exp(x - top)  # at most 1: no overflow
    total = xp.sum(parts, axis=-1, keepdims=True)
    return parts / xp.where(total == 0, constant(1, total), total)


def layer_norm(
    x: Array, weight: Array | None = None, bias: Array | None = None, eps: float = 1e-5
) -> Array:
    """Normalize the last axis to mean 0 and variance 1."""
    xp = namespace(x=x)
    wide = xp.astype(x, accumulator(xp, x), copy=False)
    centred = wide - xp.mean(wide, axis=-1, keepdims=True)
    variance = xp.mean(centred * centred, axis=-1, keepdims=True)
    y = xp.astype(centred / xp.sqrt(variance + eps), x.dtype, copy=False)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def rms_norm(x: Array, weight: Array | None = None, eps: float = 1e-5) -> Array:
    """Scale the last axis to length sqrt(D)."""
    xp = namespace(x=x)
    wide = xp.astype(x, accumulator(xp, x), copy=False)
    square = xp.mean(wide * wide, axis=-1, keepdims=True)
    y = xp.astype(wide / xp.sqrt(square + eps), x.dtype, copy=False)
    return y if weight is None else y * weight
