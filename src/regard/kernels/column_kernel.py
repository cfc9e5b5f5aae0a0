"""The kernel of the columns: one program for each head and block of keys.

    total      Σ_i w_ij          the mass that a key receives
    largest    max_i log w_ij    the largest weight that it receives, as its log
    sums       Σ_i w_ij G_i      for each feature of the queries

The same tiles as those of the rows, walked in the other direction: a block of keys
stays, and the queries pass by.

Next: tile_lists.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.kernels.weigh_tile import (
    compute_logs,
    finish_logits,
    load_chunk,
    multiply_tile,
    point_to_rows,
    store_features,
    sum_features,
)


class ColumnResults(NamedTuple):
    """Where the kernel writes, all float32 and contiguous."""

    total: Any  # (H, Nk)
    largest: Any
    sums: Any  # (H, Nk, F)


@triton.jit
def summarize_keys(operands, lists, results, sizes, SHAPE: tl.constexpr):
    """Write the statistics of one block of keys of one head."""
    head = tl.program_id(1)
    columns = (sizes.first + tl.program_id(0)) * SHAPE.keys + tl.arange(0, SHAPE.keys)
    at = tl.minimum(columns, sizes.n_k - 1)
    k_rows = point_to_rows(
        operands.k, head // sizes.group, operands.k_head, at, operands.k_row
    )
    k = load_chunk(k_rows, 0, SHAPE)
    nothing = tl.zeros([SHAPE.keys], tl.float32)
    sums = tl.zeros([SHAPE.keys, max(1, SHAPE.features)], tl.float32)
    state = (nothing, nothing - float("inf"), sums)
    mine = lists.ends + head * lists.ends_head + tl.program_id(0) * 4
    undecided, end = tl.load(mine + 1), tl.load(mine + 2)
    words = lists.bits + tl.load(mine + 3).to(tl.int64) * SHAPE.rows
    words += tl.arange(0, SHAPE.rows)
    block = (k, k_rows, at, head)
    for entry in range(tl.load(mine), undecided):
        tile = (tl.load(lists.tiles + entry), None)
        state = add_queries(state, block, tile, operands, sizes, SHAPE)
    for entry in range(undecided, end):
        tile = (tl.load(lists.tiles + entry), words)
        state = add_queries(state, block, tile, operands, sizes, SHAPE)
        words += SHAPE.rows
    total, largest, sums = state
    there = columns < sizes.n_k
    place = head.to(tl.int64) * sizes.n_k + columns
    tl.store(results.total + place, total, mask=there)
    tl.store(results.largest + place, largest, mask=there)
    if SHAPE.features:
        store_features(results, place, there, sums)


@triton.jit
def add_queries(state, block, tile, operands, sizes, SHAPE: tl.constexpr):
    """Return the state of a block of keys after one more tile."""
    total, largest, sums = state
    (k, k_rows, columns, head), (number, words) = block, tile
    rows = number * SHAPE.rows + tl.arange(0, SHAPE.rows)
    rows = tl.minimum(rows, sizes.n_q - 1)
    q_rows = point_to_rows(operands.q, head, operands.q_head, rows, operands.q_row)
    lse = tl.load(operands.lse + head.to(tl.int64) * sizes.n_q + rows)
    product = multiply_tile(load_chunk(q_rows, 0, SHAPE), q_rows, k, k_rows, SHAPE)
    logits = finish_logits(product, operands, head, rows, columns, words)
    logs = compute_logs(logits, lse, operands, words)
    weights = tl.exp(logs)
    total += tl.sum(weights, 0)
    largest = tl.maximum(largest, tl.max(logs, 0))
    if SHAPE.features:
        sums = sum_features(sums, weights, operands, head, rows, sizes.n_q, 0)
    return total, largest, sums
