"""A vision model: the weights of a pinned query over its picture."""

import numpy as np
from recordings import RECORDINGS


def test_a_pinned_query_is_laid_over_the_picture(open_window):
    window = open_window("vision", "l=0&h=1&pin=0")
    canvas = window.page.locator("[data-at=row] canvas")
    canvas.wait_for()
    _, weights = RECORDINGS["vision"]()
    row = weights[0, 0][1, 0]
    colours = window.pixels(canvas)[..., :3].astype(int)
    patches = colours.reshape(4, colours.shape[0] // 4, 4, colours.shape[1] // 4, 3)
    darkness = 255 - patches.mean(axis=(1, 3, 4))
    assert np.unravel_index(darkness.argmax(), (4, 4)) == divmod(row[1:].argmax(), 4)
    assert f"{row[0]:.3f} on 1 special token" in window.text("row")
    best = 1 + row[1:].argmax() if row[1:].max() > row[0] else 0
    first = window.page.locator("[data-at=row] tr:has(td)").first.inner_text()
    assert first.split()[0] == str(best)
