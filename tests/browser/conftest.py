"""One real browser for all tests of the page, and the hosts that the page has.

Without Chromium the tests are skipped; with REGARD_BROWSER=required they fail.
"""

import os
import shutil
from contextlib import ExitStack, contextmanager

import pytest
from playwright.sync_api import sync_playwright
from recordings import RECORDINGS
from window import Window

from regard.show.page import make_page
from regard.show.script_bundle import join_modules
from regard.show.server import start_server

# the same browser, first without windows, menus and tabs, which take a third of its time
PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser")
FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--font-render-hinting=none",  # letters as wide as their font says
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


@contextmanager
def serve(seen, folder):
    with start_server(seen.recording) as running:
        yield running.url


@contextmanager
def write(seen, folder):
    path = folder / "map.html"
    make_page(seen.recording).write(path)
    yield path.as_uri()


# each a context of (what is seen, a folder) that gives a URL
HOSTS = {
    "server": serve,
    "page": write,
}


@pytest.fixture(scope="session")
def browser():
    path = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if path is None:
        words = "the map is tested in Chromium: apt-get install chromium"
        if os.environ.get("REGARD_BROWSER") == "required":
            pytest.fail(words)
        pytest.skip(words)
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def module(browser):
    """Return a page without a policy, into which offline_source.js is put."""
    page = browser.new_page()
    script = join_modules("offline_source.js").replace(
        "export class", "globalThis.HeldSource = class"
    )
    page.add_script_tag(content=script, type="module")
    page.wait_for_function("() => globalThis.HeldSource")
    yield page
    page.close()


@pytest.fixture(params=HOSTS)
def host(request):
    return request.param


@pytest.fixture(scope="session")
def find_url(tmp_path_factory):
    """Return where a host shows a recording; it goes on to the end of the session."""
    found = {}
    with ExitStack() as stack:

        def find(host, name):
            if (host, name) not in found:
                seen, _ = RECORDINGS[name]()
                folder = tmp_path_factory.mktemp(f"{host}-{name}")
                url = stack.enter_context(HOSTS[host](seen, folder))
                found[host, name] = url
            return found[host, name]

        yield find


@pytest.fixture(scope="session")
def idle():
    """Windows that nobody looks into: a new one costs more than most tests."""
    return []


@pytest.fixture
def open_url(browser, idle):
    """Return a function that opens a page; in the end nothing may have gone wrong."""
    windows = []

    def open_it(url, address, *, width, height, scheme):
        window = idle.pop() if idle else Window(browser.new_context().new_page())
        windows.append(window)
        window.url, window.troubles = url, []
        window.page.set_viewport_size({"width": width, "height": height})
        window.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        window.go(address)
        return window

    yield open_it
    for window in windows:
        window.page.mouse.move(0, 0)
        window.page.goto("about:blank")  # what was done to the page goes with it
    idle.extend(windows)
    assert [x.troubles for x in windows] == [[] for _ in windows]


@pytest.fixture
def open_window(open_url, host, find_url):
    """Return a function that opens a recording."""

    def open_it(name, address="v=heads", *, width=1280, height=660, scheme="light"):
        url = find_url(host, name)
        return open_url(url, address, width=width, height=height, scheme=scheme)

    return open_it
