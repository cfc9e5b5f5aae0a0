"""A formula: one value at every (batch, head, query, key), from their positions.

    b (B,1,1,1)   h (1,H,1,1)   q (1,1,Nq,1)   k (1,1,1,Nk)   ->   formula(b, h, q, k)

Masks (algebra.py) are formulas of bool, biases (biases.py) are formulas of numbers.
Positions are absolute: query i is at q_start + i, key j at j. A formula whose data does
not cover a cell is refused before it is evaluated, because some libraries clamp or wrap
an index that is out of range without an error.

Next: tiles.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

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
    from collections.abc import Iterator

Start = Any  # int: where the first query stands; (B,) integers if batches differ
NUMPY = (np.ndarray, np.generic)


class Extent(NamedTuple):
    """How far the data behind a formula reaches; None is: everywhere."""

    batch: int | None = None
    heads: int | None = None
    q: tuple[int, int] | None = None  # the first position, and one past the last
    k: int | None = None  # one past the last position


class Formula(ABC):
    """What masks and biases share: a value at every (batch, head, query, key)."""

    @abstractmethod
    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        """Return the values at these index arrays, which broadcast together."""

    @property
    def positional(self) -> bool:
        """Whether query positions are compared with key positions."""
        return False

    @property
    def parts(self) -> tuple[Formula, ...]:
        """The formulas that this one is made of."""
        return ()

    @property
    def extent(self) -> Extent:
        """How far the data behind this one reaches."""
        return Extent()

    def walk(self) -> Iterator[Formula]:
        """Yield this formula and everything in it."""
        yield self
        for part in self.parts:
            yield from part.walk()

    def place(self, like: Array) -> Self:
        """Return this formula with its data in the library and device of `like`."""

        def move(x: Any) -> Any:
            if isinstance(x, Formula):
                return x.place(like)
            if isinstance(x, tuple):
                return tuple(move(y) for y in x)
            return convert(x, like) if is_array(x) else x

        this: Any = self  # every formula is a frozen dataclass
        data = {name: move(x) for name, x in vars(this).items()}
        if all(data[name] is x for name, x in vars(this).items()):
            return self
        moved: Self = replace(this, **data)
        return moved

    def dense(
        self,
        shape: tuple[int, ...],
        *,
        q_start: Start | None = None,
        like: Array | None = None,
    ) -> Array:
        """Write the formula out as an array of shape (..., H, Nq, Nk).

        >>> from regard import causal
        >>> causal().dense((2, 2)).tolist()
        [[True, False], [True, True]]
        """
        like = np.empty(0) if like is None else like
        start = resolve_start(q_start, shape, self)
        cells = evaluate(self, shape, q_start=start, like=like)
        return namespace(like=like).broadcast_to(cells, shape)


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
