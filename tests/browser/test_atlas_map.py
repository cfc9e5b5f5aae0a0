"""The page of an atlas in a real browser: colours, marks, keys, and texts of others."""

import re
from functools import cache

import numpy as np
import pytest
from recordings import ALERT, HOSTILE
from test_looks import find_violations

from regard.atlas.page import write_page
from regard.atlas.table import AtlasTable, Example, compare_atlases
from regard.atlas.tally import merge_tallies, tally_document
from regard.atlas.terminal_table import fit_scale, fit_signs, write_pair
from regard.show.palette import DARK, DEEP_TWO, LIGHT, PALE_TWO, trace

STATISTICS = ("entropy", "sink", "induction", "logit")
WORDS = "the cat sat on the mat because it was warm"
CELLS = """(grid) => Object.fromEntries([...grid.querySelectorAll(".cell")].map((cell) => {
  const { backgroundColor, color, boxShadow, backgroundImage } = getComputedStyle(cell);
  const marked = boxShadow !== "none" || backgroundImage.includes("linear-gradient");
  return [cell.dataset.place, { back: backgroundColor, front: color, marked,
    name: cell.ariaLabel, text: cell.textContent, none: cell.classList.contains("none") }];
}))"""


def invent(
    heads, seed, *, moved=(), texts=(), corpus="prose", documents=12, folder=True
):
    """Return an atlas of random numbers; `moved` heads do more of everything."""
    random = np.random.default_rng(7)
    base = [random.uniform(0.1, 0.9, (len(STATISTICS), n, 1)) for n in heads]
    for layer, head in moved:
        base[layer][:, head] += 0.3
    random = np.random.default_rng(seed)
    layers = [f"model.layers.{i}" for i in range(len(heads))]
    tallies = []
    for document in range(documents):
        numbers = [
            dict(zip(STATISTICS, x + random.normal(0, 0.01, x.shape), strict=True))
            for x in base
        ]
        if len(heads) > 2:
            del numbers[2]["induction"]  # a layer that never has it
        tallies.append(
            tally_document(layers, numbers, STATISTICS, document=document, piece=0)
        )
    found = {
        (name, layer, head): tuple(
            Example(0.9 - n / 100, f"{corpus}/{n}.txt", n, 10 * n + layer, *words)
            for n, words in enumerate(texts or [(WORDS, " when", WORDS)])
        )
        for name in STATISTICS
        for layer, count in enumerate(heads)
        for head in range(count)
    }
    about = {"model": "tiny", "corpus": corpus, "documents": documents, "tokens": 4800}
    about |= {"length": 512, "packed": False}
    about |= {"folder": f"my {corpus}"} if folder else {}
    return AtlasTable(about, merge_tallies(tallies, keep=1), found)


UNEVEN = (4, 2, 3, 4, 1)
MOVED = ((0, 1), (3, 3), (4, 0))
ATLASES = {
    "one": lambda: [invent(UNEVEN, 1)],
    "two": lambda: [invent(UNEVEN, 1), invent(UNEVEN, 2, moved=MOVED, corpus="code")],
    "same": lambda: [invent((3, 3), 1), invent((3, 3), 1)],
    "single": lambda: [invent((1,), 1, folder=False)],
    "hostile": lambda: [invent((2,), 1, texts=[(x, x, x) for x in HOSTILE], corpus=HOSTILE[0])],
    "large": lambda: [
        invent((128,) * 80, 1, documents=8),
        invent((128,) * 80, 2, documents=8, moved=[(79, 127)]),
    ],
}  # fmt: skip
NAMES = {"hostile": [HOSTILE[1]], "two": ["prose", "code"]}
make_atlas = cache(lambda name: ATLASES[name]())


@pytest.fixture(scope="module")
def write_atlas(tmp_path_factory):
    folder = tmp_path_factory.mktemp("atlas")

    @cache
    def write(name):
        tables = make_atlas(name)
        names = NAMES.get(name, ["a", "b"][: len(tables)])
        write_page(folder / f"{name}.html", tables, names=names)
        return (folder / f"{name}.html").as_uri()

    return write


@pytest.fixture
def open_atlas(open_url, write_atlas):
    """Return a function that opens an atlas."""

    def open_it(name, address="", *, width=1280, height=760, scheme="light"):
        url = write_atlas(name)
        return open_url(url, address, width=width, height=height, scheme=scheme)

    return open_it


def read_cells(window):
    """Return what each cell looks like, by (layer, head)."""
    found = window.at("grid").evaluate(CELLS)
    return {tuple(map(int, name.split("."))): x for name, x in found.items()}


def read_rgb(css):
    return [int(x) for x in re.findall(r"\d+", css)[:3]]


def cell(window, layer, head):
    return window.page.locator(f'.cell[data-place="{layer}.{head}"]')


# ---- colours and marks


@pytest.mark.parametrize(("scheme", "stops"), [("light", LIGHT), ("dark", DARK)])
def test_every_cell_has_the_colour_of_its_mean(open_atlas, scheme, stops):
    (table,) = make_atlas("one")
    window = open_atlas("one", "s=induction", scheme=scheme)
    mean, half = table.mean("induction"), table.half("induction")
    scale, path = fit_scale(mean), trace(stops).astype(int)
    cells = read_cells(window)
    assert len(cells) == sum(UNEVEN)
    for (layer, head), seen in cells.items():
        value = mean[layer, head]
        assert seen["none"] == np.isnan(value) == (layer == 2)
        if seen["none"]:
            assert seen["name"] == f"layer 2 head {head}: no value"
            continue
        expected = path[round(float(scale.place(value)) * 255)]
        assert np.abs(read_rgb(seen["back"]) - expected).max() <= 1
        told = write_pair(value, half[layer, head])
        assert seen["name"] == f"layer {layer} head {head}: {told}"
        assert float(seen["text"]) == pytest.approx(value, abs=0.006)
        assert not seen["marked"]
    assert f"0 … {scale.high:.3g} weight" in window.text("ends")


def contrast(a, b):
    x = np.array([a, b]) / 255
    light = np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)
    low, high = np.sort(light @ [0.2126, 0.7152, 0.0722])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("address", ["s=sink&v=a", "s=sink&v=diff"])
def test_the_number_in_every_cell_can_be_read(open_atlas, scheme, address):
    for seen in read_cells(open_atlas("two", address, scheme=scheme)).values():
        assert contrast(read_rgb(seen["back"]), read_rgb(seen["front"])) >= 4.5


@pytest.mark.parametrize(("scheme", "stops"), [("light", PALE_TWO), ("dark", DEEP_TWO)])
def test_what_is_marked_is_seen_without_colour(open_atlas, scheme, stops):
    a, b = make_atlas("two")
    found = compare_atlases(a, b, "sink")
    assert {(int(i), int(j)) for i, j in np.argwhere(found.marked)} == set(MOVED)
    scale, path = fit_signs(found), trace(stops).astype(int)
    window = open_atlas("two", "s=sink", scheme=scheme)
    assert window.at("view").input_value() == "diff"
    cells = read_cells(window)
    assert {at for at, seen in cells.items() if seen["marked"]} == set(MOVED)
    for at, seen in cells.items():
        expected = path[round(float(scale.place(found.difference[at])) * 255)]
        assert np.abs(read_rgb(seen["back"]) - expected).max() <= 1
        assert seen["name"].endswith(", marked") == (at in MOVED)
    assert "3 of 14 heads are marked" in window.text("told")
    assert f"by chance about {found.chance:.3g} would" in window.text("told")
    window.page.set_viewport_size({"width": 1280, "height": 240})  # dots, not outlines
    window.wait(lambda: "tiny" in window.at("grid").get_attribute("class"), True)
    cells = read_cells(window)
    assert {at for at, seen in cells.items() if seen["marked"]} == set(MOVED)


def test_both_atlases_have_one_scale(open_atlas):
    a, b = make_atlas("two")
    scale, path = fit_scale(a.mean("sink"), b.mean("sink")), trace(LIGHT).astype(int)
    window = open_atlas("two", "s=sink&v=a")
    for view, table in (("a", a), ("b", b)):
        window.at("view").select_option(view)
        back = read_rgb(read_cells(window)[3, 1]["back"])
        place = round(float(scale.place(table.mean("sink")[3, 1])) * 255)
        assert np.abs(back - path[place]).max() <= 1
        assert f"… {scale.high:.3g} weight" in window.text("ends")


# ---- what is said


def test_pointing_at_a_head_tells_its_numbers(open_atlas):
    a, b = make_atlas("two")
    window = open_atlas("two", "s=sink&v=b")

    def told(table):
        return write_pair(table.mean("sink")[3, 3], table.half("sink")[3, 3])

    cell(window, 3, 3).hover()
    assert window.text("sentence") == (
        f"layer 3 head 3: sink {told(b)} weight, 12 documents"
    )
    window.at("view").select_option("diff")
    cell(window, 3, 3).hover()
    found = compare_atlases(a, b, "sink")
    pair = write_pair(found.difference[3, 3], found.half[3, 3])
    assert window.text("sentence") == (
        f"layer 3 head 3: sink {told(a)} in prose, {told(b)} in code; "
        f"difference {pair} weight, marked"
    )
    window.page.mouse.move(5, 5)
    window.await_text("sentence", "^$")


def test_a_click_opens_a_head_with_numbers_examples_and_a_command(open_atlas):
    (table,) = make_atlas("one")
    window = open_atlas("one", "s=sink")
    assert not window.at("head").is_visible()
    cell(window, 3, 2).click()
    window.await_text("head", "regard atlas record")
    told = window.text("head")
    assert told.startswith("layer 3 head 2")
    assert "model.layers.3" in told
    for name in STATISTICS:
        pair = write_pair(table.mean(name)[3, 2], table.half(name)[3, 2])
        row = window.at("head").locator("tr", has_text=name).text_content()
        assert row.endswith(pair if name != "logit" else "± ?")
    assert "0.9 prose/0.txt token 3" in told
    assert window.page.locator("mark").all_text_contents() == [" when"]
    assert window.page.text_content(".command") == (
        "regard atlas record 'my prose' --layer 3 --head 2 --statistic sink --rank 0"
    )
    window.await_address(s="sink", l=3, h=2)
    assert window.page.title() == "L3 h2 · atlas · regard"
    window.page.get_by_role("button", name="close").click()
    assert not window.at("head").is_visible()
    window.await_address(s="sink", l=None)


def test_a_folder_that_is_not_known_is_left_to_the_reader(open_atlas):
    window = open_atlas("single", "s=sink&l=0&h=0")
    window.await_text("head", "regard atlas record DIR --layer 0 --head 0 --stat")


def test_two_atlases_show_the_examples_of_both(open_atlas):
    window = open_atlas("two", "s=sink&v=diff&l=0&h=1")
    window.wait(lambda: window.page.locator(".command").count(), 2)
    titles = window.page.locator(".examples h2").all_text_contents()
    assert titles == ["most sink in prose", "most sink in code"]
    commands = window.page.locator(".command").all_text_contents()
    assert ["'my prose'" in commands[0], "'my code'" in commands[1]] == [True, True]
    window.at("view").select_option("b")
    window.wait(lambda: window.page.locator(".command").count(), 1)
    assert "'my code'" in window.page.text_content(".command")


def test_the_list_has_the_ten_largest_or_smallest(open_atlas):
    (table,) = make_atlas("one")
    mean = table.mean("sink")
    places = [(int(i), int(j)) for i, j in np.argwhere(~np.isnan(mean))]
    order = [f"L{i} h{j}" for i, j in sorted(places, key=lambda at: -mean[at])]
    window = open_atlas("one", "s=sink")
    links = window.at("order").locator(".link")
    assert links.all_text_contents() == order[:10]
    window.page.get_by_role("button", name="smallest first").click()
    assert links.all_text_contents() == order[::-1][:10]
    window.await_address(up=1)
    links.first.click()
    last = re.fullmatch(r"L(\d) h(\d)", order[-1])
    window.await_address(l=last[1], h=last[2])
    focus = window.page.evaluate("() => document.activeElement.dataset.at")
    assert focus == "head"  # the list was made anew


def test_the_list_of_a_difference_has_what_is_marked(open_atlas):
    a, b = make_atlas("two")
    found = compare_atlases(a, b, "sink")
    order = sorted(MOVED, key=lambda at: -abs(found.difference[at]))
    window = open_atlas("two", "s=sink&v=diff")
    rows = window.at("order").locator("tr")
    assert rows.count() == 4
    for n, at in enumerate(order):
        pairs = [write_pair(found.difference[at], found.half[at])]
        pairs += [write_pair(x.mean("sink")[at], x.half("sink")[at]) for x in (a, b)]
        cells = rows.nth(n + 1).locator("td").all_text_contents()
        assert cells == [f"L{at[0]} h{at[1]}", *pairs]
    window = open_atlas("same", "s=sink")
    assert "no difference is marked" in window.text("order")
    assert "0 of 6 heads are marked" in window.text("told")
    window.go("s=logit")
    assert "Nothing is marked: no interval is known." in window.text("told")


# ---- keys and the address


def focused(window):
    return window.page.evaluate("() => document.activeElement.dataset.place")


def test_arrows_walk_over_layers_of_any_size(open_atlas):
    window = open_atlas("one", "s=sink")
    cell(window, 0, 0).focus()
    steps = [
        ("ArrowRight", "0.1"),
        ("End", "0.3"),
        ("ArrowRight", "0.3"),
        ("ArrowDown", "1.1"),  # it has two heads
        ("ArrowLeft", "1.0"),
        ("ArrowUp", "0.0"),
        ("ArrowUp", "0.0"),
        ("PageDown", "4.0"),
        ("ArrowUp", "3.0"),
        ("End", "3.3"),
        ("Home", "3.0"),
        ("PageUp", "0.0"),
    ]
    for key, place in steps:
        window.press(key)
        assert focused(window) == place, key
    assert window.text("sentence").startswith("layer 0 head 0: sink")
    window.wait(lambda: window.text("spoken"), window.text("sentence"))
    window.press("Enter")
    window.await_address(l=0, h=0)
    window.press("Escape")
    window.await_address(l=None)
    assert focused(window) == "0.0"
    window.press("Tab")
    assert focused(window) is None  # one stop for all cells
    window.press("Shift+Tab")
    assert focused(window) == "0.0"


def test_letters_turn_the_statistic_the_view_and_the_theme(open_atlas):
    window = open_atlas("two", "s=entropy&v=a")
    window.press("s")
    window.await_address(s="sink")
    window.press("Shift+S", "Shift+S")
    window.await_address(s="logit")
    window.press("v")
    window.await_address(v="b")
    window.press("v", "v")
    window.await_address(v="a")
    window.press("t")
    window.await_address(t="dark")
    assert window.page.get_attribute("body", "data-theme") == "dark"
    window.page.emulate_media(color_scheme="dark")
    window.press("t")
    assert window.page.get_attribute("body", "data-theme") == "light"


def test_an_address_reopens_the_page_and_a_wrong_one_is_mended(open_atlas):
    address = "s=sink&v=a&l=3&h=1&up=1&t=dark"
    window = open_atlas("two", address)
    assert window.at("statistic").input_value() == "sink"
    assert window.at("view").input_value() == "a"
    assert window.text("head").startswith("layer 3 head 1")
    assert window.at("order").locator("h2").text_content() == "smallest sink"
    assert window.page.get_attribute("body", "data-theme") == "dark"
    for wrong in (
        "s=no&v=c&l=1&h=3&t=red",
        "l=-1&h=0",
        "l=0&h=0.5",
        "l=9&h=9",
        "l=&h=x",
    ):
        window.go(wrong)
        assert not window.at("head").is_visible(), wrong
        assert window.at("statistic").input_value() == "entropy"
        assert window.at("view").input_value() == "diff"


# ---- texts of others, any size, everyone


def test_hostile_texts_are_text_everywhere(open_atlas):
    window = open_atlas("hostile", "s=sink&l=0&h=0", width=1000)
    window.await_text("head", "regard atlas record")
    assert window.page.locator("img, svg, iframe").count() == 0
    assert window.page.evaluate("() => window.hacked") is None
    assert ALERT == "window.hacked=1"
    shown = window.page.locator("mark").all_text_contents()
    assert len(shown) == len(HOSTILE)
    by_text = dict(zip(HOSTILE, shown, strict=True))
    assert by_text[HOSTILE[0]] == HOSTILE[0]
    assert by_text["\u202eright to left\u2066"] == "\\u{202e}right to left\\u{2066}"
    assert by_text["\ud83d"] == "\\u{d83d}"
    assert by_text["\ude00"] == "\\u{de00}"
    assert by_text["\n\t "] == "⏎⇥ "
    assert by_text["\u0301\u0489"].startswith("◌")
    assert len(by_text["W" * 10_000]) == 160
    bad = {"\u202e", "\u2066", "\u200b", "\ufeff", "\x00", "\x1b", "\u2028", "\ud83d"}
    assert not bad & set(window.page.inner_text("body"))
    assert "<img src=x onerror" in window.at("view").text_content()


@pytest.mark.parametrize("width", [1280, 850, 400])
@pytest.mark.parametrize("name", ["two", "hostile", "single"])
def test_no_width_is_too_narrow(open_atlas, name, width):
    window = open_atlas(name, "s=sink&l=0&h=0", width=width, height=600)
    window.await_text("head", "regard atlas record")
    assert window.overflow() == 0
    wider = "(aside) => aside.scrollWidth - aside.clientWidth"
    assert window.page.locator("aside").evaluate(wider) == 0
    for part in ("statistic", "theme", "about", "grid", "order", "head"):
        window.at(part).scroll_into_view_if_needed()
        box = window.at(part).bounding_box()
        assert box["x"] >= 0, part
        assert box["x"] + box["width"] <= width, part


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["one", "two"])
def test_axe_finds_nothing_serious(open_atlas, name, scheme):
    window = open_atlas(name, "s=induction", scheme=scheme)
    assert find_violations(window) == []
    cell(window, 3, 1).click()
    window.await_text("head", "regard atlas record")
    assert find_violations(window) == []


def test_ten_thousand_heads_are_shown_and_walked(open_atlas):
    window = open_atlas("large", "s=sink&v=diff")
    assert window.page.locator(".cell").count() == 10_240
    cells = read_cells(window)
    assert [at for at, seen in cells.items() if seen["marked"]] == [(79, 127)]
    cell(window, 0, 0).focus()
    window.press("PageDown", "End", "Enter")
    window.await_address(l=79, h=127)
    assert window.text("sentence").endswith(", marked")
    window.await_text("head", "regard atlas record 'my prose' --layer 79 --head 127")
    assert window.overflow() == 0
