"""How often the interval of a run that stopped by --until-interval holds the truth.

    python benchmarks/stopping.py    writes stopping.json and the table of docs/scale.md

Documents are drawn from a distribution whose mean is known, in shards of 8. After each
shard the rule of the atlas decides for every run whether all of its heads are narrow
(regard.atlas.confidence); then the interval that the atlas reports is held against the
true mean. The earlier rule is run on the same documents: it stopped when all Student
intervals were narrow. A test holds one run against regard.atlas.job.know_enough.

    coverage      of all heads in all runs; nominal 95 % for each head
    documents     the median at which a run stopped
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from marks import fill

from regard.atlas.confidence import find_half, is_narrow
from regard.atlas.tally import NOWHERE, Numbers, Tally, merge_sums, sum_draw

HERE = Path(__file__).parent
LENGTH, SHARD, LIMIT = 256, 8, 20_000
RUNS = {1: 2_000, 8: 500, 270: 50}  # by heads
WIDTHS = (0.02, 0.01)
MARK = "<!-- benchmark:stopping -->"
Size = tuple[int, int, int]  # documents, runs, heads
Draw = Callable[[np.random.Generator, Size], tuple[Any, Numbers]]


class Source(NamedTuple):
    """A distribution of documents: queries n and sums y by head, and Σ y / Σ n."""

    draw: Draw  # -> n, y
    mean: float


def fix_length(values: Callable[..., Numbers]) -> Draw:
    """Return documents of one length whose means are drawn."""

    def draw(rng: np.random.Generator, size: Size) -> tuple[Any, Numbers]:
        return np.full(size, LENGTH), LENGTH * values(rng, size)

    return draw


def draw_lengths(rng: np.random.Generator, size: Size) -> tuple[Any, Numbers]:
    """Return documents of 1 to 256 queries; in long ones the mean is larger."""
    n = np.repeat(rng.integers(1, LENGTH + 1, (*size[:2], 1)), size[2], 2)
    return n, n * rng.beta(1, 9, size) * n / LENGTH


def find_lognormal_mean(m: float, s: float) -> float:
    """Return the mean of min(exp(N(m, s²)), 1)."""
    phi = NormalDist().cdf
    return math.exp(m + s * s / 2) * phi((-m - s * s) / s) + phi(m / s)


def find_normal_mean(m: float, s: float) -> float:
    """Return the mean of N(m, s²) clipped to [0, 1]."""
    z = NormalDist()
    a, b = -m / s, (1 - m) / s
    inside = m * (z.cdf(b) - z.cdf(a)) - s * (z.pdf(b) - z.pdf(a))
    return inside + 1 - z.cdf(b)


SOURCES = {
    "normal(0.3, 0.1), clipped to [0, 1]": Source(
        fix_length(lambda rng, size: rng.normal(0.3, 0.1, size).clip(0, 1)),
        find_normal_mean(0.3, 0.1),
    ),
    "lognormal(-4, 1.5), clipped to [0, 1]": Source(
        fix_length(lambda rng, size: rng.lognormal(-4, 1.5, size).clip(0, 1)),
        find_lognormal_mean(-4, 1.5),
    ),
    "beta(0.1, 5)": Source(
        fix_length(lambda rng, size: rng.beta(0.1, 5, size)), 0.1 / 5.1
    ),
    "5 % of documents at 0.5, else 0": Source(
        fix_length(lambda rng, size: 0.5 * (rng.random(size) < 0.05)), 0.025
    ),
    "1 % of documents at 0.8, else 0": Source(
        fix_length(lambda rng, size: 0.8 * (rng.random(size) < 0.01)), 0.008
    ),
    "1 to 256 queries, more in long documents": Source(
        draw_lengths, 0.1 * (2 * LENGTH + 1) / 3 / LENGTH
    ),
}


class Runs:
    """Some atlases at once, over documents that are drawn shard by shard."""

    def __init__(self, source: Source, runs: int, heads: int, seed: int) -> None:
        self.source, self.runs, self.heads = source, runs, heads
        self.rng = np.random.default_rng(seed)
        self.peak = np.full((1, runs * heads), -np.inf)
        self.parts: list[Numbers] = []
        self.documents = 0

    def read_shard(self) -> Tally:
        """Add a shard to each, and return the tally of all: runs · heads."""
        n, y = self.source.draw(self.rng, (SHARD, self.runs, self.heads))
        n, y = (x.reshape(SHARD, -1) for x in (n, y))
        self.parts = [
            merge_sums(np.stack([*self.parts, merge_sums(sum_draw(n, y)[:, None])]))
        ]
        self.peak = np.maximum(self.peak, (y / n).max(0))
        self.documents += SHARD
        return make_tally(self.parts[0], self.peak)


def make_tally(sums: Numbers, peak: Numbers) -> Tally:
    """Return the tally of one layer and one statistic."""
    heads = peak.shape[1]
    top = np.full((1, heads, 1), NOWHERE)
    return Tally(("layer",), (heads,), ("sink",), sums, peak, top)


def simulate(
    source: Source, heads: int, width: float, *, runs: int, seed: int
) -> dict[str, Any]:
    """Return coverage and documents of both rules over many runs."""
    drawn = Runs(source, runs, heads, seed)
    rules = {
        "sequence": (
            lambda x: is_narrow(x, width, length=LENGTH, pieces=1),
            lambda x: find_half(x, length=LENGTH, pieces=1),
        ),
        "student": (lambda x: x.half() <= width, lambda x: x.half()),
    }
    ends = {rule: np.zeros(runs, int) for rule in rules}  # 0: not yet
    held = {rule: np.zeros((runs, heads), bool) for rule in rules}
    while any((x == 0).any() for x in ends.values()) and drawn.documents < LIMIT:
        tally = drawn.read_shard()
        for rule, (narrow, half) in rules.items():
            ready = narrow(tally).reshape(runs, heads).all(1) & (ends[rule] == 0)
            if not ready.any():
                continue
            at = np.repeat(ready, heads)
            mine = make_tally(tally.sums[:, at], tally.peak[:, at])
            ends[rule][ready] = drawn.documents
            hits = np.abs(mine.mean - source.mean) <= half(mine)
            held[rule][ready] = hits.reshape(-1, heads)
    row: dict[str, Any] = {"heads": heads, "width": width, "runs": runs}
    for rule in rules:
        done = ends[rule] > 0
        row[rule] = {
            "stopped": int(done.sum()),
            "coverage": round(float(held[rule][done].mean()), 4),
            "documents": int(np.median(ends[rule][done])),
            "least": int(ends[rule][done].min()),
        }
    return row


def render(rows: list[dict[str, Any]]) -> str:
    """Return the table as Markdown."""
    lines = [
        "| drawn from | ± | heads | coverage | documents | earlier rule | documents |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        new, old = row["sequence"], row["student"]
        lines.append(
            f"| {row['source']} | {row['width']:g} | {row['heads']} "
            f"| {new['coverage']:.3f} | {new['documents']:,} "
            f"| {old['coverage']:.3f} | {old['documents']:,} |"
        )
    runs = ", ".join(f"{n:,} for {heads} heads" for heads, n in RUNS.items())
    lowest = min(row["sequence"]["coverage"] for row in rows)
    lines += ["", f"Runs of each row: {runs.replace('1 heads', '1 head')}. The lowest "]
    lines[-1] += f"coverage of a nominal 95 % is {lowest:.4f}."
    return "\n".join(lines)


def main() -> None:
    """Simulate every distribution, and write the results."""
    rows = []
    for seed, (name, source) in enumerate(SOURCES.items()):
        for width in WIDTHS:
            for heads, runs in RUNS.items():
                row = simulate(source, heads, width, runs=runs, seed=seed)
                rows.append({"source": name, **row})
                print(rows[-1], flush=True)
    path = HERE / "stopping.json"
    path.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    fill("docs/scale.md", MARK, render(rows))


if __name__ == "__main__":
    main()
