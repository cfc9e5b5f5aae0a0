"""Arrays that grow along the axis of the keys, in memory of their own.

A cache may be overwritten, cropped or reused, so keys are copied as soon as they are
seen: each key once, however many steps of a generation there are.

Next: assemble.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.lens.off_heap import Kept, bring, keep

SPARE = 64  # keys for which there is room at least, once an array has grown


class Growing:
    """An array (B, H, N, D) whose N grows."""

    def __init__(self, x: Tensor, *, on_host: bool = False) -> None:
        self.held: Kept = keep(x, on_host=on_host)
        self.n = x.shape[2]

    def tensor(self) -> Tensor:
        """Return the array, without a copy."""
        return bring(self.held)[:, :, : self.n]

    def append(self, new: Tensor) -> None:
        """Copy new keys behind the others."""
        end, room = self.n + new.shape[2], bring(self.held)
        if end > room.shape[2]:
            size = max(end + SPARE, end * 3 // 2)
            wider = room.new_empty((*room.shape[:2], size, room.shape[3]))
            wider[:, :, : self.n] = room[:, :, : self.n]
            self.held = room = wider
        room[:, :, self.n : end] = new.detach()
        self.n = end

    def write(self, start: int, new: Tensor) -> None:
        """Copy keys over those at some position."""
        bring(self.held)[:, :, start : start + new.shape[2]] = new.detach()

    def crop(self, n: int) -> None:
        """Drop all keys from position n on."""
        self.n = min(self.n, n)

    def drop_first(self, n: int) -> Tensor:
        """Drop the first n keys, and return them."""
        whole = self.tensor()
        first = whole[:, :, :n].clone()
        self.held, self.n = whole[:, :, n:].clone(), self.n - n
        return first

    def reorder(self, order: Tensor) -> None:
        """Put the sequences into another order; some may be repeated."""
        whole = self.tensor()
        self.held = torch.index_select(whole, 0, order.to(whole.device))
