"""Keys and values of the tokens read so far, in arrays whose shape never changes.

    slot p of a sequence holds the token at position p; reading on means writing there

Sequences of a batch may have different lengths: each has its own next slot. What lies
behind it is never seen, because a causal query sees no position after its own. So a
batch needs no padding mask, whatever the lengths.

Next: block.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ShapeError
from regard.plain.config import Config


@dataclass(frozen=True)
class Slot:
    """The cache of one layer, where the next tokens go."""

    k: Tensor  # (B, Hk, capacity, d)
    v: Tensor
    start: int | Tensor  # of the next tokens, for all sequences or for each, (B,)
    stop: int  # behind the last token that any sequence will have
    first: int = 0  # the first key that is given back

    def write(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values (B, Hk, N, d) of new tokens, return all so far."""
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
    """The keys and values of every layer, and how far each sequence has been read.

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
        """Tokens of the longest sequence."""
        at = self.lengths
        return at if isinstance(at, int) else int(at.max())

    def slots(self, n: int, *, recent: int | None = None) -> list[Slot]:
        """Return where each layer puts its next n tokens, and what it gives back.

        recent: only so many of the last keys, the new ones included
        """
        stop, capacity = self.longest + n, self.k.shape[3]
        if stop > capacity:
            raise ShapeError(
                f"{n} more tokens after {stop - n} do not fit into a cache of "
                f"{capacity}. Make it larger: Cache(config, batch, {stop})."
            )
        first = 0 if recent is None else max(0, stop - recent)
        pairs = zip(self.k, self.v, strict=True)
        return [Slot(k, v, self.lengths, stop, first) for k, v in pairs]
