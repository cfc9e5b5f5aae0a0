"""A formula: one value for every (batch, head, query, key), computed from positions.

    b (B,1,1,1)   h (1,H,1,1)   q (1,1,Nq,1)   k (1,1,1,Nk)   ->   formula(b, h, q, k)

Masks (algebra.py) have boolean values, biases (biases.py) have numbers. Positions are
absolute: query i is at q_start + i, key j at j. If the data of a formula does not cover
all cells, an error is raised before it is evaluated, because some libraries silently
clamp or wrap an index that is out of range.

Next: tiles.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from regard.arguments import NotAnArray, suggest
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
from regard.display import Displayed
from regard.errors import MaskError, PositionError, ShapeError
from regard.masks.free_axes import check_lead, find_lead
from regard.masks.mask_picture import show_formula

if TYPE_CHECKING:
    from collections.abc import Iterator

Start = Any  # position of the first query: an int, or integers (B,) if batches differ
NUMPY = (np.ndarray, np.generic)


class Extent(NamedTuple):
    """The index range that a formula's data covers; None means unlimited."""

    batch: int | None = None
    heads: int | None = None
    q: tuple[int, int] | None = None  # the first position and one past the last
    k: int | None = None  # one past the last position


class Formula(Displayed, NotAnArray, ABC):
    """The base class of masks and biases: a value per (batch, head, query, key)."""

    @abstractmethod
    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        """Return the values at these index arrays, which broadcast together."""

    @property
    def positional(self) -> bool:
        """Whether query positions are compared with key positions."""
        return False

    @property
    def parts(self) -> tuple[Formula, ...]:
        """The operands of this formula."""
        return ()

    @property
    def extent(self) -> Extent:
        """The index range that this formula's data covers, without its operands."""
        return Extent()

    def walk(self) -> Iterator[Formula]:
        """Yield this formula and, recursively, its operands."""
        yield self
        for part in self.parts:
            yield from part.walk()

    def place(self, like: Array) -> Self:
        """Return this formula with its data converted to the library of `like`."""
        this: Any = self  # every formula is a frozen dataclass
        data = {name: place_data(x, like) for name, x in vars(this).items()}
        if all(data[name] is x for name, x in vars(this).items()):
            return self
        moved: Self = replace(this, **data)
        return moved

    def to_html(self) -> str:
        """Return the expression, and a picture of its first cells."""
        return show_formula(self)

    @suggest
    def dense(
        self,
        shape: int | tuple[int, ...],
        *,
        q_start: Start | None = None,
        like: Array | None = None,
    ) -> Array:
        """Evaluate the formula as an array of shape (..., H, Nq, Nk).

        >>> from regard import causal
        >>> causal().dense(2).tolist()
        [[True, False], [True, True]]

        shape: (..., H, Nq, Nk), or n for (n, n) with the batches and heads of the data
        like: an array whose library and device the result has; default NumPy
        """
        shape = read_sizes(shape, self)
        like = np.empty(0) if like is None else like
        start = resolve_start(q_start, shape, self)
        check_lead(self, shape, like)
        cells = evaluate(self, shape, q_start=start, like=like)
        return namespace(like=like).broadcast_to(cells, shape)


def place_data(x: Any, like: Array) -> Any:
    """Return the data of a formula in the library and on the device of `like`."""
    # no inner function: one that calls itself would hold `like` until it is collected
    if isinstance(x, Formula):
        return x.place(like)
    if isinstance(x, tuple):
        return tuple(place_data(y, like) for y in x)
    return convert(x, like) if is_array(x) else x


def read_sizes(shape: Any, formula: Formula) -> tuple[int, ...]:
    """Return (..., H, Nq, Nk); a number n is (n, n), with the axes that data has."""
    square = isinstance(shape, Integral) and not isinstance(shape, bool)
    try:
        sizes = tuple(map(index, (shape, shape) if square else shape))
    except TypeError:
        sizes = ()
    if len(sizes) < 2 or min(sizes) < 0:
        told = f"of shape {tuple(shape.shape)}" if is_array(shape) else repr(shape)
        raise MaskError(
            f"shape {told}, expected sizes (..., H, Nq, Nk), or a number of tokens. "
            "Write (8, 8) or (2, 4, 8, 8), or 8 for 8 × 8 tokens."
        )
    return (*find_lead(formula), *sizes) if square else sizes


def resolve_start(
    q_start: Start | None, shape: tuple[int, ...], *formulas: Formula
) -> Start:
    """Return the position of the first query; raise if it matters and is ambiguous."""
    n_q, n_k = shape[-2:]
    if q_start is None:
        nodes = [node for formula in formulas for node in formula.walk()]
        positional = [node for node in nodes if node.positional]
        if positional and n_q != n_k:
            raise PositionError(
                f"{positional[0]!r} compares positions, but with {n_q} queries and "
                f"{n_k} keys the position of the first query is ambiguous. Write "
                f"q_start={n_k - n_q} if the queries are the last positions (a KV "
                "cache), or q_start=0 if queries and keys start together."
            )
        q_start = 0
    q_start = read_start(q_start)
    for formula in formulas:
        check_extents(formula, shape, q_start)
    return q_start


def read_start(q_start: Any) -> Start:
    """Return q_start as an int or an array of integers; NumPy scalars become int."""
    start = np.asarray(q_start) if isinstance(q_start, bool) else as_array(q_start)
    if not is_array(start):
        return start
    if not holds(start, "integral"):
        raise PositionError(
            f"q_start={q_start}, expected an integer position, or one per batch. "
            "Write q_start=0 if queries and keys start together."
        )
    return int(start) if start.ndim == 0 and isinstance(start, NUMPY) else start


def check_extents(formula: Formula, shape: tuple[int, ...], q_start: Start) -> None:
    """Raise an error if the data of a formula does not cover all cells."""
    batch, heads, n_q, n_k = (1, 1, *shape)[-4:]
    if is_array(q_start) and tuple(q_start.shape) not in ((), (batch,)):
        raise ShapeError(
            f"q_start has shape {tuple(q_start.shape)}, expected one integer, or one "
            f"per batch: ({batch},)."
        )
    for node in formula.walk():
        known = node.extent
        if known.batch not in (None, batch):
            lack = f"{known.batch} batches, but there are {batch}"
        elif known.heads not in (None, heads):
            lack = f"{known.heads} heads, but there are {heads}"
        elif known.k is not None and known.k < n_k:
            lack = f"{known.k} keys, but there are {n_k}"
        elif known.q is not None and not covers(known.q, q_start, n_q):
            lack = (
                f"query positions {known.q[0]} to {known.q[1] - 1}, but there are "
                f"{n_q} queries from q_start={q_start}"
            )
        else:
            continue
        raise MaskError(
            f"{node!r} covers {lack}. Axes are (..., H, Nq, Nk) = {tuple(shape)}."
        )


def covers(known: tuple[int, int], q_start: Start, n_q: int) -> bool:
    """Return whether every query position lies in the known range."""
    starts = to_numpy(q_start) if is_array(q_start) else q_start
    starts = np.asarray(starts, np.int64)  # an int8 of 100 plus 100 queries is -56
    return bool(known[0] <= starts.min() and starts.max() + n_q <= known[1])


def evaluate(
    formula: Formula,
    shape: tuple[int, ...],  # (..., H, Nq, Nk)
    *,
    q_start: Start,
    keys: Array | None = None,
    like: Array,
) -> Array:
    """Return the values of a formula; axes it does not depend on may have size 1.

    keys: the positions of the Nk keys, on the device of `like`; default 0, 1, 2, …
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
    lost = 4 - min(len(shape), 4)  # leading axes of size 1 that `shape` does not have
    return xp.reshape(cells, cells.shape[lost:])
