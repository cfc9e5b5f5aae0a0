"""Where kept arrays lie: in pages of their own, beside the heap.

A pass allocates and frees the same sizes layer after layer. Anything that stays in
between, even the hundred bytes of a tensor object, cuts a hole into pieces that the
next layer cannot use, and the heap grows by a whole layer each time: 2.7 times what is
kept, measured. So what is kept is a map of pages and three Python objects, and becomes
a tensor again when the pass is over.

Next: ledger.py
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

LARGE = 2**14  # bytes of an array that gets pages of its own


class Pages:
    """A tensor outside of the heap."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype = x.shape, x.dtype
        self.bytes = mmap.mmap(-1, x.numel() * x.element_size())
        self.tensor().copy_(x)

    def tensor(self) -> Tensor:
        """Return the numbers, without a copy."""
        return torch.frombuffer(self.bytes, dtype=self.dtype).view(self.shape)


def keep(x: Tensor) -> Tensor | Pages:
    """Return x without the rest of the memory that it is a view of."""
    x = x.detach()
    size = x.numel() * x.element_size()
    if x.device.type == "cpu" and x.shape[2] > 1 and size >= LARGE:
        try:
            return Pages(x)
        except OSError:  # the system gives a process only so many maps
            return x.clone()
    return x if x.untyped_storage().nbytes() <= 1.25 * size else x.clone()


def bring(x: Tensor | Pages) -> Tensor:
    """Return what was kept as a tensor."""
    return x.tensor() if isinstance(x, Pages) else x
