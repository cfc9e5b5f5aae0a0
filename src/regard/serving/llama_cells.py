"""Which token is in a cell of llama.cpp's cache, and what its mask lets a row see.

    cell        0    1    2    3    4
    sequence    0    0    1    1    1
    position    0    1    0    1    2

    a row of sequence 1 at position 1 may see    cells 2 and 3               causal
                                                 cells 2, 3 and 4        everything
                                                 cell 3                 window of 1

The masks that llama.cpp computed are compared with these, cell by cell.

Next: llama_layers.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

EMPTY = -1


@dataclass(frozen=True)
class BatchRow:
    """A token of a batch."""

    token: int
    position: int
    sequence: int


class CacheCells:
    """The sequence and the position of each cell of a cache."""

    def __init__(self) -> None:
        self.sequence = np.full(0, EMPTY)
        self.position = np.full(0, EMPTY)
        self.written = np.full(0, 0)  # by the last rows

    def put(self, cells: NDArray[Any], rows: Sequence[BatchRow]) -> None:
        """Note what was written to some cells."""
        self.written, size = cells, int(cells.max()) + 1
        if size > self.sequence.size:
            more = np.full(2 * size - self.sequence.size, EMPTY)
            self.sequence, self.position = (
                np.concatenate([x, more]) for x in (self.sequence, self.position)
            )
        self.sequence[cells] = [row.sequence for row in rows]
        self.position[cells] = [row.position for row in rows]

    def drop(self, sequence: int, first: int) -> None:
        """Forget a sequence from a position on."""
        gone = (self.sequence == sequence) & (self.position >= first)
        self.sequence[gone] = EMPTY

    def know(self, seen: NDArray[np.bool_]) -> bool:
        """Return whether it is known what is in the cells that are seen."""
        held = self.sequence[: seen.size]
        return not (seen[held.size :].any() or (held == EMPTY)[seen[: held.size]].any())

    def find(self, sequence: int, stop: int) -> tuple[NDArray[Any], int]:
        """Return the cells of the positions before `stop`, and the first of these.

        Positions are those up to stop - 1 without a gap.
        """
        at = np.flatnonzero((self.sequence == sequence) & (self.position < stop))
        at = at[np.argsort(self.position[at])]
        there = self.position[at] == np.arange(stop - at.size, stop)
        at = at[int(np.flatnonzero(~there).max(initial=-1)) + 1 :]
        return at, stop - at.size


@dataclass
class SeenMask:
    """What is known of the mask of a layer.

    window: a row sees this many keys, itself included; None for all
    """

    is_causal: bool = True
    window: int | None = None
    longest: int = 0  # keys that a row was seen to see, where there were no more

    def check(
        self, allowed: NDArray[np.bool_], cells: CacheCells, rows: Sequence[BatchRow]
    ) -> bool:
        """Learn from a mask (rows, cells); return whether it is one of the formulas."""
        held = min(allowed.shape[1], cells.sequence.size)
        sequence, position = cells.sequence[:held], cells.position[:held]
        mine = np.array([row.sequence for row in rows])[:, None] == sequence
        at = np.array([row.position for row in rows])[:, None]
        seen = allowed[:, :held]
        self.is_causal = self.is_causal and not (seen & (position > at)).any()
        if self.is_causal:
            mine &= position <= at
            self.learn_window(seen & mine, at[:, 0], position)
            if self.window is not None:
                mine &= at - position < self.window
        return np.array_equal(seen, mine) and not allowed[:, held:].any()

    def learn_window(
        self,
        seen: NDArray[np.bool_],
        at: NDArray[Any],
        position: NDArray[Any],
    ) -> None:
        """Learn the window from the rows that do not see the first key."""
        for row, last in zip(seen, at, strict=True):
            count = int(last) - int(position[row].min(initial=last)) + 1
            if count <= last:
                self.window = count if self.window is None else self.window
            self.longest = max(self.longest, count)

    @property
    def is_known(self) -> bool:
        """Whether no row saw more than the window."""
        return self.window is None or self.longest <= self.window
