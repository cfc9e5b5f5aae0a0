"""What the map is drawn from, against the dense square in float64."""

import json
import math
import threading
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from regard.errors import OptionError
from regard.masks.patterns import causal, per_head, prefix, where, window
from regard.recording.record import Record, Recording
from regard.seen import Seen
from regard.show import log_codes as coding
from regard.show import map_source as module
from regard.show.background_jobs import Jobs, LruCache
from regard.show.log_codes import decode, encode_weights
from regard.show.map_source import MapSource, MissingError, Spot, UnfinishedError
from regard.show.zoom_levels import measure_levels, preview

STEP = 5e-4  # 0.05 %, what is promised
TINY = 2.0**-30
BLIND = where(lambda b, h, q, k: (q % 3 == 0) & (k % 2 == 0))
CASES = {  # queries, keys and mask
    "causal": (700, 700, causal()),
    "causal after 300 keys": (70, 370, causal()),
    "window": (530, 530, causal() & window(9)),
    "none": (257, 257, None),
    "cross-attention": (70, 1300, None),
    "two tiles of coarse pixels": (40, 2500, None),
    "tall": (1100, 33, None),
    "blind rows": (300, 300, BLIND),
    "array": (140, 140, "array"),
    "one": (1, 1, causal()),
    "five": (5, 5, causal()),
}


@cache
def make(name, dtype="float64"):
    """Return a record of 2 heads that share one, its weights and who may see whom."""
    n_q, n_k, mask = CASES[name]
    rng = np.random.default_rng(7)
    q, k = rng.normal(size=(2, n_q, 8)), rng.normal(size=(1, n_k, 8))
    q_at, k_at = np.arange(n_q) + max(0, n_k - n_q), np.arange(n_k)
    allowed = np.ones((n_q, n_k), bool)
    if mask == "array":
        allowed = rng.random((n_q, n_k)) < 0.02
        mask = torch.from_numpy(allowed[None])
    elif mask is not None:
        one = np.zeros((1, 1, 1, 1), int)
        cells = mask(one, one, q_at.reshape(1, 1, -1, 1), k_at.reshape(1, 1, 1, -1))
        allowed = np.broadcast_to(cells[0, 0], allowed.shape)
    q, k = (x.astype(dtype) for x in (q, k))
    logits = 2.0 * np.einsum("hid,jd->hij", q.astype(float), k[0].astype(float))
    logits = np.where(allowed, logits, -math.inf)
    top = np.maximum(logits.max(-1, keepdims=True), -1e9)
    total = np.exp(logits - top).sum(-1)
    weights = np.exp(logits - top) / np.where(total > 0, total, 1)[..., None]
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top[..., 0]).astype(dtype)
    lse[~allowed.any(1)[None].repeat(2, 0)] = -math.inf
    arrays = {"q": q, "k": k, "lse": lse, "q_positions": q_at, "k_positions": k_at}
    arrays = {name: torch.from_numpy(x) for name, x in arrays.items()}
    record = Record(name="layer.0", scale=2.0, mask=mask, **arrays)
    assert np.abs(record.weights().numpy() - weights).max() < 1e-4
    return record, weights, allowed


def pool(x, side, how):
    """Return pixels of the dense square; `any` for who may see whom."""
    rows, keys = (np.arange(0, n, side) for n in x.shape)
    if how == "mass":
        n = np.diff([*rows, x.shape[0]])[:, None]
        return np.add.reduceat(np.add.reduceat(x, rows, 0), keys, 1) / n
    best = np.maximum if how == "max" else np.logical_or
    return best.reduceat(best.reduceat(x, rows, 0), keys, 1)


@pytest.fixture
def open_source():
    """Return a source of some records, and close it in the end."""
    made = []

    def make_source(*records, **options):
        recording = Recording(
            model="Model", records=records, sequences=(0,) * len(records)
        )
        made.append(MapSource(recording, **options))
        return made[-1]

    yield make_source
    for each in made:
        each.close()


def fetch_whole(source, level, how, head=1):
    """Return a whole level, put together from its tiles."""
    (n_q, n_k), _, _ = measure_levels(source.find(0, 0))
    span = 256 << level
    return np.block(
        [
            [
                source.tile(Spot(0, 0, head), level=level, x=x, y=y, how=how).codes
                for x in range(math.ceil(n_k / span))
            ]
            for y in range(math.ceil(n_q / span))
        ]
    )


def check_codes(codes, weights, allowed):
    """Hold codes against pixels of the definition."""
    assert codes.dtype == np.uint16
    assert codes.shape == weights.shape
    assert ((codes == 0) == ~allowed).all()
    near = np.abs(weights / TINY - 1) < 1e-3  # may fall on either side
    tiny = allowed & ~near & (weights < TINY)
    assert (codes[tiny] == 1).all()
    large = allowed & ~near & (weights > TINY)
    assert np.abs(decode(codes)[large] / weights[large] - 1).max(initial=0) < STEP


def test_codes_are_what_is_agreed():
    weights = np.array([[1.0, 0.5, TINY, TINY * 0.999, 0.0, 0.25, math.nan, 1.01]])
    allowed = np.array([[True] * 5 + [False] + [True] * 2])
    half, one, nan = 2 + round(29 / 30 * 65_532), 65_534, 65_535
    assert encode_weights(weights, allowed).tolist() == [
        [one, half, 2, 1, 1, 0, nan, one]
    ]
    assert encode_weights(weights * math.nan, allowed).tolist() == [
        [nan] * 5 + [0] + [nan] * 2
    ]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_codes_lead_back_to_the_weight(dtype):
    weights = np.exp2(np.random.default_rng(0).uniform(-30, 0, (300, 400)))
    back = decode(encode_weights(weights.astype(dtype), np.ones(weights.shape, bool)))
    assert np.abs(back / weights - 1).max() < 1.65e-4  # half a step


def test_every_code_is_its_own():
    codes = np.arange(1, 65_536, dtype=np.uint16)[None]
    assert (encode_weights(decode(codes), codes > 0) == codes).all()
    assert decode(np.array([[1, 65_534]], np.uint16)).tolist() == [[0.0, 1.0]]
    assert np.isnan(decode(np.array([[0, 65_535]], np.uint16))).all()


def test_large_maps_are_coded_in_strips(monkeypatch):
    weights = np.random.default_rng(0).random((97, 31))
    allowed = weights > 0.3
    whole = encode_weights(weights, allowed)
    monkeypatch.setattr(coding, "STRIP", 100)
    assert (encode_weights(weights, allowed) == whole).all()


@pytest.mark.parametrize("how", ["max", "mass"])
@pytest.mark.parametrize("name", CASES)
def test_every_tile_of_every_level_is_the_definition(name, how, open_source):
    record, weights, allowed = make(name)
    source = open_source(record)
    for level in range(measure_levels(record)[2] + 1):
        pixels, seen = pool(weights[1], 2**level, how), pool(allowed, 2**level, "any")
        check_codes(fetch_whole(source, level, how), pixels, seen)


def test_float32_is_as_exact_as_promised(open_source):
    record, weights, allowed = make("causal", "float32")
    source = open_source(record)
    for level in (0, 2, 3, 6):
        for how in ("max", "mass"):
            pixels = pool(weights[0], 2**level, how)
            seen = pool(allowed, 2**level, "any")
            check_codes(fetch_whole(source, level, how, head=0), pixels, seen)


@pytest.mark.parametrize("name", CASES)
def test_rows_add_to_one_at_every_zoom(name, open_source):
    record, weights, _ = make(name)
    source = open_source(record)
    for level in range(measure_levels(record)[2] + 1):
        rows = np.nansum(decode(fetch_whole(source, level, "mass")), 1)
        total = pool(weights[1], 2**level, "mass").sum(1)  # 0 where rows are blind
        assert np.abs(rows - total).max() < 2e-4
    assert total.max() <= 1 + 1e-9
    assert total.min() > 0.3


def test_tiles_say_what_they_are(open_source):
    source = open_source(make("causal")[0])
    tile = source.tile(Spot(0, 0, 0), level=0, x=2, y=1, how="mass")
    assert (tile.codes.shape, tile.how, tile.exact, tile.level) == (
        (256, 188),
        "mass",
        True,
        0,
    )
    data = source.tile(Spot(0, 0, 0), level=9, x=0, y=0).to_bytes()
    low, high = data[:2]
    assert len(data) == 2 * 2 * 2
    assert low + 256 * high == source.tile(Spot(0, 0, 0), level=9, x=0, y=0).codes[0, 0]


@pytest.mark.parametrize(
    ("spot", "place", "words"),
    [
        ((1, 0, 0), {}, "no layer 0 with sequence 1"),
        ((0, 1, 0), {}, "no layer 1 with sequence 0"),
        ((0, 0, 2), {}, "no head 2 in layer 0, expected 0 to 1"),
        ((0, 0, -1), {}, "no head -1"),
        ((0, 0, 0), {"x": 3}, "no tile x=3 y=0 at level 0: 700 queries"),
        ((0, 0, 0), {"y": 3}, "no tile x=0 y=3"),
        ((0, 0, 0), {"x": -1}, "no tile x=-1"),
        ((0, 0, 0), {"level": 11}, "levels 0 to 10"),
        ((0, 0, 0), {"level": 10**8}, "levels 0 to 10"),
        ((0, 0, 0), {"level": -1}, "levels 0 to 10"),
    ],
)
def test_what_is_not_there_is_named(spot, place, words, open_source):
    source = open_source(make("causal")[0])
    with pytest.raises(MissingError, match=words):
        source.tile(Spot(*spot), **{"level": 0, "x": 0, "y": 0} | place)


def test_another_pooling_is_refused(open_source):
    source = open_source(make("causal")[0])
    with pytest.raises(OptionError, match='how=\'mean\', expected "max" or "mass"'):
        source.tile(Spot(0, 0, 0), level=0, x=0, y=0, how="mean")


@pytest.mark.parametrize("name", ["causal", "cross-attention", "blind rows", "one"])
def test_rows_and_columns_are_exact(name, open_source):
    record, weights, _ = make(name)
    source, (n_q, n_k) = open_source(record), weights[1].shape
    for i in {0, 1 % n_q, n_q // 2, n_q - 1}:
        row = weights[1, i]
        found = source.row(Spot(0, 0, 1), i)
        seen = row[row > 0]
        assert found["total"] == pytest.approx(row.sum(), abs=1e-12)
        entropy = -(seen * np.log2(seen)).sum()
        assert found["entropy"] == pytest.approx(entropy, abs=1e-9)
        order = [int(j) for j in np.argsort(-row, kind="stable")[:20] if row[j] > 0]
        assert [x["index"] for x in found["top"]] == order
        assert [x["weight"] for x in found["top"]] == pytest.approx(row[order].tolist())
    for j in {0, n_k // 2, n_k - 1}:
        column = weights[1, :, j]
        found = source.column(Spot(0, 0, 1), j)
        assert found["total"] == pytest.approx(column.sum(), rel=1e-9)
        order = [i for i in np.argsort(-column, kind="stable")[:20] if column[i] > 0]
        assert [x["index"] for x in found["top"]] == order
        shares = column[column > 0] / max(column.sum(), TINY)
        entropy = -(shares * np.log2(shares)).sum()
        assert found["entropy"] == pytest.approx(entropy, abs=1e-6)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(("verb", "n"), [("row", 70), ("column", 1300)])
def test_lines_past_the_end_are_not_there(verb, n, open_source):
    ask = getattr(open_source(make("cross-attention")[0]), verb)
    ask(Spot(0, 0, 0), n - 1)
    for at in (n, -1):
        with pytest.raises(MissingError, match=f"{at}, expected 0 to {n - 1}"):
            ask(Spot(0, 0, 0), at)


@pytest.mark.parametrize("name", CASES)
def test_thumbnails_are_maps_of_at_most_64_pixels(name, open_source):
    record, weights, allowed = make(name)
    sheet = open_source(record).gallery(0, 0)
    assert sheet.codes.shape[0] == 2
    assert max(sheet.codes.shape[1:]) <= 64
    assert max(sheet.codes.shape[1:]) > 32 or sheet.level == 0
    for codes, cells in zip(sheet.codes, weights, strict=True):
        seen = pool(allowed, 2**sheet.level, "any")
        check_codes(codes, pool(cells, 2**sheet.level, "max"), seen)


def test_a_preview_is_the_middle_query_of_each_pixel():
    record, weights, allowed = make("causal")
    sheet = preview(record, 1, 4, (slice(0, 4096), slice(0, 4096)))
    rows = [(first + min(first + 16, 700)) // 2 for first in range(0, 700, 16)]
    keys = np.arange(0, 700, 16)
    seen = np.logical_or.reduceat(allowed[rows], keys, 1)
    check_codes(sheet.codes, np.add.reduceat(weights[1, rows], keys, 1), seen)
    assert (sheet.exact, sheet.how) == (False, "mass")
    assert sheet.note == "preview: 44 of 700 queries"


def test_a_preview_of_an_array_mask_takes_its_rows():
    record, weights, _ = make("array")
    sheet = preview(record, 0, 3, (slice(0, 2048), slice(0, 2048)))
    rows = [(first + min(first + 8, 140)) // 2 for first in range(0, 140, 8)]
    total = np.nansum(decode(sheet.codes), 1)
    assert np.abs(total - weights[0, rows].sum(1)).max() < 2e-4


def test_a_slow_pass_is_previewed_for_mass_and_never_for_max(open_source, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    monkeypatch.setattr(module, "WAIT", 0.05)
    source, gate = open_source(make("causal")[0]), threading.Event()
    source.passes.ask("in the way", lambda: gate.wait(10), -math.inf)
    place = {"level": 4, "x": 0, "y": 0}
    assert not source.tile(Spot(0, 0, 1), **place, how="mass").exact
    with pytest.raises(UnfinishedError, match="still being made"):
        source.tile(Spot(0, 0, 1), **place, how="max")
    assert source.tile(Spot(0, 0, 1), level=0, x=0, y=0, how="max").exact  # live
    gate.set()
    monkeypatch.setattr(module, "WAIT", 60)
    assert source.tile(Spot(0, 0, 1), **place, how="max").exact
    assert source.tile(Spot(0, 0, 1), **place, how="mass").exact


def test_a_head_is_passed_over_once(open_source):
    told = []
    source = open_source(
        make("causal")[0], report=lambda *x: told.append(x), limit=2**20
    )
    for level in (3, 5, 10, 3):
        for how in ("max", "mass"):
            source.tile(Spot(0, 0, 0), level=level, x=0, y=0, how=how)
    assert told == [("layer 0, head 0", 1, 2), ("layer 0, head 0", 2, 2)]


def test_what_is_kept_is_bounded_in_bytes(open_source):
    source = open_source(make("causal")[0], limit=50_000)
    place = {"level": 3, "x": 0, "y": 0}
    first = source.tile(Spot(0, 0, 0), **place).codes
    size = source.kept.size
    assert 88 * 88 * 2 * 2 < size < 50_000
    source.tile(Spot(0, 0, 1), **place)
    assert source.kept.size == size
    assert list(source.kept.things) == [Spot(0, 0, 1)]
    assert (source.tile(Spot(0, 0, 0), **place).codes == first).all()


def test_the_last_asked_stays():
    kept = LruCache(10)
    for key in "abc":
        kept.put(key, key.upper(), 3)
    assert kept.get("a") == "A"
    kept.put("d", "D", 3)
    assert [kept.get(x) for x in "abcd"] == ["A", None, "C", "D"]
    kept.put("d", "E", 4)
    assert (kept.get("d"), kept.size) == ("E", 10)
    kept.put("large", 1, 99)
    assert (list(kept.things), kept.size) == (["large"], 99)


def test_the_most_urgent_work_is_first_and_none_is_done_twice():
    jobs, gate, done = Jobs("test"), threading.Event(), []
    jobs.ask("gate", gate.wait, 0)
    for key, urgency in (("later", 2), ("soon", 1), ("later", 2), ("now", 0)):
        last = jobs.ask(key, lambda key=key: done.append(key), urgency)
    assert jobs.ask("now", lambda: done.append("again"), 5) is last
    end = jobs.ask("end", lambda: done.append("end"), 9)
    gate.set()
    end.result(10)
    assert done == ["now", "soon", "later", "end"]
    failed = jobs.ask("wrong", lambda: 1 / 0, 0)
    with pytest.raises(ZeroDivisionError):
        failed.result(10)
    assert jobs.ask("after", lambda: 5, 0).result(10) == 5
    jobs.close()
    assert not jobs.thread.is_alive()
    with pytest.raises(CancelledError):
        jobs.ask("closed", done.clear, 0)


def test_closing_ends_a_pass_and_whoever_waits_for_it():
    begun = threading.Event()
    record = make("causal")[0]
    recording = Recording(model="M", records=(record,), sequences=(0,))
    caught, source = (
        [],
        MapSource(recording, report=lambda *_: (begun.set(), stall(0.2))),
    )

    def ask(head):
        try:
            source.tile(Spot(0, 0, head), level=3, x=0, y=0)
        except CancelledError:
            caught.append(head)

    threads = [threading.Thread(target=ask, args=(h,)) for h in (0, 1)]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    source.close()
    for thread in threads:
        thread.join(10)
    assert sorted(caught) == [0, 1]
    assert not source.passes.thread.is_alive()


def test_a_row_of_nan_is_ready_for_json(open_source):
    record, _, _ = make("causal after 300 keys")
    record.q[1, 2] = math.nan
    try:
        found = open_source(record).row(Spot(0, 0, 1), 2)
    finally:
        make.cache_clear()
    assert (found["entropy"], found["total"], found["top"]) == (None, None, [])
    assert found["nan"] == 303  # its keys, up to itself
    json.dumps(found, allow_nan=False)


def stall(seconds):
    threading.Event().wait(seconds)


def test_meta_names_everything_there_is(open_source):
    record, _, _ = make("causal after 300 keys")
    cross, _, _ = make("cross-attention")
    rows = torch.tensor([3, 5, 9, *range(20, 87)])
    recording = Recording(
        model="Bart",
        records=(record, replace_name(cross, "cross", q_positions=rows), record),
        sequences=(0, 0, 1),
        tokens=((1, 2, 3), ()),
        texts=(("a", "b", "c"),),
    )
    meta = MapSource(recording).meta()
    assert (meta["model"], meta["title"]) == ("Bart", "Bart")
    titled = replace(recording, notes={"title": "bart-base"})
    assert MapSource(titled).meta()["title"] == "bart-base"
    keys = (
        "cross is cross-attention, whose keys are another sequence; choose the layers "
        "of one stack"
    )
    few = "it needs at least two layers that read these tokens"
    values = 'record the values with regard.watch(model, keep="qkv")'
    ways = [{"value": values, "rollout": x} for x in (keys, few)]
    abc = {"tokens": [1, 2, 3], "texts": ["a", "b", "c"], "count": 3, "blocks": []}
    empty = {"tokens": [], "texts": [], "count": 0, "blocks": []}
    assert meta["sequences"] == [abc | {"ways": ways[0]}, empty | {"ways": ways[1]}]
    assert meta["layers"] == [
        {"name": "layer.0", "heads": 2, "keyHeads": 1, "kind": "decoder"},
        {"name": "cross", "heads": 2, "keyHeads": 1, "kind": "cross"},
    ]
    first = {"layer": 0, "sequence": 0, "nq": 70, "nk": 370, "qStart": 300, "kStart": 0}
    more = {"heads": [0, 1], "causal": True, "finest": 3, "coarsest": 9}
    positions = {"qPositions": None, "kPositions": None}
    positions |= {"qNamed": True, "kNamed": True}
    assert meta["records"][0] == first | more | positions
    assert meta["records"][1]["qPositions"] == rows.tolist()
    assert meta["records"][1]["causal"] is False
    assert meta["records"][2]["sequence"] == 1
    assert meta["levels"] == {"tile": 256}
    assert meta["table"] == []
    json.dumps(meta, allow_nan=False)


def replace_name(record, name, **changes):
    return Record(**vars(record) | {"name": name} | changes)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (causal(), True),
        (window(3), True),
        (window(3, 1), False),
        (BLIND & causal(), True),
        (prefix(3), False),
        (per_head([causal(), window(2)]), True),
        (per_head([causal(), window(2, 2)]), False),
        (~causal(), False),
        (None, False),
        (torch.ones(1, 5, 5, dtype=torch.bool).tril(), True),
        (torch.ones(1, 5, 5, dtype=torch.bool).tril(1), False),
    ],
)
def test_a_mask_that_never_looks_ahead_is_known(mask, expected):
    record, _, _ = make("five")
    changed = replace_name(record, "x", mask=mask)
    recording = Recording(model="M", records=(changed,), sequences=(0,))
    assert MapSource(recording).meta()["records"][0]["causal"] is expected


def test_the_table_comes_when_it_is_complete():
    record, _, _ = make("causal")
    recording = Recording(
        model="M",
        records=(record, replace_name(make("window")[0], "layer.1")),
        sequences=(0, 0),
        tokens=(tuple(i % 50 for i in range(600)),),
    )
    source, table = MapSource(recording), Seen(recording).table().rows
    try:
        source.prepare()
        last = source.chores.ask("last", lambda: None, math.inf)
        last.result(60)
        meta = source.meta()
    finally:
        source.close()
    assert (meta["tableDone"], meta["tableAll"]) == (2, 2)
    assert len(meta["table"]) == len(table) == 4
    for row, expected in zip(meta["table"], table, strict=True):
        assert set(row) == set(table.dtype.names) - {"name"}
        for key, value in row.items():
            if value is None:
                assert math.isnan(expected[key])
            else:
                assert value == pytest.approx(expected[key])
    assert [row["layer"] for row in meta["table"]] == [0, 0, 1, 1]
    assert meta["table"][0]["induction"] is None  # 600 tokens for 700 queries
    assert meta["table"][2]["induction"] is not None
    assert set(source.kept.things) == {(0, 0), (0, 1)}


def test_what_would_take_many_minutes_is_not_made_ahead(open_source, monkeypatch):
    monkeypatch.setattr(module, "CELLS", 2 * 700 * 700 - 1)
    source = open_source(make("causal")[0])
    source.prepare()
    assert source.chores.thread.ident is None
    assert source.meta()["tableAll"] == 0  # so nobody waits for it
