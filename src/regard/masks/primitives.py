"""The six basic masks that all others combine.

    Band       lo <= q - k <= hi                    causal, window
    Keys       lo <= k < hi                         prefix, lengths
    Same       ids_q[q] == ids_k[k]                 documents, chunks, segments
    Valid      valid[k]                             padding
    Where      fn(b, h, q, k)                       anything else
    ArrayMask  array[b, h, q, k]                    an array

The first four can prove a tile empty or full from its first and last positions.

Next: patterns.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.arrays import Array, is_array, namespace, to_numpy
from regard.errors import MaskError
from regard.masks.algebra import Mask
from regard.masks.formula import Extent
from regard.masks.tiles import Edges, Numbers, Proof


@dataclass(frozen=True, repr=False)
class Band(Mask):
    """The distance q - k lies between lo and hi; None means no bound."""

    lo: int | None
    hi: int | None

    @property
    def positional(self) -> bool:
        """True unless both bounds are None."""
        return (self.lo, self.hi) != (None, None)

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        # compare k with q - lo: q - k would allocate an Nq × Nk array of integers
        lo, hi = (None if is_beyond(x, q) else x for x in (self.lo, self.hi))
        if lo is None and hi is None:
            return (k <= q) | (k > q)
        if lo is None:
            return k >= q - hi
        near = k <= q - lo
        return near if hi is None else near & (k >= q - hi)

    def prove(self, edges: Edges) -> Proof:
        """Compare the smallest and largest distance, found at the tile's corners."""
        nearest, farthest = edges.q_first - edges.k_last, edges.q_last - edges.k_first
        lo = nearest.min(initial=0) if self.lo is None else self.lo
        hi = farthest.max(initial=0) if self.hi is None else self.hi
        empty = (farthest < lo) | (nearest > hi)
        return Proof(empty, (nearest >= lo) & (farthest <= hi))

    def __repr__(self) -> str:
        if (self.lo, self.hi) == (None, None):
            return "everything()"
        if (self.lo, self.hi) == (0, None):
            return "causal()"
        right = None if self.lo is None else -self.lo
        return f"window({self.hi})" if right == 0 else f"window({self.hi}, {right})"


@dataclass(frozen=True, repr=False, eq=False)
class Keys(Mask):
    """The keys lo <= k < hi; each bound is an int, or an array with one per batch."""

    lo: Array  # or int
    hi: Array

    @property
    def extent(self) -> Extent:
        """One batch per bound."""
        sizes = [x.shape[0] for x in (self.lo, self.hi) if is_array(x)]
        return Extent(batch=max(sizes, default=None))

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        lo, hi = (x[b] if is_array(x) else clip(x, k) for x in (self.lo, self.hi))
        return (k >= lo) & (k < hi)

    def prove(self, edges: Edges) -> Proof:
        """Compare the first and last key of the tile with the bounds."""
        lo, hi = (np.reshape(x, (-1, 1, 1, 1)) for x in (self.lo, self.hi))
        empty = (edges.k_last < lo) | (edges.k_first >= hi)
        return Proof(empty, (edges.k_first >= lo) & (edges.k_last < hi))

    def __repr__(self) -> str:
        if is_array(self.hi) and not is_array(self.lo) and self.lo == 0:
            return f"padding(lengths={write_data(self.hi)})"
        return f"keys({write_data(self.lo)}, {write_data(self.hi)})"


@dataclass(frozen=True, repr=False, eq=False)
class Same(Mask):
    """Query and key have the same id. One array serves both if ids_k is None."""

    ids_q: Array  # (N,) or (B, N)
    ids_k: Array | None  # None: use ids_q

    @property
    def positional(self) -> bool:
        """True if one array serves both: it is then indexed by the query position."""
        return self.ids_k is None

    @property
    def keys(self) -> Array:
        """The ids of the keys."""
        return self.ids_q if self.ids_k is None else self.ids_k

    @property
    def extent(self) -> Extent:
        """The positions that the ids cover."""
        sizes = [x.shape[0] for x in (self.ids_q, self.keys) if x.ndim == 2]
        n_q, n_k = self.ids_q.shape[-1], self.keys.shape[-1]
        return Extent(batch=max(sizes, default=None), q=(0, n_q), k=n_k)

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        def pick(ids: Array, at: Array) -> Array:
            return ids[b, at] if ids.ndim == 2 else ids[at]

        return pick(self.ids_q, q) == pick(self.keys, k)

    def prove(self, edges: Edges) -> Proof:
        """Return empty for disjoint ranges of ids, full for one id on both sides."""
        q_min, q_max = find_range(self.ids_q, edges.q_first, edges.q_last)
        k_min, k_max = find_range(self.keys, edges.k_first, edges.k_last)
        one = (q_min == q_max) & (k_min == k_max) & (q_min == k_min)
        return Proof((q_max < k_min) | (q_min > k_max), one)

    def __repr__(self) -> str:
        ids_k = "" if self.ids_k is None else f", {write_data(self.ids_k)}"
        return f"same({write_data(self.ids_q)}{ids_k})"


@dataclass(frozen=True, repr=False, eq=False)
class Valid(Mask):
    """Key k is a token, not padding."""

    valid: Array  # bool, (B, Nk)

    @property
    def extent(self) -> Extent:
        """One row of keys per batch."""
        return Extent(batch=self.valid.shape[0], k=self.valid.shape[1])

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        return self.valid[b, k]

    def prove(self, edges: Edges) -> Proof:
        """Count the valid keys of each tile as a difference of cumulative sums."""
        before = np.pad(np.cumsum(self.valid, axis=1), ((0, 0), (1, 0)))
        b = np.arange(before.shape[0])[:, None, None, None]
        count = before[b, edges.k_last + 1] - before[b, edges.k_first]
        return Proof(count == 0, count == edges.k_last - edges.k_first + 1)

    def __repr__(self) -> str:
        return f"padding({write_data(self.valid)})"


@dataclass(frozen=True, repr=False)
class Where(Mask):
    """A function fn(b, h, q, k), the signature of FlexAttention and transformers."""

    fn: Callable[[Array, Array, Array, Array], Array]

    @property
    def positional(self) -> bool:
        """True, because the function may compare positions."""
        return True

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        try:
            allowed = self.fn(b, h, q, k)
        except (RuntimeError, ValueError, TypeError) as error:
            if "ambiguous" not in str(error) and "truth value" not in str(error):
                raise
            raise MaskError(
                f"{self!r} asks for the truth value of an array: b, h, q and k are "
                "arrays. Write & for and, | for or, ~ for not, each comparison in ()."
            ) from None
        if not is_array(allowed) or "bool" not in str(allowed.dtype):
            kind = allowed.dtype if is_array(allowed) else type(allowed).__name__
            raise MaskError(
                f"{self!r} returned {kind}, expected a bool array: True = may attend. "
                "Write a comparison, as in where(lambda b, h, q, k: k <= q)."
            )
        return allowed

    def __repr__(self) -> str:
        return f"where({getattr(self.fn, '__qualname__', repr(self.fn))})"


@dataclass(frozen=True, repr=False, eq=False)
class ArrayMask(Mask):
    """An array whose first row is query position q_start."""

    values: Array  # bool, (B or 1, H or 1, Nq or 1, Nk or 1)
    q_start: int

    @property
    def extent(self) -> Extent:
        """The extent of the array; axes of size 1 broadcast."""
        return find_extent(self.values, self.q_start)

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        return look_up(self.values, b, h, q - self.q_start, k)

    def __repr__(self) -> str:
        start = f", q_start={self.q_start}" if self.q_start else ""
        return f"array({write_data(self.values)}{start})"


def is_beyond(distance: int | None, positions: Array) -> bool:
    """Return whether a distance is so large that q - distance may overflow.

    No two positions are that far apart, so the bound can be dropped. JAX uses 32-bit
    integers: q - 2**31 raises an error, and q + 2**31 - 1 wraps around.
    """
    return distance is not None and clip(2 * distance, positions) != 2 * distance


def clip(bound: int, positions: Array) -> int:
    """Return the bound, clipped to the range of the positions' dtype."""
    if -(2**31) <= bound < 2**31:  # fits every dtype used for positions
        return bound
    known = namespace(x=positions).iinfo(positions.dtype)
    return int(min(max(bound, known.min), known.max))


def find_range(ids: Numbers, first: Numbers, last: Numbers) -> tuple[Numbers, Numbers]:
    """Return the smallest and the largest of ids[..., first : last + 1]."""
    rows = np.pad(np.atleast_2d(ids), ((0, 0), (0, 1)))  # makes last + 1 a valid index
    batch = max(rows.shape[0], first.shape[0])
    ends = np.stack([first, last + 1], axis=-1).reshape(first.shape[0], -1)
    pairs = list(zip(repeat_batch(rows, batch), repeat_batch(ends, batch), strict=True))
    shape = (batch, *first.shape[1:])
    low = [np.minimum.reduceat(row, at)[::2] for row, at in pairs]
    high = [np.maximum.reduceat(row, at)[::2] for row, at in pairs]
    return np.reshape(low, shape), np.reshape(high, shape)


def repeat_batch(x: Numbers, batch: int) -> Numbers:
    """Repeat a single row for every batch, without copying it."""
    return np.broadcast_to(x, (batch, x.shape[1]))


def find_extent(values: Array, q_start: int) -> Extent:
    """Return the extent of a four-axis array whose axes of size 1 broadcast."""
    batch, heads, n_q, n_k = (None if n == 1 else n for n in values.shape)
    rows = None if n_q is None else (q_start, q_start + n_q)
    return Extent(batch, heads, rows, n_k)


def look_up(values: Array, *at: Array) -> Array:
    """Return values[b, h, q, k], where an axis of size 1 broadcasts."""
    where = zip(at, values.shape, strict=True)
    zero = 0 * at[-1]  # not 0 * i: cells would have an axis by which they do not differ
    return values[tuple(zero if n == 1 else i for i, n in where)]


def write_data(x: Any) -> str:
    """Format small arrays by their values, large ones by dtype and shape."""
    if not is_array(x):
        return repr(x)
    if np.prod(x.shape) <= 8:
        return str(to_numpy(x).tolist())
    return f"<{x.dtype} array of shape {tuple(x.shape)}>"
