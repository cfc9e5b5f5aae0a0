"""Run the two kernels on q, k and lse.

    run_rows(call, features, targets, top)   ─▶   RowStatistics, one pass over the tiles
    run_columns(call, features)              ─▶   ColumnStatistics, another one

One pass computes everything that is asked of its side. Tiles have 128 queries and 64
keys; from D = 129, 64 and 32, because q and k of a tile are in shared memory. A bias is
the record's own array: the kernels read the values of one tile at a time.

Next: ../stats/kernel_pass.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.kernels.column_kernel import ColumnResults, summarize_columns
from regard.kernels.row_kernel import RowResults, summarize_rows
from regard.kernels.tile_lists import Side, TiledMask
from regard.kernels.weigh_tile import KernelShape, Operands, Sizes, TileList
from regard.masks.algebra import Mask
from regard.masks.patterns import everything

LEAST = 16  # the least width of a matrix product


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """The attention of one layer over one sequence, on one device."""

    q: Tensor  # (H, Nq, D) float16, bfloat16 or float32
    k: Tensor  # (Hk, Nk, D)
    lse: Tensor  # (H, Nq), including the sink if there is one
    scale: float
    softcap: float | None = None
    bias: Tensor | None = None  # (H or 1, Nq, Nk)
    mask: Mask | None = None  # of rows and columns
    start: int = 0  # the position of the first row, for the mask

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, queries, keys."""
        return self.q.shape[0], self.q.shape[1], self.k.shape[1]


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of each query, float32."""

    total: Tensor  # (H, Nq)
    entropy: Tensor  # in nats
    largest_logit: Tensor  # -inf without keys
    sums: Tensor  # (H, Nq, F)
    picked: Tensor  # (H, Nq, T); 0 at a target that is masked, or -1
    top_logits: Tensor  # (H, Nq, top), the largest first; -inf where there are fewer
    top_keys: Tensor  # (H, Nq, top); -1 where there are fewer


@dataclass(frozen=True)
class ColumnStatistics:
    """Statistics of each key, float32."""

    total: Tensor  # (H, Nk)
    largest: Tensor  # the largest weight
    sums: Tensor  # (H, Nk, F)


def run_rows(
    call: KernelCall,
    features: Tensor | None = None,
    targets: Tensor | None = None,
    top: int = 0,
) -> RowStatistics:
    """Return the statistics of all queries.

    features: of the keys, (1, Hk or H, Nk, F), F at most 8
    targets: (Nq, T), the index of one key for each query; -1 for none
    top: how many of the largest logits
    """
    heads, n_q, _ = call.shape
    values, n_features = pad_features(features)
    n_targets = 0 if targets is None else targets.shape[1]
    slots = find_power(top) if top else 0

    def make(*more: int) -> Tensor:
        return torch.zeros(heads, n_q, *more, device=call.q.device)

    results = RowResults(
        total=make(),
        entropy=make(),
        largest=make() - math.inf,
        sums=make(0 if values is None else values.shape[2]),
        targets=None if targets is None else targets.to(torch.int32).contiguous(),
        picked=make(n_targets),
        top_logits=make(slots) - math.inf,
        top_keys=make(slots).to(torch.int32),
    )
    launch(summarize_rows, "rows", call, results, values, n_targets, slots)
    lost = results.total.isnan()
    return RowStatistics(
        results.total,
        results.entropy,
        results.largest.masked_fill(lost, math.nan),
        results.sums[..., :n_features],
        results.picked,
        *sort_top(results.top_logits, results.top_keys, top),
    )


def run_columns(call: KernelCall, features: Tensor | None = None) -> ColumnStatistics:
    """Return the statistics of all keys.

    features: of the queries, (1 or H, Nq, F), F at most 8
    """
    heads, _, n_k = call.shape
    values, n_features = pad_features(features)
    zeros = torch.zeros(heads, n_k, device=call.q.device)
    sums = zeros.new_zeros(heads, n_k, 0 if values is None else values.shape[2])
    results = ColumnResults(zeros, zeros - math.inf, sums)
    launch(summarize_columns, "columns", call, results, values)
    largest = results.largest.exp().masked_fill(zeros.isnan(), math.nan)
    return ColumnStatistics(zeros, largest, sums[..., :n_features])


def launch(
    kernel: Any,
    side: Side,
    call: KernelCall,
    results: Any,
    features: Tensor | None,
    n_targets: int = 0,
    top: int = 0,
) -> None:
    """Run a kernel on every block of queries, or of keys."""
    heads, n_q, n_k = call.shape
    if not n_q * n_k:
        return
    shape = choose_shape(call, features, n_targets, top)
    operands = read_operands(call, features)
    tiled = TiledMask(
        everything() if call.mask is None else call.mask,
        call.start,
        call.shape,
        (shape.rows, shape.keys),
    )
    for lists in tiled.list_tiles(side, call.q):
        n_blocks = lists.ends.shape[1]
        per_head = n_blocks * 4 if len(lists.ends) > 1 else 0
        listed = TileList(lists.ends, per_head, lists.tiles, lists.bits)
        sizes = Sizes(n_q, n_k, heads // call.k.shape[0], lists.first)
        kernel[n_blocks, heads](
            operands, listed, results, sizes, SHAPE=shape, num_warps=shape.warps
        )


def choose_shape(
    call: KernelCall, features: Tensor | None, n_targets: int = 0, top: int = 0
) -> KernelShape:
    """Return the size of a program."""
    D, single = call.q.shape[2], torch.float32 in (call.q.dtype, call.k.dtype)
    width = max(LEAST, find_power(D))
    rows, keys = (128, 64) if width <= 128 else (64, 32)
    return KernelShape(
        rows=rows,
        keys=keys,
        D=D,
        width=width,
        chunk=min(width, 16) if single else width,
        features=0 if features is None else features.shape[2],
        n_targets=n_targets,
        top=top,
        precision=choose_precision(call.q),
        warps=8,
    )


def choose_precision(q: Tensor) -> str:
    """Return how products of float32 are computed: to the precision of float32.

    On NVIDIA's, three products of tf32 do; AMD's multiply float32 itself.
    """
    return "ieee" if torch.version.hip else "tf32x3"


def read_operands(call: KernelCall, features: Tensor | None) -> Operands:
    """Return the tensors and their strides, contiguous along the last axis."""

    def pack(x: Tensor) -> tuple[Tensor, int, int]:
        x = x if x.stride(2) == 1 else x.contiguous()
        return x, x.stride(0) if len(x) > 1 else 0, x.stride(1)

    group = 1 if features is None else call.q.shape[0] // features.shape[0]
    return Operands(
        *pack(call.q),
        *pack(call.k),
        call.lse.to(torch.float32).contiguous(),
        *((None, 0, 0) if call.bias is None else pack(call.bias)),
        features,
        group,
        float(call.scale),
        None if call.softcap is None else float(call.softcap),
    )


def pad_features(features: Tensor | None) -> tuple[Tensor | None, int]:
    """Return features padded with zeros to a power of two, and how many there are."""
    if features is None or not features.shape[2]:
        return None, 0
    n = features.shape[2]
    padded = torch.nn.functional.pad(features.float(), (0, find_power(n) - n))
    return padded.contiguous(), n


def sort_top(logits: Tensor, keys: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the largest first, and the earlier key first where they are equal."""
    order = keys.argsort(dim=-1)
    logits, keys = logits.gather(-1, order), keys.gather(-1, order)
    _, order = logits.sort(dim=-1, descending=True, stable=True)
    logits, keys = logits.gather(-1, order), keys.gather(-1, order)
    keys = keys.masked_fill(logits == -math.inf, -1)
    return logits[..., :top], keys[..., :top]


def find_power(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
