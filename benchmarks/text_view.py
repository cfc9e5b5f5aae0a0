"""How fast the text view is in a real browser, and how large a file with it is.

    python benchmarks/text_view.py        writes text_view.json and docs/show.md

Random queries and keys of the shape of SmolLM2-135M, 270 heads at 8,192 tokens: a click
on a token until the tints of all heads, or of one, are on the page. One random head of
131,072 tokens: from the address to the tinted text, and a click. Both have the words of
these documents. One HTML file of SmolLM2 itself, 270 heads at 1,350 tokens: its size,
and a click. Clicks are timed by the page's own clock, in headless Chromium.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from map import LONG, N, make_long, open_page, read_text, watch_smollm
from marks import fill
from playwright.sync_api import Page

from regard.engine.choose import attend
from regard.masks.patterns import causal
from regard.recording.record import Record, Recording
from regard.show.page import LIMIT, make_page
from regard.show.server import start_server

HERE = Path(__file__).parent
MARK = "<!-- benchmark:text_view -->"
SHORT, CLICKS = 1350, 5
GOALS = {"all_ms": 1000, "open_s": 2, "click_ms": 150, "MB": LIMIT / 1e6}
TINTED = "[data-view=text] [data-at=reading][data-state=exact]"
# click a token in sight; return the milliseconds until its tints are painted
CLICK = """async (n) => {
  const tokens = [...document.querySelectorAll("[data-token]")].filter((token) => {
    const { top, bottom } = token.getBoundingClientRect();
    return top > 100 && bottom < 600;
  });
  const token = tokens[Math.floor((tokens.length * n) / 6)];
  const reading = document.querySelector("[data-at=reading]");
  const { left, top } = token.getBoundingClientRect();
  const place = { clientX: left + 3, clientY: top + 9, bubbles: true, button: 0 };
  const begin = performance.now();
  token.dispatchEvent(new PointerEvent("pointerdown", place));
  token.dispatchEvent(new PointerEvent("pointerup", place));
  const wait = () => new Promise((done) => setTimeout(done));
  while (reading.dataset.state !== "exact") await wait();
  await new Promise(requestAnimationFrame);
  return performance.now() - begin;
}"""


def click(page: Page) -> list[int]:
    """Click some tokens one after the other; return the milliseconds of each."""
    return [round(page.evaluate(CLICK, n)) for n in range(1, CLICKS + 1)]


def open_text(page: Page, url: str, address: str) -> float:
    """Return the seconds from the address to the tinted text."""
    page.goto("about:blank")
    begin = time.perf_counter()
    page.goto(f"{url}#v=text&{address}")
    page.wait_for_selector(TINTED)
    return round(time.perf_counter() - begin, 2)


def make_model() -> Recording:
    """Return records of the shape of SmolLM2-135M: 30 layers of 9 heads, 3 of keys."""
    rng = torch.Generator().manual_seed(0)
    at, records = torch.arange(N), []
    for layer in range(30):
        q, k = (torch.randn(heads, N, 64, generator=rng) for heads in (9, 3))
        lse = attend(q, k, k, causal()).lse
        shape = {"q": q, "k": k, "lse": lse, "q_positions": at, "k_positions": at}
        records.append(Record(name=f"{layer}", scale=0.125, mask=causal(), **shape))
    texts = tuple(islice(cycle(split_words()), N))
    return Recording(
        model="Made", records=tuple(records), sequences=(0,) * 30, texts=(texts,)
    )


def split_words() -> list[str]:
    """Return the words of real text, each with the space before it."""
    return re.findall(r"\s*\S+", read_text())


def measure_model(page: Page) -> dict[str, Any]:
    """Return how long a click takes at 8,192 tokens.

    Thumbnails are not made in advance: they would share the cores for a minute or two.
    """
    with (
        patch("regard.show.map_source.CELLS", 0),
        start_server(make_model()) as running,
    ):
        opened = open_text(page, running.url, "sel=200")
        every = click(page)
        open_text(page, running.url, "sel=200&w=attending")
        attending = click(page)
        open_text(page, running.url, "sel=200&hs=17.5")
        one = click(page)
    return {
        "open_s": opened,
        "all_ms": every,
        "attending_ms": attending,
        "one_ms": one,
    }


def measure_long(page: Page) -> dict[str, Any]:
    """Return how long 131,072 tokens take to open, and a click in them."""
    recording = Recording(
        model="Long",
        records=(make_long(),),
        sequences=(0,),
        texts=(tuple(islice(cycle(split_words()), LONG)),),
    )
    with start_server(recording) as running:
        opened = [open_text(page, running.url, f"sel={LONG - 300}") for _ in range(3)]
        found = click(page)
        open_text(page, running.url, f"sel={LONG - 300}&w=attending")
        attending = click(page)
        tokens = page.locator("[data-token]").count()
    return {
        "open_s": max(opened),
        "click_ms": found,
        "attending_ms": attending,
        "elements": tokens,
    }


def measure_file(page: Page) -> dict[str, Any]:
    """Return the size of a file with all heads at 1,350 tokens, and a click in it."""
    seen = watch_smollm(SHORT)
    bare = replace(
        seen.recording, records=tuple(replace(x, v=None) for x in seen.records)
    )
    made = make_page(bare)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "map.html"
        made.write(path)
        opened = open_text(page, path.as_uri(), "sel=200")
        heads = page.text_content("[data-at=mixWords]") or ""
        found = click(page)
        open_text(page, path.as_uri(), "sel=200&mix=max")
        largest = click(page)
        open_text(page, path.as_uri(), "sel=200&mix=max&w=attending")
        attending = click(page)
    return {
        "MB": round(made.size / 1e6, 1),
        "heads": int(heads.split()[0]),
        "overview": made.overview,
        "least": made.least,
        "share": made.share,
        "open_s": opened,
        "click_ms": found,
        "max_ms": largest,
        "attending_ms": attending,
    }


def render(result: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    model, long, file = (result[name] for name in ("model", "long", "file"))
    rows = (
        (f"{N:,} tokens: click, 270 heads, ms", max(model["all_ms"]), GOALS["all_ms"]),
        (
            "the same, who attends to it, ms",
            max(model["attending_ms"]),
            GOALS["all_ms"],
        ),
        ("the same, one head, ms", max(model["one_ms"]), GOALS["click_ms"]),
        (f"{LONG:,} tokens: opens, s", long["open_s"], GOALS["open_s"]),
        ("the same, click, one head, ms", max(long["click_ms"]), GOALS["click_ms"]),
        (
            "the same, who attends to it, ms",
            max(long["attending_ms"]),
            GOALS["click_ms"],
        ),
        (f"file of {SHORT:,} tokens: size, MB", file["MB"], GOALS["MB"]),
        (
            f"the same, {file['heads']} heads: weights from",
            f"{file['least']} on ({file['share']:.0%})",
            "",
        ),
        ("the same, click, mean of all heads, ms", max(file["click_ms"]), ""),
        ("the same, click, max of all heads, ms", max(file["max_ms"]), ""),
        ("the same, who attends to it, ms", max(file["attending_ms"]), ""),
    )
    lines = ["| what, worst of five | measured | goal |", "|---|---|---|"]
    lines += [f"| {what} | {found} | {goal} |" for what, found, goal in rows]
    load = " and ".join(f"{x:.1f}" for x in result["load"])
    lines += ["", f"{result['cores']} cores, load {load} before and after."]
    return "\n".join(lines)


def main() -> None:
    """Measure and write the results; the parts that are named, or all."""
    path, before = HERE / "text_view.json", os.getloadavg()[0]
    parts = {"model": measure_model, "long": measure_long, "file": measure_file}
    result = json.loads(path.read_text("utf-8")) if path.exists() else {}
    with open_page() as page, torch.inference_mode():
        for name in sys.argv[1:] or parts:
            result[name] = parts[name](page)
    load = [round(x, 2) for x in (before, os.getloadavg()[0])]
    result |= {"load": load, "cores": os.cpu_count()}
    path.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    if parts.keys() <= result.keys():
        print(render(result))
        fill("docs/show.md", MARK, render(result))


if __name__ == "__main__":
    main()
