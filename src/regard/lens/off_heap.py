"""Store recorded arrays outside the heap, in memory maps.

A pass allocates and frees the same sizes layer after layer. Anything that stays in
between, even the hundred bytes of a tensor object, fragments the freed memory so that
the next layer cannot use it, and the heap grows by a whole layer each time: 2.7 times
what is kept, measured. So an array is kept as a memory map and three Python objects,
and becomes a tensor again when the pass is over.

Arrays of a device can be moved to the host as they arrive, so that a recording does not
fill the device: into pinned memory and without waiting, if the device has both.

Next: assemble.py
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor

LARGE = 2**14  # minimum bytes of an array that is stored in a memory map


class OffHeap:
    """A tensor in a memory map, outside the heap."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a forked process has a copy
        self.bytes = mmap.mmap(-1, x.numel() * x.element_size(), flags=private)
        self.tensor().copy_(x)

    def tensor(self) -> Tensor:
        """Return the tensor, without a copy."""
        return torch.frombuffer(self.bytes, dtype=self.dtype).view(self.shape)


class HostCopy:
    """A tensor of a device on its way to the host."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype, self.device = x.shape, x.dtype, torch.device("cpu")
        self.array = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        self.arrived: Any = None
        with suppress(RuntimeError, NotImplementedError):  # not every device has them
            self.array = self.array.pin_memory()
            self.arrived = torch.Event(x.device)
        self.array.copy_(x, non_blocking=self.arrived is not None)
        if self.arrived is not None:
            self.arrived.record()

    def tensor(self) -> Tensor:
        """Return the tensor, once it has arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
            self.arrived = None
        return self.array


Kept: TypeAlias = Tensor | OffHeap | HostCopy


def keep(x: Tensor, *, on_host: bool = False) -> Kept:
    """Return x without the rest of the memory that it is a view of."""
    x = x.detach()
    if on_host and x.device.type != "cpu":
        return HostCopy(x)
    size = x.numel() * x.element_size()
    if x.device.type == "cpu" and x.shape[2] > 1 and size >= LARGE:
        try:
            return OffHeap(x)
        except OSError:  # the number of maps per process is limited
            return x.clone()
    return x.clone()  # it may be overwritten


def bring(x: Kept) -> Tensor:
    """Return as a tensor what `keep` returned."""
    return x if isinstance(x, Tensor) else x.tensor()
