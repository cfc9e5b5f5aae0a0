"""Where the content of each storage came from, kept while the operators run.

    Origin    one storage: the axes that it holds, and, if it holds scores or weights of
              an attention, from which product and through which steps they came
    Product   a matrix product left @ right that may have made scores of an attention
    Step      what an operator did to scores afterwards: scaled, added, hid, …

Nothing is computed here while the model runs: an Origin refers to the one that it was
made from, and its layout is worked out only if an attention asks for it.

Next: scores.py
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from regard.lens.layout import Axis, Layout, Part, lay_out, name_axes, read_axes
from regard.run.parts import is_inside

FEATURE, ROW = "feature", "row"  # kinds of axes: made by weights, or given by the input
DEPTH = 64  # how far an axis is followed back
NUMBERS = itertools.count()


class Root(NamedTuple):
    """An axis that is not a part of another one."""

    number: Hashable
    kind: str  # FEATURE, ROW or "" if unknown


class Step(NamedTuple):
    """What one operator did to scores."""

    kind: str  # "scale", "scale_rows", "tanh", "add", "hide", "copy" or "unknown"
    number: float = 1.0
    tensor: Tensor | None = None  # what was added, or True where cells were hidden
    where: View | None = None  # the scores to whose shape it was broadcast


class View(NamedTuple):
    """A tensor without its data: shape and strides in the storage of an origin."""

    origin: Origin
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def axes(self) -> tuple[Axis, ...] | None:
        """Return of which axes the dimensions are parts, None if unknown."""
        return read_axes(self.shape, self.strides, self.origin.layout())

    def find_base(self) -> Origin:
        """Return the storage from which this one was made, element by element."""
        origin = self.origin
        while origin.lead is not None:
            origin = origin.lead.origin
        return origin

    def is_from(self, module: str) -> bool:
        """Return whether a module made it itself, or was given it by a cache."""
        origin: Origin | None = self.origin
        while origin is not None:
            if origin.module is not None and not is_inside(origin.module, module):
                return False
            origin = None if origin.lead is None else origin.lead.origin
        return True

    def has_all_rows(self, base: Origin) -> bool:
        """Return whether it has all rows of the storage from which it was made."""
        axes = self.axes()
        if axes is None:
            return False
        mine = count_parts(part for axis in axes for part in axis)
        whole = count_parts(part for _, part in base.layout())
        rows = (root for root in whole if getattr(root, "kind", "") != FEATURE)
        return all(mine.get(root, 1) == whole[root] for root in rows)


def count_parts(parts: Iterable[Part]) -> dict[Hashable, int]:
    """Return how many positions of each root some parts hold."""
    found: dict[Hashable, int] = {}
    for part in parts:
        found[part.root] = found.get(part.root, 1) * part.size
    return found


class Product:
    """left (B, n, d) @ right (B, d, m), a matrix product of two activations."""

    def __init__(self, left: Tensor, right: Tensor, views: Sequence[View]) -> None:
        self.left: Tensor | None = left
        self.right: Tensor | None = right
        self.views = tuple(views)  # of left and right
        self.versions = self.count_writes(left, right)
        self.sizes = (left.shape[0], left.shape[1], right.shape[2])
        number = next(NUMBERS)
        self.roots = [Root(number, name) for name in ("batch", "left", "right")]

    def axes(self) -> tuple[Axis, ...]:
        """Return the axes of its result: batch, rows and columns."""
        return tuple(
            (Part(root, 1, n),) if n > 1 else ()
            for root, n in zip(self.roots, self.sizes, strict=True)
        )

    def forget(self) -> None:
        """Release the operands."""
        self.left = self.right = None

    @property
    def is_known(self) -> bool:
        """Whether the operands are still what they were."""
        left, right = self.left, self.right
        if left is None or right is None:
            return False
        return self.count_writes(left, right) == self.versions

    def count_writes(self, left: Tensor, right: Tensor) -> tuple[int, ...]:
        """Return how often the operands were written to, as torch and we count."""
        counts = [view.origin.writes for view in self.views]
        # inference tensors do not count
        counts += [0 if x.is_inference() else x._version for x in (left, right)]  # noqa: SLF001
        return tuple(counts)


@dataclass(slots=True, eq=False)
class Origin:
    """What one storage holds."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    lead: View | None = None  # what it was made from, element by element
    fresh: int | None = None  # a dimension that is not one of `lead`
    kinds: Sequence[str] = ()  # of its own axes, if nothing leads
    axes: tuple[Axis, ...] | None = None  # of its dimensions, once known
    product: Product | None = None  # of which it holds the scores
    steps: tuple[Step, ...] = ()
    extra: Tensor | None = None  # scores that were joined behind those of the keys
    softmax: Any = None  # the SoftmaxCall of which it holds the weights
    changes: tuple[str, ...] = ()  # what was done to the weights afterwards
    others: tuple[Any, ...] = ()  # all whose weights were joined in it
    writes: int = 0  # operators that wrote into it
    module: str | None = None  # that was running when it was made, None if unknown
    is_random: bool = False
    is_log: bool = False  # it holds logarithms of weights
    found: Layout | None = field(default=None, repr=False)

    def layout(self, depth: int = 0) -> Layout:
        """Return which axes the storage holds."""
        if self.found is None:
            axes = self.axes or self.carry(depth) or self.begin()
            self.axes, self.found = axes, lay_out(self.strides, axes)
        return self.found

    def begin(self) -> tuple[Axis, ...]:
        """Return axes of its own."""
        number, kinds = next(NUMBERS), self.kinds or [""] * len(self.shape)
        named = name_axes(number, self.shape)
        return tuple(
            tuple(part._replace(root=Root((number, i), kinds[i])) for part in axis)
            for i, axis in enumerate(named)
        )

    def carry(self, depth: int) -> tuple[Axis, ...] | None:
        """Return the axes of what it was made from, aligned at the last one."""
        if self.lead is None or depth > DEPTH:
            return None
        layout = self.lead.origin.layout(depth + 1)
        axes = read_axes(self.lead.shape, self.lead.strides, layout)
        if axes is None:
            return None
        own, extra = self.begin(), len(self.shape) - len(axes)
        done = list(own)
        for i in range(max(extra, 0), len(self.shape)):
            size = self.lead.shape[i - extra]
            if size == self.shape[i] and i != self.fresh:
                done[i] = axes[i - extra]
        return tuple(done)
