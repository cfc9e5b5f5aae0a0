"""Each preset equals its published formula, written out on the whole matrix."""

import json
import math
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from regard.errors import OptionError
from regard.masks.patterns import causal, window
from regard.record import Record, Recording
from regard.stats import presets
from regard.stats.table import COLUMNS, make_table

N, HEADS, SHARED, WIDTH = 37, 6, 2, 8
TOKENS = tuple(np.random.default_rng(3).integers(0, 6, N).tolist())


def draw(dtype=torch.float64, mask=None, n_q=N):
    """Return a record, and its weights (H, Nq, N) computed here."""
    rng = torch.Generator().manual_seed(5)
    q = torch.randn(HEADS, n_q, WIDTH, generator=rng, dtype=torch.float64) * 2
    k = torch.randn(SHARED, N, WIDTH, generator=rng, dtype=torch.float64)
    scores = q @ k.repeat_interleave(HEADS // SHARED, 0).mT / math.sqrt(WIDTH)
    rows, keys = torch.arange(N - n_q, N), torch.arange(N)
    scores = scores.masked_fill(keys > rows[:, None], -math.inf)
    if mask is not None:
        scores = scores.masked_fill(keys < rows[:, None] - mask, -math.inf)
    record = Record(
        name="layer",
        q=q.to(dtype),
        k=k.to(dtype),
        lse=scores.logsumexp(-1).to(dtype),
        scale=1 / math.sqrt(WIDTH),
        q_positions=rows,
        k_positions=keys,
        mask=causal() if mask is None else causal() & window(mask),
    )
    return record, scores.softmax(-1).numpy(), scores.numpy()


def average(cells):
    return np.array([np.mean(x) for x in cells])


def find_same(h, w):
    """Return the weights on the keys after the last earlier same token."""
    found = []
    for i in range(N):
        for j in reversed(range(i)):
            if TOKENS[j] == TOKENS[i]:
                found.append(w[h, i, j + 1])
                break
    return found


def copy_needle(w, first, last):
    scores = []
    for h in range(HEADS):
        copied = set()
        for i in range(N - 1):
            j = int(w[h, i].argmax())
            if first <= j < last and TOKENS[j] == TOKENS[i + 1]:
                copied.add(TOKENS[j])
        scores.append(len(copied) / len(set(TOKENS[first:last])))
    return np.array(scores)


def look_back(w, context):
    rows = []
    for i in range(context, N):
        back, new = w[:, i, :context].mean(-1), w[:, i, context : i + 1].mean(-1)
        rows.append(back / (back + new))
    return np.stack(rows, 1)


def group(x, how):
    return getattr(x.reshape(SHARED, HEADS // SHARED, *x.shape[1:]), how)(1)


def snap(w, last, pool):
    scores = torch.tensor(group(w[:, -last:].mean(1), "mean")[:, : N - last])
    padded = F.pad(scores, (pool // 2, pool // 2))
    return padded.unfold(-1, pool, 1).mean(-1).numpy()


def duplicate(w):
    same = np.array(TOKENS)[:, None] == np.array(TOKENS)
    pattern = np.tril(same, -1)
    return (w * pattern).sum((1, 2)) / w.sum((1, 2))


DENSE = {
    "sink_rate": (presets.sink_rate, lambda w, _: w[:, :, 0].mean(1)),
    "sink_rate of key 3": (
        lambda r: presets.sink_rate(r, key=3),
        lambda w, _: w[:, 3:, 3].mean(1),
    ),
    "previous_token": (
        presets.previous_token,
        lambda w, _: w[:, range(1, N), range(N - 1)].mean(1),
    ),
    "induction_score": (
        lambda r: presets.induction_score(r, TOKENS),
        lambda w, _: average([find_same(h, w) for h in range(HEADS)]),
    ),
    "duplicate_token": (
        lambda r: presets.duplicate_token(r, TOKENS),
        lambda w, _: duplicate(w),
    ),
    "retrieval_score": (
        lambda r: presets.retrieval_score(r, TOKENS, (4, 12)),
        lambda w, _: copy_needle(w, 4, 12),
    ),
    "lookback_ratio": (
        lambda r: presets.lookback_ratio(r, 20),
        lambda w, _: look_back(w, 20),
    ),
    "attention_tracker": (
        lambda r: presets.attention_tracker(r, (2, 9), (9, 30)),
        lambda w, _: w[:, -1, 2:9].sum(-1) / w[:, -1, 2:30].sum(-1),
    ),
    "rerank_score": (
        lambda r: presets.rerank_score(r, (30, 35), [(0, 10), (10, 25)]),
        lambda w, _: np.stack(
            [w[:, 30:35, a:b].mean(1).sum(-1) for a, b in ((0, 10), (10, 25))], -1
        ),
    ),
    "h2o": (presets.h2o, lambda w, _: w.sum(1)),
    "snapkv": (lambda r: presets.snapkv(r, last=7), lambda w, _: snap(w, 7, 5)),
    "tova": (presets.tova, lambda w, _: w[:, -1].mean(0)),
    "kvzip": (presets.kvzip, lambda w, _: group(w.max(1), "max")),
    "laplacian_diagonal": (
        presets.laplacian_diagonal,
        lambda w, _: w.sum(1) / (N - np.arange(N)) - np.diagonal(w, axis1=1, axis2=2),
    ),
    "alignment": (lambda r: presets.alignment(r, [4, 1]), lambda w, _: w[[4, 1]]),
    "largest_logit": (presets.largest_logit, lambda _, s: s.max((1, 2))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", DENSE)
def test_a_preset_is_its_published_formula(name, dtype):
    fast, slow = DENSE[name]
    record, weights, scores = draw(dtype)
    found, expected = fast(record), slow(weights, scores)
    found = np.asarray(found, dtype="float64")
    size = np.abs(expected).max()
    limit = 1e-5 if dtype == torch.float32 else 1e-11
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= limit * size


def test_a_record_of_a_training_step_has_scores():
    record = draw()[0]
    tensors = {name: getattr(record, name).clone() for name in ("q", "k", "lse")}
    learning = replace(record, **{n: x.requires_grad_() for n, x in tensors.items()})
    for name in ("tova", "h2o", "kvzip", "largest_logit", "previous_token"):
        ask = getattr(presets, name)
        np.testing.assert_allclose(np.asarray(ask(learning)), np.asarray(ask(record)))


def test_windows_count_only_queries_that_may_see_a_key():
    record, weights, _ = draw(mask=9)
    seen = [weights[:, j : j + 10, j].mean(1) for j in range(N)]
    found = presets.sink_rate(record, key=2).values
    np.testing.assert_allclose(found, seen[2], rtol=1e-11)


def test_scores_that_do_not_fit_are_refused():
    with pytest.raises(OptionError, match="fewer queries than keys, and an odd pool"):
        presets.snapkv(draw()[0], last=N)
    with pytest.raises(OptionError, match="an odd pool"):
        presets.snapkv(draw()[0], last=4, pool=4)
    record, short = draw()[0], draw(n_q=3)[0]
    refused = {
        "last=4 and pool=5 for 3 queries": lambda: presets.snapkv(short, last=4),
        "key=37: layer has 37 keys": lambda: presets.sink_rate(record, key=N),
        "key=-1: layer has 37 keys": lambda: presets.sink_rate(record, key=-1),
        "-1 is no head of layer": lambda: presets.alignment(record, [-1]),
        "an empty list of heads": lambda: presets.alignment(record, []),
        "context=0, expected": lambda: presets.lookback_ratio(record, 0),
        "3 queries and 37 keys": lambda: presets.laplacian_diagonal(short),
    }
    needles = ((4, 4), TOKENS), ((4, N + 1), TOKENS), ((4, 6), TOKENS[1:])
    for needle, tokens in needles:
        words = f"needle={needle} in {len(tokens)} tokens"
        refused[words] = partial(presets.retrieval_score, record, tokens, needle)
    for words, ask in refused.items():
        with pytest.raises(OptionError, match=re.escape(words)):
            ask()


EMPTY = {
    "previous_token": (),
    "induction_score": (TOKENS,),
    "duplicate_token": (TOKENS,),
    "retrieval_score": (TOKENS, (0, 4)),
    "lookback_ratio": (4,),
    "rerank_score": ((0, 4), [(4, 8)]),
    "h2o": (),
    "tova": (),
    "kvzip": (),
    "alignment": ([0],),
    "largest_logit": (),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("n_k", [0, N])
@pytest.mark.parametrize("name", EMPTY)
def test_a_record_without_queries_or_keys_has_a_score_of_nothing(name, n_k):
    n_q = 0 if n_k else 3
    record = draw(n_q=n_q or 1)[0]
    record = replace(
        record,
        q=record.q[:, :1].expand(-1, n_q, -1),
        k=record.k[:, :n_k],
        lse=torch.full((HEADS, n_q), -math.inf, dtype=torch.float64),
        q_positions=torch.arange(n_q),
        k_positions=torch.arange(n_k),
    )
    found = np.asarray(getattr(presets, name)(record, *EMPTY[name]).values)
    assert not np.nan_to_num(found, nan=0).any()
    if name == "largest_logit":
        assert np.isnan(found).all()
    if not n_q:
        with pytest.raises(OptionError, match="has no queries"):
            presets.attention_tracker(record, (0, 4), (4, 8))


def make_recording(tokens=TOKENS):
    record, *dense = draw()
    recording = Recording(
        model="Toy", records=(record, record), sequences=(0, 1), tokens=(tokens, ())
    )
    return recording, dense


def test_a_table_has_the_numbers_of_every_head():
    recording, (weights, scores) = make_recording()
    steps = []
    table = make_table(recording, progress=lambda *x: steps.append(x))
    assert steps == [(1, 2), (2, 2)]
    rows = table.rows[table.rows["sequence"] == 0]
    assert rows["head"].tolist() == list(range(HEADS))
    distance = np.arange(N)[:, None] - np.arange(N)
    logs = np.log2(np.where(weights > 0, weights, 1))
    expected = {
        "entropy": -(weights * logs).sum(-1).mean(1),
        "sink": weights[:, :, 0].mean(1),
        "previous": weights[:, range(1, N), range(N - 1)].mean(1),
        "self": np.diagonal(weights, axis1=1, axis2=2).mean(1),
        "induction": average([find_same(h, weights) for h in range(HEADS)]),
        "local": (weights * (distance < 64)).sum(-1).mean(1),
        "distance": (weights * distance).sum(-1).mean(1),
        "logit": scores.max((1, 2)),
    }
    for name, numbers in expected.items():
        np.testing.assert_allclose(rows[name], numbers, rtol=1e-10, err_msg=name)
    unknown = table.rows[table.rows["sequence"] == 1]
    assert np.isnan(unknown["induction"]).all()  # its tokens are not known


def test_a_table_keeps_the_whole_name_of_a_layer(tmp_path):
    record = draw()[0]
    names = ["x" * 200, "y"]
    records = tuple(replace(record, name=name) for name in names)
    recording = Recording(model="Toy", records=records, sequences=(0, 0))
    table = make_table(recording)
    for some in (table, table.by_layer(), table.sort("name")):
        assert set(some.rows["name"].tolist()) == set(names)
    table.to_parquet(tmp_path / "t.parquet")
    assert set(pq.read_table(tmp_path / "t.parquet")["name"].to_pylist()) == set(names)
    np.save(tmp_path / "t.npy", table.rows)
    assert (np.load(tmp_path / "t.npy")["name"] == table.rows["name"]).all()


def test_a_table_is_sorted_and_what_is_not_known_is_last():
    table = make_table(make_recording()[0])
    order = table.sort("induction").rows
    known = order["induction"][:HEADS]
    assert (np.diff(known) <= 0).all()
    assert np.isnan(order["induction"][HEADS:]).all()
    assert (np.diff(table.sort("logit", up=True).rows["logit"]) >= 0).all()
    with pytest.raises(OptionError, match="there is no column 'loud'"):
        table.sort("loud")


def test_a_table_prints_a_dash_for_what_is_not_defined():
    table = make_table(make_recording()[0])
    assert np.isnan(table.rows["induction"][-1])
    for some in (table, table.by_layer()):
        printed = str(some)
        assert "nan" not in printed
        last = printed.splitlines()[-1].split()
        first = len(last) - len(COLUMNS[4:])
        assert last[first + COLUMNS[4:].index("induction")] == "–"
        assert last[first] == f"{some.rows['entropy'][-1]:.3f}"
        several = len({*some.rows["sequence"]}) > 1
        assert printed.startswith("sequence") == several


def test_a_table_prints_and_goes_to_json_and_parquet(tmp_path):
    table = make_table(make_recording()[0])
    first, *lines = str(table.head(2)).splitlines()
    assert first.split() == ["layer", "head", *COLUMNS[4:]]
    assert lines[0].split()[:3] == ["0", "0", f"{table.rows['entropy'][0]:.3f}"]
    table.to_json(tmp_path / "t.json")
    rows = json.loads((tmp_path / "t.json").read_text("utf-8"))
    assert rows[1]["sink"] == table.rows["sink"][1]
    assert rows[-1]["induction"] is None
    table.to_parquet(tmp_path / "t.parquet")
    back = pq.read_table(tmp_path / "t.parquet").to_pydict()
    assert back["name"] == ["layer"] * len(table)
    np.testing.assert_array_equal(back["distance"], table.rows["distance"])
