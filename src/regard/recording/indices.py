"""Indices of rows, keys, heads, layers and sequences, read as NumPy reads them.

    5, -1, numpy.int64(5)        one of them; its axis is left out of the result
    slice(2, 8), slice(None, None, -1)
    [0, 3], range(4), an array   these, in this order
    [True, False, …]             those that are True, one entry for each of n
    None, ...                    all

An index that is out of range, or of another type, raises an OptionError that names the
valid range: some array libraries clamp or wrap it silently.

Next: memory.py
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np

from regard.arrays import Array, is_array, to_numpy
from regard.definition.contract import ALL
from regard.errors import OptionError

Index = Any  # an int, a slice, a list or an array of integers or of booleans
Found = int | slice | np.ndarray[Any, Any]


def read_index(index: Index, n: int, what: str) -> Found:
    """Return an index into n entries as an int from 0, a slice, or an integer array.

    what: the name of one entry, for messages: "row", "head", "layer"
    """
    if isinstance(index, slice):
        return index if (index.step or 1) > 0 else np.arange(n)[index]  # torch cannot
    if index is None or index is Ellipsis:
        return ALL
    number = read_whole(index)
    if number is not None:
        check_indices(np.asarray(number), n, what)
        return number % n
    return read_list(index, n, what)


def read_whole(index: Index) -> int | None:
    """Return a single integer of any library as an int, None for anything else."""
    several = is_array(index) and index.ndim > 0  # torch reads [3] as the number 3
    if several or isinstance(index, bool | np.bool_):
        return None
    try:
        return operator.index(index)
    except TypeError:
        return None


def read_list(index: Index, n: int, what: str) -> np.ndarray[Any, Any]:
    """Return several integers, or one boolean for each of n, as an integer array."""
    try:
        whole = index if is_array(index) else np.asarray(list(index))
        found = to_numpy(whole)
    except (TypeError, ValueError):  # not a list, or one of unequal lists
        raise OptionError(
            f"{what} {index!r}, expected {describe_range(n)}, a slice, or a list or "
            "array of these numbers."
        ) from None
    if found.ndim == 1 and found.dtype == bool:
        if len(found) != n:
            raise OptionError(
                f"{len(found)} booleans for {what}s, expected one for each of {n}."
            )
        return np.flatnonzero(found)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise OptionError(
            f"{what}s {found.dtype} of shape {found.shape}, expected a list of "
            f"integers, {describe_range(n)}."
        )
    found = found.astype(np.intp)
    check_indices(found, n, what)
    return np.where(found < 0, found + n, found)


def check_indices(found: np.ndarray[Any, Any], n: int, what: str) -> None:
    """Raise OptionError for the first integer that is not an index into n entries."""
    wrong = found[(found < -n) | (found >= n)]
    if wrong.size:
        raise OptionError(
            f"there is no {what} {wrong.flat[0]}, expected {describe_range(n)}."
        )


def describe_range(n: int) -> str:
    """Return the valid indices into n entries as text.

    >>> describe_range(4), describe_range(1)
    ('0 to 3 or -4 to -1', '0 or -1')
    """
    if n < 2:
        return "0 or -1" if n else "nothing: there are none"
    return f"0 to {n - 1} or -{n} to -1"


class Selection(NamedTuple):
    """The rows, keys and heads of a part of a record.

    A single row or key is a slice here, and its axis is removed at the end; a single
    head is an int, so that the other arrays lose their axis at once.
    """

    rows: slice | np.ndarray[Any, Any]
    keys: slice | np.ndarray[Any, Any]
    heads: Found
    one_row: bool
    one_key: bool

    def count(self, shape: tuple[int, int, int]) -> int:
        """Return the number of cells of a record of shape (H, Nq, Nk)."""
        whole = zip((self.heads, self.rows, self.keys), shape, strict=True)
        return int(np.prod([np.arange(n)[x].size for x, n in whole]))

    def squeeze(self, x: Array) -> Array:
        """Return (..., rows, keys) without the axes of a single row and key."""
        if x is None:
            return None
        x = x[..., 0] if self.one_key else x
        row = (..., 0) if self.one_key else (..., 0, ALL)
        return x[row] if self.one_row else x


def read_selection(
    shape: tuple[int, int, int], rows: Index, keys: Index, heads: Index
) -> Selection:
    """Return a part of a record of shape (H, Nq, Nk)."""
    at_rows, at_keys, at_heads = (
        read_index(rows, shape[1], "row"),
        read_index(keys, shape[2], "key"),
        read_index(heads, shape[0], "head"),
    )
    one_row, one_key = isinstance(at_rows, int), isinstance(at_keys, int)
    return Selection(widen(at_rows), widen(at_keys), at_heads, one_row, one_key)


def widen(found: Found) -> slice | np.ndarray[Any, Any]:
    """Return a single number as a slice."""
    return slice(found, found + 1) if isinstance(found, int) else found
