"""Real notebooks in a real browser: JupyterLab and marimo, in light and in dark.

They are no dependencies of the project, so without them these tests are skipped:

    python -m venv --system-site-packages notebooks
    notebooks/bin/pip install jupyterlab marimo
    REGARD_PICTURES=pictures notebooks/bin/python -m pytest tests/browser/test_notebooks.py

With REGARD_PICTURES, screenshots are kept in that folder, to be looked at.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from notebook_cells import CELLS, write_all

SECONDS = 240  # a kernel imports torch


RUN = """async () => {
  const { sessionContext } = jupyterapp.shell.currentWidget;
  await sessionContext.ready;
  await sessionContext.session.kernel.info;
  void jupyterapp.commands.execute("notebook:run-all-cells"); // which is a long promise
}"""


def find_port():
    with socket.socket() as wire:
        wire.bind(("127.0.0.1", 0))
        return wire.getsockname()[1]


@contextmanager
def run_server(command, url, folder, **environment):
    """Run a server until the block ends; wait until it answers."""
    log = (folder / "server.log").open("w")
    given = os.environ | {"PYTHONWARNINGS": "ignore"} | environment
    server = subprocess.Popen(
        command, cwd=folder, env=given, stdout=log, stderr=subprocess.STDOUT
    )
    try:
        end = time.monotonic() + SECONDS
        while True:
            try:
                urllib.request.urlopen(url, timeout=5)
                break
            except OSError:
                assert server.poll() is None, (folder / "server.log").read_text("utf-8")
                assert time.monotonic() < end
                time.sleep(0.2)
        yield
    finally:
        server.terminate()
        server.wait(20)
        log.close()


@contextmanager
def open_jupyter(page, folder, theme):
    """Run all cells in JupyterLab; give where their outputs are."""
    port = find_port()
    name = f"JupyterLab {theme.title()}"
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    text = json.dumps({"theme": name, "adaptive-theme": False})
    (settings / "themes.jupyterlab-settings").write_text(text, "utf-8")
    notices = json.dumps({"fetchNews": "false", "checkForUpdates": False})
    (settings / "notification.jupyterlab-settings").write_text(notices, "utf-8")
    shown = folder / "settings" / "@jupyterlab" / "notebook-extension"
    shown.mkdir()
    text = json.dumps({"windowingMode": "none"})  # draw all cells at once
    (shown / "tracker.jupyterlab-settings").write_text(text, "utf-8")
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", f"--port={port}"]
    command += ["--ServerApp.token=", "--expose-app-in-browser", "--allow-root"]
    command += [f"--LabApp.user_settings_dir={folder / 'settings'}"]
    address = f"http://127.0.0.1:{port}"
    with run_server(command, f"{address}/api", folder):
        page.goto(f"{address}/lab/tree/cells.ipynb?reset")
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=SECONDS * 1000)
        page.evaluate(RUN)
        cells = page.locator(".jp-Notebook .jp-CodeCell")
        last = cells.nth(len(CELLS)).locator(".jp-OutputArea-output")
        last.first.wait_for(timeout=SECONDS * 1000)
        yield [cells.nth(i + 1).locator(".jp-OutputArea") for i in range(len(CELLS))]
        page.goto("about:blank")


@contextmanager
def open_marimo(page, folder, theme):
    """Run all cells in marimo; give where their outputs are."""
    port = find_port()
    command = [sys.executable, "-m", "marimo", "-q", "run", f"cells_{theme}.py"]
    command += ["--headless", "--no-token", f"--port={port}", "--host=127.0.0.1"]
    address = f"http://127.0.0.1:{port}"
    with run_server(command, f"{address}/health", folder):
        page.goto(address)
        outputs = page.locator(".output-area")
        outputs.nth(len(CELLS) - 1).wait_for(timeout=SECONDS * 1000)
        page.wait_for_timeout(500)
        yield [outputs.nth(i) for i in range(len(CELLS))]
        page.goto("about:blank")


HOSTS = {"jupyterlab": open_jupyter, "marimo": open_marimo}


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("host", HOSTS)
def test_every_object_shows_itself(host, theme, browser, tmp_path):
    if importlib.util.find_spec(host) is None:
        pytest.skip(f"NOT TESTED: {host} is not installed; see the top of this file")
    write_all(tmp_path)
    page = browser.new_page(viewport={"width": 1100, "height": 900}, color_scheme=theme)
    asked, said = [], []
    page.on("request", lambda x: asked.append(x.url))
    page.on("dialog", lambda x: answer(x, said))
    with HOSTS[host](page, tmp_path, theme) as outputs:
        for (name, (code, words)), output in zip(CELLS.items(), outputs, strict=True):
            output.scroll_into_view_if_needed()
            if ".widget(" in code:
                exact = output.locator("[data-at=reading][data-state=exact]")
                exact.wait_for(timeout=SECONDS * 1000)
            text = output.inner_text()
            assert words in text, (name, text)
            assert "Traceback" not in text and "<Figure" not in text, (name, text)
            if name in ("weights", "gallery", "statistics"):
                picture = output.locator("img, svg").first
                box = picture.bounding_box()
                assert box["width"] > 200 and box["height"] > 100, name
                room = output.bounding_box()
                assert box["x"] + box["width"] <= room["x"] + room["width"] + 1, name
            keep(page, output, f"{host}-{theme}-{name}")
        shown = outputs[list(CELLS).index("steps")].inner_text()
        assert "<scrip" in shown and "\\u202e" in shown  # escaped, and cut
        assert page.evaluate("() => window.hacked") is None
        assert readable(outputs[0]) and readable(outputs[1].locator("td").last)
    assert said == []
    here = ("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:", "about:")
    assert [url for url in asked if not url.startswith(here)] == []
    page.close()


def answer(dialog, said):
    """Leave a notebook that is not saved; note any other dialog."""
    if dialog.type == "beforeunload":
        dialog.accept()
    else:
        said.append(dialog.message)
        dialog.dismiss()


def keep(page, output, name):
    """Keep a screenshot, if a folder is named."""
    folder = os.environ.get("REGARD_PICTURES")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        output.screenshot(path=Path(folder) / f"{name}.png")


def readable(output):
    """Return whether text differs clearly in brightness from what is behind it."""
    colours = output.evaluate(
        """(element) => {
          const brush = document.createElement("canvas").getContext("2d");
          const parse = (text) => { // any notation of a colour
            brush.clearRect(0, 0, 1, 1);
            brush.fillStyle = text;
            brush.fillRect(0, 0, 1, 1);
            return [...brush.getImageData(0, 0, 1, 1).data];
          };
          const ink = parse(getComputedStyle(element).color);
          let behind = element;
          while (behind) {
            const [r, g, b, a] = parse(getComputedStyle(behind).backgroundColor);
            if (a === 255) return [ink.slice(0, 3), [r, g, b]];
            behind = behind.parentElement;
          }
          return [ink.slice(0, 3), [255, 255, 255]];
        }"""
    )
    bright = [sum(x) / 3 for x in colours]
    return abs(bright[0] - bright[1]) > 90
