"""The page of an answer and its documents in a real browser: colours, keys, strangers."""

import re

import pytest
from recordings import ALERT, HOSTILE
from test_looks import find_violations
from window import Window

from regard.attribution import AnswerPart, SourceDocument, Sources
from regard.recording.spans import Span

WIDTHS = (320, 390, 1280)
ANSWER = ["The bakery opens at six. ", "The code word is marzipan."]
TEXTS = [
    "The bakery on Mill Street opens at six.",
    "The library has a code word: marzipan.",
    "Last winter the river froze.\nIt was cold.",
]
EFFECTS = [(8.0, 1.0, 0.0), (-1.0, 12.0, 0.5)]
MASSES = [(0.2, 0.1, 0.05), (0.3, 0.1, 0.05)]


def invent(texts=TEXTS, answer=ANSWER, *, is_recording=False):
    """Return an answer of two sentences."""

    def make(text, mass, effect):
        effect, log = (None, None) if is_recording else (effect, -1.5)
        return AnswerPart(
            text=text, tokens=(0, 1), mass=mass, effect=effect, logprob=log
        )

    n = len(texts)
    masses, effects = ([(x * n)[:n] for x in y] for y in (MASSES, EFFECTS))
    total = tuple(a + b for a, b in zip(*effects, strict=True))
    return Sources(
        documents=tuple(SourceDocument(x[:20], x, Span("", 0, 1)) for x in texts),
        answer=make("".join(answer), masses[0], total),
        sentences=tuple(map(make, answer, masses, effects)),
        passes=0 if is_recording else 1 + n,
    )


@pytest.fixture
def open_page(browser, tmp_path):
    """Return a function that opens a page; in the end nothing may have gone wrong."""
    windows = []

    def open_it(found, *, width=1280, scheme="light"):
        found.page(tmp_path / "why.html")
        window = Window(browser.new_context().new_page())
        windows.append(window)
        window.url = (tmp_path / "why.html").as_uri()
        window.page.set_viewport_size({"width": width, "height": 700})
        window.page.emulate_media(color_scheme=scheme)
        window.page.goto(window.url)
        return window

    yield open_it
    for window in windows:
        assert window.troubles == []
        window.page.context.close()


def read_backgrounds(window):
    """Return red - blue of each document's background, and how far it is from grey."""
    script = "(all) => all.map((x) => getComputedStyle(x).backgroundColor)"
    found = window.page.locator("article").evaluate_all(script)
    parts = [[float(x) for x in re.findall(r"[\d.]+", css)[:3]] for css in found]
    return [red - blue for red, _, blue in parts]


def read_shown(window, kind):
    return [x for x in window.page.locator(f".{kind}").all() if x.is_visible()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_documents_have_the_colour_of_their_effect_on_the_chosen_sentence(
    open_page, scheme
):
    window = open_page(invent(), scheme=scheme)
    numbers = [x.text_content() for x in read_shown(window, "numbers")]
    assert numbers[1] == "effect 13.00 nats (largest), mass 0.100"
    assert numbers[0] == "effect 7.00 nats, mass 0.200 (largest)"
    window.page.locator("#p1").check()
    first, second, third = read_backgrounds(window)
    assert first > second > third
    assert read_shown(window, "warning") == []
    window.page.locator("#p2").check()
    first, second, third = read_backgrounds(window)
    assert second > third > first  # the first speaks against it
    (warning,) = read_shown(window, "warning")
    assert (
        "document The bakery on Mill S has the largest mass" in warning.text_content()
    )


def test_a_recording_is_coloured_by_its_mass(open_page):
    window = open_page(invent(is_recording=True))
    first, second, third = read_backgrounds(window)
    assert first > second > third
    assert "without the model, the effect" in window.page.text_content("header")
    numbers = [x.text_content() for x in read_shown(window, "numbers")]
    assert numbers[0] == "mass 0.200 (largest)"


def test_keys_reach_every_sentence(open_page):
    window = open_page(invent())
    window.page.keyboard.press("Tab")
    window.page.keyboard.press("ArrowDown")
    assert window.page.locator("#p1").is_checked()
    window.page.keyboard.press("ArrowDown")
    assert window.page.locator("#p2").is_checked()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_on_the_page(open_page, scheme):
    window = open_page(invent(), scheme=scheme)
    for i in range(3):
        window.page.locator(f"#p{i}").check()
        assert find_violations(window) == []


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_every_width(open_page, width):
    long = [*TEXTS, "x" * 900, "word " * 300]
    window = open_page(invent(texts=long), width=width)
    wide = "() => document.documentElement.scrollWidth"
    assert window.page.evaluate(wide) <= width


def test_strangers_texts_stay_texts(open_page):
    window = open_page(invent(texts=list(HOSTILE), answer=[*HOSTILE[:2]]))
    assert window.page.evaluate(f"() => {ALERT.partition('=')[0]}") is None
    assert window.page.locator("script, img, svg").count() == 0
    assert window.page.locator("article").count() == len(HOSTILE)
    assert HOSTILE[1] in window.page.text_content("main")
