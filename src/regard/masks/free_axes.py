"""Whether the values of a formula differ by batch or head, from data and functions.

    find_axes(padding(lengths=[3, 5]), q)    {"batch"}: its data has two batches
    find_axes(where(fn), q)                  {"head"} if its cells have a head axis

Data says how many heads or batches it is for. A function does not: its cells at batch 0
and head 0 are those of all only if its result has no such axis. A shape without an axis
by which a function differs is refused.

Next: formula.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.arrays import Array, count_from, namespace
from regard.errors import MaskError

AXES = ("batch", "head")


def find_batch_axes(formula: Any, lead: tuple[int, int], q: Array, k: Array) -> Any:
    """Return lead, with 1 where values cannot differ; q, k: (1, 1, 1, 1)."""
    xp, (batch, heads) = namespace(q=q), lead
    b, h = (xp.broadcast_to(0 * q, s) for s in ((batch, 1, 1, 1), (1, heads, 1, 1)))
    return np.broadcast_shapes(tuple(formula(b, h, q, k).shape), (1, 1, 1, 1))[:2]


def find_axes(formula: Any, like: Array) -> set[str]:
    """Return by which of AXES the values of a formula may differ."""
    found, at = set(), count_from(0, 1, like)[None, None, None, :]
    for node in formula.walk():
        sizes = node.extent[:2]
        if not node.parts and set(node.extent) == {None}:
            sizes = find_batch_axes(node.place(like), (2, 2), at, at)
        found |= {axis for axis, n in zip(AXES, sizes, strict=True) if (n or 1) > 1}
    return found


def find_lead(formula: Any) -> tuple[int, ...]:
    """Return the axes before (Nq, Nk) that a formula has data for."""
    known = [node.extent for node in formula.walk()]
    batch, heads = (max(x[axis] or 0 for x in known) for axis in (0, 1))
    return (batch, heads or 1) if batch else (heads,) if heads else ()


def check_lead(formula: Any, shape: tuple[int, ...], like: Array) -> None:
    """Raise MaskError if a function differs by an axis that `shape` does not have.

    Its cells of batch 0 and head 0 would be used for all.
    """
    lost = () if 0 in shape else AXES[: max(0, 4 - len(shape))]
    for axis in find_axes(formula, like).intersection(lost):
        raise MaskError(
            f"{formula!r} may differ by {axis}, but the shape {tuple(shape)} has no "
            "such axis. Write (B, H, Nq, Nk)."
        )
