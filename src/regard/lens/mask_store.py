"""Masks, stored once, and recognised as formulas where they are one.

All layers of a model are usually given the same mask. It is copied once, however many
layers use it, and written as a formula of positions if it is one:

    causal()    causal() & window(n)    same(documents)    causal() & same(documents)

Next: assemble.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from regard.masks.algebra import Mask
from regard.masks.patterns import causal, same, window
from regard.run.cells import may_see

Found = tuple[Mask | Tensor | None, Tensor | None]  # mask and bias


def is_same(x: Tensor | None, y: Tensor) -> bool:
    """Return whether two masks are equal."""
    if x is None or x.shape != y.shape or x.dtype != y.dtype:
        return False
    return bool(torch.equal(x, y))


class MaskStore:
    """The masks of a recording."""

    def __init__(self) -> None:
        # of this pass, by memory and version, as long as this memory is not freed
        self.copies: dict[Any, tuple[StorageWeakRef, Tensor]] = {}
        self.last: Tensor | None = None
        self.found: dict[Any, Found] = {}

    def begin_pass(self) -> None:
        """Forget where masks lie in memory."""
        self.copies.clear()

    def keep(self, mask: Tensor | None) -> Tensor | None:
        """Return a copy of a mask, the same one for the same mask."""
        if mask is None:
            return None
        mask = mask.detach()
        version = 0 if mask.is_inference() else mask._version  # noqa: SLF001
        key = (mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, version)
        held, copy = self.copies.get(key, (None, None))
        if copy is None or held is None or held.expired() or not is_same(copy, mask):
            last = self.last
            copy = last if last is not None and is_same(last, mask) else mask.clone()
            if mask.shape[-2] > 1:
                self.last = copy
            self.copies[key] = StorageWeakRef(mask.untyped_storage()), copy
        return copy

    def explain(self, key: Any, cells: Tensor, rows: Tensor, keys: Tensor) -> Found:
        """Return the mask and the bias of cells (H or 1, Nq, Nk) that were added.

        key: the same cells have the same key
        """
        found = self.found.get(key)
        if found is None:
            found = self.found[key] = explain_cells(cells, rows, keys)
        return found


def explain_cells(cells: Tensor, rows: Tensor, keys: Tensor) -> Found:
    """Return the mask of some cells as a formula if it is one, and their bias."""
    allowed = may_see(cells)
    bias = None
    if cells.is_floating_point():
        numbers = torch.where(allowed, cells, 0)
        bias = numbers if bool(numbers.any()) else None
    return recognise(allowed, rows, keys), bias


def recognise(allowed: Tensor, rows: Tensor, keys: Tensor) -> Mask | Tensor | None:
    """Return the formula that gives these cells, None for all, or the cells."""
    if bool(allowed.all()):
        return None
    one = allowed[:1]
    if not bool((allowed == one).all()):
        return allowed
    distance = rows[:, None] - keys
    seen = distance >= 0
    if bool((one[0] == seen).all()):
        return causal()
    reach = int(distance[one[0]].max()) if bool(one.any()) else 0
    if bool((one[0] == (seen & (distance <= reach))).all()):
        return causal() & window(reach)
    documents = find_documents(one[0], rows, keys)
    return one.clone() if documents is None else documents


def find_documents(allowed: Tensor, rows: Tensor, keys: Tensor) -> Mask | None:
    """Return the mask of packed documents, if these cells (Nq, Nk) are one."""
    n = len(keys)
    if len(rows) != n or n < 2 or not torch.equal(rows, keys):
        return None
    if not torch.equal(keys, torch.arange(n, device=keys.device)):
        return None
    first = allowed.int().argmax(-1)  # the first key that each query may see
    ids = torch.cumsum(first == torch.arange(n, device=keys.device), 0)
    alike = ids[:, None] == ids
    if bool((allowed == alike).all()):
        return same(ids)
    if bool((allowed == alike.tril()).all()):
        return causal() & same(ids)
    return None
