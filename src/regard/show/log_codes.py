"""Weights as 16-bit codes, in equal steps of their logarithm.

    0        masked
    1        a weight below 2⁻³⁰, including 0
    2 + c    2^(-30 + 30 c / 65,532)        c = 0 … 65,532: from 2⁻³⁰ to 1
    65,535   NaN

Neighbouring codes are 0.032 % apart, so the relative error is at most 0.016 %, for a
weight of one in a million as for one half. With eight bits it would be 4 %.

Next: map_source.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

MASKED, TINY, FIRST, LAST, NAN = 0, 1, 2, 65_534, 65_535
DEPTH = 30  # the smallest weight is 2^-DEPTH
STEPS = LAST - FIRST
STEP = 16  # codes that are rounded to one
STRIP = 2**20  # pixels encoded at a time: their logarithms fit into the cache

Codes = NDArray[np.uint16]


def encode_weights(weights: NDArray[Any], allowed: NDArray[np.bool_]) -> Codes:
    """Return the codes of weights (rows, columns).

    >>> weights = np.array([[1.0, 0.5, 0.0, np.nan, 0.0]])
    >>> encode_weights(weights, np.array([[True] * 4 + [False]]))
    array([[65534, 63350,     1, 65535,     0]], dtype=uint16)
    """
    codes = np.empty(weights.shape, np.uint16)
    step = max(1, STRIP // max(1, weights.shape[1]))
    for first in range(0, weights.shape[0], step):
        rows = slice(first, first + step)
        p = weights[rows]
        seen = p >= 2.0**-DEPTH
        log = np.log2(np.where(seen, p, 1))
        place = np.rint((log + DEPTH) * (STEPS / DEPTH)).clip(0, STEPS)  # p may be > 1
        codes[rows] = np.where(seen, place + FIRST, np.where(np.isnan(p), NAN, TINY))
        codes[rows][~allowed[rows]] = MASKED
    return codes


def round_codes(codes: Codes) -> Codes:
    """Return codes with 12 bits, which compress better: weights within 0.26 %.

    >>> round_codes(np.array([0, 1, 2, 500, 65_534, 65_535], np.uint16)).tolist()
    [0, 1, 2, 496, 65534, 65535]
    """
    kept = (codes <= TINY) | (codes == NAN)
    near = (codes.astype(np.int32) + STEP // 2) // STEP * STEP
    return np.where(kept, codes, near.clip(FIRST, LAST)).astype(np.uint16)


def decode(codes: Codes) -> NDArray[np.float64]:
    """Return the weights of codes: 0 for TINY, NaN for MASKED and NAN."""
    weights = np.exp2((codes.astype(np.float64) - FIRST) * (DEPTH / STEPS) - DEPTH)
    weights[codes == TINY] = 0
    weights[(codes == MASKED) | (codes == NAN)] = np.nan
    return weights
