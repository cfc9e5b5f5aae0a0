"""What the map says of a cell, a pixel and a pinned line, against the dense weights."""

import re

import numpy as np
import pytest
from recordings import RECORDINGS

TINY = 2.0**-30


def check_weight(shown, weight):
    """Hold a number as it is written against a weight."""
    if shown == "below 1e-9":
        assert weight < TINY * 1.0005
    else:
        assert float(shown) == pytest.approx(weight, rel=5e-4)


def check_cell(sentence, i, j, weight):
    """Hold the sentence about one cell against its weight."""
    names = re.match(r"query ([\d,]+)\b.* key ([\d,]+)\b", sentence)
    assert names, sentence
    assert [int(x.replace(",", "")) for x in names.groups()] == [i, j]
    if np.isnan(weight):
        assert sentence.endswith(": masked")
    else:
        check_weight(sentence.rpartition(": ")[2], weight)


@pytest.mark.parametrize(
    ("name", "spot", "cells"),
    [
        ("causal", (0, 1, 2), [(256, 256), (256, 255), (255, 256), (250, 243)]),
        ("causal", (0, 0, 1), [(3, 0), (0, 0), (0, 1), (5, 4), (4, 5)]),
        ("one", (0, 0, 0), [(0, 0)]),
        ("across", (0, 0, 1), [(0, 299), (36, 290), (20, 295)]),
        ("tall", (0, 0, 0), [(299, 8), (298, 0)]),
        ("encoder", (1, 1, 3), [(28, 0), (20, 28), (28, 28), (27, 5)]),
        ("pair", (0, 0, 1), [(2, 69), (69, 2), (33, 40)]),  # its encoder: no triangle
        ("pair", (0, 1, 2), [(5, 2), (2, 5), (22, 22)]),
        ("pair", (0, 2, 0), [(22, 69), (0, 40)]),
        ("pair", (1, 2, 3), [(22, 49), (3, 0), (10, 48)]),  # without its padding
    ],
)
def test_a_hovered_cell_is_the_definition(open_window, name, spot, cells):
    _, weights = RECORDINGS[name]()
    sequence, layer, head = spot
    window = open_window(name)
    for i, j in cells:
        at = {"i": i + 0.5, "j": j + 0.5, "z": 64}
        window.look(q=sequence, l=layer, h=head, **at)
        assert window.text("badge") == "exact, cells"
        weight = weights[sequence, layer][head][i, j]
        check_cell(window.hover(i, j), i, j, weight)


def test_every_cell_in_sight_is_the_definition(open_window):
    _, weights = RECORDINGS["causal"]()
    window = open_window("causal")
    window.look(l=0, h=2, i=200, j=190, z=30)
    cells = [(i, j) for i in range(197, 203) for j in range(189, 200)]
    for cell, sentence in zip(cells, window.sweep(cells), strict=True):
        check_cell(sentence, *cell, weights[0, 0][2][cell])


def make_pixels(weights, side, how):
    """Return the pixels of a level; rows and keys that are cut off count for less."""
    rows, keys = (np.arange(0, n, side) for n in weights.shape)
    seen = np.nan_to_num(weights)
    if how == "max":
        return np.maximum.reduceat(np.maximum.reduceat(seen, rows, 0), keys, 1)
    counts = np.diff([*rows, len(seen)])[:, None]
    return np.add.reduceat(np.add.reduceat(seen, rows, 0), keys, 1) / counts


def find_side(window):
    found = re.fullmatch(r"exact, (\d+) × \1 cells per pixel", window.text("badge"))
    assert found, window.text("badge")
    return int(found.group(1))


@pytest.mark.parametrize(
    ("name", "how"), [("long", "max"), ("long", "mass"), ("across", "mass")]
)
def test_coarse_pixels_are_pooled_cells_and_mass_rows_add_to_one(
    open_window, name, how
):
    _, weights = RECORDINGS[name]()
    dense = weights[0, 0][1]
    window = open_window(name, width=660, height=330)
    window.look(l=0, h=1, s=how)
    side = find_side(window)
    pixels = make_pixels(dense, side, how)
    n_rows, n_keys = pixels.shape
    row = n_rows * 2 // 3
    step = 1 if how == "mass" else 5  # a row of masses adds to one
    sentences = window.sweep([(row, x) for x in range(0, n_keys, step)], side)
    pixels = pixels[row, ::step]
    assert ["masked" in x for x in sentences] == (pixels == 0).tolist()
    said = [find_value(x, how) for x in sentences if "masked" not in x]
    for shown, pixel in zip(said, pixels, strict=False):  # masked ones are last
        check_weight(shown, pixel)
    if how == "mass":
        total = sum(float(x) for x in said if not x.startswith("below"))
        assert total == pytest.approx(1, abs=3e-4)
    assert side >= 2


def find_value(sentence, how):
    words = {
        "max": r"^strongest link from queries [\d,–]+ to keys [\d,–]+: (.+)$",
        "mass": r"^queries [\d,–]+ give keys [\d,–]+ on average (.+) of their attention$",
    }
    found = re.match(words[how], sentence)
    assert found, sentence
    return found.group(1)


def read_links(window, name):
    """Return the numbers and weights of a pinned line's table."""
    rows = window.page.locator(f"[data-at={name}] tr:has(td)")
    cells = [row.locator("td").all_text_contents() for row in rows.all()]
    numbers = [int(first.replace(",", "")) for first, _, _ in cells]
    return numbers, [float(weight) for _, _, weight in cells]


def test_a_pinned_query_names_its_strongest_keys(open_window):
    _, weights = RECORDINGS["causal"]()
    row = weights[0, 1][0][200, :201]
    window = open_window("causal", "l=1&h=0&pin=200")
    window.await_text("row", "pinned query 200 “·")
    numbers, shown = read_links(window, "row")
    best = np.argsort(-row)[:20]
    assert numbers == best.tolist()
    assert shown == pytest.approx(row[best], abs=5.1e-5)
    bits = -(row * np.log2(row)).sum()
    assert f"entropy {bits:.2f} bits" in window.text("row")
    assert "weights add to 1" in window.text("row")


def test_a_pinned_key_names_who_looks_at_it(open_window):
    _, weights = RECORDINGS["across"]()
    column = weights[0, 0][2][:, 123]
    window = open_window("across", "l=0&h=2&col=123")
    window.await_text("column", "pinned key 123")
    numbers, shown = read_links(window, "column")
    best = np.argsort(-column)[:20]
    assert numbers == best.tolist()
    large = column[best] >= 1e-4
    assert np.array(shown)[large] == pytest.approx(column[best][large], abs=5.1e-5)
    total = float(re.search(r"it gets in all ([\d.]+)", window.text("column")).group(1))
    assert total == pytest.approx(column.sum(), rel=6e-3)


def test_a_click_pins_and_a_number_in_the_table_goes_there(open_window):
    window = open_window("causal")
    window.look(l=0, h=0, i=200, j=150, z=20)
    window.page.mouse.click(*window.place(201, 151))
    window.await_text("row", "^pinned query 201")
    window.await_address(pin=201)
    window.page.mouse.move(*window.place(203, 149))
    window.page.keyboard.down("Shift")
    window.page.mouse.click(*window.place(203, 149))
    window.page.keyboard.up("Shift")
    window.await_text("column", "^pinned key 149")
    window.await_address(pin=201, col=149)
    numbers, _ = read_links(window, "row")
    window.page.locator("[data-at=row] button.link").first.click()
    window.await_text("sentence", f"^query 201 .* key {numbers[0]} ")


def test_a_difference_is_that_of_two_heads(open_window):
    _, weights = RECORDINGS["causal"]()
    window = open_window("causal")
    window.look(l=0, h=0, i=200, j=190, z=40, cmp="diff", vs="1.2")
    for i, j in ((201, 190), (199, 192)):
        sentence = window.hover(i, j)
        mine, theirs = weights[0, 0][0][i, j], weights[0, 1][2][i, j]
        number = r"([+−\d.e-]+)"
        found = re.search(
            f": {number}; layer 1 head 2: {number}; difference {number}$", sentence
        )
        check_weight(found.group(1), mine)
        check_weight(found.group(2), theirs)
        more = float(found.group(3).replace("−", "-"))
        assert more == pytest.approx(mine - theirs, rel=2e-3)
    assert window.hover(199, 200).endswith(": masked")


def test_two_heads_stand_side_by_side(open_window):
    _, weights = RECORDINGS["causal"]()
    window = open_window("causal")
    window.look(l=0, h=0, i=200, j=190, z=40, cmp="side", vs="1.2")
    box, gap = window.at("plane").bounding_box(), 14
    wide = (box["width"] - 88 - gap) / 2
    i, j = 200, 190
    at = {name: float(window.address[name]) for name in "ijz"}
    x = box["x"] + 88 + wide / 2 + (j + 0.5 - at["j"]) * at["z"]
    y = box["y"] + 80 + (box["height"] - 80) / 2 + (i + 0.5 - at["i"]) * at["z"]
    for panel, weight in enumerate((weights[0, 0][0], weights[0, 1][2])):
        window.page.mouse.move(x + panel * (wide + gap), y)
        window.rest()
        check_cell(window.text("sentence"), i, j, weight[i, j])


def test_the_colours_of_cells_are_on_the_canvas(open_window):
    """A cell at full zoom has the colour that its weight has in the legend."""
    _, weights = RECORDINGS["causal"]()
    window = open_window("causal")
    window.look(l=0, h=2, i=200, j=190, z=40)
    legend = window.pixels(window.at("legend"))[0, :, :3].astype(int)
    for cell in ((201, 190), (198, 188), (203, 197)):
        x, y = window.place(*cell)
        at = round(255 * np.clip(1 + np.log10(weights[0, 0][2][cell]) / 3, 0, 1))
        near = legend[max(0, at - 1) : at + 2]
        assert np.abs(near - window.colour(x, y)).max(-1).min() <= 1


def test_tokens_of_an_encoder_are_not_laid_at_a_decoders_queries(open_window):
    window = open_window("pair")
    seen, _ = RECORDINGS["pair"]()
    tokens = seen.recording.tokens[0]
    window.look(l=2, h=0, i=11, j=35, z=20)
    said = window.hover(3, 40)
    assert said.startswith(f"query 3 → key 40 “{tokens[40]}”: ")
    window.look(l=1, h=0, i=11, j=11, z=20)  # the decoder's own
    assert window.hover(3, 2).startswith("query 3 → key 2: ")
    window.look(l=0, h=0, i=30, j=30, z=20)  # the encoder's
    assert window.hover(30, 20).startswith(f"query 30 “{tokens[30]}” → key 20 “")
    window.look(l=1, h=0, i=11, j=11, z=20)
    window.at("sought").fill(str(tokens[2]))
    window.await_text("hits", "^0 found")  # the decoder's are not known
    window.at("sought").fill("#2")
    window.await_text("hits", "^1 found")


def test_tokens_without_spaces_of_their_own_stand_apart(open_window):
    for name, told in (("pieces", "query a b c d e "), ("five", "query ·the·")):
        window = open_window(name, "l=0&h=0")
        corner = window.at("plane").bounding_box()
        window.page.mouse.move(corner["x"] + 120, corner["y"] + 120)
        window.await_text("queryText", told)
