"""Run test files, and keep their results by the content of what they read.

    python .ci/kept_results.py run NAME PATH ...    the test files of a group
    python .ci/kept_results.py plan NAME PATH ...   which of them would run, and why
    python .ci/kept_results.py say NAME TEXT        of a group that is not run here
    python .ci/kept_results.py close                what was run, reused and skipped

Each test file runs in a process forked from this one, which has libraries loaded, but
nothing of regard. reads.py notes every file of the repository that the process and its
children read, so what a result depends on is observed, not guessed. When a file passes,
git's hashes of what it read are kept under its name, its environment and its options:

    ~/.cache/regard/results/HASH/NAME.json    (XDG_CACHE_HOME is respected)

While all of them are the same, the result is reused, in another clone too. Results are
kept for a clean committed tree only. A random tenth of what could be reused runs
nevertheless, and must pass.

A long file may have a result for each of its tests: RESULTS_BY = "test". Its tests are
collected once, and each runs in a process forked after that, so that what one of them
reads is not taken for what another depends on.

Next: run
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import random
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
READS = ROOT / ".ci" / "reads.py"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
SHARE = 0.1  # of what could be reused runs again
OLD = 6  # results that are kept of each file: branches take turns
LIBRARIES = (
    "pytest hypothesis torch._dynamo jax.numpy array_api_strict matplotlib.pyplot"
)
LIBRARIES += " transformers.models.llama.modeling_llama playwright.sync_api"
# variables that a test, or a library that it uses, may read
DECIDING = (
    "REGARD_ HYPOTHESIS_ OMP_ TRITON_ HF_ JAX_ XLA_ TORCH VLLM_ RAY_ PYTHON CXX TZ"
)
UNSET = "REGARD_READS CI COLUMNS LINES TERM NO_COLOR FORCE_COLOR"
UNSET += " PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE"
PROGRAMS = "chromium-headless-shell chromium node git c++"
# in a .pth file: every Python of the environment notes what it reads, if it is asked
LINE = 'import os; x = os.environ.get("REGARD_READS"); '
LINE += "x and exec(open(x.split(os.pathsep)[0]).read(), {})\n"
FIXED = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
FIXED += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]


@dataclass
class Result:
    """What the tests of a file said, and what they read: names with git's hashes."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0
    commit: str = ""
    read: dict[str, str] = field(default_factory=dict)
    tests: dict[str, Result] = field(default_factory=dict)  # if each has a result

    def count(self, other: Result) -> None:
        """Add the numbers of another result."""
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"

    def is_of(self, other: Result) -> bool:
        """Return whether both have read the same."""
        tests = {name: x.read for name, x in self.tests.items()}
        same = tests == {name: x.read for name, x in other.tests.items()}
        return same and self.read == other.read

    @classmethod
    def load(cls, row: dict[str, Any]) -> Result:
        """Return a result that was written as JSON."""
        tests = {name: cls.load(x) for name, x in row.pop("tests", {}).items()}
        return cls(**row, tests=tests)


class Tree:
    """The content of the repository: git's hash of each file that is not ignored."""

    def __init__(self) -> None:
        rows = [x.partition("\t") for x in ask_git("ls-tree", "-rz", "HEAD")]
        self.files = {name: facts.split()[2] for facts, _, name in rows}
        self.commit = ask_git("rev-parse", "HEAD")[0].strip()
        status = ask_git("status", "--porcelain", "-z", "-uall", "--no-renames")
        self.changed = [x[3:] for x in status]
        for name in self.changed:
            self.files.pop(name, None)
            with contextlib.suppress(OSError):
                data = (ROOT / name).read_bytes()
                made = hashlib.sha1(b"blob %d\0" % len(data) + data)  # as git does
                self.files[name] = made.hexdigest()
        self.names: dict[str, set[str]] = {"./": set()}  # in each folder
        for file in map(Path, self.files):
            for x in (file, *file.parents[:-1]):
                self.names.setdefault(f"{x.parent}/", set()).add(x.name)

    def find_state(self, name: str) -> str:
        """Return a hash of a file, of the names in a folder (docs/), or of all (.)."""
        if name == ".":
            return hash_texts(*(f"{x} {y}" for x, y in sorted(self.files.items())))
        if name.endswith("/"):
            return hash_texts(*sorted(self.names.get(name, ())))
        return self.files.get(name) or ("folder" if f"{name}/" in self.names else "")

    def find_changes(self, result: Result) -> list[str]:
        """Return what a result read that is not as it was."""
        return [x for x, state in result.read.items() if self.find_state(x) != state]


def ask_git(*words: str) -> list[str]:
    """Return what git prints, without the zeros between its items."""
    command = ["git", "-C", str(ROOT), *words]
    done = subprocess.run(command, capture_output=True, check=True)
    return (
        os.fsdecode(done.stdout).removesuffix("\0").split("\0") if done.stdout else []
    )


def hash_texts(*texts: str) -> str:
    """Return a short name for some texts."""
    return hashlib.sha256("\0".join(texts).encode("utf-8", "replace")).hexdigest()[:20]


@cache
def name_environment() -> str:
    """Return a hash of what decides a result and is not in the repository."""
    places = [Path(x) for x in sys.path if x.endswith("-packages")]
    packages = sorted(x.name for place in places for x in place.glob("*.dist-info"))
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text("utf-8").splitlines() if cpu.exists() else []
    flags = next((x for x in lines if x.startswith("flags")), platform.processor())
    chosen = sorted({*os.environ} - {*UNSET.split()})
    deciding = [x for x in chosen if x.startswith((*DECIDING.split(),))]
    versions = [f"{x}={os.environ[x]}" for x in deciding]
    for program in filter(None, map(shutil.which, PROGRAMS.split())):
        asked = subprocess.run([program, "--version"], capture_output=True, check=False)
        versions.append(os.fsdecode(asked.stdout))
    system = (sys.version, sys.base_prefix, platform.platform(), flags)
    return hash_texts(*system, *packages, *versions)


class Store:
    """The results of earlier runs with one environment and one choice of options."""

    def __init__(self, options: list[str]) -> None:
        own = (READS.read_text("utf-8"), Path(__file__).read_text("utf-8"))
        key = hash_texts(name_environment(), *own, *options)
        self.folder = CACHE / "regard" / "results" / key

    def find_path(self, name: str) -> Path:
        """Return where the results of a test file are."""
        return self.folder / f"{name.replace('/', '.')}.json"

    def read(self, name: str) -> list[Result]:
        """Return the results of a test file, the newest first."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            rows = json.loads(self.find_path(name).read_text("utf-8"))
            return [Result.load(row) for row in rows]
        return []

    def write(self, name: str, results: list[Result]) -> None:
        """Keep these results of a test file, and no other."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.find_path(name)
        made = path.with_suffix(f".{os.getpid()}")
        made.write_text(json.dumps([asdict(x) for x in results[:OLD]]), "utf-8")
        made.replace(path)


class Counter:
    """A plugin of pytest: one file, and how its tests ended.

    skip: tests that are not run, if each has a result of its own
    """

    def __init__(self, file: str, skip: set[str], place: Path) -> None:
        self.file, self.result = ROOT / file.partition("::")[0], Result()
        self.skip, self.place = skip, place

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out what is next to the file, before pytest looks into it."""
        return None if collection_path in {self.file, *self.file.parents} else True

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test, or an error before or after it."""
        self.result.passed += report.passed and report.when == "call"
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report: Any) -> None:
        """Count a file that cannot be imported, or is skipped as a whole."""
        self.result.failed += report.failed
        self.result.skipped += report.skipped

    def pytest_runtestloop(self, session: Any) -> bool | None:
        """Run each test in a process of its own, if the file says so."""
        if not session.items or session.testsfailed:
            return None
        if getattr(session.items[0].module, "RESULTS_BY", None) != "test":
            return None
        for item in session.items:
            if item.name not in self.skip:
                done = self.run_test(item)
                self.result.tests[item.name] = done
                self.result.count(done)
                session.testsfailed += done.failed
        return True

    def run_test(self, item: Any) -> Result:
        """Run a test in a forked process, and return its result."""
        place = Path(tempfile.mkdtemp(dir=self.place))
        reporter = item.config.pluginmanager.get_plugin("terminalreporter")
        reporter.flush()
        with warnings.catch_warnings(action="ignore"):  # of threads that are not forked
            pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            return read_result(place)
        code = 1
        try:
            use_log(place / "reads")
            self.result = Result()
            # another one, so that what is of the whole file need not be torn down
            other = next((x for x in item.session.items if x is not item), None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=other)
            for report in reporter.getreports("failed") + reporter.getreports("error"):
                reporter.write_line(report.longreprtext)
            reporter.flush()
            (place / "result").write_text(json.dumps(asdict(self.result)), "utf-8")
            code = 0
        except BaseException:  # noqa: BLE001 (nobody above would print it)
            traceback.print_exc()
        os._exit(code)


def use_log(path: Path) -> None:
    """Note what is read from here on in another log."""
    os.environ["REGARD_READS"] = f"{READS}{os.pathsep}{path}"
    sys.regard_reads.log = str(path)  # type: ignore[attr-defined]


def read_result(place: Path) -> Result:
    """Return what a process that ended has written, and the names that it read."""
    result, log = Result(failed=1), place / "reads"  # unless it was killed
    with contextlib.suppress(OSError, ValueError):
        result = Result.load(json.loads((place / "result").read_text("utf-8")))
    names = os.fsdecode(log.read_bytes()).split("\n")[:-1] if log.exists() else []
    result.read = dict.fromkeys(names, "")
    return result


def run_file(file: str, options: list[str], skip: set[str], place: Path) -> None:
    """Run a test file in this process, which was forked for it, and end it."""
    os.setsid()  # so that it can be ended with all that it started
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with (place / "out").open("wb") as out, Path(os.devnull).open("rb") as nothing:
        for stream, number in ((nothing, 0), (out, 1), (out, 2)):
            os.dup2(stream.fileno(), number)
    os.environ["REGARD_READS"] = f"{READS}{os.pathsep}{place / 'reads'}"
    sys.path[0] = str(ROOT)  # as python -m pytest has it
    counter, code = Counter(file, skip, place), 1
    sys.argv = ["pytest", *FIXED, f"--basetemp={place / 'tmp'}", *options, file]
    try:
        exec(LINE)  # as other processes do
        code = int(import_module("pytest").main(sys.argv[1:], plugins=[counter]))
    except BaseException:  # noqa: BLE001 (nobody above would print it)
        traceback.print_exc()
    if code not in {0, 5}:  # 5: no test was chosen
        counter.result.failed = counter.result.failed or 1
    sys.stdout.flush()
    sys.stderr.flush()
    (place / "result").write_text(json.dumps(asdict(counter.result)), "utf-8")
    os._exit(code)


def end_group(pid: int) -> None:
    """End what a test file left running."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def fork_files(
    files: dict[str, set[str]], options: list[str], workers: int
) -> Iterator[Any]:
    """Run test files, some at once; yield each with its seconds and a folder.

    files: with the tests that are not run
    """
    running: dict[int, tuple[str, float, Path]] = {}
    waiting, folder = iter(files), Path(tempfile.mkdtemp(prefix="kept-"))
    try:
        while True:
            while len(running) < workers and (file := next(waiting, None)):
                place = Path(tempfile.mkdtemp(dir=folder))
                sys.stdout.flush()
                if not (pid := os.fork()):
                    run_file(file, options, files[file], place)
                running[pid] = (file, time.monotonic(), place)
            if not running:
                return
            pid, _ = os.wait()
            end_group(pid)
            file, began, place = running.pop(pid)
            yield file, round(time.monotonic() - began, 1), place
            shutil.rmtree(place, ignore_errors=True)
    finally:
        for pid in running:
            end_group(pid)
        shutil.rmtree(folder, ignore_errors=True)


class Run:
    """The test files of one group: those that must run, and those that need not."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.tree, self.total, self.kept = given, Tree(), Result(), 0
        self.options = shlex.split(given.select)
        self.stores = [Store(self.options)]
        if given.quick:
            self.options += ["-m", "not slow"]
            self.stores.append(Store(self.options))
        self.known: dict[str, Result] = {}  # the one that is reused, or the newest
        self.reused: list[str] = []
        self.fresh: dict[str, dict[str, Result]] = {}  # tests that are reused
        self.files: list[str] = []
        for path in given.paths:
            inside = sorted((ROOT / path).rglob("test_*.py"))
            self.files += [str(x.relative_to(ROOT)) for x in inside] or [path]
        for file in self.files:
            self.look_up(file, [x for store in self.stores for x in store.read(file)])
        self.again: set[str] = set()  # files, and tests
        if not given.quick and given.command == "run":
            could = [x for x in self.reused if not self.fresh[x]]
            could += [f"{x}::{y}" for x, tests in self.fresh.items() for y in tests]
            self.again = {x for x in could if random.random() < SHARE}
            self.again |= {random.choice(could)} if could and not self.again else set()
            self.again |= {x.partition("::")[0] for x in self.again} & {*self.reused}

    def look_up(self, file: str, results: list[Result]) -> None:
        """Find what can be reused of a file."""
        self.fresh[file] = {}
        same = [x for x in results if not self.tree.find_changes(x)]
        for result in reversed(same):
            tests = result.tests.items()
            fresh = {x: y for x, y in tests if not self.tree.find_changes(y)}
            self.fresh[file] |= fresh
        if results:
            self.known[file] = (same or results)[0]
        if any(x.tests.keys() <= self.fresh[file].keys() for x in same):
            self.reused.append(file)

    def explain(self, file: str) -> str:
        """Return why a test file runs."""
        if file in self.reused:
            return "again"
        if file not in self.known:
            return "no result"
        known = self.known[file]
        stale = [y for x, y in known.tests.items() if x not in self.fresh[file]]
        first, *more = {
            name: None for x in (known, *stale) for name in self.tree.find_changes(x)
        }
        some = f"{len(self.fresh[file])} tests reused; " if self.fresh[file] else ""
        return f"{some}{first} changed" + (f", and {len(more)} more" if more else "")

    def plan(self) -> list[str]:
        """Return the files that run, the longest first."""
        chosen = [x for x in self.files if x not in self.reused or x in self.again]
        return sorted(
            chosen, key=lambda x: -self.known.get(x, Result(seconds=9e9)).seconds
        )

    def go(self) -> bool:
        """Run what must run; return whether it passed."""
        chosen, bad = self.plan(), []
        for file in {*self.files} - {*chosen}:
            self.total.count(self.known[file])
        for name in LIBRARIES.split() if chosen and self.given.load else ():
            import_module(name)
        skip = {
            x: {y for y in self.fresh[x] if f"{x}::{y}" not in self.again}
            for x in chosen
        }
        for file, seconds, place in fork_files(skip, self.options, self.given.workers):
            result = self.read(place)
            for name in skip[file] - result.tests.keys():
                result.tests[name] = self.fresh[file][name]
                result.count(self.fresh[file][name])
            result.seconds = seconds
            print(f"{seconds:6} s  {file}: {result} ({self.explain(file)})", flush=True)
            self.total.count(result)
            if result.failed:
                bad.append(file)
                print((place / "out").read_text("utf-8", "replace"))
                self.drop(file)
            else:
                self.keep(file, result)
        again = {*self.reused} & self.again
        text = f"{len(chosen)} files run, {len(again)} of them again; "
        text += f"{len(self.files) - len(chosen)} reused"
        if self.kept < len(chosen):
            why = ": files are not committed" if self.tree.changed else ""
            text += f"; {len(chosen) - self.kept} results not kept{why}"
        add_tally(self.given, "; failed: ".join([text, *bad]), self.total)
        return not bad

    def read(self, place: Path) -> Result:
        """Return what a process that ended has written."""
        result = read_result(place)
        if not result.read:  # it was killed before it began
            result.read = {".": ""}
        for each in (result, *result.tests.values()):
            states = {name: self.tree.find_state(name) for name in sorted(each.read)}
            # a file that is there and unknown is ignored by git: the tests made it
            made = {x for x, y in states.items() if not y and os.path.exists(ROOT / x)}
            each.read = {x: y for x, y in states.items() if x not in made}
        result.commit = self.tree.commit
        return result

    def keep(self, file: str, result: Result) -> None:
        """Keep a result, unless the repository is not as committed."""
        now = Tree()
        if not (now.changed or self.tree.changed) and now.commit == self.tree.commit:
            others = [x for x in self.stores[-1].read(file) if not x.is_of(result)]
            self.stores[-1].write(file, [result, *others])
            self.kept += 1

    def drop(self, file: str) -> None:
        """Keep no result of a file that failed although nothing changed."""
        if file in self.reused:
            print(f"!! {file} passed at {self.known[file].commit[:9]}, and fails now")
            print("!! with the same inputs: its results are no longer kept", flush=True)
            for store in self.stores:
                store.write(file, [])


def add_tally(given: argparse.Namespace, text: str, total: Result) -> None:
    """Say what became of a group, now and at the end."""
    print(f"{given.name}: {text}")
    if given.tally:
        with given.tally.open("a", encoding="utf-8") as file:
            file.write(json.dumps([given.name, text, asdict(total)]) + "\n")


def close(tally: Path) -> None:
    """Print what was run, reused and skipped; the last line has the numbers."""
    total = Result()
    for line in tally.read_text("utf-8").splitlines() if tally.exists() else []:
        name, text, numbers = json.loads(line)
        print(f"{name}: {text}")
        total.count(Result.load(numbers))
    print(total)


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("run", "plan", "say", "close"))
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("paths", nargs="*", help="test files, their folders, or a text")
    parser.add_argument("--workers", type=int, default=1, help="files at once")
    parser.add_argument("--load", action="store_true", help="libraries before forking")
    parser.add_argument("--quick", action="store_true", help="no tests marked slow")
    parser.add_argument("--select", default="", help="further options of pytest")
    parser.add_argument("--tally", type=Path, help="where close finds the numbers")
    given = parser.parse_intermixed_args()
    if given.command == "close":
        close(given.tally)
    elif given.command == "say":
        add_tally(given, " ".join(given.paths), Result())
    else:
        for name in UNSET.split():
            os.environ.pop(name, None)
        os.chdir(ROOT)
        run = Run(given)
        if given.command == "plan":
            print(*(f"{x}: {run.explain(x)}" for x in run.plan()), sep="\n")
            return 0
        path = Path(sysconfig.get_path("purelib")) / "regard_reads.pth"
        if not path.exists() or path.read_text("utf-8") != LINE:
            path.write_text(LINE, "utf-8")
        for stop in (signal.SIGINT, signal.SIGTERM):  # end the processes, too
            signal.signal(stop, signal.default_int_handler)
        return int(not run.go())
    return 0


if __name__ == "__main__":
    sys.exit(main())
