"""Every exercise of the course: what is right passes, what is wrong is named."""

import ast
import importlib
import inspect
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from regard.judge.difference import count_numbers
from regard.learn.course import ORDER
from regard.learn.exercise import FOLDER, list_exercises, read_exercise
from regard.learn.grade import Outcome, grade, normalize_answer

RESULTS_BY = "test"  # see .ci/kept_results.py

HERE = Path(__file__).parent
# how many seeds, and which share of the wrong solutions on each
SEEDS, SHARE = (200, 1) if "REGARD_SEEDS" in os.environ else (7, 4)
GENERIC = "Some of your numbers", "Your answer has NaN", "The numbers are right"
EVERY = pytest.mark.parametrize("name", ORDER)
MODELS = ("read_head", "ablate_head", "find_document")  # that have one as argument


@cache
def read(name):
    """An exercise whose arguments and specified answers are computed once a seed."""
    exercise = read_exercise(name)
    if exercise.extra:
        pytest.importorskip("torch")
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


def list_wrong(name):
    """The wrong solutions of an exercise: functions that have a docstring."""
    module = importlib.import_module(f"wrong.{name}")
    found = inspect.getmembers(module, inspect.isfunction)
    return [fn for _, fn in found if fn.__doc__ and fn.__module__ == module.__name__]


def hangs(fn):
    return (fn.__doc__ or "").startswith("It did not answer")


def say(exercise, fn, **options):
    exercise = read(exercise) if isinstance(exercise, str) else exercise
    return grade(exercise, fn, limit=0.2 if hangs(fn) else math.inf, **options)


def assert_can_be_pasted(name, fn, call):
    """The call that is shown runs as it is, and shows that the function is wrong."""
    exercise, space = read(name), {read(name).function: fn}
    *before, use = ast.parse(call).body
    exec(compile(ast.Module(before, []), "call", "exec"), space)
    assert ast.unparse(use).startswith(f"{exercise.function}(")
    if hangs(fn):
        return
    given = [space[x.id] for x in use.value.args]
    copies = [x.copy() if hasattr(x, "copy") else x for x in given]
    right = Outcome(normalize_answer(exercise.spec(*copies)))
    try:
        answer = eval(compile(ast.Expression(use.value), "call", "eval"), space)
        several = isinstance(right.answer, tuple)
        yours = Outcome(normalize_answer(answer, several=several))
    except Exception as error:  # noqa: BLE001 (whatever it raises)
        yours = Outcome(None, error)
    changed = any(
        not np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
        for x, y in zip(given, copies, strict=True)
        if isinstance(x, np.ndarray)
    )
    assert changed or not yours.agrees(right, exercise.atol), (fn.__name__, call)


@EVERY
def test_the_reference_is_right(name):
    found = say(name, read(name).reference)
    assert found.passed, str(found)


@EVERY
def test_the_stub_is_not_written_yet(name):
    space = {}
    exec(read(name).stub, space)
    found = say(name, space[read(name).function])
    assert not found.passed
    assert found.sentence == f"{read(name).function} is not written yet."


@EVERY
def test_every_mistake_is_graded_with_its_own_sentence(name):
    for mistake in read(name).mistakes:
        found = say(name, mistake.function)
        assert not found.passed, mistake.name
        assert found.sentence == mistake.sentence, mistake.name
        assert found.mistake == mistake.name
        assert_can_be_pasted(name, mistake.function, found.call)


@pytest.mark.filterwarnings("ignore:knock_out:RuntimeWarning")  # one forgets the with
@EVERY
def test_wrong_solutions_are_graded_wrong_with_the_intended_sentence(name):
    wrong = list_wrong(name)
    assert len(wrong) >= 3
    for fn in wrong:
        found = say(name, fn)
        assert not found.passed, fn.__name__
        assert " ".join(fn.__doc__.split()) in found.sentence, fn.__name__
        assert not found.sentence.startswith(GENERIC), fn.__name__
        if found.call:  # a property check has none
            assert_can_be_pasted(name, fn, found.call)


@EVERY
def test_no_verdict_depends_on_the_seed(name):
    exercise = read(name)
    right = [exercise.reference]
    wrong = [mistake.function for mistake in exercise.mistakes]
    wrong += [fn for fn in list_wrong(name) if not hangs(fn)]
    if exercise.extra:
        exercise = replace(exercise, check=None)  # the large model is not asked again
    expected = {fn: say(exercise, fn).mistake for fn in wrong}
    # a call that watches a model takes 100 times as long as one in NumPy
    for seed in range(1, SEEDS if name not in MODELS else 1 + SEEDS // 12):
        for fn in right:
            assert say(exercise, fn, seed=seed).passed, seed
        for i, fn in enumerate(wrong):
            if (i + seed) % SHARE == 0:
                found = say(exercise, fn, seed=seed)
                assert not found.passed, (fn.__name__, seed)
                assert found.mistake == expected[fn], (fn.__name__, seed)


@EVERY
def test_an_exercise_is_complete(name):
    exercise = read(name)
    assert 1 <= exercise.minutes <= 60
    assert all(need in ORDER[: ORDER.index(name)] for need in exercise.needs)
    words = len(exercise.text.split())
    assert 60 <= words <= 260, words
    calls = list(exercise.draw(np.random.default_rng(0)))
    assert len(calls) >= 5
    arguments = len(exercise.arguments)
    assert all(len(call) == arguments for call in calls)
    written = ast.parse(exercise.stub).body[-1]
    assert [x.arg for x in written.args.args] == list(exercise.arguments)
    assert len({exercise.solution, exercise.stub}) == 2
    assert exercise.function in exercise.solution


@EVERY
def test_the_file_names_the_next_of_the_course(name):
    docstring = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text("utf-8")))
    following = ORDER[ORDER.index(name) + 1 :]
    expected = f"{following[0]}.py" if following else "learn/course.py"
    assert docstring.splitlines()[-1] == f"Next: {expected}"


def test_the_course_has_every_file_and_every_function_once():
    files = {path.stem for path in FOLDER.glob("[!_]*.py")}
    assert files == set(ORDER)
    functions = [exercise.function for exercise in list_exercises()]
    assert len(functions) == len(set(functions))


def test_the_page_lists_the_course_and_shows_what_is_said_today():
    page = (HERE.parent / "docs" / "learn.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (.+) \| (\d+) \|$", page, re.MULTILINE)
    course = [(x.name, x.title, str(x.minutes)) for x in list_exercises()]
    assert rows == [(str(i), *row) for i, row in enumerate(course, 1)]
    assert f"A course of {len(ORDER)} exercises" in page
    words = " ".join(page.split())
    for name, mistake in (
        ("one_score", "no_sum"),
        ("softmax", "bare_no_keepdims"),
        ("softmax", "overflow"),
    ):
        (sentence,) = (x.sentence for x in read(name).mistakes if x.name == mistake)
        assert f"✗ {sentence}" in words


def test_the_course_is_read_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None;"
        "from regard.learn.exercise import list_exercises; print(len(list_exercises()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(ORDER)
