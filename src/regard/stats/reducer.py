"""The interface of a reducer, which receives the weights of a walk tile by tile.

    state = reducer.start(scope)          the state before any tile
    state = reducer.add(state, tile)      one more tile
    state = reducer.merge(state, other)   combine two states of different tiles
    result = reducer.finish(states)       one state for each head that was walked

Tiles have any order and shape, and no cell occurs twice. Tiles without any allowed cell
are skipped. A tile is only valid until `add` returns, as its memory may be reused: keep
sums, maxima or copies, never views.

    class Loud:
        '''How many weights of each head are above a half.'''

        def start(self, scope): return 0
        def add(self, state, tile): return state + int((tile.weights > 0.5).sum())
        def merge(self, state, other): return state + other
        def finish(self, states): return states

`check_reducer(Loud())` of reducer_check.py raises an error if a reducer is incorrect.

Next: tile_walk.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

FOLD = 8  # cells that are reduced to their maximum
State = TypeVar("State")
Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True)
class Scope:
    """One head of a walk: the number of rows and keys, positions and dtype."""

    n_q: int
    n_k: int
    q_positions: Tensor  # (n_q,), token positions
    k_positions: Tensor  # (n_k,)
    dtype: torch.dtype  # of the weights: float32 or float64

    @property
    def device(self) -> torch.device:
        """The device on which the weights are computed."""
        return self.q_positions.device


@dataclass(frozen=True)
class Tile:
    """Some cells of one head; rows and keys are relative to the first ones walked."""

    head: int  # of the record
    rows: slice
    keys: slice
    q_positions: Tensor  # (rows,), token positions
    k_positions: Tensor  # (keys,)
    weights: Tensor  # (rows, keys), 0 where masked; NaN: the row has no weights
    logs: Tensor  # (rows, keys), log weights = logits - lse, -inf where masked
    lse: Tensor  # (rows,), 0 for a row without keys
    allowed: Tensor | None  # bool (rows, keys); None means all of them

    @cached_property
    def row_peaks(self) -> Tensor:
        """The maxima of every 8 rows, (rows / 8, keys), cached for all reducers."""
        fold = math.gcd(self.weights.shape[0], FOLD)
        return self.weights.unflatten(0, (-1, fold)).amax(1)

    @cached_property
    def key_peaks(self) -> Tensor:
        """The maxima of 8 keys that are keys / 8 apart, (rows, keys / 8)."""
        fold = math.gcd(self.weights.shape[1], FOLD)
        return self.weights.unflatten(1, (fold, -1)).amax(1)


class Reducer(Protocol[State, Result_co]):
    """Any object with these four methods; it must not keep state in itself."""

    def start(self, scope: Scope) -> State:
        """Return the initial state."""

    def add(self, state: State, tile: Tile) -> State:
        """Return the state after one more tile; the old state is not used again."""

    def merge(self, state: State, other: State) -> State:
        """Return the combined state; neither input is used again."""

    def finish(self, states: Sequence[State]) -> Result_co:
        """Return the result, from one state for each head."""


@dataclass
class Rows:
    """Values for the rows of a walk: some rows from `first`, all others are `fill`.

    A worker only processes a few rows; if others are needed, all rows are allocated.
    """

    n: int  # rows of the walk
    values: Tensor  # (some rows, ...)
    fill: float
    first: int = 0

    def at(self, rows: slice) -> Tensor:
        """Return the values of some rows, to read and to write."""
        held = slice(self.first, self.first + self.values.shape[0])
        if held.start == held.stop:
            self.first, self.values = rows.start, self.make(rows.stop - rows.start)
        elif rows.start < held.start or rows.stop > held.stop:
            whole = self.make(self.n)
            whole[held] = self.values
            self.first, self.values = 0, whole
        return self.values[rows.start - self.first : rows.stop - self.first]

    def pair(self, other: Rows) -> tuple[Tensor, Tensor]:
        """Return both values for the rows of the other; write to the first."""
        n = other.values.shape[0]
        rows = slice(other.first, other.first + n)
        return (self.at(rows) if n else other.values), other.values

    def whole(self) -> Tensor:
        """Return the values of all rows."""
        return self.at(slice(0, self.n))

    def make(self, n: int) -> Tensor:
        """Return n rows of the fill value."""
        return self.values.new_full((n, *self.values.shape[1:]), self.fill)


def start_rows(
    scope: Scope, *width: int, fill: float = 0.0, dtype: torch.dtype | None = None
) -> Rows:
    """Return values without any rows yet, which grow to (n_q, *width)."""
    kind = scope.dtype if dtype is None else dtype
    values: Any = torch.empty((0, *width), dtype=kind, device=scope.device)
    return Rows(scope.n_q, values, fill)
