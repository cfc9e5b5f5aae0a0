"""The weights of one head of a record, as tiles that are computed when they are needed.

    logs    = capped(scale * q kᵀ) + bias - lse      -inf where the mask forbids
    weights = exp(logs)

No other file of the statistics computes a tile again. The mask is asked for its proofs
once for each head: tiles proved empty are never computed, full ones never meet it.
Computed in float32, or in float64 if q or k is, in two buffers that are used again.

Next: walk.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.arrays import Array, to_numpy
from regard.errors import OptionError
from regard.masks.algebra import Mask
from regard.masks.tiles import EMPTY, FULL, UNDECIDED, Edges, Numbers, cut, to_slices
from regard.record import Record
from regard.stats.call import to_torch
from regard.stats.reducer import Scope, Tile


@dataclass(frozen=True)
class Buffers:
    """Room for the logs and the weights of one tile."""

    logs: Tensor  # (cells,)
    weights: Tensor


@dataclass(frozen=True)
class Head:
    """Some rows and keys of one head, in torch and ready to multiply."""

    number: int
    scope: Scope
    q: Tensor  # (n_q, D), times scale
    k: Tensor  # (n_k, D)
    lse: Tensor  # (n_q,), 0 for a row that sees nothing
    mask: Mask | Tensor | None  # a formula of positions, or bool (n_q, n_k)
    bias: Tensor | None  # (n_q, n_k)
    softcap: float | None

    def make_buffers(self, block: int) -> Buffers:
        """Return room for one tile."""
        cells = min(block, self.scope.n_q) * min(block, self.scope.n_k)
        return Buffers(self.q.new_empty(cells), self.q.new_empty(cells))

    def compute(
        self, rows: slice, keys: slice, kind: int, buffers: Buffers
    ) -> Tile | None:
        """Return one tile; None if all of it turns out to be masked."""
        allowed = self.look(rows, keys) if kind == UNDECIDED else None
        if allowed is not None:
            if not allowed.any():
                return None
            allowed = None if allowed.all() else allowed
        shape = rows.stop - rows.start, keys.stop - keys.start
        cells = shape[0] * shape[1]
        logs, weights = (x[:cells].view(shape) for x in (buffers.logs, buffers.weights))
        lse = self.lse[rows]
        torch.mm(self.q[rows], self.k[keys].T, out=logs)
        if self.softcap is not None:
            logs.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.bias is not None:
            logs.add_(self.bias[rows, keys])
        logs.sub_(lse[:, None])
        if self.bias is not None and bool(lse.isnan().any()):  # -inf - NaN is NaN
            logs.masked_fill_(self.bias[rows, keys] == -math.inf, -math.inf)
        if allowed is not None:
            logs.masked_fill_(~allowed, -math.inf)
        torch.exp(logs, out=weights)
        q_at, k_at = self.scope.q_positions[rows], self.scope.k_positions[keys]
        return Tile(self.number, rows, keys, q_at, k_at, weights, logs, lse, allowed)

    def look(self, rows: slice, keys: slice) -> Tensor | None:
        """Return who may see whom in a tile."""
        if not isinstance(self.mask, Mask):
            return None if self.mask is None else self.mask[rows, keys]
        q, k = self.scope.q_positions[rows], self.scope.k_positions[keys]
        b, h = (q.new_tensor([x]).view(1, 1, 1, 1) for x in (0, self.number))
        cells = self.mask(b, h, q.view(1, 1, -1, 1), k.view(1, 1, 1, -1))
        return cells[0, 0].expand(len(q), len(k))

    def prove(self, block: int) -> tuple[tuple[slice, ...], tuple[slice, ...], Numbers]:
        """Return the blocks of rows and of keys, and what is known of each tile."""
        ends = [cut(n, block) for n in (self.scope.n_q, self.scope.n_k)]
        rows, keys = (to_slices(*x) for x in ends)
        kinds = np.full((len(rows), len(keys)), FULL, "i1")
        if isinstance(self.mask, Tensor):
            kinds[:] = UNDECIDED
        elif self.mask is not None and kinds.size:
            places = self.scope.q_positions, self.scope.k_positions
            q, k = (find_ends(x, at[0]) for x, at in zip(places, ends, strict=True))
            edges = Edges(
                *(x[None, None, :, None] for x in q), *(x[None, None, None] for x in k)
            )
            proof = self.mask.place(np.empty(0)).prove(edges)
            empty, full = (x[0, min(self.number, x.shape[1] - 1)] for x in proof)
            kinds[:] = np.where(empty, EMPTY, np.where(full, FULL, UNDECIDED))
        return rows, keys, kinds


def find_ends(positions: Tensor, first: Numbers) -> tuple[Numbers, Numbers]:
    """Return the smallest and the largest position of each block."""
    at = to_numpy(positions)
    return np.minimum.reduceat(at, first), np.maximum.reduceat(at, first)


def read_head(record: Record, number: int, rows: slice, keys: slice) -> Head:
    """Return some rows and keys of one head."""
    group = record.heads // record.k.shape[0]
    q = read(record.q[number, rows, :])
    k = read(record.k[number // group, keys, :])
    dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype) else torch.float32
    q = q.to(dtype) * record.scale
    lse = read(record.lse[number, rows]).to(q)
    places = (record.q_positions[rows], record.k_positions[keys])
    q_at, k_at = (read(x).to(q.device, torch.int64) for x in places)
    mask, bias = (cut_out(x, number, rows, keys) for x in (record.mask, record.bias))
    return Head(
        number=number,
        scope=Scope(len(q), len(k), q_at, k_at, dtype),
        q=q,
        k=k.to(q),
        lse=lse.masked_fill(lse == -math.inf, 0),
        mask=mask.place(q) if isinstance(mask, Mask) else mask,
        bias=bias,
        softcap=record.softcap,
    )


def cut_out(x: Any, number: int, rows: slice, keys: slice) -> Any:
    """Return the cells of one head of an array (H or 1, Nq, Nk), a formula as it is."""
    if x is None or isinstance(x, Mask):
        return x
    return read(x[min(number, x.shape[0] - 1), rows, keys])


def read(x: Array) -> Tensor:
    """Return an array of any library as a tensor without a gradient."""
    found: Tensor = to_torch(x).detach()
    return found


def read_range(name: str, part: slice, n: int) -> slice:
    """Return a run of rows or keys with both ends; refuse steps."""
    if not isinstance(part, slice) or part.step not in (None, 1):
        raise OptionError(
            f"{name}={part!r}, expected a run of them. Write {name}=slice(0, {n})."
        )
    start, stop, _ = part.indices(n)
    return slice(start, max(start, stop))
