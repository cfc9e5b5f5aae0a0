"""Lists of weights: every entry, the rest of each row, and what fits into a page."""

import base64
import json
import re
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

import regard
from regard.masks.patterns import causal, per_head, window
from regard.recording.record import Record, Recording
from regard.show import page_lists
from regard.show.page import make_page
from regard.show.page_lists import LEASTS, choose_least, fit_lists
from regard.show.weight_lists import (
    ListedWeights,
    WholeTiles,
    list_matrix,
    measure_step,
    pack_lists,
)
from regard.stats.reducer_check import check_reducer
from regard.stats.tile_walk import walk

N = 70


def draw(seed=0, *, n=(N, N), heads=4, mask=None, **more):
    """Return a record of random numbers in float64."""
    rng = np.random.default_rng(seed)
    q = torch.tensor(rng.normal(size=(heads, n[0], 8)) * 2)
    k = torch.tensor(rng.normal(size=(2, n[1], 8)) * 2)
    options = {"sink": more.get("sink")}
    done = regard.attention(q, k, k, mask, scale=0.4, q_start=0, **options)
    return Record(
        name=f"layer.{seed}",
        q=q,
        k=k,
        lse=done.lse,
        q_positions=torch.arange(n[0]),
        k_positions=torch.arange(n[1]),
        mask=mask,
        scale=0.4,
        **more,
    )


MASKS = [causal(), window(5), causal(), causal() & window(3)]
RECORDS = {
    "causal": lambda: draw(mask=causal()),
    "both ways": lambda: draw(1, n=(N, 40)),
    "by head": lambda: draw(2, mask=per_head(MASKS)),
    "sink": lambda: draw(3, mask=causal(), sink=torch.arange(4.0).double()),
}


def unpack(data, heads, n, least, steps):
    """Return the weights (heads, n_q, n_k), 0 where none is listed, and the rests."""
    n_q, n_k = n
    raw = np.frombuffer(zlib.decompress(data), np.uint8).astype(np.int64)

    def take(planes, count):
        nonlocal raw
        found, raw = raw[: planes * count].reshape(planes, count), raw[planes * count :]
        return sum(x << 8 * (planes - 1 - i) for i, x in enumerate(found))

    rest = take(1, heads * n_q).reshape(heads, n_q)
    counts = take(3, heads * n_k).reshape(heads, n_k)
    gaps, codes = take(3, counts.sum()), take(2, counts.sum())
    assert not raw.size
    weights, at = np.zeros((heads, n_q, n_k)), 0
    for h in range(heads):
        for j in range(n_k):
            i = -1
            for _ in range(counts[h, j]):
                i += 1 + gaps[at]
                weights[h, i, j] = least ** (1 - codes[at] / (steps - 1))
                at += 1
    return weights, np.where(rest == 255, np.nan, rest / 250)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize(("least", "steps"), [(0.05, 256), (0.01, 4096)])
def test_a_list_has_every_weight_from_the_least_on(name, least, steps):
    record = RECORDS[name]()
    right = record.weights().numpy()
    for block in (512, 24):
        (lists,) = walk(record, ListedWeights(least), block=block)
        found, rest = unpack(
            pack_lists(lists, least, steps), 4, right.shape[1:], least, steps
        )
        np.testing.assert_array_equal(found > 0, right >= least)
        off = measure_step(least, steps)
        np.testing.assert_allclose(
            found[found > 0], right[right >= least], rtol=1.001 * off
        )
        others = np.where(right < least, right, 0).sum(2)
        assert (rest >= others - 1e-6).all()
        assert (rest <= others + 1 / 250 + 1e-6).all()


def test_a_row_without_weights_is_known():
    record = draw(mask=causal())
    record.k[0, 30, 0] = np.nan  # of two heads
    (lists,) = walk(record, ListedWeights(0.05))
    found, rest = unpack(pack_lists(lists, 0.05, 256), 4, (N, N), 0.05, 256)
    assert (
        np.isnan(rest).tolist() == [[i >= 30 for i in range(N)]] * 2 + [[False] * N] * 2
    )
    assert not found[:2, 30:].any()
    assert found[2:, 30:].any()


def test_a_list_may_be_cut_to_larger_weights():
    record = draw(mask=causal())
    (fine,), (coarse,) = (walk(record, ListedWeights(x)) for x in (0.01, 0.1))
    for one, other in zip(fine, coarse, strict=True):
        cut = one.raise_to(0.1)
        np.testing.assert_array_equal(cut.rows, other.rows)
        np.testing.assert_array_equal(cut.counts, other.counts)
        np.testing.assert_allclose(cut.weights, other.weights)
        np.testing.assert_allclose(cut.rest, other.rest, atol=1e-12)


def test_the_lists_do_not_depend_on_the_tiles():
    check_reducer(ListedWeights(0.05))


def test_a_matrix_is_listed_as_a_head_is():
    record = draw(mask=causal())
    (lists,), (tiles,) = walk(record, ListedWeights(0.02)), walk(record, WholeTiles())
    for head, listed in enumerate(lists):
        whole = np.zeros((N, N), np.float32)
        for rows, keys, weights in tiles[head]:
            whole[rows, keys] = weights
        np.testing.assert_allclose(whole, record.weights()[head], atol=1e-7)
        found = list_matrix(whole, 0.02)
        np.testing.assert_array_equal(found.rows, listed.rows)
        np.testing.assert_allclose(found.rest, listed.rest, atol=1e-5)


def test_the_least_weight_follows_from_the_room():
    records = [draw(i, n=(300, 300), mask=causal()) for i in range(2)]
    entries = sum(int((x.weights() >= LEASTS[0]).sum()) for x in records)
    assert choose_least(records, 10**9) == LEASTS[0]
    assert choose_least(records, 10) is None
    found = [choose_least(records, share * 2 * entries) for share in (1, 0.5, 0.25)]
    assert found == sorted(found)
    assert len(set(found)) == 3
    (lists,) = walk(records[0], ListedWeights(LEASTS[0]))
    whole = len(pack_lists(lists, LEASTS[0], 256)) * 4 / 3
    blobs, about = fit_lists([lists], LEASTS[0], whole + 1)
    assert about["least"] == LEASTS[0]
    blobs, about = fit_lists([lists], LEASTS[0], 0.7 * whole)
    assert about["least"] > LEASTS[0]
    assert len(blobs["lists-0"]) * 4 / 3 <= 0.7 * whole
    dense = records[0].weights().numpy()
    held = np.where(dense >= about["least"], dense, 0).sum() / dense.sum()
    assert about["share"] == pytest.approx(held, abs=1e-3)
    assert fit_lists([lists], LEASTS[0], 10) == ({}, None)


def read(page):
    """Return what a page says, and its blobs."""
    found = re.findall(r'id="([^"]+)">([^<]*)</script>', page.html.decode())
    held = dict(found)
    meta = json.loads(held.pop("meta"))
    return meta, {name: base64.b64decode(x) for name, x in held.items()}


def make_recording(records, n, **more):
    texts = (tuple(f" {i}" for i in range(n)),)
    return Recording(
        model="T",
        records=tuple(records),
        sequences=(0,) * len(records),
        texts=texts,
        **more,
    )


LIMIT = 900_000


@pytest.fixture(autouse=True)
def _no_cells(monkeypatch):
    monkeypatch.setattr("regard.show.page.choose_error", lambda *_: None)


@pytest.fixture(scope="module")
def long():
    return make_recording(
        [draw(i, n=(600, 600), heads=6, mask=causal()) for i in range(4)], 600
    )


@pytest.mark.parametrize("piece", [2**28, 1])
def test_a_page_has_the_lists_of_all_heads_and_their_mean(long, piece, monkeypatch):
    monkeypatch.setattr(page_lists, "PIECE", piece)  # one head at a time
    page = make_page(long, limit=LIMIT)
    meta, blobs = read(page)
    assert page.overview
    lists, mean = meta["lists"], meta["means"]["0"]
    assert (page.least, page.mean) == (lists["least"], mean["least"])
    held, total = 0.0, np.zeros((600, 600))
    for n, record in enumerate(long.records):
        right = record.weights().numpy()
        found, _ = unpack(
            blobs[f"lists-{n}"], 6, (600, 600), lists["least"], lists["steps"]
        )
        np.testing.assert_array_equal(found > 0, right >= lists["least"])
        held += found.sum() / (4 * 6 * 600)
        total += right.sum(0)
    assert page.share == pytest.approx(held, abs=0.01)
    assert f"from {page.least:g} on, which hold {page.share:.0%}" in str(page)
    found, _ = unpack(blobs["mean-0"], 1, (600, 600), mean["least"], mean["steps"])
    right = np.where(total / 24 >= mean["least"], total / 24, 0)
    np.testing.assert_allclose(found[0], right, rtol=2 * mean["off"], atol=1e-9)
    assert mean["heads"] == 24
    assert all(x["lists"] for x in meta["records"])


def test_layers_of_other_places_have_no_mean(long):
    later = replace(long.records[0], q_positions=torch.arange(5, 605), name="late")
    recording = make_recording([*long.records, later], 605)
    meta, blobs = read(make_page(recording, limit=LIMIT))
    assert "means" not in meta
    assert "lists-4" in blobs


def test_layers_that_do_not_read_the_text_have_no_lists(long):
    notes = {"decoders": ["layer.1"]}
    recording = make_recording(long.records, 600, notes=notes)
    meta, blobs = read(make_page(recording, limit=LIMIT))
    assert "lists-0" in blobs
    assert "lists-1" not in blobs
    assert meta["means"]["0"]["heads"] == 18


def test_the_strongest_head_keeps_its_cells_and_more_room_is_more_weights(long):
    found = [make_page(long, limit=LIMIT + more) for more in (-450_000, -250_000, 0)]
    assert found[0].least > found[1].least >= found[2].least
    assert all(len(x.exact) >= 1 for x in found)
