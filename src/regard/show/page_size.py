"""How large a page would be, estimated before anything is computed.

    cells       numbers of q and k · bits of a number       bits from a sample of tokens
    pixels      pixels of a level · share that is not masked · bytes of a pixel

    choose_error(records, room)     how finely all cells are rounded to fit, if they can
    choose_side(records, room)      else, the pixels of an overview of every head

One more bit for every number halves the rounding error. Everything is written in
base64, four characters for three bytes.

Next: page.py
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from regard.arrays import to_numpy
from regard.recording.record import Record
from regard.show.compressed_record import (
    LONGEST,
    balance_factors,
    round_pair,
    split_bytes,
)
from regard.show.zoom_levels import SMALL
from regard.stats.mask_layout import count_cells
from regard.stats.nonfinite import mark_nonfinite
from regard.stats.pyramid import find_level
from regard.stats.registry import list_statistics
from regard.stats.replay import to_torch
from regard.threads import hold_threads

FINEST, COARSEST = 5e-5, 0.1  # smallest and largest error of the logits
SIDE = 1024  # most pixels per side of a stored level
SIDES = (256, 128, 64, 32, 16)  # most pixels per side of an overview
SMALLEST = SIDES[-1]
PAIR, ROUGH_PAIR = 4.0, 3.1  # bytes of a compressed pixel, max and mass; of 12 bits
SMALL_PIXEL = 0.8  # of a thumbnail
BASE64 = 4 / 3
TOKENS, HEADS, RECORDS = 256, 4, 4  # of the sample

Place = tuple[int, int, int]  # sequence, layer, head


def choose_error(records: Sequence[Record], room: float) -> float | None:
    """Return the rounding error at which all cells fit; None if it is too large."""
    if any(is_too_long(record) for record in records):
        return None
    room -= sum(estimate_stored(record) for record in records)
    numbers = sum(count_factors(record) for record in records)
    some = records[:: max(1, len(records) // RECORDS)]
    bits = float(np.mean([sample_bits(record) for record in some]))
    spared = bits - 8 * max(0.0, room) / (BASE64 * max(1, numbers))
    error = FINEST * 2 ** max(0.0, spared)
    return float(error) if error <= COARSEST else None


def is_too_long(record: Record) -> bool:
    """Whether a bias makes the cells of a record impossible to compress."""
    long = max(record.q.shape[1], record.k.shape[1]) > LONGEST
    return record.bias is not None and long


def count_factors(record: Record) -> int:
    """Return the numbers that hold the cells of a record."""
    (heads, n_q, width), (shared, n_k, _) = record.q.shape, record.k.shape
    if record.bias is not None:  # logits are factored head by head, up to full rank
        shared, width = heads, min(n_q, n_k)
    return int((heads * n_q + shared * n_k) * width)


def sample_bits(record: Record) -> float:
    """Return the bits of a number at the finest error, measured on some tokens."""
    if record.bias is not None:
        return 8.0  # later components are small; they are rounded to few bits
    with hold_threads(1):
        record = mark_nonfinite(record)
    q, k = (to_torch(x) for x in (record.q, record.k))
    group = len(q) // len(k)
    size, numbers = 0, 0
    for h in spread_indices(len(k), HEADS):
        rows, keys = (
            to_numpy(x[spread_indices(len(x), TOKENS)].double())
            for x in (q[h * group], k[h])
        )
        a, b = balance_factors(rows * record.scale, keys)
        first, second, _ = round_pair(a[None], b, FINEST)
        size += sum(len(zlib.compress(split_bytes(x.T))) for x in (first[0], second))
        numbers += rows.size + keys.size
    return 8 * size / max(1, numbers)


def spread_indices(n: int, most: int) -> list[int]:
    """Return numbers from 0 to n - 1, evenly spaced, at most `most` of them."""
    found: list[int] = np.unique(np.linspace(0, n - 1, most).astype(int)).tolist()
    return found


def estimate_stored(record: Record) -> float:
    """Return the bytes of the thumbnails and of the stored level of a record."""
    n = int(record.q.shape[1]), int(record.k.shape[1])
    level = find_level(*n, SIDE)
    small = SMALL_PIXEL * count_pixels_seen(record, find_level(*n, SMALL))
    stored = PAIR * count_pixels_seen(record, level) if level else 0.0
    return BASE64 * (small + stored)


def count_pixels_seen(record: Record, level: int) -> float:
    """Return about how many pixels of a level, of all heads, are not masked."""
    n_q, n_k = int(record.q.shape[1]), int(record.k.shape[1])
    density = count_cells(record) / max(1, n_q * n_k)
    return record.heads * density * (-(-n_q >> level)) * (-(-n_k >> level))


def choose_side(records: Sequence[Record], room: float) -> int:
    """Return the pixels per side of an overview that takes at most half of the room."""
    for side in SIDES:
        if estimate_overview(records, side) <= room / 2:
            break
    return side


def estimate_overview(records: Sequence[Record], side: int) -> float:
    """Return the bytes of an overview with so many pixels per side."""
    levels = (find_level(x.q.shape[1], x.k.shape[1], side) for x in records)
    pairs = zip(records, levels, strict=True)
    return BASE64 * ROUGH_PAIR * sum(count_pixels_seen(*pair) for pair in pairs)


def rank_heads(rows: Sequence[Mapping[str, Any]]) -> dict[Place, str]:
    """Return the heads with their reasons, the strongest first.

    In turn the next head by each statistic that `regard show` names a head for: the one
    with the most sink, previous, induction; then the second of each; …
    """
    ranked = [x for x in list_statistics() if x.ranked]
    orders = []
    for x in ranked:
        known = [row for row in rows if row[x.name] is not None]
        sign = 1 if x.ascending else -1
        orders.append(sorted(known, key=lambda row, x=x, sign=sign: sign * row[x.name]))  # type: ignore[misc]
    found: dict[Place, str] = {}
    for line in zip_longest(*orders):
        for x, row in zip(ranked, line, strict=True):
            if row is not None:
                found.setdefault(place_of(row), f"{x.name} {row[x.name]:.3f}")
    for row in rows:  # heads of which no such statistic is known
        found.setdefault(place_of(row), "")
    return found


def place_of(row: Mapping[str, Any]) -> Place:
    """Return the sequence, layer and head of a row of the table."""
    return row["sequence"], row["layer"], row["head"]
