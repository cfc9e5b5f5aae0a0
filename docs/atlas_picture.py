"""The picture of two atlases, docs/pictures/atlas.png, from the folders of both.

    python docs/atlas_picture.py prose code docs/pictures

The folders are those of `regard atlas run`; benchmarks/atlas.py writes both corpora.

Next: pictures.py
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from regard.atlas.page import write_page
from regard.atlas.table import read_table

SIZE = {"width": 1440, "height": 900}
SHOWN = {"atlas": ("s=sink&v=a&l=18&h=8", "light")}
SHOWN["atlas-difference"] = ("s=induction&v=diff&l=17&h=5", "light")
SHOWN["atlas-dark"] = ("s=induction&v=diff&l=17&h=5", "dark")


def main() -> None:
    """Write the page of both, and shoot it."""
    *folders, out = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as name, sync_playwright() as play:
        page = Path(name) / "atlas.html"
        tables = [read_table(folder) for folder in folders]
        write_page(page, tables, names=[folder.name for folder in folders])
        flags = ["--no-sandbox", "--disable-gpu", "--disable-quic"]
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium"), args=flags
        )
        for picture, (address, scheme) in SHOWN.items():
            view = browser.new_page(viewport=SIZE, color_scheme=scheme)
            view.goto(f"{page.as_uri()}#{address}")
            view.wait_for_selector("table, svg, canvas, [role=grid]")
            view.screenshot(path=out / f"{picture}.png")


if __name__ == "__main__":
    main()
