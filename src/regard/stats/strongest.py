"""The k keys with the largest weights of every row, exactly.

A cell is packed into one number that sorts by weight, and for equal weights by key, the
earlier key first. So the order of tiles does not change the result.

    float32    (bits of the weight) · 2³² - key      positive floats sort as their bits
    float64    weight - key · i                      NumPy sorts by real, then imaginary

A tile changes a row only where it exceeds the row's k-th weight so far. One pass over
the tile reduces every eight keys to their maximum; only groups above the k-th weight
are searched, and only cells above it are sorted: few, after some tiles. A row with NaN
keeps k cells of NaN, which sort above every weight.

No tile is skipped before it is computed: on real keys, bounds by norms, balls or boxes
around 64 keys exclude no tile at all, and the exact mass of a block, which costs a
forward pass, excludes one in ten.

Next: pooled.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.errors import OptionError
from regard.masks.tiles import Numbers
from regard.stats.named_array import NamedArray
from regard.stats.reducer import Rows, Scope, Tile
from regard.stats.reducers import stack


@dataclass(frozen=True)
class Strongest:
    """The strongest keys of every row, the strongest first."""

    index: (
        NamedArray  # (head, query, rank), which key; -1 where no more have any weight
    )
    weight: (
        NamedArray  # (head, query, rank); NaN, with index -1: the row has no weights
    )


@dataclass(frozen=True)
class TopK:
    """The k keys with the largest weights of each row."""

    k: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise OptionError(f"k={self.k!r}, expected a whole number of at least 1.")

    def start(self, scope: Scope) -> Rows:
        """Return k cells without weight for each row, (rows, k) on the host."""
        kind = torch.int64 if scope.dtype == torch.float32 else torch.complex128
        return Rows(scope.n_q, torch.empty((0, self.k), dtype=kind), 0)

    def add(self, state: Rows, tile: Tile) -> Rows:
        """Insert the weights that exceed the k-th weight of their row."""
        held = as_numpy(state.at(tile.rows))
        tops = as_numpy(tile.key_peaks)  # (rows, groups of keys)
        bound = find_bound(held[:, -1], tile.keys.start)
        fresh = np.flatnonzero(bound == 0)  # fewer than k so far
        if fresh.size and tops.shape[1] >= self.k:
            kth = np.sort(tops[fresh], axis=1)[:, -self.k]  # k maxima reach it
            bound[fresh] = np.nextafter(kth, 0, dtype=tops.dtype)
        rows, cells = collect(as_numpy(tile.weights), tops, bound, tile.keys.start)
        held[rows] = pick_best(held[rows], cells)
        lost = np.isnan(tops).any(1)
        if lost.any():
            nan = np.full(1, math.nan, tops.dtype)
            held[lost] = pack_cells(nan, np.zeros(1, np.int64))
        return state

    def merge(self, state: Rows, other: Rows) -> Rows:
        """Keep the k best cells of both states."""
        mine, theirs = (as_numpy(x) for x in state.pair(other))
        mine[:] = pick_best(mine, theirs)
        return state

    def finish(self, states: Sequence[Rows]) -> Strongest:
        """Return index and weight, (heads, queries, k)."""
        axes, how = ("head", "query", "rank"), f"walk: top {self.k} over keys"
        weight, key = unpack_cells(as_numpy(stack([x.whole() for x in states])))
        index = torch.from_numpy(np.where(weight > 0, key, -1))
        weight = torch.from_numpy(weight.copy())
        return Strongest(NamedArray(index, axes, how), NamedArray(weight, axes, how))


def as_numpy(x: Tensor) -> Numbers:
    """Return a tensor as a NumPy array, without a copy if it is on the host."""
    return x.cpu().numpy()  # type: ignore[no-any-return]


def pack_cells(weight: Numbers, key: Numbers) -> Numbers:
    """Return cells packed into single numbers that sort by weight, then by key."""
    if weight.dtype == np.float32:
        return (weight.view(np.int32).astype(np.int64) << 32) - key
    return weight - 1j * key


def unpack_cells(cells: Numbers) -> tuple[Numbers, Numbers]:
    """Return the weights and keys of cells."""
    if cells.dtype == np.int64:
        bits = -(-cells >> 32)  # rounded up
        return bits.astype(np.int32).view(np.float32), (bits << 32) - cells
    return cells.real, -cells.imag.astype(np.int64)


def find_bound(last: Numbers, first_key: int) -> Numbers:
    """Return the bound that weights of keys from first_key on must exceed."""
    weight, key = unpack_cells(last)
    return np.where(
        key > first_key, np.nextafter(weight, 0, dtype=weight.dtype), weight
    )


def collect(
    weights: Numbers, tops: Numbers, bound: Numbers, first_key: int
) -> tuple[Numbers, Numbers]:
    """Return the rows with weights above their bound, and these cells, padded with 0.

    tops: (rows, groups), the maximum of each group; g has the keys f * groups + g
    """
    groups = tops.shape[1]
    folded = weights.reshape(len(tops), -1, groups)  # (rows, fold, groups)
    row, group = np.divmod(np.flatnonzero(tops > bound[:, None]), groups)
    some = folded[row, :, group]  # (hits, fold)
    above = np.flatnonzero(some > bound[row, None])  # faster than on two axes
    hit, turn = np.divmod(above, some.shape[1])
    row, key = row[hit], turn * groups + group[hit] + first_key
    counts = np.bincount(row, minlength=len(tops))
    slot = np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = np.flatnonzero(counts)
    place = np.cumsum(counts > 0) - 1  # of each row among the rows
    found = pack_cells(some[hit, turn], key)
    cells = np.zeros((rows.size, counts.max(initial=0)), found.dtype)
    cells[place[row], slot] = found
    return rows, cells


def pick_best(held: Numbers, new: Numbers) -> Numbers:
    """Return the best cells of both arrays, as many as `held` has."""
    cells = np.concatenate([held, new], axis=1)
    cells.sort(axis=1)
    return cells[:, : -held.shape[1] - 1 : -1]
