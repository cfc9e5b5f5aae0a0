"""Compute any rectangle of any head at any zoom exactly, from the record.

    read_tile(record, 3, slice(0, 256), slice(0, 256), 256)      one pixel per weight
    read_tile(record, 3, slice(0, 4096), slice(0, 4096), 256)    one pixel per 16 × 16

A rectangle that extends past the last row or key keeps its zoom and has fewer pixels,
so that the tiles of a map fit together. `allowed` is False where every cell is masked,
which a weight of 0 does not imply.

Next: reducer_check.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import OptionError
from regard.recording.record import Record
from regard.stats.head_tiles import read_slice
from regard.stats.pooled import (
    PooledMap,
    Pooling,
    Sides,
    count_pixels,
    locate_pixels,
    pool_cells,
)
from regard.stats.reducer import Rows, Scope, Tile
from regard.stats.tile_walk import BLOCK, walk


@dataclass(frozen=True, eq=False)
class Picture:
    """A rectangle of one head, as pixels."""

    head: int
    rows: slice  # of the record, clipped to its size
    keys: slice
    cells: Sides  # queries and keys in a pixel
    values: Tensor  # (query pixels, key pixels)
    allowed: Tensor  # bool, whether any cell of a pixel is allowed
    how: str  # what a pixel is: one weight, or the max or mass of many


@dataclass(frozen=True)
class AllowedMap:
    """A reducer that marks the pixels with at least one allowed cell."""

    sides: Sides

    def start(self, scope: Scope) -> Rows:
        """Return False everywhere."""
        down, across = count_pixels((scope.n_q, scope.n_k), self.sides)
        empty = torch.empty((0, across), dtype=torch.bool, device=scope.device)
        return Rows(down, empty, 0)

    def add(self, state: Rows, tile: Tile) -> Rows:
        """Mark the allowed pixels of the tile."""
        down, across = locate_pixels(tile, self.sides)
        here = state.at(down)[:, across]
        if tile.allowed is None:
            here.fill_(True)  # noqa: FBT003
        else:
            cells, at = tile.allowed.to(tile.weights.dtype), (tile.rows, tile.keys)
            here.logical_or_(pool_cells(cells, at, self.sides, "max"))
        return state

    def merge(self, state: Rows, other: Rows) -> Rows:
        """Mark the pixels that either state marks."""
        mine, theirs = state.pair(other)
        mine.logical_or_(theirs)
        return state

    def finish(self, states: Sequence[Rows]) -> Tensor:
        """Return (heads, query pixels, key pixels)."""
        return torch.stack([state.whole() for state in states])


def read_tile(
    record: Record,
    head: int,
    rows: slice,
    keys: slice,
    size: int | Sides,
    *,
    how: Pooling = "max",
) -> Picture:
    """Return a rectangle as at most `size` pixels on each side.

    A pixel has as many cells as needed; `how` selects what it shows: "max" or "mass",
    as in pooled.py. A pixel of one cell shows its weight.
    """
    most = size if isinstance(size, tuple) else (size, size)
    if len(most) != 2 or not all(isinstance(n, int) and n > 0 for n in most):
        raise OptionError(
            f"size={size!r}, expected the most pixels, 256 or (128, 256)."
        )
    n_q, n_k = record.q.shape[1], record.k.shape[1]
    asked = rows, keys
    rows, keys = read_slice("rows", rows, n_q), read_slice("keys", keys, n_k)
    cells = fit_pixels(asked[0], n_q, most[0]), fit_pixels(asked[1], n_k, most[1])
    values, allowed = walk(
        record,
        PooledMap(cells, how),
        AllowedMap(cells),
        heads=(head,),
        rows=rows,
        keys=keys,
        block=BLOCK - BLOCK % cells[0] or BLOCK,  # avoid pixels in two tiles
        workers=1,  # a server already runs threads
    )
    return Picture(head, rows, keys, cells, values.values[0], allowed[0], values.how)


def fit_pixels(part: slice, n: int, pixels: int) -> int:
    """Return how many cells a pixel needs to fit a part, which may exceed the end."""
    start = 0 if part.start is None else part.start
    stop = n if part.stop is None else part.stop
    start, stop = (i + n if i < 0 else i for i in (start, stop))
    return max(1, math.ceil((stop - start) / pixels))
