"""Entry points for the browser: grade or run the learner's code.

    grade_text("/regard/course/softmax.py", "def softmax(scores): …")
    run_text("/regard/course/softmax.py", "print(1 + 1)")

Both return JSON. There are no threads or processes in the browser; the page stops an
endless loop by terminating the worker.

Next: build_site.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import TextIOBase
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

from regard.errors import FileError
from regard.learn.exercise import read_exercise
from regard.learn.grade_file import PRINTED, clean_output, grade_file, load_function


class LimitedOutput(TextIOBase):
    """Text stream that keeps only the start of the output."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        """Keep the first PRINTED characters, and one more to detect truncation."""
        self.text += text[: PRINTED + 1 - len(self.text)]
        return len(text)


@contextmanager
def capture_file(name: str, source: str) -> Iterator[tuple[Path, LimitedOutput]]:
    """Write code to a temporary file and capture stdout and stderr."""
    with TemporaryDirectory() as folder:
        path, paper = Path(folder) / f"{name}.py", LimitedOutput()
        path.write_text(source, encoding="utf-8", errors="surrogatepass")
        with redirect_stdout(paper), redirect_stderr(paper):
            yield path, paper


def grade_text(place: str, source: str) -> str:
    """Grade a learner's code for the exercise in a file; return JSON."""
    exercise = read_exercise(Path(place))
    with capture_file(exercise.name, source) as (path, paper):
        found = grade_file(exercise, path, inf)
    told = json.loads(found.to_json())
    return json.dumps(told | {"printed": clean_output(paper.text.encode())})


def run_text(place: str, source: str) -> str:
    """Run a learner's code without grading it; return JSON."""
    exercise, said = read_exercise(Path(place)), "It ran to its end."
    with capture_file(exercise.name, source) as (path, paper):
        try:
            load_function(path, exercise.function)
        except FileError as error:
            said = str(error)
    return json.dumps({"sentence": said, "printed": clean_output(paper.text.encode())})
