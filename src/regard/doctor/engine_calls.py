"""The calls that the engine is checked with, and how two results are compared.

Each kernel of the engine runs some of the calls. Lengths are not multiples of a tile,
and widths are not all powers of two.

Next: engine_results.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.definition.attention import Attended
from regard.masks.algebra import Mask
from regard.masks.patterns import causal, same, window

Arrays = tuple[Tensor, Tensor, Tensor]  # q, k and v


@dataclass(frozen=True)
class EngineCall:
    """The sizes and the mask of a call."""

    name: str
    heads: tuple[int, int]  # of q, and of k and v
    lengths: tuple[int, int]
    width: int
    mask: Mask | None = None
    q_start: int | None = None

    def draw_arrays(self, dtype: torch.dtype) -> Arrays:
        """Return q (1, H, Nq, D), k and v (1, Hk, Nk, D), on the CPU."""
        generator = torch.Generator().manual_seed(0)
        (h, shared), (n_q, n_k), d = self.heads, self.lengths, self.width
        shapes = ((1, h, n_q, d), (1, shared, n_k, d), (1, shared, n_k, d))
        q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
        return q.to(dtype), k.to(dtype), v.to(dtype)

    def run(self, function: Callable[..., Attended], arrays: Arrays) -> Attended:
        """Call the definition or the engine."""
        options: dict[str, Any] = {}
        if self.q_start is not None:
            options["q_start"] = self.q_start
        return function(*arrays, self.mask, **options)


def choose_calls() -> list[EngineCall]:
    """Return the calls."""
    documents = same(torch.arange(300) // 70)
    return [
        EngineCall("all keys", (2, 2), (129, 300), 64),
        EngineCall("causal", (2, 2), (300, 300), 64, causal(), 0),
        EngineCall("causal, shared heads", (4, 2), (257, 257), 128, causal(), 0),
        EngineCall("one query, shared heads", (4, 2), (1, 1000), 64, causal(), 999),
        EngineCall("window", (2, 2), (300, 300), 64, causal() & window(63), 0),
        EngineCall("documents", (2, 2), (300, 300), 80, causal() & documents, 0),
        EngineCall("empty rows", (2, 2), (300, 300), 32, ~causal(), 0),
    ]


def measure_difference(found: Tensor, right: Tensor) -> float:
    """Return the largest |found - right| / max(1, |right|).

    Infinities of the same sign are equal: lse is -inf for a row without keys. NaN and a
    different shape count as infinite.
    """
    if found.shape != right.shape:
        return float("inf")
    apart = (found - right).abs() / right.abs().clamp(min=1)
    apart = torch.where(found == right, 0.0, apart)
    return float(apart.nan_to_num(torch.inf, torch.inf).max())
