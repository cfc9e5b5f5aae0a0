"""Grade a function in a notebook.

    from regard.learn import check

    def softmax(scores): …
    check(softmax)              finds the exercise by the name of the function

At the end of a cell it shows the message and both answers as coloured tables; print
shows the same as text.

Next: notebook_file.py
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

import numpy as np

from regard.errors import OptionError
from regard.judge.inputs import Numbers
from regard.learn.exercise import Exercise, Function, list_exercises
from regard.learn.grade import Grade, grade
from regard.show.palette import fit_signed

LARGE = 16  # maximum rows and columns of a table
SMALL = 8  # up to this many columns, the numbers are shown


@dataclass(frozen=True, eq=False)
class NotebookGrade:
    """A grade that a notebook can show."""

    grade: Grade
    exercise: Exercise

    @property
    def passed(self) -> bool:
        """Whether the function is right."""
        return self.grade.passed

    def __str__(self) -> str:
        return str(self.grade)

    def __repr__(self) -> str:
        return str(self.grade)

    def _repr_html_(self) -> str:
        """Return the message, the smallest failing call and both answers as HTML."""
        found = self.grade
        if found.passed:
            return f"<p><b>Right.</b></p><pre>{escape(self.exercise.solution)}</pre>"
        parts = [f"<p><b>{escape(found.sentence)}</b></p>"]
        if found.call:
            call = f"<pre>{escape(found.call)}</pre>"
            parts.append(f"<p>The smallest call that shows it:</p>{call}")
        apart = found.difference
        if apart is not None and apart.yours is not None:
            maps = {
                "Yours": apart.yours,
                "Specification": apart.expected,
                "Difference": apart.difference,
            }
            drawn = "".join(
                f'<div style="display:inline-block;margin-right:2em">{escape(title)}'
                f"{write_html_table(x)}</div>"
                for title, x in maps.items()
                if x is not None
            )
            parts.append(drawn)
        return "".join(parts)


def check(
    fn: Function,
    *,
    exercise: str | None = None,
    course: str | Path | None = None,
    seed: int = 0,
    limit: float = 10.0,
) -> NotebookGrade:
    """Grade a function; its name determines the exercise.

    exercise: name of the exercise, if the function has another name
    course: a folder of your own exercises
    limit: seconds allowed for each call
    """
    known = read_course(course)
    wanted = getattr(fn, "__name__", "") if exercise is None else exercise
    for one in known:
        if wanted == (one.function if exercise is None else one.name):
            return NotebookGrade(grade(one, fn, seed=seed, limit=limit), one)
    names = ", ".join(one.function for one in known)
    raise OptionError(
        f'no exercise has a function "{wanted}", expected one of {names}. '
        f'Or name the exercise: check(fn, exercise="{known[0].name}").'
    )


@cache
def read_course(course: str | Path | None) -> tuple[Exercise, ...]:
    """Read all exercises; cached."""
    return tuple(list_exercises(course))


def write_html_table(x: Numbers) -> str:
    """Return a 2-d array as an HTML table, coloured by value."""
    x = x[:LARGE, :LARGE]
    tints = fit_signed(x).paint(np.nan_to_num(x, posinf=0, neginf=0))
    rows = []
    for line, colours in zip(x, tints, strict=True):
        cells = []
        for value, (red, green, blue) in zip(line, colours, strict=True):
            ink = "#000" if int(red) + int(green) + int(blue) > 380 else "#fff"
            paint = f"background:rgb({red},{green},{blue});color:{ink}"
            if not np.isfinite(value):
                paint = "background:none;color:inherit"
            text = (
                f"{value:.3g}" if len(line) <= SMALL or not np.isfinite(value) else ""
            )
            cells.append(f'<td style="{paint};padding:2px 6px">{text}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(rows)}</table>"
