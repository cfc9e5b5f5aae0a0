"""Run the tests on one deliberate error after another, and remember what saw it.

Each edit is made in a copy of the source, in a forked process that has the libraries
loaded; the test that saw it last time runs first. A result is kept under a hash of the
environment, the edit, the edited file, its tests and the core, so a run that was stopped goes on where it
was, and CI runs only what a change may have affected.

Next: ../mutate.py
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from .edits import HERE, Edit, apply, locate, read_sources
from .locate import NotLocatedError

ROOT = Path(__file__).parent.parent.parent
# slow, or the same again in another library; but not in a file of that name
SKIP = ("jax", "strict", "memory", "four_thousand", "long_block", "compiles")
# what all tests compare with; these files import only each other
CORE = ("arrays", "definition/", "errors", "masks/", "plain/")
TOOL = ROOT / ".ci" / "kept_results.py"
ENVIRONMENT = runpy.run_path(str(TOOL))["name_environment"]
PATIENCE = 300  # seconds for one test; longer is a loop that does not end


@dataclass(frozen=True)
class Result:
    """What the tests said of one edit."""

    key: str
    name: str
    file: str
    seen_by: str  # the test, or why there is none
    seen: bool
    seconds: float


class Reporter:
    """A pytest plugin that tells which test runs, and which failed first."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.failed = pipe, ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.pipe.send(("runs", nodeid))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


def make_key(edit: Edit, text: str) -> str:
    """Return what a result depends on, as a hash."""
    parts = [ENVIRONMENT(), edit.name, edit.old, edit.new, text]
    if edit.file:
        parts += [x.read_text("utf-8") for x in edit.test_files]
        parts += [x.text for x in read_sources().values() if x.path.startswith(CORE)]
        parts.append((HERE.parent / "conftest.py").read_text("utf-8"))
    else:
        parts += [*edit.tests, *(x.text for x in read_sources().values())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def make_none(results: list[Result]) -> Edit:
    """Return the edit that changes nothing: the tests that saw the others must pass."""
    tests = {x.seen_by for x in results if x.seen and x.seen_by.startswith("tests/")}
    return Edit(
        "(no edit: must pass)", "", "", "", tuple(sorted(x for x in tests if "::" in x))
    )


def choose_tests(path: Path) -> list[str]:
    """Return the options that run a file of tests, without what is skipped."""
    skipped = [f"not {name}" for name in SKIP if name not in path.stem]
    return ["-k", " and ".join(skipped), str(path)]


def make(edit: Edit) -> tuple[str, str]:
    """Return the file that an edit changes, and its text."""
    if not edit.file:
        return "", ""
    place = locate(edit, read_sources())
    return place.source.path, apply(edit, place)


def ask_tests(tests: list[list[str]], source: Path, pipe: Connection) -> None:
    """Run the tests on an edited copy, and send the first that fails; in a process of its own."""
    os.setsid()  # so that it can be ended with all that it started
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that waits
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.path.insert(0, str(source))
    os.environ["PYTHONPATH"] = str(source)  # for the processes that tests start
    os.chdir(ROOT)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    reporter, code = Reporter(pipe), 0  # 5, no tests are chosen, is none either
    with Path(os.devnull).open("w") as quiet:
        os.dup2(quiet.fileno(), 1)
        os.dup2(quiet.fileno(), 2)
        for some in tests:  # the next ones are not even collected if these fail
            if not reporter.failed:
                code = max(code, pytest.main([*options, *some], plugins=[reporter]) % 5)
    pipe.send(("done", reporter.failed or f"(exit {code})"))


@dataclass
class Job:
    """An edit whose tests run."""

    edit: Edit
    key: str
    folder: Path
    process: Any
    pipe: Connection
    began: float
    moved: float  # when it last began a test
    test: str = ""


class Runner:
    """Several processes, one edit each."""

    def __init__(self, results: Path, workers: int, patience: float = PATIENCE) -> None:
        self.results, self.workers, self.patience = results, workers, patience
        self.known = {x.key: x for x in read_results(results)}
        self.hints = read_hints()
        for x in self.known.values():
            if x.seen and "::" in x.seen_by:
                self.hints[x.file, x.name] = x.seen_by
        self.fork = multiprocessing.get_context("fork")
        self.jobs: list[Job] = []
        self.reused = 0

    def run(self, edits: list[Edit], *, fresh: float = 0) -> Iterator[Result]:
        """Yield a result for each edit, those known first; fresh: the share of these to repeat."""
        waiting = []
        for edit in edits:
            try:
                path, text = make(edit)
            except NotLocatedError as error:
                yield Result(
                    "", edit.name, edit.file, f"({error})", seen=False, seconds=0
                )
                continue
            key = make_key(edit, text)
            if key in self.known and random.random() >= fresh:
                self.reused += 1
                yield self.known[key]
            else:
                waiting.append((edit, key, path, text))
        try:
            while self.workers and (waiting or self.jobs):
                while waiting and len(self.jobs) < self.workers:
                    self.start(*waiting.pop(0))
                yield from self.collect()
        finally:
            for job in self.jobs:
                end(job)

    def start(self, edit: Edit, key: str, path: str, text: str) -> None:
        ours, theirs = self.fork.Pipe(duplex=False)
        hint = self.hints.get((edit.file, edit.name), "")
        folder = Path(tempfile.mkdtemp(prefix="regard-mutation-"))
        shutil.copytree(ROOT / "src", folder / "src")
        (folder / "lessons").symlink_to(ROOT / "lessons")  # lessons.py looks for them
        if text:
            (folder / "src" / "regard" / path).write_text(text, encoding="utf-8")
        tests = [choose_tests(path) for path in edit.test_files]
        if not edit.file:
            tests = [[*edit.tests]]
        elif hint.split("::")[0] in {str(x.relative_to(ROOT)) for x in edit.test_files}:
            tests = [[hint], *tests]
        process = self.fork.Process(
            target=ask_tests, args=(tests, folder / "src", theirs)
        )
        process.start()
        theirs.close()
        now = time.monotonic()
        self.jobs.append(Job(edit, key, folder, process, ours, now, now))

    def collect(self) -> Iterator[Result]:
        """Wait for news, and yield the results among it."""
        wait([job.pipe for job in self.jobs], timeout=1)
        for job in [*self.jobs]:
            said = self.listen(job)
            if not said:
                continue
            end(job)
            self.jobs.remove(job)
            seen = not said.startswith("(")
            seconds = round(time.monotonic() - job.began, 1)
            result = Result(job.key, job.edit.name, job.edit.file, said, seen, seconds)
            if seen or said == "(exit 0)":  # whatever else went wrong is run again
                self.keep(result)
            yield result

    def keep(self, result: Result) -> None:
        self.results.parent.mkdir(parents=True, exist_ok=True)
        with self.results.open("a", encoding="utf-8") as file:  # after a line cut off
            file.write(f"\n{json.dumps(asdict(result), ensure_ascii=False)}\n")

    def listen(self, job: Job) -> str:
        """Return how a job ended, or nothing."""
        try:
            while job.pipe.poll():
                kind, said = job.pipe.recv()
                if kind == "done":
                    return str(said)
                job.test, job.moved = said, time.monotonic()
        except EOFError:
            job.process.join(5)
            crash = job.process.exitcode in {
                -signal.SIGSEGV,
                -signal.SIGABRT,
                -signal.SIGBUS,
            }
            said = (
                f"ended by itself ({job.process.exitcode}) in {job.test or 'no test'}"
            )
            return said if crash else f"({said})"
        if time.monotonic() - job.moved > self.patience:
            return f"timeout of {self.patience:g} s in {job.test or 'collecting the tests'}"
        return ""


def end(job: Job) -> None:
    """End a process that we started, and the group that it leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(job.process.pid) == job.process.pid:  # its own group, not ours
            os.killpg(job.process.pid, signal.SIGKILL)
    job.process.join(5)
    if job.process.is_alive():
        job.process.kill()
    job.process.join()
    job.pipe.close()
    shutil.rmtree(job.folder, ignore_errors=True)


def read_hints() -> dict[tuple[str, str], str]:
    """Return the test that is tried first for an edit of the core, where none is known."""
    lines = (HERE / "hints.txt").read_text("utf-8").splitlines()
    rows = (line.split(" | ") for line in lines)
    return {(file, name): test for file, name, test in rows}


def read_results(path: Path) -> list[Result]:
    """Return the results of earlier runs; a line that was cut off is left out."""
    found = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, TypeError):
            found.append(Result(**json.loads(line)))
    return found
