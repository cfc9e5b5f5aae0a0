"""Every action by keyboard alone: what the table of keys says is what happens."""

import re

import pytest

SHOWN = [
    "←",
    "↑",
    "↓",
    "→",
    "+",
    "-",
    "0",
    "d",
    "Enter",
    "Esc",
    "[",
    "]",
    "{",
    "}",
    "m",
    "c",
    "g",
    "/",
    "a",
    "h",
    "l",
    "y",
    "v",
    "t",
]
HEAD = "l=0&h=1&i=120&j=100&z=20"
pytestmark = pytest.mark.parametrize("host", ["server"])  # keys.js is the same in all


@pytest.fixture
def window(open_window):
    window = open_window("causal", HEAD)
    window.at("plane").focus()
    return window


def find_cell(window):
    """Return the query and key of the crosshair."""
    found = re.match(r"query (\d+) .* key (\d+) ", window.text("sentence"))
    assert found, window.text("sentence")
    return tuple(map(int, found.groups()))


def test_the_table_lists_the_keys_that_are_tested_here(window):
    window.press("?")
    dialog = window.page.locator("dialog")
    assert dialog.get_attribute("open") is not None
    assert dialog.locator("kbd").all_text_contents() == SHOWN
    window.press("d")  # keys of the map do nothing meanwhile
    window.press("Escape")
    assert dialog.get_attribute("open") is None
    window.wait(lambda: window.in_map, expected=True)
    window.await_address(z=20)


def test_the_gallery_is_walked_with_arrows_and_opened_with_enter(open_window):
    window = open_window("causal", width=850, height=1100)  # a layer in a row
    window.await_gallery(6)
    label = "() => document.activeElement.ariaLabel ?? ''"
    for _ in range(20):
        window.page.keyboard.press("Tab")
        if "layer 0 head 0" in window.page.evaluate(label):
            break
    steps = [
        ("ArrowRight", "layer 0 head 1"),
        ("ArrowDown", "layer 1 head 1"),
        ("ArrowLeft", "layer 1 head 0"),
        ("ArrowUp", "layer 0 head 0"),
        ("End", "layer 1 head 2"),
        ("Home", "layer 0 head 0"),
        ("ArrowRight", "layer 0 head 1"),
    ]
    for key, name in steps:
        window.page.keyboard.press(key)

        def is_focused(name=name):
            return name in window.page.evaluate(label)

        window.wait(is_focused, expected=True)
    window.press("Enter")
    window.await_address(l=0, h=1)
    assert window.page.evaluate("() => document.activeElement.dataset.at") == "plane"


def test_arrows_move_the_crosshair_by_a_cell_and_with_shift_by_a_page(window):
    window.press("ArrowDown")
    i, j = find_cell(window)
    assert (i, j) == (121, 100)
    window.press("ArrowRight", "ArrowRight")
    assert find_cell(window) == (i, j + 2)
    window.press("ArrowUp")
    assert find_cell(window) == (i - 1, j + 2)
    window.press("ArrowLeft")
    assert find_cell(window) == (i - 1, j + 1)
    window.press("Shift+ArrowUp")
    up = i - 1 - find_cell(window)[0]
    assert 12 < up < 60  # 0.8 of the height, in cells of 20 pixels
    window.press(*["Shift+ArrowUp"] * 8)
    assert find_cell(window) == (0, j + 1)  # it stops at the edge
    window.press("Shift+ArrowDown")
    assert find_cell(window) == (up, j + 1)


def test_plus_and_minus_zoom_at_the_crosshair(window):
    window.press("ArrowDown")
    before = find_cell(window)
    window.press("+")
    window.await_address(z=30)
    window.press("=")
    window.await_address(z=45)
    assert find_cell(window) == before
    window.press("-", "-")
    window.await_address(z=20)


def test_0_shows_the_whole_map(window):
    window.press("0")
    window.await_whole(257)


def test_d_goes_to_the_diagonal(window):
    window.press("ArrowUp")
    i, _ = find_cell(window)
    window.press("d")
    assert find_cell(window) == (i, i)


def test_enter_pins_and_escape_unpins_then_leads_home(window):
    window.press("ArrowDown")
    i, j = find_cell(window)
    window.press("Enter")
    window.await_text("row", f"^pinned query {i} ")
    window.press("Shift+Enter")
    window.await_text("column", f"^pinned key {j} ")
    window.await_address(pin=i, col=j)
    window.press("Enter")  # again: no longer
    window.await_text("row", "^pinned queryclick a cell, or press Enter")
    window.await_address(pin=None, col=j)
    window.press("Escape")
    window.await_address(pin=None, col=None, l=0)
    window.press("Escape")
    window.wait(lambda: window.in_map, expected=False)
    window.await_address(l=None)


def test_brackets_go_to_other_heads_and_braces_to_other_layers(window):
    for key, layer, head in [
        ("]", 0, 2),
        ("]", 0, 0),  # around
        ("[", 0, 2),
        ("}", 1, 2),
        ("}", 0, 2),
        ("{", 1, 2),
        ("[", 1, 1),
    ]:
        window.press(key)
        window.await_address(l=layer, h=head, i=120, j=100, z=20)
        assert window.at("layer").input_value() == str(layer)
        assert window.at("head").input_value() == str(head)


def test_m_turns_max_into_mass_and_back(window):
    window.press("m")
    window.await_address(s="mass")
    assert window.at("how").input_value() == "mass"
    window.press("m")
    window.await_address(s=None)


def test_c_shows_two_heads_then_their_difference_then_one(window):
    for way, other in (("side", "0.2"), ("diff", "0.2"), (None, None)):
        window.press("c")
        window.await_address(cmp=way, vs=other)
        assert window.at("compare").input_value() == (way or "")


def test_t_turns_light_into_dark_and_back(window):
    page = "() => getComputedStyle(document.body).backgroundColor"
    light = window.page.evaluate(page)
    window.press("t")
    window.await_address(t="dark")
    assert window.page.evaluate(page) != light
    window.press("t")
    window.await_address(t="light")
    assert window.page.evaluate(page) == light


def test_slash_finds_words_across_tokens(window):
    window.press("/")
    window.page.keyboard.type("The mat ")  # two tokens and the start of a third
    window.await_text("hits", "^[1-9][0-9]* found$")
    count = int(window.text("hits").split()[0])
    window.press("Enter")
    window.await_text("hits", f"^1 of {count}$")
    window.await_text("row", r"^pinned query \d+ “·the”")
    first = find_cell(window)
    assert first[0] == first[1]
    window.press("Enter")
    window.await_text("hits", f"^2 of {count}$")
    assert find_cell(window) > first
    window.press("Shift+Enter")
    window.await_text("column", r"^pinned key \d+ “·the”")
    window.press("Escape")  # back to the map, what was found stays
    assert window.page.evaluate("() => document.activeElement.dataset.at") == "plane"
    window.wait(lambda: window.in_map, expected=True)
    window.press("/")
    window.page.keyboard.type("not in there")
    window.await_text("hits", "^0 found$")
    window.press("Enter")


def test_g_goes_to_a_token_by_number(window):
    window.press("g")
    window.page.keyboard.type("77")
    window.press("Enter")
    assert find_cell(window) == (77, 77)
    window.await_text("row", "^pinned query 77 ")


def test_every_control_is_reached_with_tab(window):
    reached = set()
    for _ in range(40):
        window.page.keyboard.press("Tab")
        found = window.page.evaluate("() => document.activeElement.dataset.at ?? ''")
        reached.add(found)
    controls = "home layer head how low fit copy theme plane sought compare otherLayer otherHead"
    assert {*controls.split()} <= reached


def test_what_is_under_the_crosshair_is_spoken(window):
    window.press("ArrowDown")
    window.wait(lambda: window.text("spoken") == window.text("sentence") != "", True)
