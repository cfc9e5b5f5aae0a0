"""Where sequences and heads lie in a fused attention call, (B, H, N, D) or not.

Fused operators take four axes, and most callers put sequences first and heads second.
Some swap them, and some repeat the heads of the keys first. The axes are traced back as
for any other call (roles.py); what was found is applied to later calls of a module that
are heard alone, without the operators before them.

Next: find_attention.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from regard.lens.captured_call import CapturedCall
from regard.lens.layout import REPEAT, Axis, Part, count, merge
from regard.lens.origin import View
from regard.lens.roles import Roles, Source, assign_roles
from regard.lens.take_weights import are_rows
from regard.run.cells import make_four


@dataclass(frozen=True)
class Placement:
    """How the axes of a fused call were found to lie, for later calls of a module."""

    swapped: bool = False  # heads come before sequences
    keys: int = 0  # heads of the keys, without repetitions; 0: as they are given

    def apply(self, call: CapturedCall) -> CapturedCall:
        """Return a call of which the axes were not traced."""
        arrays: dict[str, Any] = {
            name: getattr(call, name) for name in ("q", "k", "v", "out", "lse", "mask")
        }
        if self.swapped:
            arrays = {
                n: x if x is None else x.transpose(0, 1) for n, x in arrays.items()
            }
        given = arrays["k"].shape[1]
        for name in ("k", "v") if 0 < self.keys < given else ():
            if arrays[name] is not None:
                arrays[name] = arrays[name][:, :: given // self.keys]
        return replace(call, **arrays)


@dataclass(frozen=True)
class FusedAxes:
    """The axes of a fused call; parts of one axis that holds the whole batch."""

    b: int
    h: int
    h_k: int
    rows: Axis
    keys: Axis
    wide: Axis
    deep: Axis  # of the values

    @property
    def batch(self) -> Axis:
        """The whole batch."""
        return name_part("batch", self.b * self.h)

    def split(self, heads: int) -> tuple[Axis, Axis]:
        """Return sequences and heads of an array with some of the heads."""
        step = self.h // heads
        first = (Part("batch", self.h, self.b),) if self.b > 1 else ()
        return first, ((Part("batch", step, heads),) if heads > 1 else ())

    def list_sources(self, views: Sequence[View]) -> Iterator[Source]:
        """Yield what q, k and v tell about the batch."""
        for name, view in zip("qkv", views, strict=True):
            axes, heads = view.axes(), view.shape[1]
            if axes is None or view.shape[0] != self.b:
                continue
            pairs = zip(self.split(heads), axes[:2], strict=True)
            yield from (Source(part, traced, name) for part, traced in pairs if part)
            if heads < self.h:  # the kernel repeats them
                size = self.h // heads
                again = (Part("batch", 1, size),)
                yield Source(again, (Part(REPEAT, 0, size),), name)

    def place_mask(self, mask: Tensor | None, roles: Roles) -> Tensor | None:
        """Return a mask with its axes where those of the call are."""
        if mask is None or is_usual(roles, self):
            return mask
        mask = make_four(mask)
        if mask.shape[:2] == (1, 1):
            return mask
        mask = mask.expand(self.b, self.h, *mask.shape[2:])
        rest = [
            axis if n > 1 else ()
            for n, axis in zip(mask.shape[2:], (self.rows, self.keys), strict=True)
        ]
        return roles.place(mask, self.split(self.h), *rest)


def name_part(name: str, size: int) -> Axis:
    """Return an axis that is not a part of another."""
    return (Part(name, 1, size),) if size > 1 else ()


def is_usual(roles: Roles, axes: FusedAxes) -> bool:
    """Return whether sequences come first and heads second."""
    return (merge(roles.sequences), merge(roles.heads)) == axes.split(axes.h)


def place_axes(
    call: CapturedCall, views: Sequence[View]
) -> tuple[CapturedCall, Placement | None]:
    """Return a call with its axes in place and keys not repeated, and where they were.

    The placement is None if it does not hold for other calls.
    """
    call = replace(call, keys_are_new=are_rows(views[1].axes(), 2))
    (b, h, n_q, d), (b_k, h_k, n_k, _) = call.q.shape, call.k.shape
    if views[0].shape[1] != h:  # the layer itself gave the axes of the call
        return call, Placement(keys=h_k)
    d_v = 0 if call.v is None else call.v.shape[3]
    parts = (("q", n_q), ("k", n_k), ("d", d), ("dv", d_v))
    axes = FusedAxes(b, h, h_k, *(name_part(*part) for part in parts))
    dims = (*axes.split(h), axes.rows, axes.keys)
    roles = assign_roles(list(axes.list_sources(views)), dims, axes.batch)
    if roles is None or b_k != b:
        return call, Placement(keys=h_k)
    if is_usual(roles, axes) and count(roles.own) == h_k:
        return call, Placement(keys=h_k)
    moved = move_axes(call, roles, axes)
    if moved is None:
        return call, None
    keys = moved.k.shape[1]
    if is_usual(roles, axes):
        return moved, Placement(keys=keys)
    moved = replace(moved, is_moved=True)
    swapped = (merge(roles.sequences), merge(roles.heads)) == axes.split(h)[::-1]
    lasting = swapped and not roles.shared
    return moved, (Placement(swapped=True, keys=keys) if lasting else None)


def move_axes(call: CapturedCall, roles: Roles, axes: FusedAxes) -> CapturedCall | None:
    """Return a call with its axes where the roles put them."""
    whole, own = axes.split(axes.h), axes.split(axes.h_k)
    q = roles.place(call.q, whole, axes.rows, axes.wide)
    k = roles.place_keys(call.k, own, axes.keys, axes.wide)
    if q is None or k is None:
        return None
    v = out = lse = None
    if call.v is not None:
        v = roles.place_keys(call.v, own, axes.keys, axes.deep)
    if call.out is not None:
        out = roles.place(call.out, whole, axes.rows, axes.deep)
    if call.lse is not None:
        lse = roles.place(call.lse, whole, axes.rows)
    mask = axes.place_mask(call.mask, roles)
    return replace(call, q=q, k=k, v=v, out=out, lse=lse, mask=mask)
