"""Yours / Specification / Difference: two answers as heatmaps in a terminal.

    print(draw_answers(found.difference, atol=1e-6))

All three share one scale. The difference is blank where the answers agree, so that even
small differences are visible. Small answers are also printed as numbers.

Next: grade_file.py
"""

from __future__ import annotations

import numpy as np

from regard.definition.steps import write_table
from regard.judge.difference import Difference
from regard.judge.inputs import Numbers
from regard.show.palette import LinearScale
from regard.show.terminal_map import draw_weights

SMALL = 6  # up to this many rows and columns are also printed as numbers
LARGE = 24  # maximum rows and columns that are drawn


def draw_answers(
    found: Difference, *, atol: float, color: bool = False, width: int = 80
) -> str:
    """Return heatmaps of both answers and of where they differ."""
    if found.yours is None or found.expected is None:
        return ""
    yours, expected = (x[:LARGE, :LARGE] for x in (found.yours, found.expected))
    apart = find_apart(yours, expected, atol)
    with np.errstate(invalid="ignore"):
        gap = np.abs(yours - expected)
    tops = [np.abs(x[np.isfinite(x)]).max(initial=0) for x in (yours, expected)]
    gap = np.where(apart, np.where(np.isfinite(gap), gap, max(tops)), 0)
    maps = {
        "Yours": (replace_nonfinite(yours), np.isfinite(yours)),
        "Specification": (replace_nonfinite(expected), np.isfinite(expected)),
        "Difference": (gap, apart),
    }
    drawn = draw_weights(maps, scale=fit_around_zero(maps), color=color, width=width)
    told = drawn.replace("masked", "nan, or equal")
    if max(yours.shape) > SMALL:
        return told
    return f"{told}\n\n{write_numbers({'Yours': yours, 'Specification': expected})}"


def replace_nonfinite(x: Numbers) -> Numbers:
    """Replace non-finite numbers by 0."""
    return np.nan_to_num(x, posinf=0, neginf=0)


def find_apart(yours: Numbers, expected: Numbers, atol: float) -> Numbers:
    """Return where two answers differ, as in regard.judge.difference."""
    room = atol * np.maximum(1, np.where(np.isfinite(expected), np.abs(expected), 1))
    with np.errstate(invalid="ignore"):
        near = np.abs(yours - expected) <= room
    return np.asarray(~(near | (yours == expected)))


def fit_around_zero(maps: dict[str, tuple[Numbers, Numbers]]) -> LinearScale:
    """Return a scale for all maps that includes 0."""
    values = np.concatenate([x.ravel() for x, _ in maps.values()])
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    return LinearScale(low, high if high > low else low + 1.0)


def write_numbers(answers: dict[str, Numbers]) -> str:
    """Return small answers as numbers, side by side."""
    blocks = []
    for title, x in answers.items():
        rows = [str(i) for i in range(len(x))]
        lines = [line[7:] for line in write_table(x, rows, ())]
        wide = max(map(len, [title, *lines]))
        blocks.append([text.ljust(wide) for text in (title, *lines)])
    return "\n".join("    ".join(parts).rstrip() for parts in zip(*blocks, strict=True))
