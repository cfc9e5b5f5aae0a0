"""How the page stands: in any width and theme, for everyone, and only for itself."""

import importlib.util
from pathlib import Path

import pytest
from recordings import ALERT, HOSTILE

(folder,) = importlib.util.find_spec("axe_playwright_python").submodule_search_locations
AXE = (Path(folder) / "axe.min.js").read_text("utf-8")
WIDTHS = [1280, 850, 400]
ONE_HOST = pytest.mark.parametrize("host", ["server"])  # looks do not depend on it


def find_violations(window):
    """Return what axe-core calls serious or critical."""
    window.page.evaluate(AXE)
    found = window.page.evaluate("() => axe.run()")
    assert len(found["passes"]) > 10
    return [
        f"{x['id']}: {node['html']} {node['failureSummary']}"
        for x in found["violations"]
        if x["impact"] in ("serious", "critical")
        for node in x["nodes"]
    ]


@ONE_HOST
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(open_window, scheme):
    window = open_window("causal", scheme=scheme)
    window.await_gallery(6)
    window.await_text("status", "arrows walk")  # the badges are there
    assert find_violations(window) == []
    window.go("sort=sink")
    assert find_violations(window) == []
    window.go("l=0&h=1&i=120&j=100&z=20&pin=121&col=101")
    window.await_text("row", "looks at most")
    window.await_text("column", "look at it most")
    window.hover_middle()
    assert find_violations(window) == []
    window.press("?")
    assert find_violations(window) == []


@ONE_HOST
def test_axe_sees_what_is_wrong(open_window):
    window = open_window("five")
    window.page.evaluate(
        "() => document.querySelector('[data-at=low]').parentElement.append('x')"
    )
    spoil = "() => { const it = document.createElement('img'); it.alt = null; document.body.append(it); it.removeAttribute('alt'); }"
    window.page.evaluate(spoil)
    assert any(x.startswith("image-alt") for x in find_violations(window))


@ONE_HOST
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["causal", "across", "hostile"])
def test_no_width_is_too_narrow(open_window, name, width):
    window = open_window(name, width=width, height=600)
    window.page.wait_for_selector("a.card canvas")
    assert window.overflow() == 0
    window.go("l=0&h=0&pin=4&col=3&cmp=side")
    window.await_text("row", "looks at most")
    assert window.overflow() == 0
    if window.at("more").is_visible():
        window.at("more").click()
        assert window.at("controls").is_visible()
        window.rest()
    assert window.overflow() == 0
    for part in ("how", "theme", "fit", "badge", "plane"):
        window.at(part).scroll_into_view_if_needed()
        box = window.at(part).bounding_box()
        assert box["x"] >= 0, part
        assert box["x"] + box["width"] <= width, part
        assert box["height"] > 10, part


@ONE_HOST
def test_a_window_that_changes_its_size_keeps_the_whole_map(open_window):
    window = open_window("causal", "l=0&h=0")
    window.page.set_viewport_size({"width": 900, "height": 500})
    window.rest()
    window.await_whole(257)


@ONE_HOST
@pytest.mark.parametrize("width", [1280, 850, 660, 400])
def test_nothing_that_is_said_moves_the_map(open_window, width):
    window = open_window("hostile", width=width, height=600)
    window.look(l=0, h=1, i=3, j=5, z=30)
    before = window.at("plane").bounding_box()
    for i, j in ((0, 0), (2, 2), (2, 5)):
        window.hover(i, j)
        assert window.at("plane").bounding_box() == before
    for words in ("1", "123 tiles to come", "exact, 1024 × 1024 cells per pixel"):
        say = "([name, words]) => { document.querySelector(name).textContent = words; }"
        window.page.evaluate(say, ["[data-at=badge]", words])
        assert window.at("plane").bounding_box() == before, words


@ONE_HOST
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_is_that_of_the_system_until_one_is_chosen(open_window, scheme):
    window = open_window("five", scheme=scheme)
    assert window.page.get_attribute("body", "data-theme") == scheme
    other = {"light": "dark", "dark": "light"}[scheme]
    window.page.emulate_media(color_scheme=other)
    window.wait(lambda: window.page.get_attribute("body", "data-theme"), other)
    window.at("theme").click()
    window.wait(lambda: window.page.get_attribute("body", "data-theme"), scheme)
    window.page.emulate_media(color_scheme=scheme)
    window.page.emulate_media(color_scheme=other)
    window.rest()
    assert window.page.get_attribute("body", "data-theme") == scheme


def test_hostile_tokens_are_text_everywhere(open_window):
    n = len(HOSTILE)
    window = open_window("hostile")
    window.await_gallery(2)
    count = "() => document.querySelectorAll('script, img, svg, iframe').length"
    before = window.page.evaluate(count)
    assert window.page.locator("img, svg, iframe").count() == 0
    for i in range(n):
        window.go(f"l=0&h=1&pin={i}&col={i}&i={i}.5&j={i}.5&z=64")
        window.await_text("row", f"^pinned query {i}( |entropy)")
        window.await_text("column", f"^pinned key {i}( |it gets)")
        window.hover_middle()
        assert window.overflow() == 0
        assert len(window.text("sentence")) < 200
    window.press("/")
    window.page.keyboard.type("<img src=x")
    window.await_text("hits", "^1 found$")
    window.press("Enter")
    window.await_text("row", "“<img·src=x·onerror=")
    assert window.page.evaluate(count) == before
    assert window.page.evaluate("() => window.hacked") is None
    assert ALERT == "window.hacked=1"


def test_what_cannot_be_seen_is_shown_as_its_number(open_window):
    window = open_window("hostile", "l=0&h=0")
    shown = {}
    for i, text in enumerate(HOSTILE):
        window.go(f"l=0&h=0&pin={i}")
        window.await_text("row", f"^pinned query {i}( |entropy)")
        shown[text] = window.page.text_content("[data-at=row] h2")
    assert "“\\u{202e}right·to·left" in shown["\u202eright to left\u2066"]
    assert "“\\u{200b}\\u{200d}\\u{feff}”" in shown["\u200b\u200d\ufeff"]
    assert "“\\u{d83d}”" in shown["\ud83d"]
    assert "“\\u{de00}”" in shown["\ude00"]
    assert "“\\u{dcff}\\u{dc80}”" in shown["\udcff\udc80"]
    assert "“\ufffd\ufffd”" in shown["\ufffd\ufffd"]
    assert "“⏎⇥·”" in shown["\n\t "]
    assert shown["W" * 10_000].endswith("W…”")
    assert len(shown["W" * 10_000]) < 50
    bad = {"\u202e", "\u2066", "\u200b", "\u200d", "\ufeff", "\x00", "\x1b", "\u2028"}
    assert not bad & set("".join(shown.values()))


def test_the_harness_sees_what_leaves_the_page(open_window):
    window = open_window("five")
    window.page.evaluate("() => fetch('http://127.0.0.1:9/').catch(() => 0)")
    window.page.evaluate("() => { new Image().src = 'https://example.com/x.png'; }")
    window.page.evaluate("() => { setTimeout(() => alert(1)); }")
    window.page.evaluate("() => { setTimeout(() => { throw new Error('no'); }); }")
    for sign in ("127.0.0.1:9", "example.com", "dialog: 1", "error: no"):
        window.wait(lambda x=sign: x in "\n".join(window.troubles), expected=True)
    window.troubles.clear()
