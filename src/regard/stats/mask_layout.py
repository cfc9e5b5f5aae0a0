"""The mask of a record indexed by row and column, and its transpose.

    mask(b, h, q, k)  at absolute positions      as in the record
    PlacedMask        at rows i and columns j    mask(q_positions[i], k_positions[j])
    TransposedMask    keys attend to queries     mask(k, q)

Both keep the proofs about tiles: a property of all positions between the smallest and
the largest of a tile also holds for the positions in the tile.

A band, lo <= q - k <= hi, needs neither if positions are consecutive. Transposed, with
both axes flipped, it is the same band: causal stays causal, and the kernel needs no
mask. This makes columns as cheap as rows.

Next: replay.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from regard.arrays import Array, convert, namespace, to_numpy
from regard.masks.algebra import Mask
from regard.masks.patterns import array, everything
from regard.masks.primitives import Band, find_range
from regard.masks.tiles import EMPTY, Edges, Numbers, Proof, prove_tiles
from regard.recording.record import Record, check_mask_extent

ROWS, KEYS = 256, 128  # size of a tile


@dataclass(frozen=True, repr=False, eq=False)
class PlacedMask(Mask):
    """A mask indexed by row and column."""

    mask: Mask
    q_positions: Array  # (Nq,)
    k_positions: Array  # (Nk,)

    @property
    def positional(self) -> bool:
        """Always True: the mask depends on rows and columns."""
        return True

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        return self.mask(b, h, self.q_positions[q], self.k_positions[k])

    def prove(self, edges: Edges) -> Proof:
        """Return the proof for all positions between a tile's smallest and largest."""
        q = find_range(self.q_positions, edges.q_first, edges.q_last)
        k = find_range(self.k_positions, edges.k_first, edges.k_last)
        return self.mask.prove(Edges(*q, *k))

    def __repr__(self) -> str:
        return repr(self.mask)


@dataclass(frozen=True, repr=False, eq=False)
class TransposedMask(Mask):
    """A mask with queries and keys exchanged."""

    mask: Mask

    @property
    def positional(self) -> bool:
        """Always True, as for PlacedMask."""
        return True

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        return self.mask(b, h, k, q)

    def prove(self, edges: Edges) -> Proof:
        """Return the proof of the transposed tiles."""
        q_first, q_last, k_first, k_last = map(transpose_tiles, edges)
        empty, full = self.mask.prove(Edges(k_first, k_last, q_first, q_last))
        return Proof(transpose_tiles(empty), transpose_tiles(full))

    def __repr__(self) -> str:
        return f"({self.mask!r}) turned"


class MaskLayout(NamedTuple):
    """How a mask applies to rows and columns."""

    mask: Mask | Array | None
    start: int = 0  # position of the first row, for a formula
    flipped: bool = False  # both axes are reversed


def read_mask_layout(record: Record, within: Mask | None = None) -> MaskLayout:
    """Return the layout of a record's mask, restricted to `within` if given."""
    if within is None and not isinstance(record.mask, Mask):
        return MaskLayout(record.mask)
    formula = combine_with_record(record, within)
    shift = find_shift(record)
    if not isinstance(record.mask, Mask) and record.mask is not None:
        return MaskLayout(array(record.mask) & place_mask(record, formula))
    if shift is not None and (from_zero(record) or is_banded(formula)):
        return MaskLayout(formula, shift)
    return MaskLayout(place_mask(record, formula))


def read_transposed_layout(record: Record) -> MaskLayout:
    """Return the layout of a record's transposed mask: its keys attend to queries."""
    mask, (n_q, n_k) = record.mask, (record.q.shape[1], record.k.shape[1])
    if mask is None:
        return MaskLayout(None)
    if not isinstance(mask, Mask):
        return MaskLayout(namespace(mask=mask).matrix_transpose(mask))
    shift = find_shift(record)
    plain = record.bias is None and record.softcap is None  # a bias is not flipped
    if plain and shift is not None and is_banded(mask):
        return MaskLayout(mask, n_q + shift - n_k, flipped=True)
    return MaskLayout(TransposedMask(place_mask(record, mask)))


def count_cells(record: Record, within: Mask | None = None) -> int:
    """Return how many cells the kernel computes: those of tiles not proved empty."""
    mask, start, _ = read_mask_layout(record, within)
    formula = mask if isinstance(mask, Mask) else everything()
    shape = (record.heads, record.q.shape[1], record.k.shape[1])
    if not shape[1] * shape[2]:
        return 0
    tiles = prove_tiles(formula, shape, block=(ROWS, KEYS), q_start=start)
    n_q, n_k = ([s.stop - s.start for s in x] for x in (tiles.rows, tiles.keys))
    met = (tiles.for_all() != EMPTY) * np.outer(n_q, n_k)
    return int(met.sum())


def combine_with_record(record: Record, within: Mask | None) -> Mask:
    """Return the intersection of the record's formula and `within`."""
    if within is None:
        assert isinstance(record.mask, Mask)
        return record.mask
    check_mask_extent(record, within)
    return record.mask & within if isinstance(record.mask, Mask) else within


def place_mask(record: Record, mask: Mask) -> PlacedMask:
    """Return a mask indexed by the rows and columns of a record."""
    like, positions = record.q, (record.q_positions, record.k_positions)
    xp = namespace(like=like)
    return PlacedMask(mask, *(xp.astype(convert(x, like), xp.int64) for x in positions))


def find_shift(record: Record) -> int | None:
    """Return first row minus first key; None if positions are not consecutive."""
    both = [to_numpy(x) for x in (record.q_positions, record.k_positions)]
    if any(x.size == 0 or (np.diff(x) != 1).any() for x in both):
        return None
    return int(both[0][0]) - int(both[1][0])


def from_zero(record: Record) -> bool:
    """Return whether the first key is at position 0."""
    return int(record.k_positions[0]) == 0


def is_banded(mask: Mask) -> bool:
    """Return whether a mask depends on distances only."""
    leaves = [node for node in mask.walk() if not node.parts]
    return all(isinstance(leaf, Band) for leaf in leaves)


def transpose_tiles(x: Numbers) -> Numbers:
    """Exchange the query tiles and the key tiles of (B, H, query, key)."""
    return np.swapaxes(x, 2, 3)
