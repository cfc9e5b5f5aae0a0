"""The coarse levels of a head as codes, and a preview until they are there.

    levels = build_levels(record, head)      one exact pass: max and mass, with the mask
    levels[5, "max"]                         a pixel for 32 × 32 cells
    preview(record, head, 5, (rows, keys))   mass alone, from one query of each pixel

Codes take a quarter of the room of two maps of floats: 89 MB for a head of any length.

Next: source.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.arrays import convert, namespace, to_numpy
from regard.masks.algebra import Mask
from regard.record import Record
from regard.show.codes import Codes, encode
from regard.stats.pooled import PooledMap, Pooling, count_pixels, locate, pool_cells
from regard.stats.pyramid import FINEST, PIXELS, Pyramid
from regard.stats.reducer import Rows, Scope, Tile
from regard.stats.tile import AllowedMap
from regard.stats.walk import Progress, walk

Levels = dict[tuple[int, Pooling], Codes]


@dataclass(frozen=True, eq=False)
class Sheet:
    """Pixels as codes (codes.py)."""

    codes: Codes  # (rows, columns), or (heads, rows, columns)
    level: int  # a pixel has 2^level × 2^level cells
    how: Pooling
    exact: bool = True
    note: str = ""  # what a preview is

    def to_bytes(self) -> bytes:
        """Return the codes in rows, each with its small byte first."""
        return self.codes.astype("<u2").tobytes()


def build_levels(
    record: Record, head: int, *, workers: int, progress: Progress | None = None
) -> Levels:
    """Return every level from the finest stored one on, from one walk."""
    _, finest, _ = measure(record)
    found, reach = walk(
        record,
        Pyramid(finest),
        Reach(2**finest),
        heads=(head,),
        workers=workers,
        progress=progress,
    )
    levels: Levels = {}
    allowed = to_numpy(reach)[0]
    for level in sorted(found.max):
        maps: tuple[tuple[Pooling, Any], ...]
        maps = ("max", found.max.pop(level)), ("mass", found.mass.pop(level))
        for how, named in maps:
            levels[level, how] = encode(to_numpy(named.values)[0], allowed)
        allowed = halve(allowed)
    return levels


@dataclass(frozen=True)
class Reach:
    """Where anybody may look, by pixel; a strip of the walk holds its own rows only."""

    side: int

    def start(self, scope: Scope) -> Rows:
        """Begin with nowhere."""
        down, across = count_pixels((scope.n_q, scope.n_k), (self.side, self.side))
        empty = torch.empty((0, across), dtype=torch.bool, device=scope.device)
        return Rows(down, empty, 0)

    def add(self, state: Rows, tile: Tile) -> Rows:
        """Mark the pixels of the tile."""
        sides = self.side, self.side
        down, across = locate(tile, sides)
        here = state.at(down)[:, across]
        if tile.allowed is None:
            here.fill_(True)  # noqa: FBT003
        else:
            cells, at = tile.allowed.to(tile.weights.dtype), (tile.rows, tile.keys)
            here.logical_or_(pool_cells(cells, at, sides, "max"))
        return state

    def merge(self, state: Rows, other: Rows) -> Rows:
        """Mark what either marks."""
        mine, theirs = state.pair(other)
        mine.logical_or_(theirs)
        return state

    def finish(self, states: Sequence[Rows]) -> Tensor:
        """Return (heads, query pixels, key pixels)."""
        return torch.stack([state.whole() for state in states])


def preview(record: Record, head: int, level: int, at: tuple[slice, slice]) -> Sheet:
    """Return the mass of a tile as the middle query of each pixel has it."""
    n_q, side = record.q.shape[1], 2**level
    rows, keys = at
    first = np.arange(rows.start, min(rows.stop, n_q), side)
    middle = (first + np.minimum(first + side, n_q)) // 2
    values, allowed = walk(
        pick_rows(record, middle),
        PooledMap((1, side), "mass"),
        AllowedMap((1, side)),
        heads=(head,),
        keys=keys,
        workers=1,
    )
    codes = encode(to_numpy(values.values)[0], to_numpy(allowed)[0])
    note = f"preview: {len(middle):,} of {min(rows.stop, n_q) - rows.start:,} queries"
    return Sheet(codes, level, "mass", exact=False, note=note)


def pick_rows(record: Record, rows: NDArray[np.int64]) -> Record:
    """Return some queries of a record, with all of its keys."""
    xp, at, mask = namespace(q=record.q), convert(rows, record.q), record.mask
    return replace(
        record,
        q=xp.take(record.q, at, axis=1),
        lse=xp.take(record.lse, at, axis=1),
        q_positions=convert(to_numpy(record.q_positions)[rows], record.q),
        mask=mask if mask is None or isinstance(mask, Mask) else mask[:, at, :],
        bias=None if record.bias is None else record.bias[:, at, :],
    )


def measure(record: Record) -> tuple[tuple[int, int], int, int]:
    """Return how many queries and keys, and the finest and coarsest stored level."""
    n = int(record.q.shape[1]), int(record.k.shape[1])
    finest = FINEST
    while max(n) > PIXELS << finest:
        finest += 1
    return n, finest, max(finest, (max(*n, 1) - 1).bit_length())


def halve(allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return where any of 2 × 2 pixels may be looked at."""
    down, across = (n + n % 2 for n in allowed.shape)
    even = np.zeros((down, across), bool)
    even[: allowed.shape[0], : allowed.shape[1]] = allowed
    blocks = even.reshape(down // 2, 2, across // 2, 2)
    pooled: NDArray[np.bool_] = np.logical_or.reduce(blocks, axis=(1, 3))
    return pooled
