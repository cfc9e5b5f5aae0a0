"""A hunt for inputs that a parser does not survive: damage one, try it, keep it.

    python fuzz/recording.py --seconds 30       any target; it goes on where it was left

    corpus ─▶ damage ─▶ check ─▶ works, or is refused in one sentence
      ▲                   │
      └─ reached new code ┴─▶ anything else is a finding, and is saved

What every target promises for any bytes: a RegardError of one printable sentence or a
result that holds together, in SECONDS of work and MEMORY beyond what the process had.
Atheris (libFuzzer for Python) steers by the code that an input reaches. Where it is not
installed, inputs are damaged blindly. corpus/ is kept with the source, found/ is not:
it has the inputs that reached new code, so that a hunt goes on, and the findings.

Next: steered.py
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from regard.errors import RegardError

HERE = Path(__file__).parent
SECONDS = 4.0  # of work, for one input
STUCK = 60  # of waiting: then the process is ended
ROUND = 300  # of one process: what steers it takes memory, too
MEMORY = 2**29  # bytes that all inputs together may add to a process
SENTENCE = 1000  # characters of a refusal, at most


@dataclass(frozen=True)
class Target:
    """What is tried with bytes, and how bytes are damaged for it."""

    name: str
    check: Callable[[bytes], object]
    damage: Callable[[random.Random, bytes], bytes]
    longest: int = 2**15  # bytes of an input
    steered: bool = True  # by the Python code that it reaches

    @property
    def kept(self) -> Path:
        """Where the inputs are that belong to the source."""
        return HERE / "corpus" / self.name

    @property
    def found(self) -> Path:
        """Where the inputs are that reached new code."""
        return HERE / "found" / self.name / "corpus"

    @property
    def findings(self) -> Path:
        """Where the inputs are that broke the promise."""
        return HERE / "found" / self.name / "findings"

    def read_corpus(self) -> list[bytes]:
        """Return all inputs that there are, those of the source first."""
        folders = (x for x in (self.kept, self.found) if x.is_dir())
        return [path.read_bytes() for x in folders for path in sorted(x.iterdir())]


@dataclass(frozen=True)
class Finding:
    """How an input broke the promise."""

    key: str  # the same for inputs that break it at the same place
    told: str


class SlowError(BaseException):
    """An input takes too long; nothing on the way may catch this."""


# --- one input -----------------------------------------------------------------------


def judge(check: Callable[[bytes], object], data: bytes) -> Finding | None:
    """Try one input; return how it broke the promise, if it did."""
    try:
        with limit_time(SECONDS):
            check(data)
    except RegardError as refused:
        said = str(refused)
        if said.isprintable() and 0 < len(said) <= SENTENCE:
            return None
        told = f"{type(refused).__name__} is no printable sentence: {said!r:.2000}"
        return Finding(f"sentence-{locate(refused)}", told)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 (whatever it is, it is a finding)
        told = "".join(traceback.format_exception(error))
        return Finding(f"{type(error).__name__}-{locate(error)}", told)
    return None


def locate(error: BaseException) -> str:
    """Return the last line of ours that an error came through."""
    steps = traceback.extract_tb(error.__traceback__)
    ours = [x for x in steps if "/regard/" in x.filename] or steps[-1:]
    return f"{Path(ours[-1].filename).stem}-{ours[-1].lineno}" if ours else "nowhere"


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raise a SlowError after so much work; waiting for others does not count."""

    def end(*_: Any) -> NoReturn:
        raise SlowError(f"more than {seconds:g} seconds of work")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def limit_memory(size: int = MEMORY) -> Iterator[None]:
    """Let the process have no more than so many bytes beyond what it has now."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * os.sysconf("SC_PAGE_SIZE") + size
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# --- many ----------------------------------------------------------------------------


def wander(
    target: Target, corpus: list[bytes], *, seconds: float, seed: int
) -> tuple[int, list[Finding]]:
    """Try a corpus, then damage it blindly; return how many inputs, and findings."""
    rng, until = random.Random(seed), time.monotonic() + seconds  # noqa: S311
    found, tried = [], 0
    with limit_memory():
        # At least one new input, however short the time.
        while tried <= len(corpus) or time.monotonic() < until:
            fresh = tried >= len(corpus)
            data = rng.choice(corpus) if fresh else corpus[tried]
            for _ in range(rng.choice((1, 1, 2, 4)) if fresh else 0):
                data = target.damage(rng, data)[: target.longest]
            tried += 1
            if (finding := judge(target.check, data)) is not None:
                found.append(finding)
                save(target, data, finding)
    return tried, found


def save(target: Target, data: bytes, finding: Finding) -> None:
    """Keep an input that broke the promise, one for each place."""
    target.findings.mkdir(parents=True, exist_ok=True)
    path = target.findings / re.sub(r"[^\w-]", "_", finding.key)[:80]
    if not path.exists():
        path.write_bytes(data)
        path.with_suffix(".txt").write_text(finding.told, "utf-8", "backslashreplace")


def forget(target: Target) -> None:
    """Drop the findings of earlier hunts that are fixed, but for what ended Python."""
    with limit_memory():
        for path in sorted(target.findings.glob("*")):
            alive = path.suffix != ".txt" and not path.name.startswith("died-")
            if alive and judge(target.check, path.read_bytes()) is None:
                path.unlink()
                path.with_suffix(".txt").unlink(missing_ok=True)


def follow(target: Target, seconds: float) -> int:
    """Let a process of its own hunt, steered; return how many inputs it tried."""
    target.found.mkdir(parents=True, exist_ok=True)
    target.findings.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        str(HERE / "steered.py"),
        target.name,
        str(target.found),
        str(target.kept),
        f"-max_total_time={max(1, round(seconds))}",
        f"-max_len={target.longest}",
        f"-timeout={STUCK}",
        f"-artifact_prefix={target.findings}/died-",
        "-rss_limit_mb=0",  # limit_memory does it, for Python to notice
        "-print_final_stats=1",
        "-reload=0",
    ]
    tried, said = 0, time.monotonic()
    with subprocess.Popen(  # noqa: S603 (our own interpreter)
        command, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if match := re.match(r"#(\d+)\s.*cov: (\d+).*corp: (\d+)", line):
                tried = int(match[1])
                if time.monotonic() - said > 20:
                    said = time.monotonic()
                    words = f"{tried:,} inputs, {match[2]} places, corpus of {match[3]}"
                    print(f"{target.name}: {words}", flush=True)
            if match := re.search(r"executed_units:\s*(\d+)", line):
                tried = int(match[1])
            if "Error" in line or "error" in line:
                print(line.rstrip())
    return tried


def main(target: Target) -> None:
    """Hunt for a time, then say in one line what came of it; exit 1 if anything."""
    parser = argparse.ArgumentParser(description=f"Hunt: {target.name}.")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--blind", action="store_true", help="not by the code reached")
    parser.add_argument("inputs", nargs="*", type=Path, help="try these files alone")
    given = parser.parse_args()
    for path in given.inputs:
        with limit_memory():
            finding = judge(target.check, path.read_bytes())
        print(f"{path}: {finding.told if finding else 'fine'}")
    if given.inputs:
        return
    forget(target)
    begun, tried = time.monotonic(), 0
    steered = target.steered and importlib.util.find_spec("atheris") is not None
    while (left := given.seconds - (time.monotonic() - begun)) > 1:
        if steered and not given.blind:
            tried += follow(target, min(left, ROUND))  # or less, if the process dies
        else:
            corpus, seed = target.read_corpus(), time.time_ns()
            tried += wander(target, corpus, seconds=min(left, 20), seed=seed)[0]
            print(f"{target.name}: {tried:,} inputs", flush=True)
        if not tried:
            sys.exit(f"{target.name}: not one input could be tried.")
    found = sorted(x.name for x in target.findings.glob("*") if x.suffix != ".txt")
    size, took = len(target.read_corpus()), time.monotonic() - begun
    print(
        f"{target.name}: {tried:,} inputs in {took:.0f} s, corpus of {size}, "
        f"{len(found)} findings {' '.join(found)}".strip()
    )
    sys.exit(1 if found else 0)
