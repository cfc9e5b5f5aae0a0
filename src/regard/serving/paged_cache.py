"""Read keys back from a paged cache, through the block table of a request.

    position p   ->   block table[p // S], row p % S       blocks of S tokens

A prefix that several requests share is computed once. A later request brings only the
rest of its rows, and the keys before them are in the cache. Each kernel has its own
layout of a block. The layout is not guessed: the rows that a step has just written are
read back in every known layout, and only one that gives exactly these rows is used.

Next: vllm_layers.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# cache, heads, D -> (blocks, S, heads, D)
Arrange = Callable[[Tensor, int, int], Tensor]


def split_last(cache: Tensor, heads: int, width: int) -> Tensor:
    """Arrange (blocks, heads, S, 2 D): key and value of a token side by side."""
    _, h, _, both = read_cache_shape(cache, 4)
    require(h == heads and both == 2 * width)
    return cache[..., :width].permute(0, 2, 1, 3)


def split_halves(cache: Tensor, heads: int, width: int) -> Tensor:
    """Arrange (blocks, heads, 2, S, D): the keys of a block, then its values."""
    return split_block(cache, heads, width).unflatten(-1, (-1, width)).transpose(1, 2)


def split_columns(cache: Tensor, heads: int, width: int) -> Tensor:
    """Arrange (blocks, heads, 2, D, S): the keys of a block as columns."""
    half = split_block(cache, heads, width)
    return half.unflatten(-1, (width, -1)).permute(0, 3, 1, 2)


def split_tiles(cache: Tensor, heads: int, width: int) -> Tensor:
    """Arrange (blocks, heads, 2, S / 16, D / 2, 16, 2): tiles of 16 tokens."""
    half = split_block(cache, heads, width)
    tiles = half.unflatten(-1, (-1, width // 2, 16, 2))  # (…, tile, pair, token, 2)
    tiles = tiles.permute(0, 2, 4, 1, 3, 5)
    return tiles.flatten(4).flatten(1, 2)


def split_pairs(cache: Tensor, heads: int, width: int) -> Tensor:
    """Arrange (2, blocks, S, heads, D)."""
    two, _, _, h, d = read_cache_shape(cache, 5)
    require((two, h, d) == (2, heads, width))
    return cache[0]


def split_inner_pairs(cache: Tensor, heads: int, width: int) -> Tensor:
    """Arrange (blocks, 2, S, heads, D)."""
    _, two, _, h, d = read_cache_shape(cache, 5)
    require((two, h, d) == (2, heads, width))
    return cache[:, 0]


ARRANGEMENTS: tuple[Arrange, ...] = (
    split_last,
    split_halves,
    split_columns,
    split_tiles,
    split_pairs,
    split_inner_pairs,
)


def read_cache_shape(cache: Tensor, ndim: int) -> tuple[int, ...]:
    """Return the shape of a cache; ValueError if it has another number of axes."""
    require(cache.ndim == ndim)
    return tuple(cache.shape)


def require(fits: bool) -> None:  # noqa: FBT001
    """Raise ValueError if a cache is not arranged in a certain way."""
    if not fits:
        raise ValueError("another arrangement")


def split_block(cache: Tensor, heads: int, width: int) -> Tensor:
    """Return the first half of each block, (blocks, heads, S D)."""
    _, h, size, both = read_cache_shape(cache, 4)
    require(h == heads and both == 2 * width)
    return cache.flatten(2)[..., : size * width]


def find_arrangement(cache: Tensor, slots: Tensor, keys: Tensor) -> Arrange | None:
    """Return how a cache is arranged, None if in no known way.

    slots: (n,), where the keys (n, heads, D) were written
    """
    _, heads, width = keys.shape
    for arrange in ARRANGEMENTS:
        try:
            blocks = arrange(cache, heads, width)
            size = blocks.shape[1]
            if torch.equal(blocks[slots // size, slots % size], keys):
                return arrange
        except (ValueError, RuntimeError, IndexError):  # of another shape
            continue
    return None


def read_keys(
    cache: Tensor, arrange: Arrange, table: Sequence[int], keys: Tensor, end: int
) -> tuple[int, Tensor]:
    """Return the keys of positions first … end - 1, and first.

    table: the blocks of the request; block 0 holds nothing, and stands for blocks that
        a sliding window has left behind
    keys: some keys of the layer, (n, heads, D), for their shape
    """
    blocks = arrange(cache, *keys.shape[1:])
    size = blocks.shape[1]
    used = list(table[: -(-end // size)])
    empty = max((i + 1 for i, block in enumerate(used) if block == 0), default=0)
    found = blocks[torch.tensor(used[empty:], device=cache.device)]
    first = empty * size
    return first, found.flatten(0, 1)[: end - first].clone()
