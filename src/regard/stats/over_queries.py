"""Reductions over queries: from one number for each query to one for each head.

    mean_of       over the queries that have a value
    max_of        over the queries that have a key
    count_nan     queries whose value is NaN

Queries without a value (`NamedArray.missing`) are skipped. A query whose value is NaN
makes the result NaN; `count_nan` returns how many there are.

Next: registry.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.arrays import to_numpy
from regard.stats.named_array import NamedArray

Numbers = np.ndarray[Any, np.dtype[Any]]


def to_float64(named: NamedArray) -> Numbers:
    """Return the values of a statistic in float64."""
    return to_numpy(named.values).astype("float64")


def find_missing(named: NamedArray) -> Numbers:
    """Return which values are missing, bool in the shape of the values."""
    if named.missing is None:
        return np.zeros(named.values.shape, bool)
    return to_numpy(named.missing)


def find_nan(named: NamedArray) -> Numbers:
    """Return which values are NaN but not missing."""
    return np.isnan(to_float64(named)) & ~find_missing(named)


def count_nan(named: NamedArray) -> Numbers:
    """Return how many queries of each head have the value NaN, (H,)."""
    counts: Numbers = find_nan(named).sum(1)
    return counts


def mean_of(named: NamedArray) -> NamedArray:
    """Return the mean over the queries that have a value, (H,).

    NaN if one of these values is NaN; marked as missing if no query has a value.
    """
    there = ~find_missing(named)
    total = np.where(there, to_float64(named), 0).sum(1)
    count = there.sum(1)
    mean = np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)
    how = f"{named.how}; mean over queries that have it"
    return NamedArray(mean, ("head",), how, missing=count == 0)


def max_of(named: NamedArray) -> NamedArray:
    """Return the largest value over all queries, (H,).

    NaN if one of them is NaN; marked as missing if all are -inf, or there are none.
    """
    there = np.where(find_missing(named), -np.inf, to_float64(named))
    top = there.max(1, initial=-np.inf)
    nothing = top == -np.inf
    top = np.where(nothing, np.nan, top)
    return NamedArray(top, ("head",), f"{named.how}; max over queries", missing=nothing)
