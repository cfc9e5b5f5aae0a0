"""Read an exercise from its Python file: text, specification, stub, hints, mistakes.

    exercise = read_exercise("softmax")         or the path of your own file
    exercise.text, exercise.stub, exercise.hints
    exercise.spec(scores)                       the right answer, as plain loops
    exercise.draw(rng)                          test calls, smallest first

The file has a docstring (a title, the text, a last line "Next: …") and these names:

    NAME       the function to write           spec        the right answer, as loops
    MINUTES    how long it takes               reference   the recommended solution
    NEEDS      exercises before it             draw        yields tuples of arguments
    EXTRA      "", "torch" or "model"          mistake_…   at least three, with the
    STUB       what the learner starts with                message as docstring
    HINTS      three, increasingly specific    check       optional property check

Next: grade.py
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from regard.errors import FileError, OptionError
from regard.learn.course import ORDER

FOLDER = Path(__file__).parent / "exercises"
EXTRAS = ("", "torch", "model")
ATOL = 1e-6  # default tolerance of an answer
PARTS: dict[str, Any] = {
    "NAME": str,
    "MINUTES": int,
    "NEEDS": tuple,
    "EXTRA": str,
    "STUB": str,
    "HINTS": tuple,
    "spec": Callable,
    "reference": Callable,
    "draw": Callable,
}

Function = Callable[..., Any]


@dataclass(frozen=True)
class Mistake:
    """A common wrong solution and the message that explains it."""

    name: str
    function: Function
    sentence: str


@dataclass(frozen=True)
class Exercise:
    """All parts of one exercise."""

    name: str  # of the file
    title: str
    text: str  # Markdown
    function: str  # name of the function that the learner writes
    minutes: int
    needs: tuple[str, ...]
    extra: str
    stub: str
    hints: tuple[str, ...]
    atol: float
    spec: Function = field(repr=False)
    reference: Function = field(repr=False)
    draw: Callable[[Any], Iterable[Sequence[Any]]] = field(repr=False)
    check: Callable[[Function, Any], str | None] | None = field(repr=False)
    mistakes: tuple[Mistake, ...] = field(repr=False)
    path: Path = field(repr=False)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The argument names of the specification."""
        return tuple(inspect.signature(self.spec).parameters)

    @property
    def patience(self) -> float:
        """Factor on the time limits; larger if a model has to be loaded."""
        return 6.0 if self.extra == "model" else 1.0

    @property
    def solution(self) -> str:
        """The source of the reference, renamed to the learner's function."""
        try:
            source = inspect.getsource(self.reference)
        except (OSError, TypeError):
            raise FileError(
                f"{self.path}: reference is not defined in this file, expected def."
            ) from None
        return re.sub(r"\breference\(", f"{self.function}(", source)


def read_exercise(place: str | Path) -> Exercise:
    """Return an exercise, given its name in the course or the path of a file.

    >>> read_exercise("softmax").function
    'softmax'
    """
    path = Path(place)
    if path.suffix != ".py":
        path = FOLDER / f"{place}.py"
        if str(place) not in ORDER:
            known = ", ".join(ORDER)
            raise OptionError(f'no exercise "{place}", expected one of {known}.')
    module = run_file(path)
    check_parts(module, path)
    title, text = read_statement(module, path)
    return Exercise(
        name=path.stem,
        title=title,
        text=text,
        function=module.NAME,
        minutes=module.MINUTES,
        needs=module.NEEDS,
        extra=module.EXTRA,
        stub=module.STUB,
        hints=module.HINTS,
        atol=getattr(module, "ATOL", ATOL),
        spec=module.spec,
        reference=module.reference,
        draw=module.draw,
        check=getattr(module, "check", None),
        mistakes=read_mistakes(module, path),
        path=path,
    )


def list_exercises(folder: str | Path | None = None) -> list[Exercise]:
    """Return the exercises of the course, or of a folder, sorted by file name."""
    if folder is None:
        return [read_exercise(name) for name in ORDER]
    files = sorted(Path(folder).glob("[!_]*.py"))
    if not files:
        raise FileError(
            f"{folder} has no exercises, expected files such as softmax.py."
        )
    return [read_exercise(path) for path in files]


def run_file(path: Path) -> ModuleType:
    """Run a file as a module; raise a FileError if that fails."""
    module = ModuleType(f"regard_exercise_{path.stem}")
    module.__file__ = str(path)
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"cannot read {path}: {error}.") from None
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)  # noqa: S102
    except ModuleNotFoundError:
        raise  # its message names the library to install
    except Exception as error:  # noqa: BLE001 (the file may raise anything)
        said = "".join(c for c in str(error)[:300] if c.isprintable())
        raise FileError(f"{path} raised {type(error).__name__}: {said}.") from None
    return module


def check_parts(module: ModuleType, path: Path) -> None:
    """Raise if a part of the file is missing or has the wrong type."""
    for name, kind in PARTS.items():
        found = getattr(module, name, None)
        if not isinstance(found, kind):
            given = "nothing" if found is None else f"a {type(found).__name__}"
            wanted = "a function" if kind is Callable else f"a {kind.__name__}"
            raise FileError(f"{path}: {name} is {given}, expected {wanted}.")
    check_values(module, path)


def check_values(module: ModuleType, path: Path) -> None:
    """Raise if a part has an invalid value."""
    for name in ("HINTS", "NEEDS"):
        if any(not isinstance(x, str) for x in getattr(module, name)):
            raise FileError(f"{path}: {name} has an item that is not a str.")
    if len(module.HINTS) != 3:
        raise FileError(f"{path}: HINTS has {len(module.HINTS)} hints, expected 3.")
    if module.EXTRA not in EXTRAS:
        given = json.dumps(module.EXTRA[:40])
        raise FileError(f"{path}: EXTRA is {given}, expected one of {EXTRAS}.")
    if not module.NAME.isidentifier() or len(module.NAME) > 60:
        raise FileError(f"{path}: NAME is {module.NAME!r:.60}, expected an identifier.")
    atol = getattr(module, "ATOL", ATOL)
    if not isinstance(atol, int | float) or not 0 <= atol < math.inf:
        raise FileError(f"{path}: ATOL is {atol!r:.60}, expected 0 or more, as {ATOL}.")
    if module.MINUTES < 0:
        raise FileError(f"{path}: MINUTES is {module.MINUTES!r:.60}, expected >= 0.")
    if f"def {module.NAME}(" not in module.STUB:
        raise FileError(f"{path}: STUB does not define {module.NAME}, the NAME.")


def read_statement(module: ModuleType, path: Path) -> tuple[str, str]:
    """Return the title and the text of the docstring, without its Next line."""
    given = module.__doc__ if isinstance(module.__doc__, str) else ""
    lines = inspect.cleandoc(given).splitlines()
    if len(lines) < 3 or lines[1]:
        raise FileError(f"{path}: expected a docstring of title, empty line and text.")
    if lines[-1].startswith("Next: "):
        lines = lines[:-1]
    return lines[0].removesuffix("."), "\n".join(lines[2:]).strip()


def read_mistakes(module: ModuleType, path: Path) -> tuple[Mistake, ...]:
    """Return the mistakes, in the order of the file."""
    found = {n: x for n, x in vars(module).items() if n.startswith("mistake_")}
    if len(found) < 3:
        raise FileError(f"{path} has {len(found)} mistake_ functions, expected 3.")
    for name, function in found.items():
        said = function.__doc__ if callable(function) else None
        if not isinstance(said, str) or not said.strip():
            raise FileError(
                f"{path}: {name:.60} has no docstring, expected a message to show."
            )
    return tuple(
        Mistake(name.removeprefix("mistake_"), fn, " ".join(fn.__doc__.split()))
        for name, fn in found.items()
    )
