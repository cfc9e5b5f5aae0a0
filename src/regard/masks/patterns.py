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
from typing import Any

from regard.arrays import Array, as_array, namespace
from regard.errors import MaskError
from regard.masks.algebra import Mask, PerHead
from regard.masks.primitives import Band, Given, Keys, Same, Valid, Where

BATCHED = ("B", "H", "Nq", "Nk")


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
    if min(left or 0, right or 0) < 0:
        raise MaskError(
            f"window({left}, {right}): both count other tokens, so neither is below 0. "
            "Write window(0) for only itself."
        )
    return Band(None if right is None else -right, left)


def last(n: int) -> Mask:
    """A query sees the last n tokens, itself among them: window(n - 1)."""
    if n < 1:
        raise MaskError(f"last({n}): a query is among its last tokens; write last(1).")
    return window(n - 1)


def keys(lo: int | Array, hi: int | Array) -> Mask:
    """Every query sees the keys lo, …, hi - 1; bounds may differ by batch."""
    return Keys(as_array(lo), as_array(hi))


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
    x = expect(allowed, "array", (BATCHED, BATCHED[1:], BATCHED[2:]), "bool")
    if not isinstance(q_start, int):
        raise MaskError(
            f"array() starts at one position, not at {q_start}. Write mask=x instead: "
            "the rows of an array are the queries of the call."
        )
    four = (1,) * (4 - x.ndim) + tuple(x.shape)
    return Given(namespace(array=x).reshape(x, four), q_start)


def per_head(masks: Sequence[Mask]) -> Mask:
    """Head h follows masks[h]."""
    if not masks or not all(isinstance(mask, Mask) for mask in masks):
        raise MaskError("per_head() takes a list of masks, one for each head.")
    return PerHead(tuple(masks))


def expect(x: Any, name: str, axes: tuple[tuple[str, ...], ...], kind: str) -> Array:
    """Return x as an array, or say which axes and which kind of number it must have."""
    x = as_array(x)
    if x.ndim not in map(len, axes) or not namespace(x=x).isdtype(x.dtype, kind):
        shapes = " or ".join(str(names).replace("'", "") for names in axes)
        raise MaskError(
            f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}, expected {shapes} "
            f"of {'True and False' if kind == 'bool' else 'integers'}."
        )
    return x
