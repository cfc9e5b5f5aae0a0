"""What statistics cost, in units of the engine's own forward call, and in memory.

    python benchmarks/stats.py            writes stats.json and docs/stats.md

Time: N = 8,192, 9 query heads on 3 key heads of 64, causal, float32, one thread. All
ways run in turn, in CPU seconds; a ratio is that of the best times. Memory: N = 65,536,
one head of 64, the peak above the record, in a fresh process each. The table: all heads
of SmolLM2-135M at 8,192 tokens against the time of its 30 attention calls alone, in the
same run. CPU only.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lens import draw, forward, load
from marks import fill
from memory import read_peak, reset_peak
from rich.progress import track

from regard.engine.choose import attend
from regard.masks.patterns import causal, window
from regard.recording.record import Record
from regard.seen import watch
from regard.stats.cells import offset
from regard.stats.columns import mean_received, received
from regard.stats.plan import Ask, DirectAsk, make_plan
from regard.stats.pooled import PooledMap
from regard.stats.pyramid import Pyramid
from regard.stats.reducers import ColumnMax, ColumnSums, LargestLogit
from regard.stats.registry import list_statistics
from regard.stats.rows import entropy, masked_mass, mass, mean_distance
from regard.stats.strongest import TopK
from regard.stats.table import make_table
from regard.stats.tile_walk import walk

HERE = Path(__file__).parent
MARK = "<!-- benchmark:stats -->"
N, LONG, WIDTH, ROUNDS = 8192, 65_536, 64, 5
GOALS = {
    "mass on 64 features": 1.10,
    "entropy": 1.10,
    "received": 1.15,
    "walk: column sums, map": 2.0,
    "walk: top 8, column max, largest logit, pyramid": 3.0,
}
Ways = dict[str, Callable[[Record], Any]]
WAYS: Ways = {
    "mass on 64 features": lambda r: mass(r, torch.ones(r.k.shape[1], WIDTH)),
    "entropy": entropy,
    "received": received,
    "walk: column sums, map": lambda r: walk(r, ColumnSums(), PooledMap(32)),
    "walk: top 8, column max, largest logit, pyramid": lambda r: walk(
        r, TopK(8), ColumnMax(), LargestLogit(), Pyramid()
    ),
    "mean received": mean_received,
    "mean distance": mean_distance,
    "mass in a window of 128": lambda r: masked_mass(r, window(127)),
    "weight on the token before": lambda r: offset(r, 1),
}


def make_record(n: int, heads: int, shared: int) -> tuple[Record, torch.Tensor]:
    """Return a causal record, and its values."""
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(heads, n, WIDTH, generator=rng)
    k, v = torch.randn(2, shared, n, WIDTH, generator=rng)
    at = torch.arange(n)
    record = Record(
        name="layer",
        q=q,
        k=k,
        lse=attend(q, k, v, causal()).lse,
        scale=WIDTH**-0.5,
        q_positions=at,
        k_positions=at,
        mask=causal(),
    )
    return record, v


def compare_times() -> dict[str, float]:
    """Return the best time of each way over the best of the forward call."""
    record, v = make_record(N, 9, 3)
    run = lambda r: attend(r.q, r.k, v, causal())  # noqa: E731
    ways: Ways = {"forward": run, **WAYS}
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in track(range(ROUNDS), "times"):
        for name, way in ways.items():
            start = time.process_time()
            way(record)
            took[name].append(time.process_time() - start)
    unit = min(took["forward"])
    return {name: round(min(took[name]) / unit, 3) for name in WAYS}


def measure_memory(name: str) -> float:
    """Return the peak of one statistic above its record, in MB."""
    record, _ = make_record(LONG, 1, 1)
    before = reset_peak()
    WAYS[name](record)
    return round(read_peak() - before, 1)


def run_apart(name: str) -> float:
    """Measure the memory in a process of its own."""
    command = [sys.executable, __file__, name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def compare_table() -> dict[str, float]:
    """Return the time of a table over that of the attention of the pass alone."""
    model = load()
    with watch(model, keep="qkv") as seen:
        forward(model, draw(N))
    start = time.process_time()
    for record in seen.records:
        attend(record.q, record.k, record.v, causal())
    middle = time.process_time()
    table = make_table(seen.recording)
    end = time.process_time()
    given = seen.layer(0), seen.recording.tokens[0]
    asked = {x.name: x.request(*given) for x in list_statistics()}
    asks = {name: x for name, x in asked.items() if isinstance(x, Ask | DirectAsk)}
    calls = make_plan(asks).cost
    return {
        "heads": len(table),
        "attention_s": round(middle - start, 2),
        "ratio": round((end - middle) / (middle - start), 3),
        "planned_calls": round(calls, 2),
    }


def render(result: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    lines = ["| statistic | forward calls | goal | MB at 65,536 |", "|---|---|---|---|"]
    for name in WAYS:
        goal = f"{GOALS[name]:.2f}" if name in GOALS else ""
        numbers = f"{result['times'][name]:.2f} | {goal} | {result['memory'][name]:.0f}"
        lines.append(f"| {name} | {numbers} |")
    heads, ratio = result["table"]["heads"], result["table"]["ratio"]
    about = f"`seen.table()` of {heads} heads at {N:,} tokens: {ratio:.2f} times "
    lines += ["", about + "the model's own attention (goal 4.0)."]
    return "\n".join(lines)


def main() -> None:
    """Measure and write the results."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        times, table = compare_times(), compare_table()
    memory = {name: run_apart(name) for name in track(WAYS, "memory")}
    about: dict[str, Any] = {name: version(name) for name in ("regard", "torch")}
    about |= {"python": platform.python_version(), "threads": 1, "rounds": ROUNDS}
    result = {"about": about, "times": times, "table": table, "memory": memory}
    (HERE / "stats.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    fill("docs/stats.md", MARK, render(result))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        torch.set_num_threads(1)
        print(measure_memory(sys.argv[1]))
    else:
        main()
