"""The lessons: short Python files, each of which goes with some exercises.

    lesson = find_lesson("softmax")
    lesson.title                       "2. …"
    lesson.path                        …/02_softmax.py: run it, or open it as a notebook
    write_markdown(lesson)             its text and code; docs/lessons: the output

A checkout has them in lessons/, a wheel in lesson_files/, next to this file
(pyproject.toml). The last cell of a lesson names its exercises.

Next: workspace.py
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PLACES = (
    Path(__file__).parent / "lesson_files",  # of a wheel
    Path(__file__).parents[3] / "lessons",  # of a checkout
)
CELL = re.compile(r"^# %%(.*)\n", re.MULTILINE)
EXERCISES = "Exercises (`regard learn`): "


@dataclass(frozen=True)
class Lesson:
    """A lesson and the names of its exercises."""

    path: Path
    title: str
    exercises: tuple[str, ...]


@cache
def list_lessons() -> tuple[Lesson, ...]:
    """Return the lessons in order; none if they are not installed."""
    found = next((x for x in PLACES if x.is_dir()), None)
    return () if found is None else tuple(map(read_lesson, list_files(found)))


def list_files(folder: Path) -> list[Path]:
    """Return the files of the lessons in a folder."""
    return sorted(folder.glob("[0-9][0-9]_*.py"))


def read_lesson(path: Path) -> Lesson:
    """Return what the first and the last cell of a lesson say."""
    text = path.read_text("utf-8")
    title = text.splitlines()[1].removeprefix("# # ")
    named = text.rpartition(EXERCISES)[2]
    return Lesson(path, title, tuple(re.findall(r"`(\w+)`", named)))


def find_lesson(exercise: str) -> Lesson | None:
    """Return the lesson of an exercise of the course, or None."""
    return next((x for x in list_lessons() if exercise in x.exercises), None)


def write_markdown(lesson: Lesson) -> str:
    """Return the text and the code of a lesson as Markdown; nothing is run."""
    _, *parts = CELL.split(lesson.path.read_text("utf-8"))
    cells = []
    for mark, body in zip(parts[::2], parts[1::2], strict=True):
        if "[markdown]" in mark:
            cells.append("\n".join(x[2:] for x in body.strip("\n").splitlines()))
        else:
            cells.append(f"```python\n{body.strip()}\n```")
    return "\n\n".join(cells) + "\n"
