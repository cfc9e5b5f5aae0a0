"""The sum of a row of weights is 1: what rounding may make of it, and rows that fail.

    Σ_j exp(logits_ij - lse_i)   (+ exp(sink - lse_i))   = 1

What is shown of a record is compared with this, if lse is the model's: a whole row that
does not sum to 1, by more than rounding explains, is NaN, and a warning counts them.

Next: record.py
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from regard.arrays import Array, constant, namespace
from regard.definition.contract import ALL
from regard.recording.evidence import LseOrigin
from regard.recording.indices import Selection

# what a kernel loses in a row, besides the rounding of its products
FLOORS = {"float64": 1e-10, "float32": 2e-5}
HALF = 5e-4
PRODUCTS, ROUNDINGS = 4.0, 2.0  # last places lost by q · k, and by a rounded logit
FAR = 8.0  # how often its usual loss a shown row may be off


def blank_wrong_rows(record: Any, part: Selection, logits: Array, lse: Array) -> Array:
    """Return exp(logits - lse), with NaN in whole rows that do not sum to 1.

    record: a Record; lse: (…, R, 1), as the logits (…, R, Nk)
    """
    xp, zero = namespace(q=logits), constant(0, lse)
    blind = lse == -math.inf  # a row that sees no key
    weights = xp.exp(logits - xp.where(blind, zero, lse))
    whole = isinstance(part.keys, slice) and part.keys == ALL
    if not whole or record.origin is LseOrigin.RECORD:  # it proves nothing
        return weights
    total = xp.sum(weights, axis=-1, keepdims=True)
    if record.sink is not None:
        sink = record.sink[record.place(part.heads), ...][..., None, None]
        total = total + xp.exp(sink - xp.where(blind, zero, lse))
    sizes = xp.where(logits == -math.inf, constant(0, logits), xp.abs(logits))
    lost = (find_floor(record) + round_logits(record)) * xp.max(sizes, axis=-1)
    far = xp.abs(total - xp.where(blind, zero, zero + 1)) - FAR * lost[..., None]
    wrong = far > find_floor(record)  # NaN is what it is
    if bool(xp.any(wrong)):
        n = int(xp.sum(xp.astype(wrong, xp.int64)))
        warnings.warn(
            f"{record.name}: {n} rows of heads do not sum to 1 under their lse, and "
            "are NaN: q, k, mask or lse are those of something else.",
            stacklevel=5,
        )
    return xp.where(wrong, constant(math.nan, weights), weights)


def round_logits(record: Any) -> float:
    """Return how much of a logit its rounding may be: a kernel does not round it."""
    if record.origin is LseOrigin.KERNEL:
        return 0.0
    xp = namespace(q=record.q)
    eps = max(float(xp.finfo(x.dtype).eps) for x in (record.q, record.k, record.lse))
    return ROUNDINGS * eps * (1 if record.softcap is None else 2)


def find_floor(record: Any) -> float:
    """Return what a kernel loses in a row, besides the rounding of its products."""
    return FLOORS.get(str(record.q.dtype).rpartition(".")[2], HALF)


def bound_products(q: Array, k: Array, scale: float) -> Array:
    """Return what float32 may lose in the products of some rows, (…, H, R)."""
    xp = namespace(q=q)
    sizes = xp.sum(k * k, axis=-1)
    sizes = xp.where(sizes < math.inf, sizes, constant(0, sizes))  # NaN, of other rows
    longest = xp.max(sizes, axis=-1)  # (…, Hk)
    longest = xp.repeat(longest, q.shape[-3] // longest.shape[-1], axis=-1)[..., None]
    size = xp.sqrt(xp.sum(q * q, axis=-1) * longest) * abs(scale)
    return PRODUCTS * float(xp.finfo(q.dtype).eps) * size
