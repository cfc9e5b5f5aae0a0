"""Few wide heads or many narrow ones, with the same number of weights.

    python benchmarks/heads.py            writes heads.json and docs/heads.png

Models of width 64 learn to add three-digit numbers, from five seeds each: 1 head of 64
against 8 of 8, and 4 heads of 16 against 16 of 4. The number of heads only says how the
same matrices are cut, so for each seed all four start from the same weights and see the
same questions.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from tasks import SIZES, THREADS, make_model

from regard.nn.tasks import Addition, measure_accuracy
from regard.nn.train import Plan, train
from regard.show.loss_curve import plot

HERE = Path(__file__).parent
PAIRS = ((1, 8), (4, 16))
SEEDS, ASKED, EVERY = range(5), 1000, 50
TASK = Addition()
PLAN = Plan(steps=1500, rate=3e-3, batch=64)


def run(heads: int, seed: int) -> dict[str, list[float]]:
    """Train one model; return its losses and, now and then, its exact answers."""
    model, exact = make_model(TASK, seed, heads=heads), []

    def watch(step: int, _loss: float) -> None:
        if (step + 1) % EVERY == 0:
            exact.append(measure_accuracy(model, TASK, ASKED))

    losses = train(model, TASK, replace(PLAN, seed=seed), watch=watch)
    means = np.reshape(losses, (-1, EVERY)).mean(1)
    return {"loss": [float(f"{x:.4g}") for x in means], "exact": exact}


def name(heads: int) -> str:
    """Say how the width is cut."""
    return f"{heads} head{'s' * (heads > 1)} of {SIZES['width'] // heads}"


def draw(runs: dict[str, list[dict[str, list[float]]]]) -> Figure:
    """Draw the loss above, the exact answers below, one pair in each column."""
    figure = Figure(figsize=(6.4, 4.2), dpi=200, layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey="row")
    for column, pair in zip(panels.T, PAIRS, strict=True):
        for axes, what in zip(column, ("loss", "exact"), strict=True):
            curves = {
                name(heads): [seen[what] for seen in runs[name(heads)]]
                for heads in pair
            }
            label = "loss" if what == "loss" else "exact answers"
            plot(curves, axes=axes, every=EVERY, label=label, log=what == "loss")
        column[0].set_xlabel("")
        column[1].get_legend().remove()
        column[1].yaxis.set_major_formatter("{x:.0%}")
    for axes in panels[:, 1]:
        axes.set_ylabel("")
    return figure


def summarise(seen: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Return the steps until 90 % exact answers (None: never), and the last value."""
    steps = [
        next((EVERY * (i + 1) for i, x in enumerate(s["exact"]) if x >= 0.9), None)
        for s in seen
    ]
    return {"steps to 90 %": steps, "exact at the end": [s["exact"][-1] for s in seen]}


def render(result: dict[str, Any]) -> str:
    """Return the result as a table."""
    lines = [
        f"| heads | runs of {len(SEEDS)} that reach 90 % | median steps to 90 % |",
        "|---|---|---|",
    ]
    for which, found in result["heads"].items():
        steps = [x or np.inf for x in found["steps to 90 %"]]
        middle, there = np.median(steps), int(np.isfinite(steps).sum())
        shown = f"{middle:,.0f}" if np.isfinite(middle) else "not reached"
        lines.append(f"| {which} | {there} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    """Train all, write the curves down and draw them."""
    torch.set_num_threads(THREADS)
    runs: dict[str, list[dict[str, list[float]]]] = {}
    for heads in sorted(sum(PAIRS, ())):
        print(name(heads))
        runs[name(heads)] = [run(heads, seed) for seed in SEEDS]
    plan = {"steps": PLAN.steps, "batch": PLAN.batch, "rate": PLAN.rate}
    models = [make_model(TASK, 0, heads=heads) for pair in PAIRS for heads in pair]
    (weights,) = {sum(x.numel() for x in model.parameters()) for model in models}
    result = {
        "torch": torch.__version__,
        "task": TASK.describe(),
        "plan": plan,
        "weights": weights,
        "every": EVERY,
        "heads": {k: {**summarise(v), "runs": v} for k, v in runs.items()},
    }
    (HERE / "heads.json").write_text(json.dumps(result) + "\n", "utf-8")
    draw(runs).savefig(HERE.parent / "docs" / "heads.png")
    print(render(result))


if __name__ == "__main__":
    main()
