"""The text view of a file without all cells: numbers or ranges that hold the tint."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from recordings import ALERT, HOSTILE
from test_held import ASK, draw, read
from test_looks import find_violations
from test_overview import N, make_record
from test_text import HOVER

from regard.masks.patterns import causal, per_head, window
from regard.recording.record import Recording
from regard.show.log_codes import NAN, decode
from regard.show.map_requests import answer
from regard.show.map_source import MapSource
from regard.show.page import make_page
from regard.show.page_rollout import pack_rollout
from regard.show.server import start_server

LIMIT = 900_000


@pytest.fixture(autouse=True)
def _no_cells(monkeypatch):
    monkeypatch.setattr("regard.show.page.choose_error", lambda *_: None)


def lose(record):
    record.k[0, 20, 3] = math.nan
    return record


RECORDS = {
    "causal": lambda: draw((300, 300), heads=4, shared=2, mask=causal()),
    "both ways": lambda: draw((50, 50), heads=3),
    "by head": lambda: draw((60, 60), mask=per_head([causal(), window(3, 3)])),
    "sink": lambda: draw((60, 60), sink=torch.tensor([1.0, 3.0]).double()),
    "lost": lambda: lose(draw((60, 60), heads=4, shared=2, mask=causal())),
}


def make_recording(*records, n=None):
    n = n or max(records[0].shape[1:])
    texts = (tuple(f" {i}" for i in range(n)),)
    sequences = (0,) * len(records)
    return Recording(model="T", records=records, sequences=sequences, texts=texts)


@pytest.mark.parametrize("name", RECORDS)
def test_what_a_file_says_holds_the_tint_of_the_server(module, name, monkeypatch):
    # no head has its cells
    monkeypatch.setattr("regard.show.page_overview.list_exact", lambda *_: iter(()))
    recording = make_recording(RECORDS[name]())
    source = MapSource(recording)
    about, blobs = read(make_page(recording, limit=LIMIT))
    least, off = about["lists"]["least"], about["lists"]["off"]
    last = recording.records[0].shape[1] - 1
    exact = 0
    for first in {last, last - 9, 3}:
        for show in ("attended", "attending"):
            for combine, heads in (("mean", ""), ("max", ""), ("mean", "0"), ("max", "0.1,0.0"), ("mean", "0.1")):  # fmt: skip
                asked = {"sequence": 0, "first": min(first, last), "last": last}
                asked |= {"heads": heads, "show": show, "combine": combine}
                found = module.evaluate(ASK_RANGE, [about, blobs, asked])
                low, high = (np.array(found[x], np.uint16) for x in ("codes", "upper"))
                right = answer(source, "text", asked).codes[0]
                for codes in (low, high):
                    np.testing.assert_array_equal(codes == 0, right == 0)
                    np.testing.assert_array_equal(codes == NAN, right == NAN)
                low, high, right = (
                    np.nan_to_num(decode(x)) for x in (low, high, right)
                )
                one = about["means"]["0"] if not heads and combine == "mean" else None
                slip = 1.01 * (one["off"] if one else off) + 4e-4
                assert (low <= right * (1 + slip) + 2e-9).all()
                assert (right <= high * (1 + slip) + 2e-9).all()
                sure = high <= low * 1.005
                np.testing.assert_allclose(low[sure], right[sure], rtol=slip + 0.005, atol=1e-9)  # fmt: skip
                exact += sure[right > 0].sum()
                if one:  # the mean of all heads is as good as exact
                    np.testing.assert_allclose(low, right, rtol=slip, atol=400 * one["least"])  # fmt: skip
                    assert found["known"]["mean"]
                elif asked["first"] == last and show == "attended":
                    assert (high - low <= least * 1.001).all()
                    if (
                        heads == "0.1"
                    ):  # one row: in the list, or below the least weight
                        listed = right >= least
                        assert sure[listed].all()
                        assert not low[~listed].any()
    assert exact > 40


ASK_RANGE = """async ([about, blobs, asked]) => {
  const source = new HeldSource(about, (id) => blobs[id]);
  const { codes, upper, known } = await source.text(asked);
  return { codes: [...codes], upper: [...upper], known };
}"""


def test_cells_are_exact_beside_lists(module):
    recording = make_recording(*(draw((300, 300), heads=4, shared=2, mask=causal()) for _ in range(1)))  # fmt: skip
    page = make_page(recording, limit=LIMIT)
    about, blobs = read(page)
    (head, *_) = page.exact
    asked = {"sequence": 0, "first": 200, "last": 260, "heads": f"0.{head.head}"}
    asked |= {"show": "attended", "combine": "mean"}
    found = module.evaluate(ASK, [about, blobs, "text", asked])
    assert set(found) == {"codes"}  # no range
    right = answer(MapSource(recording), "text", asked).codes[0]
    shown = np.array(found["codes"], np.uint16)
    np.testing.assert_allclose(decode(shown), decode(right), rtol=1e-3, atol=2e-9)


@pytest.fixture(scope="module")
def recording():
    texts = (tuple([*HOSTILE, *(f" w{i}" for i in range(N))][:N]),)
    records = tuple(make_record(i) for i in range(3))
    return Recording(model="Tiny", records=records, sequences=(0,) * 3, texts=texts)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_says_what_is_not_in_the_file(
    open_url, recording, tmp_path, scheme, width
):
    page = make_page(recording, limit=LIMIT)
    assert page.size <= LIMIT
    page.write(tmp_path / "map.html")
    url = (tmp_path / "map.html").as_uri()
    layer, head = next(
        (layer, head)
        for layer in range(3)
        for head in (0, 2)
        if (layer, head) not in {(x.layer, x.head) for x in page.exact}
    )
    address = f"sel=700&hs={layer}.{head}"
    window = open_url(url, address, width=width, height=800, scheme=scheme)
    words = window.text("knownWords")
    weights = recording.records[layer].weights(700, head).numpy()
    lost = weights[weights < page.least].sum()
    assert words.startswith(f"Weights below {page.least:g} are not in this file.")
    share = int(re.search(r"They hold at most (\d+) % of this row\.", words)[1])
    assert 100 * lost <= share < 100 * lost + 1.5
    near = [int(x) for x in window.page.locator("[data-token]").evaluate_all("(all) => all.map((x) => x.dataset.token)")]  # fmt: skip
    near = near[len(near) // 3 : 2 * len(near) // 3]
    told = 0
    for at, said in zip(near, window.page.evaluate(HOVER, near), strict=True):
        number = said.rpartition(": ")[2]
        if at > 700:
            assert number == "masked"
        elif weights[at] < page.least:
            assert float(re.fullmatch(r"below ([\d.e-]+)", number)[1]) >= weights[at]
        else:
            shown = float(re.fullmatch(r"about ([\d.e-]+)", number)[1])
            assert shown == pytest.approx(weights[at], rel=0.02)
            told += 1
    assert told >= 1
    best = window.page.locator("[data-at=strongest] tr").first.inner_text()
    assert f"{np.argmax(weights):,}" in best
    window.go(f"sel=600-700&hs={layer}.{head}")
    right = recording.records[layer].weights(slice(600, 701), head).numpy().mean(0)
    window.await_text("knownWords", "of these rows")
    for line in window.page.locator("[data-at=strongest] tr").all_inner_texts():
        at, *_, number = line.replace(",", "").split("\t")
        ends = [float(x) for x in re.findall(r"\d[\d.e-]*", number)]
        assert ends[0] * 0.98 <= right[int(at)] <= ends[-1] * 1.02, line
    window.press("a")
    window.await_text("knownWords", "of a row on average")
    window.press("m", "h")
    window.go("sel=700")
    window.await_text("mixWords", "^12 heads, mean")
    window.await_text("knownWords", "^Means below")
    assert window.overflow() == 0
    assert find_violations(window) == []
    assert window.page.evaluate("() => window.hit") is None, ALERT


def add_values(record, seed=0):
    rng = np.random.default_rng(seed)
    v = rng.normal(size=(len(record.k), record.shape[2], 4))
    return replace(record, v=torch.tensor(v * rng.random((record.shape[2], 1))))


def test_a_file_has_the_rollout_of_a_short_text(module):
    record = draw((120, 120), heads=4, shared=2, mask=causal())
    other = draw((120, 120), heads=2, shared=2, mask=causal() & window(9))
    recording = make_recording(record, replace(other, name="b"))
    about, blobs = read(make_page(recording))
    assert about["sequences"][0]["ways"]["rollout"] == ""
    source = MapSource(recording)
    for show, first, last in (("attended", 80, 91), ("attending", 3, 3)):
        asked = {"sequence": 0, "first": first, "last": last, "heads": ""}
        asked |= {"show": show, "combine": "mean", "by": "rollout"}
        right = decode(answer(source, "text", asked).codes)[0]
        found = module.evaluate(ASK, [about, blobs, "text", asked])
        mine = decode(np.array(found["codes"], np.uint16))
        np.testing.assert_allclose(mine, right, rtol=5e-4, atol=2e-9)  # NaN: masked
    packed, why = pack_rollout(recording.records, 120, 300_000)
    assert (packed, why) == (
        b"",
        "it would take about 0.0 MB of a file of 0.3 MB; seen.show() and "
        "seen.widget() have it",
    )


@pytest.mark.parametrize("cells", [True, False])
def test_a_file_multiplies_by_the_length_of_values(module, monkeypatch, cells):
    if cells:
        monkeypatch.undo()  # all cells fit
    monkeypatch.setattr("regard.show.page_overview.list_exact", lambda *_: iter(()))
    record = add_values(draw((120, 120), heads=4, shared=2, mask=causal()))
    recording = make_recording(record, add_values(replace(record, name="b"), 1))
    source = MapSource(recording)
    page = make_page(recording, limit=LIMIT)
    assert (page.overview == 0) is cells
    about, blobs = read(page)
    assert about["sequences"][0]["ways"]["rollout"] == ""
    for show in ("attended", "attending"):
        for combine, heads in (("mean", ""), ("max", "1"), ("mean", "1.3,0.0")):
            asked = {"sequence": 0, "first": 80, "last": 91, "heads": heads}
            asked |= {"show": show, "combine": combine, "by": "value"}
            right = np.nan_to_num(decode(answer(source, "text", asked).codes)[0])
            found = module.evaluate(ASK, [about, blobs, "text", asked])
            low = np.nan_to_num(decode(np.array(found["codes"], np.uint16)))
            if cells:
                np.testing.assert_allclose(low, right, rtol=2e-3, atol=2e-9)
            else:
                found = module.evaluate(ASK_RANGE, [about, blobs, asked])
                high = np.nan_to_num(decode(np.array(found["upper"], np.uint16)))
                assert (low <= right * 1.011 + 2e-9).all()
                assert (right <= high * 1.011 + 2e-9).all()
                assert (high >= low).all()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_measures_are_explained_or_it_is_said_why_not(open_url, tmp_path, scheme):
    bare = draw((60, 60), heads=4, shared=2, mask=causal())
    kept = add_values(bare)
    for record, missing in ((bare, True), (kept, False)):
        two = make_recording(record, replace(record, name="b"))
        with start_server(two) as running:
            window = open_url(running.url, "sel=50", width=390, height=800, scheme=scheme)  # fmt: skip
            words = window.text("byWords")
            assert ('regard.watch(model, keep="qkv")' in words) is missing
            disabled = window.page.locator("[data-at=by] option:disabled")
            assert disabled.count() == missing
            window.at("by").select_option("rollout")
            window.rest()
            window.await_text("textEnds", "^rollout ")
            assert "multiplied over all layers" in window.text("byWords")
            dense = record.weights().numpy().mean(0)
            layer = (dense + np.eye(60)) / 2
            (said,) = window.page.evaluate(HOVER, [7])
            right = (layer @ layer)[50, 7]
            assert float(said.rpartition(": ")[2]) == pytest.approx(right, rel=1e-3)
            assert window.at("pickHeads").is_hidden()
            assert find_violations(window) == []
            assert window.overflow() == 0
            if not missing:
                window.at("by").select_option("value")
                window.rest()
                window.await_text("textEnds", "^weight × value ")
                assert "length of its key's value" in window.text("byWords")
            window.page.goto("about:blank")
