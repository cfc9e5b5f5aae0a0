"""Masks as lists of tiles for the kernels: proved full, or undecided with packed bits.

    for each head and block of queries (or of keys, for the columns)
        full        numbers of tiles along the other axis
        undecided   the same; bit j of a word: the query may attend to column j

Tiles proved empty are in no list. A tile that reaches past the end of an axis is
undecided, and the bits of what is not there are 0. The lists are made for some blocks
at a time, so that bits take 32 MB, or those of one block, if all tiles are undecided.

Next: run_kernels.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from regard.masks.algebra import Mask
from regard.masks.tiles import FULL, UNDECIDED, Numbers, prove_tiles

AT_ONCE = 2**15  # undecided tiles in a list: 1 kB of bits each, if they have 128 rows
CELLS = 2**22  # evaluated at once

Side = Literal["rows", "columns"]


@dataclass(frozen=True)
class Lists:
    """The tiles of some blocks along the axis of the programs."""

    first: int  # the first block
    ends: Tensor  # (H or 1, blocks, 4) int32: full, undecided, end, first bits
    tiles: Tensor  # int32
    bits: Tensor  # (undecided, rows of a tile) int64


@dataclass(frozen=True)
class TiledMask:
    """A formula of rows and columns, whose first row is at the position `start`."""

    mask: Mask
    start: int
    shape: tuple[int, int, int]  # heads, queries, keys
    block: tuple[int, int]  # queries and keys of a tile; at most 64 keys

    def list_tiles(self, side: Side, like: Tensor) -> Iterator[Lists]:
        """Yield the lists of successive blocks, on the device of `like`."""
        kinds = self.prove()
        if side == "columns":
            kinds = np.swapaxes(kinds, 1, 2)
        undecided = (kinds == UNDECIDED).sum((0, 2)).cumsum()
        cuts = np.flatnonzero(np.diff((undecided.clip(1) - 1) // AT_ONCE)) + 1
        ends = [0, *cuts.tolist(), kinds.shape[1]]
        for first, last in pairwise(ends):
            yield self.make_lists(kinds, first, last, side, like)

    def prove(self) -> Numbers:
        """Return the kind of each tile, (H or 1, query tiles, key tiles)."""
        proved = prove_tiles(
            self.mask, self.shape, block=self.block, q_start=self.start
        )
        kinds: Numbers = proved.split().kinds[0]
        for axis in (1, 2):
            if self.shape[axis] % self.block[axis - 1]:
                last = np.take(kinds, [-1], axis)
                kinds = np.concatenate(
                    [
                        np.delete(kinds, -1, axis),
                        np.where(last == FULL, UNDECIDED, last),
                    ],
                    axis,
                )
        return kinds

    def make_lists(
        self, kinds: Numbers, first: int, last: int, side: Side, like: Tensor
    ) -> Lists:
        """Return the lists of the blocks from first to last, which is not included."""
        some = kinds[:, first:last]
        which = np.stack([some == FULL, some == UNDECIDED], 2)
        counts = which.sum(3)
        after = counts.cumsum().reshape(counts.shape)
        bits = counts[..., 1].cumsum().reshape(counts.shape[:2])
        ends = [after[..., 0] - counts[..., 0], after[..., 0], after[..., 1]]
        ends.append(bits - counts[..., 1])
        h, i, j = np.argwhere(some == UNDECIDED).T
        i += first
        at = (h, i, j) if side == "rows" else (h, j, i)

        def send(x: Numbers) -> Tensor:
            return torch.from_numpy(x.astype(np.int32)).to(like.device)

        return Lists(
            first,
            send(np.stack(ends, -1)),
            send(np.argwhere(which)[:, 3]),
            self.pack_tiles(np.stack(at, 1), like),
        )

    def pack_tiles(self, where: Numbers, like: Tensor) -> Tensor:
        """Return the bits of tiles (head, row of tiles, column of tiles)."""
        n_rows, n_keys = self.block
        few = max(1, CELLS // (n_rows * n_keys))
        parts = [torch.empty(0, n_rows, dtype=torch.int64, device=like.device)]
        mask, (_, n_q, n_k) = self.mask.place(like), self.shape
        bit = torch.arange(n_keys, device=like.device)
        row = torch.arange(n_rows, device=like.device)
        for some in torch.from_numpy(where).to(like.device).split(few):
            h, i, j = (x[:, None, None] for x in some.T)
            q, k = i * n_rows + row[:, None], j * n_keys + bit
            there = (q < n_q) & (k < n_k)
            q, k = q.clamp(max=n_q - 1) + self.start, k.clamp(max=n_k - 1)
            cells = mask(torch.zeros_like(h), h, q, k) & there
            parts.append((cells.long() << bit).sum(-1))
        return torch.cat(parts)
