"""Which faults change the function, and whether the grader rejects them.

    for verdict in try_faults(exercise): ...          (kind, name, verdict)

    crash        it raises on every call that the exercise allows
    equivalent   it gives the reference's answers on all of them
    rejected     it gives another answer, and the grader says so
    accepted     it gives another answer, and the grader passes it: a defect

Next: contracts.py
"""

import inspect
import math
import warnings
from dataclasses import replace

import numpy as np

from faulty.behaviour import bend
from faulty.contracts import draw_calls
from faulty.syntax import edit_syntax
from regard.judge.difference import count_numbers
from regard.learn.exercise import read_exercise
from regard.learn.grade import KindError, grade, normalize_answer, try_call

VERDICTS = ("crash", "equivalent", "rejected", "accepted")
CALLS = 100  # of the contract, for each fault


def read_fast(name):
    """Read an exercise whose calls and specified answers are computed once."""
    exercise = read_exercise(name)
    drawn, answers = {}, {}

    def draw(rng):
        key = rng.bit_generator.state["state"]["state"]
        if key not in drawn:
            drawn[key] = sorted(exercise.draw(rng), key=count_numbers)
        return drawn[key]

    def spec(*arguments):
        key = tuple(x.tobytes() if isinstance(x, np.ndarray) else x for x in arguments)
        if key not in answers:
            answers[key] = normalize_answer(exercise.spec(*arguments))
        return answers[key]

    spec.__signature__ = inspect.signature(exercise.spec)
    return replace(exercise, draw=draw, spec=spec)


def list_faults(exercise, call):
    """Yield (kind, name, function) of every fault."""
    for name, fn in edit_syntax(exercise):
        yield "syntax", name, fn
    for name, fn in bend(exercise, call):
        yield "behaviour", name, fn


def try_faults(name, *, seed=0, share=1):
    """Yield (kind, name, verdict) of every fault, or of one in `share` of them."""
    exercise = read_fast(name)
    rng = np.random.default_rng(seed)
    n_calls = CALLS // 5 if exercise.arguments[0] == "model" else CALLS  # they are slow
    calls = list(draw_calls(name, rng, n_calls))
    right = [try_call(exercise.reference, call, math.inf) for call in calls]
    several = isinstance(right[0].answer, tuple)
    for i, (kind, fault, fn) in enumerate(list_faults(exercise, calls[0])):
        if (i + seed) % share == 0:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                found = judge(exercise, fn, calls, right, several=several)
            yield kind, fault, found


def judge(exercise, fn, calls, right, *, several):
    """Return what becomes of one fault."""
    make = fn if getattr(fn, "fresh", False) else lambda: fn
    changed = ran = False
    tried = make()
    for call, expected in zip(calls, right, strict=True):
        given = [np.copy(x) if isinstance(x, np.ndarray) else x for x in call]
        found = try_call(tried, given, math.inf, several=several)
        ran = ran or found.error is None or isinstance(found.error, KindError)
        changed = changed or not found.agrees(expected, exercise.atol)
        if ran and changed:
            break
    if not ran:
        return "crash"
    if not changed and not overwrites(make(), calls):
        return "equivalent"
    if exercise.extra:  # only the verdict is asked for, and not of the large model
        exercise = replace(exercise, check=None, mistakes=())
    graded = grade(exercise, make(), limit=math.inf)
    return "accepted" if graded.passed else "rejected"


def overwrites(fn, calls):
    """Tell whether a function changes its arguments."""
    for call in calls[:5]:
        given = [np.copy(x) if isinstance(x, np.ndarray) else x for x in call]
        try:
            fn(*given)
        except Exception:  # noqa: BLE001 (a fault may raise anything)
            continue
        pairs = [(x, y) for x, y in zip(given, call, strict=True) if np.ndim(x)]
        if any(not np.array_equal(x, y, equal_nan=True) for x, y in pairs):
            return True
    return False
