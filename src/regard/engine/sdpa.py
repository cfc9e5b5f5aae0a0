"""Convert a mask formula to arguments of torch's scaled_dot_product_attention.

    proved full                     no mask
    causal() from position 0        is_causal=True, which torch also aligns top-left
    anything else                   attn_mask, True = may attend
    any mask with a bias            attn_mask of numbers: the bias, or -inf outside

The two arguments are never set together: some kernels raise, others combine them.

Next: flex.py
"""

from __future__ import annotations

from typing import TypedDict

import torch

from regard.arrays import is_array
from regard.masks.algebra import Mask
from regard.masks.biases import Bias
from regard.masks.formula import Start, evaluate, resolve_start
from regard.masks.free_axes import check_lead
from regard.masks.patterns import causal, everything
from regard.masks.tiles import FULL, prove_tiles


class Arguments(TypedDict):
    """Keyword arguments of scaled_dot_product_attention."""

    attn_mask: torch.Tensor | None
    is_causal: bool


def sdpa_arguments(
    mask: Mask | None,
    shape: tuple[int, ...],  # (..., H, Nq, Nk)
    *,
    q_start: Start | None = None,
    bias: Bias | None = None,
    dtype: torch.dtype = torch.float32,  # of an attn_mask with a bias: that of q
    device: torch.device | str = "cpu",
) -> Arguments:
    """Return the cheapest arguments that are equivalent to the mask.

    >>> from regard import causal
    >>> sdpa_arguments(causal(), (4, 4))
    {'attn_mask': None, 'is_causal': True}
    >>> sdpa_arguments(causal(), (1, 4), q_start=3)  # one new token, three cached ones
    {'attn_mask': None, 'is_causal': False}
    """
    like, allowed = (
        torch.empty(0, device=device),
        everything() if mask is None else mask,
    )
    formulas = [allowed] if bias is None else [allowed, bias]
    start = resolve_start(q_start, shape, *formulas)
    check_lead(allowed, shape, like)
    whole = (max(1, shape[-2]), max(1, shape[-1]))
    tiles = prove_tiles(allowed, shape, block=whole, q_start=start)
    if bias is None and (tiles.kinds == FULL).all():
        return {"attn_mask": None, "is_causal": False}
    if bias is None and mask == causal() and not is_array(start) and start == 0:
        return {"attn_mask": None, "is_causal": True}
    cells, *added = (evaluate(x, shape, q_start=start, like=like) for x in formulas)
    for numbers in added:
        cells = torch.where(cells, numbers.to(dtype), -torch.inf)
    return {"attn_mask": cells, "is_causal": False}
