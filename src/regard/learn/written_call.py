"""The smallest failing call as Python code that can be pasted and run.

    import numpy as np                            from regard.learn import draw_call

    scores = np.array([[ 0.1 , -0.54],            # shapes (2, 2), (18, 2)
                       [ 0.36,  1.3 ]])           q, k = draw_call("scaling", 12)
    softmax(scores)                               scaled_scores(q, k)

Small arguments are written out, rounded if the call shows the mistake after rounding,
too. Larger ones are drawn again, by the number of the call.

Next: heatmaps.py
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regard.arrays import is_array
from regard.judge.difference import count_numbers, to_array
from regard.learn.exercise import FOLDER, Exercise, read_exercise

FEW = 40  # maximum number of elements of a call that are written out
PLAIN = ("float64", "int64", "bool")  # the dtypes of literals


def list_calls(exercise: Exercise, seed: int = 0) -> list[Sequence[Any]]:
    """Return the arguments of the test calls of an exercise, smallest first."""
    return sorted(exercise.draw(np.random.default_rng(seed)), key=count_numbers)


def draw_call(exercise: str | Path, number: int, *, seed: int = 0) -> tuple[Any, ...]:
    """Return the arguments of a test call, by its number in order of size.

    >>> q, k = draw_call("scaling", 12)
    >>> q.shape, k.shape
    ((2, 2), (18, 2))
    """
    return tuple(list_calls(read_exercise(exercise), seed)[number])


def write_call(
    exercise: Exercise,
    calls: Sequence[Sequence[Any]],
    number: int,
    *,
    seed: int = 0,
    shows: Callable[[Sequence[Any]], bool] = lambda _: False,
) -> str:
    """Return a call as Python code, which includes its imports.

    shows: whether a call with these rounded arguments shows the mistake, too
    """
    arguments = calls[number]
    names = exercise.arguments[: len(arguments)]
    if len(names) < len(arguments):  # spec takes *arguments
        names = tuple(f"x{i}" for i in range(len(arguments)))
    use = f"{exercise.function}({', '.join(names)})"
    if sum(to_array(x).size for x in arguments if is_array(x)) <= FEW:
        codes = [
            write_argument(x, indent=len(name) + len(" = np.array("))
            for name, x in zip(names, arguments, strict=True)
        ]
        if None not in codes:
            given = [read_value(code) for code in codes if code is not None]
            exact = [is_exact(x, y) for x, y in zip(given, arguments, strict=True)]
            if all(exact) or shows(given):
                lines = [
                    f"{name} = {code}{'' if same else '  # rounded'}"
                    for name, code, same in zip(names, codes, exact, strict=True)
                ]
                start = ["import numpy as np\n"] * any("np." in x for x in lines)
                return "\n".join([*start, *lines, use])
    course = exercise.path.parent == FOLDER
    place = json.dumps(exercise.name if course else exercise.path.as_posix())
    options = f"{place}, {number}" + (f", seed={seed}" if seed else "")
    left = ", ".join(names) + "," * (len(names) == 1)
    return (
        f"from regard.learn import draw_call\n\n{tell_shapes(arguments)}"
        f"{left} = draw_call({options})\n{use}"
    )


def tell_shapes(arguments: Sequence[Any]) -> str:
    """Return a comment with the shapes of the arrays."""
    shapes = [str(tuple(x.shape)) for x in arguments if is_array(x)]
    if not shapes:
        return ""
    return f"# shape{'s' * (len(shapes) > 1)} {', '.join(shapes)}\n"


def write_argument(x: Any, *, indent: int) -> str | None:
    """Return an argument as Python code, with few digits; None if it has none."""
    if not is_array(x):
        return write_plain(x)
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "biuf":
        return None
    kind = "" if x.dtype.name in PLAIN else f", dtype=np.{x.dtype.name}"
    if x.size == 0:
        return f"np.zeros({x.shape}, dtype=np.{x.dtype.name})"
    with np.printoptions(nanstr="np.nan", infstr="np.inf"):
        values = np.array2string(x, separator=", ", precision=4, suppress_small=True)
    values = values.replace("\n", "\n" + " " * indent)
    return f"np.array({values}{kind})"


def write_plain(x: Any) -> str | None:
    """Return a number, text, list or tuple as Python code; None for other objects."""
    if isinstance(x, float) and not np.isfinite(x):
        return f"{'-' * (x < 0)}np.{'nan' if np.isnan(x) else 'inf'}"
    code = repr(x)
    try:
        same = ast.literal_eval(code) == x
    except (ValueError, SyntaxError):
        return None
    return code if isinstance(same, bool) and same else None


def read_value(code: str) -> Any:
    """Return the value of code that write_argument returned."""
    return eval(code, {"np": np})  # noqa: S307 (written above)


def is_exact(x: Any, y: Any) -> bool:
    """Return whether a value was written exactly."""
    if not is_array(y):
        return True  # as a literal
    return bool(np.array_equal(x, y, equal_nan=y.dtype.kind == "f"))
