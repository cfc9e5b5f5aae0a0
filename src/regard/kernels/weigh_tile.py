"""The logits and the weights of one tile, and the arguments that both kernels share.

    logits = capped(scale q kᵀ) + bias       -inf where the mask forbids
    logs   = logits - lse
    weight = exp(logs)

As lse is given, a tile needs one matrix product, no running maximum and no rescaling.
q and k are multiplied in their own dtype and added up in float32. Indices past the end
of an axis are replaced by the last one, so that loads need no mask: the bits of their
cells are 0, and their rows are not stored.

Next: row_kernel.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Operands(NamedTuple):
    """What is read of a record; strides are in elements, and 0 repeats a head."""

    q: Any  # (H, Nq, D), contiguous in D
    q_head: Any  # strides
    q_row: Any
    k: Any  # (Hk, Nk, D), contiguous in D
    k_head: Any
    k_row: Any
    lse: Any  # (H, Nq) float32, contiguous
    bias: Any  # (H or 1, Nq, Nk), contiguous in Nk, or None
    bias_head: Any
    bias_row: Any
    features: Any  # (1, Hk or H, N, F) float32, contiguous
    features_group: Any  # query heads that share features
    scale: Any
    softcap: Any  # or None


class GridSizes(NamedTuple):
    """The lengths of the axes that are known when a kernel starts."""

    n_q: Any
    n_k: Any
    group: Any  # query heads of a key head
    first: Any  # the first tile along the axis of the programs


class TileList(NamedTuple):
    """The tiles of each program: full ones, then undecided ones (tile_lists.py)."""

    ends: Any  # (H or 1, programs, 4) int32: full, undecided, end, first bits
    ends_head: Any
    tiles: Any  # int32, numbers of tiles along the other axis
    bits: Any  # (undecided, rows of a tile) int64, bit j: the mask allows column j


class KernelShape(NamedTuple):
    """The sizes of a program, constant when the kernel is compiled."""

    rows: int
    keys: int
    D: int  # of q and k
    width: int  # D, rounded up to a power of two
    chunk: int  # of the width, in one product
    features: int  # a power of two, or 0
    n_targets: int
    top: int  # a power of two, or 0
    precision: str  # of products of float32
    warps: int


@triton.jit
def point_to_rows(base, head, head_stride, at, stride):
    """Return the addresses of some rows of q, k or the bias."""
    return base + head.to(tl.int64) * head_stride + at.to(tl.int64) * stride


@triton.jit
def load_chunk(rows, first, SHAPE: tl.constexpr):
    """Return a chunk of the width of some rows, with zeros past D, (rows, chunk)."""
    d = first + tl.arange(0, SHAPE.chunk)
    where = rows[:, None] + d[None, :]
    if SHAPE.width == SHAPE.D:
        return tl.load(where)
    return tl.load(where, mask=d[None, :] < SHAPE.D, other=0.0)


@triton.jit
def multiply_tile(q, q_rows, k, k_rows, SHAPE: tl.constexpr):
    """Return q kᵀ of a tile; q and k are the first chunks of their rows."""
    product = tl.dot(q, tl.trans(k), input_precision=SHAPE.precision)
    for first in range(SHAPE.chunk, SHAPE.width, SHAPE.chunk):
        q, k = load_chunk(q_rows, first, SHAPE), load_chunk(k_rows, first, SHAPE)
        product = tl.dot(q, tl.trans(k), product, input_precision=SHAPE.precision)
    return product


@triton.jit
def finish_logits(product, operands, head, rows, columns, words):
    """Return the logits of a tile, (rows, columns), -inf where a bit of words is 0."""
    logits = product * operands.scale
    if operands.softcap is not None:  # tanh x = 1 - 2 / (exp 2x + 1)
        half = operands.softcap * 0.5
        logits = operands.softcap * (1 - 2 / (tl.exp(logits / half) + 1))
    if operands.bias is not None:
        where = point_to_rows(
            operands.bias, head, operands.bias_head, rows, operands.bias_row
        )
        logits += tl.load(where[:, None] + columns[None, :]).to(tl.float32)
    if words is not None:
        bit = tl.arange(0, columns.shape[0]).to(tl.int64)
        allowed = (tl.load(words)[:, None] >> bit[None, :]) & 1
        logits = tl.where(allowed != 0, logits, -float("inf"))
    return logits


@triton.jit
def compute_logs(logits, lse, operands, words):
    """Return the log weights; NaN in lse does not reach cells that are masked."""
    logs = logits - lse[:, None]
    if (words is not None) or (operands.bias is not None):
        logs = tl.where(logits == -float("inf"), logits, logs)
    return logs


@triton.jit
def sum_features(sums, weights, operands, head, at, n, AXIS: tl.constexpr):
    """Return the sums after one more tile, (rows or columns, features).

    at: indices of the keys (AXIS = 1) or of the queries (0) over which it sums, of n
    """
    FEATURES: tl.constexpr = sums.shape[1]
    slot = tl.arange(0, FEATURES)[None, :]
    first = (head // operands.features_group).to(tl.int64) * n
    where = operands.features + (first + at) * FEATURES
    for f in tl.static_range(FEATURES):  # a loop would end the prefetch of tiles
        values = tl.expand_dims(tl.load(where + f), 1 - AXIS)
        here = tl.sum(weights * values, AXIS)
        sums += tl.where(slot == f, here[:, None], 0.0)
    return sums


@triton.jit
def store_features(results, place, there, sums):
    """Write the sums of some rows or columns."""
    FEATURES: tl.constexpr = sums.shape[1]
    where = results.sums + place[:, None] * FEATURES + tl.arange(0, FEATURES)[None, :]
    tl.store(where, sums, mask=there[:, None])
