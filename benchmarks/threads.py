"""Is the default number of threads the best one? Against 1, 2 and all threads.

    python benchmarks/threads.py                 writes threads.json and docs/scale.md
    python benchmarks/threads.py engine table    only these, and writes nothing

The same work by default and with a fixed number of threads, each in a process of its
own, in turns, the best of a few rounds: first on the machine as it is, then with every
core busy with a process that only counts. An atlas has as many workers instead of
threads. The default may take 1.1 times as long as the best. About ten minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from marks import fill
from rich.progress import track

from regard import threads
from regard.atlas.job import run_atlas
from regard.atlas.model import Model, Words
from regard.atlas.runners import RunnerOptions
from regard.atlas.settings import Settings
from regard.engine import attend
from regard.masks.patterns import causal
from regard.nn.decoder import CausalTransformer
from regard.plain.config import Config
from regard.recording.record import Record, Recording
from regard.show.page import make_page
from regard.stats.table import make_table
from regard.threads import count_cores, count_others

HERE = Path(__file__).parent
MARK = "<!-- benchmark:threads -->"
TOKENS = (100, 1_000, 8_000)
DEFAULT = "default"
SETTINGS = (DEFAULT, *map(str, sorted({1, 2, count_cores()})))
ROUNDS = {100: 9, 1_000: 5, 8_000: 3}
PAUSE = 0.1  # seconds: threads of the process before may spin for a moment
QUICK = 15  # rounds of the engine: on busy cores, one of its runs varies by a third
CALLS = {100: 200, 1_000: 10, 8_000: 1}  # of the engine, in one measurement
LAYERS = {100: 6, 1_000: 2, 8_000: 1}
HEADS = {100: (9, 3), 1_000: (9, 3), 8_000: (3, 1)}  # queries, keys
DOCUMENTS = {100: 160, 1_000: 24, 8_000: 4}
ALLOWED = 1.1


@cache
def make_recording(n: int) -> Recording:
    """Return a recording of random q and k with the width of SmolLM2-135M."""
    torch.manual_seed(n)
    heads, shared = HEADS[n]
    records = []
    for i in range(LAYERS[n]):
        q, k = torch.randn(heads, n, 64), torch.randn(shared, n, 64)
        lse = attend(q, k, k, causal()).lse
        at = torch.arange(n)
        about = {"q_positions": at, "k_positions": at, "mask": causal()}
        records.append(Record(name=f"{i}", q=q, k=k, lse=lse, scale=1 / 8, **about))
    return Recording(
        model="random",
        records=tuple(records),
        sequences=(0,) * len(records),
        tokens=(tuple(i % 50 for i in range(n)),),
    )


def run_engine(n: int) -> None:
    """Attend causally, as often as takes some milliseconds."""
    record = make_recording(n).records[0]
    q, k = record.q[None], record.k[None]
    for _ in range(CALLS[n]):
        attend(q, k, k, causal())


WORK: dict[str, Callable[[int], Any]] = {
    "engine": run_engine,
    "table": lambda n: make_table(make_recording(n)),
    "page": lambda n: make_page(make_recording(n)),
}
NAMES = (*WORK, "atlas")


def make_model() -> Model:
    """Return the small model of the atlas, which reads bytes."""
    torch.manual_seed(0)
    config = Config(
        vocabulary=256, context=8_192, width=256, layers=2, heads=4, kv_heads=2
    )
    network = CausalTransformer(config)
    words = Words(
        lambda text: list(text.encode()), lambda ids: bytes(ids).decode(), 8192
    )
    return Model(network, network.read, words)


def time_atlas(n: int, setting: str) -> float:
    """Return the seconds of an atlas of documents with n tokens, from its start."""
    workers = None if setting == DEFAULT else int(setting)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        texts = (f"{i:6d} {'lorem ipsum ' * n}"[:n] for i in range(DOCUMENTS[n]))
        lines = (json.dumps({"text": text}) for text in texts)
        corpus.write_text("\n".join(lines), "utf-8")
        plan = Settings(
            model="threads:make_model",
            corpus=(str(corpus),),
            length=n,
            shard=max(1, DOCUMENTS[n] // 8),
        )
        begin = time.perf_counter()
        run_atlas(
            Path(folder) / "atlas", crew=RunnerOptions(workers=workers), plan=plan
        )
        return time.perf_counter() - begin


def answer(setting: str) -> None:
    """Measure what is asked for on stdin, once to warm up and once in earnest."""
    known = set()
    if setting != DEFAULT:  # always so many, whatever the work and the free cores
        threads.SMALL, threads.count_free = 0, lambda: int(setting)
    for line in sys.stdin:
        what, n = line.split()
        if (what, n) not in known:
            WORK[what](int(n))
            known.add((what, n))
        begin = time.perf_counter()
        WORK[what](int(n))
        print(time.perf_counter() - begin, flush=True)


@contextmanager
def start_process(setting: str) -> Iterator[Callable[[str, int], float]]:
    """Start a process with a number of threads; give a function that measures in it."""
    env = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    if setting != DEFAULT:
        env["OMP_NUM_THREADS"] = setting
    run = [sys.executable, __file__, "--answer", setting]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(run, env=env, **pipes) as process:
        questions: Any = process.stdin
        answers: Any = process.stdout

        def ask(what: str, n: int) -> float:
            questions.write(f"{what} {n}\n")
            questions.flush()
            return float(answers.readline())

        try:
            yield ask
        finally:
            questions.close()


@contextmanager
def keep_busy(count: int) -> Iterator[None]:
    """Run so many processes that only count, until the end of the block."""
    spin = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def measure(what: str, n: int, runs: Mapping[str, Callable[[], float]]) -> Any:
    """Return the best seconds of each setting, and the ratio of the default."""
    best = dict.fromkeys(runs, float("inf"))
    rounds = {"atlas": 2, "engine": QUICK}.get(what, ROUNDS[n])
    for turn in range(rounds):
        order = list(runs)[turn % len(runs) :] + list(runs)[: turn % len(runs)]
        for setting in order:
            time.sleep(PAUSE)
            best[setting] = min(best[setting], runs[setting]())
    others = min(x for setting, x in best.items() if setting != DEFAULT)
    seconds = {setting: round(x, 4) for setting, x in best.items()}
    ratio = round(best[DEFAULT] / others, 2)
    return {"what": what, "tokens": n, "seconds": seconds, "ratio": ratio}


def measure_all(names: list[str], busy: str) -> list[dict[str, Any]]:
    """Return a row for each kind of work and number of tokens."""
    rows = []
    with ExitStack() as stack:
        ask = {x: stack.enter_context(start_process(x)) for x in SETTINGS}
        places = [(what, n) for what in names for n in TOKENS]
        for what, n in track(places, f"threads, {busy}"):
            runs = {
                x: partial(time_atlas, n, x)
                if what == "atlas"
                else partial(ask[x], what, n)
                for x in SETTINGS
            }
            rows.append(measure(what, n, runs) | {"machine": busy})
    return rows


def render(result: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    settings = [x for x in result["rows"][0]["seconds"] if x != DEFAULT]
    names = [f"{x} thread{'s' * (x != '1')}, s" for x in settings]
    lines = [
        f"| work | tokens | machine | default, s | {' | '.join(names)} | ratio |",
        "|---|---|---|" + "---|" * (len(settings) + 2),
    ]
    for x in result["rows"]:
        seconds = " | ".join(f"{x['seconds'][y]:.3g}" for y in (DEFAULT, *settings))
        place = f"{x['what']} | {x['tokens']:,} | {x['machine']}"
        lines.append(f"| {place} | {seconds} | {x['ratio']:.2f} |")
    worst = max(x["ratio"] for x in result["rows"])
    said = f"Ratio: the default to the best of the others; at most {worst:.2f}. "
    said += f"{result['cores']} cores, {result['others']} other runnable threads and a "
    said += f"load of {result['load']:.1f} at the start."
    return "\n".join([*lines, "", said])


def main(names: list[str]) -> None:
    """Measure, and write the results if everything was measured."""
    if names[:1] == ["--answer"]:
        answer(names[1])
        return
    result: dict[str, Any] = {
        "cores": count_cores(),
        "load": round(os.getloadavg()[0], 2),
        "others": count_others(),
        "allowed": ALLOWED,
    }
    rows = measure_all(names or list(NAMES), "idle")
    with keep_busy(count_cores()):
        rows += measure_all(names or list(NAMES), "busy")
    result["rows"] = rows
    print(render(result))
    if not names:
        text = json.dumps(result, indent=2)
        (HERE / "threads.json").write_text(text + "\n", "utf-8")
        fill("docs/scale.md", MARK, render(result))
    slow = [x for x in rows if x["ratio"] > ALLOWED]
    for x in slow:
        place = f"{x['what']} {x['tokens']} {x['machine']}"
        print(f"{place}: {x['ratio']} times the best", file=sys.stderr)
    sys.exit(bool(slow))


if __name__ == "__main__":
    main(sys.argv[1:])
