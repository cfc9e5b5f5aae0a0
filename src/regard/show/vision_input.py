"""The pictures that a model read, and the token of each of their patches.

    seen.picture(pixels[0])        a vision model: the map is laid over the picture

    key 0 … special - 1            a class token, registers
    key special + i * columns + j  the patch in row i, column j

    seen.picture(pixels[0], grid=(24, 24), tokens=range(5, 581))
                                   an image-text model: beside the text, the token
                                   tokens[i * columns + j] is the patch (i, j)

Next: patch_overlay.py
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np

from regard.arrays import is_array, to_numpy
from regard.errors import OptionError, ShapeError
from regard.recording.record import Record, Recording
from regard.show.layer_kinds import VISION
from regard.show.palette import Numbers

FEW = 8  # most special tokens if no grid is given
SIDE = 256  # most pixels per side of a picture in a map


def add_picture(
    recording: Recording,
    picture: Any,
    *,
    grid: tuple[int, int] | None,
    tokens: Any,
    sequence: int,
) -> Recording:
    """Return a recording with a picture: of a vision model, or beside a text."""
    known = recording.tokens[sequence] if sequence < len(recording.tokens) else ()
    if tokens is not None or known:
        if tokens is None or grid is None:
            raise OptionError(
                "the model also reads text: which of its tokens are the patches? Write "
                "picture(…, grid=(rows, columns), tokens=ids[0] == "
                "model.config.image_token_id)."
            )
        note = note_image(picture, grid, tokens, sequence=sequence, count=len(known))
        return replace(recording, notes=add_image(recording, note))
    note = note_picture(recording.layer(0, sequence=sequence), picture, grid)
    pictures = recording.notes.get("pictures", {}) | {str(sequence): note}
    texts = [*recording.texts, *[()] * (sequence + 1 - len(recording.texts))]
    texts[sequence] = tuple(name_patches(note))
    notes = recording.notes | {"pictures": pictures}
    return replace(recording, notes=notes, texts=tuple(texts))


def note_picture(
    record: Record, picture: Any, grid: tuple[int, int] | None
) -> dict[str, Any]:
    """Return a picture and its grid, ready for JSON."""
    rows, columns, special = find_grid(record, grid)
    return {"rows": rows, "columns": columns, "special": special} | pack_picture(
        picture
    )


def pack_picture(picture: Any) -> dict[str, Any]:
    """Return the pixels of a picture, at most SIDE per side, ready for JSON."""
    image = read_picture(picture)
    step = -(-max(image.shape[:2]) // SIDE)
    small = np.rint(image[::step, ::step] * 255).astype(np.uint8)
    rgb = base64.b64encode(small.tobytes()).decode()
    return {"height": small.shape[0], "width": small.shape[1], "rgb": rgb}


def note_image(
    picture: Any, grid: tuple[int, int], tokens: Any, *, sequence: int, count: int
) -> dict[str, Any]:
    """Return a picture in a text and the token of each patch, ready for JSON.

    tokens: positions, row by row, or a bool for each of the `count` tokens
    """
    at = to_numpy(tokens) if is_array(tokens) else np.asarray(tokens)
    at = np.flatnonzero(at) if at.dtype == bool else at
    known = at.ndim == 1 and at.dtype.kind in "ui" and at.size == math.prod(grid)
    if not known or min(grid) < 1:
        raise ShapeError(
            f"tokens= has {at.size} positions for grid={grid}, expected one for each "
            f"of its {math.prod(grid)} patches, row by row."
        )
    if len(set(at.tolist())) != at.size or at.min() < 0 or at.max() >= count:
        raise OptionError(
            f"tokens= has positions from {at.min()} to {at.max()}, expected each once, "
            f"from 0 to {count - 1}."
        )
    rows, columns = map(int, grid)
    about = {"sequence": sequence, "rows": rows, "columns": columns}
    return about | {"tokens": at.tolist()} | pack_picture(picture)


def add_image(recording: Recording, note: dict[str, Any]) -> dict[str, Any]:
    """Return the notes of a recording with one more picture beside its text.

    Layers of a vision tower do not read the text: their patches are no words.
    """
    towers = [x.name for x in recording.records if VISION.search(x.name)]
    others = [*recording.notes.get("decoders", ()), *towers]
    images = [*recording.notes.get("images", ()), note]
    return recording.notes | {
        "images": images,
        "decoders": list(dict.fromkeys(others)),
    }


def find_images(recording: Recording) -> list[dict[str, Any]]:
    """Return the pictures beside texts that fit them; a file is untrusted."""
    given = recording.notes.get("images")
    counts = [
        max(len(x), len(y))
        for x, y in zip_longest(recording.tokens, recording.texts, fillvalue=())
    ]
    found = []
    for note in given if isinstance(given, list) else ():
        match note:
            case {
                "sequence": int(sequence),
                "rows": int(rows),
                "columns": int(columns),
                "tokens": list(tokens),
                "height": int(height),
                "width": int(width),
                "rgb": str(rgb),
            } if min(rows, columns, height, width) > 0 <= sequence:
                n = counts[sequence] if sequence < len(counts) else 0
                inside = all(isinstance(x, int) and 0 <= x < n for x in tokens)
                whole = len(set(tokens)) == len(tokens) == rows * columns
                if inside and whole and len(rgb) == 4 * height * width:
                    found.append(note)
    return found


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


def name_image_tokens(
    texts: Sequence[str], sequence: int, images: Sequence[dict[str, Any]]
) -> list[str]:
    """Return the texts of a sequence, in which a token of a picture has its place."""
    named = list(texts)
    here = [x for x in images if x["sequence"] == sequence] if named else []
    for n, note in enumerate(here, start=1):
        what = "patch" if len(here) == 1 else f"picture{n}"
        for i, at in enumerate(note["tokens"]):
            row, column = divmod(i, note["columns"])
            named[at] = f"{what}({row},{column})"
    return named


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
