"""Name the fault of a wrong result: the known fault that computes the same numbers.

    lse in base 2              lse · log 2 is right
    the last keys are missing  the definition without the last m keys gives this result
    the last queries are 0     all rows are right, except the last m, which are 0
    rounding                   inputs rounded to TF32 or bfloat16 explain most of it

A name is given only if the fault reproduces the result, so that a name is evidence.

Next: watched_families.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from regard.definition.attention import Attended, attention
from regard.doctor.device_arithmetic import COARSER, round_tensor
from regard.doctor.engine_calls import Arrays, EngineCall, measure_difference

COMMON_TILES = (16, 32, 64, 128, 256)
EVIDENT = 4  # rounded inputs must explain the result so many times better


def name_fault(
    call: EngineCall, arrays: Arrays, found: Attended, allowed: float
) -> str:
    """Return a sentence that names the fault, or says how large the difference is.

    arrays: q, k and v in float64
    found: the wrong result, in float64
    """
    right = call.run(attention, arrays)
    if measure_difference(found.lse * math.log(2), right.lse) <= allowed:
        return "lse is a base-2 logarithm, expected the natural one."
    if measure_difference(found.out, right.out) <= allowed:
        return "out is right, but lse is not."
    for count, other in drop_last_keys(call, arrays):
        if measure_difference(found.out, other) <= allowed:
            return f"The last {count} keys are missing: the kernel drops its last tile."
    for count in list_remainders(call.lengths[0]):
        kept = call.lengths[0] - count
        if (
            not found.out[..., kept:, :].any()
            and measure_difference(found.out[..., :kept, :], right.out[..., :kept, :])
            <= allowed
        ):
            return f"The last {count} queries are 0: the kernel drops its last tile."
    apart = float((found.out - right.out).abs().max())
    for precision in COARSER:
        q, k, v = (round_tensor(x, precision) for x in arrays)
        coarse = call.run(attention, (q, k, v)).out
        if float((found.out - coarse).abs().max()) < apart / EVIDENT:
            return f"The device rounds: its inputs are rounded to {precision}."
    return f"The fault is not a known one; out differs by up to {apart:.1e}."


def drop_last_keys(call: EngineCall, arrays: Arrays) -> Iterator[tuple[int, Tensor]]:
    """Yield numbers of keys, and the result without the last so many keys."""
    (n_q, n_k), (q, k, v) = call.lengths, arrays
    allowed = torch.ones(n_q, n_k, dtype=torch.bool)
    if call.mask is not None:
        dense = call.mask.dense((n_q, n_k), q_start=call.q_start or 0)
        allowed = torch.tensor(dense)  # a copy: the array may be read-only
    for count in list_remainders(n_k):
        kept = torch.arange(n_k) < n_k - count
        yield count, attention(q, k, v, allowed & kept).out


def list_remainders(length: int) -> list[int]:
    """Return how many rows the last tile of a length has, for common tiles.

    >>> list_remainders(300)
    [12, 44, 16, 32, 64, 128, 256]
    """
    last = [length % tile for tile in COMMON_TILES]
    return [x for x in dict.fromkeys((*last, *COMMON_TILES)) if 0 < x < length]
