"""A formula as a picture for a notebook: its first cells, for a few heads.

    show_formula(causal() & window(3))      the expression, and 16 × 16 cells of it

Data that covers fewer cells (padding, ids, an array) limits the picture.

Next: patterns.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.arrays import to_numpy
from regard.display import write_line, write_pictures
from regard.masks.free_axes import AXES, find_axes, find_lead

N, MOST = 16, 48  # tokens of a formula without data, and of data
HEADS = 4  # pictures


def show_formula(formula: Any) -> str:
    """Return the HTML of a mask or a bias."""
    text = write_line(repr(formula), strong=True)
    try:
        return text + draw_heads(formula)
    except Exception:  # noqa: BLE001 (a function of the user, or data without cells)
        return text


def draw_heads(formula: Any) -> str:
    """Return pictures of the cells of some heads, with what they show."""
    shape, start = find_part(formula)
    cells = to_numpy(formula.dense(shape, q_start=start))[0]
    heads, rows, keys = cells.shape
    truth = cells.dtype == bool
    alike = heads > 1 and bool((cells == cells[:1]).all())
    shown = cells[: 1 if alike else HEADS]
    names = [f"head {h}" if len(shown) > 1 else "" for h in range(len(shown))]
    pictures = zip(names, map(shade_cells, shown), strict=True)
    what = f"queries {start} to {start + rows - 1} down, keys 0 to {keys - 1} across"
    finite = cells[np.isfinite(cells)] if not truth else cells
    low, high = (finite.min(), finite.max()) if finite.size else (0, 0)
    meaning = (
        "blue: may attend"
        if truth
        else f"blue from {low + 0.0:.3g} (faint) to {high + 0.0:.3g} (full)"
    )
    more = "" if alike or len(shown) == heads else f"; {len(shown)} of {heads} heads"
    more += f"; batch 0 of {shape[0]}" if shape[0] > 1 else ""
    more += "".join(f"; {x}" for x in list_unknown(formula, shape))
    return write_pictures(pictures, cell=6) + write_line(f"{what}; {meaning}{more}")


def find_part(formula: Any) -> tuple[tuple[int, int, int, int], int]:
    """Return the cells that are drawn, (B, H, Nq, Nk), and where the queries start."""
    known = [node.extent for node in formula.walk()]
    batch, heads = (1, 1, *find_lead(formula))[-2:]
    ranges = [x.q for x in known if x.q is not None]
    start = max((first for first, _ in ranges), default=0)
    ends = [end - start for _, end in ranges]
    keys = [x.k for x in known if x.k is not None]
    n = MOST if ends or keys else N
    return (batch, heads, min([n, *ends]), min([n, *keys])), start


def pick_head(formula: Any, n: int) -> tuple[Any, str]:
    """Return the cells of the last head over n tokens, and what they do not show."""
    heads = (1, *find_lead(formula))[-1]
    cells = to_numpy(formula.dense((1, heads, n, n)))[0]
    known = [f"head {heads - 1} of {heads}"] if (cells != cells[-1]).any() else []
    return cells[-1], "; ".join(known + list_unknown(formula, (1, heads)))


def list_unknown(formula: Any, shape: tuple[int, ...]) -> list[str]:
    """Return what a picture lacks if a function differs by an axis of unknown size."""
    axes, sizes = find_axes(formula, np.empty(0)), zip(AXES, shape, strict=False)
    return [f"{axis} 0 only" for axis, n in sizes if axis in axes and n == 1]


def shade_cells(cells: Any) -> Any:
    """Return cells as opacity: what is allowed, or the bias from low to high."""
    if cells.dtype == bool:
        return cells * 0.85
    finite = np.isfinite(cells)
    low, high = (cells[finite].min(), cells[finite].max()) if finite.any() else (0, 0)
    level = (np.where(finite, cells, low) - low) / (high - low or 1)
    return np.where(finite, 0.1 + 0.9 * level, 0)
