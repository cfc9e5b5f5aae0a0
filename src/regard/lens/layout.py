"""Follow axes through memory: of which original axis each dimension is a part.

A view does not copy, so its shape and strides tell what it is a view of. A layout lists
the parts of axes that a storage holds, each with its stride:

    q = linear(x)                    (B N, H D)      roots:  rows, columns
    q.view(B, N, H, D).transpose(1, 2)               B: part of the rows, step N
                                                     H: part of the columns, step D
                                                     N: part of the rows, step 1
                                                     D: part of the columns, step 1

So heads that were folded into the batch, or swapped with it, are still known to be part
of the columns of a projection, whatever was done in between.

Next: origin.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

REPEAT = "repeat"  # the root of an axis along which an array only repeats itself


class Part(NamedTuple):
    """A part of an original axis: `size` positions of it, `step` apart."""

    root: Hashable
    step: int
    size: int


Axis = tuple[Part, ...]  # of one dimension, outermost part first; () has size 1
Layout = tuple[tuple[int, Part], ...]  # (stride in the storage, part)


def count(axis: Axis) -> int:
    """Return the size of an axis."""
    return math.prod(part.size for part in axis)


def name_axes(root: Hashable, shape: Sequence[int]) -> tuple[Axis, ...]:
    """Return axes that are parts of nothing else: each gets a root of its own."""
    return tuple((Part((root, i), 1, n),) if n > 1 else () for i, n in enumerate(shape))


def lay_out(strides: Sequence[int], axes: Sequence[Axis]) -> Layout:
    """Return the layout of a storage whose tensor has these strides and axes."""
    found = []
    for stride, axis in zip(strides, axes, strict=True):
        unit = stride
        for part in reversed(axis):
            if unit:
                found.append((unit, part))
            unit *= part.size
    return tuple(sorted(found, key=lambda x: x[0], reverse=True))


def read_axes(
    shape: Sequence[int], strides: Sequence[int], layout: Layout
) -> tuple[Axis, ...] | None:
    """Return the axes of a view of a storage, None if they cannot be told."""
    axes = []
    for size, stride in zip(shape, strides, strict=True):
        axis = read_axis(size, stride, layout)
        if axis is None:
            return None
        axes.append(axis)
    return tuple(axes)


def read_axis(size: int, stride: int, layout: Layout) -> Axis | None:
    """Return one axis of a view, from the innermost part outwards."""
    if stride == 0 and size > 1:
        return (Part(REPEAT, 0, size),)
    parts: list[Part] = []
    while size > 1:
        found = next((x for x in layout if x[0] <= stride), None)
        if found is None:
            return None
        (unit, part), times = found, stride // found[0]
        if stride % unit or times >= part.size:
            return None
        there = -(-part.size // times)  # positions of this part at that step
        taken = min(size, there)
        if taken < size and (part.size % times or size % there):
            return None
        parts.append(Part(part.root, part.step * times, taken))
        size, stride = size // taken, stride * taken
    return merge(reversed(parts))


def merge(parts: Iterable[Part]) -> Axis:
    """Join neighbouring parts that are one part of the same root."""
    done: list[Part] = []
    for part in parts:
        last = done[-1] if done else None
        if last and last.root == part.root and last.step == part.step * part.size:
            done[-1] = Part(part.root, part.step, last.size * part.size)
        else:
            done.append(part)
    return tuple(done)


def refine(*axes: Axis) -> list[int] | None:
    """Return the coarsest sizes, outermost first, into which all axes can be split."""
    rest = [[part.size for part in axis] for axis in axes]
    sizes: list[int] = []
    while all(rest):
        inner = min(x[-1] for x in rest)
        for x in rest:
            if x[-1] % inner:
                return None
            x[-1] //= inner
            if x[-1] == 1:
                x.pop()
        sizes.insert(0, inner)
    return None if any(rest) else sizes


def split(axis: Axis, sizes: Sequence[int]) -> tuple[Axis, ...]:
    """Split an axis into axes of these sizes; `refine` gave them."""
    parts, done = list(axis), []
    for size in reversed(sizes):
        found: list[Part] = []
        rest = size
        while rest > 1:
            root, step, there = parts.pop()
            taken = min(rest, there)
            found.append(Part(root, step, taken))
            if taken < there:
                parts.append(Part(root, step * taken, there // taken))
            rest //= taken
        done.append(merge(reversed(found)))
    return tuple(reversed(done))


def arrange(
    x: Tensor, axes: Sequence[Axis], wanted: Sequence[Axis], *, repeat: bool = True
) -> Tensor | None:
    """Return x with the wanted axes: split, permuted and joined.

    None if an axis of x is not among the wanted ones. An axis that x lacks is repeated,
    or has size 1 if `repeat` is False and x lacks all of it. No copy is made unless
    joining needs one.
    """
    cut = cut_at_borders([*axes, *wanted])
    if cut is None:
        return None
    have = [unit for axis in axes for unit in cut(axis)]
    want = [cut(axis) for axis in wanted]
    named = {unit for units in want for unit in units}
    whole = math.prod(unit.size for unit in have) == x.numel()  # not some rows of it
    if len(set(have)) < len(have) or not set(have) <= named or not whole:
        return None
    x = x.reshape([unit.size for unit in have])
    x = x.permute(
        [have.index(unit) for units in want for unit in units if unit in have]
    )
    x = add_missing(x, want, have)
    sizes = [
        count(axis) if any(unit in have for unit in units) else 1
        for axis, units in zip(wanted, want, strict=True)
    ]
    x = x.reshape(sizes)
    return x.expand([count(axis) for axis in wanted]) if repeat else x


def add_missing(
    x: Tensor, want: Sequence[Sequence[Part]], have: Sequence[Part]
) -> Tensor:
    """Return x with a dimension for each wanted part that it does not have.

    The part is repeated; an axis of which x has no part gets one dimension of size 1.
    """
    place = 0
    for units in want:
        if not any(unit in have for unit in units):
            x = x.unsqueeze(place)
            place += 1
            continue
        for unit in units:
            if unit not in have:
                shape = list(x.shape)
                shape.insert(place, unit.size)
                x = x.unsqueeze(place).expand(shape)
            place += 1
    return x


def cut_at_borders(axes: Iterable[Axis]) -> Callable[[Axis], list[Part]] | None:
    """Return a function that splits an axis wherever any of these axes has a border.

    None if borders of the same root do not divide each other.
    """
    borders: dict[Hashable, set[int]] = {}
    for axis in axes:
        for root, step, size in axis:
            borders.setdefault(root, set()).update((step, step * size))
    for found in borders.values():
        if any(b % a for a, b in pairwise(sorted(found))):
            return None

    def cut(axis: Axis) -> list[Part]:
        units: list[Part] = []
        for root, step, size in axis:
            inside = sorted(x for x in borders[root] if step <= x <= step * size)
            units += reversed([Part(root, a, b // a) for a, b in pairwise(inside)])
        return units

    return cut
