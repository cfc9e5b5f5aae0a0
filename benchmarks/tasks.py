"""What a small model learns in minutes: exact answers to questions it has never seen.

    python benchmarks/tasks.py [folder]       writes tasks.json

Every task is trained from three seeds; the whole answer must be right, written by the
model itself, on 5,000 held-out questions. The runs are kept in the folder (a temporary
one if none is given): started again, they go on where they stopped.

One thread: at these sizes a second one saves little if its core is free, and waits long
if it is not (100 steps of addition took 3 s with one, 2.4 s or 11 s with two). Minutes
are those of the wall clock; `load` is how many processes wanted one of the two cores on
average, ours included.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from regard.nn.decoder import CausalTransformer
from regard.nn.tasks import PUZZLES, Puzzle, measure_accuracy
from regard.nn.train import Plan, train
from regard.plain.config import Config

HERE = Path(__file__).parent
SEEDS, ASKED, THREADS = (0, 1, 2), 5000, 1
SIZES = {"width": 64, "layers": 2, "heads": 4}
PLANS = {
    "copy": Plan(steps=400, rate=3e-3),
    "reverse": Plan(steps=400, rate=3e-3),
    "sort": Plan(steps=2000, rate=3e-3),
    "addition": Plan(steps=2000, rate=3e-3, batch=128),
}
GOALS = {"copy": 0.99, "reverse": 0.99, "sort": 0.99, "addition": 0.95}


def make_model(task: Puzzle, seed: int, **sizes: int) -> CausalTransformer:
    """Return a new model that fits a task."""
    torch.manual_seed(seed)
    needs = {"vocabulary": task.vocabulary, "context": task.length}
    return CausalTransformer(Config(**(SIZES | sizes), **needs))


class Clock:
    """Wall seconds, CPU seconds and load of a run, kept in its folder."""

    def __init__(self, folder: Path, every: int) -> None:
        self.path, self.every = folder / "clock.json", every
        self.spent = {"wall": 0.0, "cpu": 0.0, "load": 0.0}  # load: times wall seconds
        if self.path.exists():
            self.spent = json.loads(self.path.read_text("utf-8"))
        self.last = time.monotonic(), time.process_time()

    def tick(self, step: int, _loss: float = 0.0) -> None:
        """Write the time down, whenever the run is saved."""
        if (step + 1) % self.every:
            return
        now = time.monotonic(), time.process_time()
        wall, cpu = (b - a for a, b in zip(self.last, now, strict=True))
        load = wall * os.getloadavg()[0]
        for name, amount in (("wall", wall), ("cpu", cpu), ("load", load)):
            self.spent[name] += amount
        self.last = now
        self.path.write_text(json.dumps(self.spent), "utf-8")


def run(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train one task from one seed, and measure it."""
    task, plan = PUZZLES[name](), replace(PLANS[name], seed=seed, save_every=100)
    folder.mkdir(parents=True, exist_ok=True)
    model, clock = make_model(task, seed), Clock(folder, plan.save_every)
    losses = train(model, task, plan, folder, watch=clock.tick)
    return {
        "seed": seed,
        "accuracy": measure_accuracy(model, task, ASKED),
        "loss": float(f"{sum(losses[-20:]) / 20:.2g}"),
        "minutes": round(clock.spent["wall"] / 60, 2),
        "cpu_minutes": round(clock.spent["cpu"] / 60, 2),
        "load": round(clock.spent["load"] / clock.spent["wall"], 1),
    }


def describe(name: str) -> dict[str, Any]:
    """Return what was trained, and how."""
    task, plan = PUZZLES[name](), PLANS[name]
    weights = sum(x.numel() for x in make_model(task, 0).parameters())
    tokens, _ = task.batch(1, 0, 0, held_out=True)
    return {
        "task": task.describe(),
        "example": task.show(tokens[0]),
        "model": {**SIZES, "weights": weights},
        "plan": {"steps": plan.steps, "batch": plan.batch, "rate": plan.rate},
    }


def render(result: dict[str, Any]) -> str:
    """Return the result as a table."""
    lines = [
        "| task | example | steps | exact answers | minutes |",
        "|---|---|---|---|---|",
    ]
    for name, found in result["tasks"].items():
        worst = min(x["accuracy"] for x in found["runs"])
        longest = max(x["minutes"] for x in found["runs"])
        lines.append(
            f"| {name} | `{found['example']}` | {found['plan']['steps']:,} "
            f"| {worst:.2%} | {longest:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Train every task from every seed and write the result."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    torch.set_num_threads(THREADS)
    result: dict[str, Any] = {"torch": torch.__version__, "threads": THREADS}
    result |= {"held_out_questions": ASKED, "tasks": {}}
    for name, goal in GOALS.items():
        runs = []
        for seed in SEEDS:
            print(f"{name}, seed {seed}, in {root / f'{name}{seed}'}")
            runs.append(run(name, seed, root / f"{name}{seed}"))
            print(json.dumps(runs[-1]))
        result["tasks"][name] = {**describe(name), "goal": goal, "runs": runs}
    (HERE / "tasks.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    print(render(result))


if __name__ == "__main__":
    main()
