"""The precision that a function computes in, seen from its answers.

A function that is given float64 may compute in float32. That is no mistake, and it is
judged in float32 then. A small error alone is no evidence: an epsilon in the
denominator also gives one. So one of these must hold as well:

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
from regard.judge.inputs import Inputs, NotAskedError, Numbers, TroubleError, round_to
from regard.judge.subject import Subject

ROUNDED = 1e-5  # how far off an answer of moderate numbers may be in float32
ROWS = 4


def settle_precision(subject: Subject) -> str:
    """Let a function be judged in the precision it computes in; return a note on it.

    Nothing changes if its convention declares precisions.
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
    except TroubleError as trouble:
        rounds = answers(e, "float32")
        words = f"given float64, {str(trouble).rstrip('.')}"
        subject.offered = tuple(others) if rounds else subject.offered
    if not rounds:
        return ""
    subject.precisions = tuple(others)
    return f"{words}; it is judged in {', '.join(others)}."


def answers(e: Examiner, precision: str) -> bool:
    """Tell whether it answers at all in a precision."""
    try:
        e.ask(draw(e, e.draw(ROWS)), precision)
    except (TroubleError, NotAskedError):
        return False
    return True


def computes_in_single(e: Examiner) -> bool:
    """Tell whether answers are those of float32, although float64 was given."""
    inputs = draw(e, e.draw(ROWS))
    out = e.ask(inputs).out
    if is_close(out, e.expect(inputs).out) or not is_close(
        out, e.expect(inputs).out, ROUNDED
    ):
        return False
    kept = inputs.round("float32")
    return (
        is_single(out)
        or is_single(e.ask(draw(e, e.unit(ROWS))).out)
        or np.array_equal(out, e.ask(replace(kept, v=inputs.v)).out)
        or np.array_equal(out, e.ask(replace(inputs, v=kept.v)).out)
        or rounds_sums(e)
        or rounds_scale(e, inputs, out)
    )


def draw(e: Examiner, v: Numbers) -> Inputs:
    """Return random queries and keys for some values."""
    return Inputs(q=e.draw(ROWS), k=e.draw(ROWS), v=v)


def is_close(x: Numbers, y: Numbers, atol: float = TOLERANCE["float64"]) -> bool:
    """Tell whether all numbers agree."""
    return bool(np.allclose(x, y, rtol=atol, atol=atol))


def is_single(x: Numbers) -> bool:
    """Tell whether float32 holds all of these numbers."""
    return np.array_equal(x, round_to(x, "float32"))


def rounds_sums(e: Examiner) -> bool:
    """Tell whether sums of weights miss 1 on both sides, as rounding does."""
    ones = np.ones((1, e.heads, ROWS, e.width))
    apart = np.concatenate([e.ask(draw(e, ones)).out.ravel() - 1 for _ in range(6)])
    low, high = apart.min(), apart.max()
    return bool(-1e-6 < low < -1e-12 and 1e-12 < high < 1e-6)


def rounds_scale(e: Examiner, inputs: Inputs, out: Numbers) -> bool:
    """Tell whether out is right for a scale, or a root of D, that is rounded."""
    root = float(e.width) ** 0.5
    scales = (float(np.float32(1 / root)), 1 / float(np.float32(root)))
    rights = (e.expect(replace(inputs, scale=scale)).out for scale in scales)
    return any(is_close(out, right) for right in rights)
