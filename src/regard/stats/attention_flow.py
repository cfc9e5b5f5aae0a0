"""Attention flow: the most that can flow from a token to each input token.

    node      (l, i): token i above layer l;  (0, j): token j of the input
    edge      (l, i) ─▶ (l - 1, j), capacity (A[l][i, j] + I[i, j]) / 2
    flow[j]   the maximum flow from (L, token) to (0, j)       (Abnar & Zuidema 2020)

A[l] is the mean over the heads, as in rollout.py. There is an edge for every weight, so
only the largest of each row are kept, and memory is linear in N. Because the others are
left out, the result is two bounds:

    low    without the other edges
    high   with one node per layer for all of them: row i may send what it lost there,
           and column j may receive what it lost

With `edges` at least N they are the same. Capacities are rounded to 2⁻³⁰, down and up.
The maximum flow is that of SciPy.

Next: published.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from regard.arrays import to_numpy
from regard.errors import OptionError
from regard.recording.indices import read_whole
from regard.recording.record import Record
from regard.stats.nonfinite import mark_nonfinite
from regard.stats.rollout import Floats, find_row

UNIT = 2**30  # SciPy's capacities are integers
STRIP = 2**22  # weights that are computed at a time, of all heads
Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class AttentionFlow:
    """The maximum flow from a token to every token of the input, between two bounds."""

    low: Floats  # (N,)
    high: Floats  # (N,)


class LayerEdges(NamedTuple):
    """The largest weights of each row of a layer, and what was left out."""

    rows: Ints  # (edges,)
    columns: Ints  # (edges,)
    values: Floats  # (edges,)
    lost_rows: Floats  # (N,), the sum of the others, by row
    lost_columns: Floats  # (N,), by column


def maximize_flow(
    records: Sequence[Record], token: int, *, edges: int = 32
) -> AttentionFlow:
    """Return the maximum flow from a token to each token of the input.

    records: of all layers of one sequence, the first one first:
        seen.layer(slice(None))
    edges: weights that are kept of each row; with N of them the flow is exact
    """
    if (read_whole(edges) or 0) < 1:
        raise OptionError(f"edges={edges!r}, expected a whole number, 1 or more.")
    row = find_row(records, token)
    layers = [keep_largest(record, edges) for record in records]
    n = records[0].shape[1]
    bounds = []
    for is_high in (False, True):
        graph = build_graph(layers, n, is_high=is_high)
        source = len(layers) * (n + 1) + row
        flows = [solve(graph, source, sink) for sink in range(n)]
        bounds.append(np.array(flows) / UNIT)
    return AttentionFlow(*bounds)


def keep_largest(record: Record, edges: int) -> LayerEdges:
    """Return the largest entries of each row of (A + I) / 2."""
    record = mark_nonfinite(record)
    heads, n, _ = record.shape
    step, parts = max(1, STRIP // (heads * n)), []
    lost_columns = np.zeros(n)
    for first in range(0, n, step):
        weights = to_numpy(record.weights(slice(first, first + step)))
        mean = weights.astype(np.float64).mean(0) / 2  # (rows, N)
        at = np.arange(len(mean))
        mean[at, first + at] += 0.5
        kept = np.argpartition(-mean, min(edges, n) - 1, axis=1)[:, :edges]
        values = np.take_along_axis(mean, kept, 1)
        np.put_along_axis(mean, kept, 0, 1)
        lost_columns += mean.sum(0)
        parts.append((np.repeat(first + at, kept.shape[1]), kept, values, mean.sum(1)))
    rows, columns, values, lost = (
        np.concatenate([np.ravel(x) for x in some]) for some in zip(*parts, strict=True)
    )
    if not np.isfinite(values).all():
        raise OptionError(f"{record.name} has weights that are NaN: there is no flow.")
    return LayerEdges(rows, columns, values, lost, lost_columns)


def build_graph(layers: Sequence[LayerEdges], n: int, *, is_high: bool) -> Any:
    """Return the capacities between nodes, as a sparse matrix of integers.

    Node l (n + 1) + i is token i above layer l, and l (n + 1) + n what layer l lost.
    """
    sparse = import_scipy()
    starts, ends, capacities = [], [], []
    every = np.arange(n)
    for number, layer in enumerate(layers, 1):
        above, below = number * (n + 1), (number - 1) * (n + 1)
        starts += [above + layer.rows]
        ends += [below + layer.columns]
        capacities += [layer.values]
        if is_high:
            starts += [above + every, np.full(n, above + n)]
            ends += [np.full(n, above + n), below + every]
            capacities += [layer.lost_rows, layer.lost_columns]
    sizes = np.minimum(np.concatenate(capacities), 1) * UNIT  # no flow exceeds 1
    whole = (np.ceil(sizes) if is_high else np.floor(sizes)).astype(np.int32)
    places = np.concatenate(starts), np.concatenate(ends)
    nodes = (len(layers) + 1) * (n + 1)
    return sparse.csr_matrix((whole, places), shape=(nodes, nodes))


def solve(graph: Any, source: int, sink: int) -> int:
    """Return the maximum flow between two nodes, in units."""
    return int(import_scipy().csgraph.maximum_flow(graph, source, sink).flow_value)


def import_scipy() -> Any:
    """Return scipy.sparse, or raise OptionError."""
    try:
        import scipy.sparse.csgraph  # noqa: PLC0415 (optional)
    except ImportError:
        raise OptionError("attention flow needs SciPy: pip install scipy") from None
    return scipy.sparse
