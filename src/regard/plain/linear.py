"""A linear layer with an optional bias: y = x Wᵀ + b.

W is stored as (out, in), as in PyTorch: row i produces component i of y.

Next: norm.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from regard.arrays import Array, namespace

Weights = Mapping[str, Array]  # names as in config.py


class Linear(NamedTuple):
    """The weights of y = x Wᵀ + b.

    >>> import numpy as np
    >>> Linear(np.asarray([[1.0, 2.0]]))(np.asarray([3.0, 4.0]))
    array([11.])
    """

    weight: Array  # (out, in)
    bias: Array | None = None  # (out,)

    def __call__(self, x: Array) -> Array:
        xp = namespace(x=x, weight=self.weight)
        y = xp.matmul(x, xp.matrix_transpose(self.weight))
        return y if self.bias is None else y + self.bias

    def rows(self, start: int, stop: int) -> Linear:
        """Return the layer that computes only y[..., start:stop]."""
        bias = None if self.bias is None else self.bias[start:stop]
        return Linear(self.weight[start:stop, :], bias)


def find_linear(weights: Weights, name: str) -> Linear:
    """Return the linear layer with this name, with its bias if it has one."""
    return Linear(weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def select_weights(weights: Weights, prefix: str) -> dict[str, Array]:
    """Return the weights whose names start with a prefix, with the prefix removed."""
    return {
        name.removeprefix(prefix): x
        for name, x in weights.items()
        if name.startswith(prefix)
    }
