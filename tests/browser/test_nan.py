"""NaN is seen as NaN: a colour of its own, and in words."""

import numpy as np

RED = [255, 0, 0]


def test_cells_without_weights_are_red_and_called_nan(open_window):
    window = open_window("lost")
    window.look(l=0, h=0, i=25, j=20, z=24)
    assert window.hover(30, 20).endswith(": NaN")
    assert window.hover(20, 25).endswith(": masked")
    assert float(window.hover(24, 20).rpartition(": ")[2]) < 1
    assert window.colour(*window.place(30, 21)).tolist() == RED
    assert window.colour(*window.place(24, 21)).tolist() != RED
    window.look(l=0, h=1, i=25, j=20, z=24)
    assert float(window.hover(30, 20).rpartition(": ")[2]) < 1


def test_a_pinned_row_and_a_difference_say_nan(open_window):
    window = open_window("lost")
    window.look(l=0, h=0, i=25, j=20, z=24, pin=30)
    window.await_text("row", "NaN in 31 weights")
    window.look(l=0, h=0, i=25, j=20, z=24, col=7)
    window.await_text("column", "NaN in 15 weights")
    window.look(l=0, h=1, i=25, j=20, z=24, vs="0.0", cmp="diff")
    assert window.hover(30, 20).endswith("difference NaN")


def test_thumbnails_badges_and_numbers_say_nan(open_window):
    window = open_window("lost")
    window.await_gallery(2)
    cards = window.page.locator("a.card")
    small = [window.pixels(cards.nth(at).locator("canvas")) for at in range(2)]
    seen = np.tri(40, dtype=bool)
    seen[:25] = False
    red = [(x[..., :3] == RED).all(-1) for x in small]
    np.testing.assert_array_equal(red[0], seen)
    assert not red[1].any()
    cards.nth(0).locator(".tag.nan_rows").wait_for()
    assert cards.nth(0).locator(".tag.nan_rows").inner_text() == "NaN"
    assert cards.nth(1).locator(".tag.nan_rows").count() == 0
    cards.nth(0).hover()
    window.await_text("sentence", "^layer 0 head 0, .*: NaN 15 .*, sink NaN, ")
    assert "entropy" not in window.text("sentence")
    window.await_text(
        "badgeKey", "^NaN queries with NaN in a number: at least 1 · 1 of 2 heads"
    )
    window.look(l=0, h=0, i=25, j=20, z=24)
    window.await_text("numbers", "NaN in 15 queries")
