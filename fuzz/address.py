"""Hunt: what stands after the # of a map's address, in a real browser.

    text ─▶ location.hash ─▶ the page shows a text, the gallery or a map, and no error
                          ─▶ writes its own address, which leads to itself

The page reads the address in JavaScript (page.js), so nothing steers this hunt.

Next: hunt.py
"""

from __future__ import annotations

import shutil
import sys
from contextlib import ExitStack
from functools import cache
from typing import Any

from damage import damage_words
from hunt import Target, main
from playwright.sync_api import sync_playwright
from question import make_source

from regard.show.server import start_server

KEYS: tuple[str, ...] = ()
KEYS += ("q", "l", "h", "i", "j", "z", "s", "lo", "t", "pin", "col", "vs", "cmp")
KEYS += ("sort", "only", "v", "sel", "hs", "w", "mix", "sc", "tl")
WORDS: tuple[str, ...] = tuple(f"&{key}=" for key in KEYS)
WORDS += ("0", "1", "-1", "299", "1e9", "1e-9", "1e999", "-Infinity", "NaN", "0x10", "")
WORDS += ("max", "mass", "dark", "diff", "side", "0.1", "0.", "induction", "sink", "%")
WORDS += ("text", "heads", "3-7", "7-3", "1.1,0", "attending", "linear")
WORDS += ("%00", "%F0%9F", "#", "?", "__proto__", "constructor", "<b>", "javascript:")
# the page writes its address a moment later: here at once
EARLY = """const later = window.setTimeout;
window.setTimeout = (act, ms, ...more) => later(act, ms === 250 ? 0 : ms, ...more);
window.troubles = [];
addEventListener("error", (event) => troubles.push(`${event.message}`));
addEventListener("unhandledrejection", (event) => troubles.push(`${event.reason}`));"""
GO = """async (text) => {
  const before = location.hash;
  const once = { once: true };
  const changed = new Promise((done) => addEventListener("hashchange", done, once));
  location.hash = `#${text}`;
  if (location.hash !== before) await changed;
  const frame = (done) => setTimeout(() => requestAnimationFrame(done), 5);
  const rest = () => new Promise(frame);
  await rest();
  await rest();
  const { view } = document.body.dataset;
  return { view, address: location.hash.slice(1), troubles: troubles.splice(0) };
}"""
STACK = ExitStack()
VIEWS = ("text", "gallery", "map")


@cache
def open_page() -> Any:
    """Return a page that shows a small recording; before any limit of memory is set."""
    url = STACK.enter_context(start_server(make_source().recording)).url
    tool = STACK.enter_context(sync_playwright())
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    browser = tool.chromium.launch(executable_path=path, args=["--disable-gpu"])
    STACK.callback(browser.close)
    page = browser.new_page()
    page.add_init_script(EARLY)
    page.goto(url)
    page.wait_for_selector(", ".join(f"[data-view={x}]" for x in VIEWS))
    return page


def check(data: bytes) -> None:
    """Go to an address; then to the one that the page makes of it."""
    first = go(data.decode("utf-8", "replace"))
    again = go(first["address"])
    assert again["view"] == first["view"], (first, again)
    if first["view"] == "map":
        assert again["address"] == first["address"], (first, again)


def go(text: str) -> dict[str, Any]:
    """Return what the page shows after its address was changed."""
    found: dict[str, Any] = open_page().evaluate(GO, text)
    assert found["troubles"] == [], found
    assert found["view"] in VIEWS, found
    return found


TARGET = Target(
    "address",
    check,
    damage_words(WORDS, "utf-8", "replace"),
    longest=2**11,
    steered=False,
)
if __name__ == "__main__":
    if not shutil.which("chromium") and not shutil.which("chromium-browser"):
        sys.exit("address: no Chromium here: apt-get install chromium")
    with STACK:
        open_page()
        main(TARGET)
