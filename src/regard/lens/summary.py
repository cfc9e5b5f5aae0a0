"""A few numbers about every layer, for a first look.

    first      mass on the first token, where most trained models rest
    previous   mass on the token before
    self       mass on the token itself
    entropy    of a row, in bits: 0 is one key, log2 of their number is all alike

Each is a mean over rows and heads, exact, with memory for one strip of rows.

Next: seen.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from regard.record import Record

ROWS = 256  # of a strip
NAMES = ("first", "previous", "self", "entropy")


def summarise(record: Record) -> dict[str, float]:
    """Return the means of NAMES for a layer."""
    sums, count = dict.fromkeys(NAMES, 0.0), 0
    keys = torch.as_tensor(record.k_positions)
    for start in range(0, record.q.shape[1], ROWS):
        rows = slice(start, start + ROWS)
        weights = torch.as_tensor(record.weights(rows)).double()  # (H, rows, Nk)
        at = torch.as_tensor(record.q_positions)[rows, None]
        sums["first"] += float(weights[..., keys == 0].sum())
        sums["previous"] += float((weights * (keys == at - 1)).sum())
        sums["self"] += float((weights * (keys == at)).sum())
        sums["entropy"] -= float(torch.xlogy(weights, weights).sum()) / math.log(2)
        count += weights.shape[0] * weights.shape[1]
    return {name: total / max(count, 1) for name, total in sums.items()}


def print_summary(records: Sequence[Record]) -> str:
    """Return a table of layers."""
    width = max(len(record.name) for record in records)
    lines = [f"{'layer':<{width}} " + "".join(f"{name:>10}" for name in NAMES)]
    for record in records:
        found = summarise(record)
        numbers = "".join(f"{found[name]:>10.3f}" for name in NAMES)
        lines.append(f"{record.name:<{width}} {numbers}")
    return "\n".join(lines)
