"""Convert a mask formula to FlexAttention's BlockMask, without a dense mask.

FlexAttention needs, for every row of tiles, the partial tiles and the full tiles.
torch's create_block_mask evaluates all Nq x Nk cells; here tiles are proved empty or
full, and the mask is evaluated only in undecided tiles.

Next: ring.py
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from regard.arrays import Array, is_array
from regard.masks.algebra import Mask
from regard.masks.formula import Start, resolve_start
from regard.masks.tiles import FULL, UNDECIDED


def block_mask(
    mask: Mask,
    shape: tuple[int, ...],
    *,
    q_start: Start | None = None,
    block: int | tuple[int, int] = 128,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """Return the BlockMask of a mask over (B, H, Nq, Nk), or (Nq, Nk) for any B and H.

    >>> from regard import causal, window
    >>> block_mask(causal() & window(1023), (8192, 8192)).sparsity() > 85
    True
    """
    start = resolve_start(q_start, shape, mask)
    kinds = mask.tiles(shape, block=block, q_start=start).settle().kinds
    rows, keys = block if isinstance(block, tuple | list) else (block, block)
    n_q, n_k = shape[-2:]
    if n_q % rows:  # a tile that crosses the edge needs the mask, as in torch
        kinds[:, :, -1][kinds[:, :, -1] == FULL] = UNDECIDED
    if n_k % keys:
        kinds[..., -1][kinds[..., -1] == FULL] = UNDECIDED
    visited, whole = (list_tiles(kinds == kind, device) for kind in (UNDECIDED, FULL))
    return BlockMask.from_kv_blocks(
        *visited,
        *whole,
        BLOCK_SIZE=(rows, keys),
        mask_mod=shift(mask.place(torch.empty(0, device=device)), start, device),
        seq_lengths=(n_q, n_k),
    )


def list_tiles(chosen: Array, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return the number of chosen tiles per row, and all tiles, chosen ones first."""
    order = np.argsort(~chosen, axis=-1, kind="stable").astype(np.int32)
    counts = chosen.sum(-1, dtype=np.int32)
    return torch.from_numpy(counts).to(device), torch.from_numpy(order).to(device)


def shift(mask: Mask, q_start: Start, device: torch.device | str) -> Array:
    """Return the mask as a mask_mod, in which query indices start at 0."""
    if is_array(q_start):
        starts = torch.atleast_1d(torch.as_tensor(q_start, device=device))
        return lambda b, h, q, k: mask(b, h, q + starts[b % len(starts)], k)
    return lambda b, h, q, k: mask(b, h, q + q_start, k)
