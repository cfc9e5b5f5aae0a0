"""Grade a learner's function: compare it with the specification and explain.

    found = grade(read_exercise("softmax"), my_softmax)
    found.passed, found.sentence
    print(found.draw())        Yours / Specification / Difference

The function is called on random arguments, smallest first, until an answer is wrong. If
a known mistake gives the same wrong answer, its message is shown; otherwise the place
where the answers differ. Exceptions, timeouts and a missing return are explained, too.

Next: written_call.py
"""

from __future__ import annotations

import json
import math
import re
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from regard.arrays import is_array
from regard.judge.difference import (
    Difference,
    compare_parts,
    copy_array,
    find_difference,
    list_parts,
    to_array,
)
from regard.judge.inputs import CallFailedError
from regard.judge.time_limit import call_within
from regard.learn.exercise import Exercise, Function, Mistake
from regard.learn.written_call import list_calls, write_call


@dataclass(frozen=True, eq=False)
class Grade:
    """Whether an answer is right, and the message about it."""

    exercise: str
    passed: bool
    sentence: str
    mistake: str = ""  # name of the known mistake, if any
    difference: Difference | None = None
    call: str = ""  # the smallest failing call, as Python code
    atol: float = field(default=1e-6, repr=False)

    def __str__(self) -> str:
        return "\n\n".join(x for x in (self.sentence, self.draw()) if x)

    def draw(self, *, color: bool = False, width: int = 80) -> str:
        """Return the smallest failing call, and both answers as heatmaps."""
        from regard.learn.heatmaps import draw_answers  # noqa: PLC0415 (browsers do not)

        lines = (
            [f"The smallest call that shows it:\n\n{self.call}"] if self.call else []
        )
        if self.difference is not None and self.difference.yours is not None:
            found = self.difference
            lines.append(draw_answers(found, atol=self.atol, color=color, width=width))
        return "\n\n".join(lines)

    def to_json(self) -> str:
        """Return JSON; non-finite numbers are the strings "nan", "inf" and "-inf"."""
        found = self.difference or Difference("")
        maps = {n: getattr(found, n) for n in ("yours", "expected", "difference")}
        kept = ("exercise", "passed", "sentence", "mistake", "call")
        told = {name: getattr(self, name) for name in kept}
        return json.dumps(told | {n: list_map(x) for n, x in maps.items()})


LARGE = 10**8  # numbers of an answer that are compared


class KindError(TypeError):
    """Raised for an answer that does not consist of real numbers."""


class RecordedFunction:
    """Wrapper of the learner's function that records the last answer or error."""

    def __init__(self, fn: Function, *, several: bool = False) -> None:
        self.fn, self.several = fn, several  # several: a tuple is expected
        self.answer: Any = None
        self.error: BaseException | None = None
        self.thread: int | None = None  # set while a call is running

    def __call__(self, *arguments: Any) -> Any:
        self.answer, self.error = None, None
        self.thread = threading.get_ident()
        try:
            self.answer = normalize_answer(self.fn(*arguments), several=self.several)
        except BaseException as error:  # noqa: BLE001 (raised again)
            self.error = make_printable(error)
            raise self.error from None
        finally:
            self.thread = None
        return self.answer

    def stop(self) -> None:
        """Stop a call that is still running in its thread."""
        import ctypes  # noqa: PLC0415 (not every browser has it)

        if self.thread is not None and self.thread != threading.get_ident():
            ident, ending = ctypes.c_ulong(self.thread), ctypes.py_object(SystemExit)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ending)


def make_printable(error: BaseException) -> BaseException:
    """Return an error, or a plain one in its place if its text cannot be read."""
    try:
        str(error)
    except Exception:  # noqa: BLE001 (a learner's __str__ may raise anything)
        said = f"a {type(error).__name__} whose message cannot be read"
        return RuntimeError(said).with_traceback(error.__traceback__)
    return error


def grade(
    exercise: Exercise, fn: Function, *, seed: int = 0, limit: float = 10.0
) -> Grade:
    """Compare a function with the specification of an exercise.

    limit: seconds allowed for each call; math.inf calls without a thread
    """
    calls = list_calls(exercise, seed)
    heard = RecordedFunction(fn)

    def spec(*arguments: Any) -> Any:
        answer = exercise.spec(*arguments)
        heard.several = isinstance(answer, tuple)
        return normalize_answer(answer)

    found = find_difference(heard, spec, calls, atol=exercise.atol, limit=limit)
    right = Grade(exercise.name, passed=True, sentence="Right.", atol=exercise.atol)
    wrong = replace(right, passed=False)
    if found is None:
        said = check_property(exercise, heard, seed, limit)
        return right if said is None else replace(wrong, sentence=said)
    at = next(i for i, call in enumerate(calls) if call is found.arguments)
    if heard.thread is not None:
        heard.stop()
        said = f"It did not answer within {limit:g} seconds: is there an endless loop?"
        return replace(
            wrong, sentence=said, call=write_call(exercise, calls, at, seed=seed)
        )
    if isinstance(heard.error, NotImplementedError):
        return replace(wrong, sentence=f"{exercise.function} is not written yet.")
    said = describe_difference(exercise, heard, found)  # before it is called again
    mistake = name_mistake(exercise, heard, calls, found.arguments, limit)

    def shows(arguments: Sequence[Any]) -> bool:
        yours = try_call(fn, arguments, limit, several=heard.several)
        return not yours.agrees(
            try_call(exercise.spec, arguments, math.inf), exercise.atol
        )

    return replace(
        wrong,
        sentence=mistake.sentence if mistake else said,
        mistake=mistake.name if mistake else "",
        difference=found,
        call=write_call(exercise, calls, at, seed=seed, shows=shows),
    )


def normalize_answer(answer: Any, *, several: bool = False) -> Any:
    """Convert a list to an array, or to a tuple if several answers are expected."""
    if several and isinstance(answer, list):
        return tuple(answer)
    try:
        answer = np.asarray(answer) if isinstance(answer, list) else answer
    except ValueError:  # its rows have different lengths
        return answer
    if answer is not None:  # None has a separate message
        for x in list_parts(answer):
            check_real(x)
    return answer


def check_real(x: Any) -> None:
    """Raise if x does not hold real numbers; a comparison would read "0.5" as 0.5."""
    try:
        kind, size = to_array(x).dtype.kind, to_array(x).size
    except ValueError:  # rows of different lengths, in one of several answers
        return
    if size > LARGE:  # a comparison would fill the memory
        raise KindError(f"the answer has {size} numbers, expected far fewer.")
    if kind == "c":
        raise KindError("these are complex numbers, expected real numbers.")
    if kind not in "biuf":
        what = f"an array of {x.dtype}" if is_array(x) else f"a {type(x).__name__}"
        raise KindError(f"the answer is {what}, expected numbers.")


def check_property(
    exercise: Exercise, heard: RecordedFunction, seed: int, limit: float
) -> str | None:
    """Run the exercise's property check; return its message if it fails."""
    check = exercise.check
    if check is None:
        return None
    try:
        rng = np.random.default_rng(seed)
        said = call_within(limit * exercise.patience, lambda: check(heard, rng))
    except CallFailedError as trouble:
        heard.stop()
        return f"The values are right, but in a further check {trouble}"
    return None if said is None else str(said)


@dataclass(frozen=True, eq=False)
class Outcome:
    """The answer or the error of one call."""

    answer: Any
    error: BaseException | None = None

    def agrees(self, other: Outcome, atol: float) -> bool:
        """Return whether two calls gave the same answer or the same error."""
        if self.error is not None or other.error is not None:
            kinds = [(type(x.error), str(x.error)) for x in (self, other)]
            return kinds[0] == kinds[1]
        if self.answer is None or other.answer is None:
            return self.answer is other.answer
        given = list_parts(self.answer), list_parts(other.answer)
        return compare_parts(*given, atol) is None


def try_call(
    fn: Function, arguments: Sequence[Any], limit: float, *, several: bool = False
) -> Outcome:
    """Call a function once, on copies of the arguments."""
    heard = RecordedFunction(fn, several=several)
    try:
        call_within(limit, lambda: heard(*map(copy_array, arguments)))
    except CallFailedError as trouble:
        heard.stop()
        return Outcome(None, heard.error or trouble)
    return Outcome(heard.answer)


def name_mistake(
    exercise: Exercise,
    heard: RecordedFunction,
    calls: Sequence[Sequence[Any]],
    at: Sequence[Any],
    limit: float,
) -> Mistake | None:
    """Return the known mistake that gives the same wrong answers, or None.

    It must agree on the smallest failing call and on half of all failing calls, because
    two mistakes can agree by chance.
    """
    atol, spec = exercise.atol, exercise.spec
    yours, right = Outcome(heard.answer, heard.error), try_call(spec, at, math.inf)
    same = []
    for mistake in exercise.mistakes:
        theirs = try_call(mistake.function, at, math.inf)
        if yours.agrees(theirs, atol) and not theirs.agrees(right, atol):
            same.append(mistake)
    if not same:
        return None
    failing = []
    for call in calls:
        found = try_call(heard.fn, call, limit, several=heard.several)
        if not found.agrees(try_call(spec, call, math.inf), atol):
            failing.append((call, found))

    def count(mistake: Mistake) -> int:
        tried = (try_call(mistake.function, call, math.inf) for call, _ in failing)
        pairs = zip(failing, tried, strict=True)
        return sum(yours.agrees(theirs, atol) for (_, yours), theirs in pairs)

    best = max(same, key=count)  # the first one in a tie
    return best if 2 * count(best) >= len(failing) else None


def describe_difference(
    exercise: Exercise, heard: RecordedFunction, found: Difference
) -> str:
    """Return a message about a wrong answer that no known mistake explains."""
    name = exercise.function
    if isinstance(heard.error, KindError):
        return f"This is not the expected kind of answer: {heard.error}"
    if heard.error is not None:
        code = getattr(heard.fn, "__code__", None)
        file = getattr(code, "co_filename", "")
        return f"{name} raised {locate_error(heard.error, file)}"
    if heard.answer is None:
        return f"{name} returned None: is there a return statement?"
    if isinstance(heard.answer, list):
        return f"{name} returned a list of rows of different lengths, not an array."
    for i, argument in enumerate(exercise.arguments):
        if found.says.startswith(f"argument {i} is changed"):
            return (
                f"{name} changes its argument {argument}, which the caller still "
                "needs: work on a copy, and write x = x - y instead of x -= y."
            )
    says = re.sub(r"^part (\d+)", r"answer[\1]", found.says)
    says = re.sub(r"^out\b", "answer", says)
    return f"{describe_numbers(found, exercise.atol)}: {says}"


def describe_numbers(found: Difference, atol: float) -> str:
    """Return a short description of how two answers differ."""
    yours, expected = found.yours, found.expected
    if yours is None or expected is None:
        return "This is not the expected kind of answer"
    if np.isnan(yours).any() and not np.isnan(expected).any():
        return "Your answer has NaN, which is 0 / 0 or ∞ − ∞"
    if np.allclose(yours, expected, atol=atol):
        return "Your numbers are nearly right, as if computed in float32"
    if yours.shape == yours.T.shape and np.allclose(yours.T, expected, atol=atol):
        return "The numbers are right, but rows and columns are swapped"
    return "Some of your numbers are not right"


def locate_error(error: BaseException, file: str) -> str:
    """Return the type, the line in a file and the message of an error."""
    steps = traceback.extract_tb(error.__traceback__)
    mine = [step for step in steps if step.filename == file]
    _, cell, number = file.rpartition(", cell ")  # of a notebook
    inside = f" in cell {number}," if cell else " in"
    where = f"{inside} line {mine[-1].lineno} ({mine[-1].line})" if mine else ""
    text = "".join(c for c in " ".join(str(error).split()) if c.isprintable())[:200]
    return f"{type(error).__name__}{where}{': ' if text else '.'}{text}"


def list_map(x: Any) -> Any:
    """Return a 2-d array as nested lists, with non-finite numbers as strings."""
    if x is None:
        return None
    return [[v if math.isfinite(v) else str(v) for v in row] for row in x.tolist()]
