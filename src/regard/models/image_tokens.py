"""Which tokens of an image-text model stand for which patches of its pictures.

    find_patches(config, inputs, tokens)  ─▶  pixels, grid and tokens of each picture

    family                          a picture has
    LLaVA, PaliGemma                (image size / patch size)² tokens, row by row
    Gemma 3, InternVL               fewer: neighbouring patches are pooled or merged
    Idefics 3, SmolVLM              the same for each tile of the picture
    Qwen2-VL, Qwen2.5-VL, Qwen3-VL  image_grid_thw / spatial_merge_size, row by row

The pixels are those that the model was given, resized and cropped by its processor: a
patch of the photograph itself would be elsewhere. Of other families the order of the
tokens is not known, and nothing is guessed: ShapeError says why.

Next: read.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.arrays import to_numpy
from regard.errors import ShapeError

SQUARE = {"llava", "paligemma", "gemma3", "internvl", "idefics3", "smolvlm"}
GRID = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}
TILE = re.compile(r"<row_(\d+)_col_(\d+)>")  # before a tile of Idefics 3 and SmolVLM

Pixels = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PatchImage:
    """A picture, or a tile of one, and the token of each of its patches."""

    pixels: Pixels  # (H, W, 3), as the model was given them
    grid: tuple[int, int]
    sequence: int = 0
    tokens: tuple[int, ...] = ()  # positions, row by row


def find_patches(
    config: Any,
    inputs: Mapping[str, Any],
    tokens: Sequence[Sequence[int]],
    texts: Sequence[Sequence[str]] = (),
) -> list[PatchImage]:
    """Return the pictures of some sequences, with the token of each patch.

    config: of the model
    inputs: what the model was called with
    tokens: the tokens of each sequence, without padding
    texts: of each token; with them, the tiles of a picture are joined
    """
    images = cut_images(config, inputs)
    wanted = getattr(config, "image_token_id", None)
    places = [
        (sequence, at)
        for sequence, ids in enumerate(tokens)
        for at, token in enumerate(ids)
        if token == wanted
    ]
    count = sum(math.prod(x.grid) for x in images)
    if count != len(places):
        raise ShapeError(
            f"{len(places)} image tokens, but the pictures have {count} patches."
        )
    found = []
    for image in images:
        mine, places = places[: math.prod(image.grid)], places[math.prod(image.grid) :]
        (sequence, first), last = mine[0], mine[-1]
        if last != (sequence, first + len(mine) - 1):
            raise ShapeError("the tokens of a picture are interrupted by others.")
        found.append(
            replace(image, sequence=sequence, tokens=tuple(at for _, at in mine))
        )
    return join_tiles(found, texts)


def cut_images(config: Any, inputs: Mapping[str, Any]) -> list[PatchImage]:
    """Return the pictures of a call, in the order of their tokens."""
    kind = getattr(config, "model_type", type(config).__name__)
    if kind not in SQUARE | GRID or "pixel_values" not in inputs:
        raise ShapeError(f"which token of a {kind} is which patch is not known.")
    pixels = to_numpy(inputs["pixel_values"]).astype(np.float64)
    if kind in GRID:
        return cut_merged(config, pixels, to_numpy(inputs["image_grid_thw"]))
    side, size = measure_side(config, kind)
    if pixels.shape[-2:] != (size, size):
        raise ShapeError(
            f"pixel_values of shape {pixels.shape}, expected pictures of {size} × "
            f"{size}: which token of it is which patch is not known."
        )
    pixels = pixels.reshape(-1, *pixels.shape[-3:])
    if kind in ("idefics3", "smolvlm"):
        pixels = pixels[pixels.any((1, 2, 3))]  # black ones fill up a batch
    return [PatchImage(np.moveaxis(x, 0, -1), (side, side)) for x in pixels]


def measure_side(config: Any, kind: str) -> tuple[int, int]:
    """Return the tokens and the pixels per side of a square picture."""
    vision = config.vision_config
    size, patch = (
        x[0] if isinstance(x, list | tuple) else x
        for x in (vision.image_size, vision.patch_size)
    )
    side = size // patch
    if kind == "gemma3":
        side = math.isqrt(config.mm_tokens_per_image)
    elif kind == "internvl":
        side = int(side * config.downsample_ratio)
    elif kind in ("idefics3", "smolvlm"):
        side //= config.scale_factor
    return side, size


def cut_merged(config: Any, pixels: Pixels, grids: NDArray[Any]) -> list[PatchImage]:
    """Return the pictures of a Qwen-VL from their patches, (patches, C · T · p · p).

    A row of patches is ordered by (rows / m, columns / m, m, m), m: the merge size.
    """
    vision, found, start = config.vision_config, [], 0
    merge, side = vision.spatial_merge_size, vision.patch_size
    for frames, rows, columns in grids.tolist():
        if frames != 1:
            raise ShapeError(f"a video of {frames} frames, expected a picture.")
        part = pixels[start : start + rows * columns]
        start += rows * columns
        shape = rows // merge, columns // merge
        patches = part.reshape(*shape, merge, merge, 3, -1, side, side)[..., 0, :, :]
        image = patches.transpose(0, 2, 5, 1, 3, 6, 4)
        found.append(PatchImage(image.reshape(rows * side, columns * side, 3), shape))
    return found


def join_tiles(
    found: list[PatchImage], texts: Sequence[Sequence[str]]
) -> list[PatchImage]:
    """Return pictures in which tiles with a name, row by row, are one picture."""
    joined: list[PatchImage] = []
    tiles: list[list[PatchImage]] = []
    for image in found:
        known = texts[image.sequence] if image.sequence < len(texts) else ()
        before = known[image.tokens[0] - 1] if known and image.tokens[0] else ""
        name = TILE.fullmatch(before)
        place = (int(name[1]), int(name[2])) if name else None
        if tiles and place == (len(tiles) + 1, 1):
            tiles.append([image])
        elif tiles and place == (len(tiles), len(tiles[-1]) + 1):
            tiles[-1].append(image)
        else:
            joined += join_grid(tiles)
            tiles = [[image]] if place == (1, 1) else []
            joined += [] if tiles else [image]
    return joined + join_grid(tiles)


def join_grid(tiles: list[list[PatchImage]]) -> list[PatchImage]:
    """Return one picture of complete rows of tiles; the tiles themselves otherwise."""
    if len({len(row) for row in tiles}) != 1:
        return [tile for row in tiles for tile in row]
    first, rows, columns = tiles[0][0], len(tiles), len(tiles[0])
    pixels = np.concatenate([np.concatenate([x.pixels for x in r], 1) for r in tiles])
    at = [[np.reshape(x.tokens, x.grid) for x in row] for row in tiles]
    grid = rows * first.grid[0], columns * first.grid[1]
    tokens = tuple(np.block(at).ravel().tolist())
    return [PatchImage(pixels, grid, first.sequence, tokens)]
