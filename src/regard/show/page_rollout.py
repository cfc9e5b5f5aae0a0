"""The rollout of a page: the product of all layers, if it fits into the file.

    R[i, j]    of stats/rollout.py, a code for every pair of tokens (log_codes.py)
               bytes: about 3 for each pair that is not masked

A server multiplies a vector by every layer for each click. A browser would take seconds
for this, so a page has the product itself. It grows with the square of the tokens, and
is left out if it would take more than SHARE of the limit.

Next: page.py
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from regard.arrays import to_numpy
from regard.recording.record import Record
from regard.show.log_codes import encode_weights
from regard.stats.mask_layout import count_cells
from regard.stats.nonfinite import mark_nonfinite
from regard.stats.rollout import find_rollout_obstacle

SHARE = 0.05  # of the limit of a page
BYTES = 2.6  # of a pair, compressed and in base64
LONGEST = 2048  # tokens: two minutes of products


def pack_rollout(
    records: Sequence[Record], tokens: int, limit: float
) -> tuple[bytes, str]:
    """Return the codes of a rollout, (tokens, tokens); or b"" and why there is none."""
    why = find_rollout_obstacle(records)
    if why:
        return b"", why
    pairs = max(count_cells(record) for record in records)
    if BYTES * pairs > SHARE * limit or tokens > LONGEST:
        return b"", (
            f"it would take about {BYTES * pairs / 1e6:.1f} MB of a file of "
            f"{limit / 1e6:g} MB; seen.show() and seen.widget() have it"
        )
    product = np.eye(records[0].shape[1])
    for record in records:
        mean = to_numpy(mark_nonfinite(record).weights()).astype(np.float64).mean(0)
        product = (product + mean @ product) / 2
    if not np.isfinite(product).all():
        return b"", "some weights are NaN; seen.show() and seen.widget() have the rest"
    places = to_numpy(records[0].q_positions).astype(np.int64)
    here = places < tokens
    whole = np.zeros((tokens, tokens))
    whole[np.ix_(places[here], places[here])] = product[np.ix_(here, here)]
    codes = encode_weights(whole, whole != 0)
    halves = (codes >> 8).astype(np.uint8), (codes & 255).astype(np.uint8)
    return zlib.compress(b"".join(half.tobytes() for half in halves), 9), ""
