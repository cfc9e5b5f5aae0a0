"""Run the lessons and write them as pages: text, code, output and figures.

    python lessons/build.py                  all pages of docs/lessons, and their index
    python lessons/build.py 02_softmax       one of them

A lesson is a Python file in the percent format. `# %% [markdown]` starts a text cell,
in comments; `# %%` starts a code cell, and the rest of the line is the caption of its
figure. A cell that assigns `figure` shows it. A lesson also runs as a plain script, and
opens as a notebook in every editor that supports the percent format.

Builds are reproducible: seeds are fixed, and no times are printed.

Next: 01_one_query.py
"""

from __future__ import annotations

import ast
import io
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGES = FOLDER.parent / "docs" / "lessons"
PICTURES = FOLDER.parent / "docs" / "pictures" / "lessons"
MARK = re.compile(r"^# %%(?: \[(markdown)\])?(?: (.+))?$")
EXERCISES = "Exercises (`regard learn`): "
DPI = 85  # a picture stays below 60 kB


@dataclass(frozen=True)
class Cell:
    """A cell of a lesson, text or code."""

    body: str
    line: int  # line number in the file where the body begins
    is_text: bool
    caption: str = ""  # of the figure

    def code(self) -> Any:
        """Return the compiled body, with the line numbers of the file."""
        tree = ast.parse(self.body)
        return ast.increment_lineno(tree, self.line - 1)


@dataclass(frozen=True)
class Shown:
    """A cell that was run, with its output and figure."""

    cell: Cell
    printed: str = ""
    figure: Any = None  # a matplotlib figure


def list_lessons() -> list[Path]:
    """Return the files of the lessons in order."""
    return sorted(FOLDER.glob("[0-9][0-9]_*.py"))


def read_cells(path: Path) -> list[Cell]:
    """Split a lesson into cells."""
    lines = path.read_text("utf-8").splitlines()
    marks = [(i, found) for i, line in enumerate(lines) if (found := MARK.match(line))]
    if not marks or marks[0][0] != 0:
        raise ValueError(f'{path.name}: its first line must be "# %% [markdown]".')
    ends = [i for i, _ in marks[1:]] + [len(lines)]
    return [
        read_cell(lines[start + 1 : end], start + 2, mark)
        for (start, mark), end in zip(marks, ends, strict=True)
    ]


def read_cell(lines: Sequence[str], line: int, mark: re.Match[str]) -> Cell:
    """Return a cell; text cells lose their comment signs."""
    is_text = mark[1] is not None
    if is_text:
        odd = [x for x in lines if x and not re.match(r"#( |$)", x)]
        if odd:
            raise ValueError(f'a text cell holds "{odd[0]}", expected only "# …".')
        lines = [x[2:] for x in lines]
    body = "\n".join(lines).strip("\n")
    return Cell(body, line, is_text, mark[2] or "")


def run_lesson(path: Path) -> Iterator[Shown]:
    """Run the cells in order, in one namespace."""
    scope: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    for cell in read_cells(path):
        if cell.is_text:
            yield Shown(cell)
            continue
        out = io.StringIO()
        with redirect_stdout(out):
            exec(compile(cell.code(), str(path), "exec"), scope)  # noqa: S102
        yield Shown(cell, out.getvalue().rstrip(), scope.pop("figure", None))


def build_page(path: Path, pictures: Path) -> str:
    """Run a lesson, write its pictures into a folder, and return its page."""
    parts, n_figures = [], 0
    for shown in run_lesson(path):
        if shown.cell.is_text:
            parts.append(shown.cell.body)
            continue
        parts.append(f"```python\n{shown.cell.body}\n```")
        if shown.printed:
            parts.append(f"```text\n{shown.printed}\n```")
        if shown.figure is not None:
            n_figures += 1
            name = f"{path.stem}_{n_figures}.png"
            shown.figure.savefig(
                pictures / name, dpi=DPI, metadata={"Software": None, "Title": None}
            )
            parts.append(f"![{shown.cell.caption}](../pictures/lessons/{name})")
    return "\n\n".join([*parts, write_links(path)]) + "\n"


def write_links(path: Path) -> str:
    """Return the footer of a page: links to the file and to other lessons."""
    around = list_lessons()
    at = around.index(path)
    links = [f"Generated from [lessons/{path.name}](../../lessons/{path.name})."]
    for word, n in (("Previous", at - 1), ("Next", at + 1)):
        if 0 <= n < len(around):
            links.append(f"{word}: [{read_title(around[n])}]({around[n].stem}.md).")
    return "---\n\n" + " ".join([*links, "All lessons: [index](index.md)."])


def read_title(path: Path) -> str:
    """Return the title of a lesson."""
    return read_cells(path)[0].body.splitlines()[0].removeprefix("# ")


def list_exercises(path: Path) -> list[str]:
    """Return the names of the exercises that a lesson lists."""
    named = read_cells(path)[-1].body.partition(EXERCISES)[2]
    return re.findall(r"`(\w+)`", named)


def build_index() -> str:
    """Return the page that lists the lessons."""
    rows = [
        f"| [{read_title(path)}]({path.stem}.md) | {', '.join(list_exercises(path))} |"
        for path in list_lessons()
    ]
    return "\n".join([INDEX, *rows, ""])


INDEX = """# Lessons

Seventeen lessons of 5 to 10 minutes each, from one query to the source of an answer.
Each is a short Python file in `lessons/`: run it, open it as a notebook, or read it
here with its output. Every claim has an `assert`. Lessons 1 to 9 and 13 to 15 need only
the base install (no torch), 10 and 16 need torch, 11 transformers, and 12 and 17 use
SmolLM2 if it is installed. They are part of the wheel.

The exercises are those of `regard learn`, which says where the lesson of each is.
`python lessons/build.py` generates these pages.

| lesson | exercises |
|---|---|"""


def main(names: Sequence[str]) -> None:
    """Write the pages of the named lessons (default: all) and the index."""
    paths = list_lessons()
    unknown = sorted(set(names) - {path.stem for path in paths})
    if unknown:
        known = ", ".join(path.stem for path in paths)
        raise SystemExit(f"there is no lesson {unknown[0]}; there are {known}.")
    PAGES.mkdir(parents=True, exist_ok=True)
    PICTURES.mkdir(parents=True, exist_ok=True)
    for path in paths:
        if not names or path.stem in names:
            page = build_page(path, PICTURES)
            (PAGES / f"{path.stem}.md").write_text(page, "utf-8")
    (PAGES / "index.md").write_text(build_index(), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
