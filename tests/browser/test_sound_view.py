"""A sound on its time axis: words over time with their path, and moments of the encoder."""

import re

import numpy as np
import pytest
from recordings import HOSTILE, RECORDINGS
from test_looks import find_violations

from regard.show.sound_path import find_times

LEFT, TOP, ROW = 96, 118, 18  # of the words, as in sound_view.js
KEPT, STEP = 31, 0.02  # keys until 0.62 s


def dense(layers, how=np.mean):
    _, weights = RECORDINGS["sound"]()
    return how(np.concatenate([weights[0, x] for x in layers]), axis=0)


def point_at(window, frame, word=None):
    """Point at a moment, of a word or of the strip; return where that is."""
    box = window.at("soundCanvas").bounding_box()
    left = 12 if word is None else LEFT
    wide = box["width"] - left - 12
    x = box["x"] + left + (frame + 0.5) / KEPT * wide
    y = box["y"] + TOP + (30 if word is None else ROW * word + ROW / 2)
    window.page.mouse.move(x, y)
    return x, y


def read_weight(window, pattern):
    window.await_text("sentence", pattern)
    return float(window.text("sentence").rsplit(" ", 1)[1])


@pytest.mark.parametrize(
    ("address", "layers", "heads", "how"),
    [
        ("", (3, 5), slice(None), np.mean),
        ("&mix=max", (3, 5), slice(None), np.max),
        ("&hs=5.2", (5,), slice(2, 3), np.mean),
    ],
)
def test_words_have_the_weights_of_cross_attention(
    open_window, address, layers, heads, how
):
    window = open_window("sound", f"v=text{address}")
    _, weights = RECORDINGS["sound"]()
    expected = how(np.concatenate([weights[0, x][heads] for x in layers]), axis=0)
    for word, frame in [(0, 0), (3, 17), (9, 30), (15, 8)]:
        point_at(window, frame, word)
        when = f"{frame * STEP:.2f}–{(frame + 1) * STEP:.2f} s"
        found = read_weight(window, rf"^{word} “.*” → {re.escape(when)}: ")
        assert found == pytest.approx(expected[word, frame], rel=5e-4)


def test_the_path_is_that_of_the_definition(open_window):
    window = open_window("sound", "v=text&sel=4")
    weights = dense((3, 5))
    rows = window.page.locator("[data-at=strongest] tr").all_inner_texts()
    times = find_times(weights[:, :KEPT])
    assert len(rows) == len(times) == 16
    for i, (row, (first, last)) in enumerate(zip(rows, times, strict=True)):
        found = re.search(r"([\d.]+)–([\d.]+) s\s+([\d.e-]+)$", row)
        ends = [float(found[1]), float(found[2])]
        assert ends == pytest.approx([first * STEP, (last + 1) * STEP])
        mean = weights[i, first : last + 1].mean()
        assert float(found[3]) == pytest.approx(mean, rel=5e-4)
    outside = weights[4, KEPT:].sum()
    assert f"{outside:.2f} of the weight is after the end" in window.text("meaning")
    assert not window.page.evaluate("() => window.hacked")
    assert window.text("chosen").startswith(f"token 4 “{HOSTILE[3][:4]}")


def test_moments_have_the_weights_of_the_encoder(open_window):
    window = open_window("sound", "v=text&au=moments&sel=20")
    weights = dense((0, 1))
    for frame in (0, 12, 30):
        point_at(window, frame)
        found = read_weight(window, rf"^20 “0.40·s” → {frame} “{frame * STEP:.2f}·s”: ")
        assert found == pytest.approx(weights[20, frame], rel=5e-4)
    window.page.mouse.move(*point_at(window, 5))
    window.page.mouse.down()
    window.page.mouse.move(*point_at(window, 8))
    window.page.mouse.up()
    window.await_address(sel="5-8")
    window.press("a")
    point_at(window, 25)
    found = read_weight(window, r"^25 “0.50·s” → 5–8: ")
    assert found == pytest.approx(weights[25, 5:9].sum(), rel=5e-4)


def test_the_keyboard_moves_over_words_and_moments(open_window):
    window = open_window("sound", "v=text&sel=4")
    window.at("reading").focus()
    window.press("ArrowDown", "ArrowDown", "ArrowUp")
    window.await_address(sel="5")
    window.await_text("sentence", "^5 “.*” is at ")
    window.press("]")
    window.await_address(hs="3.0")
    window.at("heard").select_option("moments")
    window.await_address(au="moments", sel=None)
    window.at("reading").focus()
    window.press("Home", "ArrowRight", "ArrowRight")
    window.await_address(sel="2")
    window.press("v")
    assert window.in_map
    window.press("v")
    window.await_address(v="text", sel="2-2")


def test_the_map_names_the_words_of_the_decoder(open_window):
    window = open_window("sound", "l=3&h=0&pin=0")
    window.await_text("row", "·so")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("heard", ["words", "moments"])
def test_axe_finds_nothing_serious_beside_a_sound(open_window, theme, heard):
    window = open_window("sound", f"v=text&au={heard}&t={theme}")
    assert find_violations(window) == []


def test_a_narrow_window_has_the_whole_time_axis(open_window):
    window = open_window("sound", "v=text", width=390, height=800)
    assert not window.overflow()
    point_at(window, 30, 15)
    found = read_weight(window, r" → 0.60–0.62 s: ")
    assert found == pytest.approx(dense((3, 5))[15, 30], rel=5e-4)
