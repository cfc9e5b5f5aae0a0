"""Multi-head attention, implemented in three equivalent ways.

    listed    for each head: attention(x Wqᵀ, x Wkᵀ, x Wvᵀ), one after the other
    stacked   the same with a head axis: one product for all heads
    fused     one matrix for q, k and v of all heads, then split

The first is the easiest to explain, the last is the one used in practice. H d need not
equal D: the output matrix (D, H d) maps the heads back to D.

Next: layer.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from regard.arrays import Array, namespace
from regard.definition.attention import attention
from regard.definition.heads import join_heads, split_heads
from regard.masks.algebra import Mask
from regard.plain.linear import Linear

Head = tuple[Linear, Linear, Linear]  # of q, k and v, each (d, D)
Prepare = Callable[[Array, Array], tuple[Array, Array]]


def attend_listed(
    x: Array,  # (..., N, D)
    heads: Sequence[Head],
    out: Linear,
    *,
    mask: Array | Mask | None = None,
    context: Array | None = None,
) -> Array:
    """Compute the heads one after the other, and concatenate their results."""
    other = x if context is None else context
    done = [attention(q(x), k(other), v(other), mask).out for q, k, v in heads]
    return out(namespace(x=x).concat(done, axis=-1))


def attend_stacked(
    x: Array,  # (..., N, D)
    q: Array,  # (H, d, D), as k and v
    k: Array,
    v: Array,
    out: Linear,
    *,
    mask: Array | Mask | None = None,
    context: Array | None = None,
) -> Array:
    """Compute all heads at once, along a head axis."""
    xp = namespace(x=x, q=q, k=k, v=v)
    x = xp.expand_dims(x, axis=-3)  # (..., 1, N, D)
    other = x if context is None else xp.expand_dims(context, axis=-3)
    q, k, v = (Linear(w)(y) for w, y in ((q, x), (k, other), (v, other)))
    return out(join_heads(attention(q, k, v, mask).out))


def multi_head(
    x: Array,  # (..., N, D)
    qkv: Linear,  # ((H + 2 Hk) d, D): the rows of q, then of k, then of v
    out: Linear,  # (D, H d)
    *,
    heads: int,
    kv_heads: int | None = None,  # number of key and value heads; default: heads
    mask: Array | Mask | None = None,
    context: Array | None = None,  # (..., M, D): keys and values come from here
    prepare: Prepare | None = None,  # rotates or normalizes q and k (..., H, N, d)
) -> Array:
    """Compute self-attention over x, or cross-attention from x to the context."""
    shared = kv_heads or heads
    d = qkv.weight.shape[0] // (heads + 2 * shared)
    ends = [0, heads * d, (heads + shared) * d, (heads + 2 * shared) * d]
    other = x if context is None else context
    q = split_heads(qkv.rows(ends[0], ends[1])(x), heads)
    k = split_heads(qkv.rows(ends[1], ends[2])(other), shared)
    v = split_heads(qkv.rows(ends[2], ends[3])(other), shared)
    if prepare is not None:
        q, k = prepare(q, k)
    return out(join_heads(attention(q, k, v, mask).out))


def fuse(heads: Sequence[Head]) -> Linear:
    """Return the fused qkv matrix of these heads, as `multi_head` expects it."""
    xp = namespace(x=heads[0][0].weight)
    kinds = [[head[i] for head in heads] for i in range(3)]
    parts = [linear for kind in kinds for linear in kind]
    weight = xp.concat([part.weight for part in parts], axis=0)
    if parts[0].bias is None:
        return Linear(weight)
    return Linear(weight, xp.concat([part.bias for part in parts], axis=0))
