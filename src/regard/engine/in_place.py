"""Detect in-place changes between the forward and the backward pass.

The backward pass reads masks and biases again; in the definition also q, k and v. If
one of them has changed since the forward pass, the gradient would be wrong. So the
forward pass records their state, and the backward pass compares it:

    a tensor           its version counter, which torch increments at every in-place
                       change, also through a view
    where(fn)          a checksum of the cells that fn returned, because functions have
                       no version and may read anything, such as a random generator

Next: by_definition.py
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from regard.arrays import Array, to_numpy
from regard.definition.contract import Call
from regard.errors import GradientError
from regard.masks.algebra import Mask
from regard.masks.formula import Formula
from regard.masks.primitives import Where
from regard.masks.tiles import Edges, Proof


@dataclass(frozen=True)
class Versions:
    """Tensors, and their state in the forward pass."""

    noted: tuple[tuple[str, Tensor, int | Tensor], ...]

    def check(self) -> None:
        """Raise GradientError if a tensor was changed in place."""
        for name, x, before in self.noted:
            if not is_same(before, record_version(x)):
                raise GradientError(
                    f"{name} was changed in place between the forward and the backward "
                    "pass of attend, so the gradient would be wrong. "
                    "Write x = x * 2 instead of x.mul_(2), or pass x.clone()."
                )


def record_versions(call: Call, *names: str) -> Versions:
    """Record the state of the tensors in these fields of a call."""
    found = ((name, x) for name in names for x in list_tensors(getattr(call, name)))
    return Versions(tuple((name, x, record_version(x)) for name, x in found))


def list_tensors(x: Any) -> Iterator[Tensor]:
    """Yield x if it is a tensor, or all tensors in a formula, recursively."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, Formula | tuple):
        for part in vars(x).values() if isinstance(x, Formula) else x:
            yield from list_tensors(part)


def record_version(x: Tensor) -> int | Tensor:
    """Return the version counter, or a copy of an inference tensor, which has none."""
    return x.clone() if x.is_inference() else int(x._version)  # noqa: SLF001


def is_same(before: int | Tensor, now: int | Tensor) -> bool:
    """Return whether two recorded states of a tensor are equal."""
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return bool(before.equal(now))
    return before is now or before == now


def guard_functions(call: Call) -> Call:
    """Return the call with a mask that checks the results of its functions."""
    mask = call.mask
    if not isinstance(mask, Mask) or not any(type(x) is Where for x in mask.walk()):
        return call
    return replace(call, mask=RepeatableMask(mask))


@dataclass(frozen=True, repr=False, eq=False)
class RepeatableMask(Mask):
    """A wrapper that raises if the mask returns different cells on re-evaluation."""

    mask: Mask
    known: dict[tuple[int, ...], int] = field(default_factory=dict)  # checksums

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The wrapped mask."""
        return (self.mask,)

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        cells = self.mask(b, h, q, k)
        ends = (int(x) for at in (q, k) for x in (at.min(), at.max()))
        found = zlib.crc32(np.ascontiguousarray(to_numpy(cells)).data)
        if self.known.setdefault((*ends, *cells.shape), found) != found:
            raise GradientError(
                f"{self.mask!r} returned different cells in the backward pass than in "
                "the forward pass, so the gradient would be wrong. Write a function of "
                "positions only, without random numbers or data that changes."
            )
        return cells

    def prove(self, edges: Edges) -> Proof:
        """Return the proofs of the wrapped mask."""
        return self.mask.prove(edges)

    def __repr__(self) -> str:
        return repr(self.mask)
