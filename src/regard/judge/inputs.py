"""The inputs of one call, and the expected results from the definition.

    inputs = Inputs(q=q, k=k, v=v, causal=True)       (B, H, N, D), float64, NumPy
    expect(inputs).out                                the expected result
    expect_gradients(inputs, g)                       d sum(out · g) / d q, k, v

The gradients are written out, so no autograd library is needed:

    dV = Wᵀ g     dS = W · (g Vᵀ - rowsum(out · g))     dQ = s dS K     dK = s dSᵀ Q

Next: subject.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.definition.attention import Attended, attention
from regard.masks.patterns import causal, window

Numbers = NDArray[np.float64]
Precision = str  # "float64", "float32", "tf32", "float16" or "bfloat16"
END = -1  # of q_start: the queries are the last tokens of each sequence
BITS = {"float64": 53, "float32": 24, "tf32": 11, "float16": 11, "bfloat16": 8}


class NotAskedError(Exception):
    """Raised when the declared convention cannot express a call."""


class CallFailedError(Exception):
    """Raised when a call fails, times out or returns something invalid."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """The arrays and options of one call, in the axes of the definition."""

    q: Numbers  # (B, H, Nq, D)
    k: Numbers  # (B, Hk, Nk, D)
    v: Numbers  # (B, Hk, Nk, Dv)
    mask: NDArray[np.bool_] | None = None  # (B or 1, H or 1, Nq or 1, Nk), True: attend
    causal: bool = False
    q_start: int = 0  # position of the first query among the keys; END: Nk - Nq
    window: int | None = None  # number of keys before a query that it may attend to
    bias: Numbers | None = None  # (B or 1, H or 1, Nq, Nk)
    scale: float | None = None
    softcap: float | None = None
    sink: Numbers | None = None  # (H,)
    literal: Any = None  # a mask that is passed unchanged
    look: bool | None = None  # value of the argument that requests the weights
    strides: Mapping[str, str] = field(default_factory=dict)  # of q, k, v, mask, bias
    narrow: bool = False  # pass axes of size 1 of a mask or a bias as they are
    backward: str = ""  # how gradients are computed, see Torch.differentiate
    only: str = "qkv"  # those that require a gradient
    lengths: tuple[tuple[int, int], ...] | None = None  # Nq and Nk of each sequence
    strange: float = 50.0  # what memory that must not be read holds
    full: bool = False  # a cache has no room after the new keys
    written: str = "plain"  # in a module: "turned" reverses Wo, "biased" sets biases

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The axes (B, H, Nq, Nk) of the scores."""
        return (*self.q.shape[:3], self.k.shape[2])

    def read_lengths(self) -> tuple[tuple[int, int], ...]:
        """Return Nq and Nk of each sequence."""
        return self.lengths or (self.shape[2:],) * self.shape[0]

    def round(self, precision: Precision) -> Inputs:
        """Return the inputs rounded to a precision."""
        names = ("q", "k", "v", "bias", "sink")
        given = {name: getattr(self, name) for name in names}
        kept: dict[str, Any] = {
            n: round_to(x, precision) for n, x in given.items() if x is not None
        }
        return replace(self, **kept)


def round_to(x: Numbers, precision: Precision) -> Numbers:
    """Round to a precision; the result is float64."""
    if precision == "tf32":  # as wide as float32, as precise as float16
        return round_bits(x, BITS[precision])
    if precision != "bfloat16":
        with np.errstate(over="ignore"):  # overflow gives inf
            return np.asarray(x.astype(precision).astype(np.float64))
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # round half to even
    finite = np.isfinite(x)
    return np.where(finite, kept.astype(np.uint32).view(np.float32), x)


def round_bits(x: Numbers, bits: int) -> Numbers:
    """Round to a number of significant bits."""
    part, exponent = np.frexp(x)
    return np.asarray(np.ldexp(np.round(np.ldexp(part, bits)), exponent - bits))


def compute_allowed(inputs: Inputs) -> NDArray[np.bool_] | None:
    """Return the combined mask (B or 1, H or 1, Nq, Nk); None means no mask."""
    if inputs.lengths is not None:
        return allow_each(inputs)
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


def allow_each(inputs: Inputs) -> NDArray[np.bool_]:
    """Return the mask (B, 1, Nq, Nk) of sequences of different lengths."""
    batch, _, n_q, n_k = inputs.shape
    allowed = np.zeros((batch, 1, n_q, n_k), bool)
    for one, (n, m) in zip(allowed, inputs.read_lengths(), strict=True):
        start = m - n if inputs.q_start == END else inputs.q_start
        past = np.arange(m) <= np.arange(n)[:, None] + start
        one[0, :n, :m] = past if inputs.causal else True
    return allowed


def compute_expected(inputs: Inputs) -> Attended:
    """Return the result of the definition, with the weights."""
    return attention(
        inputs.q,
        inputs.k,
        inputs.v,
        compute_allowed(inputs),
        bias=inputs.bias,
        scale=inputs.scale,
        softcap=inputs.softcap,
        sink=inputs.sink,
        see=("weights",),
    )


def expect_gradients(inputs: Inputs, g: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return the gradients of sum(out · g) for q, k and v."""
    done = compute_expected(inputs)
    weights: Numbers = np.asarray(done.weights)
    (batch, heads, _, width), shared = inputs.q.shape, inputs.k.shape[1]
    k, v = (np.repeat(x, heads // shared, axis=1) for x in (inputs.k, inputs.v))
    scale = 1 / math.sqrt(width) if inputs.scale is None else inputs.scale
    turn = weights * (g @ v.swapaxes(-1, -2) - (done.out * g).sum(-1, keepdims=True))
    if inputs.softcap is not None:
        scores = scale * inputs.q @ k.swapaxes(-1, -2)
        turn = turn * (1 - np.tanh(scores / inputs.softcap) ** 2)
    d_q, d_k = scale * turn @ k, scale * turn.swapaxes(-1, -2) @ inputs.q
    d_v = weights.swapaxes(-1, -2) @ g

    def gather(x: Numbers) -> Numbers:  # sums over the heads that share a key head
        groups = x.reshape(batch, shared, heads // shared, *x.shape[2:])
        return np.asarray(groups.sum(2))

    return d_q, gather(d_k), gather(d_v)
