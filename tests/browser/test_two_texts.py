"""Two runs in one page: every change against dense weights, selection and looks."""

import re
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from conftest import HOSTS
from recordings import HOSTILE, make_recording
from test_looks import find_violations
from test_text import HOVER

from regard.masks.patterns import causal
from regard.seen import Seen

N = 60
WORDS = tuple(f" w{i}" for i in range(N))
MORE = (*WORDS[:10], " new", " newer", *WORDS[10:40], *WORDS[42:])  # 2 more, 2 less
PARTNER = {i: i for i in range(10)} | {i: i + 2 for i in range(10, 40)} | {i: i for i in range(42, N)}  # fmt: skip


def make(seed, texts=WORDS):
    """Return what is seen, and dense weights (layer, head, query, key)."""
    n = len(texts)
    seen, weights = make_recording((n, n), mask=causal(), seed=seed, texts=texts)
    seen = Seen(replace(seen.recording, tokens=()))
    dense = np.stack([weights[0, layer] for layer in range(2)])
    return seen, np.nan_to_num(dense)


A, DENSE_A = make(0)
B, DENSE_B = make(5)
C, DENSE_C = make(6, MORE)


@pytest.fixture(params=HOSTS)
def show(request, tmp_path, open_url):
    """Return a function that shows two runs on a host."""
    with ExitStack() as stack:

        def open_it(two, address):
            url = stack.enter_context(HOSTS[request.param](two, tmp_path))
            window = open_url(url, address, width=1280, height=800, scheme="light")
            stack.callback(window.page.goto, "about:blank")  # before the server stops
            return window

        yield open_it


def tint(dense, first, last, *, heads=None, attending=False, most=False):
    found = dense.reshape(-1, *dense.shape[2:])
    found = found if heads is None else found[heads]
    part = slice(first, last + 1)
    found = found[..., part].sum(2) if attending else found[:, part].mean(1)
    return found.max(0) if most else found.mean(0)


def read_change(said):
    """Return the change, and both values, from a sentence."""
    number = r"([+-]?[\d.e-]+)"
    return [float(x) for x in re.search(rf": {number} \(A {number}, B {number}\)$", said).groups()]  # fmt: skip


@pytest.mark.parametrize(
    ("address", "first", "last", "options"),
    [
        ("sel=50", 50, 50, {}),
        ("sel=40-50&hs=1.2", 40, 50, {"heads": [5]}),
        ("sel=9&w=attending&mix=max", 9, 9, {"attending": True, "most": True}),
        ("q=1&sel=50", 50, 50, {}),  # the text of B, the same difference
    ],
)
def test_the_same_tokens_have_the_difference_of_both_tints(
    show, address, first, last, options
):
    window = show(A.beside(B), f"{address}&two=diff")
    a, b = (tint(x, first, last, **options) for x in (DENSE_A, DENSE_B))
    said = window.page.evaluate(HOVER, list(range(N)))
    shown = 0
    for at, sentence in enumerate(said):
        if a[at] == 0 and b[at] == 0:
            assert sentence.endswith(": masked")
            continue
        found = read_change(sentence)
        right = [b[at] - a[at], a[at], b[at]]
        np.testing.assert_allclose(found, right, rtol=6e-3, atol=6e-4 * max(a[at], b[at]))  # fmt: skip
        shown += 1
    assert shown > 5
    change = np.abs(b - a)
    best = window.page.locator("[data-at=strongest] tr").first.inner_text().split()
    assert int(best[0]) == change.argmax()
    assert float(best[-1]) == pytest.approx((b - a)[change.argmax()], rel=6e-3)


def test_a_click_is_one_request(open_url):
    """Both runs, of 60 and 60 tokens, are in one answer."""
    with HOSTS["server"](A.beside(C), None) as url:
        window = open_url(url, "v=text&sel=20&two=diff", width=1280, height=800, scheme="light")  # fmt: skip
        asked = []
        window.page.on("request", lambda x: asked.append(x.url))
        window.page.locator("[data-token='30']").click()
        window.await_address(sel="30")
        window.rest()
        found = [x for x in asked if "/api/text" in x]
        assert [re.search(r"&also=([\d.]+)", x)[1] for x in found] == ["1.32.32"]
        window.page.goto("about:blank")  # before the server stops


def test_colours_have_the_sign_of_the_change(show):
    window = show(A.beside(B), "sel=50&two=diff")
    change = tint(DENSE_B, 50, 50) - tint(DENSE_A, 50, 50)
    colours = window.page.evaluate(
        """() => [...document.querySelectorAll("[data-token]")].map((token) =>
          getComputedStyle(token).backgroundColor.match(/[\\d.]+/g).map(Number))"""
    )
    for at, colour in enumerate(colours):
        red, _, blue = colour[:3]
        if abs(change[at]) < 0.0099:
            assert colour == [0, 0, 0, 0], at
        elif abs(change[at]) > 0.011:
            assert (red > blue) == (change[at] > 0), at
    assert window.text("textEnds") == "change −1 … ±0.01 … 1"


def test_other_tokens_are_aligned(show):
    window = show(A.beside(C), "sel=20-30&two=diff")
    a, c = tint(DENSE_A, 20, 30), tint(DENSE_C, 22, 32)
    assert "There, tokens 22–32 are selected." in window.text("pairWords")
    assert "Aligned: 58 tokens in common, of 60 and 60." in window.text("pairWords")
    said = window.page.evaluate(HOVER, list(range(N)))
    for at, sentence in enumerate(said):
        if at not in PARTNER:
            assert sentence.endswith(": only in A"), sentence
        elif at <= 30:
            found = read_change(sentence)
            right = [c[PARTNER[at]] - a[at], a[at], c[PARTNER[at]]]
            np.testing.assert_allclose(found, right, rtol=6e-3, atol=6e-4 * (right[1] + right[2]))  # fmt: skip
    # the tokens that correspond are selected in the other text
    window.press("c")
    assert window.page.locator("[data-token='0'].chosen").count() == 0
    window.await_address(two=None, sel="20-30", q=None)
    window.press("c")
    window.await_address(q=1, sel="22-32")
    window.press("c")
    window.await_address(q=1, sel="22-32", two="side")
    window.press("c")
    window.await_address(q=1, sel="22-32", two="diff")
    (said,) = window.page.evaluate(HOVER, [10])
    assert said.endswith(": only in B")


SIDE = """() => [...document.querySelectorAll("[data-other]")].map((token) => [
  Number(token.dataset.other), token.classList.contains("chosen"), token.style.backgroundColor])"""


def test_both_texts_are_side_by_side(show):
    window = show(A.beside(C), "sel=20-30&two=side")
    right = tint(DENSE_C, 22, 32)
    found = window.page.evaluate(SIDE)
    assert [at for at, _, _ in found] == list(range(N))
    assert [at for at, chosen, _ in found if chosen] == list(range(22, 33))
    for at, _, colour in found:
        assert bool(colour) == (right[at] > 0.0105) or 0.0099 < right[at] < 0.0106, at
    # the colours are those that the other text has by itself
    window.press("c", "c")
    window.await_address(q=None, two=None)
    window.press("c")
    window.await_address(q=1, sel="22-32", two=None)
    alone = window.page.evaluate(
        """() => [...document.querySelectorAll("[data-token]")].map((token) => token.style.backgroundColor)"""
    )
    assert alone == [colour for _, _, colour in found]
    window.go("sel=20&two=side")
    window.page.locator("[data-other='50']").click()
    window.rest()
    window.await_address(sel="50")
    window.page.locator("[data-other='10']").click()
    window.await_text("sentence", "^this token is only in B$")


def test_a_selection_of_one_run_alone_is_said(open_url, tmp_path):
    with HOSTS["page"](A.beside(C), tmp_path) as url:
        window = open_url(url, "sel=20&two=diff", width=1280, height=800, scheme="light")  # fmt: skip
        window.page.goto(f"{url}#v=text&sel=40-41&two=diff")
        window.await_text("sentence", "the selection is only in A")
        assert window.at("reading").get_attribute("data-state") == "failed"


def test_heads_are_listed_by_what_moved(show):
    window = show(A.beside(B), "sel=50&two=diff")
    moved = np.abs(DENSE_A - DENSE_B).sum(-1).mean(-1) / 2  # the same keys
    order = sorted(np.ndindex(2, 3), key=lambda x: -moved[x])
    lines = window.page.locator("[data-at=pairHeads] tr").all_inner_texts()
    for line, place in zip(lines, order, strict=True):
        name, value = line.split("\t")
        assert name == f"L{place[0]} h{place[1]}"
        assert float(value) == pytest.approx(moved[place], abs=6e-4)
    window.page.locator("[data-at=pairHeads] button").first.click()
    window.rest()
    window.await_address(hs=f"{order[0][0]}.{order[0][1]}")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_two_runs_are_read_by_everyone(open_url, tmp_path, scheme, width):
    n = len(HOSTILE)
    runs = [
        make_recording((n, n), layers=1, heads=2, texts=HOSTILE, seed=x)[0]
        for x in (1, 2)
    ]
    one, other = (Seen(replace(x.recording, tokens=())) for x in runs)
    two = one.beside(other, names=(HOSTILE[0], "<img src=x onerror=alert(1)>"))
    with HOSTS["page"](two, tmp_path) as url:
        for address in ("sel=3&two=side", "sel=3&two=diff", "q=1&sel=2-4"):
            window = open_url(url, address, width=width, height=800, scheme=scheme)
            assert window.overflow() == 0
            assert find_violations(window) == []
            assert window.page.evaluate("() => window.hacked") is None
        assert not window.troubles


def test_a_file_without_all_cells_has_ranges_of_changes(
    open_url, tmp_path, monkeypatch
):
    monkeypatch.setattr("regard.show.page.choose_error", lambda *_: None)
    monkeypatch.setattr("regard.show.page_overview.list_exact", lambda *_: iter(()))
    with HOSTS["page"](A.beside(B), tmp_path) as url:
        window = open_url(url, "sel=30-50&hs=0.2&two=diff", width=1280, height=800, scheme="light")  # fmt: skip
        change = tint(DENSE_B, 30, 50, heads=[2]) - tint(DENSE_A, 30, 50, heads=[2])
        ranges = 0
        for at, said in enumerate(window.page.evaluate(HOVER, list(range(50)))):
            found = re.search(r": ([+-]?[\d.e-]+)(?: to ([+-]?[\d.e-]+))? \(", said)
            low, high = float(found[1]), float(found[2] or found[1])
            slip = 0.02 * abs(DENSE_A[0, 2, 30:51, at]).mean() + 0.02 * abs(DENSE_B[0, 2, 30:51, at]).mean() + 1e-4  # fmt: skip
            assert low - slip <= change[at] <= high + slip, said
            ranges += found[2] is not None
        assert ranges > 5
