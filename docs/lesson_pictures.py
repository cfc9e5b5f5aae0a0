# ruff: noqa: T201 (it is no part of a package)
"""Photograph the course in a real browser, on a laptop and on a phone.

python docs/lesson_pictures.py PYODIDE-FOLDER docs/pictures
"""

import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import which

from playwright.sync_api import Browser, sync_playwright

from regard.learn.build_site import build_site

SOFTMAX = """import numpy as np


def softmax(scores):
    e = np.exp(scores)
    return e / e.sum(axis=-1)
"""
CAUSAL = """import numpy as np

def causal_weights(s):
    seen = np.tri(len(s)) > 0
    s = np.where(seen, s, 1e9)
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
"""


@dataclass(frozen=True)
class Shot:
    """One picture: which exercise, the code in the editor, the size of the window."""

    name: str
    exercise: str
    code: str
    size: tuple[int, int]


SHOTS = (
    Shot("lesson", "softmax", SOFTMAX, (1200, 760)),
    Shot("lesson-phone", "causal_mask", CAUSAL, (390, 760)),
)


def main(pyodide: str, folder: str) -> None:
    """Build the site, serve it on this computer, and write the pictures."""
    with tempfile.TemporaryDirectory() as site, sync_playwright() as tool:
        print(build_site(site, pyodide=pyodide))
        handler = partial(SimpleHTTPRequestHandler, directory=site)
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = tool.chromium.launch(executable_path=which("chromium"))
        for shot in SHOTS:
            url = f"http://127.0.0.1:{server.server_port}/#{shot.exercise}"
            take(browser, shot, url, Path(folder) / f"{shot.name}.png")
        browser.close()
        server.shutdown()


def take(browser: Browser, shot: Shot, url: str, path: Path) -> None:
    """Check an answer as a student does, and write the picture."""
    page = browser.new_page(
        viewport={"width": shot.size[0], "height": shot.size[1]},
        is_mobile=shot.size[0] < 500,  # a phone
        has_touch=shot.size[0] < 500,
        color_scheme="light",
    )
    page.goto(url)
    page.locator("[data-at=code]").fill(shot.code)
    page.locator("[data-at=check]").click()
    page.wait_for_selector("[data-at=check]:enabled", timeout=120_000)
    page.wait_for_timeout(300)
    page.screenshot(path=path)
    page.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
