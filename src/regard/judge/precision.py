"""Detect the precision that a function computes in from its results.

A function may compute in float32 or less when given float64, as most kernels do. That
is not an error; it is then checked with the tolerance of that precision. These show
that a function computes in a precision P, whether or not its results are right:

    f(q, k, v) == f(q, P(k), v)       k is rounded to P; likewise q or v
    f(q, k, v) == P(f(q, k, v))       out is rounded to P; with v = I, the weights are

Neither may also hold with 4 bits less, or zeros would be of any precision.
These show it only if the error is one that P explains:

    w / max(w) == P(w / max(w))       the exponentials are rounded, their sum is not
    rows sum to more and to less than 1, by 1e-12 to 1e-6     the row sums are float32
    f is right for the scale P(1 / sqrt(D)), or log2(e) of nine digits

A small error alone is not sufficient, because an epsilon in the denominator also causes
one.

Next: case.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from regard.judge.case import Examiner
from regard.judge.difference import TOLERANCE
from regard.judge.inputs import (
    BITS,
    CallFailedError,
    Inputs,
    NotAskedError,
    Numbers,
    round_bits,
    round_to,
)
from regard.judge.subject import Subject

COARSER = {  # what a function of a dtype may compute in, coarsest first
    "float64": ("bfloat16", "float16", "float32"),
    "float32": ("bfloat16", "float16"),
    "float16": ("bfloat16",),
    "bfloat16": (),
}
EXACT = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}
LARGEST = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 8e-2}  # error for moderate q
ROWS = 4
SHIFT = 2.0**20  # float16 overflows
LOG2_E = 1 / math.log(2)


def settle_precision(subject: Subject) -> str:
    """Set what the function computes in, for each dtype; return a note, or "".

    Only the note is returned if the convention declares precisions: they are a claim.
    """
    e = Examiner(subject, np.random.default_rng(0))
    declared = subject.convention.precisions is not None
    refused = {} if declared else drop_refused(e)
    try:
        found = {dtype: detect_precision(e, dtype) for dtype in subject.offered}
    except (CallFailedError, NotAskedError):
        return describe_refusal(refused, subject)
    lower = {dtype: computed for dtype, computed in found.items() if computed != dtype}
    if declared:
        said = [f"given {x}, it computes in {y}" for x, y in lower.items()]
        return f"{'; '.join(said)}; it is judged as declared." if said else ""
    subject.computes = found
    hosts = {host_precision(computed, found) for computed in found.values()}
    subject.precisions = tuple(x for x in subject.offered if x in hosts)
    return describe_rounding(refused, lower, subject)


def host_precision(computed: str, found: dict[str, str]) -> str:
    """Return the dtype to judge a precision in: itself, or else float32 if possible."""
    if found.get(computed) == computed:
        return computed
    hosts = [dtype for dtype, other in found.items() if other == computed]
    return "float32" if "float32" in hosts else hosts[0]


def drop_refused(e: Examiner) -> dict[str, str]:
    """Remove the first dtypes that the function refuses, if it accepts a later one."""
    refused: dict[str, str] = {}
    for dtype in e.subject.offered:
        try:
            e.ask(draw_inputs(e, e.draw(ROWS)), dtype)
        except CallFailedError as trouble:
            refused[dtype] = str(trouble).rstrip(".")
        except NotAskedError:
            return {}
        else:
            kept = tuple(x for x in e.subject.offered if x not in refused)
            e.subject.offered = e.subject.precisions = kept
            return refused
    return {}


def describe_refusal(refused: dict[str, str], subject: Subject) -> str:
    """Return the note on dtypes that raise an error."""
    if not refused:
        return ""
    reasons: dict[str, list[str]] = {}
    for dtype, why in refused.items():
        reasons.setdefault(why, []).append(dtype)
    said = "; ".join(f"given {' or '.join(x)}, {why}" for why, x in reasons.items())
    return f"{said}; it is judged in {', '.join(subject.precisions)}."


def describe_tolerances(subject: Subject) -> str:
    """Return the dtypes that are judged, each with its tolerance."""
    rooms = (
        f"{x} (tolerance {TOLERANCE[subject.computes[x]]:.0e})".replace("e-0", "e-")
        for x in subject.precisions
    )
    return f"judged in {', '.join(rooms)}."


def describe_rounding(
    refused: dict[str, str], lower: dict[str, str], subject: Subject
) -> str:
    """Return the note on dtypes that are rounded to a lower precision."""
    if not lower:
        return describe_refusal(refused, subject)
    said = []
    for computed in dict.fromkeys(lower.values()):
        given = " or ".join(x for x in lower if lower[x] == computed)
        said.append(f"given {given}, it computes in {computed}")
    judged = [
        x if subject.computes[x] == x else f"{x} with the tolerance of {lower[x]}"
        for x in subject.precisions
    ]
    said = [describe_refusal(refused, subject).rpartition("; ")[0], *said]
    return f"{'; '.join(filter(None, said))}; it is judged in {', '.join(judged)}."


def detect_precision(e: Examiner, dtype: str) -> str:
    """Return the precision that the function computes in when given a dtype."""
    inputs = draw_inputs(e, e.draw(ROWS))
    out = e.ask(inputs, dtype).out
    right = e.expect(inputs, dtype).out
    if is_close(out, right, EXACT[dtype]):
        return dtype
    for computed in COARSER[dtype]:
        is_rounded = rounds_visibly(e, inputs, out, dtype, computed)
        if not is_rounded and is_close(out, right, LARGEST[computed]):
            is_rounded = rounds_inside(e, inputs, out, dtype, computed)
        if is_rounded:
            wide = computed == "float16" and reaches_far(e, inputs, out, dtype)
            return "tf32" if wide else computed
    return dtype


def rounds_visibly(
    e: Examiner, inputs: Inputs, out: Numbers, dtype: str, computed: str
) -> bool:
    """Return whether the inputs, the weights or out are rounded to a precision."""
    if is_exact(out, computed):
        return True
    if is_exact(e.ask(draw_inputs(e, e.unit(ROWS)), dtype).out, computed):
        return True
    kept, fewer = inputs.round(computed), BITS[computed] - 4
    for name in "kvq":
        x = getattr(kept, name)
        parts: list[dict[str, Any]] = [{name: x}, {name: round_bits(x, fewer)}]
        same, less = (replace(inputs, **part) for part in parts)
        if np.array_equal(out, e.ask(same, dtype).out) and not np.array_equal(
            out, e.ask(less, dtype).out
        ):
            return True
    return False


def rounds_inside(
    e: Examiner, inputs: Inputs, out: Numbers, dtype: str, computed: str
) -> bool:
    """Return whether the exponentials, the row sums or the scale are rounded."""
    weights = e.ask(draw_inputs(e, e.unit(ROWS)), dtype).out[..., :ROWS]
    ratios = weights / weights.max(-1, keepdims=True)
    near = np.abs(ratios - round_to(ratios, computed)) <= 4 * 2.0 ** -BITS[dtype]
    few = round_bits(ratios, BITS[computed] - 4)
    if (near & (ratios < 1) & (np.abs(ratios - few) > 1e-9)).sum() >= ROWS:
        return True
    if computed != "float32":
        return False
    return rounds_sums(e) or rounds_scale(e, inputs, out)


def reaches_far(e: Examiner, inputs: Inputs, out: Numbers, dtype: str) -> bool:
    """Return whether keys and values beyond the range of float16 are handled."""
    q, k, v = inputs.q / SHIFT, inputs.k * SHIFT, inputs.v * SHIFT
    found = e.ask(replace(inputs, q=q, k=k, v=v), dtype).out / SHIFT
    return is_close(found, out, LARGEST["float16"])


def draw_inputs(e: Examiner, v: Numbers) -> Inputs:
    """Return inputs with random queries and keys, and these values."""
    return Inputs(q=e.draw(ROWS), k=e.draw(ROWS), v=v)


def is_close(x: Numbers, y: Numbers, atol: float) -> bool:
    """Return whether all numbers agree within atol, absolute and relative."""
    return bool(np.allclose(x, y, rtol=atol, atol=atol))


def is_exact(x: Numbers, precision: str) -> bool:
    """Return whether all numbers fit a precision, and some need all of its bits."""
    if not np.array_equal(x, round_to(x, precision)):
        return False
    return not np.array_equal(x, round_bits(x, BITS[precision] - 4))


def rounds_sums(e: Examiner) -> bool:
    """Return whether row sums deviate from 1 in both directions, as rounding does."""
    ones = np.ones((1, e.heads, ROWS, e.width))
    apart = np.concatenate(
        [e.ask(draw_inputs(e, ones)).out.ravel() - 1 for _ in range(6)]
    )
    low, high = apart.min(), apart.max()
    return bool(-1e-6 < low < -1e-12 and 1e-12 < high < 1e-6)


def rounds_scale(e: Examiner, inputs: Inputs, out: Numbers) -> bool:
    """Return whether out is right for a scale that is rounded to float32."""
    return any(
        is_close(out, e.expect(replace(inputs, scale=scale)).out, EXACT["float64"])
        for scale in round_scales(e.width)
    )


def round_scales(width: int) -> Iterator[float]:
    """Yield 1 / sqrt(D) with a part of it, or of log2(e), rounded."""
    root = float(width) ** 0.5
    yield float(np.float32(1 / root))
    yield 1 / float(np.float32(root))
    yield float(np.float32(LOG2_E / root)) / LOG2_E
    yield float(np.float32(LOG2_E)) / LOG2_E / root
    yield 1.44269504 / LOG2_E / root  # the constant in many kernels that use exp2
