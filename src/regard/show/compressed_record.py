"""A compressed record: q and k transformed, rounded and packed for a browser.

    scale · q kᵀ  =  a bᵀ               for every M:  a = scale · q M,  b = k M⁻ᵀ
                  ≈  (A ⊙ step) Bᵀ      A, B integers

M comes from an SVD: component c has the same norm in a and b. Its step in a depends on
its size in b, and vice versa, so that each of the 2 D roundings contributes equally to
the error of the logits, `error` in total. The relative error of a weight is the same,
as p = exp(logit - lse). lse is recomputed, so that row sums do not change.

    error 5e-5    14 to 20 bits per number  no weight is off by more than 0.05 %
    error 0.02     6 to  8                  half the size

With a bias, the logits themselves are factored by an SVD, head by head.

Next: page.py
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from regard.arrays import to_numpy
from regard.errors import OptionError
from regard.recording.record import Record
from regard.stats.columns import cut_rows
from regard.stats.nonfinite import mark_nonfinite
from regard.stats.replay import replay_rows, to_torch
from regard.threads import hold_threads

LONGEST = 2048  # most tokens with a bias: an SVD takes seconds per head
MOST = 2.0**22  # largest integer: with its sign it takes three bytes
ROUND = 4  # pad components to fours: a browser multiplies four at a time
FLOOR = 1e-3  # the error is measured on weights above this
SAMPLE = 32  # rows of a record on which the error is measured

Floats = NDArray[np.float64]
Whole = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Factors:
    """The logits of a record as a product of integers."""

    a: Whole  # (H, R, Nq)
    b: Whole  # (Hk, R, Nk)
    steps: NDArray[np.float32]  # (Hk, R)
    record: Record  # the rounded record, whose weights the page shows

    def pack(self) -> bytes:
        """Return lse, steps and integers, split into high and low bytes, compressed."""
        lse = to_numpy(self.record.lse).astype("<f4").tobytes()
        parts = [split_bytes(x) for x in (self.a, self.b)]
        return zlib.compress(
            b"".join([lse, self.steps.astype("<f4").tobytes(), *parts])
        )


def round_record(record: Record, error: float) -> Factors:
    """Return factors whose logits are off by about `error`; lse keeps its NaN."""
    record = mark_nonfinite(record)
    groups = [round_pair(a, b, error) for a, b in split_logits(record)]
    width = max(ROUND, *(steps.shape[0] for _, _, steps in groups))
    width = -(-width // ROUND) * ROUND  # padded with 0

    def fill(x: NDArray[Any]) -> NDArray[Any]:
        missing = width - x.shape[-1]
        return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])

    a = np.concatenate([fill(a) for a, _, _ in groups])  # (H, Nq, R)
    b = np.stack([fill(b) for _, b, _ in groups])  # (Hk, Nk, R)
    steps = np.stack([fill(steps) for _, _, steps in groups]).astype(np.float32)
    device = to_torch(record.q).device
    spread = np.repeat(steps, a.shape[0] // b.shape[0], axis=0)[:, None]
    rounded = replace(
        record,
        q=to_torch(a.astype(np.float32) * spread).to(device),
        k=to_torch(np.ascontiguousarray(b, np.float32)).to(device),
        lse=to_torch(record.lse).float(),
        v=None,
        scale=1.0,
        softcap=None if record.bias is not None else record.softcap,
        bias=None,
    )
    rounded = replace(rounded, lse=renew_lse(record, rounded))
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (a, b)]
    return Factors(turned[0], turned[1], steps, rounded)


def split_logits(record: Record) -> Iterator[tuple[Floats, Floats]]:
    """Yield a (heads, Nq, R) and b (Nk, R) for each key head: logits = a bᵀ."""
    q, k = (to_numpy(to_torch(x).double()) for x in (record.q, record.k))
    if record.bias is None:
        group = len(q) // len(k)
        for h, keys in enumerate(k):
            queries = q[h * group : (h + 1) * group] * record.scale
            a, b = balance_factors(queries.reshape(-1, queries.shape[-1]), keys)
            yield a.reshape(*queries.shape[:2], b.shape[-1]), b
        return
    if max(q.shape[1], k.shape[1]) > LONGEST:
        raise OptionError(
            f"{record.name} adds a bias to {q.shape[1]} × {k.shape[1]} scores; a page "
            f"holds it up to {LONGEST} tokens. Use seen.show(), or give other heads=."
        )
    arrays = {name: to_torch(getattr(record, name)) for name in ("q", "k", "bias")}
    wide = {name: x.double() for name, x in arrays.items()}
    unmasked = replace(record, **wide, mask=None)
    for h in range(len(q)):
        logits, allowed = to_numpy(unmasked.logits(heads=h)), record.allowed(heads=h)
        if allowed is not None:
            logits = np.where(to_numpy(allowed), logits, 0.0)  # any value will do
        with hold_threads(1):
            u, size, vt = torch.linalg.svd(to_torch(logits), full_matrices=False)
        a, b = u * size.sqrt(), vt.T * size.sqrt()
        yield to_numpy(a)[None], to_numpy(b)


def balance_factors(q: Floats, k: Floats) -> tuple[Floats, Floats]:
    """Return a and b with a bᵀ = q kᵀ; each component has the same norm in both.

    In torch, with one thread: the bits depend on the number of threads, and the threads
    of NumPy's BLAS, which cannot be set, wait actively for each other.
    """
    with hold_threads(1):
        (first, left), (second, right) = (
            torch.linalg.qr(to_torch(np.ascontiguousarray(x))) for x in (q, k)
        )
        u, size, vt = torch.linalg.svd(left @ right.T, full_matrices=False)
        a, b = first @ u * size.sqrt(), second @ vt.T * size.sqrt()
    return to_numpy(a), to_numpy(b)


def round_pair(a: Floats, b: Floats, error: float) -> tuple[Whole, Whole, Floats]:
    """Round both to integers; return them and the products of their steps."""
    sizes = [np.sqrt((x.reshape(-1, x.shape[-1]) ** 2).mean(axis=0)) for x in (a, b)]
    each = error * math.sqrt(6 / max(1, a.shape[-1]))  # rounding error: step / √12
    steps = [
        np.maximum(
            each / np.maximum(other, 1e-30),
            np.abs(x).max(axis=tuple(range(x.ndim - 1)), initial=0) / MOST,
        )
        for x, other in zip((a, b), reversed(sizes), strict=True)
    ]
    whole = [np.rint(x / step) for x, step in zip((a, b), steps, strict=True)]
    kept = whole[0].any(axis=(0, 1)) & whole[1].any(axis=0)
    first, second = (x[..., kept].astype(np.int32) for x in whole)
    return first, second, (steps[0] * steps[1])[kept]


def renew_lse(record: Record, rounded: Record) -> Any:
    """Return the lse that restores the total weight of every rounded row."""
    before, after = (to_torch(replay_rows(x).run()[1]) for x in (record, rounded))
    ratio = after.double() / before.double()
    ratio[~(ratio > 0)] = 1  # a fully masked row
    return (rounded.lse.double() + ratio.log()).float()


def measure_error(record: Record, rounded: Record) -> tuple[float, float]:
    """Return the median and largest relative error of weights above 0.001."""
    record, n_q = mark_nonfinite(record), record.q.shape[1]
    rows = np.unique(np.linspace(0, max(0, n_q - 1), SAMPLE).astype(int))[:n_q]
    if not rows.size or not record.k.shape[1]:
        return 0.0, 0.0
    right, shown = (
        to_numpy(to_torch(cut_rows(x, rows).weights()).double())
        for x in (record, rounded)
    )
    seen = right > FLOOR
    off = np.abs(shown[seen] / right[seen] - 1)
    return (float(np.median(off)), float(off.max())) if off.size else (0.0, 0.0)


def split_bytes(x: Whole) -> bytes:
    """Return the high, middle and low bytes; the sign is the lowest bit (zigzag)."""
    z = ((x << 1) ^ (x >> 31)).astype(np.uint32)
    return b"".join(
        (z >> shift & 255).astype(np.uint8).tobytes() for shift in (16, 8, 0)
    )
