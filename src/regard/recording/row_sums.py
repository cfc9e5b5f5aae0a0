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
    weights = xp.exp(logits - xp.where(lse == -math.inf, zero, lse))
    whole = isinstance(part.keys, slice) and part.keys == ALL
    proves = record.origin is not LseOrigin.RECORD and logits.shape[-1]
    if not whole or not proves:
        return weights
    sink = record.sink
    if sink is not None:
        sink = sink[record.place(part.heads), ...][..., None, None]
    sizes = xp.where(logits == -math.inf, constant(0, logits), xp.abs(logits))
    sizes = xp.max(sizes, axis=-1, keepdims=True)
    wrong = judge_sums(
        record, xp.sum(weights, axis=-1, keepdims=True), lse, sink, sizes
    )
    return xp.where(wrong, constant(math.nan, weights), weights)


def blank_wrong_sums(record: Any, sums: Array, total: Array) -> tuple[Array, Array]:
    """Return sums over keys (H, Nq, F), and of the weights, (H, Nq), with NaN likewise.

    Only if all keys were summed over, and lse is the model's, can a row be wrong.
    """
    if record.origin is LseOrigin.RECORD or not record.shape[2]:
        return sums, total
    xp, nan = namespace(q=record.q), constant(math.nan, total)
    sizes = bound_logits(*(xp.astype(x, total.dtype) for x in (record.q, record.k)))
    sizes = sizes * abs(record.scale)
    if record.softcap is not None:
        sizes = xp.minimum(sizes, constant(record.softcap, sizes))
    if record.bias is not None:
        seen = xp.where(record.bias == -math.inf, constant(0, record.bias), record.bias)
        sizes = sizes + xp.max(xp.abs(seen), axis=-1)
    sink = record.sink if record.sink is None else record.sink[:, None]
    wrong = judge_sums(record, total, xp.astype(record.lse, total.dtype), sink, sizes)
    return xp.where(wrong[..., None], nan, sums), xp.where(wrong, nan, total)


def judge_sums(record: Any, total: Array, lse: Array, sink: Any, sizes: Array) -> Array:
    """Return which sums of weights are not 1, and warn of them.

    sizes: a bound of the logits of each row
    """
    xp, zero = namespace(q=total), constant(0, lse)
    blind = lse == -math.inf  # a row that sees no key
    if sink is not None:
        total = total + xp.exp(sink - xp.where(blind, zero, lse))
    rounding = round_logits(record) + PRODUCTS * float(xp.finfo(total.dtype).eps)
    lost = FAR * (find_floor(record) + rounding * sizes)
    wrong = xp.abs(total - xp.where(blind, zero, zero + 1)) > lost
    if bool(xp.any(wrong)):  # NaN is what it is
        n = int(xp.sum(xp.astype(wrong, xp.int64)))
        warnings.warn(
            f"{record.name}: {n} rows of heads do not sum to 1 under their lse, and "
            "are NaN: q, k, mask or lse are those of something else.",
            stacklevel=5,
        )
    return wrong


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
    eps = float(namespace(q=q).finfo(q.dtype).eps)
    return PRODUCTS * eps * bound_logits(q, k) * abs(scale)


def bound_logits(q: Array, k: Array) -> Array:
    """Return a bound of the products of each query with all keys, (…, H, R)."""
    xp = namespace(q=q)
    sizes = xp.sum(k * k, axis=-1)
    sizes = xp.where(sizes < math.inf, sizes, constant(0, sizes))  # NaN, of other rows
    longest = xp.max(sizes, axis=-1)  # (…, Hk)
    longest = xp.repeat(longest, q.shape[-3] // longest.shape[-1], axis=-1)[..., None]
    return xp.sqrt(xp.sum(q * q, axis=-1) * longest)
