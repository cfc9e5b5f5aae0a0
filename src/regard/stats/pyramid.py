"""Maps of the weights at every zoom, max and mass, from a single walk.

    level finest         a pixel has 8 × 8 cells; what is finer, tile.py reads live
    level finest + 1                 16 × 16
    …
    level coarsest       all of them: one pixel

Level l has pixels of 2^l × 2^l cells. A level follows exactly from the one below it:
the largest of the largest, the sum of the sums. So the walk fills only the finest, for
any length, rectangle and mask.

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

FINEST = 3  # 256 × 256 such pixels are read live in 10 ms
PIXELS = 4096  # the most on a side that are stored: 134 MB for both maps
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
    maps: tuple[Rows, ...]  # (query pixels, key pixels); of mass the sums


@dataclass(frozen=True)
class Pyramid:
    """Max and mass at every level, from `finest` on.

    Unless given, `finest` is 3, or more if a side would have more than 4,096 pixels.
    """

    finest: int | None = None

    def __post_init__(self) -> None:
        level = 0 if self.finest is None else self.finest
        if not isinstance(level, int) or level < 0:
            raise OptionError(f"finest={level!r}, expected a level: 0, 1, 2, …")

    def start(self, scope: Scope) -> Canvas:
        """Begin with empty maps."""
        finest = self.finest
        level = find_finest(scope.n_q, scope.n_k) if finest is None else finest
        down, across = count_pixels((scope.n_q, scope.n_k), (2**level, 2**level))
        empty = torch.empty((0, across), dtype=scope.dtype, device=scope.device)
        return Canvas(scope.n_q, level, tuple(Rows(down, empty, 0) for _ in KINDS))

    def add(self, state: Canvas, tile: Tile) -> Canvas:
        """Put the tile's pixels in their place."""
        sides = 2**state.level, 2**state.level
        down, across = locate_pixels(tile, sides)
        for pixels, how in zip(state.maps, KINDS, strict=True):
            found = pool_weights(tile, sides, how)
            blend(pixels.at(down)[:, across], found, how)
        return state

    def merge(self, state: Canvas, other: Canvas) -> Canvas:
        """Lay one over the other."""
        for mine, theirs, how in zip(state.maps, other.maps, KINDS, strict=True):
            blend(*mine.pair(theirs), how)
        return state

    def finish(self, states: Sequence[Canvas]) -> Levels:
        """Make every coarser level."""
        if not states:
            return Levels({}, {})
        return Levels(*(dict(coarsen_levels(states, i)) for i in range(len(KINDS))))


def find_finest(n_q: int, n_k: int) -> int:
    """Return the finest level that is stored for so many queries and keys."""
    return max(FINEST, find_level(n_q, n_k, PIXELS))


def find_level(n_q: int, n_k: int, pixels: int) -> int:
    """Return the finest level of which no side has more than so many pixels."""
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
    x = maps[0][None] if len(maps) == 1 else torch.stack(maps)  # the largest: no copy
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
