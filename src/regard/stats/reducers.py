"""Reducers that return one number for each row, key or distance.

    RowSums          Σ_j p_ij                    1, or less if there is a sink
    ColumnSums       Σ_i p_ij                    the mass that a key receives
    ColumnMax        max_i p_ij                  the largest weight that a key receives
    LargestLogit     max_j s_ij                  before the softmax
    Entropy          -Σ_j p_ij log p_ij          and varentropy: the variance of -log p
    OffsetProfile    Σ p_ij over q_i - k_j = d   the mass at each distance, in tokens

All are per head. Sums are float64, so that the order of the tiles does not matter.

Next: strongest.py (the keys with the largest weights), pyramid.py (maps)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.stats.named_array import NamedArray
from regard.stats.reducer import Rows, Scope, Tile, start_rows

WIDE = torch.float64
FAR = -1e4  # replaces log 0 where it is multiplied by 0
TINY = 1e-30  # below it, float32 weights lose digits


@dataclass(frozen=True)
class RowSums:
    """The mass of each row on the keys that are walked."""

    def start(self, scope: Scope) -> Rows:
        """Return zero mass."""
        return start_rows(scope, dtype=WIDE)

    def add(self, state: Rows, tile: Tile) -> Rows:
        """Add the tile's mass to its rows."""
        state.at(tile.rows).add_(tile.weights.sum(1))
        return state

    def merge(self, state: Rows, other: Rows) -> Rows:
        """Add the other state."""
        mine, theirs = state.pair(other)
        mine.add_(theirs)
        return state

    def finish(self, states: Sequence[Rows]) -> NamedArray:
        """Return (heads, queries)."""
        return name("query", "sum over keys", [x.whole() for x in states])


@dataclass(frozen=True)
class ColumnSums:
    """The mass that each key receives from the rows that are walked."""

    def start(self, scope: Scope) -> Tensor:
        """Return zero mass."""
        return torch.zeros(scope.n_k, dtype=WIDE, device=scope.device)

    def add(self, state: Tensor, tile: Tile) -> Tensor:
        """Add the tile's mass to its keys."""
        state[tile.keys].add_(tile.weights.sum(0))
        return state

    def merge(self, state: Tensor, other: Tensor) -> Tensor:
        """Add the other state."""
        return state.add_(other)

    def finish(self, states: Sequence[Tensor]) -> NamedArray:
        """Return (heads, keys)."""
        return name("key", "sum over queries", states)


@dataclass(frozen=True)
class ColumnMax:
    """The largest weight that each key receives; 0 if no query attends to it."""

    def start(self, scope: Scope) -> Tensor:
        """Return zeros."""
        return torch.zeros(scope.n_k, dtype=scope.dtype, device=scope.device)

    def add(self, state: Tensor, tile: Tile) -> Tensor:
        """Keep the larger values."""
        here = state[tile.keys]
        torch.maximum(here, tile.row_peaks.amax(0), out=here)
        return state

    def merge(self, state: Tensor, other: Tensor) -> Tensor:
        """Keep the larger values."""
        return torch.maximum(state, other)

    def finish(self, states: Sequence[Tensor]) -> NamedArray:
        """Return (heads, keys)."""
        return name("key", "max over queries", states)


@dataclass(frozen=True)
class LargestLogit:
    """The largest logit of each row, without the sink; -inf for a row without keys."""

    def start(self, scope: Scope) -> Rows:
        """Return -inf for every row."""
        return start_rows(scope, fill=-math.inf)

    def add(self, state: Rows, tile: Tile) -> Rows:
        """Keep the larger logit, computed as log weight + lse."""
        top = tile.key_peaks.amax(1)
        logs, lossy = top.log(), (top <= TINY) | (top == math.inf)
        if bool(lossy.any()):
            logs = torch.where(lossy, tile.logs.amax(1), logs)
        here = state.at(tile.rows)
        torch.maximum(here, logs + tile.lse, out=here)
        return state

    def merge(self, state: Rows, other: Rows) -> Rows:
        """Keep the larger values."""
        mine, theirs = state.pair(other)
        torch.maximum(mine, theirs, out=mine)
        return state

    def finish(self, states: Sequence[Rows]) -> NamedArray:
        """Return (heads, queries)."""
        return name("query", "largest logit over keys", [x.whole() for x in states])


@dataclass(frozen=True)
class Entropies:
    """Both in nats, over the keys only, without the sink."""

    entropy: NamedArray  # H = -Σ p log p
    varentropy: NamedArray  # Σ p (-log p - H)²


@dataclass(frozen=True)
class Entropy:
    """Entropy and varentropy of each row.

    The state is mass S, mean m = Σ p log p / S and M = Σ p (log p - m)²; states merge
    like variances. Σ p log² p - H² would lose all digits if weights are nearly equal.
    """

    def start(self, scope: Scope) -> Rows:
        """Return zero mass."""
        return start_rows(scope, 3, dtype=WIDE)

    def add(self, state: Rows, tile: Tile) -> Rows:
        """Combine the moments of the tile with the state."""
        p, logs = tile.weights, tile.logs.clamp(min=FAR)
        mass = p.sum(1)
        mean = (p * logs).sum(1) / mass.masked_fill(mass == 0, 1)
        spread = logs.sub_(mean[:, None]).square_().mul_(p).sum(1)
        here = state.at(tile.rows)
        here.copy_(join_moments(here, torch.stack([mass, mean, spread], 1).to(WIDE)))
        return state

    def merge(self, state: Rows, other: Rows) -> Rows:
        """Combine the moments."""
        mine, theirs = state.pair(other)
        mine.copy_(join_moments(mine, theirs))
        return state

    def finish(self, states: Sequence[Rows]) -> Entropies:
        """Return entropy and varentropy, (heads, queries)."""
        mass, mean, spread = stack([x.whole() for x in states]).unbind(-1)
        entropy = -mass * mean
        spread = spread + mass * (mean + entropy).square()
        return Entropies(
            NamedArray(entropy, ("head", "query"), "walk: -Σ p log p over keys, nats"),
            NamedArray(
                spread, ("head", "query"), "walk: Σ p (-log p - entropy)², nats²"
            ),
        )


def join_moments(a: Tensor, b: Tensor) -> Tensor:
    """Return the combined mass, mean and spread (..., 3) of two parts."""
    (s, m, v), (t, n, w) = a.unbind(-1), b.unbind(-1)
    mass = s + t
    share = t / mass.masked_fill(mass == 0, 1)
    apart = n - m
    spread = v + w + s * share * apart.square()
    return torch.stack([mass, m + share * apart, spread], -1)


@dataclass(frozen=True)
class Profile:
    """The mass at each distance."""

    offsets: Tensor  # (offsets,), q - k in tokens; positive for earlier keys
    mass: NamedArray  # (head, offset), the sum over all pairs at that distance


@dataclass(frozen=True)
class Distances:
    """The state of OffsetProfile."""

    first: int  # the smallest offset
    mass: Tensor  # (offsets,)


@dataclass(frozen=True)
class OffsetProfile:
    """The mass at each distance between query and key, by the tokens' positions."""

    def start(self, scope: Scope) -> Distances:
        """Return zeros for every possible offset."""
        q, k = scope.q_positions, scope.k_positions
        if not len(q) or not len(k):
            return Distances(0, q.new_zeros(0, dtype=WIDE))
        first, last = int(q.min() - k.max()), int(q.max() - k.min())
        return Distances(first, q.new_zeros(last - first + 1, dtype=WIDE))

    def add(self, state: Distances, tile: Tile) -> Distances:
        """Add the sums of the tile's diagonals."""
        q, k = tile.q_positions, tile.k_positions
        n_q, n_k = tile.weights.shape
        if is_run(q) and is_run(k):
            # rows are one cell longer than the stride, so diagonals become columns
            room = tile.weights.new_zeros(n_q * (n_q + n_k))
            room.view(n_q, n_q + n_k)[:, :n_k] = tile.weights.flip(1)
            sums = room[: n_q * (n_q + n_k - 1)].view(n_q, -1).sum(0)
            at = int(q[0] - k[-1]) - state.first
            state.mass[at : at + n_q + n_k - 1] += sums
        else:
            at = (q[:, None] - k - state.first).flatten()
            state.mass.index_add_(0, at, tile.weights.flatten().to(WIDE))
        return state

    def merge(self, state: Distances, other: Distances) -> Distances:
        """Add the other state."""
        state.mass.add_(other.mass)
        return state

    def finish(self, states: Sequence[Distances]) -> Profile:
        """Return the offsets and (heads, offsets)."""
        first = states[0].first if states else 0
        mass = name("offset", "sum over pairs", [x.mass for x in states])
        return Profile(first + torch.arange(mass.values.shape[1]), mass)


def is_run(positions: Tensor) -> bool:
    """Return whether the positions are consecutive."""
    return bool((positions.diff() == 1).all())


def name(axis: str, what: str, states: Sequence[Tensor]) -> NamedArray:
    """Return the states of all heads as one statistic."""
    return NamedArray(stack(states), ("head", axis), f"walk: {what}")


def stack(states: Sequence[Tensor]) -> Tensor:
    """Return the stacked states of all heads; an empty array if there are none."""
    return torch.stack(list(states)) if states else torch.empty(0, 0)
