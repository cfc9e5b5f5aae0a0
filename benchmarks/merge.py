"""Millions of shard results merged: the time must be linear, the memory constant.

    python benchmarks/merge.py            writes merge.json and docs/scale.md

A result is that of a model with 8 heads and two statistics, with four places for each.
Folded: one, two and four million results as they come from workers, through the levels
of the store, of which only merged results are written. From files: so many results
that were committed, one file each, read again and folded, as when a run goes on. Sums,
counts and the largest numbers are held against what was put in. Large: what a driver
does with each result of a model of 32 layers of 32 heads, and seven statistics.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from marks import fill
from memory import read_memory

from regard.atlas.settings import list_measured
from regard.atlas.store import Result, Store, pack_result
from regard.atlas.tally import PLACE, Tally, sum_draw

HERE = Path(__file__).parent
MARK = "<!-- benchmark:merge -->"
FOLDED = (1_000_000, 2_000_000, 4_000_000)
FILES = (10_000, 20_000, 40_000)
SMALL, PLACES = (("sink", "induction"), 2, 4), 4  # statistics, layers, heads
LARGE, COUNT = (list_measured(), 32, 32), 512
BLOCK = 1_000  # different results, dealt again and again under new numbers


def make_tallies(size: Any = SMALL, count: int = BLOCK) -> list[Tally]:
    """Return some tallies of invented documents; all their sums are whole numbers."""
    rng, (statistics, layers, heads) = np.random.default_rng(0), size
    shape = (len(statistics), layers * heads)
    tallies = []
    for _ in range(count):
        n, y = np.full(shape, 64.0), rng.integers(0, 64, shape).astype(float)
        top = np.zeros((*shape, PLACES), PLACE)
        top["value"] = -np.sort(-rng.random((*shape, PLACES)), -1)
        sums = sum_draw(n, y)
        names, peak = tuple(f"layers.{i}" for i in range(layers)), top["value"][..., 0]
        tallies.append(Tally(names, (heads,) * layers, statistics, sums, peak, top))
    return tallies


def name(tally: Tally, number: int) -> Result:
    """Return the result of a shard."""
    return Result(number, number + 1, tally, documents=1, tokens=64)


def check(store: Store, tallies: list[Tally], n: int) -> None:
    """Hold the total against what was put in."""
    total = store.total()
    if total is None or (total.documents, total.last) != (n, n):
        raise SystemExit(f"{n} results became {total}")
    times = np.bincount(np.arange(n) % BLOCK, minlength=BLOCK)[:, None, None]
    every = np.stack([x.sums for x in tallies])
    whole = (every[..., :4] * times[..., None]).sum(0)
    np.testing.assert_array_equal(total.tally.sums[..., :4], whole)  # to the last bit
    means = every[..., 4]
    centre = (means * times).sum(0) / n
    spread = (64.0**2 * times * (means - centre) ** 2).sum(0)
    np.testing.assert_allclose(total.tally.sums[..., 4], centre, rtol=1e-9)
    np.testing.assert_allclose(total.tally.sums[..., 5], spread, rtol=1e-9)
    peak = np.stack([x.peak for x in tallies]).max(0)
    np.testing.assert_array_equal(total.tally.peak, peak)


def fold(folder: Path) -> list[dict[str, Any]]:
    """Fold results as they come, and note time and memory on the way."""
    store, tallies, rows = Store(folder, keep=PLACES), make_tallies(), []
    begin, spent = time.process_time(), 0.0
    for number in range(FOLDED[-1]):
        store.push(0, name(tallies[number % BLOCK], number))
        if number + 1 in FOLDED:
            spent = time.process_time() - begin
            rows.append(
                {
                    "results": number + 1,
                    "cpu_s": round(spent, 1),
                    "us_each": round(spent / (number + 1) * 1e6, 1),
                    "MB": round(read_memory()),
                    "files": len(list(folder.iterdir())),
                }
            )
            check(store, tallies, number + 1)
            print(rows[-1], flush=True)
            begin = time.process_time() - spent
    return rows


def read_files(folder: Path) -> list[dict[str, Any]]:
    """Commit results one file each, then open the folder again and fold them."""
    tallies, rows = make_tallies(), []
    for n in FILES:
        here = folder / str(n)
        here.mkdir(parents=True)
        for number in range(n):  # not through the store: that waits for the disk
            data = pack_result(name(tallies[number % BLOCK], number))
            file = f"0-{number:09d}-{zlib.crc32(data):08x}.parquet"
            (here / file).write_bytes(data)
        begin = time.process_time()
        store = Store(here, keep=PLACES)
        while store.fold():
            pass
        spent = time.process_time() - begin
        check(store, tallies, n)
        rows.append(
            {
                "results": n,
                "cpu_s": round(spent, 1),
                "us_each": round(spent / n * 1e6),
                "MB": round(read_memory()),
                "files": len(list(here.iterdir())),
            }
        )
        print(rows[-1], flush=True)
    return rows


def keep_large(folder: Path) -> dict[str, Any]:
    """Commit and fold large results, as the driver of a run does."""
    tallies = make_tallies(LARGE, 8)
    packed = [pack_result(name(tallies[number % 8], number)) for number in range(COUNT)]
    store, begin = Store(folder, keep=PLACES), time.process_time()
    for data in packed:
        store.commit(data)
        store.fold()
    spent = time.process_time() - begin
    size = sum(map(len, packed))
    return {
        "results": COUNT,
        "ms_each": round(spent / COUNT * 1e3, 1),
        "kB": round(size / COUNT / 1e3),
        "statistics": len(LARGE[0]),
    }


def render(result: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    lines = ["| results | CPU s | µs each | MB | files left |", "|---|---|---|---|---|"]
    for title in ("folded", "from files"):
        lines += [
            f"| {x['results']:,} {title} | {x['cpu_s']} | {x['us_each']} | {x['MB']} | "
            f"{x['files']} |"
            for x in result[title]
        ]
    large = result["large"]
    n = large["statistics"]
    text = f"Results of 32 layers of 32 heads and {n} statistics, {large['kB']} kB "
    text += (
        f"each: {large['ms_each']:.0f} ms of CPU to check, write, read and fold one."
    )
    return "\n".join([*lines, "", text])


def main() -> None:
    """Measure and write the results."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if sys.argv[1:] == ["large"]:  # the rest stays as it was measured
            result = json.loads((HERE / "merge.json").read_text("utf-8"))
        else:
            result = {"folded": fold(folder / "folded")}
            result |= {"from files": read_files(folder / "files")}
        result["large"] = keep_large(folder / "large")
    (HERE / "merge.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    fill("docs/scale.md", MARK, render(result))


if __name__ == "__main__":
    main()
