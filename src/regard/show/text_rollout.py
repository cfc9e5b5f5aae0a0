"""A tint by rollout: the attention of all layers multiplied, from a selection.

    "attended"     mean over i in the selection of  R[i, j]     from the last layer down
    "attending"    sum over j in the selection of   R[i, j]     from the first layer up

R is the product of all layers (stats/rollout.py).

Next: text_request.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from regard.arrays import to_numpy
from regard.recording.record import Record
from regard.show.text_tint import TextSelection, TokenTint
from regard.stats.rollout import find_rollout_obstacle, multiply_layers

KEEP_V = 'record the values with regard.watch(model, keep="qkv")'


def describe_ways(records: Sequence[Record]) -> dict[str, str]:
    """Return why the tint cannot be by value or by rollout; "" where it can."""
    values = "" if records and all(x.v is not None for x in records) else KEEP_V
    return {"value": values, "rollout": find_rollout_obstacle(records)}


def tint_by_rollout(
    records: Sequence[Record], selection: TextSelection, *, tokens: int
) -> TokenTint:
    """Return the rollout of every token; records: all layers, the first one first."""
    places = to_numpy(records[0].q_positions).astype(np.int64)
    chosen = (places >= selection.first) & (places <= selection.last)
    x = chosen.astype(np.float64)
    down = selection.show == "attended"
    x = multiply_layers(records, x / max(1, chosen.sum()) if down else x, down=down)
    values, allowed = np.zeros(tokens), np.zeros(tokens, bool)
    here = places < tokens
    values[places[here]] = x[here]
    allowed[places[here]] = x[here] != 0
    return TokenTint(values, allowed)
