"""A downsampled map of the weights: one pixel for many cells.

    max     the largest weight in a pixel
    mass    summed over the keys of a pixel, averaged over its queries: their share of
            attention; a row of the map has the same sum as a row of weights

Pixels are counted from the first row and key that are walked; the last ones may have
fewer cells. Rows without keys count as queries, with no mass.

Next: pyramid.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.errors import OptionError
from regard.stats.named_array import NamedArray
from regard.stats.reducer import FOLD, Scope, Tile
from regard.stats.reducers import stack

Pooling = Literal["max", "mass"]
Sides = tuple[int, int]  # queries and keys
AXES = ("head", "query pixel", "key pixel")


@dataclass(frozen=True)
class Drawn:
    """The state of a map; for mass it holds sums, not yet averages."""

    n_q: int
    values: Tensor  # (query pixels, key pixels)


@dataclass(frozen=True)
class PooledMap:
    """One map, whose pixels have a fixed number of queries and keys."""

    cells: int | Sides = 32
    how: Pooling = "max"

    def __post_init__(self) -> None:
        if self.how not in ("max", "mass"):
            raise OptionError(f'how={self.how!r}, expected "max" or "mass".')
        if not all(isinstance(n, int) and n > 0 for n in self.sides):
            raise OptionError(
                f"cells={self.cells!r}, expected how many queries and keys a pixel has."
            )

    @property
    def sides(self) -> Sides:
        """The number of queries and of keys in a pixel."""
        return self.cells if isinstance(self.cells, tuple) else (self.cells,) * 2

    def start(self, scope: Scope) -> Drawn:
        """Return an empty map."""
        shape = count_pixels((scope.n_q, scope.n_k), self.sides)
        values = torch.zeros(shape, dtype=scope.dtype, device=scope.device)
        return Drawn(scope.n_q, values)

    def add(self, state: Drawn, tile: Tile) -> Drawn:
        """Combine the tile's pixels with those of the map."""
        found = pool_weights(tile, self.sides, self.how)
        blend(state.values[locate_pixels(tile, self.sides)], found, self.how)
        return state

    def merge(self, state: Drawn, other: Drawn) -> Drawn:
        """Combine two maps pixel by pixel."""
        blend(state.values, other.values, self.how)
        return state

    def finish(self, states: Sequence[Drawn]) -> NamedArray:
        """Return (heads, query pixels, key pixels)."""
        values = stack([x.values for x in states])
        if self.how == "mass" and states:
            values = values / count_pixel_queries(values, states[0].n_q, self.sides[0])
        return NamedArray(values, AXES, describe_pixel(self.how, self.sides))


def locate_pixels(tile: Tile, sides: Sides) -> tuple[slice, slice]:
    """Return the rows and columns of pixels that a tile overlaps."""
    parts = zip((tile.rows, tile.keys), sides, strict=True)
    down, across = (slice(x.start // n, -(-x.stop // n)) for x, n in parts)
    return down, across


def pool_weights(tile: Tile, sides: Sides, how: Pooling) -> Tensor:
    """Return the pooled weights of a tile, for each pixel that it overlaps."""
    eights = tile.rows.start, tile.rows.stop, sides[0]
    if how == "max" and not any(n % FOLD for n in eights):  # row_peaks are cached
        start, stop, size = (n // FOLD for n in eights)
        at = slice(start, stop), tile.keys
        return pool_cells(tile.row_peaks, at, (size, sides[1]), how)
    return pool_cells(tile.weights, (tile.rows, tile.keys), sides, how)


def pool_cells(
    x: Tensor, at: tuple[slice, slice], sides: Sides, how: Pooling
) -> Tensor:
    """Return the pooled cells x, which are at these rows and keys, by pixel."""
    for axis, (part, size) in enumerate(zip(at, sides, strict=True)):  # rows first
        x = pad_zeros(x, axis, part.start % size, -part.stop % size)
        x = pool(x, axis, size, how)
    return x


def pad_zeros(x: Tensor, axis: int, before: int, after: int) -> Tensor:
    """Pad x with zeros, which change neither a sum nor a largest weight."""
    if not before and not after:
        return x
    ends = [before, after]
    return pad(x, ends if axis == 1 else [0, 0, *ends])


def pool(x: Tensor, axis: int, size: int, how: Pooling) -> Tensor:
    """Return the max or sum of every `size` neighbours along an axis of x."""
    if size == 1:
        return x
    x = x.unflatten(axis, (x.shape[axis] // size, size))
    pooled: Tensor = x.amax(axis + 1) if how == "max" else x.sum(axis + 1)
    return pooled


def blend(below: Tensor, above: Tensor, how: Pooling) -> None:
    """Combine pixels with others, in place."""
    if how == "max":
        torch.maximum(below, above, out=below)
    else:
        below.add_(above)


def count_pixels(n: Sides, sides: Sides) -> Sides:
    """Return the number of pixels along both axes."""
    return math.ceil(n[0] / sides[0]), math.ceil(n[1] / sides[1])


def count_pixel_queries(like: Tensor, n_q: int, size: int) -> Tensor:
    """Return the number of queries in each row of pixels, (query pixels, 1)."""
    first = torch.arange(0, n_q, size, device=like.device)
    return (n_q - first).clamp(max=size).to(like.dtype)[:, None]


def describe_pixel(how: Pooling, sides: Sides) -> str:
    """Return a description of a pixel."""
    if sides == (1, 1):
        return "walk: one weight a pixel"
    what = "largest weight" if how == "max" else "sum over keys, mean over queries,"
    return f"walk: {how}, the {what} of {sides[0]} × {sides[1]} cells"
