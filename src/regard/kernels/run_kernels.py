"""Run the two kernels on q, k and lse.

    run_rows(call, features, targets, top)   ─▶   RowStatistics, one pass over the tiles
    run_columns(call, features)              ─▶   ColumnStatistics, another one

One pass computes everything that is asked of its side. Tiles have 128 queries and 64
keys; fewer in float32, with a bias, many features or D above 128, so that registers
suffice (benchmarks/compile_kernels.py). A bias is the record's own array, of which the
kernels read one tile at a time.

Next: ../stats/kernel_pass.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.kernels.column_kernel import ColumnResults, summarize_keys
from regard.kernels.row_kernel import RowResults, summarize_queries
from regard.kernels.tile_lists import Side, TiledMask
from regard.kernels.weigh_tile import GridSizes, KernelShape, Operands, TileList
from regard.masks.algebra import Mask
from regard.masks.patterns import everything

LEAST = 16  # the least width of a matrix product


@dataclass(frozen=True, kw_only=True)
class KernelInput:
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
    call: KernelInput,
    features: Tensor | None = None,
    targets: Tensor | None = None,
    top: int = 0,
) -> RowStatistics:
    """Return the statistics of all queries.

    features: of the keys, (1, Hk or H, Nk, F), F at most 8
    targets: (Nq, T), the index of one key for each query; -1 for none
    top: how many of the largest logits
    """
    heads, n_q, n_k = call.shape
    values = pad_features(features, n_k, call.q)
    if targets is None:
        targets = call.q.new_zeros(n_q, 0)
    n_targets = targets.shape[1]
    shape = choose_shape("rows", call, values.shape[2], n_targets, find_power(top))

    def make(*more: int) -> Tensor:
        return torch.zeros(heads, n_q, *more, device=call.q.device)

    results = RowResults(
        total=make(),
        entropy=make(),
        largest=make() - math.inf,
        sums=make(shape.features),
        targets=targets.to(torch.int32).contiguous(),
        picked=make(shape.n_targets),
        top_logits=make(shape.top) - math.inf,
        top_keys=make(shape.top).to(torch.int32),
    )
    launch(summarize_queries, call, pack_operands(call, values), results, shape)
    lost = call.lse.isnan()  # also where the mask allows no key

    def mark(x: Tensor) -> Tensor:
        return x.masked_fill(lost if x.ndim == 2 else lost[..., None], math.nan)

    return RowStatistics(
        mark(results.total),
        mark(results.entropy),
        mark(results.largest),
        mark(results.sums[..., : 0 if features is None else features.shape[2]]),
        mark(results.picked),
        *sort_top(results.top_logits, results.top_keys, top),
    )


def run_columns(call: KernelInput, features: Tensor | None = None) -> ColumnStatistics:
    """Return the statistics of all keys.

    features: of the queries, (1 or H, Nq, F), F at most 8
    """
    heads, n_q, n_k = call.shape
    values = pad_features(features, n_q, call.q)
    shape = choose_shape("columns", call, values.shape[2])
    total = torch.zeros(heads, n_k, device=call.q.device)
    sums = total.new_zeros(heads, n_k, shape.features)
    results = ColumnResults(total, total - math.inf, sums)
    launch(summarize_keys, call, pack_operands(call, values), results, shape)
    largest = results.largest.exp().masked_fill(total.isnan(), math.nan)
    sums = sums[..., : 0 if features is None else features.shape[2]]
    return ColumnStatistics(total, largest, sums)


def launch(
    kernel: Any, call: KernelInput, operands: Operands, results: Any, shape: KernelShape
) -> None:
    """Run a kernel on every block of queries, or of keys."""
    heads, n_q, n_k = call.shape
    if not n_q * n_k:
        return
    side: Side = "rows" if kernel is summarize_queries else "columns"
    mask = everything() if call.mask is None else call.mask
    tiled = TiledMask(mask, call.start, call.shape, (shape.rows, shape.keys))
    for lists in tiled.list_tiles(side, call.q):
        n_blocks = lists.ends.shape[1]
        per_head = n_blocks * 4 if len(lists.ends) > 1 else 0
        listed = TileList(lists.ends, per_head, lists.tiles, lists.bits)
        sizes = GridSizes(n_q, n_k, heads // call.k.shape[0], lists.first)
        kernel[n_blocks, heads](
            operands, listed, results, sizes, SHAPE=shape, num_warps=shape.warps
        )


def choose_shape(
    side: Side, call: KernelInput, n_features: int, n_targets: int = 0, top: int = 0
) -> KernelShape:
    """Return the size of a program: the largest tile for which registers suffice."""
    D, single = call.q.shape[2], torch.float32 in (call.q.dtype, call.k.dtype)
    width = max(LEAST, find_power(D))
    rows, keys = 128, 64
    if single or max(n_features, top) > 4:
        keys = 32
    if width > 128 or call.bias is not None or (side == "rows" and n_features > 4):
        rows, keys = 64, 32
    return KernelShape(
        rows=rows,
        keys=keys,
        D=D,
        width=width,
        chunk=min(width, 16) if single else width,
        features=n_features,
        n_targets=n_targets,
        top=top,
        precision=choose_precision(),
        warps=8,
    )


def choose_precision() -> str:
    """Return how products of float32 are computed: to the precision of float32.

    On NVIDIA's, three products of tf32 do; AMD's multiply float32 itself.
    """
    return "ieee" if torch.version.hip else "tf32x3"


def pack_operands(call: KernelInput, features: Tensor) -> Operands:
    """Return the tensors and their strides, contiguous along the last axis."""

    def pack(x: Tensor) -> tuple[Tensor, int, int]:
        x = x if x.stride(2) == 1 else x.contiguous()
        return x, x.stride(0) if len(x) > 1 else 0, x.stride(1)

    q, q_head, q_row = pack(call.q)
    k, k_head, k_row = pack(call.k)
    bias, bias_head, bias_row = (None, 0, 0) if call.bias is None else pack(call.bias)
    return Operands(
        q=q,
        q_head=q_head,
        q_row=q_row,
        k=k,
        k_head=k_head,
        k_row=k_row,
        lse=call.lse.to(torch.float32).contiguous(),
        bias=bias,
        bias_head=bias_head,
        bias_row=bias_row,
        features=features,
        features_group=call.q.shape[0] // features.shape[0],
        scale=float(call.scale),
        softcap=None if call.softcap is None else float(call.softcap),
    )


def pad_features(features: Tensor | None, n: int, like: Tensor) -> Tensor:
    """Return features in float32, padded with zeros to a power of two."""
    if features is None:
        return torch.zeros(1, n, 0, device=like.device)
    missing = find_power(features.shape[2]) - features.shape[2]
    return torch.nn.functional.pad(features.float(), (0, missing)).contiguous()


def sort_top(logits: Tensor, keys: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the largest first, and the earlier key first where they are equal."""
    order = keys.argsort(dim=-1)
    logits, keys = logits.gather(-1, order), keys.gather(-1, order)
    _, order = logits.sort(dim=-1, descending=True, stable=True)
    logits, keys = logits.gather(-1, order), keys.gather(-1, order)
    keys = keys.masked_fill(logits == -math.inf, -1)
    return logits[..., :top], keys[..., :top]


def find_power(n: int) -> int:
    """Return the smallest power of two that is at least n; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0
