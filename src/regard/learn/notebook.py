"""Grade a function in a notebook.

    from regard.learn import check

    def softmax(scores): …
    check(softmax)              finds the exercise by the name of the function

A cell that ends with it shows the sentence and both answers as coloured tables; print
gives the same as text.

Next: plugin.py
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

LARGE = 16  # rows and columns of a table
SMALL = 8  # columns of which the numbers are written


@dataclass(frozen=True, eq=False)
class Checked:
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
        """Show the sentence, the smallest call, and both answers in colour."""
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
                f"{write_table(x)}</div>"
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
) -> Checked:
    """Grade a function that has the name an exercise asks for.

    exercise: which one, if the function has another name
    course: a folder of your own exercises
    limit: seconds for each call
    """
    known = read_course(course)
    wanted = getattr(fn, "__name__", "") if exercise is None else exercise
    for one in known:
        if wanted == (one.function if exercise is None else one.name):
            return Checked(grade(one, fn, seed=seed, limit=limit), one)
    names = ", ".join(one.function for one in known)
    raise OptionError(
        f'no exercise asks for a function "{wanted}"; they ask for {names}. '
        f'Write check(fn, exercise="{known[0].name}") to say which.'
    )


@cache
def read_course(course: str | Path | None) -> tuple[Exercise, ...]:
    """Read all exercises, once."""
    return tuple(list_exercises(course))


def write_table(x: Numbers) -> str:
    """Return a map as an HTML table; colours tell the size and the sign."""
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
