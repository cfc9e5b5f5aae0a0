"""Multi-head attention, written three times with the same numbers.

    listed    for each head: attention(x Wqᵀ, x Wkᵀ, x Wvᵀ), one after the other
    stacked   the same with a head axis: one product for all heads
    fused     one matrix for q, k and v of all heads, then split

The first is how it is explained, the last is how it runs. H heads of width d need not
give D = H d: the output matrix (D, H d) brings them back.

Next: layer.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from regard.arrays import Array, namespace
from regard.definition.attention import attention
from regard.definition.heads import join, split
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
    """Run the heads one after the other and put their results side by side."""
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
    """Run all heads at once along an axis of their own."""
    xp = namespace(x=x, q=q, k=k, v=v)
    x = xp.expand_dims(x, axis=-3)  # (..., 1, N, D)
    other = x if context is None else xp.expand_dims(context, axis=-3)
    q, k, v = (Linear(w)(y) for w, y in ((q, x), (k, other), (v, other)))
    return out(join(attention(q, k, v, mask).out))


def multi_head(
    x: Array,  # (..., N, D)
    qkv: Linear,  # ((H + 2 Hk) d, D): the rows of q, then of k, then of v
    out: Linear,  # (D, H d)
    *,
    heads: int,
    kv_heads: int | None = None,  # fewer heads of k and v, shared
    mask: Array | Mask | None = None,
    context: Array | None = None,  # (..., M, D): keys and values come from here
    prepare: Prepare | None = None,  # turns or norms q and k (..., H, N, d)
) -> Array:
    """Let every token of x gather from x, or from the context."""
    shared = kv_heads or heads
    d = qkv.weight.shape[0] // (heads + 2 * shared)
    ends = [0, heads * d, (heads + shared) * d, (heads + 2 * shared) * d]
    other = x if context is None else context
    q = split(qkv.rows(ends[0], ends[1])(x), heads)
    k = split(qkv.rows(ends[1], ends[2])(other), shared)
    v = split(qkv.rows(ends[2], ends[3])(other), shared)
    if prepare is not None:
        q, k = prepare(q, k)
    return out(join(attention(q, k, v, mask).out))


def fuse(heads: Sequence[Head]) -> Linear:
    """Return the one matrix that `multi_head` takes for these heads."""
    xp = namespace(x=heads[0][0].weight)
    kinds = [[head[i] for head in heads] for i in range(3)]
    parts = [linear for kind in kinds for linear in kind]
    weight = xp.concat([part.weight for part in parts], axis=0)
    if parts[0].bias is None:
        return Linear(weight)
    return Linear(weight, xp.concat([part.bias for part in parts], axis=0))
