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
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
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

BLOCK = 512  # rows and keys of a tile: 1 MB in float32, the size of a core's cache

LOCK = threading.Lock()
RUNNING: list[int] = []  # torch's thread count before each running walk
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
    workers: number of threads; by default, as many as torch has
    progress: called with the strips done and their total; an exception ends the walk
    """
    chosen, record = check_heads(record, heads), mark_nonfinite(record)
    rows = read_slice("rows", rows, record.q.shape[1])
    keys = read_slice("keys", keys, record.k.shape[1])
    for name, n in (("block", block), ("workers", 1 if workers is None else workers)):
        if not isinstance(n, int) or n < 1:
            raise OptionError(f"{name}={n!r}, expected a whole number of at least 1.")
    found_heads = read_heads(record, chosen, rows, keys)
    strips = (strip for head in found_heads for strip in cut_strips(head, block))
    n_strips = len(chosen) * max(1, math.ceil((rows.stop - rows.start) / block))
    found: list[list[Any]] = [[] for _ in reducers]
    with (
        one_thread() as before,
        closing(run_all(strips, reducers, workers or before)) as done,
    ):
        for n, (strip, states) in enumerate(done, start=1):
            for reducer, kept, state in zip(reducers, found, states, strict=True):
                if strip.rows.start == 0:  # another head
                    kept.append(state)
                else:
                    kept[-1] = reducer.merge(kept[-1], state)
            if progress is not None:
                progress(n, n_strips)
    return tuple(r.finish(states) for r, states in zip(reducers, found, strict=True))


@contextmanager
def one_thread() -> Iterator[int]:
    """Set torch to one thread in the calling thread; yield and restore the old number.

    A new thread inherits the number that any thread set last, which is 1 during a walk.
    So the old number is the one that running walks recorded or, if there are none, the
    one that a new thread inherits.
    """
    with LOCK:
        found = [torch.get_num_threads(), *RUNNING[:1]]
        if not RUNNING:
            new = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            new.start()
            new.join()
        before = max(found)
        RUNNING.append(before)
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)
        RUNNING.remove(before)


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


def run_all(
    strips: Iterator[RowStrip], reducers: Reducers, workers: int
) -> Generator[tuple[RowStrip, list[Any]]]:
    """Run the strips in parallel, and yield their states in order."""
    run = partial(run_strip, reducers)
    if workers == 1:  # starting a thread costs more than a small tile
        yield from map(run, strips)
        return
    pool = ThreadPoolExecutor(workers, "walk", torch.set_num_threads, (1,))
    waiting: deque[Future[tuple[RowStrip, list[Any]]]] = deque()
    try:
        for strip in strips:
            waiting.append(pool.submit(run, strip))
            if len(waiting) > 2 * workers:  # workers stay busy, few results are held
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


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
