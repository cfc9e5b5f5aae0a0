"""Run the kernel again on a record, with other values.

    weights = exp(logits - lse)            logits from q and k, lse from the record

    rows      sum_j weights[i, j] F_j      the kernel with V := F
    columns   sum_i weights[i, j] G_i      with keys and queries exchanged

The kernel does not use the record's lse. It normalizes by lse', which it computes, so
its output is multiplied by exp(lse' - lse): 1 for full rows, less if there is a sink,
and the mass on the selected keys if only some of them are used.

For columns, -lse_i is appended to query i, and 1 to every key:

    [scale k_j, 1] · [q_i, -lse_i] = scale q_i · k_j - lse_i = log weights[i, j]

so the lse' of a key is the log of the mass that it receives. With a softcap, -lse_i
must be added after the cap, as a bias. A query whose lse is NaN makes the keys that it
may attend to NaN, and no others; a second call finds these keys.

Half precision is computed in float32, as the kernel would round the weights to 8 bits:
the error of masses of a bfloat16 record falls from 4e-3 to 5e-5, in 2.4 times the time.
NumPy arrays are passed to torch and back without a copy; without torch, the definition
runs in tiles. Memory is linear in N.

Next: plan.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np

from regard.arrays import Array, accumulator, constant, convert, namespace, to_numpy
from regard.definition.attention import attention
from regard.masks.algebra import Mask
from regard.masks.biases import Bias, added
from regard.recording.record import Record
from regard.stats.mask_layout import (
    MaskLayout,
    read_mask_layout,
    read_transposed_layout,
)

BLOCK = 512  # rows and keys of a tile, without torch


@dataclass(frozen=True, kw_only=True)
class KernelReplay:
    """A kernel call that reproduces the weights of a record."""

    q: Array  # (H, N, D); for columns, the record's keys
    k: Array  # (Hk, M, D); for columns, the record's queries
    lies: MaskLayout
    bias: Array | Bias | None
    scale: float
    softcap: float | None
    known: Array | None  # (H, N), lse of the record; None: it is in the logits
    lost: Array | None = None  # (H, M), rows of k whose weights are NaN

    @property
    def width(self) -> int:
        """The number of features that fit in one call."""
        return int(self.q.shape[-1])

    def answer(self, wanted: Sequence[Array | None]) -> tuple[Array, Array]:
        """Return the sums of several features, side by side, and of the weights."""
        cuts = [x for x in wanted if x is not None]
        heads = max((x.shape[0] for x in cuts), default=0)
        if len(cuts) > 1:
            xp = namespace(x=cuts[0])
            cuts = [xp.concat([share(x, heads) for x in cuts], axis=-1)]
        return self.run(*cuts)

    def run(self, values: Array | None = None) -> tuple[Array, Array]:
        """Return the sums of values, (H, N, F), and of the weights alone, (H, N).

        values: (1 or heads, M, F), F at most the width; None sums the weights alone
        """
        sums, total = self.sum(values)
        if self.lost is None:
            return sums, total
        xp = namespace(q=self.q)
        lost, _ = self.sum(xp.astype(self.lost, self.k.dtype)[..., None])
        nan = constant(math.nan, total)
        reached = lost > 0.5  # each has a weight of 1
        return xp.where(reached, nan, sums), xp.where(reached[..., 0], nan, total)

    def sum(self, values: Array | None) -> tuple[Array, Array]:
        """Return the sums of `run`, ignoring `lost`."""
        xp = namespace(q=self.q)
        k = self.k if values is None else share(self.k, values.shape[0])
        v = k if values is None else self.fill(values, k.shape[0])
        out, lse = run_kernel(self, k, v)
        known = constant(0, lse) if self.known is None else self.known
        known = xp.astype(known, lse.dtype)
        blind = (lse == -math.inf) & (known == known)  # noqa: PLR0124 (NaN stays NaN)
        known = xp.where(blind, constant(0, lse), known)
        total = xp.exp(lse - known)
        n_features = 0 if values is None else values.shape[-1]
        sums = out[..., :n_features] * total[..., None]
        if self.lies.flipped:
            return xp.flip(sums, axis=1), xp.flip(total, axis=1)
        return sums, total

    def fill(self, values: Array, heads: int) -> Array:
        """Pad features with zeros to the width and broadcast them to all key heads."""
        xp = namespace(values=values)
        values = xp.astype(values, self.k.dtype, copy=False)
        lead, missing = values.shape[:-1], self.width - values.shape[-1]
        if missing:
            values = xp.concat([values, constant(0, values, (*lead, missing))], axis=-1)
        if self.lies.flipped:
            values = xp.flip(values, axis=1)
        return xp.broadcast_to(values, (heads, *values.shape[1:]))


def replay_rows(record: Record, within: Mask | None = None) -> KernelReplay:
    """Return the call in which queries attend to keys, optionally within a mask."""
    q, k = to_compute_dtype(record)
    return KernelReplay(
        q=q,
        k=k,
        lies=read_mask_layout(record, within),
        bias=record.bias,
        scale=record.scale,
        softcap=record.softcap,
        known=record.lse,
    )


def replay_columns(record: Record) -> KernelReplay:
    """Return the call in which keys attend to queries, for every query head."""
    xp, lies = namespace(q=record.q), read_transposed_layout(record)
    q, k = to_compute_dtype(record)
    lse = xp.astype(record.lse, q.dtype)
    bias, lost = record.bias, xp.isnan(lse)
    lse = xp.where(lse > -math.inf, lse, constant(0, lse))[..., None]  # has no keys
    if bool(xp.any(lost)):  # set the weights of these queries to 1
        q = xp.where(lost[..., None], constant(0, q), q)
        if bias is not None:
            one = lost[..., None] & (bias > -math.inf)
            bias = xp.where(one, constant(0, bias), bias)
    bias = None if bias is None else xp.matrix_transpose(bias)
    scale = record.scale
    if lies.flipped:
        q, k, lse = (xp.flip(x, axis=1) for x in (q, k, lse))
    if record.softcap is None:
        ones = constant(1, k, (*k.shape[:-1], 1))
        q, k = xp.concat([q, -lse], axis=-1), xp.concat([k * scale, ones], axis=-1)
        scale = 1.0
    else:
        late = added(xp.matrix_transpose(-lse))  # (H, 1, Nq)
        bias = late if bias is None else late + added(bias)
    return KernelReplay(
        q=share(k, record.heads),
        k=q,
        lies=lies,
        bias=bias,
        scale=scale,
        softcap=record.softcap,
        known=None,
        lost=lost if bool(xp.any(lost)) else None,
    )


def run_kernel(call: KernelReplay, k: Array, v: Array) -> tuple[Array, Array]:
    """Return out and lse as arrays of the record's library."""
    q, (mask, start, _) = call.q, call.lies
    if not q.shape[1] * k.shape[1]:  # no rows or no keys
        shape = (*q.shape[:2], v.shape[2])
        return constant(0, q, shape), constant(-math.inf, q, shape[:2])
    run: Any = partial(attention, block=BLOCK)
    if find_torch() is not None:
        from regard.engine.choose import attend as run  # noqa: PLC0415 (it needs torch)
    done = run(
        to_torch(q),
        to_torch(k),
        to_torch(v),
        to_torch(mask),
        bias=to_torch(call.bias),
        scale=call.scale,
        softcap=call.softcap,
        q_start=start,
    )
    return convert(done.out, q), convert(done.lse, q)


@cache
def find_torch() -> Any:
    """Return torch, imported on first use, or None if it is not installed."""
    try:
        return import_module("torch")
    except ImportError:  # NumPy records do not need torch
        return None


def to_torch(x: Any) -> Any:
    """Return an array as a tensor, if possible without a copy; others unchanged."""
    torch = find_torch()
    if torch is None or x is None or isinstance(x, Mask | Bias | torch.Tensor):
        return x
    host: np.ndarray[Any, Any] = to_numpy(x)
    if min(host.strides, default=0) < 0:  # torch has no negative strides
        host = host.copy()
    try:
        return torch.from_dlpack(host)
    except BufferError:  # an older NumPy does not export read-only arrays
        return torch.from_dlpack(host.copy())


def to_compute_dtype(record: Record) -> tuple[Array, Array]:
    """Return q and k in the dtype used for computation."""
    xp = namespace(q=record.q, k=record.k)
    dtype = accumulator(xp, record.q, record.k)
    q, k = (xp.astype(x, dtype, copy=False) for x in (record.q, record.k))
    return q, k


def share(k: Array, heads: int) -> Array:
    """Repeat each shared head for every query head of its group."""
    n_shared, n, width = k.shape
    if heads <= n_shared:
        return k
    xp, group = namespace(k=k), heads // n_shared
    spread = xp.broadcast_to(k[:, None, ...], (n_shared, group, n, width))
    return xp.reshape(spread, (heads, n, width))
