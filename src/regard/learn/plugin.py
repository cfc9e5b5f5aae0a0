"""Grade the files of a class with pytest, and collect the results.

    pytest --regard-exercises DIR                     one test per learner's file
    pytest --regard-exercises DIR --regard-csv FILE   also write a table of the results
    pytest --regard-exercises DIR --regard-course OWN use your own exercises

DIR has files such as softmax.py or softmax.ipynb, or one folder of them per learner.
Each file runs in a separate process; nothing in DIR is imported here.

Next: __main__.py
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from regard.learn.exercise import Exercise
    from regard.learn.grade_file import Attempt

COLUMNS = ("learner", "exercise", "passed", "mistake", "sentence")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the three options."""
    group = parser.getgroup("regard")
    words = {
        "--regard-exercises": "grade the exercises in this folder",
        "--regard-course": "a folder of your own exercises, instead of the course",
        "--regard-csv": "write the results to this file",
    }
    for name, text in words.items():
        group.addoption(name, metavar="PATH", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Collect from the given folder, and register the CSV writer."""
    folder = config.getoption("--regard-exercises")
    if folder is None:
        return
    if not Path(folder).is_dir():
        raise pytest.UsageError(f"--regard-exercises: there is no folder {folder}.")
    config.args = [str(folder)]
    path = config.getoption("--regard-csv")
    if path is not None and getattr(config, "workerinput", None) is None:
        config.pluginmanager.register(Results(Path(path)), "regard-results")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: Any) -> None:
    """Disable conftest.py files, because a learner's would run in this process."""
    known = early_config.known_args_namespace
    known.noconftest |= known.regard_exercises is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files that are not exercises, because collecting a test runs its file."""
    if config.getoption("--regard-exercises") is None or collection_path.is_dir():
        return None
    return collection_path.stem not in read_exercises(config)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_collect_directory(path: Path, parent: Any) -> Any:
    """Collect folders as plain directories, so that no __init__.py is run."""
    graded = parent.config.getoption("--regard-exercises") is not None
    return pytest.Dir.from_parent(parent, path=path) if graded else None


def pytest_collect_file(file_path: Path, parent: Any) -> pytest.Collector | None:
    """Collect a file that has the name of an exercise as a test."""
    folder = parent.config.getoption("--regard-exercises")
    if folder is None or file_path.suffix not in (".py", ".ipynb"):
        return None
    root = Path(folder).resolve()
    if not file_path.is_relative_to(root):
        return None
    exercise = read_exercises(parent.config).get(file_path.stem)
    if exercise is None:
        return None
    made: LearnersFile = LearnersFile.from_parent(parent, path=file_path)
    made.exercise = exercise
    made.learner = str(file_path.parent.relative_to(root)).removeprefix(".")
    return made


def read_exercises(config: pytest.Config) -> dict[str, Exercise]:
    """Return the exercises by name; read them once per session."""
    from regard.learn.exercise import list_exercises  # noqa: PLC0415 (pytest starts fast)

    if COURSE not in config.stash:
        found = list_exercises(config.getoption("--regard-course"))
        config.stash[COURSE] = {exercise.name: exercise for exercise in found}
    return config.stash[COURSE]


COURSE: pytest.StashKey[dict[str, Any]] = pytest.StashKey()


class LearnersFile(pytest.File):
    """Collector of a learner's file, with one test."""

    exercise: Exercise
    learner: str

    def collect(self) -> Iterator[pytest.Item]:
        """Yield the one test."""
        yield GradedFile.from_parent(self, name=self.exercise.name)


class GradedFile(pytest.Item):
    """One learner's file as a test."""

    def runtest(self) -> None:
        """Grade it."""
        from regard.learn.grade_file import attempt  # noqa: PLC0415

        parent: Any = self.parent
        found = attempt(parent.exercise, self.path)
        values = (
            parent.learner,
            found.exercise,
            "yes" if found.passed else "no",
            found.mistake,
            found.sentence,
        )
        self.user_properties.append(("regard", values))
        if not found.passed:
            raise WrongError(found)

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """Show the message and the heatmaps instead of a traceback."""
        if isinstance(excinfo.value, WrongError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return the location that pytest reports."""
        return self.path, None, self.name


class WrongError(Exception):
    """Raised when a file is graded wrong."""

    def __init__(self, found: Attempt) -> None:
        super().__init__("\n\n".join(x for x in (found.sentence, found.drawn) if x))


class Results:
    """Plugin that writes the results to a CSV file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[tuple[str, ...]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the result of one file."""
        from regard.learn.grade_class import make_safe  # noqa: PLC0415

        if report.when == "call":
            kept = dict(report.user_properties).get("regard")
            if isinstance(kept, tuple | list):
                self.rows.append(tuple(map(make_safe, kept)))

    def pytest_sessionfinish(self) -> None:
        """Write the table."""
        with self.path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *sorted(self.rows)])
