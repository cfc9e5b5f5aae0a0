"""Edit one attention call for an ablation, where it is intercepted.

    hidden cells     are removed from the mask, or from the scores
    a removed head   outputs 0, before the output projection
    a row without any visible key outputs 0

    with edited(PendingCall(…)) as edit:    combines all ablations, once for each call
        run it under edit.cells
    return edit.clear(out)

A call may be intercepted several times: by nested lenses, or as a kernel in a function.
The first interception edits it and the others do not, so it is recorded as edited.

Next: intercept.py
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from regard.lens.sight import may_see


@dataclass(frozen=True, kw_only=True)
class PendingCall:
    """What is known of a call before it runs."""

    like: Tensor  # on its device, the batch is its first axis
    heads: int | None  # None: they are folded into the batch
    n_q: int
    n_k: int
    aligned: bool = False  # query 0 is at key 0, unless a cache shifts it
    sure: bool = True  # it is a whole attention call, not a part that looks like one


@dataclass(frozen=True)
class Edit:
    """What is removed from one call; True means removed."""

    cells: Tensor | None = None  # (B or 1, H or 1, Nq, Nk)
    gone: Tensor | None = None  # (1, H or 1, 1, 1)

    def __or__(self, other: Edit) -> Edit:
        """Return the union of two edits."""
        pairs = ((self.cells, other.cells), (self.gone, other.gone))
        return Edit(*(y if x is None else x if y is None else x | y for x, y in pairs))

    def clear(self, out: Tensor, blank: Tensor | None = None) -> Tensor:
        """Set removed heads, and blank rows, of (…, H, Nq, D) to 0."""
        for taken in (self.gone, blank):
            if taken is not None:
                out = out.masked_fill(drop_axes(taken, out.ndim), 0)
        return out


class Cutter(Protocol):
    """An active ablation of a model."""

    def look(self, call: PendingCall) -> Edit:
        """Return what to remove from a call of this thread."""

    def owns(self, module: nn.Module) -> bool:
        """Return whether a module is a part of the model."""

    def is_running(self) -> bool:
        """Return whether the model is running in this thread."""


class Passing(threading.local):
    """Whether a call of this thread is already being edited (thread-local)."""

    def __init__(self) -> None:
        self.busy = False


NOTHING, PASSING = Edit(), Passing()
CUTTERS: list[Cutter] = []


@contextmanager
def edited(call: PendingCall) -> Iterator[Edit]:
    """Yield the combined edit of all ablations where a call is first intercepted."""
    if PASSING.busy or not CUTTERS:
        yield NOTHING
        return
    edit = NOTHING
    for cutter in tuple(CUTTERS):  # another thread may remove one
        edit |= cutter.look(call)
    PASSING.busy = True
    try:
        yield edit
    finally:
        PASSING.busy = False


def hide(mask: Tensor | None, cells: Tensor, *, causal: bool = False) -> Tensor:
    """Return a kernel's mask with some cells hidden; in a bool mask True is visible.

    Float masks are added to the scores. transformers masks with the lowest number, and
    a row with nothing else would become an average: such a row is set to -inf, for
    which the kernels output 0.
    """
    if causal:  # query i may attend to keys 0 … i, as in torch
        early = torch.ones_like(cells[0, 0]).tril()
        mask = early if mask is None else hide(mask, ~early[None, None])
    if mask is None:
        return ~cells
    cells = drop_axes(cells, mask.ndim) if cells.shape[:2] == (1, 1) else cells
    if mask.dtype == torch.bool:
        return mask & ~cells
    edited = torch.where(cells, -math.inf, mask)
    return edited.masked_fill(find_blank(edited, cells), -math.inf)


def lower(scores: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores with some cells hidden, for a softmax, and which rows are blank.

    The lowest number is used instead of -inf: a softmax over -inf alone is NaN, and so
    would be the gradients of every row. The caller must clear the blank rows.
    """
    edited = torch.where(cells, torch.finfo(scores.dtype).min, scores)
    return edited, find_blank(edited, cells)


def bend_less(bend: Callable[..., Tensor], cells: Tensor) -> Callable[..., Tensor]:
    """Return a score function of flex that also hides some cells (B, H, Nq, Nk)."""

    def edit(
        score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *more: Tensor
    ) -> Tensor:
        return torch.where(cells[b, h, i, j], -math.inf, bend(score, b, h, i, j, *more))

    return edit


def add_of(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return a mask as the float mask that torch adds for it."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros_like(mask, dtype=like.dtype)
    return zeros.masked_fill_(mask.logical_not(), -math.inf)


def find_blank(scores: Tensor, cells: Tensor) -> Tensor:
    """Return which rows have no visible key left, (…, Nq, 1)."""
    seen = may_see(scores).any(-1, keepdim=True)
    return ~seen & cells.any(-1, keepdim=True)


def drop_axes(x: Tensor, ndim: int) -> Tensor:
    """Return x (B, H, …) with fewer axes in front, where they are 1."""
    return x.reshape(x.shape[x.ndim - ndim :]) if x.ndim > ndim else x
