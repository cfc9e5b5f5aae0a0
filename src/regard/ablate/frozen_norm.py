"""A norm with a constant size: what it does to each of the parts it is given.

    layer norm   gain · (x - mean x) / √(var x + eps) + bias
    RMS norm     gain · x / √(mean x² + eps)                    gain: weight, or 1 + it

A norm is not linear, because it divides by the size of its input. With the size frozen
at its value in one run it is: parts of x that add up to x have parts of the output that
add up to the output. Which formula a module computes is found by its numbers, so that
norms of any library are recognised, and none is by its name.

Next: direct_logits.py
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor, nn

CLOSE = 1e-4  # of the largest output, between a module and its formula
EPS = ("eps", "variance_epsilon", "epsilon", "norm_eps", "layer_norm_epsilon")


@dataclass(frozen=True)
class Norm:
    """The formula of a norm."""

    is_centred: bool
    gain: Tensor | float
    bias: Tensor | float
    eps: float

    def apply(self, x: Tensor, *, like: Tensor | None = None) -> Tensor:
        """Return the norm of x, with the size of `like`: that of x unless given."""
        size = self.measure(x if like is None else like)
        return self.gain * (self.centre(x) / size) + self.bias

    def centre(self, x: Tensor) -> Tensor:
        """Return x without its mean, if this norm takes it away."""
        return x - x.mean(-1, keepdim=True) if self.is_centred else x

    def measure(self, x: Tensor) -> Tensor:
        """Return what x is divided by, (…, 1)."""
        return (self.centre(x).square().mean(-1, keepdim=True) + self.eps).sqrt()


def recognise_norm(module: nn.Module, x: Tensor, y: Tensor) -> Norm | None:
    """Return the formula by which a module computed y from x; None if it has none."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if x.shape != y.shape or not x.is_floating_point() or x.shape[-1] < 2:
        return None
    if any(p.shape not in ((), x.shape[-1:]) for p in module.parameters()):
        return None
    x, y = x.detach().double(), y.detach().double()
    gains: list[Any] = [1.0]
    if isinstance(weight, Tensor):
        gains = [weight.detach().double(), 1 + weight.detach().double()]
    shift = bias.detach().double() if isinstance(bias, Tensor) else 0.0
    known = {getattr(module, name, None) for name in EPS}
    eps = [e for e in known if isinstance(e, float)] or [1e-5, 1e-6, 1e-12]
    norms = [Norm(c, g, shift, e) for c, g, e in product((True, False), gains, eps)]
    errors = [float((norm.apply(x) - y).abs().max()) for norm in norms]
    best = min(range(len(norms)), key=errors.__getitem__)
    size = float(y.abs().max())
    return norms[best] if errors[best] <= CLOSE * size and size > 0 else None


def freeze(norm: Norm, x: Tensor, y: Tensor) -> Tensor:
    """Return y, the norm of x, whose gradient by x is that with a constant size."""
    linear = norm.apply(x.double(), like=x.detach().double())
    return (y.detach().double() + linear - linear.detach()).to(y.dtype)


def is_small(module: nn.Module) -> bool:
    """Return whether a module has no parts and no matrix, so that it may be a norm."""
    parts = next(module.children(), None)
    return parts is None and all(p.ndim < 2 for p in module.parameters())
