"""The course as a static web site: lessons, an editor, and Python in the browser.

    build_site("site", pyodide=fetch_runtime())     then: python -m http.server -d site

    site/index.html      the exercises as HTML;  *.js, lesson.css: the page
    site/lessons/        the lesson of each exercise, to read
    site/exercises.json  stubs, hints, prerequisites
    site/regard.zip      the modules needed for grading, and array-api-compat
    site/pyodide/        Python and NumPy for browsers: docs/learn-site.md

The site loads nothing from other hosts: the Content-Security-Policy in index.html
forbids it, and the worker inherits that policy.

Next: pyodide_files.py
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from html import escape
from importlib.metadata import distribution
from io import BytesIO
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from markdown_it import MarkdownIt

from regard.errors import FileError
from regard.learn.exercise import FOLDER, Exercise, list_exercises
from regard.learn.lessons import (
    EXERCISES,
    Lesson,
    find_lesson,
    list_lessons,
    write_markdown,
)
from regard.learn.pyodide_files import LOCK, list_runtime

SOURCE = Path(__file__).parent.parent
ASSETS = Path(__file__).parent / "assets"
INK = SOURCE / "show" / "assets" / "ink.js"  # colour scales shared by all pages
LESSONS = "<!-- lessons -->"
RUNTIME = "pyodide"  # folder of the site

NEEDED = (
    *("__init__.py", "errors.py", "arrays.py", "masks/[!_]*.py", "masks/__init__.py"),
    *("arguments.py", "other_names.py", "display.py"),
    *("definition/*.py", "plain/*.py", "judge/*.py"),
    *(
        f"learn/{x}.py"
        for x in ("__init__", "course", "exercise", "grade", "practice_models")
    ),
    *(f"learn/{x}.py" for x in ("written_call", "grade_file", "in_browser")),
)
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'self'">
<title>{title}</title>
<link rel="stylesheet" href="../lesson.css">
</head>
<body>
<section class="lesson">
<article>
{html}<p>Exercises: {links}</p>
</article>
</section>
</body>
</html>
"""
CODE = re.compile(r"(<pre><code[^>]*>)(.*?)\n?</code></pre>", re.DOTALL)
MISSING = (
    "Python for browsers is missing: put Pyodide and its NumPy wheel into {folder}, "
    "as described in docs/learn-site.md."
)


def build_site(
    folder: str | Path,
    *,
    pyodide: str | Path | None = None,
    course: str | Path | None = None,
) -> str:
    """Write the site to a folder and return a summary.

    pyodide: a folder with Pyodide and its NumPy wheel, which are verified and copied;
        by default the site's folder pyodide/ is left unchanged
    course: a folder of your own exercises
    """
    site = Path(folder)
    if site.exists() and not site.is_dir():
        raise FileError(f"{site} is a file, expected a folder for the site.")
    exercises = list_exercises(course)
    files = () if pyodide is None else list_runtime(Path(pyodide))
    site.mkdir(parents=True, exist_ok=True)
    for asset in (*ASSETS.iterdir(), INK):
        shutil.copyfile(asset, site / asset.name)
    page = (ASSETS / "index.html").read_text("utf-8")
    lessons = "\n".join(map(write_lesson, exercises))
    (site / "index.html").write_text(page.replace(LESSONS, lessons), "utf-8")
    told = json.dumps([export_exercise(exercise) for exercise in exercises], indent=1)
    (site / "exercises.json").write_text(told, "utf-8")
    (site / "lessons").mkdir(exist_ok=True)
    for lesson in list_lessons():
        path = site / "lessons" / f"{lesson.path.stem}.html"
        path.write_text(write_lesson_page(lesson), "utf-8")
    (site / "regard.zip").write_bytes(zip_course(exercises))
    runtime = site / RUNTIME
    runtime.mkdir(exist_ok=True)
    for file in files:
        if not (runtime / file.name).exists() or not file.samefile(runtime / file.name):
            shutil.copyfile(file, runtime / file.name)
    wrote = f"{site / 'index.html'} has {len(exercises)} exercises. "
    if not has_runtime(site):
        return wrote + MISSING.format(folder=runtime)
    return wrote + f"To see it: python -m http.server -d {site}"


def has_runtime(folder: str | Path) -> bool:
    """Return whether a site already contains Python for browsers."""
    return (Path(folder) / RUNTIME / LOCK).exists()


def write_html(text: str) -> str:
    """Return Markdown as HTML; HTML in it is escaped."""
    reader = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    return CODE.sub(mark_lines, str(reader.render(text)))


def mark_lines(code: re.Match[str]) -> str:
    """Return a code block with a span for each line: the rest of a line is indented."""
    lines = "".join(f"<span>{line}</span>" for line in code[2].split("\n"))
    return f"{code[1]}{lines}</code></pre>"


def write_lesson(exercise: Exercise) -> str:
    """Return the text of an exercise, and a link to its lesson, as HTML."""
    html, lesson = write_html(exercise.text), find_lesson(exercise.name)
    if lesson is not None and exercise.path.parent == FOLDER:
        place = f"lessons/{lesson.path.stem}.html"
        link = f'<a href="{place}" target="lesson">{escape(lesson.title)}</a>'
        html += f'<p class="facts">Lesson: {link}</p>\n'
    return f'<article data-lesson="{escape(exercise.name)}" hidden>\n{html}</article>'


def write_lesson_page(lesson: Lesson) -> str:
    """Return a lesson as a page of the site, with links to its exercises."""
    links = ", ".join(
        f'<a href="../#{name}" target="course">{name}</a>' for name in lesson.exercises
    )
    text = write_markdown(lesson).rpartition(EXERCISES)[0]
    return PAGE.format(title=escape(lesson.title), html=write_html(text), links=links)


def export_exercise(exercise: Exercise) -> dict[str, object]:
    """Return the data of an exercise that the page needs."""
    kept = ("name", "title", "function", "minutes", "needs", "extra", "stub", "hints")
    told = {name: getattr(exercise, name) for name in (*kept, "atol", "solution")}
    return told | {"place": locate_in_zip(exercise)}


def locate_in_zip(exercise: Exercise) -> str:
    """Return the path of an exercise in the zip; those of the course keep theirs."""
    known = exercise.path.parent == FOLDER
    return f"{'regard/learn/exercises' if known else 'course'}/{exercise.path.name}"


def zip_course(exercises: Sequence[Exercise]) -> bytes:
    """Return the grading modules and the exercises as a reproducible zip."""
    with BytesIO() as out:
        with ZipFile(out, "w", ZIP_DEFLATED) as file:
            for name, path in list_source(exercises):
                entry = ZipInfo(name)  # with a fixed date
                entry.compress_type = ZIP_DEFLATED
                file.writestr(entry, path.read_bytes())
        return out.getvalue()


def list_source(exercises: Sequence[Exercise]) -> Iterator[tuple[str, Path]]:
    """Yield the name in the zip and the path of each file that browsers need."""
    for pattern in NEEDED:
        for path in sorted(SOURCE.glob(pattern)):
            yield f"regard/{path.relative_to(SOURCE).as_posix()}", path
    compat = distribution("array-api-compat")
    for file in compat.files or ():
        if file.suffix == ".py" or file.name in ("LICENSE", "METADATA"):
            yield file.as_posix(), Path(str(compat.locate_file(file)))
    for exercise in exercises:
        yield locate_in_zip(exercise), exercise.path
