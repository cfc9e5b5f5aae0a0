"""Attention rollout: the attention of all layers multiplied.

    A[l] = mean over the heads of the weights of layer l
    R    = (A[L] + I)/2 · … · (A[2] + I)/2 · (A[1] + I)/2      (Abnar & Zuidema 2020)

I stands for the residual stream, with the same share as the heads. R is never stored: a
vector is multiplied by each layer in turn, by the fused kernel, in memory linear in N.
It is defined for one stack of layers over one sequence: every layer has one query and
one key for the same tokens, and is called once. Encoders, decoders and cross-attention
are told apart by their names, because they may have the same positions.

Next: attention_flow.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from regard.arrays import convert, to_numpy
from regard.errors import OptionError
from regard.recording.record import Record
from regard.stats.columns import received
from regard.stats.nonfinite import mark_nonfinite
from regard.stats.replay import replay_rows

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
CROSS = re.compile(r"(?i)cross(?!_?encoder)|encoder_attn|enc_?dec|encoder_decoder")
KINDS = "encoder|decoder|vision|visual|image|audio|text|language"
STACK = re.compile(rf"(?i)(?<![a-z])({KINDS})(?![a-z])")
CELLS = 2**34  # most cells of all layers: about a minute


def roll_out(records: Sequence[Record], token: int) -> Floats:
    """Return row `token` of the rollout: the share of every token, (N,).

    records: of all layers of one sequence, the first one first:
        seen.layer(slice(None))
    """
    row = find_row(records, token)
    start = np.zeros(records[0].shape[1])
    start[row] = 1
    return multiply_layers(records, start, down=True)


def find_row(records: Sequence[Record], token: int) -> int:
    """Return the row of a token in every layer, or raise OptionError."""
    if why := find_rollout_obstacle(records):
        raise OptionError(f"there is no product of these layers: {why}.")
    places = to_numpy(records[0].q_positions)
    found = np.flatnonzero(places == token)
    if not found.size:
        raise OptionError(
            f"there is no token {token}; the records have tokens {places.min()} to "
            f"{places.max()}."
        )
    return int(found[0])


def find_rollout_obstacle(records: Sequence[Record]) -> str:
    """Return why a rollout over these layers is not defined; "" if it is."""
    if len(records) < 2:
        return "it needs at least two layers that read these tokens"
    if why := find_other_stack([record.name for record in records]):
        return why
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


def find_other_stack(names: Sequence[str]) -> str:
    """Return why layers are not one stack over one sequence; "" if they are."""
    if len({*names}) < len(names):
        twice = next(x for i, x in enumerate(names) if x in names[:i])
        return (
            f"{twice} is there more than once, expected the layers of one sequence: "
            "seen.layer(slice(None), sequence=0)"
        )
    for name in names:
        sibling = name.replace("multihead_attn", "self_attn")  # of PyTorch's decoder
        if CROSS.search(name) or (sibling != name and sibling in names):
            return (
                f"{name} is cross-attention, whose keys are another sequence; choose "
                "the layers of one stack"
            )
        if STACK.findall(name) != STACK.findall(names[0]):
            return (
                f"{name} and {names[0]} are of different stacks; choose the layers of "
                "one of them"
            )
    return ""


def multiply_layers(records: Sequence[Record], x: Floats, *, down: bool) -> Floats:
    """Return x R, from the last layer down, or R x, from the first layer up."""
    for record in reversed(records) if down else records:
        x = (x + (multiply_left(x, record) if down else multiply_right(record, x))) / 2
    return x


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
