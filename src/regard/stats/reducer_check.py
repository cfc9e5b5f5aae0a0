"""A test for reducers: the result must not depend on the tiling or its order.

    check_reducer(Loud())         returns None, or raises an error with the reason

A small head is walked in one tile, and then repeatedly in other ways: cut into other
tiles, in another order, split over states that are merged in any order, and with memory
that is overwritten after `add` returns. Integers and booleans must be equal, other
numbers equal up to rounding.

Next: published.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from regard.arrays import is_array, to_numpy
from regard.definition.contract import ALL
from regard.errors import OptionError
from regard.masks.tiles import Numbers
from regard.stats.reducer import Reducer, Scope, Tile

ROWS, KEYS = 24, 20  # size of the test head
ROUNDS = 12  # random ways to cut, order and merge
ROUNDING = 1e-9  # of sums in float64
VERBS = ("start", "add", "merge", "finish")

Groups = list[list[Tile]]  # the tiles of each state; states are merged


def check_reducer(reducer: Reducer[Any, Any]) -> None:
    """Raise OptionError if the result of a reducer depends on the tiling."""
    name = type(reducer).__name__
    for verb in VERBS:
        if not callable(getattr(reducer, verb, None)):
            raise OptionError(
                f"{name} has no {verb}(), expected the four verbs of a reducer: "
                f"{', '.join(VERBS)}."
            )
    scope, whole = make_head()
    expected = walk_groups(reducer, scope, [[whole]], reuse=False)
    for n, (case, groups) in enumerate(list_cases(whole)):
        wrong = differ(expected, walk_groups(reducer, scope, groups, reuse=n > 0))
        if wrong:
            raise OptionError(f"{name} gives another result {case}: {wrong}.")


def list_cases(whole: Tile) -> Iterator[tuple[str, Groups]]:
    """Yield the test cases, the simplest first."""
    left, right = (
        crop_tile(whole, ALL, keys) for keys in (slice(0, 11), slice(11, KEYS))
    )
    upper, lower = (
        crop_tile(whole, rows, ALL) for rows in (slice(0, 7), slice(7, ROWS))
    )
    corner = crop_tile(whole, slice(0, 7), slice(0, 11))  # its right is masked
    yield "when walked again (keep what you know in the state, not in self)", [[whole]]
    yield "once the memory of a tile is used again (copy what you keep)", [[whole]]
    yield "when the keys come in two tiles", [[left, right]]
    yield "when the rows come in two tiles", [[upper, lower]]
    yield "when the last tile comes first", [[right, left]]
    yield "when a tile without any allowed cell is left out", [[corner, lower]]
    yield "when two states are merged", [[left], [right]]
    yield "when two states are merged the other way round", [[right], [left]]
    yield "when states of different rows are merged", [[upper], [lower]]
    yield "when a state that saw nothing is merged to it", [[whole], []]
    yield "when it is merged to a state that saw nothing", [[], [whole]]
    rng = np.random.default_rng(1)
    for _ in range(ROUNDS):
        tiles = cut_anyhow(whole, rng)
        turn = rng.permutation(len(tiles))
        groups = [[tiles[i] for i in turn[n::4]] for n in range(4)]
        yield "when tiles of other shapes come in another order", groups


def walk_groups(
    reducer: Reducer[Any, Any], scope: Scope, groups: Groups, *, reuse: bool = True
) -> Any:
    """Feed tiles to a reducer, overwrite them if `reuse`, and merge the states."""
    name = type(reducer).__name__
    states = []
    for tiles in groups:
        state = reducer.start(scope)
        for given in tiles:
            tile = replace(
                given, weights=given.weights.clone(), logs=given.logs.clone()
            )
            state = reducer.add(state, tile)
            if state is None:
                raise OptionError(f"{name}.add returned None, expected the state.")
            if differ((given.weights, given.logs), (tile.weights, tile.logs)):
                raise OptionError(
                    f"{name}.add writes into the tile, which others read after it. "
                    "Write tile.weights.clone() for a copy to change."
                )
            if reuse:
                tile.weights.fill_(math.nan)
                tile.logs.fill_(math.nan)
        states.append(state)
    while len(states) > 1:  # merge neighbours, as a tree
        states = [
            merge_states(reducer, states[i : i + 2]) for i in range(0, len(states), 2)
        ]
    return reducer.finish(states)


def merge_states(reducer: Reducer[Any, Any], states: list[Any]) -> Any:
    """Merge two states, or return a single one unchanged."""
    if len(states) == 1:
        return states[0]
    state = reducer.merge(*states)
    if state is None:
        name = type(reducer).__name__
        raise OptionError(f"{name}.merge returned None, expected the state of both.")
    return state


def make_head() -> tuple[Scope, Tile]:
    """Return a head with ties, position gaps, masked cells and a row without keys."""
    rng = np.random.default_rng(0)
    at = torch.arange(ROWS) + 5, torch.arange(KEYS) + (torch.arange(KEYS) > 12) * 3
    scope = Scope(ROWS, KEYS, *at, torch.float64)
    logits = torch.from_numpy(rng.integers(-4, 5, (ROWS, KEYS)) / 2.0)
    allowed = torch.arange(KEYS) <= torch.arange(ROWS)[:, None] + 4
    allowed[3] = False
    logits = logits.masked_fill(~allowed, -math.inf)
    lse = logits.logsumexp(1)
    lse = lse.masked_fill(lse == -math.inf, 0)
    logs = logits - lse[:, None]
    rows, keys = slice(0, ROWS), slice(0, KEYS)
    return scope, Tile(0, rows, keys, *at, logs.exp(), logs, lse, allowed)


def crop_tile(tile: Tile, rows: slice, keys: slice) -> Tile:
    """Return a part of the tile that covers the whole head."""
    rows, keys = slice(*rows.indices(ROWS)[:2]), slice(*keys.indices(KEYS)[:2])
    allowed = None if tile.allowed is None else tile.allowed[rows, keys]
    return replace(
        tile,
        rows=rows,
        keys=keys,
        q_positions=tile.q_positions[rows],
        k_positions=tile.k_positions[keys],
        weights=tile.weights[rows, keys].clone(),
        logs=tile.logs[rows, keys].clone(),
        lse=tile.lse[rows],
        allowed=None if allowed is None or bool(allowed.all()) else allowed,
    )


def cut_anyhow(whole: Tile, rng: np.random.Generator) -> list[Tile]:
    """Return tiles of random shapes, with different keys in every strip of rows."""
    return [
        crop_tile(whole, rows, keys)
        for rows in cut_range(ROWS, rng)
        for keys in cut_range(KEYS, rng)
    ]


def cut_range(n: int, rng: np.random.Generator) -> list[slice]:
    """Return one to four slices that cover range(n)."""
    inner = rng.choice(np.arange(1, n), rng.integers(0, 4), replace=False)
    ends = [0, *sorted(inner.tolist()), n]
    return [slice(i, j) for i, j in pairwise(ends)]


def differ(expected: Any, found: Any) -> str:
    """Return how two results differ, or an empty string."""
    mine, theirs = list(iterate_numbers(expected)), list(iterate_numbers(found))
    if len(mine) != len(theirs):
        return f"{len(theirs)} arrays, expected {len(mine)}"
    for x, y in zip(mine, theirs, strict=True):
        if x.shape != y.shape:
            return f"an array of the shape {y.shape}, expected {x.shape}"
        exact = x.dtype.kind not in "fc"
        near = (
            {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": ROUNDING, "atol": 1e-12}
        )
        same = np.isclose(x, y, **near, equal_nan=not exact)
        if not same.all():
            at = np.unravel_index(int(np.argmin(same)), same.shape)
            return f"{y[at]} in place of {x[at]}"
    return ""


def iterate_numbers(result: Any) -> Iterator[Numbers]:
    """Yield the arrays of a result from any nesting of containers."""
    if is_array(result) or isinstance(result, int | float | complex):
        yield to_numpy(result) if is_array(result) else np.asarray(result)
    elif is_dataclass(result) and not isinstance(result, type):
        for each in fields(result):
            yield from iterate_numbers(getattr(result, each.name))
    elif isinstance(result, dict):
        for key in sorted(result, key=str):
            yield from iterate_numbers(result[key])
    elif isinstance(result, list | tuple):
        for each in result:
            yield from iterate_numbers(each)
