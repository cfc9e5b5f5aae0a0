"""Statistics of a record, compared with sums over its dense matrix of weights.

    rows       entropy, mass, masked_mass, mean_distance
    columns    received
    cells      offset
    walk       TopK, ColumnMax

A row has no weights, and every statistic that it reaches is NaN, if its lse is NaN or
+inf, if its query is not finite, or if it may see a key or bias that is not finite.

Next: questions.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
from draw import HostileCall, Rng

from regard import attention, window
from regard.masks.formula import Formula
from regard.masks.free_axes import find_axes
from regard.recording.record import Record
from regard.stats.cells import offset
from regard.stats.columns import received
from regard.stats.reducers import ColumnMax
from regard.stats.rows import entropy, masked_mass, mass, mean_distance
from regard.stats.strongest import TopK
from regard.stats.tile_walk import walk


def make_record(call: HostileCall, rng: Rng) -> Record | None:
    """Return the first sequence of a call as a record; None if it has no cells."""
    if 0 in call.shape or max(call.shape[-2:]) > 300:
        return None
    _, heads, n_q, n_k = call.shape
    q, k, v = (
        x.reshape(-1, *x.shape[-3:])[0] if x.ndim > 2 else x[None] for x in call.arrays
    )
    dtype = "float64" if call.dtype == "float64" else "float32"
    options = {**call.options, "scale": read_scale(call)}
    start = options.get("q_start", 0)
    for name in {"mask", "bias"} & options.keys():
        x = options[name]
        if isinstance(x, Formula) and (name == "bias" or is_batched(x)):
            x = x.dense(call.shape, q_start=start)
        if isinstance(x, np.ndarray):
            x = take_first(x)
            x = np.broadcast_to(x, (x.shape[0], n_q, n_k))
        options[name] = x
    with np.errstate(all="ignore"):
        done = attention(q, k, v, **options)
    lse = done.lse.copy()
    if rng.random() < 0.1:
        lse.reshape(-1)[rng.integers(lse.size)] = rng.choice([np.nan, np.inf])
    sink = options.get("sink")
    return Record(
        name="layer",
        q=q.astype(dtype),
        k=k.astype(dtype),
        lse=lse.astype(dtype),
        scale=options["scale"],
        softcap=options.get("softcap"),
        sink=None if sink is None else np.broadcast_to(sink, (heads,)).astype(dtype),
        mask=options.get("mask"),
        bias=None if options.get("bias") is None else options["bias"].astype(dtype),
        q_positions=start + np.arange(n_q),
        k_positions=np.arange(n_k),
    )


def take_first(x: Any) -> Any:
    """Return the first sequence of an array, (heads, N, D)."""
    return x.reshape(-1, *x.shape[-3:])[0] if x.ndim > 2 else x[None]


def is_batched(formula: Formula) -> bool:
    """Return whether a formula is for several sequences, or may differ by them."""
    known = any(node.extent.batch is not None for node in formula.walk())
    return known or "batch" in find_axes(formula, np.zeros(1))


def read_scale(call: HostileCall) -> float:
    """Return the scale as a number."""
    return float(call.options.get("scale", 1 / np.sqrt(call.q.shape[-1])))


def weigh_densely(record: Record) -> tuple[Any, Any]:
    """Return the weights (H, Nq, Nk) in float64, and which rows have none, (H, Nq)."""
    group = record.heads // record.k.shape[0]
    q, k = record.q.astype("f8"), np.repeat(record.k.astype("f8"), group, axis=0)
    shape = (record.heads, q.shape[1], k.shape[1])
    allowed = record.allowed()
    seen = np.broadcast_to(True if allowed is None else allowed, shape)
    bias = np.zeros(shape) if record.bias is None else record.bias.astype("f8")
    seen = seen & (bias > -np.inf)
    with np.errstate(all="ignore"):
        logits = q * record.scale @ k.swapaxes(1, 2)
        if record.softcap is not None:
            logits = record.softcap * np.tanh(logits / record.softcap)
        weights = np.exp(logits + bias - record.lse.astype("f8")[..., None])
    bad_keys = ~np.isfinite(k).all(-1)[:, None, :] | ~np.isfinite(
        np.where(seen, bias, 0)
    )
    lost = np.isnan(record.lse) | (record.lse == np.inf) | ~np.isfinite(q).all(-1)
    lost |= (seen & bad_keys).any(-1)
    lost &= record.lse != -np.inf
    weights = np.where(seen & (record.lse != -np.inf)[..., None], weights, 0)
    return np.where(lost[..., None], np.nan, weights), seen


def list_statistics(record: Record, rng: Rng) -> dict[str, tuple[Any, Any]]:
    """Return what each statistic says, and what it should say."""
    w, seen = weigh_densely(record)
    features = rng.normal(size=(record.k.shape[1], 2))
    distance = record.q_positions[:, None] - record.k_positions
    near = (distance <= 3) & (distance >= 0)
    with np.errstate(all="ignore"):
        surprise = np.where(w > 0, -w * np.log(w), np.where(np.isnan(w), np.nan, 0))
        total = w.sum(-1)
        mean = np.where(total == 0, np.nan, (w * distance).sum(-1) / total)
    far = mean_distance(record)
    mean = np.where((total > 0) & (total < 1e-30), far.values, mean)  # underflow
    # a row without weights spoils the keys that it may see, and only these
    down = np.where(np.isnan(w) & ~seen, 0, w)
    tops, peaks = walk(record, TopK(1), ColumnMax())
    return {
        "entropy": (entropy(record), surprise.sum(-1)),
        "mass": (mass(record, features), np.where(np.isnan(w), np.nan, w) @ features),
        "masked_mass": (
            masked_mass(record, window(3)),
            np.where(near, w, 0 * w).sum(-1),
        ),
        "mean_distance": (mean_distance(record), mean),
        "received": (received(record), down.sum(1)),
        "offset": (offset(record, 0), take_diagonal(record, w)),
        "top": (tops.weight, np.where(seen.any(-1), w.max(-1), 0)[..., None]),
        "column max": (peaks, down.max(1)),
    }


def take_diagonal(record: Record, w: Any) -> Any:
    """Return the weight of each query on the key at its own position."""
    at = record.q_positions
    there = at < record.k.shape[1]
    rows = np.arange(at.size)
    found = w[:, rows, np.where(there, at, 0)]
    return np.where(there, found, np.nan)
