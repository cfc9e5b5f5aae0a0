"""The weights of one head of a record, as tiles that are computed on demand.

    logs    = capped(scale * q kᵀ) + bias - lse      -inf where the mask forbids
    weights = exp(logs)

No other file of the statistics computes tiles. The mask classifies them once for each
head: tiles proved empty are never computed, and those proved full skip the mask.
Tiles are float32, or float64 if q or k is.

Next: tile_walk.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.arrays import to_numpy
from regard.definition.contract import ALL
from regard.errors import OptionError
from regard.masks.algebra import Mask
from regard.masks.tiles import (
    EMPTY,
    FULL,
    UNDECIDED,
    Edges,
    Numbers,
    split_blocks,
    to_slices,
)
from regard.recording.record import Record
from regard.stats.reducer import Scope, Tile
from regard.stats.replay import to_torch


@dataclass(frozen=True)
class Head:
    """One head of a record whose arrays are torch tensors."""

    number: int
    scope: Scope
    record: Record
    unmasked: Record  # the same without its mask, for tiles proved full

    def compute(self, rows: slice, keys: slice, kind: int) -> Tile | None:
        """Return one tile, or None if all of its cells are masked."""
        h, allowed = self.number, None
        if kind == UNDECIDED:
            allowed = self.record.allowed(rows, keys, heads=h)
        if allowed is not None:
            if not allowed.any():
                return None
            allowed = None if allowed.all() else allowed
        logs = self.unmasked.logits(rows, keys, heads=h)
        lse = self.record.lse[h, rows]
        hidden = logs == -math.inf if bool(lse.isnan().any()) else None
        logs.sub_(lse[:, None])
        if hidden is not None:  # -inf - NaN is NaN
            logs.masked_fill_(hidden, -math.inf)
        if allowed is not None:
            logs.masked_fill_(~allowed, -math.inf)
        q_at, k_at = self.scope.q_positions[rows], self.scope.k_positions[keys]
        return Tile(h, rows, keys, q_at, k_at, logs.exp(), logs, lse, allowed)

    def prove(self, block: int) -> tuple[tuple[slice, ...], tuple[slice, ...], Numbers]:
        """Return the blocks of rows and of keys, and the kind of each tile."""
        ends = [split_blocks(n, block) for n in (self.scope.n_q, self.scope.n_k)]
        rows, keys = (to_slices(*x) for x in ends)
        kinds = np.full((len(rows), len(keys)), FULL, "i1")
        mask = self.record.mask
        if isinstance(mask, Tensor):
            kinds[:] = UNDECIDED
        elif mask is not None and kinds.size:
            places = self.scope.q_positions, self.scope.k_positions
            q, k = (find_ends(x, at[0]) for x, at in zip(places, ends, strict=True))
            edges = Edges(
                *(x[None, None, :, None] for x in q), *(x[None, None, None] for x in k)
            )
            proof = mask.place(np.empty(0)).prove(edges)
            empty, full = (x[0, min(self.number, x.shape[1] - 1)] for x in proof)
            kinds[:] = np.where(empty, EMPTY, np.where(full, FULL, UNDECIDED))
        return rows, keys, kinds


def find_ends(positions: Tensor, first: Numbers) -> tuple[Numbers, Numbers]:
    """Return the smallest and the largest position of each block."""
    at = to_numpy(positions)
    return np.minimum.reduceat(at, first), np.maximum.reduceat(at, first)


def read_heads(
    record: Record, numbers: Sequence[int], rows: slice, keys: slice
) -> Iterator[Head]:
    """Yield the heads with these indices, restricted to some rows and keys."""

    def read(x: Any, *part: slice) -> Any:
        return x if x is None or isinstance(x, Mask) else to_torch(x[part]).detach()

    q, k = read(record.q, ALL, rows), read(record.k, ALL, keys)
    dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype) else torch.float32
    q_at, k_at = read(record.q_positions, rows), read(record.k_positions, keys)
    q_at, k_at = (x.to(q.device, torch.int64) for x in (q_at, k_at))
    lse = read(record.lse, ALL, rows).to(q.device, dtype)
    mask = read(record.mask, ALL, rows, keys)
    record = Record(
        name=record.name,
        q=q,
        k=k,
        lse=lse.masked_fill(lse == -math.inf, 0),  # rows without keys
        scale=record.scale,
        softcap=record.softcap,
        q_positions=q_at,
        k_positions=k_at,
        mask=mask.place(q) if isinstance(mask, Mask) else mask,
        bias=read(record.bias, ALL, rows, keys),
    )
    scope = Scope(q.shape[1], k.shape[1], q_at, k_at, dtype)
    unmasked = replace(record, mask=None)
    for number in numbers:
        yield Head(number, scope, record, unmasked)


def read_slice(name: str, part: slice, n: int) -> slice:
    """Return a slice with explicit ends; raise OptionError if it has a step."""
    if not isinstance(part, slice) or part.step not in (None, 1):
        raise OptionError(
            f"{name}={part!r}, expected a run of them. Write {name}=slice(0, {n})."
        )
    start, stop, _ = part.indices(n)
    return slice(start, max(start, stop))
