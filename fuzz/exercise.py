"""Hunt: files of a course, and a learner's own, read as the runner reads them.

    text ─▶ read_exercise ─▶ an Exercise whose every part can be shown
         ─▶ load_function, grade_text ─▶ a function, or a sentence

Such a file is a program, and a program may do anything: to try one is to run it. So a
damaged one is run only if it does nothing: names of constants, functions that are not
called. Whatever Python cannot read is tried in any case.

Next: address.py
"""

from __future__ import annotations

import ast
import json
import math
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

from damage import damage_words
from hunt import SENTENCE, Target, main

from regard.errors import RegardError
from regard.learn.exercise import EXTRAS, FOLDER, Exercise, read_exercise
from regard.learn.grade_file import load_function
from regard.learn.in_browser import run_text

WORDS: tuple[str, ...] = ()
WORDS += ("NAME = ", "MINUTES = ", "NEEDS = ", "EXTRA = ", "STUB = ", "HINTS = ")
WORDS += ("\n",)
WORDS += ("ATOL = ", "check = ", "spec = ", "draw = ", "reference = ", "mistake_a = ")
WORDS += ("def spec(x):\n    return x\n", "__doc__ = ", "__name__ = ", "()", "('a',)")
WORDS += ("1", "-1", "None", "''", '"""', "'double'", "[]", "{}", "1e999", "9" * 5000)
WORDS += (
    "\x00",
    "\ufeff",
    "\x0c",
    "\\",
    "é",
    "((((",
    "-" * 3000,
    "(" * 300,
    "lambda: ",
)
WORDS += (
    "class spec: pass\n",
    "    ",
    "\t",
    "# coding: latin-1\n",
    "del NAME\n",
    "\u2028",
)
QUIET = (ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef, ast.Expr, ast.Delete)
OWN = FOLDER / "one_score.py"


def check(data: bytes) -> None:
    """Read a file as that of a teacher, and as that of a learner."""
    if not is_quiet(data):
        return
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes in its texts
        path = Path(folder) / "double.py"
        path.write_bytes(data)
        with suppress(RegardError):
            assert callable(load_function(path, "spec"))
        told = json.loads(run_text(str(OWN), data.decode("utf-8", "surrogateescape")))
        assert told["sentence"].isprintable(), told
        assert len(told["sentence"]) < SENTENCE
        show(read_exercise(path))


def show(exercise: Exercise) -> None:
    """Ask for all that the runner and the page show of an exercise."""
    assert all(isinstance(x, str) for x in (exercise.title, exercise.text))
    assert all(isinstance(x, str) for x in (*exercise.hints, *exercise.needs))
    assert exercise.extra in EXTRAS
    assert 0 <= exercise.atol < math.inf
    assert exercise.minutes >= 0
    assert exercise.function in exercise.solution or exercise.solution
    assert all(isinstance(x, str) for x in exercise.arguments)
    assert all(callable(x.function) and x.sentence for x in exercise.mistakes)


def is_quiet(data: bytes) -> bool:
    """Tell whether running a file does nothing but name things."""
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True  # nobody can run it
    for line in tree.body:
        if not isinstance(line, QUIET):
            return False
        outside = [line]
        if isinstance(line, ast.FunctionDef):
            outside = [*line.decorator_list, line.args]  # type: ignore[list-item]
        for x in outside:
            if any(isinstance(y, ast.Call | ast.BinOp) for y in ast.walk(x)):
                return False
    return True


TARGET = Target("exercise", check, damage_words(WORDS), longest=2**13)
if __name__ == "__main__":
    main(TARGET)
