"""NaN in a record is NaN in every statistic that it reaches, and in no other."""

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from formulas import formulas
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard.arrays import to_numpy
from regard.masks.patterns import array, causal, window
from regard.recording.record import Record, Recording
from regard.stats import published as presets
from regard.stats.cells import cells, induction, offset
from regard.stats.columns import mean_received, received
from regard.stats.nonfinite import find_nonfinite, mark_nonfinite
from regard.stats.over_queries import count_nan, max_of, mean_of
from regard.stats.pooled import PooledMap
from regard.stats.pyramid import Pyramid
from regard.stats.reducers import (
    ColumnMax,
    ColumnSums,
    Entropy,
    LargestLogit,
    OffsetProfile,
    RowSums,
)
from regard.stats.registry import STATISTICS as NUMBERS
from regard.stats.rows import (
    entropy,
    masked_mass,
    mass,
    mean_distance,
    mean_position,
    span_mass,
    span_pairs,
)
from regard.stats.strongest import TopK
from regard.stats.table import make_table
from regard.stats.tile import read_tile
from regard.stats.tile_walk import walk

N, HEADS, SHARED, WIDTH = 23, 4, 2, 8
TOKENS = tuple(np.random.default_rng(1).integers(0, 5, N).tolist())


def make(mask=None, n_q=N, dtype=torch.float64, *, bias=False, softcap=None):
    """Return a record, and which cells may be seen, (H, Nq, N)."""
    rng = torch.Generator().manual_seed(2)
    q = torch.randn(HEADS, n_q, WIDTH, generator=rng, dtype=torch.float64)
    k = torch.randn(SHARED, N, WIDTH, generator=rng, dtype=torch.float64)
    added = torch.randn(1, n_q, N, generator=rng, dtype=torch.float64)
    added[torch.rand(added.shape, generator=rng) < 0.2] = -math.inf
    scores = q @ k.repeat_interleave(HEADS // SHARED, 0).mT
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores + added if bias else scores
    at = torch.arange(N)
    whole = (HEADS, N, N)
    seen = torch.ones(whole, dtype=torch.bool)
    if mask is not None:
        seen = torch.tensor(mask.dense(whole)).expand(whole)
    seen = seen[:, N - n_q :]
    scores = scores.masked_fill(~seen, -math.inf)
    record = Record(
        name="layer",
        q=q.to(dtype),
        k=k.to(dtype),
        lse=scores.logsumexp(-1).to(dtype),
        scale=1.0,
        q_positions=at[N - n_q :],
        k_positions=at,
        mask=mask,
        bias=added.to(dtype) if bias else None,
        softcap=softcap,
    )
    return record, (scores > -math.inf).numpy()


def spoil(record, **places):
    """Return the record with numbers of its arrays replaced."""
    arrays = {}
    for name, (at, value) in places.items():
        arrays[name] = getattr(record, name).clone()
        arrays[name][at] = value
    return replace(record, **arrays)


def list_rows(record):
    """Yield statistics that have a number for each query, (H, Nq)."""
    everything = np.ones((N, 1))
    yield "entropy", entropy(record)
    yield "mass", mass(record, everything).values[..., 0]
    yield "mass on key 3", mass(record, np.eye(N)[:, 3:4]).values[..., 0]
    yield "span_mass", span_mass(record, [(2, 9)]).values[..., 0]
    yield "masked_mass", masked_mass(record, window(2))
    yield "mass within nothing", masked_mass(record, window(2) & ~window(2))
    yield "mean_position", mean_position(record)
    yield "mean_distance", mean_distance(record)
    found = walk(record, RowSums(), LargestLogit(), Entropy(), TopK(3), block=8)
    sums, logit, entropies, top = found
    yield "walk: sums", sums
    yield "walk: logit", logit
    yield "walk: entropy", entropies.entropy
    yield "walk: varentropy", entropies.varentropy
    yield "walk: top", top.weight.values.isnan().all(-1).double().log() * 0
    yield "walk: top, first", top.weight.values[..., 0]
    weights = to_numpy(mark_nonfinite(record).weights())
    yield "weights", weights.sum(-1)


def check(record, seen, rows):
    """Compare where NaN is with where it should be: rows is (H, Nq), bool."""
    np.testing.assert_array_equal(np.isnan(to_numpy(mark_nonfinite(record).lse)), rows)
    blind = ~seen.any(-1)
    for name, named in list_rows(record):
        found = np.isnan(np.asarray(named))
        if name in ("mean_position", "mean_distance"):
            found &= ~blind  # it has no value
        if name == "walk: top":
            found = ~found  # all ranks are NaN
        np.testing.assert_array_equal(found, rows, err_msg=name)
    columns = (seen & rows[..., None]).any(1)  # (H, Nk), that such a row may see
    sums, largest, offsets, pixels = walk(
        record, ColumnSums(), ColumnMax(), OffsetProfile(), PooledMap(1), block=8
    )
    no_one = ~seen.any(1)
    expected = {
        "received": (received(record), columns),
        "mean_received": (mean_received(record), columns | no_one),
        "walk: sums": (sums, columns),
        "walk: largest": (largest, columns),
        "map": (pixels, seen & rows[..., None]),
    }
    for name, (found, where) in expected.items():
        np.testing.assert_array_equal(np.isnan(np.asarray(found)), where, err_msg=name)
    check_offsets(record, offsets, seen & rows[..., None])
    check_levels(record, seen & rows[..., None])


def check_offsets(record, found, lost):
    """Expect NaN at the distances at which such a row looks."""
    apart = to_numpy(record.q_positions)[:, None] - to_numpy(record.k_positions)
    for h in range(HEADS):
        where = np.isin(to_numpy(found.offsets), apart[lost[h]])
        np.testing.assert_array_equal(np.isnan(np.asarray(found.mass))[h], where)


def check_levels(record, lost):
    """Expect NaN in every pixel with such a cell, of maps, pyramids and tiles."""
    (levels,) = walk(record, Pyramid(1), block=8)
    for kind in (levels.max, levels.mass):
        for level, named in kind.items():
            found = np.isnan(np.asarray(named))
            np.testing.assert_array_equal(found, pool(lost, 2**level))
    (maps,) = walk(record, PooledMap((3, 5), "mass"), block=8)
    np.testing.assert_array_equal(np.isnan(np.asarray(maps)), pool(lost, 3, 5))
    tile = read_tile(record, 1, slice(0, 8), slice(0, 8), 4)
    expected = pool(lost[1:2, :8, :8], 2)[0]
    np.testing.assert_array_equal(np.isnan(to_numpy(tile.values)), expected)


def pool(cells, down, across=None):
    """Return which pixels hold a cell that is True."""
    for axis, size in ((1, down), (2, across or down)):
        edges = np.arange(0, cells.shape[axis], size)
        cells = np.logical_or.reduceat(cells, edges, axis=axis)
    return cells


MASKS = {
    "none": None,
    "causal": causal(),
    "window": causal() & window(3),
    "array": array(np.random.default_rng(0).random((N, N)) < 0.3),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("n_q, bad", [(N, math.nan), (7, math.inf)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("extra", [{}, {"bias": True}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("where", ["q", "k", "lse"])
def test_nan_reaches_the_rows_that_see_it_and_no_other(where, extra, mask, n_q, bad):
    record, seen = make(MASKS[mask], n_q, **extra)
    rows = np.zeros((HEADS, n_q), bool)
    places = {"q": (1, 4, 2), "k": (1, N - 5, 0), "lse": (2, 5)}
    at = places[where]
    if where == "k":
        rows[2:] = seen[2:, :, N - 5]  # the heads that share it
    else:
        rows[at[:2]] = seen[at[:2]].any()
    check(spoil(record, **{where: (at, bad)}), seen, rows)


@settings(deadline=None, max_examples=40)
@given(formulas(N, N, 0, heads=HEADS), st.data())
def test_nan_under_any_mask(mask, data):
    record, seen = make(mask)
    places, rows = {}, np.zeros((HEADS, N), bool)
    at = data.draw(st.integers(0, N - 1))
    kind = data.draw(st.sampled_from(["k", "lse"]))
    if kind == "k":
        places["k"] = ((0, at, 1), math.nan)
        rows[:2] = seen[:2, :, at]
    else:
        places["lse"] = ((3, at), math.nan)
        rows[3, at] = True
    record = spoil(record, **places)
    lost = (seen & rows[..., None]).any(1)
    np.testing.assert_array_equal(np.isnan(np.asarray(entropy(record))), rows)
    np.testing.assert_array_equal(np.isnan(np.asarray(received(record))), lost)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_nan_in_a_masked_key_and_all_rows_and_half_precision(dtype):
    record, seen = make(causal() & window(0, 0), dtype=dtype)
    alone = spoil(record, k=((0, 3, 0), math.nan))
    rows = np.zeros((HEADS, N), bool)
    rows[:2, 3] = True
    check(alone, seen, rows)
    hidden, seen = make(causal(), 7, dtype)
    nobody = replace(hidden, mask=causal() & ~window(3, 3))
    seen &= np.arange(N) < np.arange(N - 7, N)[:, None] - 3
    lse = torch.where(torch.as_tensor(seen.any(-1)), hidden.lse, -math.inf)
    nobody = spoil(replace(nobody, lse=lse), k=((0, N - 1, 0), math.nan))
    check(nobody, seen, np.zeros((HEADS, 7), bool))
    check(spoil(hidden, lse=(slice(None), math.nan)), make(causal(), 7)[1], np.ones((HEADS, 7), bool))  # fmt: skip


def test_a_query_that_sees_no_key_is_not_lost():
    record, seen = make(causal() & ~causal(), 7)
    assert not seen.any()
    record = spoil(record, q=((1, 2, 0), math.nan))
    check(record, seen, np.zeros((HEADS, 7), bool))
    position = mean_position(record)
    assert position.missing.all()
    assert np.isnan(np.asarray(mean_of(position))).all()
    assert not count_nan(position).any()


def test_a_bias_that_is_nan_reaches_its_row_alone():
    record, seen = make(causal(), bias=True)
    at = np.argwhere(seen[0])[30]
    rows = np.zeros((HEADS, N), bool)
    rows[:, at[0]] = True
    for bad in (math.nan, math.inf):
        check(spoil(record, bias=((0, *at), bad)), seen, rows)
    check(spoil(record, bias=((0, 2, 9), math.nan)), seen, rows & False)  # masked


def test_numpy_records_are_treated_alike():
    record, seen = make(causal())
    arrays = {x: getattr(record, x).numpy().copy() for x in ("q", "k", "lse")}
    arrays["k"][1, 7, 0] = math.nan
    places = {x: getattr(record, x).numpy() for x in ("q_positions", "k_positions")}
    spoiled = replace(record, **arrays, **places)
    rows = np.zeros((HEADS, N), bool)
    rows[2:] = seen[2:, :, 7]
    check(spoiled, seen, rows)


def test_finite_records_are_returned_as_they_are():
    for record, _ in (make(), make(causal(), bias=True, softcap=1.0)):
        assert find_nonfinite(record) is None
        assert mark_nonfinite(record) is record
    plain = make(causal())[0]
    huge = replace(plain, q=torch.full_like(plain.q, 1e308))  # their sum is inf
    assert find_nonfinite(huge) is None


def test_a_mean_leaves_out_what_is_missing_and_not_what_is_nan():
    record = spoil(make(causal())[0], lse=((1, 0), math.nan))
    before = offset(record, 1)
    assert before.missing[:, 0].all()
    assert not before.missing[:, 1:].any()
    assert np.isfinite(np.asarray(mean_of(before))).all()  # row 0 has none before it
    assert count_nan(before).tolist() == [0, 0, 0, 0]
    itself = offset(record, 0)
    assert count_nan(itself).tolist() == [0, 1, 0, 0]
    np.testing.assert_array_equal(
        np.isnan(np.asarray(mean_of(itself))), [False, True, False, False]
    )
    assert np.isnan(np.asarray(cells(record, [0], [0])))[1].all()
    (logits,) = walk(record, LargestLogit())
    assert np.isnan(np.asarray(max_of(logits))).tolist() == [False, True, False, False]
    shared = before.share(SHARED, "mean")
    assert shared.missing.shape == shared.values.shape
    assert shared.missing[:, 0].all()
    assert not shared.missing[:, 1:].any()
    assert induction(record, TOKENS).missing[:, 0].all()


def test_nan_outside_a_span_does_not_reach_it():
    record = spoil(make(causal())[0], lse=((1, 12), math.nan))
    found = np.asarray(span_pairs(record, [(0, 9), (9, 20)], [(0, 5)], per="query"))
    expected = np.zeros((HEADS, 2, 1), bool)
    expected[1, 1] = True
    np.testing.assert_array_equal(np.isnan(found), expected)


SCORES = {  # with NaN in the weights of head 1 at the last query but one
    "sink_rate": (),
    "visible_sink_rate": (),
    "previous_token": (),
    "previous_token_share": (),
    "induction_score": (TOKENS,),
    "prefix_matching": (TOKENS,),
    "duplicate_token": (TOKENS,),
    "rerank_score": ((15, N), [(0, 6)]),
    "h2o": (),
    "snapkv": (),
    "laplacian_diagonal": (),
    "visible_laplacian_diagonal": (),
    "largest_logit": (),
    "largest_softmax_logit": (),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SCORES)
def test_a_score_that_counts_a_row_with_nan_is_nan(name):
    record = make(causal())[0]
    more = {"last": 4} if name == "snapkv" else {}
    fine = np.asarray(getattr(presets, name)(record, *SCORES[name], **more))
    record = spoil(record, lse=((1, N - 2), math.nan))
    found = np.asarray(getattr(presets, name)(record, *SCORES[name], **more))
    lost = np.isnan(found).reshape(HEADS, -1)
    assert lost.any(1).tolist() == [False, True, False, False]
    assert not np.isnan(fine).any()
    kept = ~np.isnan(found)
    np.testing.assert_allclose(found[kept], fine[kept], rtol=1e-9)


def test_scores_over_heads_or_of_few_rows_are_nan_where_these_are():
    record = spoil(make(causal())[0], lse=((1, N - 2), math.nan))
    last = spoil(make(causal())[0], lse=((1, N - 1), math.nan))
    assert not np.isnan(np.asarray(presets.tova(record))).any()
    assert np.isnan(np.asarray(presets.tova(last))).all()
    one = [False, True, False, False]
    tracked = presets.attention_tracker, presets.instruction_attention
    for score, spans in zip(tracked, (((0, 4), (4, 9)), ((0, 4),)), strict=True):
        assert not np.isnan(np.asarray(score(record, *spans))).any()
        assert np.isnan(np.asarray(score(last, *spans))).tolist() == one
    for score in (presets.retrieval_score, presets.retrieval_rate):
        found = score(record, TOKENS, (2, 8), prompt=20)
        assert np.isnan(found.values).tolist() == one
        assert not found.missing.any()
        late = score(last, TOKENS, (2, 8), prompt=20)  # it decodes nothing
        assert np.isfinite(late.values).all()
    zipped = np.asarray(presets.kvzip(record, (0, 9)))  # (groups, keys)
    assert np.isnan(zipped).all(1).tolist() == [True, False]
    grouped = np.asarray(presets.observed_attention(record))
    assert np.isnan(grouped).any(1).tolist() == [True, False]
    back = np.asarray(presets.lookback_ratio(record, 10))
    assert np.isnan(back[1]).tolist() == [False] * (N - 12) + [True, False]
    rows = np.asarray(presets.alignment_rows(record, [1]))
    assert np.isnan(rows).all(-1)[0].tolist() == [False] * (N - 2) + [True, False]
    assert np.isnan(np.asarray(presets.alignment(record, [1]))).all()
    ranked = presets.calibrated_rerank_score(
        [record], [make(causal())[0]], (15, N), (15, N), [(0, 9)]
    )
    assert np.isnan(np.asarray(ranked)).all()


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_that_is_not_positive_gives_the_right_number_or_nan(scale):
    record, seen = make(causal())
    logits = np.where(
        seen, record.q @ record.k.repeat_interleave(2, 0).mT * scale, -np.inf
    )
    mass = np.exp(logits).sum(-1, keepdims=True)
    w = np.exp(logits) / mass
    record = replace(record, scale=scale, lse=torch.as_tensor(np.log(mass[..., 0])))
    (row,) = make_table(make_recording(record)).by_layer().rows
    right = {
        "entropy": -(w * np.log2(np.where(w > 0, w, 1))).sum(-1).mean(),
        "sink": w[..., 0].mean(),
        "self": np.diagonal(w, axis1=1, axis2=2).mean(),
        "logit": logits.max(),
    }
    for name, number in right.items():
        assert np.isnan(row[name]) or row[name] == pytest.approx(number), name
        assert np.isfinite(row[name]) or row["nan_rows"] > 0


def make_recording(*records):
    return Recording(
        model="Toy", records=records, sequences=(0,) * len(records), tokens=(TOKENS,)
    )


def test_a_table_says_nan_and_how_many_rows_have_it(tmp_path):
    fine = make(causal())[0]
    record = spoil(fine, k=((1, N - 3, 0), math.nan))
    recording = make_recording(fine, replace(record, name="other"))
    table = make_table(recording)
    lost = [0] * 6 + [3, 3]
    assert table.rows["nan_rows"].tolist() == lost
    for name in NUMBERS:
        found = np.isnan(table.rows[name])
        np.testing.assert_array_equal(found, np.array(lost) > 0, err_msg=name)
    printed = str(table).splitlines()
    assert printed[8].split() == ["1", "3", *["nan"] * len(NUMBERS)]
    assert printed[-2:] == [
        f"NaN in sequence 0, layer 1, head {h}: 3 queries" for h in (2, 3)
    ]
    assert "nan" not in str(make_table(make_recording(fine))).lower()
    layers = table.by_layer()
    assert layers.rows["nan_rows"].tolist() == [0, 6]
    assert np.isnan(layers.rows["sink"]).tolist() == [False, True]
    assert str(layers).splitlines()[-1] == "NaN in sequence 0, layer 1: 6 queries"
    for up in (True, False):
        order = table.sort("sink", up=up)
        assert np.isnan(order.rows["sink"]).tolist() == [False] * 6 + [True] * 2
        words = str(order.head(3)).splitlines()[-1]
        assert words == "NaN in 2 rows of the table not listed here"
    table.to_json(tmp_path / "t.json")
    rows = json.loads((tmp_path / "t.json").read_text("utf-8"))
    assert [row["nan_rows"] for row in rows] == lost
    assert rows[-1]["entropy"] is None
    table.to_parquet(tmp_path / "t.parquet")
    assert pq.read_table(tmp_path / "t.parquet")["nan_rows"].to_pylist() == lost


def test_a_number_that_nobody_has_is_a_dash_beside_nan():
    fine = make(causal())[0]
    table = make_table(replace(make_recording(fine), tokens=()))
    assert table.rows["nan_rows"].tolist() == [0] * HEADS
    assert str(table).count("–") == HEADS
    many = make_recording(*(spoil(fine, lse=(slice(None), math.nan)),) * 3)
    assert str(make_table(many)).endswith("NaN in 4 rows of the table not listed here")


def test_a_query_whose_scores_are_all_minus_infinity_has_weights_of_0():
    q, k = np.ones((1, 3, 2)), np.ones((1, 3, 2))
    q[0, 1] = -math.inf
    lse = regard.attention(q, k, k).lse
    assert lse[0, 1] == -math.inf
    at = np.arange(3)
    record = Record(name="layer", q=q, k=k, lse=lse, scale=2**-0.5, q_positions=at, k_positions=at)  # fmt: skip
    assert to_numpy(entropy(record).values)[0].round(3).tolist() == [1.099, 0, 1.099]
    np.testing.assert_allclose(received(record).values[0], np.full(3, 2 / 3))
