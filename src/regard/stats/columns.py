"""The mass that each key receives, without storing the weights.

    received        sum_i w_ij G_i        [C] the kernel with q and k exchanged
    queries_of      n_j, the number of queries that may attend to key j
    mean_received   sum_i w_ij / n_j

G are features of the queries: 1, a span of generated tokens, a gradient. `rows` selects
some queries, such as slice(-32, None) for the last 32, and lowers the cost accordingly.

Next: cells.py
"""

from __future__ import annotations

import math
from dataclasses import replace

from regard.arrays import Array, convert, count_from, is_array, namespace
from regard.definition.contract import ALL
from regard.masks.algebra import Mask
from regard.masks.patterns import everything
from regard.masks.tiles import EMPTY, FULL, prove_tiles
from regard.recording.record import Record
from regard.stats.features import read_features
from regard.stats.mask_layout import read_mask_layout
from regard.stats.named_array import NamedArray
from regard.stats.nonfinite import mark_nonfinite
from regard.stats.plan import Ask, answer_one
from regard.stats.rows import divide_quietly

BLOCK = 512  # rows and keys of a tile in which queries are counted


def received(
    record: Record, features: Array | None = None, *, rows: slice = ALL
) -> NamedArray:
    """Return the mass on each key, (H, Nk), or weighted sums of features, (H, Nk, F).

    features: of the queries, (Nq, F) or (H, Nq, F); 1 by default
    rows: the queries to sum over
    """
    return answer_one(ask_received(record, features, rows=rows))


def ask_received(
    record: Record, features: Array | None = None, *, rows: slice = ALL
) -> Ask:
    """Return a request for the mass on each key from some of the queries."""
    how = "C: the kernel, keys look at queries"
    axes: tuple[str, ...] = ("head", "key")
    if features is not None:
        values = read_features(record, features, *record.q.shape[:2])[:, rows, :]
        axes = (*axes, "feature")
    else:
        values = None
    return Ask(
        record=mark_nonfinite(record if rows == ALL else cut_rows(record, rows)),
        side="columns",
        features=values,
        finish=lambda sums, total: NamedArray(
            total if values is None else sums, axes, how
        ),
        unit=None if rows == ALL else record,
    )


def mean_received(record: Record, *, rows: slice = ALL) -> NamedArray:
    """Return the mean weight on each key over the queries that may attend to it."""
    return answer_one(ask_mean_received(record, rows=rows))


def ask_mean_received(record: Record, *, rows: slice = ALL) -> Ask:
    """Return a request for the mean over the queries that may attend to each key."""
    asked = ask_received(record, rows=rows)
    how = "C: the kernel, keys look at queries; mean of the queries that may see a key"

    def finish(_: Array, total: Array) -> NamedArray:
        count = namespace(x=total).astype(count_queries(asked.record), total.dtype)
        return NamedArray(divide_quietly(total, count), ("head", "key"), how)

    return replace(asked, finish=finish)


def queries_of(record: Record, *, rows: slice = ALL) -> NamedArray:
    """Return how many queries may attend to each key, (H, Nk), as integers."""
    counts = count_queries(cut_rows(record, rows))
    return NamedArray(counts, ("head", "key"), "counted from the mask")


def count_queries(record: Record) -> Array:
    """Count the queries that the mask and the bias (unless -inf) allow for each key."""
    xp, n_q, n_k = namespace(q=record.q), record.q.shape[1], record.k.shape[1]
    none, lies = (
        xp.zeros_like(count_from(0, n_k, record.q))[None, :],
        read_mask_layout(record),
    )
    if not n_q * n_k:
        return xp.broadcast_to(none, (record.heads, n_k))
    formula = lies.mask if isinstance(lies.mask, Mask) else everything()
    given = record.bias is not None or is_array(lies.mask)  # no proof covers these
    shape, columns = (record.heads, n_q, n_k), []
    tiles = prove_tiles(formula, shape, block=BLOCK, q_start=lies.start)
    for keys, kinds in zip(tiles.keys, tiles.for_all().T, strict=True):
        count = none[:, keys]
        for rows, kind in zip(tiles.rows, kinds, strict=True):
            if kind == FULL and not given:
                count = count + (rows.stop - rows.start)
            elif kind != EMPTY:
                count = count + xp.sum(find_allowed(record, rows, keys), axis=1)
        columns.append(xp.broadcast_to(count, (record.heads, count.shape[1])))
    return xp.concat(columns, axis=1)


def find_allowed(record: Record, rows: slice, keys: slice) -> Array:
    """Return which cells of a tile are allowed, (H or 1, rows, keys), as integers."""
    cells, bias = record.allowed(rows, keys), record.bias
    if bias is not None:
        open_cells = bias[:, rows, keys] > -math.inf
        cells = open_cells if cells is None else cells & open_cells
    xp = namespace(q=record.q)
    assert cells is not None  # an undecided tile has a mask or a bias
    return xp.astype(cells, xp.int64)


def cut_rows(record: Record, rows: slice | Array) -> Record:
    """Return some queries of a record, by slice or index, with all of its keys."""

    def pick(x: Array, *lead: slice) -> Array:
        at = rows if isinstance(rows, slice) else convert(rows, x)
        return x[(*lead, at)]

    mask, bias = record.mask, record.bias
    return replace(
        record,
        q=pick(record.q, ALL),
        lse=pick(record.lse, ALL),
        q_positions=pick(record.q_positions),
        mask=mask if mask is None or isinstance(mask, Mask) else pick(mask, ALL),
        bias=None if bias is None else pick(bias, ALL),
    )
