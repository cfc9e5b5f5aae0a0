"""A vision model: the weights of a patch over its picture, as the pointer moves."""

import re

import numpy as np
import pytest
from recordings import RECORDINGS
from test_looks import find_violations

HEAD = "l=0&h=1"
TOLD = re.compile(r"looks most at (.+), ([\d.e-]+); ([\d.]+) on 1 special token")


def dense(head=1):
    return RECORDINGS["vision"]()[1][0, 0][head]


def name(token):
    return (
        f"patch ({(token - 1) // 4}, {(token - 1) % 4})" if token else "special token 0"
    )


def point_at(window, token):
    box = window.page.locator("[data-at=picture] canvas").bounding_box()
    i, j = divmod(token - 1, 4)
    x, y = (
        box["x"] + (j + 0.5) * box["width"] / 4,
        box["y"] + (i + 0.5) * box["height"] / 4,
    )
    window.page.mouse.move(x, y)


def await_told(window, token):
    """Wait until the picture says who looks; return the strongest key and the numbers."""
    window.await_text("pictureTold", rf"^{re.escape(name(token))} looks")
    whom, weight, special = TOLD.search(window.text("pictureTold")).groups()
    return whom, float(weight), float(special)


def compare(window, token, row):
    whom, weight, special = await_told(window, token)
    best = int(row.argmax())
    assert whom == ("itself" if best == token else name(best))
    assert weight == pytest.approx(row[best], rel=5e-4)
    assert special == pytest.approx(row[0], abs=5.1e-4)


def read_darkness(window):
    canvas = window.page.locator("[data-at=picture] canvas")
    colours = window.pixels(canvas)[..., :3].astype(int)
    patches = colours.reshape(4, colours.shape[0] // 4, 4, colours.shape[1] // 4, 3)
    return 255 - patches.mean(axis=(1, 3, 4))


def test_a_pinned_query_is_laid_over_the_picture(open_window):
    window = open_window("vision", f"{HEAD}&pin=0")
    window.page.locator("[data-at=picture] canvas").wait_for()
    row = dense()[0]
    compare(window, 0, row)
    darkness = read_darkness(window)
    assert np.unravel_index(darkness.argmax(), (4, 4)) == divmod(row[1:].argmax(), 4)
    assert f"{row[0]:.3f} on 1 special token" in window.text("picture")
    best = 1 + row[1:].argmax() if row[1:].max() > row[0] else 0
    first = window.page.locator("[data-at=row] tr:has(td)").first.inner_text()
    assert first.split()[0] == str(best)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_overlay_follows_the_pointer(open_window, theme):
    window = open_window("vision", f"{HEAD}&t={theme}")
    window.await_text("pictureTold", "point at a patch")
    for token in range(1, 17):
        point_at(window, token)
        compare(window, token, dense()[token])
    if theme == "light":
        darkness, row = read_darkness(window), dense()[16]
        darkness[3, 3] = 0  # its frame is dark
        row = row[1:].reshape(4, 4).copy()
        row[3, 3] = 0
        assert darkness.argmax() == row.argmax()
    window.page.mouse.move(5, 5)
    window.await_text("pictureTold", "point at a patch")
    assert not window.overflow()


def test_a_click_pins_the_patch_and_the_pointer_leaves_it_there(open_window):
    window = open_window("vision", HEAD)
    window.await_text("pictureTold", "point at a patch")
    point_at(window, 7)
    await_told(window, 7)
    window.page.mouse.down()
    window.page.mouse.up()
    window.await_address(pin="7")
    point_at(window, 3)
    compare(window, 3, dense()[3])
    window.page.mouse.move(5, 5)
    compare(window, 7, dense()[7])
    assert "(1,2)" in window.text("row")


def test_the_keyboard_walks_over_the_patches(open_window):
    window = open_window("vision", HEAD)
    window.await_text("pictureTold", "point at a patch")
    window.page.locator(".picture").focus()
    for key, token in [
        ("ArrowRight", 2), ("ArrowDown", 6), ("ArrowDown", 10), ("ArrowLeft", 9),
        ("ArrowLeft", 9), ("ArrowUp", 5),
    ]:  # fmt: skip
        window.page.keyboard.press(key)
        compare(window, token, dense()[token])
    window.page.keyboard.press("Enter")
    window.await_address(pin="5")
    window.page.keyboard.press("ArrowDown")
    compare(window, 9, dense()[9])
    window.page.keyboard.press("Escape")  # back to the pinned one, and no further
    compare(window, 5, dense()[5])
    assert window.address["pin"] == "5"


def test_the_class_token_has_a_button(open_window):
    window = open_window("vision", f"{HEAD}&pin=4")
    compare(window, 4, dense()[4])
    button = window.page.get_by_role("button", name="special token 0: where it looks")
    button.focus()
    compare(window, 0, dense()[0])
    button.press("Enter")
    window.await_address(pin="0")


def test_another_head_has_its_own_weights(open_window):
    window = open_window("vision", f"{HEAD}&pin=4")
    compare(window, 4, dense(1)[4])
    window.press("[")
    window.await_address(h="0")
    window.wait(
        lambda: await_told(window, 4)[1] == pytest.approx(dense(0)[4].max(), rel=5e-4),
        expected=True,
    )
    compare(window, 4, dense(0)[4])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_beside_the_picture(open_window, theme):
    window = open_window("vision", f"{HEAD}&pin=3&t={theme}")
    compare(window, 3, dense()[3])
    assert find_violations(window) == []


def test_a_narrow_window_keeps_the_picture_inside(open_window):
    window = open_window("vision", f"{HEAD}&pin=3")
    window.page.set_viewport_size({"width": 390, "height": 800})
    compare(window, 3, dense()[3])
    window.page.locator("[data-at=picture] canvas").scroll_into_view_if_needed()
    point_at(window, 12)
    compare(window, 12, dense()[12])
    assert not window.overflow()
