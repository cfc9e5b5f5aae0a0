"""Build the gallery: the page of every entry, its picture, and an index of all.

    python gallery/build.py                 everything, about ten minutes
    python gallery/build.py atoms names     these pages; the others keep their results
    python gallery/build.py --index         the index alone, from results.json

results.json and thumbnails/ are committed, pages/ and index.html are built. The model
of atoms.py comes with `pip install --no-deps rxnmapper`, the others as in the README.

Next: ../docs/show.md
"""

from __future__ import annotations

import html
import io
import json
import sys
from pathlib import Path
from shutil import which
from typing import Any

from entry import HERE, PAGES, Entry, write_entry

ORDER = (
    "induction",
    "first_token",
    "names",
    "separators",
    "atlas_of_prose",
    "prose_and_code",
    "reversed_digits",
    "coloured_square",
    "tones_in_time",
    "atoms",
)
MARK, DOCUMENT = "<!-- gallery -->", HERE.parent / "docs" / "gallery.md"
RESULTS, THUMBNAILS = HERE / "results.json", HERE / "thumbnails"
VIEW, WIDTH = {"width": 1100, "height": 700}, 480  # of the browser, of a picture
STYLE = """
:root { color-scheme: light dark; --line: #8885; --quiet: #666; }
@media (prefers-color-scheme: dark) { :root { --quiet: #aaa; } }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 72rem;
  padding: 1rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; }
h2 { font-size: 1.1rem; margin: .6rem 0 0; }
ol { display: grid; gap: 1.2rem; list-style: none; padding: 0;
  grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); }
li { border: 1px solid var(--line); border-radius: 8px; overflow: hidden; }
li div { padding: 0 1rem 1rem; } p { margin: .4rem 0; }
img { display: block; width: 100%; height: auto; border-bottom: 1px solid var(--line); }
.model { color: var(--quiet); font-size: .9rem; }
code { display: block; font-size: .85rem; overflow-x: auto; white-space: nowrap;
  padding: .4rem .6rem; border: 1px solid var(--line); border-radius: 4px; }
"""
HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src 'self' file:; style-src 'unsafe-inline'">
<title>Gallery of regard</title>
<style>{style}</style>
</head>
<body>
<h1>What attention looks like</h1>
<p>{count} pages, each made by one short script. The numbers are computed by the script;
attention weight alone does not show causation.</p>
<ol>
"""
CARD = """<li>
<a href="pages/{name}.html#{address}" aria-label="{title}: open the page">
<img src="thumbnails/{name}.webp" alt="The page of {name}" width="480" height="305"></a>
<div><h2><a href="pages/{name}.html#{address}">{title}</a></h2>
<p class="model">{model}</p><p>{finding}</p><code>python gallery/{name}.py</code></div>
</li>
"""


def describe(entry: Entry) -> dict[str, Any]:
    """Return what is kept of an entry."""
    return {
        "title": entry.title,
        "model": entry.model,
        "finding": entry.finding,
        "numbers": entry.numbers,
        "address": entry.address,
    }


def take_picture(name: str, address: str) -> None:
    """Open a page in a browser, and keep a small picture of it."""
    from PIL import Image  # noqa: PLC0415 (comes with matplotlib)
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=which("chromium"))
        page = browser.new_page(viewport=VIEW, reduced_motion="reduce")
        page.goto(f"{(PAGES / f'{name}.html').as_uri()}#{address}")
        page.wait_for_selector("canvas, table, svg", state="attached")
        page.wait_for_timeout(4_000)  # until the visible cells are drawn
        shot = page.screenshot()
        browser.close()
    picture = Image.open(io.BytesIO(shot)).convert("RGB")
    size = (WIDTH, WIDTH * VIEW["height"] // VIEW["width"])
    THUMBNAILS.mkdir(exist_ok=True)
    small = picture.resize(size, Image.Resampling.LANCZOS)
    small.save(THUMBNAILS / f"{name}.webp", quality=70, method=6)


def draw_index(results: dict[str, dict[str, Any]]) -> str:
    """Return the page that lists all entries."""
    parts = [HEAD.format(style=STYLE, count=len(results))]
    for name, found in results.items():
        texts = ("title", "model", "finding", "address")
        told = {key: html.escape(str(found[key])) for key in texts}
        parts.append(CARD.format(name=name, **told))
    return "".join([*parts, "</ol>\n</body>\n</html>\n"])


def draw_table(results: dict[str, dict[str, Any]]) -> str:
    """Return the same list as a table, for the documents."""
    lines = ["| page | model | what it shows | script |", "|---|---|---|---|"]
    for name, found in results.items():
        told = (found["title"], found["model"], found["finding"])
        lines.append(f"| {' | '.join(told)} | `gallery/{name}.py` |")
    return "\n".join(lines)


def write_table(path: Path) -> None:
    """Put the table between the marks of a document."""
    before, _, after = path.read_text("utf-8").split(MARK)
    text = draw_table(read_results())
    path.write_text(f"{before}{MARK}\n{text}\n{MARK}{after}", "utf-8")


def read_results() -> dict[str, dict[str, Any]]:
    """Return what is known of the entries, in their order."""
    known = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    return {name: known[name] for name in ORDER if name in known}


def main(names: list[str]) -> None:
    """Build the pages that are named, or all, and the index."""
    if unknown := set(names) - {*ORDER, "--index"}:
        sys.exit(f"no entry {min(unknown)}, expected one of {', '.join(ORDER)}")
    for name in (x for x in names or ORDER if x != "--index"):
        entry = write_entry(name)
        take_picture(name, entry.address)
        results = read_results() | {name: describe(entry)}
        text = json.dumps({x: results[x] for x in ORDER if x in results}, indent=1)
        RESULTS.write_text(text + "\n", "utf-8")
    index = HERE / "index.html"
    index.write_text(draw_index(read_results()), "utf-8")
    write_table(DOCUMENT)
    print(f"open {index.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main(sys.argv[1:])
