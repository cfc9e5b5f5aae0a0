"""Biases: values added to the scores, as formulas of position.

    alibi(slopes)     - slope[h] * |q - k|          nearer is better
    table(values)     values[h, bucket(k - q)]      a learned value for each offset
    added(array)      array[b, h, q, k]             any array

    score  ->  score + bias(b, h, q, k);     biases add up: alibi(s) + table(t)

Softcap and sink are not biases: they do not commute with addition. They are arguments
of `attention`, applied at a fixed point in the computation.

Next: definition/contract.py
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

from regard.arguments import suggest
from regard.arrays import Array, accumulator, is_floating, namespace
from regard.errors import MaskError
from regard.masks.algebra import flatten_operands
from regard.masks.formula import Extent, Formula
from regard.masks.patterns import ARRAYS, expect_array, read_row, widen_axes
from regard.masks.primitives import find_extent, look_up, write_data

Buckets = Callable[[Array], Array]


class Bias(Formula):
    """A value for every (batch, head, query, key). Combine biases with `+`."""

    __array_ufunc__ = None  # makes `numpy_array + bias` call Bias.__radd__

    def __add__(self, other: object) -> Bias:
        if not isinstance(other, Bias):
            raise MaskError(
                f"bias + {type(other).__name__}: expected a bias on both sides. "
                "Write regard.masks.added(x) for an array."
            )
        return Sum(flatten_operands(Sum, self) + flatten_operands(Sum, other))

    __radd__ = __add__


@dataclass(frozen=True, repr=False)
class Sum(Bias):
    """The sum of several biases."""

    terms: tuple[Bias, ...]

    @property
    def parts(self) -> tuple[Bias, ...]:
        """The terms."""
        return self.terms

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        terms = (widen(term(b, h, q, k), q) for term in self.terms)
        return reduce(operator.add, terms)

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.terms))


@dataclass(frozen=True, repr=False, eq=False)
class Alibi(Bias):
    """A penalty proportional to distance, with one slope per head."""

    slopes: Array  # (H,)

    @property
    def positional(self) -> bool:
        """True: it depends on the distance |q - k|."""
        return True

    @property
    def extent(self) -> Extent:
        """One slope per head."""
        return Extent(heads=self.slopes.shape[0])

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        xp, slopes = namespace(q=q), widen(self.slopes[h], q)
        return slopes * xp.astype(-xp.abs(q - k), slopes.dtype)

    def __repr__(self) -> str:
        return f"alibi({write_data(self.slopes)})"


@dataclass(frozen=True, repr=False, eq=False)
class Table(Bias):
    """A value looked up by the offset from query to key."""

    values: Array  # (H, buckets)
    bucket: Buckets

    @property
    def positional(self) -> bool:
        """True: it depends on the offset k - q."""
        return True

    @property
    def extent(self) -> Extent:
        """One row of values per head."""
        return Extent(heads=self.values.shape[0])

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        xp, at = namespace(q=q), self.bucket(k - q)
        known = (at >= 0) & (at < self.values.shape[1])
        # JAX clamps an index, all wrap negative ones: a bucket without value is NaN
        return xp.where(known, self.values[h, at], math.nan)

    def __repr__(self) -> str:
        return f"table({write_data(self.values)}, {self.bucket.__qualname__})"


@dataclass(frozen=True, repr=False, eq=False)
class ArrayBias(Bias):
    """An array whose first row is query position q_start."""

    values: Array  # (B or 1, H or 1, Nq or 1, Nk or 1)
    q_start: int

    @property
    def extent(self) -> Extent:
        """The extent of the array; axes of size 1 broadcast."""
        return find_extent(self.values, self.q_start)

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        return look_up(self.values, b, h, q - self.q_start, k)

    def __repr__(self) -> str:
        return f"added({write_data(self.values)})"


@suggest
def alibi(slopes: Array) -> Bias:
    """Return -slopes[h] * |q - k|; see `regard.definition.position.alibi_slopes`."""
    if isinstance(slopes, int):
        raise MaskError(
            f"alibi({slopes}), expected a slope for each head. Write "
            f"alibi(regard.definition.position.alibi_slopes({slopes}))."
        )
    return Alibi(expect_array(slopes, "slopes", (("H",),), "numeric"))


@suggest
def table(values: Array, bucket: Buckets | None = None) -> Bias:
    """Return values[h, bucket(k - q)]; by default offsets are clipped to -R … R."""
    values = expect_array(values, "values", (("H", "buckets"),), "numeric")
    found, n = values.shape[1], getattr(bucket, "buckets", 0)
    if n > found:
        raise MaskError(
            f"values has {found} buckets, expected {n}. Write log_offsets({found})."
        )
    return Table(values, clip_offsets(found) if bucket is None else bucket)


@suggest
def added(values: Array, *, q_start: int = 0) -> Bias:
    """Return an array (..., Nq, Nk) as a bias; row 0 is query position q_start."""
    values = expect_array(values, "values", ARRAYS, "numeric")
    return ArrayBias(widen_axes(values), read_row(q_start, "added", "bias"))


def widen(x: Array, positions: Array) -> Array:
    """Return x in a dtype that holds sums, and products with a distance.

    bfloat16 has no 599, an int8 no 200, and the sum of two float16 may be infinite.
    """
    xp, whole = namespace(x=x), not is_floating(x)
    dtype = xp.result_type(x.dtype, positions.dtype) if whole else accumulator(xp, x)
    return xp.astype(x, dtype, copy=False)


def clip_offsets(n: int) -> Buckets:
    """Return buckets for offsets -R … R, with n = 2R + 1; farther ones are clipped."""
    if n % 2 == 0:
        raise MaskError(
            f"{n} buckets, expected an odd number: -R … 0 … R. Pass values of shape "
            f"(H, {n + 1}), or a function of the offset: table(values, bucket)."
        )

    def bucket(offset: Array) -> Array:
        xp, reach_ = namespace(offset=offset), n // 2
        near = xp.where(offset > reach_, reach_ + 0 * offset, offset)
        return xp.where(near < -reach_, -reach_ + 0 * offset, near) + reach_

    return bucket


def log_offsets(n: int = 32, *, far: int = 128, causal: bool = False) -> Buckets:
    """Return T5's buckets: exact for near offsets, logarithmic up to `far`.

    By default half of the n buckets are for keys after the query (an encoder); with
    causal=True all of them are for keys before it.
    """
    side = n if causal else n // 2
    exact = side // 2

    def bucket(offset: Array) -> Array:
        xp = namespace(offset=offset)
        zero = 0 * offset
        back = xp.where(offset < 0, -offset, zero) if causal else xp.abs(offset)
        ratio = xp.astype(xp.where(back < 1, zero + 1, back), xp.float32) / exact
        steps = xp.log(ratio) / math.log(far / exact) * (side - exact)
        coarse = exact + xp.astype(steps, back.dtype)
        coarse = xp.where(coarse > side - 1, zero + side - 1, coarse)
        after = zero if causal else xp.where(offset > 0, zero + side, zero)
        return after + xp.where(back < exact, back, coarse)

    bucket.buckets = n  # type: ignore[attr-defined]
    return bucket
