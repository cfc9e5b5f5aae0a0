"""Certify records: their rows agree with numbers that only the model knew.

    row sum    Σ_j exp(logits_ij - lse_i)             = 1
    output     Σ_j exp(logits_ij - lse_i) (v_j · r)   = out_i · r

The logits are those of the definition, from the record's q, k, mask and positions. The
first check proves something if the model computed lse, from the keys that it used. The
second needs what the model returned for some rows, and one number for each key: its
value times r, a vector of signs.

    tolerance    what rounding may change, from the dtypes and the size of the logits
    power        what other keys would change: those of the record with their features
                 in reverse order. A smaller change than the tolerance tells nothing.

Next: file.py
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.arrays import Array, accumulator, constant, namespace, to_numpy
from regard.definition.attention import compute_logits
from regard.masks.algebra import And, Mask
from regard.masks.primitives import Band
from regard.recording.evidence import Certificate, LseOrigin
from regard.recording.record import Record
from regard.recording.row_sums import HALF, bound_products, find_floor, round_logits

Rows = NDArray[np.intp]
Floats = NDArray[np.floating[Any]]
TINY = 1e-30  # heads may output nothing but 0
CELLS = 2**22  # weights that are computed at once
TOGETHER = 2**22  # numbers of the keys of records that are checked together
PROBES = 8  # rows of which the power is measured


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a model returned for some rows, and its values, times a vector of signs."""

    rows: Rows  # (R,), which rows of the record
    out: Array  # (H, R)
    size: Array  # (H, R), the Euclidean norm of each output
    values: Array  # (Hk, Nk)
    eps: float  # of the dtype of the outputs


@dataclass(frozen=True)
class Claim:
    """A record, the rows whose sums are checked, and what is known of its outputs."""

    record: Record
    rows: Rows  # (R,)
    outputs: Outputs | None = None
    places: Hashable = None  # equal for equal positions; None: unknown

    def key(self) -> Hashable:
        """Return what is equal in records that are checked together."""
        record, outputs = self.record, self.outputs
        alone = id(record) if record.bias is not None else None
        return (
            record.shape,
            tuple(x.dtype for x in (record.q, record.k, record.lse)),
            (record.k.shape, record.scale, record.softcap, record.origin),
            (alone, name_mask(record.mask), record.sink is None),
            id(record) if self.places is None else self.places,
            self.rows.tobytes(),
            None if outputs is None else (outputs.rows.tobytes(), outputs.eps),
        )


def name_mask(mask: Any) -> Hashable:
    """Return what is equal for masks that allow the same: a formula without arrays."""
    if isinstance(mask, Mask) and all(isinstance(x, Band | And) for x in mask.walk()):
        return repr(mask)
    return id(mask)


def certify_all(claims: Sequence[Claim]) -> list[Certificate | None]:
    """Return the certificates of some records; None if nothing can be checked."""
    groups: dict[Hashable, list[int]] = {}
    for i, claim in enumerate(claims):
        groups.setdefault(claim.key(), []).append(i)
    found: dict[int, Certificate | None] = {}
    for group in groups.values():
        size = max(1, math.prod(claims[group[0]].record.k.shape))
        for part in split_rows(len(group), size, TOGETHER):
            some = [claims[i] for i in group[part]]
            found.update(zip(group[part], certify_alike(some), strict=True))
    return [found[i] for i in range(len(claims))]


def certify(
    record: Record, rows: Rows, outputs: Outputs | None = None
) -> Certificate | None:
    """Return the certificate of a record; None if nothing in it can be checked.

    rows: (R,), those whose sums are checked, if lse is the model's
    outputs: what the model returned for these or for other rows
    """
    return certify_all([Claim(record, rows, outputs)])[0]


@dataclass(frozen=True)
class Judged:
    """How far rows are from what they must be, (G, H, R), and what is too far."""

    error: Floats
    tolerance: Floats
    power: Floats


def certify_alike(claims: Sequence[Claim]) -> list[Certificate | None]:
    """Return the certificates of records that have the same shape, mask and rows."""
    first, checks = claims[0], {}
    records = [x.record for x in claims]
    if first.record.origin is not LseOrigin.RECORD and first.rows.size:
        checks["row sums"] = judge_rows(records, first.rows, None)
    outputs = [x.outputs for x in claims if x.outputs is not None]
    if outputs and outputs[0].rows.size:
        checks["outputs"] = judge_rows(records, outputs[0].rows, outputs)
    if not checks:
        return [None] * len(claims)
    return [make_certificate(checks, i) for i in range(len(claims))]


def judge_rows(
    records: Sequence[Record], rows: Rows, outputs: Sequence[Outputs] | None
) -> Judged:
    """Return how far some rows are from what they must be."""
    xp, n = namespace(q=records[0].q), rows.size
    width = len(records) * math.prod(records[0].shape[::2])
    pieces = [
        rebuild_rows(records, rows, part, outputs)
        for part in split_rows(n, width, CELLS)
    ]
    error, tolerance = (xp.concat(x, axis=2) for x in zip(*pieces, strict=True))
    error = xp.abs(error)
    some = np.unique(np.linspace(0, n - 1, min(n, PROBES)).astype(np.intp))
    others = [replace(x, k=xp.flip(x.k, axis=-1)) for x in records]
    power = xp.abs(rebuild_rows(others, rows, some, outputs)[0])
    power = xp.sort(xp.where(xp.isnan(power), constant(0, power), power), axis=2)
    power = power[:, :, power.shape[2] // 2][..., None]
    together = xp.stack([error, tolerance, xp.broadcast_to(power, error.shape)])
    return Judged(*to_numpy(together))  # one copy to the host


def rebuild_rows(
    records: Sequence[Record],
    rows: Rows,
    part: Any,
    outputs: Sequence[Outputs] | None,
) -> tuple[Array, Array]:
    """Return the errors of some rows (G, H, R), and what rounding may make of them."""
    record, at = records[0], rows[part]
    xp, place = namespace(q=record.q), record.place(at)
    dtype = accumulator(xp, record.q, record.k)
    q, k = (
        xp.stack([xp.astype(x, dtype, copy=False) for x in several])
        for several in ([x.q[:, place] for x in records], [x.k for x in records])
    )
    lse = xp.stack([x.lse[:, place] for x in records])  # (G, H, R)
    bias = record.bias if record.bias is None else record.bias[:, place]
    *_, logits = compute_logits(
        q,
        k,
        record.allowed(at),
        None if bias is None else xp.astype(bias, dtype, copy=False),
        scale=record.scale,
        softcap=record.softcap,
    )
    zero, blind = constant(0, lse), lse == -math.inf  # a row that sees no key
    below = logits - xp.where(blind, zero, lse)[..., None]  # may be rounded, too
    weights, sizes = xp.exp(below), xp.maximum(xp.abs(logits), xp.abs(below))
    sizes = xp.where(logits == -math.inf, constant(0, logits), sizes)
    products, rounding = bound_products(q, k, record.scale), round_logits(record)
    lost = products + rounding * xp.sum(weights * sizes, axis=-1)
    floor = find_floor(record)
    if outputs is None:
        total = xp.sum(weights, axis=-1)
        if record.sink is not None:
            sink = xp.stack([x.sink for x in records])[..., None]
            total = total + xp.exp(sink - xp.where(blind, zero, lse))
        error = total - xp.where(blind, zero, zero + 1)
        return ignore_rows(xp.isnan(lse) | (lse == math.inf), error, floor + lost)
    out, size, u = (
        xp.stack(x)
        for x in (
            [x.out[:, part] for x in outputs],
            [x.size[:, part] for x in outputs],
            [x.values for x in outputs],
        )
    )
    u = xp.repeat(xp.astype(u, weights.dtype), record.heads // u.shape[1], axis=1)
    parts = weights * u[:, :, None, :]
    error = xp.sum(parts, axis=-1) - out
    # the weights and the output are rounded one by one: six standard deviations
    half = 2 * outputs[0].eps * (size + xp.sqrt(xp.sum(parts**2, axis=-1)))
    mass = xp.sum(xp.abs(parts), axis=-1) + xp.abs(out)
    each = rounding * xp.sum(xp.abs(parts) * sizes, axis=-1)
    tolerance = half + (floor + products + lost) * mass + each + TINY
    return ignore_rows(xp.isnan(out) & xp.isnan(error), error, tolerance)


def settle_lse(
    record: Record, found: Certificate | None
) -> tuple[Record, Certificate | None]:
    """Return a record with the lse of its q and k, if all rows agree with the model's.

    The logits of a model in half precision were rounded: under their lse, the weights
    of q and k do not sum to 1 exactly. A row that rounding does not explain fails.
    """
    half = record.origin is LseOrigin.LOGITS and find_floor(record) == HALF
    if found is None or found.failed or not half:
        return record, found
    heads, n, n_k = record.shape
    xp, rows = namespace(lse=record.lse), np.arange(n)
    pieces = [
        rebuild_rows([record], rows, part, None)
        for part in split_rows(n, heads * n_k, CELLS)
    ]
    error, tolerance = (xp.concat(x, axis=2) for x in zip(*pieces, strict=True))
    known = constant(math.inf, error)
    checked = xp.stack([xp.abs(error), tolerance, xp.broadcast_to(known, error.shape)])
    whole = make_certificate({"row sums": Judged(*to_numpy(checked))}, 0)
    if whole.failed:
        return record, whole
    lse = record.lse + xp.log1p(error[0])
    return replace(record, lse=lse, origin=LseOrigin.RECORD), found


def ignore_rows(rows: Array, error: Array, tolerance: Array) -> tuple[Array, Array]:
    """Return errors and tolerances of which some rows tell nothing: they are NaN."""
    xp = namespace(x=error)
    every = constant(math.inf, tolerance)
    return xp.where(rows, constant(0, error), error), xp.where(rows, every, tolerance)


def make_certificate(checks: dict[str, Judged], i: int) -> Certificate:
    """Return the certificate that some checks give to a record."""
    rows = failed = unknown = 0
    worst, power = (0.0, 1.0), math.inf
    for x in checks.values():
        error, tolerance, known = (y[i] for y in (x.error, x.tolerance, x.power))
        bad = ~(error <= tolerance)  # NaN too
        rows, failed = rows + error.size, failed + int(bad.sum())
        unknown += int((~bad & (known <= tolerance)).sum())
        with np.errstate(invalid="ignore"):
            ratio = np.where(np.isnan(error), math.inf, error) / tolerance
        at = int(ratio.argmax())
        if not ratio.flat[at] <= worst[0] / worst[1]:
            worst = float(error.flat[at]), float(tolerance.flat[at])
        power = min(power, float(known.min()))
    return Certificate(
        by=" and ".join(checks),
        rows=rows,
        failed=failed,
        unknown=unknown,
        error=worst[0],
        tolerance=worst[1],
        power=power,
    )


def split_rows(n: int, width: int, most: int) -> Iterator[slice]:
    """Yield n rows in strips of a bounded size."""
    step = max(1, most // max(1, width))
    yield from (slice(i, i + step) for i in range(0, n, step))
