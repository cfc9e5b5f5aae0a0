"""What an atlas costs: against bare forwards, and by each of its runners.

    python benchmarks/atlas.py            writes atlas.json and docs/scale.md

SmolLM2-135M over Python's own documentation (language reference and docstrings of the
standard library), one thread for each worker. The steps are measured in one process, in
turns with the bare forward, the best of two. A runner is the command itself, from its
start to its table; its CPU time is that of every process it started, Ray's too.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import torch
from marks import fill
from smollm import find_smollm

from regard.atlas.chunks import cut_shard
from regard.atlas.corpus import open_corpus, plan_corpus
from regard.atlas.settings import Settings, list_measured
from regard.atlas.store import pack_result
from regard.atlas.table import read_table
from regard.atlas.worker import Work, Worker
from regard.stats.registry import list_statistics

HERE = Path(__file__).parent
MARK = "<!-- benchmark:atlas -->"
DOCUMENTS, LENGTH, SHARD, ROUNDS = 208, 192, 8, 2
LENGTHS = (256, 512)
RUNS = {
    "loop": ("--runner", "loop"),
    "Ray, 1 actor": ("--runner", "ray", "--workers", "1"),
    "pool of 2": ("--runner", "pool", "--workers", "2"),
    "Ray, 2 actors": ("--runner", "ray", "--workers", "2"),
}


def list_modules() -> list[Path]:
    """Return the files of the standard library, without its tests."""
    home = Path(os.__file__).parent
    skip = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    found = (x for x in home.rglob("*.py") if skip.isdisjoint(x.parts))
    return sorted(x for x in found if x.stat().st_size > 3000)


def list_prose() -> Iterator[str]:
    """Yield what Python says of itself in words."""
    yield from topics.topics.values()
    for path in list_modules():
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) > 700 and ">>>" not in text:
                    yield text


def write_corpora(folder: Path) -> tuple[Path, Path]:
    """Write prose and source code, a document a line."""
    code = (x.read_text("utf-8", "replace") for x in list_modules())
    paths = folder / "prose.jsonl", folder / "code.jsonl"
    for path, texts in zip(paths, (list_prose(), code), strict=True):
        path.write_text("\n".join(json.dumps({"text": x}) for x in texts), "utf-8")
    return paths


def measure_steps(corpus: Path, length: int, folder: Path) -> dict[str, Any]:
    """Return the CPU time of each step for a token, in units of the bare forward."""
    torch.set_num_threads(1)
    plan = Settings(
        model=str(find_smollm()), corpus=(str(corpus),), length=length, shard=8
    )
    worker = Worker(plan)
    plan_corpus(plan.corpus, folder / f"{length}.parquet", shard=8)
    shard = open_corpus(folder / f"{length}.parquet").shard(1)
    best: dict[str, float] = {}
    tokens = 0

    def note(name: str, begin: float) -> None:
        spent = time.process_time() - begin
        best[name] = min(best.get(name, spent), spent)

    for _ in range(ROUNDS):
        begin = time.process_time()
        pieces, aside = cut_shard(shard, plan, worker.model.words)
        note("read and cut", begin)
        tokens = sum(len(x.tokens) for x in pieces)
        begin = time.process_time()
        for piece in pieces:
            with torch.inference_mode():
                worker.model.run(torch.tensor([piece.tokens]))
        note("bare forward", begin)
        begin = time.process_time()
        seen = [worker.watch([piece]) for piece in pieces]
        note("watched forward", begin)
        begin = time.process_time()
        for piece, x in zip(pieces, seen, strict=True):
            for record in x.records:
                worker.describe(record, piece)
        note("statistics", begin)
        work, begin = Work(aside), time.process_time()
        for piece in pieces:
            worker.run([piece], work)
        pack_result(worker.finish(shard, work))
        note("all of it", begin)
    bare = best["bare forward"]
    parts = {
        "the lens": best["watched forward"] - bare,
        "statistics": best["statistics"],
        "read and cut": best["read and cut"],
    }
    parts["sums and file"] = best["all of it"] - bare - parts["the lens"]
    parts["sums and file"] -= parts["statistics"]
    return {
        "length": length,
        "tokens": tokens,
        "bare_ms_a_token": round(bare / tokens * 1e3, 3),
        "whole": round((best["all of it"] + best["read and cut"]) / bare, 2),
        "parts": {name: round(x / bare, 3) for name, x in parts.items()},
    }


class Meter(threading.Thread):
    """Adds up the CPU time of all processes that carry a mark in their environment."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.mark, self.over = f"REGARD_METER={uuid.uuid4().hex}", threading.Event()
        self.spent: dict[tuple[int, str], float] = {}

    def run(self) -> None:
        while not self.over.wait(0.3):
            self.look()

    def look(self) -> None:
        """Note the CPU time of every process that is there."""
        tick = os.sysconf("SC_CLK_TCK")
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (path / "environ").read_bytes():
                    fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
                    key = int(path.name), fields[19]  # a number may be used again
                    self.spent[key] = (int(fields[11]) + int(fields[12])) / tick
            except OSError:
                continue


def run_command(options: tuple[str, ...], corpus: Path, folder: Path) -> dict[str, Any]:
    """Run `regard atlas run` and return what it took, and what it found."""
    meter = Meter()
    name, value = meter.mark.split("=")
    command = [sys.executable, "-m", "regard", "atlas", "run", str(folder), *options]
    command += ["--model", str(find_smollm()), "--corpus", str(corpus)]
    command += ["--documents", str(DOCUMENTS), "--length", str(LENGTH)]
    meter.start()
    begin = time.perf_counter()
    subprocess.run(
        [*command, "--shard", str(SHARD)],
        env=os.environ | {name: value, "RAY_AUTH_MODE": "disabled"},
        check=True,
    )
    wall = time.perf_counter() - begin
    meter.over.set()
    meter.join()
    table = read_table(folder)
    numbers = table.tally.sums.tobytes() + table.tally.top.tobytes()
    weights = (x.name for x in list_statistics() if x.is_weight)
    half = {name: float(np.nanmax(table.half(name))) for name in weights}
    widest = max(half, key=half.__getitem__)
    return {
        "widest": [widest, round(half[widest], 4)],
        "wall_s": round(wall, 1),
        "cpu_s": round(sum(meter.spent.values()), 1),
        "documents": table.about["documents"],
        "tokens": table.about["tokens"],
        "digest": blake2b(numbers, digest_size=8).hexdigest(),
    }


def render(result: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    names = [*result["steps"][0]["parts"]]
    head = ["tokens", "unwatched forward, ms/token", "atlas / unwatched", *names]
    rows = [
        [x["length"], x["bare_ms_a_token"], x["whole"], *x["parts"].values()]
        for x in result["steps"]
    ]
    runs = result["runs"]
    loop = min(x["cpu_s"] for name, x in runs.items() if "loop" in name)
    more = [
        [name, x["cpu_s"], f"{x['cpu_s'] / loop:.2f}", x["wall_s"], x["digest"]]
        for name, x in runs.items()
    ]
    first = runs["loop"]
    told = (
        f"{first['documents']} documents, {first['tokens']:,} tokens, "
        f"{result['statistics']} statistics of 270 heads; load {result['load']} on "
        f"{result['cores']} cores."
    )
    name, half = first["widest"]
    need = first["documents"] * (half / 0.01) ** 2
    told += (
        f" The widest interval of a mean weight is one of {name}, ± {half:.3f}; "
        f"± 0.01 for every head would take about {need:,.0f} documents."
    )
    runners = draw(["runner", "CPU s", "relative to loop", "wall s", "checksum"], more)
    return "\n".join([*draw(head, rows), "", *runners, "", told])


def draw(head: list[str], rows: list[list[Any]]) -> list[str]:
    """Return the lines of a table."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


def main() -> None:
    """Measure and write the results."""
    load = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prose, _ = write_corpora(folder)
        steps = [measure_steps(prose, length, folder) for length in LENGTHS]
        runs = {}
        for number, (title, options) in enumerate(RUNS.items()):
            runs[title] = run_command(options, prose, folder / str(number))
            print(title, runs[title], flush=True)
    if len({x["digest"] for x in runs.values()}) != 1:
        raise SystemExit(f"the runners do not agree: {runs}")
    result = {"load": load, "cores": os.cpu_count()}
    result |= {"statistics": len(list_measured()), "steps": steps, "runs": runs}
    (HERE / "atlas.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    fill("docs/scale.md", MARK, render(result))


if __name__ == "__main__":
    main()
