"""KV cache: keys and values of earlier tokens, in arrays of fixed shape.

    slot p of a sequence holds the key and value of the token at position p

Sequences of a batch may have different lengths: each has its own next slot. Slots after
it hold stale values, but a causal query never attends to later positions, so a batch
needs no padding mask.

Next: block.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ShapeError
from regard.plain.config import Config


@dataclass(frozen=True)
class Slot:
    """The cache of one layer, and the range of slots that the next tokens occupy."""

    k: Tensor  # (B, Hk, capacity, d)
    v: Tensor
    start: int | Tensor  # position of the next token, common or per sequence, (B,)
    stop: int  # length of the longest sequence after the write
    first: int = 0  # the first key that write returns

    def write(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, Hk, N, d) of new tokens and return all so far."""
        if isinstance(self.start, int):
            self.k[:, :, self.start : self.stop] = k
            self.v[:, :, self.start : self.stop] = v
        else:
            batch, _, n, _ = k.shape
            rows = torch.arange(batch, device=k.device)[:, None]
            at = self.start[:, None] + torch.arange(n, device=k.device)
            self.k[rows, :, at] = k.transpose(1, 2)  # (B, N, Hk, d)
            self.v[rows, :, at] = v.transpose(1, 2)
        seen = slice(self.first, self.stop)
        return self.k[:, :, seen], self.v[:, :, seen]


class Cache:
    """The keys and values of every layer, and the length of each sequence.

    >>> config = Config(vocabulary=9, context=32, width=8, layers=2, heads=2)
    >>> Cache(config, 3, 16).k.shape
    torch.Size([2, 3, 2, 16, 4])
    """

    def __init__(
        self,
        config: Config,
        batch: int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (config.layers, batch, config.shared, capacity, config.head)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.lengths: int | Tensor = 0  # an int while all sequences are equally long

    @property
    def longest(self) -> int:
        """Length of the longest sequence, in tokens."""
        at = self.lengths
        return at if isinstance(at, int) else int(at.max())

    def slots(
        self, n: int, *, recent: Sequence[int | None] | None = None
    ) -> list[Slot]:
        """Return, for each layer, the slot that its next n tokens are written to.

        recent: for each layer, how many of the last keys are returned, including the
            new ones; None: all
        """
        stop, capacity = self.longest + n, self.k.shape[3]
        if stop > capacity:
            raise ShapeError(
                f"{n} more tokens after {stop - n} do not fit into a cache of "
                f"{capacity}. Make it larger: Cache(config, batch, {stop})."
            )
        counts = [None] * len(self.k) if recent is None else recent
        firsts = [0 if count is None else max(0, stop - count) for count in counts]
        layers = zip(self.k, self.v, firsts, strict=True)
        return [Slot(k, v, self.lengths, stop, first) for k, v, first in layers]
