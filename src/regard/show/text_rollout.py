"""Attention rollout: the attention of all layers multiplied, from a selection.

    A[l] = mean over the heads of the weights of layer l
    R    = (A[L] + I)/2 · … · (A[2] + I)/2 · (A[1] + I)/2      (Abnar & Zuidema 2020)

    "attended"     mean over i in the selection of  R[i, j]     from the last layer down
    "attending"    sum over j in the selection of   R[i, j]     from the first layer up

I stands for the residual stream, with the same share as the heads. R is never stored: a
vector is multiplied by each layer in turn, by the fused kernel, in memory linear in N.
It is defined where every layer has one query and one key for the same tokens.

Next: text_request.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from regard.arrays import convert, to_numpy
from regard.recording.record import Record
from regard.show.text_tint import Floats, TextSelection, TokenTint
from regard.stats.columns import received
from regard.stats.nonfinite import mark_nonfinite
from regard.stats.replay import replay_rows

CELLS = 2**34  # most cells of all layers: about a minute
KEEP_V = 'record the values with regard.watch(model, keep="qkv")'


def describe_ways(records: Sequence[Record]) -> dict[str, str]:
    """Return why the tint cannot be by value or by rollout; "" where it can."""
    values = "" if records and all(x.v is not None for x in records) else KEEP_V
    return {"value": values, "rollout": find_rollout_obstacle(records)}


def find_rollout_obstacle(records: Sequence[Record]) -> str:
    """Return why a rollout over these layers is not defined; "" if it is."""
    if len(records) < 2:
        return "it needs at least two layers that read these tokens"
    first = to_numpy(records[0].q_positions)
    for record in records:
        for positions in (record.q_positions, record.k_positions):
            if not np.array_equal(to_numpy(positions), first):
                other = "keys than queries"
                if record is not records[0]:
                    other = f"queries or keys than {records[0].name}"
                return (
                    f"{record.name} has other {other}; it needs layers over the same "
                    "tokens"
                )
    if sum(math.prod(x.shape) for x in records) > CELLS:
        return "it would take minutes for so many tokens"
    return ""


def roll_out(
    records: Sequence[Record], selection: TextSelection, *, tokens: int
) -> TokenTint:
    """Return the rollout of every token; records: all layers, the first one first."""
    places = to_numpy(records[0].q_positions).astype(np.int64)
    chosen = (places >= selection.first) & (places <= selection.last)
    x = chosen.astype(np.float64)
    if selection.show == "attended":
        x = x / max(1, chosen.sum())
        for record in reversed(records):
            x = (x + multiply_left(x, record)) / 2
    else:
        for record in records:
            x = (x + multiply_right(record, x)) / 2
    values, allowed = np.zeros(tokens), np.zeros(tokens, bool)
    here = places < tokens
    values[places[here]] = x[here]
    allowed[places[here]] = x[here] != 0
    return TokenTint(values, allowed)


def multiply_left(x: Floats, record: Record) -> Floats:
    """Return Σ_i x[i] A[i, j] for every key j; A: the mean over the heads."""
    used = np.flatnonzero(x)  # other rows count neither as work nor as NaN
    if not used.size:
        return np.zeros(record.shape[2])
    rows = slice(int(used[0]), int(used[-1]) + 1)
    found = received(record, convert(x[:, None], record.q), rows=rows).values
    return to_numpy(found)[..., 0].astype(np.float64).mean(0)  # type: ignore[no-any-return]


def multiply_right(record: Record, x: Floats) -> Floats:
    """Return Σ_j A[i, j] x[j] for every query i."""
    record = mark_nonfinite(record)
    sums, _ = replay_rows(record).run(convert(x[None, :, None], record.q))
    return to_numpy(sums)[..., 0].astype(np.float64).mean(0)  # type: ignore[no-any-return]
