"""Multi-head and grouped-query layouts: split, join and multiply heads.

    split_heads      (..., N, H*D)  ->  (..., H, N, D); join_heads is its inverse
    multiply_heads   (..., H, N, A) times (..., Hk, A, M)  ->  (..., H, N, M)

With grouped queries, query head h uses key head h // (H / Hk). K is not copied: the
query rows of a group are concatenated and multiplied by their K in a single product.

Next: position.py
"""

from __future__ import annotations

from regard.arrays import Array, matmul, namespace
from regard.errors import ShapeError


def split_heads(x: Array, n_heads: int) -> Array:
    """Split the last axis (..., N, H*D) into heads: (..., H, N, D)."""
    xp = namespace(x=x)
    *lead, n, width = x.shape
    if width % n_heads:
        raise ShapeError(
            f"a width of {width} cannot be split into {n_heads} heads: "
            f"{width} is not a multiple of {n_heads}."
        )
    return swap(xp.reshape(x, (*lead, n, n_heads, width // n_heads)))


def join_heads(x: Array) -> Array:
    """Concatenate heads (..., H, N, D) into (..., N, H*D)."""
    xp = namespace(x=x)
    *lead, n_heads, n, width = x.shape
    return xp.reshape(swap(x), (*lead, n, n_heads * width))


def swap(x: Array) -> Array:
    """Swap the token axis and the head axis."""
    *lead, a, b, last = range(x.ndim)
    return namespace(x=x).permute_dims(x, (*lead, b, a, last))


def multiply_heads(x: Array, y: Array) -> Array:
    """Multiply x (..., H, N, A) by y (..., Hk, A, M), where heads share y in groups."""
    xp = namespace(x=x, y=y)
    n_heads, n_shared = (z.shape[-3] if z.ndim > 2 else 1 for z in (x, y))
    if n_heads == n_shared:
        return matmul(x, y)
    *lead, n_heads, n, width = x.shape
    group = n_heads // n_shared
    stacked = xp.reshape(x, (*lead, n_shared, group * n, width))
    product = matmul(stacked, y)  # (..., Hk, group * N, M)
    *lead, _, _, m = product.shape
    return xp.reshape(product, (*lead, n_heads, n, m))
