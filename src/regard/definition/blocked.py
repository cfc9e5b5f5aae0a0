"""Blocked attention: the same result in memory linear in N, tile by tile.

Attention over a subset of the keys is a pair (out, lse). Pairs over disjoint subsets
merge into the pair over their union, in any order:

    lse = log sum_p exp(lse_p)
    out = sum_p exp(lse_p - lse) out_p

Each row of tiles is merged from left to right. Tiles that the mask proves empty are
skipped; tiles it proves full need no mask. A sink is merged like a tile: it has the
weight exp(sink) and no value.

Next: recording/record.py (fused kernels: engine/choose.py)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from regard.arrays import Array, accumulator, constant, is_array, namespace
from regard.errors import CallError, OptionError, ShapeError
from regard.masks.algebra import Mask
from regard.masks.patterns import everything
from regard.masks.tiles import EMPTY, FULL, prove_tiles

if TYPE_CHECKING:
    from regard.definition.contract import Call

Part = tuple[Array, Array]  # out (..., N, Dv) and lse (..., N)


def merge(*parts: Part) -> Part:
    """Merge (out, lse) pairs over disjoint keys into the pair over all of them.

    >>> import numpy as np, regard
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 6, 4))
    >>> left, right = (regard.attention(q, k[s], v[s]) for s in (slice(2), slice(2, 6)))
    >>> out, lse = regard.merge((left.out, left.lse), (right.out, right.lse))
    >>> np.allclose(out, regard.attention(q, k, v).out)
    True
    """
    if not parts:
        raise OptionError("merge() got no arguments, expected (out, lse) pairs.")
    (out, lse), *others = map(expect_part, parts)
    if any(x.shape[-2:] != out.shape[-2:] for x, _ in others):
        shapes = ", ".join(str(tuple(x.shape)) for x, _ in parts)
        raise ShapeError(
            f"merge() got out {shapes}, expected the same queries: parts are attention "
            "of the same q over different keys."
        )
    xp, dtype = namespace(out=out, lse=lse), out.dtype
    out = xp.astype(out, accumulator(xp, out), copy=False)
    for more_out, more_lse in others:
        top = xp.where(lse > more_lse, lse, more_lse)
        top = xp.where(top == -math.inf, constant(0, top), top)  # both are empty
        share, more_share = xp.exp(lse - top), xp.exp(more_lse - top)
        total = share + more_share
        empty = total == 0
        total = xp.where(empty, constant(1, total), total)
        kept, come = (x[..., None] / total[..., None] for x in (share, more_share))
        out = out * kept + more_out * come
        lse = xp.where(empty, constant(-math.inf, top), top + xp.log(total))
    return xp.astype(out, dtype, copy=False), lse


def expect_part(part: Any) -> Part:
    """Return (out, lse), or raise an error that says how `merge` is called."""
    if not isinstance(part, tuple) or len(part) != 2 or not all(map(is_array, part)):
        raise CallError(
            f"merge() got a {type(part).__name__}, expected pairs (out, lse). Write "
            "merge((a.out, a.lse), (b.out, b.lse)), or merge(*pairs) for a list."
        )
    out, lse = part
    if tuple(out.shape[:-1]) != tuple(lse.shape):
        raise ShapeError(
            f"merge() got out {tuple(out.shape)} with lse {tuple(lse.shape)}, expected "
            f"one lse per query: {tuple(out.shape[:-1])}."
        )
    return out, lse


def fold(attend: Callable[..., Any], call: Call, block: int | tuple[int, int]) -> Part:
    """Apply `attend` to each tile that is not proved empty, and merge the results."""
    formula = call.mask if isinstance(call.mask, Mask) else everything()
    tiles = prove_tiles(formula, call.shape, block=block, q_start=call.q_start)
    masked = replace(call, sink=None)  # the sink is added once, by `attend_nothing`
    unmasked = masked if is_array(call.mask) else replace(masked, mask=None)
    done = [attend_nothing(call, 0)]
    for rows, kinds in zip(tiles.rows, tiles.for_all(), strict=True):
        part = attend_nothing(call, rows.stop - rows.start)
        for keys, kind in zip(tiles.keys, kinds, strict=True):
            if kind != EMPTY:
                seen = attend(unmasked if kind == FULL else masked, rows, keys)
                part = merge(part, (seen.out, seen.lse))
        done.append(part)
    if not (tiles.for_all() != EMPTY).any():
        # no tile was computed, but autograd needs a graph with gradients of 0
        seen = attend(unmasked, slice(0, 0), slice(0, 1))
        done.append((seen.out, seen.lse))
    outs, lses = zip(*done, strict=True)
    out, lse = call.xp.concat(outs, axis=-2), call.xp.concat(lses, axis=-1)
    if call.sink is None:
        return out, lse
    # rows without any tile: a sink of +inf or NaN must give NaN there as well
    fine, nan = lse < math.inf, constant(math.nan, lse)
    return call.xp.where(fine[..., None], out, nan), call.xp.where(fine, lse, nan)


def attend_nothing(call: Call, n_rows: int) -> Part:
    """Return (out, lse) over no keys: zero, and the sink's logit or -inf."""
    lead = (*call.shape[:-2], n_rows)
    out = constant(0, call.q, (*lead, call.v.shape[-1]))
    if call.sink is None:
        return out, constant(-math.inf, call.q, lead)
    return out, call.xp.broadcast_to(call.sink, (*lead, 1))[..., 0]
