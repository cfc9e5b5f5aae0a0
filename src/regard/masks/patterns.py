"""The masks people use, each one line on top of the primitives.

    causal()             k <= q                     language models
    window(4095)         q - 4095 <= k <= q         local attention
    padding(lengths=n)   k < n[b]                   batches of unequal texts
    same(ids)            ids[q] == ids[k]           packed documents
    causal() & window(4095) & same(ids)             all of it

Next: biases.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from operator import index
from typing import Any

import numpy as np

from regard.arrays import Array, holds, is_array, namespace, to_numpy
from regard.errors import MaskError
from regard.masks.algebra import Mask, PerHead
from regard.masks.formula import read_start
from regard.masks.primitives import Band, Given, Keys, Same, Valid, Where

BATCHED = ("B", "H", "Nq", "Nk")
ARRAYS = (BATCHED, BATCHED[1:], BATCHED[2:])
KINDS = {"bool": "True and False", "integral": "integers", "numeric": "numbers"}


def everything() -> Mask:
    """Every query sees every key."""
    return Band(None, None)


def causal() -> Mask:
    """A query sees itself and what came before it."""
    return Band(0, None)


def window(left: int | None, right: int | None = 0) -> Mask:
    """A query sees itself, `left` others before it and `right` others after it.

    None is: all of them, so window(None) is causal().
    """
    try:
        left, right = (None if n is None else index(n) for n in (left, right))
    except TypeError:
        raise MaskError(
            f"window({left}, {right}): both count other tokens, expected whole numbers "
            "or None. Write window(2) for two others before it."
        ) from None
    if min(left or 0, right or 0) < 0:
        raise MaskError(
            f"window({left}, {right}): both count other tokens, so neither is below 0. "
            "Write window(0) for only itself."
        )
    return Band(None if right is None else -right, left)


def last(n: int) -> Mask:
    """A query sees the last n tokens, itself among them: window(n - 1)."""
    if not isinstance(n, Integral) or n < 1:
        raise MaskError(
            f"last({n}), expected a whole number. A query is among its last tokens: "
            "write last(1) for itself alone."
        )
    return window(n - 1)


def keys(lo: int | Array, hi: int | Array) -> Mask:
    """Every query sees the keys lo, …, hi - 1; bounds may differ by batch."""
    bounds = [read_bound(lo, "lo"), read_bound(hi, "hi")]
    sizes = {x.shape[0] for x in bounds if is_array(x)}
    if len(sizes) > 1:
        raise MaskError(
            f"keys() has {bounds[0].shape[0]} bounds lo and {bounds[1].shape[0]} hi, "
            "expected one of each for every batch. Write a number for what is the same "
            "in all of them."
        )
    return Keys(*bounds)


def prefix(n: int | Array) -> Mask:
    """Causal, but the first n tokens are seen by all; n may differ by batch."""
    return causal() | keys(0, n)


def padding(valid: Array | None = None, *, lengths: Array | None = None) -> Mask:
    """Keys are tokens where valid (B, Nk) is True, or where k < lengths (B,)."""
    if (valid is None) == (lengths is None):
        raise MaskError("padding() takes either valid (B, Nk) or lengths=(B,).")
    if valid is None:
        return keys(0, expect(lengths, "lengths", (("B",),), "integral"))
    return Valid(expect(valid, "valid", (("B", "Nk"),), "bool"))


def same(ids_q: Array, ids_k: Array | None = None) -> Mask:
    """A query sees the keys that carry its id; ids are (N,) or (B, N).

    With one array, ids[p] is the id of position p, for queries and keys alike. With
    two, queries and keys are counted apart, as in cross-attention.
    """
    given = (x for x in (ids_q, ids_k) if x is not None)
    both = [expect(x, "ids", (("N",), ("B", "N")), "integral") for x in given]
    rows = [x[0] if x.ndim == 2 and x.shape[0] == 1 else x for x in both]
    sizes = [x.shape[0] for x in rows if x.ndim == 2]
    if len(set(sizes)) > 1:
        raise MaskError(
            f"same() has ids of {sizes[0]} batches for queries and of {sizes[1]} for "
            "keys, expected as many. Write ids (N,) if they are the same for all."
        )
    return Same(rows[0], rows[1] if len(rows) == 2 else None)


def where(fn: Callable[[Array, Array, Array, Array], Array]) -> Mask:
    """A query sees what fn(b, h, q, k) allows; FlexAttention's mask_mod fits."""
    if not callable(fn):
        raise MaskError(
            f"where() takes a function fn(b, h, q, k), not {type(fn).__name__}. "
            "Write regard.masks.array(x) for an array."
        )
    return Where(fn)


def array(allowed: Array, *, q_start: int = 0) -> Mask:
    """Use an array (..., Nq, Nk), True = may attend; row 0 is query q_start."""
    x = expect(allowed, "array", ARRAYS, "bool")
    return Given(widen(x), read_row(q_start, "array", "mask"))


def per_head(masks: Sequence[Mask]) -> Mask:
    """Head h follows masks[h]."""
    masks = () if isinstance(masks, Mask) else tuple(masks)
    if not masks or not all(isinstance(mask, Mask) for mask in masks):
        raise MaskError("per_head() takes a list of masks, one for each head.")
    return PerHead(masks)


def expect(x: Any, name: str, axes: tuple[tuple[str, ...], ...], kind: str) -> Array:
    """Return x as an array, or say which axes and which kind of number it must have."""
    x = x if is_array(x) else np.asarray(x)
    if x.ndim not in map(len, axes) or not holds(x, kind):
        shapes = " or ".join(str(names).replace("'", "") for names in axes)
        raise MaskError(
            f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}, expected {shapes} "
            f"of {KINDS[kind]}."
        )
    return x


def read_bound(x: Any, name: str) -> Any:
    """Return a bound of keys: an int, or an array (B,)."""
    if isinstance(x, int):
        return x
    x = expect(x, name, ((), ("B",)), "integral")
    return x if x.ndim else to_numpy(x).item()


def read_row(q_start: Any, name: str, argument: str) -> int:
    """Return the position of the first row of an array, which is one number."""
    start = read_start(q_start)
    if is_array(start) and start.ndim:
        raise MaskError(
            f"{name}() starts at one position, not at {q_start}. Write {argument}=x "
            "instead: the rows of an array are the queries of the call."
        )
    return int(start)


def widen(x: Array) -> Array:
    """Return x (..., Nq, Nk) with four axes."""
    return namespace(x=x).reshape(x, (1,) * (4 - x.ndim) + tuple(x.shape))
