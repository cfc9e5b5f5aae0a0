"""The cells of an attention call: their four axes, and which of them are hidden.

    (B, H, Nq, Nk)      bool: True is visible; numbers: added to the scores

Next: given.py
"""

from __future__ import annotations

import torch
from torch import Tensor

HIDDEN = -1000.0  # a number that is filled in below this hides a cell
FILLED = -9000.0  # scores that are lower by this are hidden, or 18,000 tokens of ALiBi


def may_see(mask: Tensor) -> Tensor:
    """Return a mask as bool; -inf and the lowest numbers hide a cell."""
    if not mask.is_floating_point():
        return mask.bool()
    return mask > torch.finfo(mask.dtype).min / 2


def hides(cells: Tensor, threshold: float = HIDDEN) -> Tensor:
    """Return which cells are hidden, also those that only get a very low number."""
    return ~cells if cells.dtype == torch.bool else cells < threshold


def make_four(x: Tensor) -> Tensor:
    """Return x as (B, H, N, D): axes are added in front, or put together there."""
    if x.ndim == 4:
        return x
    return x.flatten(0, -4) if x.ndim > 4 else x.reshape((1,) * (4 - x.ndim) + x.shape)


def drop_axes(x: Tensor, ndim: int) -> Tensor:
    """Return x (B, H, …) with fewer axes in front, where they are 1."""
    return x.reshape(x.shape[x.ndim - ndim :]) if x.ndim > ndim else x
