"""The input picture of a vision model, and its grid of patches.

    seen.picture(pixels[0])        the map of a pinned query is laid over the picture

    key 0 … special - 1            a class token, registers
    key special + i * columns + j  the patch in row i, column j

Next: patch_overlay.py
"""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np

from regard.arrays import is_array, to_numpy
from regard.errors import ShapeError
from regard.recording.record import Record, Recording
from regard.show.palette import Numbers

FEW = 8  # most special tokens if no grid is given
SIDE = 256  # most pixels per side of a picture in a map


def note_picture(
    record: Record, picture: Any, grid: tuple[int, int] | None
) -> dict[str, Any]:
    """Return a picture and its grid, ready for JSON."""
    rows, columns, special = find_grid(record, grid)
    image = read_picture(picture)
    step = -(-max(image.shape[:2]) // SIDE)
    small = np.rint(image[::step, ::step] * 255).astype(np.uint8)
    return {
        "rows": rows,
        "columns": columns,
        "special": special,
        "height": small.shape[0],
        "width": small.shape[1],
        "rgb": base64.b64encode(small.tobytes()).decode(),
    }


def find_pictures(recording: Recording) -> dict[str, dict[str, Any]]:
    """Return the pictures that fit their sequences; a file is untrusted."""
    given = recording.notes.get("pictures")
    sizes = {
        str(sequence): int(record.k.shape[1])
        for record, sequence in zip(recording.records, recording.sequences, strict=True)
    }
    found = {}
    for sequence, note in given.items() if isinstance(given, dict) else ():
        match note:
            case {
                "rows": int(rows),
                "columns": int(columns),
                "special": int(special),
                "height": int(height),
                "width": int(width),
                "rgb": str(rgb),
            } if min(rows, columns, height, width) > 0 <= special:
                whole = rows * columns + special == sizes.get(sequence)
                if whole and len(rgb) == 4 * height * width:
                    found[sequence] = note
    return found


def name_patches(note: dict[str, Any]) -> list[str]:
    """Return a name for each token of a picture."""
    cells = np.ndindex(note["rows"], note["columns"])
    special = [f"special {i}" for i in range(note["special"])]
    return special + [f"({i},{j})" for i, j in cells]


def find_grid(record: Record, grid: tuple[int, int] | None) -> tuple[int, int, int]:
    """Return the numbers of rows, columns and preceding special tokens."""
    n_keys = int(record.k.shape[1])
    rows, columns = (math.isqrt(n_keys),) * 2 if grid is None else grid
    special = n_keys - rows * columns
    if grid is None and special > FEW:
        raise ShapeError(
            f"{record.name} has {n_keys} keys, which is no square of patches and up to "
            f"{FEW} special tokens: write grid=(rows, columns)."
        )
    if min(rows, columns) < 1 or special < 0:
        raise ShapeError(
            f"grid=({rows}, {columns}) for the {n_keys} keys of {record.name}, "
            "expected at least one patch, and no more patches than keys."
        )
    return rows, columns, special


def read_picture(picture: Any) -> Numbers:
    """Return a picture as (H, W, 3), with values from 0 to 1."""
    x = to_numpy(picture) if is_array(picture) else np.asarray(picture)
    if x.ndim == 3 and x.shape[0] in (1, 3) and x.shape[-1] not in (1, 3):
        x = np.moveaxis(x, 0, -1)
    x = x[..., None] if x.ndim == 2 else x
    if x.ndim != 3 or x.shape[-1] not in (1, 3) or not x.size:
        raise ShapeError(
            f"a picture of shape {x.shape}, expected (H, W), (H, W, 3) or (3, H, W): "
            "write pixels[0] for the first of a batch."
        )
    whole = x.dtype.kind in "ui"
    x = x.astype(np.float64) / (255 if whole else 1)
    if x.min() < 0 or x.max() > 1:  # normalised for a model: rescale to 0 to 1
        x = (x - x.min()) / (np.ptp(x) or 1)
    return np.broadcast_to(x, (*x.shape[:2], 3))
