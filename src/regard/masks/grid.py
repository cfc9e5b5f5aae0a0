"""A formula written out on a rectangle of cells.

    b (B,1,1,1)   h (1,H,1,1)   q (1,1,Nq,1)   k (1,1,1,Nk)   ->   formula(b, h, q, k)

Positions are absolute: query i stands at q_start + i, key j at j. Look-ups out of range
are refused before they happen, because some libraries clamp or wrap them silently.

Next: tiles.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard.arrays import (
    Array,
    as_array,
    convert,
    count_from,
    holds,
    is_array,
    namespace,
    to_numpy,
)
from regard.errors import MaskError, PositionError, ShapeError

if TYPE_CHECKING:
    from regard.masks.algebra import Formula

Start = Any  # int: where the first query stands; (B,) integers if batches differ
NUMPY = (np.ndarray, np.generic)


class Extent(NamedTuple):
    """How far the data behind a formula reaches; None is: everywhere."""

    batch: int | None = None
    heads: int | None = None
    q: tuple[int, int] | None = None  # the first position, and one past the last
    k: int | None = None  # one past the last position


def resolve_start(
    q_start: Start | None, shape: tuple[int, ...], *formulas: Formula
) -> Start:
    """Return where the queries start; refuse to guess where it matters."""
    n_q, n_k = shape[-2:]
    if q_start is None:
        nodes = [node for formula in formulas for node in formula.walk()]
        positional = [node for node in nodes if node.positional]
        if positional and n_q != n_k:
            raise PositionError(
                f"{positional[0]!r} compares positions, and there are {n_q} queries "
                f"for {n_k} keys: where does the first query stand? Write "
                f"q_start={n_k - n_q} if the queries are the last of the keys (a KV "
                "cache), q_start=0 if both start together."
            )
        q_start = 0
    q_start = read_start(q_start)
    for formula in formulas:
        check_extents(formula, shape, q_start)
    return q_start


def read_start(q_start: Any) -> Start:
    """Return an int, or an array of integers; a NumPy number is an int as well."""
    start = as_array(q_start)
    if not is_array(start):
        return start
    if not holds(start, "integral"):
        raise PositionError(
            f"q_start={q_start}, expected a position: a whole number, or one for each "
            "batch. Write q_start=0 if queries and keys start together."
        )
    return int(start) if start.ndim == 0 and isinstance(start, NUMPY) else start


def check_extents(formula: Formula, shape: tuple[int, ...], q_start: Start) -> None:
    """Refuse cells that the data of a formula does not reach."""
    batch, heads, n_q, n_k = (1, 1, *shape)[-4:]
    if is_array(q_start) and tuple(q_start.shape) not in ((), (batch,)):
        raise ShapeError(
            f"q_start has shape {tuple(q_start.shape)}, expected one number or one for "
            f"each batch, ({batch},)."
        )
    for node in formula.walk():
        known = node.extent
        if known.batch not in (None, batch):
            lack = f"{known.batch} batches, and there are {batch}"
        elif known.heads not in (None, heads):
            lack = f"{known.heads} heads, and there are {heads}"
        elif known.k is not None and known.k < n_k:
            lack = f"{known.k} keys, and there are {n_k}"
        elif known.q is not None and not covers(known.q, q_start, n_q):
            lack = (
                f"query positions {known.q[0]} to {known.q[1] - 1}, and there are "
                f"{n_q} queries from q_start={q_start}"
            )
        else:
            continue
        raise MaskError(
            f"{node!r} is for {lack}. Axes are (..., H, Nq, Nk) = {tuple(shape)}."
        )


def covers(known: tuple[int, int], q_start: Start, n_q: int) -> bool:
    """Tell whether every query position lies in the known ones."""
    starts = np.asarray(to_numpy(q_start) if is_array(q_start) else q_start)
    return bool(known[0] <= starts.min() and starts.max() + n_q <= known[1])


def evaluate(
    formula: Formula,
    shape: tuple[int, ...],  # (..., H, Nq, Nk)
    *,
    q_start: Start,
    keys: Array | None = None,
    like: Array,
) -> Array:
    """Return the formula's cells; axes that it does not depend on may stay 1.

    keys: the positions of the Nk keys, beside `like`; 0, 1, 2, … unless given
    """
    xp = namespace(like=like)
    batch, heads, n_q, n_k = (1, 1, *shape)[-4:]
    b = xp.reshape(count_from(0, batch, like), (-1, 1, 1, 1))
    h = xp.reshape(count_from(0, heads, like), (1, -1, 1, 1))
    q = xp.reshape(count_from(0, n_q, like), (1, 1, -1, 1))
    k = xp.reshape(count_from(0, n_k, like) if keys is None else keys, (1, 1, 1, -1))
    if is_array(q_start):
        q_start = xp.reshape(convert(q_start, like), (-1, 1, 1, 1))
    q = q + q_start
    cells = formula.place(like)(b, h, q, k)
    lost = 4 - min(len(shape), 4)  # axes of size 1 that the caller does not have
    return xp.reshape(cells, cells.shape[lost:])
