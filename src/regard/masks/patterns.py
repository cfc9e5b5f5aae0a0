"""The common masks, each a thin wrapper around the primitives.

    causal()             k <= q                     language models
    window(4095)         q - 4095 <= k <= q         local attention
    padding(lengths=n)   k < n[b]                   batches of unequal lengths
    same(ids)            ids[q] == ids[k]           packed documents
    causal() & window(4095) & same(ids)             a combination

Next: biases.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from operator import index
from typing import Any

import numpy as np

from regard.arguments import expect_function, suggest
from regard.arrays import Array, holds, is_array, namespace, to_numpy
from regard.errors import MaskError
from regard.masks.algebra import Mask, PerHead
from regard.masks.formula import read_start
from regard.masks.primitives import ArrayMask, Band, Keys, Same, Valid, Where

BATCHED = ("B", "H", "Nq", "Nk")
ARRAYS = (BATCHED, BATCHED[1:], BATCHED[2:])
KINDS = {"bool": "True and False", "integral": "integers", "numeric": "numbers"}


@suggest
def everything() -> Mask:
    """Return a mask that allows everything."""
    return Band(None, None)


@suggest
def causal() -> Mask:
    """Return the causal mask: a query attends to itself and to all earlier keys."""
    return Band(0, None)


@suggest
def window(left: int | None, right: int | None = 0) -> Mask:
    """Return a sliding window: itself, `left` keys before it and `right` after it.

    None means unlimited, so window(None) is causal().
    """
    try:
        left, right = (None if n is None else index(n) for n in (left, right))
    except TypeError:
        raise MaskError(
            f"window({left}, {right}): both count other tokens, expected integers or "
            "None. Write window(2) for the two tokens before it."
        ) from None
    if min(left or 0, right or 0) < 0:
        raise MaskError(
            f"window({left}, {right}): both count other tokens, expected at least 0. "
            "Write window(0) for the token itself only, None for no limit."
        )
    return Band(None if right is None else -right, left)


@suggest
def last(n: int) -> Mask:
    """Return a window over the last n tokens, including itself: window(n - 1)."""
    if not isinstance(n, Integral) or n < 1:
        raise MaskError(
            f"last({n}), expected an integer of at least 1: the count includes the "
            "query. Write last(1) for the token itself only."
        )
    return window(n - 1)


@suggest
def keys(lo: int | Array, hi: int | Array) -> Mask:
    """Return a mask of the keys lo, …, hi - 1; bounds may differ by batch."""
    bounds = [read_bound(lo, "lo"), read_bound(hi, "hi")]
    sizes = {x.shape[0] for x in bounds if is_array(x)}
    if len(sizes) > 1:
        raise MaskError(
            f"keys() got {bounds[0].shape[0]} values for lo and {bounds[1].shape[0]} "
            "for hi, expected one of each per batch. Write an integer for a bound that "
            "all batches share."
        )
    return Keys(*bounds)


@suggest
def prefix(n: int | Array) -> Mask:
    """Return a causal mask in which every query also attends to the first n keys."""
    return causal() | keys(0, n)


@suggest
def padding(valid: Array | None = None, *, lengths: Array | None = None) -> Mask:
    """Return a padding mask: valid (B, Nk) is True for tokens, or k < lengths (B,)."""
    if (valid is None) == (lengths is None):
        raise MaskError("padding() takes either valid (B, Nk) or lengths=(B,).")
    if valid is None:
        return keys(0, expect_array(lengths, "lengths", (("B",),), "integral"))
    return Valid(read_valid_keys(valid))


@suggest
def same(ids_q: Array, ids_k: Array | None = None) -> Mask:
    """Return a mask of the keys with the same id as the query; ids (N,) or (B, N).

    With one array, ids[p] is the id of position p, for queries and keys alike. With
    two, queries and keys are indexed separately, as in cross-attention.
    """
    given = (x for x in (ids_q, ids_k) if x is not None)
    both = [expect_array(x, "ids", (("N",), ("B", "N")), "integral") for x in given]
    rows = [x[0] if x.ndim == 2 and x.shape[0] == 1 else x for x in both]
    sizes = [x.shape[0] for x in rows if x.ndim == 2]
    if len(set(sizes)) > 1:
        raise MaskError(
            f"same() got ids for {sizes[0]} batches of queries and {sizes[1]} of keys, "
            "expected equal batch sizes. Write ids (N,) if all batches share them."
        )
    return Same(rows[0], rows[1] if len(rows) == 2 else None)


@suggest
def where(fn: Callable[[Array, Array, Array, Array], Array]) -> Mask:
    """Return a mask from fn(b, h, q, k), the signature of FlexAttention's mask_mod."""
    if not callable(fn):
        raise MaskError(
            f"where() takes a function fn(b, h, q, k), not {type(fn).__name__}. "
            "Write regard.masks.array(x) for an array."
        )
    expect_function("fn", fn, "b", "h", "q", "k")
    return Where(fn)


@suggest
def array(allowed: Array, *, q_start: int = 0) -> Mask:
    """Return an array (..., Nq, Nk), True = may attend, as a mask; row 0 is q_start."""
    x = expect_array(allowed, "array", ARRAYS, "bool")
    return ArrayMask(widen_axes(x), read_row(q_start, "array", "mask"))


@suggest
def per_head(masks: Sequence[Mask]) -> Mask:
    """Return a mask that uses masks[h] for head h."""
    masks = () if isinstance(masks, Mask) else tuple(masks)
    if not masks or not all(isinstance(mask, Mask) for mask in masks):
        raise MaskError("per_head() takes a list of masks, one for each head.")
    return PerHead(masks)


def expect_array(
    x: Any, name: str, axes: tuple[tuple[str, ...], ...], kind: str
) -> Array:
    """Return x as an array; raise MaskError if its axes or its dtype are wrong."""
    x = x if is_array(x) else np.asarray(x)
    if x.ndim not in map(len, axes) or not holds(x, kind):
        shapes = " or ".join(str(names).replace("'", "") for names in axes)
        zeros = kind == "bool" and holds(x, "numeric")
        hint = f" Write {name} != 0 if it is of zeros and ones." if zeros else ""
        raise MaskError(
            f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}, expected {shapes} "
            f"of {KINDS[kind]}.{hint}"
        )
    return x


def read_valid_keys(valid: Any) -> Array:
    """Return valid (B, Nk) as bool; zeros and ones are an attention_mask."""
    x = valid if is_array(valid) else np.asarray(valid)
    if x.ndim == 2 and holds(x, "integral"):
        values = to_numpy(x)
        if ((values == 0) | (values == 1)).all():
            return x != 0
    if x.ndim == 1:
        what = "lengths=lengths" if holds(x, "integral") else "valid[None]"
        raise MaskError(
            f"valid has shape {tuple(x.shape)} and dtype {x.dtype}, expected (B, Nk) "
            f"of True and False. Write padding({what})."
        )
    return expect_array(x, "valid", (("B", "Nk"),), "bool")


def read_bound(x: Any, name: str) -> Any:
    """Return a bound of keys: an int, or an array (B,)."""
    if isinstance(x, int):
        return x
    x = expect_array(x, name, ((), ("B",)), "integral")
    return x if x.ndim else to_numpy(x).item()


def read_row(q_start: Any, name: str, argument: str) -> int:
    """Return the position of the first row of an array as an int."""
    start = read_start(q_start)
    if is_array(start) and start.ndim:
        raise MaskError(
            f"{name}(q_start={q_start}), expected a single position. To use row i for "
            f"query i in every batch, pass the array itself: {argument}=x."
        )
    return int(start)


def widen_axes(x: Array) -> Array:
    """Return x (..., Nq, Nk) with four axes."""
    return namespace(x=x).reshape(x, (1,) * (4 - x.ndim) + tuple(x.shape))
