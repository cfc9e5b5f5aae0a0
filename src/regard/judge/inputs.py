"""One question to an attention, and what the definition answers.

    inputs = Inputs(q=q, k=k, v=v, causal=True)       (B, H, N, D), float64, NumPy
    expect(inputs).out                                what is right
    expect_gradients(inputs, g)                       d sum(out · g) / d q, k, v

The gradients are written out by hand, so that they need no library:

    dV = Wᵀ g     dS = W · (g Vᵀ - rowsum(out · g))     dQ = s dS K     dK = s dSᵀ Q

Next: subject.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.definition.attention import Attended, attention
from regard.masks.patterns import causal, window

Numbers = NDArray[np.float64]
Precision = str  # "float64", "float32", "float16" or "bfloat16"


class NotAskedError(Exception):
    """A question that the declared convention has no words for."""


class TroubleError(Exception):
    """What an attention did instead of answering, in one sentence."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """The arrays of one call, in the axes of the definition, and what is asked."""

    q: Numbers  # (B, H, Nq, D)
    k: Numbers  # (B, Hk, Nk, D)
    v: Numbers  # (B, Hk, Nk, Dv)
    mask: NDArray[np.bool_] | None = None  # (B or 1, H or 1, Nq or 1, Nk), True = sees
    causal: bool = False
    q_start: int = 0  # where the first query stands among the keys
    window: int | None = None  # so many others before a query, and itself
    bias: Numbers | None = None  # (B or 1, H or 1, Nq, Nk)
    scale: float | None = None
    softcap: float | None = None
    sink: Numbers | None = None  # (H,)
    literal: Any = None  # a mask that is handed over as it is, whatever it means
    look: bool | None = None  # ask for the weights, or ask not to
    strided: bool = False  # the same numbers, not side by side in memory
    written: str = "plain"  # into a module: "turned" is Wo, "biased" has biases

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The axes (B, H, Nq, Nk) of the scores."""
        return (*self.q.shape[:3], self.k.shape[2])

    def round(self, precision: Precision) -> Inputs:
        """Return what is left of the numbers in a precision."""
        names = ("q", "k", "v", "bias", "sink")
        given = {name: getattr(self, name) for name in names}
        kept: dict[str, Any] = {
            n: round_to(x, precision) for n, x in given.items() if x is not None
        }
        return replace(self, **kept)


def round_to(x: Numbers, precision: Precision) -> Numbers:
    """Return the nearest numbers that a precision has, as float64."""
    if precision != "bfloat16":
        with np.errstate(over="ignore"):  # it becomes infinite
            return np.asarray(x.astype(precision).astype(np.float64))
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # to even, as IEEE does
    finite = np.isfinite(x)
    return np.where(finite, kept.astype(np.uint32).view(np.float32), x)


def allow(inputs: Inputs) -> NDArray[np.bool_] | None:
    """Return who may see whom, (B or 1, H or 1, Nq, Nk); None is everybody."""
    n_q, n_k = inputs.shape[2:]
    parts = [] if inputs.mask is None else [inputs.mask]
    if inputs.causal:
        parts.append(causal().dense((1, 1, n_q, n_k), q_start=inputs.q_start))
    if inputs.window is not None:
        band = window(inputs.window, 0 if inputs.causal else None)
        parts.append(band.dense((1, 1, n_q, n_k), q_start=inputs.q_start))
    if not parts:
        return None
    allowed, *others = parts
    for part in others:
        allowed = allowed & part
    return allowed


def expect(inputs: Inputs) -> Attended:
    """Return what the definition gives, with the weights."""
    return attention(
        inputs.q,
        inputs.k,
        inputs.v,
        allow(inputs),
        bias=inputs.bias,
        scale=inputs.scale,
        softcap=inputs.softcap,
        sink=inputs.sink,
        see=("weights",),
    )


def expect_gradients(inputs: Inputs, g: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return the gradients of sum(out · g) for q, k and v; no softcap."""
    done = expect(inputs)
    weights: Numbers = np.asarray(done.weights)
    (batch, heads, _, width), shared = inputs.q.shape, inputs.k.shape[1]
    k, v = (np.repeat(x, heads // shared, axis=1) for x in (inputs.k, inputs.v))
    scale = 1 / math.sqrt(width) if inputs.scale is None else inputs.scale
    turn = weights * (g @ v.swapaxes(-1, -2) - (done.out * g).sum(-1, keepdims=True))
    d_q, d_k = scale * turn @ k, scale * turn.swapaxes(-1, -2) @ inputs.q
    d_v = weights.swapaxes(-1, -2) @ g

    def gather(x: Numbers) -> Numbers:  # a shared key learns from every head
        groups = x.reshape(batch, shared, heads // shared, *x.shape[2:])
        return np.asarray(groups.sum(2))

    return d_q, gather(d_k), gather(d_v)
