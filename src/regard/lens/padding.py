"""Which tokens a model is told are padding, from the arguments of a pass.

What hides a key is what a call adds to its scores; the arguments only tell which tokens
are padding (assemble.py compares the two).

Next: passes.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.lens.captured_call import may_see
from regard.lens.scores import HIDDEN


def is_packed(named: Mapping[str, Any]) -> bool:
    """Return whether a pass is given several sequences in one row."""
    return any(name.startswith("cu_seq_lens") for name in named)


def is_paged(named: Mapping[str, Any]) -> bool:
    """Return whether a pass is given a cache of many requests, as of transformers."""
    return type(named.get("cache")).__name__ == "PagedAttentionCache"


def read_valid(mask: Any, tokens: Tensor | None) -> Tensor | None:
    """Return which tokens (B, N) are no padding, from what a model was given."""
    if isinstance(mask, Mapping):  # a mask for each kind of layer
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if not isinstance(mask, Tensor):
        return None
    if mask.ndim == 2:
        return read_flat(mask)
    if mask.ndim == 4 and tokens is not None and tokens.shape[1] > 1:
        seen = may_see(mask)[:, 0]
        return seen.any(-2)[:, : tokens.shape[1]]  # no query attends to padding
    return None


def read_flat(mask: Tensor) -> Tensor | None:
    """Return which tokens a mask (B, N) calls real."""
    if mask.shape[0] == mask.shape[1] and is_triangle(mask):
        return None  # a causal mask; dropping nothing is right for padding, too
    if mask.is_floating_point() and not bool(((mask == 0) | (mask == 1)).all()):
        return mask > HIDDEN  # it is added to the scores
    return mask.bool()


def is_triangle(mask: Tensor) -> bool:
    """Return whether a square mask hides what is above its diagonal, and no more."""
    seen = mask > HIDDEN if bool((mask < 0).any()) else mask.bool()
    return len(mask) > 1 and bool((seen == torch.ones_like(seen).tril()).all())
