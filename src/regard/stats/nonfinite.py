"""Rows whose weights are not finite; every statistic must report them as NaN.

    weights[i, j] = exp(capped(scale q_i · k_j) + bias_ij - lse_i)

Row i has no weights if lse_i is NaN or +inf, if q_i is not finite, or if it may attend
to a key or a bias that is not finite. A row whose lse is -inf is not one of them: its
weights are 0, because it has no keys, or because all of its scores are -inf.

`mark_nonfinite` sets the lse of these rows to NaN, which propagates to everything that
is computed from the row, and replaces values that are not finite by 0, so that they do
not reach rows that may not attend to the key, or neighbouring rows in a kernel.

Next: rows.py
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from regard.arrays import Array, constant, convert, namespace, to_numpy
from regard.recording.record import Record
from regard.stats.replay import share

SILENT = 1e30  # the lse of a row whose weights are all 0
CELLS = 2**22  # in a strip of rows that is searched for keys that are not finite


def mark_nonfinite(record: Record) -> Record:
    """Return a record of finite numbers whose lse is NaN in the rows without weights.

    If all numbers are finite, the record itself is returned.
    """
    rows = find_nonfinite(record)
    if rows is None:
        return record
    xp, bias, lse = namespace(q=record.q), record.bias, record.lse
    # exp(0 - SILENT) is 0, so the values replaced by 0 get no weight
    without = constant(SILENT, lse), constant(math.nan, lse)
    if bias is not None:
        bias = xp.where(bias < math.inf, bias, constant(0, bias))
    return replace(
        record,
        q=fill_zeros(record.q),
        k=fill_zeros(record.k),
        lse=xp.where(rows, xp.where(lse == -math.inf, *without), lse),
        bias=bias,
    )


def find_nonfinite(record: Record) -> Array | None:
    """Return which rows use nonfinite numbers, (H, Nq); None if all are finite."""
    xp, (q, k, lse) = namespace(q=record.q), (record.q, record.k, record.lse)
    lost = xp.logical_not(lse < math.inf)  # NaN or +inf
    bias = None if record.bias is None else xp.logical_not(record.bias < math.inf)
    known = is_finite(q) and is_finite(k) and (bias is None or not bool(xp.any(bias)))
    if known and not bool(xp.any(lost)):
        return None
    lost = lost | xp.any(xp.logical_not(xp.isfinite(q)), axis=-1)
    if not known:
        lost = lost | find_affected_rows(
            record, xp.any(xp.logical_not(xp.isfinite(k)), axis=-1)
        )
    return lost


def find_affected_rows(record: Record, keys: Array) -> Array:
    """Return which rows may attend to these keys (Hk, Nk) or to a nonfinite bias."""
    xp = namespace(q=record.q)
    keys = share(keys[..., None], record.heads)[:, None, :, 0]  # (H, 1, Nk)
    bias = record.bias
    bad = keys if bias is None else keys | xp.logical_not(bias < math.inf)
    some = np.flatnonzero(to_numpy(xp.any(xp.any(bad, axis=0), axis=0)))
    at = convert(some, record.q)
    bad = xp.take(bad, at, axis=2)
    hidden = None if bias is None else xp.take(bias, at, axis=2) == -math.inf
    step = max(1, CELLS // max(1, record.heads * some.size))
    strips = [constant(0, record.lse, (record.heads, 0)) > 0]
    for first in range(0, record.q.shape[1], step):
        rows = slice(first, first + step)
        cells, seen = bad if bias is None else bad[:, rows, :], record.allowed(rows, at)
        if seen is not None:
            cells = cells & seen
        if hidden is not None:
            cells = cells & xp.logical_not(hidden[:, rows, :])
        found = xp.any(cells, axis=-1)
        n = min(step, record.q.shape[1] - first)
        strips.append(xp.broadcast_to(found, (record.heads, n)))
    return xp.concat(strips, axis=1)


def is_finite(x: Array) -> bool:
    """Return whether all numbers are finite; a finite sum proves it cheaply."""
    xp = namespace(x=x)
    with np.errstate(all="ignore"):
        return bool(xp.isfinite(xp.sum(x))) or bool(xp.all(xp.isfinite(x)))


def fill_zeros(x: Array) -> Array:
    """Return x with 0 in place of values that are not finite."""
    xp = namespace(x=x)
    return xp.where(xp.isfinite(x), x, constant(0, x))
