"""A page: factors are the logits, rounding is as fine as it says, the file is safe."""

import base64
import hashlib
import json
import math
import re
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

import regard
from regard.errors import OptionError
from regard.masks.patterns import causal, per_head, window
from regard.recording.record import Record, Recording
from regard.seen import Seen
from regard.show.compressed_record import measure_error, round_record, split_logits
from regard.show.log_codes import decode
from regard.show.page import EXACT, make_page
from regard.show.page_parts import pack_mask
from regard.show.page_size import (
    FINEST,
    choose_error,
    count_factors,
    estimate_stored,
    rank_heads,
    sample_bits,
)
from regard.show.script_bundle import ASSETS, EXPORT, IMPORT, SPARE, join_modules
from regard.stats.table import make_table


def draw(n=(60, 70), *, heads=4, shared=2, mask=None, **more):
    rng = np.random.default_rng(0)
    q, k = (
        rng.normal(size=(heads, n[0], 16)) * 2,
        rng.normal(size=(shared, n[1], 16)) * 2,
    )
    q, k = torch.tensor(q), torch.tensor(k)
    options = {name: more[name] for name in ("bias", "softcap", "sink") if name in more}
    seen = regard.attention(q, k, k, mask, scale=0.3, q_start=0, **options)
    at = {"q_positions": torch.arange(n[0]), "k_positions": torch.arange(n[1])}
    return Record(
        name="layer", q=q, k=k, lse=seen.lse, scale=0.3, mask=mask, **at, **more
    )


def bias(heads, n):
    return torch.tensor(np.random.default_rng(1).normal(size=(heads, *n)))


RECORDS = {
    "plain": draw,
    "causal": lambda: draw((60, 60), mask=causal()),
    "few tokens": lambda: draw((3, 5)),
    "cap": lambda: draw(softcap=4.0),
    "sink": lambda: draw(sink=torch.tensor([0.0, 1.0, 2.0, 3.0]).double()),
    "bias": lambda: draw(bias=bias(4, (60, 70))),
    "one bias, cap, mask": lambda: draw(
        (60, 60), bias=bias(1, (60, 60)), softcap=4.0, mask=causal()
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_factors_give_the_logits_again(name):
    record = RECORDS[name]()
    right = record.weights().numpy()
    seen = right > 0
    for h, (a, b) in enumerate(split_logits(record)):
        for group, found in enumerate(a @ b.T):
            head = h * len(a) + group
            cap = record.softcap if record.bias is None else None
            logits = found if cap is None else cap * np.tanh(found / cap)
            rows = np.exp(logits - record.lse.numpy()[head][:, None])
            np.testing.assert_allclose(rows[seen[head]], right[head][seen[head]], 1e-9)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("error", [1e-4, 0.01])
def test_rounding_is_as_fine_as_it_says(name, error):
    record = RECORDS[name]()
    rounded = round_record(record, error).record
    right, shown = (x.weights().double().numpy() for x in (record, rounded))
    off = np.abs(np.log(shown[right > 1e-3] / right[right > 1e-3]))
    assert np.sqrt((off**2).mean()) < 2 * error
    assert off.max() > error / 20  # it was rounded
    np.testing.assert_allclose(shown.sum(-1), right.sum(-1), rtol=1e-5)
    typical, worst = measure_error(record, rounded)
    assert typical <= error < 30 * typical
    assert typical <= worst <= math.exp(off.max()) - 1 + 1e-6


def test_a_finer_page_is_larger_and_more_exact():
    record = draw((200, 200), mask=causal())
    sizes, errors = [], []
    for error in (1e-4, 1e-3, 1e-2, 1e-1):
        factors = round_record(record, error)
        sizes.append(len(factors.pack()))
        errors.append(measure_error(record, factors.record)[0])
    assert sizes == sorted(sizes, reverse=True)
    assert errors == sorted(errors)


def test_a_blind_row_stays_blind():
    allowed = torch.ones(1, 60, 70, dtype=torch.bool)
    allowed[:, 7] = False
    rounded = round_record(draw(mask=allowed), 1e-3).record
    assert not rounded.weights()[:, 7].any()


def test_runs_of_a_mask_give_the_mask_again():
    masks = {
        "causal": causal(),
        "heads": per_head([causal(), window(2, 3), window(0), causal()]),
        "array": torch.tensor(np.random.default_rng(2).random((1, 300, 300)) < 0.4),
        "none": None,
    }
    for name, mask in masks.items():
        record = draw((300, 300), mask=mask)
        numbers = np.frombuffer(pack_mask(record), "<i4")
        heads, at, found = numbers[0], 1, []
        for _ in range(heads):
            counts = numbers[at : at + 300]
            at += 300
            cells = np.zeros((300, 300), bool)
            for i, count in enumerate(counts):
                for _ in range(count):
                    first, end = numbers[at : at + 2]
                    cells[i, first:end] = True
                    at += 2
            found.append(cells)
        allowed = record.allowed()
        right = np.ones((1, 300, 300), bool) if allowed is None else allowed.numpy()
        assert at == len(numbers)
        assert (np.array(found) == right).all(), name


def make_recording(*records, texts=("a", "b")):
    return Recording(
        model="Tiny",
        records=tuple(records),
        sequences=(0,) * len(records),
        texts=(tuple(texts),),
    )


def read_meta(page):
    html = page.html.decode()
    return json.loads(re.search(r'id="meta">([^<]*)<', html)[1])


def test_a_page_holds_the_heads_that_are_wanted():
    recording = make_recording(*(replace(draw(), name=f"layer.{i}") for i in range(3)))
    whole, some = make_page(recording), make_page(recording, heads={2: [3, 1], 0: [0]})
    assert (whole.heads, some.heads) == (12, 3)
    assert some.size < whole.size
    meta = read_meta(some)
    assert [(x["layer"], x["heads"]) for x in meta["records"]] == [
        (0, [0]),
        (2, [3, 1]),
    ]
    rows = {(x["layer"], x["head"]) for x in meta["table"]}
    assert rows == {(0, 0), (2, 1), (2, 3)}
    for heads, words in (({7: [0]}, "no layer 7"), ({0: [4]}, "no head 4")):
        with pytest.raises(OptionError, match=words):
            make_page(recording, heads=heads)


def test_a_page_stays_below_its_limit_or_says_what_to_do():
    recording = make_recording(draw((300, 300), heads=8, shared=8, mask=causal()))
    whole = make_page(recording, limit=10**9)
    assert "exact" in str(whole)
    assert read_meta(whole)["rounded"] is None
    limit = int(0.75 * whole.size)
    page = make_page(recording, limit=limit)
    assert 0.9 * limit < page.size <= limit
    assert f"{page.worst:.2%}" in str(page)
    assert read_meta(page)["rounded"] == {"typical": page.typical, "worst": page.worst}
    with pytest.raises(OptionError, match=r"limit is 0.10 MB. Give a larger limit="):
        make_page(recording, limit=100_000)


def test_a_long_bias_has_an_overview():
    record = draw((4, 2049), heads=1, shared=1, bias=bias(1, (4, 2049)))
    with pytest.raises(OptionError, match="holds it up to 2048 tokens"):
        round_record(record, 1e-3)
    page = make_page(make_recording(record, replace(draw((9, 9)), name="other")))
    assert sorted((x.layer, x.head) for x in page.exact) == [(1, h) for h in range(4)]
    assert min(x.why for x in page.exact).startswith("previous 0.")
    assert read_meta(page)["records"][0]["cells"] == []


def make_layers(n=300, layers=3):
    """Return a recording of three layers with eight heads."""
    torch.manual_seed(5)
    records = []
    for i in range(layers):
        record = draw((n, n), heads=8, shared=4, mask=causal())
        q = record.q * torch.linspace(0.2, 2 + i, 8)[:, None, None]
        seen = regard.attention(q, record.k, record.k, causal(), scale=0.3)
        records.append(replace(record, name=f"layer.{i}", q=q, lse=seen.lse))
    return make_recording(*records, texts=[f" {i}" for i in range(n)])


LAYERS = make_layers()
TIGHT = 330_000


@pytest.fixture
def no_lists(monkeypatch):
    """Leave the room to cells: test_weight_lists.py has lists."""
    monkeypatch.setattr("regard.show.page_overview.choose_least", lambda *_: None)


@pytest.fixture
def overview(no_lists):
    return make_page(LAYERS, limit=TIGHT)


def read_blob(page, name):
    (text,) = re.findall(rf'id="{name}">([^<]*)<', page.html.decode())
    return zlib.decompress(base64.b64decode(text))


def test_cells_that_do_not_fit_become_an_overview(overview):
    assert 0.6 * TIGHT < overview.size <= TIGHT
    meta = read_meta(overview)
    assert (overview.heads, len(meta["table"])) == (24, 24)
    level = meta["records"][0]["overview"]
    side = overview.overview
    assert side == 2**level == meta["overview"]["cells"] > 1
    rows = -(-300 // side)
    for n, record in enumerate(LAYERS.records):
        raw = np.frombuffer(read_blob(overview, f"overview-{n}"), np.uint8)
        high, low = raw.reshape(2, 8, 2, rows, rows).astype(np.uint16)
        shown = decode(high << 8 | low)
        weights = np.zeros((8, rows * side, rows * side))
        weights[:, :300, :300] = record.weights()
        tiles = weights.reshape(8, rows, side, rows, side)
        queries = np.minimum(300 - side * np.arange(rows), side)[:, None]
        right = tiles.max((2, 4)), tiles.sum((2, 4)) / queries
        for at in (0, 1):
            seen = np.tri(rows, dtype=bool)
            assert np.isnan(shown[:, at][:, ~seen]).all()  # masked
            np.testing.assert_allclose(
                shown[:, at][:, seen], right[at][:, seen], rtol=2.7e-3, atol=2e-9
            )


def test_the_cells_of_the_strongest_heads_are_held_and_said(overview):
    table = make_table(LAYERS)
    orders = [
        [(int(r["layer"]), int(r["head"])) for r in table.sort(name).rows]
        for name in ("sink", "previous", "induction")
        if not np.isnan(table.rows[name]).all()
    ]
    turns = [x for line in zip(*orders, strict=True) for x in line]
    expected = list(dict.fromkeys(turns))[: len(overview.exact)]
    assert [(x.layer, x.head) for x in overview.exact] == expected
    assert 1 < len(expected) < 24
    meta = read_meta(overview)
    cells = [(r["layer"], x["head"]) for r in meta["records"] for x in r["cells"]]
    assert sorted(cells) == sorted(expected)
    listed = [(x["layer"], x["head"]) for x in meta["overview"]["exact"]]
    assert listed == expected
    first, row = overview.exact[0], table.sort("sink").rows[0]
    assert first.why == f"sink {row['sink']:.3f}"
    told = str(overview)
    assert (
        f"an overview of all heads, {overview.overview} × {overview.overview}" in told
    )
    assert f"  layer {first.layer} head {first.head} ({first.why})" in told.splitlines()
    assert overview.worst <= EXACT
    assert "Single cells (exact)" in told
    assert not re.search(r"overview|Single", str(make_page(LAYERS, limit=10**9)))


def test_a_larger_limit_holds_more_and_the_largest_all(overview):
    found = make_page(LAYERS, limit=TIGHT + 40_000)
    assert len(overview.exact) < len(found.exact)
    assert make_page(LAYERS, limit=10**7).overview == 0


def test_an_overview_is_of_the_heads_that_are_wanted():
    page = make_page(LAYERS, heads={1: None, 2: [7, 3]}, limit=275_000)
    assert (page.heads, page.size <= 275_000) == (10, True)
    assert {x.layer for x in page.exact} <= {1, 2}
    meta = read_meta(page)
    assert [x["heads"] for x in meta["records"]] == [list(range(8)), [7, 3]]
    assert page.overview
    raw = np.frombuffer(read_blob(page, "overview-1"), np.uint8)
    rows = -(-300 // page.overview)
    high, low = raw.reshape(2, 2, 2, rows, rows).astype(np.uint16)
    largest = decode(high << 8 | low)[0, 0, 0, 0]  # of head 7
    corner = LAYERS.records[2].weights()[7, : page.overview, : page.overview]
    assert largest == pytest.approx(float(corner.max()), rel=2.7e-3)


@pytest.mark.parametrize("factor", [1.0, 0.2])
def test_the_size_is_known_before(factor):
    records = [replace(x, q=x.q * factor) for x in LAYERS.records]
    real = sum(len(round_record(x, FINEST).pack()) for x in records)
    lse = sum(x.lse.numel() * 3.5 for x in records)  # 32 bits, packed beside
    numbers = sum(map(count_factors, records))
    bits = np.mean([sample_bits(x) for x in records])
    assert numbers * bits / 8 == pytest.approx(real - lse, rel=0.12)
    room = sum(map(estimate_stored, records)) + 4 / 3 * numbers * bits / 8
    assert choose_error(records, room) == pytest.approx(FINEST)
    fewer = room - 4 / 3 * numbers / 8 * 3  # three bits less
    assert choose_error(records, fewer) == pytest.approx(8 * FINEST)
    assert choose_error(records, 0) is None


def test_the_table_may_be_given():
    right = make_page(LAYERS, limit=TIGHT)
    assert make_page(LAYERS, limit=TIGHT, table=make_table(LAYERS)).html == right.html


@pytest.mark.parametrize("limit", [0, -5, float("nan")])
def test_a_limit_is_above_nothing(limit):
    with pytest.raises(OptionError, match="expected a number of bytes above 0"):
        make_page(LAYERS, limit=limit)


def test_heads_without_a_statistic_come_last():
    rows = [
        {
            "sequence": 0,
            "layer": 0,
            "head": h,
            "sink": s,
            "previous": p,
            "induction": None,
        }
        for h, (s, p) in enumerate([(None, None), (0.1, 0.2), (0.3, 0.9), (0.2, 0.1)])
    ]
    found = rank_heads(rows)
    assert [place[2] for place in found] == [2, 3, 1, 0]
    assert list(found.values()) == ["sink 0.300", "sink 0.200", "previous 0.200", ""]


def test_padding_alone_has_no_cells():
    none = draw((0, 0))
    records = (none, draw(), none)
    recording = Recording(model="Tiny", records=records, sequences=(0, 1, 2))
    assert [x["sequence"] for x in read_meta(make_page(recording))["records"]] == [1]
    with pytest.raises(OptionError, match="nothing to show"):
        make_page(make_recording(none))
    other = replace(none, name="other")  # a layer that never had any
    meta = read_meta(make_page(make_recording(draw(), other)))
    assert [x["name"] for x in meta["layers"]] == [draw().name, "other"]


def test_heads_may_be_numbers_of_numpy():
    page = make_page(make_recording(draw()), heads={np.int64(0): np.asarray([1])})
    assert read_meta(page)["records"][0]["heads"] == [1]


def test_nothing_recorded_is_no_page():
    with pytest.raises(OptionError, match="nothing to show"):
        make_page(make_recording())


def test_only_our_script_and_style_may_run():
    hostile = ("</script><script>alert(1)</script>", "\ud83d", "<!--", "x" * 10_000)
    page = make_page(make_recording(draw((4, 4), heads=2), texts=hostile))
    html = page.html.decode()
    assert "<script>alert" not in html
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    scripts = re.findall(r'<script type="module">(.*?)</script>', html, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    for (text,), directive in ((scripts, "script-src"), (styles, "style-src")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert read_meta(page)["sequences"][0]["texts"] == list(hostile)
    assert not re.search(r"\b(src|href)=\"(?!data:|#)", html)


def test_modules_have_only_the_two_forms_that_are_joined():
    for path in ASSETS.glob("*.js"):
        rest = EXPORT.sub("", IMPORT.sub("", path.read_text("utf-8")))
        assert not re.search(r"^import\b|\bimport\(", rest, re.MULTILINE), path.name
        entry = re.search(r"^export\b.*", rest, re.MULTILINE)
        assert entry is None or entry[0] == "export default { render };", path.name
        lines = SPARE.sub("", path.read_text("utf-8")).splitlines()
        odd = [x for x in lines if x.count("`") % 2]  # their indentation would count
        assert odd == [], path.name
    joined = join_modules("offline_page.js")
    assert len(joined) < 185_000  # a page has it all
    assert joined.count("class Page ") == joined.count("class Ink ") == 1
    assert "</script" not in joined.lower()


def test_the_file_is_what_was_said(tmp_path):
    page = Seen(make_recording(draw((9, 9)))).page(tmp_path / "map.html")
    assert (tmp_path / "map.html").read_bytes() == page.html
    assert (tmp_path / "map.html").stat().st_size == page.size
