"""The kernel of the rows: one program for each head and block of queries.

    total      Σ_j w_ij                  less than 1 if there is a sink
    entropy    - Σ_j w_ij log w_ij       in nats
    largest    max_j logit_ij            the largest weight is exp(largest - lse)
    sums       Σ_j w_ij F_j              for each feature of the keys
    picked     w_ij at j = target_i      one key of each query: an offset, induction
    top        the largest logits of each query and their keys, in no order

A feature costs one multiplication for each cell, in float32. There are two loops: tiles
proved full need no mask; the others read a word of bits for each query.

Next: column_kernel.py
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

LOWEST = tl.constexpr(-1e4)  # the exp of any lower number is 0
NO_KEY = tl.constexpr(2**31 - 1)  # in a slot of `top` that is still empty


class RowResults(NamedTuple):
    """Where the kernel writes, all float32 and contiguous."""

    total: Any  # (H, Nq)
    entropy: Any
    largest: Any
    sums: Any  # (H, Nq, F)
    targets: Any  # (Nq, T) int32, the key whose weight is wanted; read, not written
    picked: Any  # (H, Nq, T), zeros
    top_logits: Any  # (H, Nq, TOP)
    top_keys: Any  # int32


@triton.jit
def summarize_queries(operands, lists, results, sizes, SHAPE: tl.constexpr):
    """Write the statistics of one block of queries of one head."""
    head = tl.program_id(1)
    rows = (sizes.first + tl.program_id(0)) * SHAPE.rows + tl.arange(0, SHAPE.rows)
    at = tl.minimum(rows, sizes.n_q - 1)
    q_rows = point_to_rows(operands.q, head, operands.q_head, at, operands.q_row)
    q = load_chunk(q_rows, 0, SHAPE)
    lse = tl.load(operands.lse + head.to(tl.int64) * sizes.n_q + at)
    nothing = tl.zeros([SHAPE.rows], tl.float32)
    state = (
        nothing,
        nothing,
        nothing - float("inf"),
        tl.zeros([SHAPE.rows, max(1, SHAPE.features)], tl.float32),
        tl.full([SHAPE.rows, max(1, SHAPE.top)], -float("inf"), tl.float32),
        tl.full([SHAPE.rows, max(1, SHAPE.top)], NO_KEY, tl.int32),
    )
    mine = lists.ends + head * lists.ends_head + tl.program_id(0) * 4
    undecided, end = tl.load(mine + 1), tl.load(mine + 2)
    words = lists.bits + tl.load(mine + 3).to(tl.int64) * SHAPE.rows
    words += tl.arange(0, SHAPE.rows)
    block = (q, q_rows, lse, rows, head)
    for entry in range(tl.load(mine), undecided):
        tile = (tl.load(lists.tiles + entry), None)
        state = add_keys(state, block, tile, operands, results, sizes, SHAPE)
    for entry in range(undecided, end):
        tile = (tl.load(lists.tiles + entry), words)
        state = add_keys(state, block, tile, operands, results, sizes, SHAPE)
        words += SHAPE.rows
    store_rows(state, results, rows, head, sizes, SHAPE)


@triton.jit
def add_keys(
    state,
    block,
    tile,
    operands,
    results,
    sizes,
    SHAPE: tl.constexpr,
):
    """Return the state of a block of queries after one more tile."""
    total, entropy, largest, sums, top_logits, top_keys = state
    (q, q_rows, lse, rows, head), (number, words) = block, tile
    columns = number * SHAPE.keys + tl.arange(0, SHAPE.keys)
    at, row = tl.minimum(columns, sizes.n_k - 1), tl.minimum(rows, sizes.n_q - 1)
    k_rows = point_to_rows(
        operands.k, head // sizes.group, operands.k_head, at, operands.k_row
    )
    product = multiply_tile(q, q_rows, load_chunk(k_rows, 0, SHAPE), k_rows, SHAPE)
    logits = finish_logits(product, operands, head, row, at, words)
    logs = compute_logs(logits, lse, operands, words)
    weights = tl.exp(logs)
    total += tl.sum(weights, 1)
    entropy -= tl.sum(weights * tl.maximum(logs, LOWEST), 1)  # 0 log 0 is 0
    largest = tl.maximum(largest, tl.max(logits, 1))
    if SHAPE.features:
        sums = sum_features(sums, weights, operands, head, at, sizes.n_k, 1)
    if SHAPE.n_targets:
        store_picked(weights, columns, rows, head, results, sizes, SHAPE)
    if SHAPE.top:
        top_logits, top_keys = insert_top(
            top_logits, top_keys, logits, columns, SHAPE.top
        )
    return total, entropy, largest, sums, top_logits, top_keys


@triton.jit
def store_picked(weights, columns, rows, head, results, sizes, SHAPE: tl.constexpr):
    """Write the weights on those targets that are among the columns of the tile."""
    first, last = tl.min(columns, 0), tl.max(columns, 0)
    row = tl.minimum(rows, sizes.n_q - 1).to(tl.int64)
    place = (head.to(tl.int64) * sizes.n_q + rows) * SHAPE.n_targets
    for t in tl.static_range(SHAPE.n_targets):
        target = tl.load(results.targets + row * SHAPE.n_targets + t)
        here = (target >= first) & (target <= last) & (rows < sizes.n_q)
        if tl.max(here.to(tl.int32), 0) > 0:  # in most tiles, there are none
            picked = tl.where(columns[None, :] == target[:, None], weights, 0.0)
            tl.store(results.picked + place + t, tl.sum(picked, 1), mask=here)


@triton.jit
def insert_top(logits, keys, candidates, columns, TOP: tl.constexpr):
    """Return the TOP largest of both, (rows, TOP); of equal ones, the earlier keys.

    Each turn takes the best candidate of every row. It ends when no row has a candidate
    that is better than the worst one it holds: at once, in most tiles.
    """
    again = 1
    while again > 0:
        best = tl.max(candidates, 1)
        ties = tl.where(candidates == best[:, None], columns[None, :], NO_KEY)
        key = tl.min(ties, 1)
        low = tl.min(logits, 1)
        worst = tl.max(tl.where(logits == low[:, None], keys, -1), 1)
        better = (best > low) | ((best == low) & (key < worst))
        better = better & (best > -float("inf"))
        # empty slots are equal: take one of them
        slot = tl.arange(0, TOP)[None, :]
        same = (logits == low[:, None]) & (keys == worst[:, None])
        chosen = tl.min(tl.where(same, slot, TOP), 1)
        here = (slot == chosen[:, None]) & better[:, None]
        logits = tl.where(here, best[:, None], logits)
        keys = tl.where(here, key[:, None], keys)
        taken = columns[None, :] == key[:, None]
        candidates = tl.where(taken, -float("inf"), candidates)
        again = tl.max(better.to(tl.int32), 0)
    return logits, keys


@triton.jit
def store_rows(state, results, rows, head, sizes, SHAPE: tl.constexpr):
    """Write the state of a block of queries."""
    total, entropy, largest, sums, top_logits, top_keys = state
    there = rows < sizes.n_q
    place = head.to(tl.int64) * sizes.n_q + rows
    tl.store(results.total + place, total, mask=there)
    tl.store(results.entropy + place, entropy, mask=there)
    tl.store(results.largest + place, largest, mask=there)
    if SHAPE.features:
        store_features(results, place, there, sums)
    if SHAPE.top:
        where = place[:, None] * SHAPE.top + tl.arange(0, SHAPE.top)[None, :]
        tl.store(results.top_logits + where, top_logits, mask=there[:, None])
        tl.store(results.top_keys + where, top_keys, mask=there[:, None])
