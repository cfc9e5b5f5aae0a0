"""Conversion between (B, H, N, D) and the layout of a function.

    arrange(x, "bnhd")     (B, N, H, D)         arrange(x, "bn(hd)")    (B, N, H·D)
    arrange(x, "nd")       (N, D), if B = H = 1

Next: subject.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.judge.inputs import CallFailedError, NotAskedError

ARRAYS, MASKS = "bhnd", "bhqk"
WORDS = {"b": "batches", "h": "heads", "q": "queries that differ"}


def arrange_axes(x: NDArray[Any], layout: str, axes: str = ARRAYS) -> NDArray[Any]:
    """Convert x, whose axes are named, to a layout."""
    letters = layout.replace("(", "").replace(")", "")
    gone = [a for a in axes if a not in letters]
    for axis in gone:
        if x.shape[axes.index(axis)] != 1:
            raise NotAskedError(
                f"it needs {WORDS[axis]}, for which {layout} has no axis"
            )
    turned = x.transpose([axes.index(a) for a in (*gone, *letters)])
    shape = list(turned.shape[len(gone) :])
    if "(" in layout:  # heads are concatenated along the last axis
        shape[-2:] = [shape[-2] * shape[-1]]
    return turned.reshape(shape)


def restore(
    x: NDArray[Any], layout: str, shape: tuple[int, ...], what: str = "out"
) -> NDArray[Any]:
    """Convert x from a layout to a shape (B, H, N, D); raise if it does not fit."""
    sizes = dict(zip(ARRAYS, shape, strict=True))
    letters = layout.replace("(", "").replace(")", "")
    apart = [sizes[a] for a in letters]
    together = apart
    if "(" in layout:
        together = [*apart[:-2], apart[-2] * apart[-1]]
    if list(x.shape) != together:
        raise CallFailedError(
            f"{what} has shape {x.shape}, expected {tuple(together)}, axes {layout}."
        )
    order = [letters.index(a) for a in ARRAYS if a in letters]
    return x.reshape(apart).transpose(order).reshape(shape)


def arrange_mask(
    x: NDArray[Any], axes: str, shape: tuple[int, int, int, int], *, narrow: bool
) -> NDArray[Any]:
    """Convert a mask (B or 1, H or 1, Nq or 1, Nk) to the axes of a function.

    narrow: axes of size 1 stay as they are, else they are broadcast
    """
    kept = [
        n if a in axes and not narrow else m
        for a, m, n in zip(MASKS, x.shape, shape, strict=True)
    ]
    return arrange_axes(np.array(np.broadcast_to(x, kept)), axes, MASKS)
