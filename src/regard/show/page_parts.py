"""The parts of a page as bytes: cells, zoom levels, thumbnails and masks.

    compress_cells(x, error)     q and k of some heads, rounded (compressed_record.py)
    pack_levels(levels, level)   max and mass of one zoom level, as codes (log_codes.py)
    pack_small(sheet)            thumbnails
    pack_mask(record)            the allowed keys of each query, as runs

Next: page_size.py
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from regard.arrays import to_numpy
from regard.recording.record import Record
from regard.show.compressed_record import measure_error, round_record
from regard.show.log_codes import NAN, round_codes
from regard.show.page_size import SIDE
from regard.show.zoom_levels import Levels, Sheet
from regard.stats.pyramid import find_level
from regard.stats.replay import to_torch
from regard.threads import fit_threads, one_thread, run_in_order

STRIP = 256  # rows whose masks are packed at a time
MEMORY = 2**30  # bytes of records that are compressed at the same time


@dataclass(frozen=True)
class Chosen:
    """Some heads of a record."""

    sequence: int
    layer: int
    heads: list[int]
    record: Record


def pick_heads(record: Record, heads: list[int]) -> Record:
    """Return a record reduced to some heads, each with its own copy of the keys."""
    if heads == list(range(record.heads)):
        return record
    q, k, lse = (to_torch(x) for x in (record.q, record.k, record.lse))
    shared = [h * k.shape[0] // q.shape[0] for h in heads]
    row = record.allowed(slice(0, 1))  # shows whether each head has a mask
    one = row is None or row.shape[0] == 1

    def pick(x: Any) -> Any:
        return x if x is None or x.shape[0] == 1 else x[heads]

    return replace(
        record,
        q=q[heads],
        k=k[shared],
        lse=lse[heads],
        v=None,
        sink=pick(to_torch(record.sink)),
        bias=pick(to_torch(record.bias)),
        mask=record.mask if one else pick(to_torch(record.allowed())),
    )


@dataclass(frozen=True)
class CompressedCells:
    """The compressed cells of some heads."""

    blob: bytes
    about: dict[str, Any]  # what a browser needs to read them
    numbers: int
    typical: float  # median relative error of weights above 0.001
    worst: float


def compress_cells(x: Chosen, error: float) -> CompressedCells:
    """Return the cells of some heads, with logits off by about `error`."""
    factors = round_record(x.record, error)
    about = {"keyHeads": len(factors.b), "width": factors.a.shape[1]}
    about |= {"cap": factors.record.softcap}
    numbers = factors.a.size + factors.b.size
    typical, worst = measure_error(x.record, factors.record)
    return CompressedCells(factors.pack(), about, numbers, typical, worst)


@contextmanager
def compress_all(
    chosen: Sequence[Chosen], error: float
) -> Iterator[Iterator[CompressedCells]]:
    """Give an iterator over the cells of each part, compressed in several threads."""
    sizes = [(*x.record.q.shape, x.record.k.shape[1]) for x in chosen]
    work = max(map(math.prod, sizes))
    held = max(8 * 4 * heads * n_q * width for heads, n_q, width, _ in sizes)
    with one_thread() as limit:
        workers = min(fit_threads(work, limit), max(1, MEMORY // max(1, held)))
        run = run_in_order(partial(compress_cells, error=error), chosen, workers)
        with closing(run):
            yield run


def find_stored(record: Record) -> int:
    """Return the finest level that a page stores; 0 if it needs none."""
    return find_level(record.q.shape[1], record.k.shape[1], SIDE)


def pack_levels(found: Sequence[Levels], level: int, *, rough: bool = False) -> bytes:
    """Return max and mass of a level as codes: (heads, 2, rows, columns).

    rough: with 12 bits (round_codes)
    """
    made = [levels[level, how] for levels in found for how in ("max", "mass")]
    codes = round_codes(np.stack(made)) if rough else np.stack(made)
    halves = (codes >> 8).astype(np.uint8), (codes & 255).astype(np.uint8)
    return zlib.compress(b"".join(half.tobytes() for half in halves))


def pack_small(small: Sheet) -> bytes:
    """Return the high bytes of thumbnail codes: 0 is masked, 1 NaN, others from 2."""
    high = np.maximum(small.codes >> 8, 2 * (small.codes > 0))
    high = np.where(small.codes == NAN, 1, high)
    return zlib.compress(high.astype(np.uint8).tobytes())


def pack_mask(record: Record) -> bytes:
    """Return the allowed keys of each row as runs: how many, then first and end.

    (heads or 1, counts of all rows, runs of all rows), as 32-bit integers
    """
    n_q, n_k = record.q.shape[1], record.k.shape[1]
    heads: list[list[Any]] = []
    for first in range(0, n_q, STRIP):
        rows = slice(first, min(n_q, first + STRIP))
        seen = record.allowed(rows)
        if seen is None:
            seen = np.ones((1, rows.stop - rows.start, n_k), bool)
        for h, cells in enumerate(to_numpy(seen)):
            heads += [[]] * (h == len(heads))
            edges = np.diff(cells.astype(np.int8), axis=1, prepend=0, append=0)
            ends = np.argwhere(edges)[:, 1].reshape(-1, 2)  # first, end; row by row
            heads[h] = [*heads[h], ((edges > 0).sum(axis=1), ends)]
    parts = [np.array([len(heads)])]
    for strips in heads:
        parts += [count for count, _ in strips] + [ends.ravel() for _, ends in strips]
    return np.concatenate(parts).astype("<i4").tobytes()
