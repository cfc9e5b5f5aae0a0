"""An image-text model: its pictures beside the text, tinted by the same weights."""

import re

import numpy as np
import pytest
from recordings import GRIDS, HOSTILE, RECORDINGS
from test_looks import find_violations

PLACES = [range(4, 12), range(18, 24)]  # tokens of the two pictures
LAST = 28  # a word after both
SHRINK = """(canvas, [rows, columns]) => {
  const small = new OffscreenCanvas(columns, rows).getContext("2d");
  small.imageSmoothingQuality = "high";
  small.drawImage(canvas, 0, 0, columns, rows);
  return [...small.getImageData(0, 0, columns, rows).data];
}"""  # the mean colour of each patch


def dense():
    """Return the mean over all heads of both layers, (queries, keys)."""
    _, weights = RECORDINGS["images"]()
    return np.concatenate([weights[0, layer] for layer in (2, 3)]).mean(0)


REACH = """x => {
  x.scrollIntoView({ block: "nearest" });
  return x.getBoundingClientRect().toJSON();
}"""


def find_canvas(window, picture):
    return window.page.locator("[data-at=images] canvas").nth(picture)


def point_at(window, picture, patch):
    canvas, (rows, columns) = find_canvas(window, picture), GRIDS[picture]
    # at once: when new weights arrive, the page draws another canvas
    box, (i, j) = canvas.evaluate(REACH), divmod(patch, columns)
    x = box["x"] + (j + 0.5) * box["width"] / columns
    window.page.mouse.move(x, box["y"] + (i + 0.5) * box["height"] / rows)
    return i, j


def await_weight(window, pattern):
    """Wait for a sentence; return the number at its end."""
    window.await_text("sentence", pattern)
    return float(window.text("sentence").rsplit(" ", 1)[1])


def test_every_patch_has_the_weight_of_its_token(open_window):
    window = open_window("images", f"v=text&sel={LAST}")
    for picture, tokens in enumerate(PLACES):
        for patch, token in enumerate(tokens):
            place = divmod(patch, GRIDS[picture][1])
            where = rf"^28 “·w11” → {token} “picture{picture + 1}\({place[0]},{place[1]}\)”: "

            def is_shown(picture=picture, patch=patch, where=where):
                point_at(window, picture, patch)  # again, if it was drawn anew
                return bool(re.search(where, window.text("sentence")))

            window.wait(is_shown, expected=True)
            found = await_weight(window, where)
            assert found == pytest.approx(dense()[LAST, token], rel=5e-4)
        share = dense()[LAST, list(tokens)].sum()
        told = window.page.locator("[data-at=images] p").nth(picture).text_content()
        assert told.endswith(" of the attention is on this picture")
        assert float(told.split()[0]) == pytest.approx(share, abs=6e-5)
    assert not window.overflow()


def test_the_strongest_patch_is_the_most_tinted(open_window, picture=0):
    _, weights = RECORDINGS["images"]()
    heads = {
        (layer, head): weights[0, layer][head, LAST, list(PLACES[picture])]
        for layer in (2, 3)
        for head in range(4)
    }
    (layer, head), row = max(heads.items(), key=lambda x: x[1].max())
    found = []
    for token in (0, LAST):  # the first token may not look at them: a bare picture
        window = open_window(
            "images", f"v=text&sel={token}&sc=linear&hs={layer}.{head}"
        )
        found.append(find_canvas(window, picture).evaluate(SHRINK, GRIDS[picture]))
    changed = np.abs(np.subtract(*found)).reshape(-1, 4).sum(1)
    assert changed.argmax() == row.argmax()


def test_a_click_on_a_patch_shows_who_attends_to_it(open_window):
    window = open_window("images", f"v=text&sel={LAST}")
    point_at(window, 0, 6)
    window.page.mouse.down()
    window.page.mouse.up()
    window.await_address(sel="10", w="attending")
    window.await_text("chosen", r"picture1\(1,2\)")
    window.page.locator("[data-token='28']").hover()
    found = await_weight(window, r"^28 “·w11” → 10 “picture1\(1,2\)”: ")
    assert found == pytest.approx(dense()[LAST, 10], rel=5e-4)
    point_at(window, 0, 2)
    window.await_text("sentence", "may not look at 10 .*: masked")  # an earlier patch
    assert window.page.locator("[data-at=images] p").first.text_content() == ""


def test_the_keyboard_walks_over_a_picture(open_window):
    window = open_window("images", f"v=text&sel={LAST}")
    window.page.locator("[data-at=images] .picture").nth(1).focus()
    for key, place in [
        ("ArrowRight", "0,0"), ("ArrowRight", "0,1"), ("ArrowDown", "1,1"),
        ("ArrowDown", "2,1"), ("ArrowDown", "2,1"), ("ArrowLeft", "2,0"),
    ]:  # fmt: skip
        window.page.keyboard.press(key)
        window.await_text("sentence", rf"→ \d+ “picture2\({re.escape(place)}\)”")
    window.page.keyboard.press("Enter")
    window.await_address(sel="22", w="attending")


def test_the_tokens_of_a_picture_are_squares_in_the_text(open_window):
    window = open_window("images", f"v=text&sel={LAST}")
    shown = window.page.locator(".text-line .token").all_text_contents()
    assert [at for at, text in enumerate(shown) if text == "▪"] == [
        at for tokens in PLACES for at in tokens
    ]
    assert len(shown) == 29 + len(HOSTILE)
    assert not window.page.evaluate("() => window.hacked")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_beside_pictures(open_window, theme):
    window = open_window("images", f"v=text&sel={LAST}&t={theme}")
    assert find_violations(window) == []


def test_a_narrow_window_has_the_pictures_above_the_text(open_window):
    window = open_window("images", f"v=text&sel={LAST}", width=390, height=800)
    assert not window.overflow()
    picture, text = (window.at(name).bounding_box() for name in ("images", "reading"))
    assert picture["y"] + picture["height"] <= text["y"]
    point_at(window, 1, 5)
    found = await_weight(window, r"“picture2\(2,1\)”: ")
    assert found == pytest.approx(dense()[LAST, 23], rel=5e-4)
    assert find_violations(window) == []
