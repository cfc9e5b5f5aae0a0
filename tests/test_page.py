"""A page: factors are the logits, rounding is as fine as it says, the file is safe."""

import base64
import hashlib
import json
import math
import re
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
from regard.show.page import make_page
from regard.show.page_parts import pack_mask
from regard.show.script_bundle import ASSETS, EXPORT, IMPORT, join_modules


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


def test_a_long_bias_is_refused_in_a_sentence():
    record = draw((4, 2049), heads=1, shared=1, bias=bias(1, (4, 2049)))
    with pytest.raises(OptionError, match="holds it up to 2048 tokens"):
        make_page(make_recording(record))


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
    joined = join_modules("offline_page.js")
    assert joined.count("class Page ") == joined.count("class Ink ") == 1
    assert "</script" not in joined.lower()


def test_the_file_is_what_was_said(tmp_path):
    page = Seen(make_recording(draw((9, 9)))).page(tmp_path / "map.html")
    assert (tmp_path / "map.html").read_bytes() == page.html
    assert (tmp_path / "map.html").stat().st_size == page.size
