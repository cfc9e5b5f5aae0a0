"""The text view in a real browser: its numbers, colours, keys and looks."""

import re

import numpy as np
import pytest
from recordings import ALERT, HOSTILE, RECORDINGS, WORDS, make_recording
from test_cells import check_weight
from test_held import ASK, RECORDS, read
from test_looks import find_violations

from regard.masks.patterns import causal
from regard.recording.record import Recording
from regard.recording.spans import Span
from regard.seen import Seen
from regard.show.log_codes import NAN, decode
from regard.show.map_requests import answer
from regard.show.map_source import MapSource
from regard.show.page import EXACT, make_page
from regard.show.palette import DARK, LIGHT, trace
from regard.show.server import start_server

ONE_HOST = pytest.mark.parametrize("host", ["server"])  # looks do not depend on it
# what is said of each of some tokens that are in sight
HOVER = """(tokens) => tokens.map((at) => {
  const token = document.querySelector(`[data-token="${at}"]`);
  const { left, top, width, height } = token.getBoundingClientRect();
  const place = { clientX: left + width / 2, clientY: top + height / 2, bubbles: true };
  token.dispatchEvent(new PointerEvent("pointermove", place));
  return document.querySelector("[data-at=sentence]").textContent;
})"""
STYLES = """() => [...document.querySelectorAll("[data-token]")].map((token) => {
  const { backgroundColor, color } = getComputedStyle(token);
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  return [Number(token.dataset.token), parse(backgroundColor), parse(color)];
})"""
ROWS = """() => [...document.querySelectorAll(".text-line")]
  .sort((a, b) => a.offsetTop - b.offsetTop).map((row) => row.textContent)"""


def tint(weights, first, last, *, heads, show="attended", mix="mean"):
    """Return the definition of a tint; NaN: masked."""
    found = np.stack([weights[0, layer][head] for layer, head in heads])
    seen = ~np.isnan(found)
    dense = np.where(seen, found, 0)
    part = slice(first, last + 1)
    if show == "attended":
        dense, seen = dense[:, part].mean(1), seen[:, part].any(1)
    else:
        dense, seen = dense[:, :, part].sum(2), seen[:, :, part].any(2)
    value = dense.max(0) if mix == "max" else dense.mean(0)
    return np.where(seen.any(0), value, np.nan)


ALL = [(layer, head) for layer in range(2) for head in range(3)]


def test_the_text_opens_first_with_the_name_of_the_model(open_window):
    window = open_window("causal", "")
    assert window.page.get_attribute("body", "data-view") == "text"
    assert window.text("title") == "Tiny"
    assert window.page.title() == "Tiny · regard"
    shown = "".join(window.page.evaluate(ROWS))
    assert shown.startswith("the cat sat on the mat because it was warm and dry the")
    assert window.page.locator("[data-token]").count() == 257
    assert window.page.locator(".token.chosen").count() == 1


@pytest.mark.parametrize(
    ("address", "options"),
    [
        ("sel=200", {"first": 200, "last": 200, "heads": ALL}),
        ("sel=200&mix=max", {"first": 200, "last": 200, "heads": ALL, "mix": "max"}),
        ("sel=150-163&hs=1", {"first": 150, "last": 163, "heads": ALL[3:]}),
        ("sel=99&hs=1.2", {"first": 99, "last": 99, "heads": [(1, 2)]}),
        (
            "sel=20-31&hs=0.1,1&w=attending",
            {"first": 20, "last": 31, "heads": ALL[1:2] + ALL[3:], "show": "attending"},
        ),
        (
            "sel=7&hs=0.0,0.2&mix=max&w=attending",
            {
                "first": 7,
                "last": 7,
                "heads": [(0, 0), (0, 2)],
                "show": "attending",
                "mix": "max",
            },
        ),
    ],
)
def test_every_value_is_the_definition(open_window, address, options):
    _, weights = RECORDINGS["causal"]()
    window = open_window("causal", address)
    right = tint(weights, **options)
    said = window.page.evaluate(HOVER, list(range(257)))
    for at, sentence in enumerate(said):
        if np.isnan(right[at]):
            assert sentence.endswith(": masked"), sentence
        else:
            check_weight(sentence.rpartition(": ")[2], right[at])
    first, last = options["first"], options["last"]
    name = f"{first}–{last}" if first != last else f"{first} “"
    other = f"{right.shape[0] - 1} “"
    whole = [name, other] if "show" not in options else [other, name]
    assert re.match(f".*{whole[0]}.*{whole[1]}", said[-1]), said[-1]
    best = window.page.locator("[data-at=strongest] tr").first.inner_text().split()
    assert int(best[0]) == np.nanargmax(right)
    assert float(best[-1]) == pytest.approx(np.nanmax(right), rel=5e-4, abs=6e-5)


@pytest.mark.parametrize("name", RECORDS)
def test_a_file_tints_as_the_server_does(module, name):
    record = RECORDS[name]()
    n_q, n_k = record.q.shape[1], record.k.shape[1]
    texts = tuple(f" {i}" for i in range(max(n_q, n_k)))
    recording = Recording(model="T", records=(record,), sequences=(0,), texts=(texts,))
    source = MapSource(recording)
    about, blobs = read(make_page(recording))
    last = min(n_q, n_k) - 1
    for first in {last, max(0, last - 9)}:
        for show in ("attended", "attending"):
            for combine, heads in (("mean", ""), ("max", "0"), ("mean", "0.0")):
                asked = {"sequence": 0, "first": first, "last": last, "heads": heads}
                asked |= {"show": show, "combine": combine}
                found = module.evaluate(ASK, [about, blobs, "text", asked])
                codes = np.array(found["codes"], np.uint16)
                right = answer(source, "text", asked).codes[0]
                np.testing.assert_array_equal(codes == 0, right == 0)
                np.testing.assert_array_equal(codes == NAN, right == NAN)
                np.testing.assert_allclose(
                    decode(codes), decode(right), rtol=2 * EXACT, atol=2e-9
                )


@ONE_HOST
@pytest.mark.parametrize("scale", ["log", "linear"])
@pytest.mark.parametrize(("scheme", "stops"), [("light", LIGHT), ("dark", DARK)])
def test_the_colours_are_those_of_the_scale_and_text_on_them_is_read(
    open_window, scheme, stops, scale
):
    _, weights = RECORDINGS["causal"]()
    window = open_window("causal", f"sel=180&hs=0.0&sc={scale}", scheme=scheme)
    right = tint(weights, 180, 180, heads=[(0, 0)])
    path = trace(stops).astype(int)
    tinted = 0
    for at, behind, ink in window.page.evaluate(STYLES):
        place = 1 + np.log10(right[at]) / 2  # from 0.01
        if scale == "linear":
            place = right[at] / np.nanmax(right)
        if not place > 0.012:
            assert behind == [0, 0, 0, 0] or place > 0.008
            continue
        tinted += 1
        near = path[np.rint(place * 255 + np.linspace(-0.1, 0.1, 5)).astype(int)]
        assert np.abs(near - behind[:3]).max(-1).min() <= 1, at
        assert contrast(behind, ink) >= 4.5
    assert 15 < tinted < 120
    top = f"{np.nanmax(right):.3g}" if scale == "linear" else "1"
    least = 0 if scale == "linear" else 0.01
    assert window.text("textEnds") == f"weight {least} … {top}"
    window.at("scale").select_option("linear" if scale == "log" else "log")
    window.await_address(sc="linear" if scale == "log" else None)


def contrast(one, other):
    """Return the contrast of two colours, as WCAG 2 defines it."""
    parts = np.array([one[:3], other[:3]]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    low, high = sorted(linear @ [0.2126, 0.7152, 0.0722] + 0.05)
    return high / low


def find_chosen(window):
    """Return the first and last selected token."""
    window.rest()
    found = window.page.locator(".token.chosen")
    at = found.evaluate_all("(all) => all.map((x) => Number(x.dataset.token))")
    assert at == list(range(at[0], at[-1] + 1))
    return at[0], at[-1]


@ONE_HOST
def test_a_click_selects_a_token_and_a_drag_a_passage(open_window):
    window = open_window("causal", "")
    window.page.click("[data-token='40']")
    assert find_chosen(window) == (40, 40)
    window.await_address(sel=40)
    window.await_text("chosen", "^token 40 “·the”$")
    a, b = (
        window.page.locator(f"[data-token='{at}']").bounding_box() for at in (52, 45)
    )
    window.page.mouse.move(a["x"] + 5, a["y"] + 9)
    window.page.mouse.down()
    window.page.mouse.move(b["x"] + 5, b["y"] + 9, steps=4)
    window.page.mouse.up()
    assert find_chosen(window) == (45, 52)
    window.await_address(sel="45-52")
    window.await_text("meaning", "mean over the selected tokens")
    window.page.click("[data-token='60']", modifiers=["Shift"])
    assert find_chosen(window) == (52, 60)
    window.page.locator("[data-at=strongest] button").first.click()
    assert find_chosen(window) == (0, 0)


@ONE_HOST
def test_everything_is_done_by_keyboard(open_window):
    window = open_window("causal", "")
    for _ in range(12):
        window.page.keyboard.press("Tab")
        if window.page.evaluate("() => document.activeElement.dataset.at") == "reading":
            break
    window.press("Home")
    assert find_chosen(window) == (0, 0)
    window.press("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft")
    assert find_chosen(window) == (2, 2)
    window.press("Shift+ArrowRight", "Shift+ArrowRight")
    assert find_chosen(window) == (2, 4)
    window.press("Shift+ArrowLeft")
    assert find_chosen(window) == (2, 3)
    window.press("Escape")
    assert find_chosen(window) == (3, 3)
    window.press("ArrowDown")
    below = find_chosen(window)[0]
    left = [
        window.page.locator(f"[data-token='{at}']").bounding_box() for at in (3, below)
    ]
    assert left[1]["y"] - left[0]["y"] == 28
    assert abs(left[1]["x"] - left[0]["x"]) < 40
    window.press("ArrowUp")
    assert find_chosen(window)[0] in (2, 3, 4)
    window.press("End")
    assert find_chosen(window) == (256, 256)
    window.press("a")
    window.await_address(w="attending")
    assert window.at("attending").is_checked()
    window.press("m")
    window.await_address(mix="max")
    window.await_text("mixWords", "^6 heads, max: the largest over the heads")
    window.press("h")
    window.await_address(hs=0)
    window.press("h")
    window.await_address(hs="0.0")
    assert window.at("mixWords").is_hidden()  # of one head there is nothing to combine
    assert window.at("mix").is_hidden()
    window.press("]", "}")
    window.await_address(hs="1.1")
    window.press("[", "{")
    window.await_address(hs="0.0")
    window.press("l")
    window.await_address(sc="linear")
    window.wait(lambda: window.text("spoken") == window.text("sentence") != "", True)
    window.press("v")
    window.wait(lambda: window.in_map, expected=True)
    window.press("v")
    window.wait(lambda: window.in_map, expected=False)
    assert find_chosen(window) == (256, 256)


@ONE_HOST
def test_the_map_is_one_click_away_and_back_with_the_same_selection(open_window):
    window = open_window("causal", "sel=120-130&hs=1.2")
    window.at("matrixButton").click()
    window.rest()
    window.await_address(l=1, h=2, pin=120)
    window.await_text("row", "^pinned query 120 ")
    window.at("toText").click()
    assert find_chosen(window) == (120, 130)
    assert window.at("textHead").input_value() == "2"
    window.at("attending").check()
    window.at("toMap").click()
    window.rest()
    window.await_text("column", "^pinned key 120 ")
    window.page.keyboard.press("g")
    window.page.keyboard.type("77")
    window.press("Enter")  # another row is pinned
    window.press("Escape", "v")
    assert find_chosen(window) == (77, 77)
    window.at("home").click()
    window.await_gallery(6)
    window.at("toText").click()
    assert find_chosen(window) == (77, 77)
    window.page.go_back()
    window.await_gallery(6)


@ONE_HOST
def test_heads_are_chosen_by_menus_and_by_a_list(open_window):
    window = open_window("causal", "sel=50")
    window.at("which").select_option("layer")
    window.at("textLayer").select_option("1")
    window.await_address(hs=1)
    window.await_text("mixWords", "^3 heads, mean")
    window.at("which").select_option("head")
    window.at("textHead").select_option("2")
    window.await_address(hs="1.2")
    window.at("textLayer").select_option("0")
    window.await_address(hs="0.2")
    window.at("which").select_option("set")
    window.at("textList").fill("0.1, 1")
    window.at("textList").press("Enter")
    window.await_address(hs="0.1,1")
    window.await_text("mixWords", "^4 heads, mean")
    window.at("which").select_option("all")
    window.await_address(hs=None)
    window.await_text("mixWords", "^6 heads")


def test_hostile_tokens_are_text(open_window):
    window = open_window("hostile", "sel=1", width=390, height=700)
    shown = window.page.locator("[data-token]").all_text_contents()
    assert len(shown) == len(HOSTILE)
    assert shown[1] == f"<img src=x onerror={ALERT}>"
    assert shown[5] == "\\u{202e}right to left\\u{2066}"
    assert shown[7] == "\\u{200b}\\u{200d}\\u{feff}"
    assert shown[12].startswith("◌")
    assert shown[14] == "⏎⇥ "
    assert max(map(len, shown)) < 130
    assert window.page.locator("img, svg, iframe").count() == 0
    said = window.page.evaluate(HOVER, [at for at in range(18) if HOSTILE[at]])
    assert all(len(x) < 200 for x in said)
    for at in range(len(HOSTILE)):
        window.go(f"sel={at}")
    assert window.overflow() == 0
    assert window.page.evaluate("() => window.hacked") is None


@ONE_HOST
@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), (850, "dark"), (390, "light"), (390, "dark")]
)
def test_axe_finds_nothing_serious_at_any_width(open_window, scheme, width):
    window = open_window("causal", "sel=60-64", scheme=scheme, width=width)
    assert window.overflow() == 0
    assert find_violations(window) == []
    window.go("sel=60&hs=1.1&w=attending&sc=linear")
    assert window.overflow() == 0
    assert find_violations(window) == []
    for part in ("reading", "which", "matrixButton", "toMap", "attending"):
        window.at(part).scroll_into_view_if_needed()
        box = window.at(part).bounding_box()
        assert box["x"] >= 0, part
        assert box["x"] + box["width"] <= width, part


CHAT = ["<|im_start|>", "user", "\n", "Why", " is", " the", " sky", " blue", "?"]
CHAT += ["<|im_end|>", "\n", "<|im_start|>", "assist", "ant", "\n", "Light", "\n\n"]
CHAT += ["It", " is", " un", "believ", "able"]


def test_messages_are_labelled_and_newlines_end_lines(open_url):
    seen, _ = make_recording(
        (len(CHAT), len(CHAT)), layers=1, heads=1, mask=causal(), texts=CHAT
    )
    with start_server(seen.recording) as running:
        size = {"width": 1280, "height": 660, "scheme": "light"}
        window = open_url(running.url, "", **size)
        assert window.page.evaluate(ROWS) == [
            "user",
            "<|im_start|>user⏎",
            "Why is the sky blue?<|im_end|>⏎",
            "assistant",
            "<|im_start|>assistant⏎",
            "Light⏎⏎",
            "",
            "It is unbelievable",
        ]
        labels = window.page.locator(".text-line.block").all_text_contents()
        assert labels == ["user", "assistant"]
        window.page.goto("about:blank")


def test_a_word_is_not_split_at_the_end_of_a_line(open_url):
    texts = [" un", "believ", "able"] * 60
    seen, _ = make_recording((180, 180), layers=1, heads=1, mask=causal(), texts=texts)
    with start_server(seen.recording) as running:
        size = {"width": 390, "height": 660, "scheme": "light"}
        window = open_url(running.url, "sel=3", **size)
        rows = window.page.evaluate(ROWS)
        assert len(rows) > 10
        for row in rows:
            assert set(row.split()) == {"unbelievable"}
        wide = window.page.evaluate(
            "() => [...document.querySelectorAll('.text-line')].map((x) => x.scrollWidth - x.clientWidth)"
        )
        assert max(wide) == 0  # nothing is cut off
        window.page.goto("about:blank")


def test_tokens_without_weights_are_red(open_window):
    window = open_window("lost", "sel=30&hs=0.0")
    for at, behind, _ in window.page.evaluate(STYLES):
        assert (behind[:3] == [255, 0, 0]) == (at <= 30)
    (said,) = window.page.evaluate(HOVER, [3])
    assert said.endswith(": NaN")


def test_every_sequence_has_its_text(open_window):
    seen, weights = RECORDINGS["encoder"]()
    window = open_window("encoder", "sel=5")
    assert (
        window.page.locator(".text-line.block").all_text_contents()[0] == "sequence 0"
    )
    window.at("sequence").select_option("1")
    window.await_address(q=1)
    n = len(seen.recording.texts[1])
    window.wait(lambda: window.page.locator("[data-token]").count(), n)
    window.rest()
    said = window.page.evaluate(HOVER, [0, n - 1])
    layers = [weights[1, layer] for layer in range(len(seen.recording.layers))]
    last = int(re.match(r"(\d+)", said[0])[1])
    right = np.nan_to_num(np.concatenate(layers))[:, last].mean(0)
    check_weight(said[0].rpartition(": ")[2], right[0])
    check_weight(said[1].rpartition(": ")[2], right[n - 1])


def test_tokens_without_text_are_numbers_and_others_are_left_out(open_window):
    seen, weights = RECORDINGS["pair"]()
    window = open_window("pair", "sel=2")
    window.await_text("status", re.escape("seen.label(tokenizer.decode)"))
    numbers = window.page.locator("[data-token]").all_text_contents()
    assert [int(x) for x in numbers] == list(seen.recording.tokens[0])
    right = weights[0, 0].mean(0)[2]  # the decoder reads other tokens
    (said,) = window.page.evaluate(HOVER, [40])
    check_weight(said.rpartition(": ")[2], right[40])
    assert window.text("mixWords").startswith("4 heads")


def test_without_a_text_all_heads_open_first(open_window):
    window = open_window("vision", "")
    window.await_gallery(2)
    assert window.at("toText").is_hidden()


@ONE_HOST
@pytest.mark.parametrize(
    "address", ["sel=9999", "sel=-3", "sel=5-2", "sel=x", "hs=9", "hs=../x&mix=evil"]
)
def test_an_odd_address_shows_the_text(open_window, address):
    window = open_window("causal", address)
    assert window.page.get_attribute("body", "data-view") == "text"
    assert window.page.locator(".token.chosen").count() == 1
    window.await_text("mixWords", "^6 heads, mean")


def test_a_long_text_has_few_elements_and_one_request_per_view(open_url):
    n = 20_000
    seen, _ = make_recording((50, 50), layers=1, heads=1, mask=causal())
    (record,) = seen.recording.records
    texts = tuple(f" w{i % 997}" if i % 50 else "\n" for i in range(n))
    recording = Recording(
        model="Long", records=(record,), sequences=(0,), texts=(texts,)
    )
    asked = []
    with start_server(Seen(recording).recording) as running:
        size = {"width": 1280, "height": 660, "scheme": "light"}
        window = open_url(running.url, "sel=40", **size)
        window.page.on("request", lambda x: "/api/text" in x.url and asked.append(x))
        window.press("ArrowLeft")
        assert find_chosen(window) == (39, 39)
        assert len(asked) == 1
        window.page.evaluate(
            "() => { document.querySelector('.scroll').scrollTop = 9000; }"
        )
        window.page.wait_for_selector("[data-token='12000']", state="detached")
        window.rest()
        tokens = window.page.locator("[data-token]")
        assert 100 < tokens.count() < 2500
        assert int(tokens.first.get_attribute("data-token")) > 2000
        window.at("reading").focus()
        window.press("End")
        window.page.wait_for_selector(f"[data-token='{n - 1}'].chosen")
        assert len(asked) == 2
        window.page.goto("about:blank")


@ONE_HOST
def test_the_text_is_copied_as_it_was_read(open_window):
    window = open_window("hostile", "sel=2-5")
    window.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    read = "() => navigator.clipboard.readText()"
    window.at("copyText").click()
    window.await_text("sentence", "^4 tokens are copied$")
    seen = [x.encode("utf-16", "replace").decode("utf-16") for x in HOSTILE]
    normal = [x.replace("\r\n", "\n").replace("\r", "\n") for x in seen]
    assert window.page.evaluate(read).replace("\r", "") == "".join(normal[2:6])
    window.go("sel=3")
    window.at("reading").focus()
    window.press("y")
    window.await_text("sentence", f"^{len(HOSTILE)} tokens are copied$")


def test_spans_that_a_user_names_are_blocks(open_url, tmp_path):
    seen, _ = RECORDINGS["causal"]()
    hostile = "<img src=x onerror=window.hacked=1>"
    spans = [Span("question", 3, 20), Span(hostile, 20, 60)]
    marked = seen.mark(spans)
    marked.page(tmp_path / "spans.html")
    url = (tmp_path / "spans.html").as_uri()
    window = open_url(url, "v=text", width=1280, height=660, scheme="light")
    blocks = window.page.locator(".text-line.block")
    assert blocks.all_text_contents() == ["question", hostile, ""]
    lines = window.page.locator(".text-line").all_text_contents()
    first = lines.index("question") + 1
    assert lines[first].startswith(" ".join(WORDS[3:7]))
    assert not window.page.evaluate("() => window.hacked")
    wrong = [*spans, Span("late", 250, 999)]
    about = MapSource(seen.mark(wrong).recording).about
    assert about["sequences"][0]["blocks"] == []
