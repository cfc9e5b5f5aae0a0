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

from regard.arrays import Array, count_from, is_array
from regard.errors import MaskError
from regard.masks.algebra import Mask
from regard.masks.biases import Bias
from regard.masks.formula import Extent, Start, evaluate, find_batch_axes, resolve_start
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
    like = torch.empty(0, device=device)
    if bias is not None:
        allowed = everything() if mask is None else mask
        start = resolve_start(q_start, shape, allowed, bias)
        check_lead(allowed, shape, start, like)
        seen, added = (
            evaluate(x, shape, q_start=start, like=like) for x in (allowed, bias)
        )
        numbers = torch.where(seen, added.to(dtype), -torch.inf)
        return {"attn_mask": numbers, "is_causal": False}
    if mask is None:
        return {"attn_mask": None, "is_causal": False}
    start = resolve_start(q_start, shape, mask)
    check_lead(mask, shape, start, like)
    whole = (max(1, shape[-2]), max(1, shape[-1]))
    tiles = prove_tiles(mask, shape, block=whole, q_start=start)
    if (tiles.kinds == FULL).all():
        return {"attn_mask": None, "is_causal": False}
    if mask == causal() and not is_array(start) and start == 0:
        return {"attn_mask": None, "is_causal": True}
    dense = evaluate(mask, shape, q_start=start, like=like)
    return {"attn_mask": dense, "is_causal": False}


def check_lead(mask: Mask, shape: tuple[int, ...], q_start: Start, like: Array) -> None:
    """Raise an error if a function of the user differs by an axis that `shape` lacks.

    Its cells of batch 0 and head 0 would be used for all. Data has an extent instead.
    """
    if len(shape) >= 4 or 0 in shape:
        return
    at = count_from(0, 1, like)[None, None, None]
    first = q_start.reshape(-1)[0].item() if is_array(q_start) else q_start
    for node in mask.walk():
        if node.parts or node.extent != Extent():
            continue
        batches, heads = find_batch_axes(node, (2, 2), at + first, at)
        if batches > 1 or (heads > 1 and len(shape) < 3):
            raise MaskError(
                f"{node!r} may differ by {'batch' if batches > 1 else 'head'}, but the "
                f"shape {tuple(shape)} has no such axis. Write (B, H, Nq, Nk)."
            )
