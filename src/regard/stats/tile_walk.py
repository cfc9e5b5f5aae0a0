"""Walk over all weights of a record, for statistics that are not linear in them.

    largest, strongest = walk(record, LargestLogit(), TopK(8))

    heads, strips of rows   ─▶   workers   ─▶   merged in order
                                 each tile not proved empty, from q, k and lse:
                                 weights (head_tiles.py)   ─▶   every reducer

A worker is a thread with one torch thread and one tile; kernels release the GIL. States
are merged in row order, so the number of workers does not change the result by a bit.
A row without weights (nonfinite.py) is NaN wherever the mask allows a key. Statistics
that are linear in the weights need no walk: rows.py, columns.py and cells.py use the
engine's kernel.

Next: reducers.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from regard.definition.contract import ALL
from regard.errors import OptionError
from regard.masks.tiles import EMPTY
from regard.recording.record import Record
from regard.stats.head_tiles import Head, read_heads, read_slice
from regard.stats.nonfinite import mark_nonfinite
from regard.stats.reducer import Reducer
from regard.threads import fit_threads, one_thread, run_in_order

BLOCK = 512  # rows and keys of a tile: 1 MB in float32, the size of a core's cache

Progress = Callable[[int, int], object]
Reducers = Sequence[Reducer[Any, Any]]


@dataclass(frozen=True)
class RowStrip:
    """Some rows of a head, and their tiles not proved empty."""

    head: Head
    rows: slice
    tiles: tuple[tuple[slice, int], ...]  # keys, and the kind of the tile


def walk(
    record: Record,
    *reducers: Reducer[Any, Any],
    heads: Sequence[int] | None = None,
    rows: slice = ALL,
    keys: slice = ALL,
    block: int = BLOCK,
    workers: int | None = None,
    progress: Progress | None = None,
) -> tuple[Any, ...]:
    """Feed every weight to the reducers and return the result of each.

    heads: all heads by default; results are in this order
    rows, keys: walk a part of the record; results count from its first row and key
    block: rows and keys of a tile
    workers: number of threads; by default, chosen from the work and the free cores
    progress: called with the strips done and their total; an exception ends the walk
    """
    chosen = check_heads(record, heads)
    rows = read_slice("rows", rows, record.q.shape[1])
    keys = read_slice("keys", keys, record.k.shape[1])
    for name, n in (("block", block), ("workers", 1 if workers is None else workers)):
        if not isinstance(n, int) or n < 1:
            raise OptionError(f"{name}={n!r}, expected a whole number of at least 1.")
    n_strips = len(chosen) * max(1, math.ceil((rows.stop - rows.start) / block))
    found: list[list[Any]] = [[] for _ in reducers]
    cells = len(chosen) * (rows.stop - rows.start) * (keys.stop - keys.start)
    with one_thread() as limit:
        found_heads = read_heads(mark_nonfinite(record), chosen, rows, keys)
        strips = (strip for head in found_heads for strip in cut_strips(head, block))
        many = workers or fit_threads(cells * record.q.shape[-1], limit)
        run = run_in_order(partial(run_strip, reducers), strips, many)
        with closing(run) as done:
            for n, (strip, states) in enumerate(done, start=1):
                for reducer, kept, state in zip(reducers, found, states, strict=True):
                    if strip.rows.start == 0:  # another head
                        kept.append(state)
                    else:
                        kept[-1] = reducer.merge(kept[-1], state)
                if progress is not None:
                    progress(n, n_strips)
    return tuple(r.finish(states) for r, states in zip(reducers, found, strict=True))


def check_heads(record: Record, heads: Sequence[int] | None) -> list[int]:
    """Return the indices of the heads to walk."""
    if heads is None:
        return list(range(record.heads))
    numbers = list(heads)
    for h in numbers:
        if not isinstance(h, int) or not 0 <= h < record.heads:
            raise OptionError(
                f"heads={numbers}: {h!r} is no head of {record.name}, expected numbers "
                f"from 0 to {record.heads - 1}."
            )
    return numbers


def cut_strips(head: Head, block: int) -> Iterator[RowStrip]:
    """Yield the strips of a head in order; at least one, which may be empty."""
    rows, keys, kinds = head.prove(block)
    if not rows:
        yield RowStrip(head, slice(0, 0), ())
    for part, line in zip(rows, kinds.tolist(), strict=True):
        pairs = zip(keys, line, strict=True)
        yield RowStrip(head, part, tuple(pair for pair in pairs if pair[1] != EMPTY))


@torch.no_grad()  # type: ignore[untyped-decorator]
def run_strip(reducers: Reducers, strip: RowStrip) -> tuple[RowStrip, list[Any]]:
    """Feed the tiles of one strip to every reducer."""
    states = [reducer.start(strip.head.scope) for reducer in reducers]
    for keys, kind in strip.tiles:
        tile = strip.head.compute(strip.rows, keys, kind)
        if tile is not None:
            pairs = zip(reducers, states, strict=True)
            states = [reducer.add(state, tile) for reducer, state in pairs]
    return strip, states
