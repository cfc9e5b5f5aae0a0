"""What is taken from one call of attention, and how a door takes it.

    hidden cells     leave the mask, or the scores
    a removed head   gives 0, before the output projection
    a row that then sees nothing gives 0

    with edited(Call(…)) as edit:      asks everyone who cuts, once for each call
        run it under edit.cells
    return edit.clear(out)

A call meets several doors on its way: a lens in a lens, a kernel in a function. The
first one edits it and all others let it pass, so an edit comes before any look.

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
    """What a door knows of a call before it runs."""

    like: Tensor  # on its device, the batch is its first axis
    heads: int | None  # None: they cannot be told from the batch
    n_q: int
    n_k: int
    aligned: bool = False  # query 0 stands at key 0, unless a cache says otherwise
    sure: bool = True  # it is attention, and not a part of it that looks like one


@dataclass(frozen=True)
class Edit:
    """What is taken from one call; True is taken away."""

    cells: Tensor | None = None  # (B or 1, H or 1, Nq, Nk)
    gone: Tensor | None = None  # (1, H or 1, 1, 1)

    def __or__(self, other: Edit) -> Edit:
        """Return what either takes."""
        pairs = ((self.cells, other.cells), (self.gone, other.gone))
        return Edit(*(y if x is None else x if y is None else x | y for x, y in pairs))

    def clear(self, out: Tensor, blank: Tensor | None = None) -> Tensor:
        """Put 0 into removed heads, and into blank rows, of (…, H, Nq, D)."""
        for taken in (self.gone, blank):
            if taken is not None:
                out = out.masked_fill(drop_axes(taken, out.ndim), 0)
        return out


class Cutter(Protocol):
    """Someone who cuts something out of a model."""

    def look(self, call: PendingCall) -> Edit:
        """Return what is taken from a call of this thread."""

    def owns(self, module: nn.Module) -> bool:
        """Tell whether a module is a part of the model."""

    def is_running(self) -> bool:
        """Tell whether the model is running in this thread."""


class Passing(threading.local):
    """Whether a door of this thread has a call in hand."""

    def __init__(self) -> None:
        self.busy = False


NOTHING, PASSING = Edit(), Passing()
CUTTERS: list[Cutter] = []


@contextmanager
def edited(call: PendingCall) -> Iterator[Edit]:
    """Give what all cuts together take from a call to the first door that it meets."""
    if PASSING.busy or not CUTTERS:
        yield NOTHING
        return
    edit = NOTHING
    for cutter in tuple(CUTTERS):  # another thread may end one
        edit |= cutter.look(call)
    PASSING.busy = True
    try:
        yield edit
    finally:
        PASSING.busy = False


def hide(mask: Tensor | None, cells: Tensor, *, causal: bool = False) -> Tensor:
    """Return a kernel's mask without some cells: bool is True = may see.

    Numbers are added to the scores. transformers writes the lowest number for what is
    masked, and a row of nothing else would be an average: it is made -inf throughout,
    for which the kernels give 0.
    """
    if causal:  # query i sees the keys 0 … i, as torch counts them
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
    """Return scores without some cells, for a softmax, and which rows became blank.

    The lowest number takes the place of -inf: a softmax of nothing but -inf is NaN, and
    so would be the gradients of every row. Blank rows are for the door to clear.
    """
    edited = torch.where(cells, torch.finfo(scores.dtype).min, scores)
    return edited, find_blank(edited, cells)


def bend_less(bend: Callable[..., Tensor], cells: Tensor) -> Callable[..., Tensor]:
    """Return a function that edits scores, and hides some cells (B, H, Nq, Nk)."""

    def edit(
        score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *more: Tensor
    ) -> Tensor:
        return torch.where(cells[b, h, i, j], -math.inf, bend(score, b, h, i, j, *more))

    return edit


def add_of(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return a mask as the numbers that torch adds for it."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros_like(mask, dtype=like.dtype)
    return zeros.masked_fill_(mask.logical_not(), -math.inf)


def find_blank(scores: Tensor, cells: Tensor) -> Tensor:
    """Return which rows see nothing any more, (…, Nq, 1)."""
    seen = may_see(scores).any(-1, keepdim=True)
    return ~seen & cells.any(-1, keepdim=True)


def drop_axes(x: Tensor, ndim: int) -> Tensor:
    """Return x (B, H, …) with fewer axes in front, where they are 1."""
    return x.reshape(x.shape[x.ndim - ndim :]) if x.ndim > ndim else x
