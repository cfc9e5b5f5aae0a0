"""All heads at a glance, in a real browser: their colours are the weights."""

import numpy as np
import pytest
from recordings import RECORDINGS

from regard.show.page import NOTE
from regard.show.palette import DARK, LIGHT, trace
from regard.show.server import start_server

LOW = -3  # the scale of a fresh page: from 10^-3
# of 255 colours; a page file holds of a thumbnail only the first byte of each code
SLACK = {"server": 0.1, "page": 3.2}


def pool(weights, side):
    """Return the largest of each square of cells; NaN where all of it is masked."""
    n_q, n_k = (-(-n // side) * side for n in weights.shape)
    even = np.full((n_q, n_k), -1.0)
    even[: weights.shape[0], : weights.shape[1]] = np.nan_to_num(weights, nan=-1.0)
    best = even.reshape(n_q // side, side, n_k // side, side).max((1, 3))
    return np.where(best < 0, np.nan, best)


def check_colours(pixels, weights, stops, slack):
    """Hold the colours of a map against those of its weights."""
    path = trace(stops).astype(int)
    masked = np.isnan(weights)
    assert (pixels[..., 3] == np.where(masked, 0, 255)).all()
    with np.errstate(divide="ignore"):
        place = np.clip(1 - np.log10(np.where(masked, 1, weights)) / LOW, 0, 1) * 255
    # a code may fall on the other side of a step
    steps = np.rint(place[..., None] + np.linspace(-slack, slack, 9))
    near = path[np.clip(steps.astype(int), 0, 255)]
    off = np.abs(pixels[..., None, :3].astype(int) - near).max(-1).min(-1)
    assert off[~masked].max() <= 1


@pytest.mark.parametrize(("scheme", "stops"), [("light", LIGHT), ("dark", DARK)])
def test_every_thumbnail_has_the_colours_of_its_weights(
    open_window, host, scheme, stops
):
    _, weights = RECORDINGS["causal"]()
    window = open_window("causal", scheme=scheme)
    window.await_gallery(6)
    for layer in (0, 1):
        for head in range(3):
            label = f"layer {layer} head {head}"
            pixels = window.pixels(
                window.page.locator(f'a.card[aria-label*="{label}"] canvas')
            )
            assert pixels.shape == (33, 33, 4)  # 257 tokens, 8 in a pixel
            check_colours(pixels, pool(weights[0, layer][head], 8), stops, SLACK[host])


def test_a_colour_check_sees_another_head(open_window, host):
    _, weights = RECORDINGS["causal"]()
    window = open_window("causal")
    window.await_gallery(6)
    pixels = window.pixels(window.page.locator("a.card canvas").first)
    with pytest.raises(AssertionError):
        check_colours(pixels, pool(weights[0, 0][1], 8), LIGHT, SLACK[host])


@pytest.mark.parametrize(
    ("name", "sequence", "shapes"),
    [
        ("across", 0, [(28, 55)] * 3),
        ("tall", 0, [(38, 2)] * 3),
        ("one", 0, [(1, 1)] * 6),
        ("five", 0, [(5, 5)]),
        ("encoder", 1, [(29, 29)] * 8),
        ("pair", 0, [(35, 35)] * 4 + [(23, 23)] * 4 + [(12, 35)] * 4),
    ],
)
def test_any_shape_has_its_thumbnails(open_window, host, name, sequence, shapes):
    _, weights = RECORDINGS[name]()
    window = open_window(name, f"v=heads&q={sequence}")
    window.await_gallery(len(shapes))
    cards = window.page.locator("a.card canvas")
    dense = [
        head for (at, _), heads in weights.items() if at == sequence for head in heads
    ]
    for at, (head, shape) in enumerate(zip(dense, shapes, strict=True)):
        pixels = window.pixels(cards.nth(at))
        assert pixels.shape[:2] == shape
        side = 1
        while max(head.shape) > 64 * side:
            side *= 2
        check_colours(pixels, pool(head, side), LIGHT, SLACK[host])


def test_the_scale_recolours_every_thumbnail(open_window):
    window = open_window("causal")
    window.await_gallery(6)
    card = window.page.locator("a.card canvas").first
    before = window.pixels(card)
    window.at("low").fill("-8")
    window.rest()
    window.wait(lambda: bool((window.pixels(card) != before).any()), expected=True)
    window.await_address(lo=-8)
    # the lowest colours now stand for less, so no pixel is lighter than it was
    assert window.pixels(card)[..., :3].sum() < before[..., :3].sum()
    assert "1e-8 … 1" in window.text("ends")


def read_cards(window):
    return window.page.locator("a.card").evaluate_all(
        "(cards) => cards.map((card) => /layer (\\d+) head (\\d+)/.exec(card.ariaLabel).slice(1).join('.'))"
    )


def test_sorting_puts_the_largest_first(open_window):
    _, weights = RECORDINGS["causal"]()
    window = open_window("causal")
    window.page.wait_for_function(
        "() => !/to come/.test(document.querySelector('[data-at=status]').textContent)"
    )
    sink = {
        f"{layer}.{head}": dense[:, 0].mean()
        for (_, layer), heads in weights.items()
        for head, dense in enumerate(heads)
    }
    window.at("sort").select_option("sink")
    order = sorted(sink, key=sink.get, reverse=True)
    assert order != sorted(sink)
    window.wait(lambda: read_cards(window), order)
    shown = window.page.locator("a.card .value").all_text_contents()
    expected = [sink[name] for name in order]
    assert [float(x) for x in shown] == pytest.approx(expected, rel=6e-3)
    window.await_address(sort="sink")
    window.at("sort").select_option("layer")
    window.wait(lambda: read_cards(window), sorted(sink))


def test_only_leaves_the_heads_with_a_badge(open_window):
    _, weights = RECORDINGS["causal"]()
    window = open_window("causal", "only=sink")
    sinks = [
        f"{layer}.{head}"
        for (_, layer), heads in weights.items()
        for head, dense in enumerate(heads)
        if dense[:, 0].mean() >= 0.5
    ]
    assert sinks == ["0.1", "1.1"]
    window.wait(lambda: read_cards(window), sinks)
    window.at("only").select_option("induction")
    window.await_text("cards", "^no head is like that$")


def test_a_click_opens_a_head_and_home_leads_back_to_it(open_window):
    window = open_window("causal")
    window.await_gallery(6)
    window.page.click('a.card[aria-label*="layer 1 head 2"]')
    window.rest()
    window.wait(lambda: window.in_map, expected=True)
    window.await_address(l=1, h=2)
    assert window.page.title() == "L1 h2 · regard"
    window.at("home").click()
    window.rest()
    window.wait(lambda: window.in_map, expected=False)
    focus = window.page.evaluate("() => document.activeElement.ariaLabel")
    assert "layer 1 head 2" in focus
    window.page.go_back()
    window.rest()
    window.wait(lambda: window.in_map, expected=True)


def test_the_sequence_can_be_chosen(open_window):
    window = open_window("encoder")
    window.await_gallery(8)
    window.at("sequence").select_option("1")
    window.wait(
        lambda: window.pixels(window.page.locator("a.card canvas").first).shape[:2],
        (29, 29),
    )
    window.await_address(q=1)


def test_a_page_says_that_it_holds_the_text(open_window, host):
    window = open_window("causal")
    note = f"{NOTE} · " if host == "page" else ""
    window.await_text("status", f"^not certified · {note}arrows")


@pytest.mark.parametrize("address", ["v=heads", "l=0&h=0", "v=text"])
def test_what_was_checked_is_said_in_every_view(open_window, address):
    window = open_window("encoder", address)
    window.await_text(
        "status", r"^certified: \d+ rows sampled, 0 failed, 0 cannot tell ·"
    )
    whole = window.page.locator("[data-at=status]").get_attribute("title")
    assert whole.endswith("; 2 of 2 layers, 138 of 160 rows kept, 22 of padding")


def test_badges_that_would_take_many_minutes_are_not_promised(open_url, monkeypatch):
    monkeypatch.setattr("regard.show.map_source.CELLS", 10)
    seen, _ = RECORDINGS["causal"]()
    with start_server(seen.recording) as running:
        size = {"width": 1280, "height": 660, "scheme": "light"}
        window = open_url(running.url, "v=heads", **size)
        window.await_text("status", "^not certified · no badges: they would take many")
