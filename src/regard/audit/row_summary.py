"""Summarize the rows of a record in one walk over its tiles (stats/tile_walk.py).

    mass of row i on cells R  =  sum over j in R of exp(s_ij - lse_i)
                              =  exp(lse under R - lse_i)                   exactly

RowReducer keeps a few numbers for each row. Tiles in which the mask of the record is
proved empty are not computed; those in which a region R is empty are skipped for R.

Next: audit.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from regard.audit.audited_record import AuditedRecord
from regard.definition.contract import ALL
from regard.masks.tiles import EMPTY, FULL, Numbers
from regard.recording.record import Record
from regard.stats.head_tiles import read_heads
from regard.stats.reducer import Rows, Scope, Tile, start_rows
from regard.stats.tile_walk import cut_strips, walk

BLOCK = 512  # rows and keys of a tile
FEW = 4  # tiles of a mask that are kept for all heads
FAR = 2**31 - 1  # larger than any position
WIDE = torch.float64
TOTAL, FIRST, COUNT, MET = range(4)  # columns of the sums; mass and cells follow
Ends = tuple[Tensor, Tensor]  # the first and the last key of each row


@dataclass(frozen=True, kw_only=True)
class RowSummary:
    """Statistics of the rows (H, Nq) of a record."""

    case: AuditedRecord
    total: Tensor  # mass on all keys
    top: Tensor  # the largest weight
    first: Tensor  # the weight of the first key
    count: Tensor  # of allowed keys
    seen: Ends  # of the allowed keys
    due: Ends  # of the expected keys
    missed: Tensor  # how many expected keys are masked
    mass: dict[str, Tensor]  # on forbidden cells
    cells: dict[str, Tensor]  # how many forbidden cells are allowed by the mask
    low: dict[str, Tensor]  # (H,), the smallest logit of these
    high: dict[str, Tensor]

    @property
    def blind(self) -> Tensor:
        """Rows without keys for which torch's kernel returns an lse of 0."""
        return (self.count == 0) & (self.case.record.lse == 0)

    @property
    def empty(self) -> Tensor:
        """Rows of tokens without keys."""
        case = self.case
        return case.real & (~case.sees | self.blind) & ~case.record.lse.isnan()

    @property
    def good(self) -> Tensor:
        """Rows of tokens with keys."""
        return self.case.real & self.case.sees & ~self.blind

    def is_flipped(self, name: str) -> Tensor:
        """Return for which heads (H,) all rows attend to forbidden keys only."""
        rows = self.good & (self.count > 0)
        return ((self.cells[name] == self.count) | ~rows).all(1) & (rows.sum(1) > 1)

    def is_soft(self, name: str) -> Tensor:
        """Return for which heads (H,) forbidden cells share one logit, not the top.

        A cap of c makes -c of what was hidden; keys of zeros share the logit 0.
        """
        one = (self.high[name] - self.low[name] <= 1e-3) & (self.high[name] < -1e-3)
        peak = (self.case.record.lse + self.top.log()).masked_fill(
            ~self.good, -math.inf
        )
        several = self.cells[name].sum(1) > 5
        return one & several & (peak.amax(1) > self.high[name] + 0.01)


@dataclass(frozen=True, eq=False)
class Region:
    """The cells of a mask, and the kinds of its tiles."""

    record: Record  # with this mask
    kinds: Numbers  # (H, query tiles, key tiles)
    kept: dict[tuple[int, int], Tensor] | None  # tiles that all heads share, if few

    def look(self, tile: Tile) -> Tensor | None:
        """Return the allowed cells of a tile in the region; None if there are none."""
        at = tile.rows.start // BLOCK, tile.keys.start // BLOCK
        kind = self.kinds[tile.head, *at]
        if kind == EMPTY:
            return None
        if kind == FULL and tile.allowed is not None:
            return tile.allowed
        if kind == FULL:
            return torch.ones(1, 1, dtype=torch.bool).expand(tile.weights.shape)
        cells = None if self.kept is None else self.kept.get(at)
        if cells is None:
            cells = self.record.allowed(tile.rows, tile.keys, heads=tile.head)
            if self.kept is not None:
                self.kept[at] = cells
        return cells if tile.allowed is None else cells & tile.allowed


@dataclass(frozen=True)
class RowState:
    """The state of RowReducer for one head."""

    sums: Rows  # (n, 4 + 2 * regions): TOTAL, FIRST, COUNT, MET; mass, cells, …
    tops: Rows  # (n, 3): the largest weight, the last key, minus the first key
    ends: Tensor  # (regions, 2): the largest logit, minus the smallest


@dataclass(frozen=True)
class RowReducer:
    """Sums of each row: in total, on expected keys, and on forbidden regions."""

    expected: Region | None
    regions: tuple[Region, ...]  # of forbidden cells

    def start(self, scope: Scope) -> RowState:
        """Return the initial state."""
        n = len(self.regions)
        return RowState(
            start_rows(scope, 4 + 2 * n, dtype=WIDE),
            start_rows(scope, 3, fill=-math.inf, dtype=WIDE),
            torch.full((n, 2), -math.inf, dtype=WIDE),
        )

    def add(self, state: RowState, tile: Tile) -> RowState:
        """Add the sums and extremes of a tile."""
        sums, tops = state.sums.at(tile.rows), state.tops.at(tile.rows)
        weights = tile.weights
        sums[:, TOTAL] += weights.sum(1)
        if tile.keys.start == 0:
            sums[:, FIRST] += weights[:, 0]
        first, last, count = find_mask_ends(tile.allowed, tile.k_positions)
        sums[:, COUNT] += count
        here = (tile.key_peaks.amax(1).to(WIDE), last, -first)
        torch.maximum(tops, torch.stack(torch.broadcast_tensors(*here), 1), out=tops)
        if self.expected is not None:
            cells = self.expected.look(tile)
            sums[:, MET] += 0 if cells is None else cells.sum(1)
        for i, region in enumerate(self.regions):
            cells = region.look(tile)
            if cells is not None and bool(cells.any()):
                sums[:, 4 + 2 * i] += (weights * cells).sum(1)
                sums[:, 5 + 2 * i] += cells.sum(1)
                logits = tile.logs + tile.lse[:, None]
                high = logits.masked_fill(~cells, -math.inf).amax()
                low = logits.masked_fill(~cells, math.inf).amin()
                ends = torch.stack([high, -low])
                state.ends[i] = torch.maximum(state.ends[i], ends)
        return state

    def merge(self, state: RowState, other: RowState) -> RowState:
        """Add the sums, and keep the larger extremes."""
        mine, theirs = state.sums.pair(other.sums)
        mine.add_(theirs)
        mine, theirs = state.tops.pair(other.tops)
        torch.maximum(mine, theirs, out=mine)
        return replace(state, ends=torch.maximum(state.ends, other.ends))

    def finish(self, states: Sequence[RowState]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums, tops and ends of all heads, with the columns first."""
        return (
            torch.stack([x.sums.whole().T for x in states], 1),
            torch.stack([x.tops.whole().T for x in states], 1),
            torch.stack([x.ends for x in states], 2),
        )


def summarize_rows(case: AuditedRecord) -> RowSummary:
    """Return the statistics of the rows of a record."""
    record, names = case.record, tuple(case.forbidden)
    masks = case.forbidden.values()
    regions = tuple(read_region(replace(record, mask=mask)) for mask in masks)
    expected, (first, last, wanted) = None, torch.zeros(3, 1, 1)
    if case.expected is not None:
        expected = read_region(replace(record, mask=case.expected))
        first, last, wanted = measure_mask(expected.record)
    reducer = RowReducer(expected, regions)
    ((sums, tops, ends),) = walk(record, reducer, block=BLOCK)
    count = sums[COUNT].long()
    return RowSummary(
        case=case,
        total=sums[TOTAL],
        top=tops[0].clamp(min=0),
        first=sums[FIRST],
        count=count,
        seen=(
            (-tops[2]).masked_fill(count == 0, FAR).long(),
            tops[1].masked_fill(count == 0, -1).long(),
        ),
        due=(first, last),
        missed=wanted - sums[MET].long(),
        mass=dict(zip(names, sums[4::2], strict=True)),
        cells=dict(zip(names, sums[5::2].long(), strict=True)),
        low=dict(zip(names, -ends[:, 1], strict=True)),
        high=dict(zip(names, ends[:, 0], strict=True)),
    )


def read_region(record: Record) -> Region:
    """Return the region of a record's mask, with the kinds of all tiles."""
    row = record.allowed(slice(0, 1))
    shared = row is None or row.shape[0] == 1
    heads = read_heads(record, range(1 if shared else record.heads), ALL, ALL)
    kinds = np.stack([head.prove(BLOCK)[2] for head in heads])
    kept: dict[tuple[int, int], Tensor] | None = {} if shared else None
    kinds = np.broadcast_to(kinds, (record.heads, *kinds.shape[1:]))
    return Region(record, kinds, kept if kinds[0].size <= FEW else None)


def measure_mask(record: Record) -> Tensor:
    """Return each row's first and last allowed key, and their number, (3, H, Nq)."""
    shape = record.heads, record.q.shape[1]
    found = torch.stack([torch.full(shape, x) for x in (FAR, -1, 0)])
    for head in read_heads(record, range(record.heads), ALL, ALL):
        for strip in cut_strips(head, BLOCK):
            here = found[:, head.number, strip.rows]
            for keys, kind in strip.tiles:
                at = head.scope.k_positions[keys]
                cells = None
                if kind != FULL:
                    cells = record.allowed(strip.rows, keys, heads=head.number)
                first, last, count = find_mask_ends(cells, at)
                here[0] = here[0].minimum(first)
                here[1] = here[1].maximum(last)
                here[2] += count
    return found


def find_mask_ends(
    allowed: Tensor | None, at: Tensor
) -> tuple[Tensor, Tensor, Tensor | int]:
    """Return the first and last allowed position of each row, and their number."""
    if allowed is None:
        return at.min(), at.max(), len(at)
    at = at.int()  # halves the memory
    first = torch.where(allowed, at, FAR).amin(1)
    return first, torch.where(allowed, at, -1).amax(1), allowed.sum(1)
