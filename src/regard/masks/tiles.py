"""The score matrix split into tiles, each proved empty, proved full, or undecided.

    ■ full: attend without a mask    ▒ undecided: evaluate the mask    · empty: skip

All tiles are proved in one vectorized step, from the first and last position of each: a
million tiles (131,072 tokens in blocks of 128) take about a second. `settle` evaluates
the mask in the undecided tiles, in batches, so that all that remain are truly mixed.

A proof that holds for all heads has one entry for them, but a tile that it leaves open
may be full in one head and empty in another. `split` gives each its own entry.

Next: algebra.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from regard.arrays import Array, is_array, to_numpy
from regard.errors import OptionError
from regard.masks.formula import Start
from regard.masks.free_axes import find_batch_axes

Numbers = np.ndarray[Any, Any]

EMPTY, UNDECIDED, FULL = 0, 1, 2
CELLS_AT_ONCE = 2**22  # per batch of `settle`: 4 MB


class Edges(NamedTuple):
    """The first and last positions (inclusive) of every tile of a grid."""

    q_first: Numbers  # (B or 1, 1, query tiles, 1)
    q_last: Numbers
    k_first: Numbers  # (1, 1, 1, key tiles)
    k_last: Numbers


class Proof(NamedTuple):
    """Which tiles are proved empty or full; both False means unknown."""

    empty: Numbers  # (B or 1, H or 1, query tiles or 1, key tiles or 1)
    full: Numbers


UNKNOWN = Proof(np.zeros((1, 1, 1, 1), dtype=bool), np.zeros((1, 1, 1, 1), dtype=bool))


class Provable(Protocol):
    """The interface that tiles need from a mask (masks are defined in algebra.py)."""

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        """Return which cells are allowed."""

    def place(self, like: Array) -> Self:
        """Return the mask with its data converted to the library of `like`."""

    def prove(self, edges: Edges) -> Proof:
        """Return which tiles are proved empty and which are proved full."""


@dataclass(frozen=True)
class Tiles:
    """The kind of each tile of a mask over (..., H, Nq, Nk)."""

    mask: Provable
    lead: tuple[int, int]  # batches and heads
    edges: Edges
    kinds: Numbers  # int8 (B or 1, H or 1, query tiles, key tiles)
    rows: tuple[slice, ...]  # query indices of each row of tiles
    keys: tuple[slice, ...]

    def for_all(self) -> Numbers:
        """Return kinds (query tiles, key tiles) that hold for all batches and heads."""
        empty, full = ((self.kinds == kind).all((0, 1)) for kind in (EMPTY, FULL))
        return np.where(empty, EMPTY, np.where(full, FULL, UNDECIDED))

    def split(self) -> Tiles:
        """Return tiles of every batch and head by which undecided cells may differ."""
        if not (self.kinds == UNDECIDED).any():
            return self
        q, k = self.edges.q_first[:1, :, :1], self.edges.k_first[..., :1]
        lead = find_batch_axes(self.mask, self.lead, q, k)
        shape = np.broadcast_shapes(self.kinds.shape, (*lead, 1, 1))
        return replace(self, kinds=np.broadcast_to(self.kinds, shape))

    def settle(self) -> Tiles:
        """Evaluate the mask in every undecided tile; those that remain are mixed."""
        kinds = self.split().kinds.copy()
        where = np.argwhere(kinds == UNDECIDED)
        q_first, q_last, k_first, k_last = self.edges
        n_rows = int((q_last - q_first).max(initial=0)) + 1
        n_keys = int((k_last - k_first).max(initial=0)) + 1
        few = max(1, CELLS_AT_ONCE // (n_rows * n_keys))
        for at in np.split(where, range(few, len(where), few)):
            b, h, i, j = (x[:, None, None] for x in at.T)
            start = np.minimum(b, q_first.shape[0] - 1)
            q = q_first[start, 0, i, 0] + np.arange(n_rows)[:, None]
            k = k_first[0, 0, 0, j] + np.arange(n_keys)
            q = np.minimum(q, q_last[start, 0, i, 0])  # repeat the last past the edge
            k = np.minimum(k, k_last[0, 0, 0, j])
            cells = np.broadcast_to(self.mask(b, h, q, k), (len(at), n_rows, n_keys))
            some, every = cells.any((1, 2)), cells.all((1, 2))
            kinds[tuple(at.T)] = np.where(every, FULL, np.where(some, UNDECIDED, EMPTY))
        return replace(self, kinds=kinds)

    def __str__(self) -> str:
        """Draw the first head of the first batch, one character per tile."""
        rows = self.kinds[0, 0]
        lines = ["".join("·▒■"[kind] for kind in row) for row in rows]
        told = ["batch 0 and head 0; others differ"] * bool((self.kinds != rows).any())
        return "\n".join(lines + told)


def prove_tiles(
    mask: Provable,
    shape: tuple[int, ...],
    *,
    block: int | tuple[int, int],
    q_start: Start,
) -> Tiles:
    """Split (..., H, Nq, Nk) into tiles and prove each from the mask's formula."""
    mask = mask.place(np.empty(0))
    sides = block if isinstance(block, tuple | list) else (block, block)
    counts = [isinstance(n, Integral) and not isinstance(n, bool) for n in sides]
    if len(sides) != 2 or not all(counts) or min(sides) < 1:
        raise OptionError(
            f"block={block!r}, expected rows and keys of at least 1. Write block=512."
        )
    block_q, block_k = map(int, sides)
    starts = np.atleast_1d(to_numpy(q_start) if is_array(q_start) else q_start)
    q_first, q_last = split_blocks(shape[-2], block_q)
    k_first, k_last = split_blocks(shape[-1], block_k)
    edges = Edges(
        starts[:, None, None, None] + q_first[:, None],
        starts[:, None, None, None] + q_last[:, None],
        k_first[None, None, None],
        k_last[None, None, None],
    )
    empty, full = mask.prove(edges)
    grid = (starts.size, 1, q_first.size, k_first.size)
    kinds = np.full(np.broadcast_shapes(empty.shape, full.shape, grid), UNDECIDED, "i1")
    np.copyto(kinds, FULL, where=full)
    np.copyto(kinds, EMPTY, where=empty)
    rows, keys = to_slices(q_first, q_last), to_slices(k_first, k_last)
    batch, heads = (1, 1, *shape)[-4:-2]
    return Tiles(mask, (batch, heads), edges, kinds, rows, keys)


def split_blocks(n: int, block: int) -> tuple[Numbers, Numbers]:
    """Return the first and last index of each block of 0 … n-1."""
    first = np.arange(0, n, block)
    return first, np.minimum(first + block, n) - 1


def to_slices(first: Numbers, last: Numbers) -> tuple[slice, ...]:
    """Return the blocks as slices."""
    pairs = zip(first.tolist(), last.tolist(), strict=True)
    return tuple(slice(i, j + 1) for i, j in pairs)
