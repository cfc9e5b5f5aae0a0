"""The feed-forward layer: one wide hidden layer, applied to each token separately.

    relu, gelu     down(activation(up(x)))
    swiglu         down(silu(gate(x)) * up(x)),   silu(x) = x / (1 + exp(-x))

    gelu(x) = x Φ(x),  Φ(x) = (1 + erf(x / √2)) / 2,  the normal distribution function

Next: multihead.py
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from regard.arrays import Array, constant, namespace
from regard.errors import OptionError
from regard.plain.linear import Linear

POINTS = np.polynomial.legendre.leggauss(50)  # Gauss-Legendre: erf to 1e-15


def relu(x: Array) -> Array:
    """Return x, or 0 where it is negative."""
    return namespace(x=x).where(x > 0, x, constant(0, x))


def silu(x: Array) -> Array:
    """Return x / (1 + exp(-x)), in a form that cannot overflow."""
    return 0.5 * x * (1 + namespace(x=x).tanh(0.5 * x))


def gelu(x: Array) -> Array:
    """Return x Φ(x)."""
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def gelu_tanh(x: Array) -> Array:
    """Return GPT-2's approximation of x Φ(x)."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + namespace(x=x).tanh(inner))


def erf(x: Array) -> Array:
    """Return 2/√π ∫ exp(-t²) dt from 0 to x; the Array API has no erf."""
    xp = namespace(x=x)
    x = xp.clip(x, -6, 6)  # beyond 6, erf is 1 to sixteen digits
    total = 0 * x
    for point, weight in zip(*POINTS, strict=True):
        t = x * float(point + 1) / 2  # quadrature points between 0 and x
        total = total + float(weight) * xp.exp(-t * t)
    return x * total / math.sqrt(math.pi)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
}


def feed_forward(x: Array, up: Linear, down: Linear, activation: str) -> Array:
    """Return down(activation(up(x))); for swiglu, `up` has the gate's rows first."""
    hidden = up(x)
    if activation == "swiglu":
        half = hidden.shape[-1] // 2
        return down(silu(hidden[..., :half]) * hidden[..., half:])
    if activation not in ACTIVATIONS:
        known = ", ".join([*ACTIVATIONS, "swiglu"])
        raise OptionError(f'activation="{activation}", expected one of {known}.')
    return down(ACTIVATIONS[activation](hidden))
