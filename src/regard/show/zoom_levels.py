"""The coarse levels of a head as codes, and a preview until they are ready.

    levels = build_levels(record, head)      one exact pass: max and mass, with the mask
    levels[5, "max"]                         a pixel for 32 × 32 cells
    preview(record, head, 5, (rows, keys))   mass alone, from one query of each pixel
    sketch(record)                           a small map of every head

Codes take a quarter of the memory of two float maps: 89 MB for a head of any length.

Next: map_source.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from regard.arrays import to_numpy
from regard.recording.record import Record
from regard.show.log_codes import Codes, encode_weights
from regard.stats.columns import cut_rows
from regard.stats.pooled import PooledMap, Pooling
from regard.stats.pyramid import Pyramid, find_finest, find_level
from regard.stats.tile import AllowedMap
from regard.stats.tile_walk import Progress, walk

SMALL = 64  # most pixels per side of a thumbnail

Levels = dict[tuple[int, Pooling], Codes]


@dataclass(frozen=True, eq=False)
class Sheet:
    """Pixels as codes (log_codes.py)."""

    codes: Codes  # (rows, columns), or (heads, rows, columns)
    level: int  # a pixel has 2^level × 2^level cells
    how: Pooling | Literal["mean"]  # mean: over heads, of a text
    exact: bool = True
    note: str = ""  # describes a preview

    def to_bytes(self) -> bytes:
        """Return the codes row by row, in little-endian order."""
        return self.codes.astype("<u2").tobytes()

    def describe(self) -> dict[str, Any]:
        """Return what a client needs to decode the bytes."""
        *heads, rows, columns = self.codes.shape
        return {
            "rows": rows,
            "columns": columns,
            "level": self.level,
            "how": self.how,
            "exact": self.exact,
            **({"heads": heads[0]} if heads else {}),
            **({"note": self.note} if self.note else {}),
        }


def build_levels(
    record: Record,
    head: int,
    *,
    workers: int | None = None,
    finest: int | None = None,
    progress: Progress | None = None,
) -> Levels:
    """Return every level of a head from the finest up, computed in one walk.

    finest: from measure_levels by default
    """
    finest = measure_levels(record)[1] if finest is None else finest
    found = build_all_levels(
        record, finest, heads=(head,), workers=workers, progress=progress
    )
    return found[0]


def build_all_levels(
    record: Record,
    finest: int,
    *,
    heads: Sequence[int] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[Levels]:
    """Return every level of some or all heads from the finest up, in one walk."""
    found, reach = walk(
        record,
        Pyramid(finest),
        AllowedMap((2**finest, 2**finest)),
        heads=heads,
        workers=workers,
        progress=progress,
    )
    return encode_levels(found, reach)


def encode_levels(found: Any, reach: Any) -> list[Levels]:
    """Return the levels of each head as codes, from Pyramid and AllowedMap."""
    made: list[Levels] = [{} for _ in range(len(reach))]
    allowed = list(to_numpy(reach))
    for level in sorted(found.max):
        maps: tuple[tuple[Pooling, Any], ...]
        maps = ("max", found.max.pop(level)), ("mass", found.mass.pop(level))
        for how, named in maps:
            values = to_numpy(named.values)
            for head, levels in enumerate(made):
                levels[level, how] = encode_weights(values[head], allowed[head])
        allowed = [halve(x) for x in allowed]
    return made


def sketch(
    record: Record, *, workers: int | None = None, progress: Progress | None = None
) -> Sheet:
    """Return a max map of at most 64 pixels per side for every head."""
    level = find_level(*measure_levels(record)[0], SMALL)
    side = 2**level
    values, allowed = walk(
        record,
        PooledMap(side),
        AllowedMap((side, side)),
        workers=workers,
        progress=progress,
    )
    pairs = zip(to_numpy(values.values), to_numpy(allowed), strict=True)
    return Sheet(np.stack([encode_weights(*pair) for pair in pairs]), level, "max")


def preview(record: Record, head: int, level: int, at: tuple[slice, slice]) -> Sheet:
    """Return the mass of a tile, from the middle query of each pixel alone."""
    n_q, side = record.q.shape[1], 2**level
    rows, keys = at
    first = np.arange(rows.start, min(rows.stop, n_q), side)
    middle = (first + np.minimum(first + side, n_q)) // 2
    values, allowed = walk(
        cut_rows(record, middle),
        PooledMap((1, side), "mass"),
        AllowedMap((1, side)),
        heads=(head,),
        keys=keys,
        workers=1,
    )
    codes = encode_weights(to_numpy(values.values)[0], to_numpy(allowed)[0])
    note = f"preview: {len(middle):,} of {min(rows.stop, n_q) - rows.start:,} queries"
    return Sheet(codes, level, "mass", exact=False, note=note)


def measure_levels(record: Record) -> tuple[tuple[int, int], int, int]:
    """Return (queries, keys), and the finest and coarsest stored level."""
    n = int(record.q.shape[1]), int(record.k.shape[1])
    finest = find_finest(*n)
    return n, finest, max(finest, (max(*n, 1) - 1).bit_length())


def halve(allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return whether any of each 2 × 2 pixels is allowed."""
    down, across = (n + n % 2 for n in allowed.shape)
    even = np.zeros((down, across), bool)
    even[: allowed.shape[0], : allowed.shape[1]] = allowed
    blocks = even.reshape(down // 2, 2, across // 2, 2)
    pooled: NDArray[np.bool_] = np.logical_or.reduce(blocks, axis=(1, 3))
    return pooled
