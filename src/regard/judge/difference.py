"""Compare results: find where two differ, with the smallest call that shows it.

    found = find_difference(mine, right, calls)      None if they agree on every call
    print(found.says)        "out[1, 0] is 0.5, expected 0.25 (3 of 12 numbers differ)."
    found.yours, found.expected                      2-d slices at the worst place

Results are arrays of any library, or tuples of them. This file needs only NumPy, so it
also grades the exercises in a browser.

Next: case.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.arrays import is_array, to_numpy
from regard.judge.inputs import CallFailedError, Numbers
from regard.judge.time_limit import call_within

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
TOLERANCE["tf32"] = TOLERANCE["float16"]  # as many bits


@dataclass(frozen=True, eq=False)
class Difference:
    """The largest deviation of a result from the expected one."""

    says: str
    yours: Numbers | None = None  # (rows, columns), at the worst place
    expected: Numbers | None = None
    arguments: Any = None  # of the call that shows it
    what: str = "out"
    call: Any = None  # the AttentionCall that shows it
    code: str = ""  # that repeats it

    @property
    def difference(self) -> Numbers | None:
        """Yours minus expected; NaN where either is NaN."""
        if self.yours is None or self.expected is None:
            return None
        with np.errstate(invalid="ignore"):
            apart = self.yours - self.expected
        return np.where(self.yours == self.expected, 0, apart)  # inf - inf


def compare_arrays(
    yours: Any, expected: Any, *, atol: float = 1e-9, what: str = "out"
) -> Difference | None:
    """Return where two arrays differ by more than atol · max(1, |expected|)."""
    x, y = (np.asarray(a, np.float64) for a in (yours, expected))
    if x.shape != y.shape:
        return Difference(f"{what} has shape {x.shape}, expected {y.shape}.", what=what)
    with np.errstate(invalid="ignore"):
        apart = np.abs(x - y)
        room = atol * np.maximum(1, np.where(np.isfinite(y), np.abs(y), 1))
    apart = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0, apart)
    wrong = ~(apart <= room)  # NaN is wrong
    if not wrong.any():
        return None
    apart = np.where(np.isnan(apart), np.inf, apart)
    at = np.unravel_index(int(np.argmax(np.where(wrong, apart, -1))), x.shape)
    place = f"[{', '.join(str(int(i)) for i in at)}]" if at else ""
    count = f" ({wrong.sum()} of {x.size} numbers differ)" if x.size > 1 else ""
    mine, right = write_apart(float(x[at]), float(y[at]))
    near = ""
    if apart[at] <= 0.01 * max(1, abs(y[at])):  # it could be rounding: how large is it?
        near = f", off by {apart[at]:.1e}, allowed {room[at]:.1e}" if room[at] else ""
    says = f"{what}{place} is {mine}, expected {right}{near}{count}."
    return Difference(says, select_map(x, at), select_map(y, at), what=what)


def write_apart(x: float, y: float) -> tuple[str, str]:
    """Format two different numbers with enough digits to tell them apart.

    >>> write_apart(1 / 3, 0.25), write_apart(1 - 1e-9, 1.0)
    (('0.333333', '0.25'), ('0.999999999', '1'))
    """
    pairs = ((f"{x:.{n}g}", f"{y:.{n}g}") for n in range(6, 18))
    return next((pair for pair in pairs if pair[0] != pair[1]), (repr(x), repr(y)))


def select_map(x: Numbers, at: Sequence[Any]) -> Numbers:
    """Return the 2-d slice (rows, columns) of x that contains an index."""
    return np.atleast_2d(x[tuple(at[:-2])] if x.ndim > 2 else x)


def find_difference(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    calls: Iterable[Sequence[Any]],
    *,
    atol: float = 1e-9,
    limit: float = 10,
) -> Difference | None:
    """Return how fn differs from a reference on the smallest failing call, or None.

    >>> found = find_difference(lambda x: x + x, lambda x: 3 * x, [(np.eye(2),)])
    >>> found.says
    'out[0, 0] is 2, expected 3 (2 of 4 numbers differ).'

    calls: positional arguments of each call; fn gets copies and must not modify them
    limit: seconds allowed for each call of fn
    """
    for arguments in sorted(calls, key=count_numbers):
        expected = list_parts(reference(*map(copy_array, arguments)))
        given = [copy_array(x) for x in arguments]
        try:
            yours = list_parts(call_within(limit, lambda given=given: fn(*given)))  # type: ignore[misc]
        except CallFailedError as trouble:
            return Difference(str(trouble), arguments=arguments)
        for i, (x, old) in enumerate(zip(given, arguments, strict=True)):
            if is_array(x) and not np.array_equal(
                to_array(x), to_array(old), equal_nan=True
            ):
                says = f"argument {i} is changed by the call, expected a copy."
                return Difference(says, arguments=arguments)
        found = compare_parts(yours, expected, atol)
        if found is not None:
            return replace(found, arguments=arguments)
    return None


def compare_parts(
    yours: Sequence[Any], expected: Sequence[Any], atol: float
) -> Difference | None:
    """Compare results part by part."""
    if len(yours) != len(expected):
        return Difference(f"it returned {len(yours)} values, expected {len(expected)}.")
    for i, (x, y) in enumerate(zip(yours, expected, strict=True)):
        what = "out" if len(expected) == 1 else f"part {i}"
        try:
            numbers = to_array(x).astype(np.float64)
        except (TypeError, ValueError):
            return Difference(
                f"{what} is a {type(x).__name__}, expected numbers.", what=what
            )
        found = compare_arrays(numbers, to_array(y), atol=atol, what=what)
        if found is not None:
            return found
    return None


def list_parts(found: Any) -> list[Any]:
    """Return a result as a list of its parts."""
    return list(found) if isinstance(found, tuple | list) else [found]


def count_numbers(arguments: Sequence[Any]) -> int:
    """Return the total number of elements in the arguments of a call."""
    return sum(int(np.prod(x.shape)) if is_array(x) else 1 for x in arguments)


def to_array(x: Any) -> NDArray[Any]:
    """Return x as a NumPy array."""
    return to_numpy(x) if is_array(x) else np.asarray(x)


def copy_array(x: Any) -> Any:
    """Return a copy of an array; return anything else unchanged."""
    if isinstance(x, np.ndarray):
        return x.copy()
    return x.clone() if is_array(x) and callable(getattr(x, "clone", None)) else x
