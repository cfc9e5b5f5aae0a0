"""How fast the map is in a real browser, and how much a very long record takes.

    python benchmarks/map.py              writes map.json and docs/show.md

SmolLM2-135M on 8,192 tokens of these documents and Python's own source, all 270 heads,
served as `seen.show()` does and looked at in headless Chromium. The bare pass is the
walk that no gallery can do without: every weight met once, of 128 × 128 the largest
kept, with as many threads as the server has. A head is opened by a click; its times are
those of the page's own clock, from the click to the first picture on the canvas and to
the moment when every tile in sight is exact. Script time of a frame: all that handlers
and frame callbacks took since the frame before. The long record: one head of 131,072
random tokens in a process of its own; its memory is that of the whole process.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from marks import fill
from memory import read_peak, reset_peak
from playwright.sync_api import Page, sync_playwright
from smollm import find_smollm

from regard.engine.choose import attend
from regard.masks.patterns import causal
from regard.nn.weights import open_source
from regard.recording.record import Record, Recording
from regard.seen import Seen, watch
from regard.show.server import start_server
from regard.stats.pooled import PooledMap
from regard.stats.tile_walk import walk

HERE = Path(__file__).parent
MARK = "<!-- benchmark:map -->"
N, LONG, WIDTH, STEPS = 8192, 131_072, 64, 60
HEADS = ((17, 5), (3, 1), (9, 4), (24, 7), (29, 0))  # opened one after the other
CELLS = ((131_071, 0), (131_071, 131_070), (65_536, 40_000), (99_999, 99_999), (7, 3))
GOALS = {"gallery": 1.5, "overview": 300, "exact": 1000, "script": 50, "memory": 1000}
# runs before the page: notes pictures on the map, and the script time of each frame
SPY = """
window.spy = { click: 0, first: 0, exact: 0, frame: 0, frames: [] };
const timed = (run) => function (...given) {
  const start = performance.now();
  try {
    return run.apply(this, given);
  } finally {
    spy.frame += performance.now() - start;
  }
};
const ask = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (run) => ask(timed(run));
const listen = EventTarget.prototype.addEventListener;
EventTarget.prototype.addEventListener = function (name, run, options) {
  listen.call(this, name, typeof run === "function" ? timed(run) : run, options);
};
const draw = CanvasRenderingContext2D.prototype.drawImage;
CanvasRenderingContext2D.prototype.drawImage = function (...given) {
  const asked = spy.click && !spy.first && this.canvas.dataset.at === "plane";
  if (asked) spy.first = performance.now();
  return draw.apply(this, given);
};
(function next() {
  spy.frames.push(spy.frame);
  spy.frame = 0;
  ask(next);
})();
(function look() {
  const badge = "[data-view=map] [data-at=badge][data-state=exact]";
  const exact = spy.first && !spy.exact && document.querySelector(badge);
  if (exact) spy.exact = performance.now();
  setTimeout(look, 4);
})();
"""
EXACT = "[data-view=map] [data-at=badge][data-state=exact]"
PAINTED = "(n) => document.querySelectorAll('a.card canvas').length === n"
BADGES = "() => !/to come/.test(document.querySelector('[data-at=status]').textContent)"
CLICK = """(card) => {
  Object.assign(spy, { click: performance.now(), first: 0, exact: 0 });
  card.click();
}"""


@contextmanager
def open_page() -> Iterator[Page]:
    """Give a page that is watched by the spy."""
    with sync_playwright() as tool:
        path = shutil.which("chromium")
        browser = tool.chromium.launch(executable_path=path, args=["--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.add_init_script(SPY)
        page.set_default_timeout(1_800_000)
        yield page
        browser.close()


def read_text() -> str:
    """Return real text: the documents here, then Python's own source."""
    files = [*sorted((HERE.parent / "docs").glob("*.md")), HERE.parent / "LICENSE"]
    files.append(Path(sysconfig.get_paths()["stdlib"]) / "argparse.py")
    return "\n".join(path.read_text("utf-8") for path in files)


def watch_smollm(n: int = N) -> Seen:
    """Return what SmolLM2 did with so many tokens."""
    from lens import forward, load  # noqa: PLC0415 (transformers is large)

    path = find_smollm()
    tokenizer = open_source(path).make_tokenizer()
    tokens = tokenizer.encode(read_text())[:n]
    model = load()
    with watch(model, keep="qkv") as seen:
        forward(model, torch.tensor([tokens]))
    return seen.label(tokenizer.decode)


def time_bare(seen: Seen) -> dict[str, float]:
    """Return the seconds of the walk with thumbnails, and of attention itself."""
    threads, begin = torch.get_num_threads(), time.perf_counter()
    for record in seen.records:
        walk(record, PooledMap(N // 64), workers=threads)
    middle = time.perf_counter()
    for record in seen.records:
        attend(record.q, record.k, record.v, causal())
    end = time.perf_counter()
    return {"bare_s": round(middle - begin, 2), "attention_s": round(end - middle, 2)}


def measure_model(page: Page) -> dict[str, Any]:
    """Return how long the gallery, five heads and sixty steps take."""
    seen = watch_smollm()
    bare = time_bare(seen)
    heads = sum(record.heads for record in seen.records)
    begin = time.perf_counter()
    with start_server(seen.recording) as running:
        page.goto(f"{running.url}#v=heads")
        page.wait_for_function(PAINTED, arg=heads)
        gallery = time.perf_counter() - begin
        page.wait_for_function(BADGES)
        table = time.perf_counter() - begin
        opened = [open_head(page, *head) for head in HEADS]
        frames = walk_about(page)
    return {
        **bare,
        "heads": heads,
        "gallery_s": round(gallery, 2),
        "gallery": round(gallery / bare["bare_s"], 2),
        "table_s": round(table, 2),
        "overview_ms": [round(x["first"] - x["click"]) for x in opened],
        "exact_ms": [round(x["exact"] - x["click"]) for x in opened],
        "script_ms": round(max(frames), 1),
        "frames": len(frames),
    }


def open_head(page: Page, layer: int, head: int) -> dict[str, float]:
    """Open a head from the gallery; return what the spy saw."""
    card = page.locator(f'a.card[aria-label*="layer {layer} head {head} "]')
    card.evaluate(CLICK)
    page.wait_for_function("() => spy.exact > 0")
    found: dict[str, float] = page.evaluate("() => spy")
    if (layer, head) != HEADS[-1]:
        page.click("[data-at=home]")
        page.wait_for_selector("[data-view=gallery]")
    return found


def walk_about(page: Page) -> list[float]:
    """Zoom and pan; return the script time of each frame."""
    page.evaluate("() => { spy.frames.length = 0; }")
    for step in range(STEPS // 2):
        page.mouse.move(450 + step, 520)
        page.mouse.wheel(0, -120 if step < 18 else 120)
        page.wait_for_timeout(30)
    page.mouse.move(450, 500)
    page.mouse.down()
    for step in range(STEPS // 2):
        page.mouse.move(450 - 8 * step, 500 - 8 * step)
        page.wait_for_timeout(30)
    page.mouse.up()
    page.wait_for_selector(EXACT)
    frames: list[float] = page.evaluate("() => spy.frames")
    return [x for x in frames if x > 0]


def make_long() -> Record:
    """Return one head of random tokens with a sink."""
    rng = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, LONG, WIDTH, generator=rng)
    q[..., 0] += 3
    k[:, 0, 0] += 20
    at = torch.arange(LONG)
    return Record(
        name="layer",
        q=q,
        k=k,
        lse=attend(q, k, k, causal()).lse,
        scale=WIDTH**-0.5,
        q_positions=at,
        k_positions=at,
        mask=causal(),
    )


def measure_long() -> dict[str, Any]:
    """Return how a record of 131,072 tokens is shown, and the memory of all of it."""
    record = make_long()
    recording = Recording(model="Long", records=(record,), sequences=(0,))
    reset_peak()
    with open_page() as page, start_server(recording) as running:
        begin = time.perf_counter()
        page.goto(f"{running.url}#l=0&h=0")
        page.wait_for_selector(EXACT)
        overview = time.perf_counter() - begin
        whole = page.text_content("[data-at=badge]")
        asked = [reach_cell(page, running.url, record, *cell) for cell in CELLS]
    return {
        "tokens": LONG,
        "overview_s": round(overview, 1),
        "cell_ms": [round(1000 * seconds) for seconds, _ in asked],
        "worst": max(off for _, off in asked),
        "badge": whole,
        "MB": round(read_peak()),
    }


def reach_cell(
    page: Page, url: str, record: Record, i: int, j: int
) -> tuple[float, float]:
    """Go to a cell; return the seconds until it is exact, and how far it is off."""
    begin = time.perf_counter()
    page.goto(f"{url}#l=0&h=0&i={i + 0.5}&j={j + 0.5}&z=64")
    page.evaluate("() => new Promise((done) => setTimeout(done, 20))")
    page.wait_for_selector(EXACT)
    took = time.perf_counter() - begin
    page.wait_for_timeout(400)  # the address says where the cell is now
    at = dict(re.findall(r"([ijz])=([\d.]+)", page.url.split("#")[1]))
    box = page.locator("[data-at=plane]").bounding_box()
    assert box
    right = (j + 0.5 - float(at["j"])) * float(at["z"])
    down = (i + 0.5 - float(at["i"])) * float(at["z"])
    x = box["x"] + 88 + (box["width"] - 88) / 2 + right
    y = box["y"] + 80 + (box["height"] - 80) / 2 + down
    page.mouse.move(x, y)
    page.wait_for_timeout(100)
    sentence = page.text_content("[data-at=sentence]") or ""
    assert sentence.startswith(f"query {i:,} → key {j:,}: "), sentence
    q, k, lse = (x.double() for x in (record.q[0, i], record.k[0, j], record.lse[0, i]))
    weight = math.exp(float(q @ k * record.scale - lse))
    shown = float(sentence.rpartition(": ")[2])
    return took, abs(shown / weight - 1)


def render(result: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    model, long = result["model"], result["long"]
    lines = ["| what | measured | goal |", "|---|---|---|"]
    name = f"gallery of {model['heads']} heads at {N:,} tokens / bare walk"
    worst = {key: max(model[f"{key}_ms"]) for key in ("overview", "exact")}
    rows = (
        (name, f"{model['gallery']:.2f}", f"{GOALS['gallery']}"),
        ("a head's overview, worst of five, ms", worst["overview"], GOALS["overview"]),
        ("the same, every tile exact, ms", worst["exact"], GOALS["exact"]),
        (f"script in a frame, worst in {STEPS} steps, ms", model["script_ms"], 50),
        (f"{LONG:,} tokens: whole process, MB", long["MB"], GOALS["memory"]),
        (f"{LONG:,} tokens: overview complete, s", long["overview_s"], ""),
        (f"{LONG:,} tokens: any cell, worst of five, ms", max(long["cell_ms"]), ""),
    )
    lines += [f"| {what} | {found} | {goal} |" for what, found, goal in rows]
    about = result["about"]
    load = " and ".join(f"{x:.1f}" for x in about["load"])
    lines += ["", f"{about['cores']} cores, load {load} before and after."]
    return "\n".join(lines)


def main() -> None:
    """Measure and write the results."""
    before = os.getloadavg()[0]
    with open_page() as page, torch.inference_mode():
        model = measure_model(page)
        chromium = page.context.browser.version if page.context.browser else ""
    command = [sys.executable, __file__, "long"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    long = json.loads(done.stdout.splitlines()[-1])
    about: dict[str, Any] = {name: version(name) for name in ("regard", "torch")}
    about |= {"python": platform.python_version(), "chromium": chromium}
    about |= {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    about["load"] = [round(x, 2) for x in (before, os.getloadavg()[0])]
    result = {"about": about, "model": model, "long": long}
    (HERE / "map.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    print(render(result))
    fill("docs/show.md", MARK, render(result))


if __name__ == "__main__":
    if sys.argv[1:] == ["long"]:
        with torch.inference_mode():
            print(json.dumps(measure_long()))
    else:
        main()
