"""Features that are summed over keys or queries, parsed from user input.

    (N, F)          the same for all heads, booleans or numbers
    (heads, N, F)   different for each head
    spans           (first, last) positions, last not included: one feature each

Next: rows.py
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import numpy as np

from regard.arrays import Array, accumulator, as_array, convert, namespace, to_numpy
from regard.errors import OptionError, ShapeError
from regard.recording.record import Record

Spans = Sequence[Iterable[int]]  # pairs, or the spans that seen.spans returns


def read_features(record: Record, features: Array, heads: int, n: int) -> Array:
    """Return features (1 or heads, n, F) in the library and device of the record."""
    x = convert(as_array(features), record.q)
    lead = {2: (1,), 3: (1, heads, record.heads)}.get(x.ndim, ())
    full = x[None, ...] if x.ndim == 2 else x
    if not lead or full.shape[0] not in lead or full.shape[1] != n or not x.shape[-1]:
        known = f"({heads}, {n}, F)"
        raise ShapeError(
            f"{record.name}: features have the shape {tuple(x.shape)}, expected "
            f"({n}, F), or {known} to differ by head. Write x[:, None] for one feature."
        )
    xp = namespace(q=record.q)
    return xp.astype(full, accumulator(xp, record.q, record.k), copy=False)


def mark_spans(
    spans: Spans, positions: Array
) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Return which positions are in which span, (N, spans)."""
    ends = np.asarray([read_span(span) for span in spans]).reshape(-1, 2)
    at = to_numpy(positions)[:, None]
    return (at >= ends[:, 0]) & (at < ends[:, 1])


def read_span(span: Iterable[int]) -> tuple[int, int]:
    """Return a span as two integers; raise OptionError if it is invalid."""
    try:
        first, last = map(operator.index, span)
    except (TypeError, ValueError):
        raise OptionError(
            f"span {span!r}, expected two positions (first, last), last not included."
        ) from None
    if not 0 <= first <= last:
        raise OptionError(f"span {span!r}, expected 0 <= first <= last.")
    return first, last
