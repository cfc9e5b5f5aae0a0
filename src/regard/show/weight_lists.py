"""The weights of a head from a least one on, as lists: for pages without its cells.

    entries     of each key j of a head, in order: the rows i with w[i, j] >= least
    rest[i]     Σ_j w[i, j] over the weights that are not in the list

Of SmolLM2 on 1,350 English tokens, the weights from 0.01 on are 1.5 % of all, and hold
82 % of the attention. A weight that is not in the list is below `least` and at most
`rest`, so a page knows a range for everything that it computes from a list.

    mean over the heads     one more list, with a smaller least weight

The bytes of some lists one after the other, compressed (planes of bytes, high ones
first):

    rest     1 plane    in steps of 1/250, rounded up; 255: the row has no weights
    counts   3          entries of each key
    gaps     3          rows between an entry and the one before of its key
    codes    2          weight = least ^ (1 - code / (steps - 1))

Key by key it is 4 % smaller than row by row: who attends to a token is often a run.

Next: page_lists.py
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.arrays import to_numpy
from regard.stats.reducer import Rows, Scope, Tile, start_rows

PARTS = 250  # steps of the rest of a row
LOST = 255  # a row without weights
SLIP = 1e-4  # of a step, by which a sum in float32 may be too large

Whole = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class WeightList:
    """The weights of one head from `least` on, key by key."""

    counts: Whole  # (n_k,)
    rows: Whole  # (entries,), rising for each key
    weights: NDArray[np.float64]  # (entries,)
    rest: NDArray[np.float64]  # (n_q,), the sum of the others; NaN: no weights

    def raise_to(self, least: float) -> WeightList:
        """Return the list of the weights from a larger least one on."""
        kept = self.weights >= least
        keys = np.repeat(np.arange(len(self.counts)), self.counts)
        more = np.bincount(
            self.rows[~kept], self.weights[~kept], minlength=len(self.rest)
        )
        return WeightList(
            np.bincount(keys[kept], minlength=len(self.counts)),
            self.rows[kept],
            self.weights[kept],
            self.rest + more,
        )


@dataclass
class Gathered:
    """Entries of some tiles: rows, keys and weights of each, and sums of rows."""

    parts: list[tuple[Any, Any, Any]]
    sums: Rows
    n_k: int


@dataclass(frozen=True)
class ListedWeights:
    """A reducer: the weights of every head from a least one on."""

    least: float

    def start(self, scope: Scope) -> Gathered:
        """Return no entries."""
        return Gathered([], start_rows(scope), scope.n_k)

    def add(self, state: Gathered, tile: Tile) -> Gathered:
        """Add the entries of a tile, found among the maxima of every eight rows."""
        weights = tile.weights
        state.sums.at(tile.rows).add_(weights.sum(1))
        fold = weights.shape[0] // tile.row_peaks.shape[0]
        group, key = (tile.row_peaks >= self.least).nonzero(as_tuple=True)
        some = weights.unflatten(0, (-1, fold))[group, :, key]  # (hits, fold)
        hit, turn = (some >= self.least).nonzero(as_tuple=True)
        rows = group[hit] * fold + turn + tile.rows.start
        found = rows, key[hit] + tile.keys.start, some[hit, turn]
        state.parts.append(tuple(to_numpy(x) for x in found))  # type: ignore[arg-type]
        return state

    def merge(self, state: Gathered, other: Gathered) -> Gathered:
        """Put the entries of both together."""
        here, more = state.sums.pair(other.sums)
        here.add_(more)
        return replace(state, parts=state.parts + other.parts)

    def finish(self, states: Sequence[Gathered]) -> list[WeightList]:
        """Return a list for each head."""
        return [join_parts(x) for x in states]


def join_parts(state: Gathered) -> WeightList:
    """Return the entries of a head in the order of their keys and rows."""
    empty = (np.zeros(0, np.int64),) * 2 + (np.zeros(0),)
    rows, keys, weights = (
        np.concatenate(x) for x in zip(empty, *state.parts, strict=True)
    )
    order = np.lexsort((rows, keys))
    sums = to_numpy(state.sums.whole()).astype(np.float64)
    kept = np.bincount(rows, weights, minlength=state.sums.n)
    return WeightList(
        np.bincount(keys, minlength=state.n_k),
        rows[order],
        weights[order].astype(np.float64),
        np.maximum(sums - kept, 0),  # NaN stays NaN
    )


@dataclass(frozen=True)
class WholeTiles:
    """A reducer: copies of all tiles of each head, to be added up over heads."""

    def start(self, scope: Scope) -> list[tuple[slice, slice, Any]]:
        """Return no tiles."""
        return []

    def add(self, state: list[Any], tile: Tile) -> list[Any]:
        """Keep a copy of a tile."""
        state.append((tile.rows, tile.keys, to_numpy(tile.weights).astype(np.float32)))
        return state

    def merge(self, state: list[Any], other: list[Any]) -> list[Any]:
        """Return the tiles of both."""
        return state + other

    def finish(self, states: Sequence[list[Any]]) -> list[list[Any]]:
        """Return the tiles of each head."""
        return list(states)


def list_matrix(weights: NDArray[Any], least: float) -> WeightList:
    """Return the list of a whole matrix, as that of the mean over the heads."""
    keys, rows = np.nonzero((weights >= least).T)
    found = weights[rows, keys].astype(np.float64)
    n_q, n_k = weights.shape
    kept = np.bincount(rows, found, minlength=n_q)
    rest = np.maximum(weights.sum(1, dtype=np.float64) - kept, 0)
    return WeightList(np.bincount(keys, minlength=n_k), rows, found, rest)


def pack_lists(lists: Sequence[WeightList], least: float, steps: int) -> bytes:
    """Return the bytes of some lists, compressed."""
    counts = np.concatenate([x.counts for x in lists])
    rows = np.concatenate([x.rows for x in lists])
    weights = np.concatenate([x.weights for x in lists])
    rest = np.concatenate([x.rest for x in lists])
    gaps = np.diff(rows, prepend=-1) - 1
    first = (np.cumsum(counts) - counts)[counts > 0]
    gaps[first] = rows[first]
    place = (1 - np.log(weights) / np.log(least)) * (steps - 1)
    codes = np.rint(place).clip(0, steps - 1).astype(np.int64)
    lost = np.isnan(rest)
    parts = np.ceil(np.where(lost, 0, rest).clip(0, 1) * PARTS - SLIP)
    parts = np.where(lost, LOST, parts).astype(np.uint8)
    planes = (cut_planes(counts, 3), cut_planes(gaps, 3), cut_planes(codes, 2))
    return zlib.compress(b"".join([parts.tobytes(), *planes]))


def cut_planes(x: Whole, planes: int) -> bytes:
    """Return the bytes of unsigned numbers, all high ones first."""
    shifts = range(8 * (planes - 1), -1, -8)
    return b"".join((x >> n & 255).astype(np.uint8).tobytes() for n in shifts)


def measure_step(least: float, steps: int) -> float:
    """Return the largest relative error of a weight in a list.

    >>> round(measure_step(0.01, 256), 4)
    0.0091
    """
    return float(least ** (-0.5 / (steps - 1)) - 1)
