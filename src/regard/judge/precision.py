"""Detect the precision that a function computes in from its results.

A function may compute in float32 when given float64. That is not an error; it is then
checked in float32. A small error alone is not sufficient evidence, because an epsilon
in the denominator also causes one. So one of these must hold as well:

    f(q, k, v) == f(float32(q), float32(k), v)              q and k are rounded
    f(q, k, v) == f(q, k, float32(v))                       v is
    f(q, k, v) == float32(f(q, k, v))                       the weights or out are
    rows sum to more and to less than 1, by 1e-12 to 1e-6   the row sums are
    f(q, k, v) is right for the scale float32(1 / sqrt(D))  the scale is

Next: case.py
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from regard.judge.case import Examiner
from regard.judge.difference import TOLERANCE
from regard.judge.inputs import (
    CallFailedError,
    Inputs,
    NotAskedError,
    Numbers,
    round_to,
)
from regard.judge.subject import Subject

ROUNDED = 1e-5  # largest error of a float32 result for inputs of moderate size
ROWS = 4


def settle_precision(subject: Subject) -> str:
    """Set subject.precisions to what the function computes in; return a note.

    Nothing changes if the convention declares precisions.
    """
    best, *others = subject.offered
    if subject.convention.precisions or best != "float64":
        return ""
    e = Examiner(subject, np.random.default_rng(0))
    try:
        rounds = computes_in_single(e)
        words = "given float64, it computes in float32"
    except NotAskedError:
        return ""
    except CallFailedError as trouble:
        rounds = answers(e, "float32")
        words = f"given float64, {str(trouble).rstrip('.')}"
        subject.offered = tuple(others) if rounds else subject.offered
    if not rounds:
        return ""
    subject.precisions = tuple(others)
    return f"{words}; it is judged in {', '.join(others)}."


def answers(e: Examiner, precision: str) -> bool:
    """Return whether a call in a precision succeeds."""
    try:
        e.ask(draw_inputs(e, e.draw(ROWS)), precision)
    except (CallFailedError, NotAskedError):
        return False
    return True


def computes_in_single(e: Examiner) -> bool:
    """Return whether the function computes in float32 when given float64."""
    inputs = draw_inputs(e, e.draw(ROWS))
    out = e.ask(inputs).out
    if is_close(out, e.expect(inputs).out) or not is_close(
        out, e.expect(inputs).out, ROUNDED
    ):
        return False
    kept = inputs.round("float32")
    return (
        is_single(out)
        or is_single(e.ask(draw_inputs(e, e.unit(ROWS))).out)
        or np.array_equal(out, e.ask(replace(kept, v=inputs.v)).out)
        or np.array_equal(out, e.ask(replace(inputs, v=kept.v)).out)
        or rounds_sums(e)
        or rounds_scale(e, inputs, out)
    )


def draw_inputs(e: Examiner, v: Numbers) -> Inputs:
    """Return inputs with random queries and keys, and these values."""
    return Inputs(q=e.draw(ROWS), k=e.draw(ROWS), v=v)


def is_close(x: Numbers, y: Numbers, atol: float = TOLERANCE["float64"]) -> bool:
    """Return whether all numbers agree within atol, absolute and relative."""
    return bool(np.allclose(x, y, rtol=atol, atol=atol))


def is_single(x: Numbers) -> bool:
    """Return whether all numbers are representable in float32."""
    return np.array_equal(x, round_to(x, "float32"))


def rounds_sums(e: Examiner) -> bool:
    """Return whether row sums deviate from 1 in both directions, as rounding does."""
    ones = np.ones((1, e.heads, ROWS, e.width))
    apart = np.concatenate(
        [e.ask(draw_inputs(e, ones)).out.ravel() - 1 for _ in range(6)]
    )
    low, high = apart.min(), apart.max()
    return bool(-1e-6 < low < -1e-12 and 1e-12 < high < 1e-6)


def rounds_scale(e: Examiner, inputs: Inputs, out: Numbers) -> bool:
    """Return whether out is right for a scale, or sqrt(D), rounded to float32."""
    root = float(e.width) ** 0.5
    scales = (float(np.float32(1 / root)), 1 / float(np.float32(root)))
    rights = (e.expect(replace(inputs, scale=scale)).out for scale in scales)
    return any(is_close(out, right) for right in rights)
