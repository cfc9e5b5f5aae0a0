"""The plot of two statistics: numbers of the definition, chosen by pointer and by key."""

import re

import numpy as np
import pytest
from recordings import RECORDINGS
from test_gallery_guide import list_dense, read_cards

LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 40  # as in scatter.js
OFF = 5e-4  # relative


def measure_points():
    """Return sink and entropy of every head of "causal", by their definitions."""
    _, weights = RECORDINGS["causal"]()
    points = {}
    for place, dense in list_dense(weights).items():
        p = np.nan_to_num(dense)
        with np.errstate(divide="ignore", invalid="ignore"):
            bits = -np.nansum(p * np.log2(p), axis=1)
        points[place] = p[:, 0].mean(), bits.mean()
    return points


def find_places(window, points):
    """Return where each head is drawn: sink from 0 on, entropy from its least on."""
    box = window.at("scatter").bounding_box()
    style = window.at("scatter").evaluate(
        "(x) => [x.clientWidth, x.clientHeight, x.clientLeft]"
    )
    width, height, border = style
    x, y = (np.array(list(points.values()))[:, axis] for axis in (0, 1))
    room = 0.04 * x.max()
    low, high = (-room / 2, x.max() + room)
    least, most = y.min() - 0.04 * np.ptp(y), y.max() + 0.04 * np.ptp(y)
    return {
        place: (
            box["x"]
            + border
            + LEFT
            + (a - low) / (high - low) * (width - LEFT - RIGHT),
            box["y"]
            + border
            + height
            - BOTTOM
            - (b - least) / (most - least) * (height - TOP - BOTTOM),
        )
        for place, (a, b) in points.items()
    }


def open_plot(open_window, **options):
    window = open_window("causal", "v=heads&px=sink&py=entropy", **options)
    window.await_text("plotWords", "^6 of 6 heads chosen")
    return window


def test_the_table_has_the_numbers_of_the_definition(open_window):
    points = measure_points()
    window = open_plot(open_window)
    window.at("plotTable").locator("summary").click()
    rows = window.at("plotRows").locator("tr")
    window.wait(rows.count, 7)
    assert rows.first.locator("th").all_text_contents() == [
        "head",
        "sink (weight)",
        "entropy (bits)",
        "badges",
    ]
    found = {}
    for at in range(1, 7):
        name, x, y, badges = rows.nth(at).locator("th, td").all_text_contents()
        place = ".".join(re.findall(r"\d+", name))
        found[place] = float(x), float(y)
        assert badges == ("sink" if points[place][0] >= 0.5 else "")
    assert found.keys() == points.keys()
    for place, values in points.items():
        assert found[place] == pytest.approx(values, rel=OFF), place
    entropies = [y for _, y in found.values()]
    assert entropies == sorted(entropies, reverse=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_point_is_where_its_numbers_are_and_names_its_head(open_window, scheme):
    points = measure_points()
    window = open_plot(open_window, scheme=scheme)
    places = find_places(window, points)
    for place, (x, y) in places.items():
        others = [
            p
            for p in places
            if p != place and np.hypot(*np.subtract(places[p], (x, y))) < 3
        ]
        window.page.mouse.move(x, y)
        layer, head = place.split(".")
        if not others:
            window.await_text("sentence", f"^layer {layer} head {head}: sink ")
            said = re.findall(r"(?:sink|entropy) ([\d.e-]+)", window.text("sentence"))
            assert [float(x) for x in said[:2]] == pytest.approx(points[place], rel=OFF)


def test_a_box_that_is_dragged_leaves_its_heads(open_window):
    points = measure_points()
    window = open_plot(open_window)
    places = find_places(window, points)
    a, b = (np.array([places[x] for x in ("0.1", "1.1")])[:, axis] for axis in (0, 1))
    window.page.mouse.move(a.min() - 9, b.min() - 9)
    window.page.mouse.down()
    window.page.mouse.move(a.max() + 9, b.max() + 9, steps=4)
    window.page.mouse.up()
    window.wait(lambda: read_cards(window), ["0.1", "1.1"])
    window.await_text("plotWords", "^2 of 6 heads chosen")
    window.wait(lambda: "box" in window.address, expected=True)
    box = [float(x) for x in window.address["box"].split(",")]
    inside = [
        p
        for p, (x, y) in points.items()
        if box[0] <= x <= box[1] and box[2] <= y <= box[3]
    ]
    assert inside == ["0.1", "1.1"]
    assert window.at("scatter").bounding_box()  # the gallery below is what changed
    window.go(f"v=heads&px=sink&py=entropy&box={window.address['box']}")
    window.wait(lambda: read_cards(window), ["0.1", "1.1"])
    window.at("clearBox").click()
    window.wait(lambda: len(read_cards(window)), 6)
    window.await_address(box=None)


def test_a_click_opens_a_head_and_an_empty_place_chooses_all(open_window):
    points = measure_points()
    window = open_plot(open_window)
    window.at("x0").fill("0.5")
    window.press("Enter")
    window.wait(lambda: read_cards(window), ["0.1", "1.1"])
    box = window.at("scatter").bounding_box()
    window.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + TOP + 40)
    window.wait(lambda: len(read_cards(window)), 6)
    window.page.mouse.click(*find_places(window, points)["1.1"])
    window.rest()
    window.await_address(l=1, h=1)


def test_the_fields_choose_by_their_numbers(open_window):
    points = measure_points()
    window = open_plot(open_window)
    middle = np.median([y for _, y in points.values()])
    window.at("y1").fill(f"{middle:.6f}")
    window.press("Enter")
    below = [p for p, (_, y) in points.items() if y <= round(middle, 6)]
    assert len(below) == 3
    window.wait(lambda: read_cards(window), below)
    window.at("y1").fill("")
    window.press("Enter")
    window.wait(lambda: len(read_cards(window)), 6)


def test_arrows_walk_shift_chooses_enter_opens(open_window):
    points = measure_points()
    window = open_plot(open_window)
    window.at("scatter").focus()
    by_x = sorted(points, key=lambda p: points[p][0])
    for place in by_x:
        window.press("ArrowRight")
        layer, head = place.split(".")
        window.await_text("sentence", f"^layer {layer} head {head}: ")
    window.press("ArrowRight")  # there is no further one
    window.await_text("sentence", "^layer {} head {}: ".format(*by_x[-1].split(".")))
    window.press("Shift+ArrowLeft")
    window.wait(lambda: read_cards(window), sorted(by_x[-2:]))
    window.press("Escape")
    window.wait(lambda: len(read_cards(window)), 6)
    assert window.page.evaluate("() => document.activeElement.dataset.at") == "scatter"
    window.press("ArrowUp")
    by_y = sorted(points, key=lambda p: points[p][1])
    above = by_y[by_y.index(by_x[-2]) + 1]
    window.await_text("sentence", "^layer {} head {}: ".format(*above.split(".")))
    window.press("Enter")
    window.await_address(l=above[0], h=above[2])


def test_a_statistic_without_numbers_says_why(open_window):
    window = open_window("causal", "v=heads&px=sink&py=induction")
    window.await_text(
        "plotWords",
        "6 have no number · induction: tokens repeat too rarely to tell: 0 of 257 queries, 25 needed$",
    )
    window.at("plotTable").locator("summary").click()
    window.wait(window.at("plotRows").locator("tr").count, 1)


@pytest.mark.parametrize("box", ["1,2", "a,b,c,d", ",,,", "<img>,1,2,3"])
def test_a_box_that_is_none_chooses_all(open_window, box):
    window = open_window("causal", f"v=heads&px=sink&py=entropy&box={box}")
    window.await_text("plotWords", "^6 of 6 heads chosen")


def test_an_address_of_unknown_statistics_plots_the_first_two(open_window):
    window = open_window("causal", "v=heads&px=nothing&py=<b>")
    window.wait(lambda: window.at("plotX").input_value(), "entropy")
    assert window.at("plotY").input_value() == "sink"
