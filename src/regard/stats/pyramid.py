"""Maps of the weights at every zoom level, max and mass, from a single walk.

    level finest         a pixel has 8 × 8 cells; tile.py computes finer ones on demand
    level finest + 1                 16 × 16
    …
    level coarsest       one pixel for all cells

Level l has pixels of 2^l × 2^l cells. Each level follows exactly from the next finer
one: the max of the maxima, the sum of the sums. So the walk fills only the finest
level, for any length, rectangle and mask.

Next: tile.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import OptionError
from regard.stats.named_array import NamedArray
from regard.stats.pooled import (
    AXES,
    Pooling,
    blend,
    count_pixel_queries,
    count_pixels,
    describe_pixel,
    locate_pixels,
    pad_zeros,
    pool_weights,
)
from regard.stats.reducer import Rows, Scope, Tile

FINEST = 3  # tile.py computes 256 × 256 such pixels in 10 ms
PIXELS = 4096  # the largest stored side: 134 MB for both maps
KINDS: tuple[Pooling, Pooling] = ("max", "mass")


@dataclass(frozen=True)
class Levels:
    """The maps of every level, (heads, query pixels, key pixels)."""

    max: dict[int, NamedArray]  # by level
    mass: dict[int, NamedArray]


@dataclass(frozen=True)
class Canvas:
    """The state: the finest level of some rows, for each kind of map."""

    n_q: int
    level: int
    maps: tuple[Rows, ...]  # (query pixels, key pixels); sums, for mass


@dataclass(frozen=True)
class Pyramid:
    """Max and mass at every level, starting at `finest`.

    By default `finest` is 3, or more if a side would have more than 4,096 pixels.
    """

    finest: int | None = None

    def __post_init__(self) -> None:
        level = 0 if self.finest is None else self.finest
        if not isinstance(level, int) or level < 0:
            raise OptionError(f"finest={level!r}, expected a level: 0, 1, 2, …")

    def start(self, scope: Scope) -> Canvas:
        """Return empty maps."""
        finest = self.finest
        level = find_finest(scope.n_q, scope.n_k) if finest is None else finest
        down, across = count_pixels((scope.n_q, scope.n_k), (2**level, 2**level))
        empty = torch.empty((0, across), dtype=scope.dtype, device=scope.device)
        return Canvas(scope.n_q, level, tuple(Rows(down, empty, 0) for _ in KINDS))

    def add(self, state: Canvas, tile: Tile) -> Canvas:
        """Combine the tile's pixels with those of the maps."""
        sides = 2**state.level, 2**state.level
        down, across = locate_pixels(tile, sides)
        for pixels, how in zip(state.maps, KINDS, strict=True):
            found = pool_weights(tile, sides, how)
            blend(pixels.at(down)[:, across], found, how)
        return state

    def merge(self, state: Canvas, other: Canvas) -> Canvas:
        """Combine the maps pixel by pixel."""
        for mine, theirs, how in zip(state.maps, other.maps, KINDS, strict=True):
            blend(*mine.pair(theirs), how)
        return state

    def finish(self, states: Sequence[Canvas]) -> Levels:
        """Return all levels, computed from the finest."""
        if not states:
            return Levels({}, {})
        return Levels(*(dict(coarsen_levels(states, i)) for i in range(len(KINDS))))


def find_finest(n_q: int, n_k: int) -> int:
    """Return the finest level that is stored for n_q queries and n_k keys."""
    return max(FINEST, find_level(n_q, n_k, PIXELS))


def find_level(n_q: int, n_k: int, pixels: int) -> int:
    """Return the finest level with at most `pixels` on either side."""
    level = 0
    while max(n_q, n_k) > pixels << level:
        level += 1
    return level


def coarsen_levels(
    states: Sequence[Canvas], i: int
) -> Iterator[tuple[int, NamedArray]]:
    """Yield every level of one kind of map, the finest first."""
    n_q, level, how = states[0].n_q, states[0].level, KINDS[i]
    maps = [state.maps[i].whole() for state in states]
    x = maps[0][None] if len(maps) == 1 else torch.stack(maps)  # avoid a large copy
    while True:
        side = 2**level
        larger = coarsen(x, how)
        if how == "mass":
            x /= count_pixel_queries(x, n_q, side)
        yield level, NamedArray(x, AXES, describe_pixel(how, (side, side)))
        if max(x.shape[1:]) <= 1:
            return
        x, level = larger, level + 1


def coarsen(x: Tensor, how: Pooling) -> Tensor:
    """Return the next level: 2 × 2 pixels become one."""
    for axis in (1, 2):
        x = pad_zeros(x, axis - 1, 0, x.shape[axis] % 2)
        even, odd = (x[:, n::2] if axis == 1 else x[:, :, n::2] for n in (0, 1))
        x = torch.maximum(even, odd) if how == "max" else even + odd
    return x
