"""How large a page is, how exact its weights are, and how fast it opens.

    python benchmarks/page.py             writes page.json and docs/show.md

SmolLM2-135M on 512 tokens of these documents, all 270 heads, as one HTML file opened in
headless Chromium: within 15 MB, and as exact as it can be; and three heads at 8,192
tokens. A page is open when every thumbnail is painted; a head when all its tiles are
exact. The best of three.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from map import EXACT, open_page, watch_smollm
from marks import fill
from playwright.sync_api import Page

from regard.seen import Seen
from regard.show.page import LIMIT, make_page

HERE = Path(__file__).parent
MARK = "<!-- benchmark:page -->"
N, LONG, ROUNDS = 512, 8192, 3
SOME = {17: [5], 18: [7, 8]}
EMPTY = "() => !!document.querySelector('a.card .small:empty')"


def measure(browser: Page, seen: Seen, **options: Any) -> dict[str, Any]:
    """Make a page, write it and open it."""
    begin = time.perf_counter()
    page = make_page(seen.recording, **options)
    made = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "map.html"
        page.write(path)
        times = [open_file(browser, path.as_uri()) for _ in range(ROUNDS)]
    return {
        "heads": page.heads,
        "MB": round(page.size / 1e6, 1),
        "typical": page.typical,
        "worst": page.worst,
        "made_s": round(made, 1),
        "open_s": round(min(x for x, _ in times), 2),
        "head_s": round(min(x for _, x in times), 2),
    }


def open_file(browser: Page, url: str) -> tuple[float, float]:
    """Return the seconds until the gallery is painted, and until a head is exact."""
    browser.goto("about:blank")
    begin = time.perf_counter()
    browser.goto(f"{url}#v=heads")
    browser.wait_for_selector("a.card canvas")
    while browser.evaluate(EMPTY):
        browser.wait_for_timeout(10)
    middle = time.perf_counter()
    browser.locator('a.card[aria-label*="layer 17 head 5 "]').click()
    browser.wait_for_selector(EXACT)
    return middle - begin, time.perf_counter() - middle


def render(result: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    lines = [
        "| page | MB | half of the weights within | worst | opens, s | a head, s |",
        "|---|---|---|---|---|---|",
    ]
    for name, x in result["pages"].items():
        off = f"{x['typical']:.2%} | {x['worst']:.2%}"
        lines.append(f"| {name} | {x['MB']} | {off} | {x['open_s']} | {x['head_s']} |")
    lines += ["", f"Load {result['load']:.1f} on {result['cores']} cores."]
    return "\n".join(lines)


def main() -> None:
    """Measure and write the results."""
    load = os.getloadavg()[0]
    short, long = f"270 heads, {N} tokens", f"3 heads, {LONG:,} tokens"
    with open_page() as browser, torch.inference_mode():
        seen = watch_smollm(N)
        pages = {
            f"{short}, 15 MB": measure(browser, seen, limit=LIMIT),
            f"{short}, no limit": measure(browser, seen, limit=10**9),
            long: measure(browser, watch_smollm(LONG), heads=SOME),
        }
    result = {"load": round(load, 2), "cores": os.cpu_count(), "pages": pages}
    (HERE / "page.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    print(render(result))
    fill("docs/show.md", MARK, render(result))


if __name__ == "__main__":
    main()
