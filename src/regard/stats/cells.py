"""Single weights, each computed from one dot product.

    w_ij = exp(capped(scale q_i · k_j) + bias_ij - lse_i)    [D] gather and multiply

    cells       given pairs of positions
    offset      key q - n: 0 is the token itself, 1 the previous token
    induction   the key after the last earlier occurrence of the query's token

A masked cell is 0. A cell whose key does not exist is NaN and marked as missing, so
that means can skip it: the first token has no previous token. All cells of a row
without weights (nonfinite.py) are NaN.

Next: gradients.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.arrays import Array, as_array, constant, convert, namespace, to_numpy
from regard.definition.attention import compute_logits
from regard.errors import OptionError, ShapeError
from regard.masks.algebra import Mask
from regard.recording.record import Record
from regard.stats.kernel_pass import RowMeasure, has_kernels
from regard.stats.named_array import NamedArray
from regard.stats.nonfinite import mark_nonfinite
from regard.stats.plan import Ask, DirectAsk, answer_one
from regard.stats.replay import to_compute_dtype

Numbers = np.ndarray[Any, np.dtype[Any]]
NUMBERS = 2**22  # elements of q gathered at once


def cells(record: Record, queries: Array, keys: Array) -> NamedArray:
    """Return the weights at pairs of positions, (H, pairs).

    queries, keys: (pairs,) positions; the record must contain them
    """
    wanted = [to_numpy(as_array(x)) for x in (queries, keys)]
    if wanted[0].ndim != 1 or wanted[0].shape != wanted[1].shape:
        shapes = " and ".join(str(x.shape) for x in wanted)
        raise ShapeError(f"queries and keys are {shapes}, expected (pairs,) each.")
    known = record.q_positions, record.k_positions
    at = [find_positions(x, to_numpy(y)) for x, y in zip(wanted, known, strict=True)]
    for name, x, found in zip(("query", "key"), wanted, at, strict=True):
        if (found < 0).any():
            lost = x[found < 0][0]
            raise OptionError(f"{record.name} has no {name} at position {lost}.")
    return NamedArray(
        weigh_pairs(record, *at), ("head", "pair"), "D: one dot product for each"
    )


def offset(record: Record, n: int) -> NamedArray:
    """Return the weight of each query on the key n positions before it, (H, Nq).

    n: 0 for the diagonal, 1 for the previous token, negative for a later token
    """
    return answer_one(ask_offset(record, n))


def ask_offset(record: Record, n: int) -> Ask | DirectAsk:
    """Return a request for the weights on the keys n positions before the queries."""
    return ask_targets(record, to_numpy(record.q_positions) - n, f"{n} before")


def induction(record: Record, tokens: Sequence[int] | Array) -> NamedArray:
    """Return the weight on the key after the last earlier equal token, (H, Nq).

    tokens: the token ids of the whole sequence, by position
    """
    return answer_one(ask_induction(record, tokens))


def ask_induction(record: Record, tokens: Sequence[int] | Array) -> Ask | DirectAsk:
    """Return a request for the weights on the induction targets of the queries."""
    targets, at = find_targets(tokens), to_numpy(record.q_positions)
    if at.size and at.max() >= targets.size:
        raise OptionError(
            f"{record.name}: {targets.size} tokens, and a query at position "
            f"{at.max()}; expected the tokens of the whole sequence."
        )
    return ask_targets(record, targets[at], "after the last same token")


def find_targets(tokens: Sequence[int] | Array) -> Numbers:
    """Return the position of each token's induction target, -1 if it has none.

    >>> find_targets([7, 8, 9, 7, 8]).tolist()
    [-1, -1, -1, 1, 2]
    """
    last: dict[int, int] = {}
    targets = []
    for at, token in enumerate(to_numpy(as_array(tokens)).tolist()):
        targets.append(last.get(token, -2) + 1)
        last[token] = at
    return np.asarray(targets, dtype=np.int64)


def ask_targets(record: Record, targets: Numbers, which: str) -> Ask | DirectAsk:
    """Return a request for the weight of each query on one key; NaN without a key."""
    how = f"D: one dot product for each query, with the key {which}"
    columns = find_positions(targets, to_numpy(record.k_positions))

    def name(found: Array) -> NamedArray:
        there = convert(columns >= 0, record.q)
        nan = constant(math.nan, found)
        xp = namespace(x=found)
        values = xp.where(there, found, nan)
        missing = xp.broadcast_to(xp.logical_not(there), values.shape)
        return NamedArray(values, ("head", "query"), how, missing=missing)

    def compute() -> NamedArray:
        rows = np.arange(columns.size)
        return name(weigh_pairs(record, rows, np.maximum(columns, 0)))

    if has_kernels(record):
        return Ask(
            record=mark_nonfinite(record),
            side="rows",
            features=RowMeasure("picked", columns),
            finish=lambda sums, _: name(sums[..., 0]),
        )
    return DirectAsk(what=f"{record.name}: {how}", cost=0.0, compute=compute)


def weigh_pairs(record: Record, rows: Numbers, columns: Numbers) -> Array:
    """Return the weights at (rows[p], columns[p]), (H, pairs)."""
    xp, record = namespace(q=record.q), mark_nonfinite(record)
    few = max(1, NUMBERS // (record.heads * record.q.shape[2]))
    parts = [constant(0, to_compute_dtype(record)[0], (record.heads, 0))]
    if record.k.shape[1] == 0:
        return constant(0, parts[0], (record.heads, rows.size))
    for first in range(0, rows.size, few):
        pairs = slice(first, first + few)
        i, j = (convert(x[pairs], record.q) for x in (rows, columns))
        parts.append(weigh_part(record, i, j))
    return xp.concat(parts, axis=1)


def weigh_part(record: Record, i: Array, j: Array) -> Array:
    """Return exp(logits - lse) at some pairs, as tiles of one query and one key."""
    xp, (q, k) = namespace(q=record.q), to_compute_dtype(record)
    bias, allowed = (pick_pairs(record, x, i, j) for x in (record.bias, record.mask))
    *_, logits = compute_logits(
        xp.permute_dims(xp.take(q, i, axis=1), (1, 0, 2))[:, :, None, :],
        xp.permute_dims(xp.take(k, j, axis=1), (1, 0, 2))[:, :, None, :],
        allowed,
        None if bias is None else xp.astype(bias, q.dtype),
        scale=record.scale,
        softcap=record.softcap,
    )
    logits = xp.matrix_transpose(logits[:, :, 0, 0])  # (H, pairs)
    lse = xp.astype(xp.take(record.lse, i, axis=1), logits.dtype)
    return xp.exp(logits - xp.where(lse == -math.inf, constant(0, lse), lse))


def pick_pairs(record: Record, x: Any, i: Array, j: Array) -> Array | None:
    """Return a mask or bias at some pairs, (pairs, H or 1, 1, 1)."""
    if x is None:
        return None
    if isinstance(x, Mask):
        q, k = convert(record.q_positions, i)[i], convert(record.k_positions, j)[j]
        cells = record.evaluate(q[:, None], k[:, None])[..., 0]
    else:
        cells = x[:, i, j]
    return namespace(x=cells).matrix_transpose(cells)[:, :, None, None]


def find_positions(wanted: Numbers, known: Numbers) -> Numbers:
    """Return the index of each wanted position in `known`, -1 if it is not there."""
    if known.size == 0:
        return np.full(wanted.shape, -1)
    order = np.argsort(known, kind="stable")
    place = np.minimum(np.searchsorted(known, wanted, sorter=order), known.size - 1)
    return np.where(known[order[place]] == wanted, order[place], -1)
