"""Each preset equals its published formula, written out on the whole matrix."""

import json
import math
import re
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from regard.errors import OptionError
from regard.masks.patterns import causal, window
from regard.recording.record import Record, Recording
from regard.stats import published
from regard.stats.registry import STATISTICS
from regard.stats.table import make_table

NUMBERS = list(STATISTICS)
N, HEADS, SHARED, WIDTH, FIRST = 37, 6, 2, 8, 5
TOKENS = tuple(np.random.default_rng(3).integers(0, 6, N + FIRST).tolist())


@dataclass(frozen=True)
class Case:
    """A record, and the whole of its matrix, computed here in float64."""

    record: Record
    w: np.ndarray  # (H, Nq, Nk), the weights
    raw: np.ndarray  # scale q · k
    logits: np.ndarray  # capped, with the bias; -inf where hidden
    q: np.ndarray  # positions
    k: np.ndarray

    def find(self, position):
        """Return the column of a key, None if it is not there."""
        found = np.flatnonzero(self.k == position)
        return int(found[0]) if found.size else None


SETTINGS = {
    "causal": {},
    "window": {"reach": 9},
    "generated": {"n_q": 9},
    "no position 0": {"first": FIRST},
    "keys are missing": {"holes": (3, 17, 18)},
    "sink": {"sink": True},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": True},
    "generated, window, sink, bias": {
        "n_q": 20, "reach": 12, "sink": True, "bias": True,
    },
}  # fmt: skip


def draw(
    dtype=torch.float64,
    *,
    n_q=N,
    reach=None,
    first=0,
    holes=(),
    sink=False,
    softcap=None,
    bias=False,
):
    """Return a case: plain NumPy beside a record of the same numbers."""
    rng = np.random.default_rng(5)
    k_at = np.array([x for x in range(first, first + N) if x not in holes])
    q_at = np.arange(first + N - n_q, first + N)
    q = rng.normal(size=(HEADS, n_q, WIDTH)) * 2
    k = rng.normal(size=(SHARED, k_at.size, WIDTH))
    scale = 1 / math.sqrt(WIDTH)
    raw = np.stack([q[h] @ k[h * SHARED // HEADS].T * scale for h in range(HEADS)])
    logits = raw if softcap is None else softcap * np.tanh(raw / softcap)
    added = rng.normal(size=(1, n_q, k_at.size))
    added[rng.random(added.shape) < 0.2] = -math.inf
    if bias:
        logits = logits + added
    far = q_at[:, None] - k_at
    hidden = far < 0 if reach is None else (far < 0) | (far > reach)
    logits = np.where(hidden, -math.inf, logits)
    extra = rng.normal(size=HEADS)
    with np.errstate(divide="ignore"):
        mass = np.exp(logits).sum(-1) + (np.exp(extra)[:, None] if sink else 0)
        lse = np.log(mass)
    w = np.exp(logits) / np.where(mass == 0, 1, mass)[..., None]
    kind = partial(torch.as_tensor, dtype=dtype)
    record = Record(
        name="layer",
        q=kind(q),
        k=kind(k),
        lse=kind(lse),
        scale=scale,
        q_positions=torch.as_tensor(q_at),
        k_positions=torch.as_tensor(k_at),
        mask=causal() if reach is None else causal() & window(reach),
        sink=kind(extra) if sink else None,
        softcap=softcap,
        bias=kind(added) if bias else None,
    )
    return Case(record, w, raw, logits, q_at, k_at)


def average(found):
    """Return the mean of what each head has."""
    return np.array([np.mean(x) for x in found])


def collect(c, key_of):
    """Return the weights of each head on the key that each query has, if it has one."""
    found = [[] for _ in range(HEADS)]
    for i, at in enumerate(c.q):
        j = c.find(key_of(at))
        for h in range(HEADS):
            if j is not None:
                found[h].append(c.w[h, i, j])
    return found


def find_last_same(at):
    """Return the position after the last earlier same token; -1: there is none."""
    same = [j for j in range(at) if TOKENS[j] == TOKENS[at]]
    return same[-1] + 1 if same else -1


def rate_sink(c, key):
    rows = [i for i, at in enumerate(c.q) if at >= c.k[key]]
    return np.array([sum(c.w[h, i, key] for i in rows) for h in range(HEADS)]) / len(
        rows
    )


def rate_visible_sink(c, key):
    scores = []
    for h in range(HEADS):
        rows = [i for i in range(len(c.q)) if c.logits[h, i, key] > -math.inf]
        scores.append(
            sum(c.w[h, i, key] for i in rows) / len(rows) if rows else math.nan
        )
    return np.array(scores)


def match_prefix(c):
    scores = []
    for h in range(HEADS):
        entries = []
        for i, at in enumerate(c.q):
            for j in range(at):
                column = c.find(j + 1)
                if TOKENS[j] == TOKENS[at] and column is not None:
                    entries.append(c.w[h, i, column])
        scores.append(np.mean(entries))
    return np.array(scores)


def duplicate(c):
    scores = np.zeros(HEADS)
    for i, at in enumerate(c.q):
        for j, key in enumerate(c.k):
            if key < at and TOKENS[key] == TOKENS[at]:
                scores += c.w[:, i, j]
    return scores / c.w.sum((1, 2))


def copy_needle(c, needle, prompt, *, distinct):
    wanted = TOKENS[needle[0] : needle[1]]
    scores = []
    for h in range(HEADS):
        copied = []
        for i, at in enumerate(c.q):
            if not prompt - 1 <= at < len(TOKENS) - 1:
                continue  # no decoding step
            key = c.k[c.w[h, i].argmax()]
            if needle[0] <= key < needle[1] and TOKENS[key] == TOKENS[at + 1]:
                copied.append(TOKENS[key])
        score = (
            len(set(copied)) / len(set(wanted))
            if distinct
            else len(copied) / len(wanted)
        )
        scores.append(score)
    return np.array(scores)


def sum_keys(c, row, first, last):
    """Return the weight of a row on the keys of a span."""
    return c.w[:, row, [j for j, at in enumerate(c.k) if first <= at < last]].sum(-1)


def look_back(c, context):
    rows = []
    for i, at in enumerate(c.q):
        if at >= context:
            back = sum_keys(c, i, 0, context) / context
            new = sum_keys(c, i, context, at + 1) / (at + 1 - context)
            rows.append(back / (back + new))
    return np.stack(rows, 1)


def rerank(c, query, documents):
    rows = [i for i, at in enumerate(c.q) if query[0] <= at < query[1]]
    found = [sum(sum_keys(c, i, *x) for i in rows) / len(rows) for x in documents]
    return np.stack(found, -1)


def rerank_calibrated(cases, questions, documents):
    """Return document scores of in-context re-ranking, token by token."""
    scores = []
    for first, last in documents:
        tokens = []
        for position in range(first, last):
            signs = []
            for c, (a, b) in zip(cases, questions, strict=True):
                rows = [i for i, at in enumerate(c.q) if a <= at < b]
                j = c.find(position)
                signs.append(
                    2
                    * sum(c.w[h, i, j] for h in range(HEADS) for i in rows)
                    / len(rows)
                )
            tokens.append(signs[0] - signs[1])
        least = np.mean(tokens) - 2 * np.std(tokens, ddof=1)
        scores.append(sum(x for x in tokens if x > least))
    return np.array(scores)


def group(x, how):
    return getattr(x.reshape(SHARED, HEADS // SHARED, *x.shape[1:]), how)(1)


def snap(c, last, pool):
    """Return sums over the last rows, then means of neighbours, with zeros outside."""
    scores = c.w[:, -last:].sum(1)[:, : len(c.k) - last]
    half, pooled = pool // 2, np.zeros_like(scores)
    for j in range(scores.shape[1]):
        pooled[:, j] = scores[:, max(0, j - half) : j + half + 1].sum(1) / pool
    return pooled


def count_after(c):
    return np.array([sum(at >= key for at in c.q) for key in c.k])


def zip_keys(c, first, last):
    rows = [i for i, at in enumerate(c.q) if at >= last]
    keys = [j for j, at in enumerate(c.k) if first <= at < last]
    return group(c.w[:, rows][:, :, keys].max(1), "max")


def visible_mean(c):
    seen = (c.logits > -math.inf).sum(1)
    return np.where(seen, c.w.sum(1) / np.maximum(seen, 1), math.nan)


def align(c, heads, frames, width):
    """Return what Whisper computes from the weights of its alignment heads."""
    found = []
    for h in heads:
        w = c.w[h, :, :frames]
        w = w / w.sum(1, keepdims=True)
        z = (w - w.mean(0)) / np.sqrt(((w - w.mean(0)) ** 2).mean(0))
        n, half, rows = z.shape[1], width // 2, []
        for row in z:
            at = [
                [
                    abs(x) if x < n else 2 * (n - 1) - x
                    for x in range(j - half, j + half + 1)
                ]
                for j in range(n)
            ]
            rows.append([sorted(row[x])[half] for x in at])
        found.append(rows)
    return np.array(found)


NEEDLE, PROMPT = (19, 27), 31
DENSE = {
    "sink_rate": (published.sink_rate, lambda c: rate_sink(c, 0)),
    "sink_rate of key 3": (
        lambda r: published.sink_rate(r, key=3),
        lambda c: rate_sink(c, 3),
    ),
    "visible_sink_rate": (
        lambda r: published.visible_sink_rate(r, key=22),
        lambda c: rate_visible_sink(c, 22),
    ),
    "previous_token": (
        published.previous_token,
        lambda c: average(collect(c, lambda at: at - 1)),
    ),
    "previous_token_share": (
        published.previous_token_share,
        lambda c: (
            np.array([sum(x) for x in collect(c, lambda at: at - 1)]) / c.w.sum((1, 2))
        ),
    ),
    "induction_score": (
        lambda r: published.induction_score(r, TOKENS),
        lambda c: average(collect(c, find_last_same)),
    ),
    "prefix_matching": (lambda r: published.prefix_matching(r, TOKENS), match_prefix),
    "duplicate_token": (lambda r: published.duplicate_token(r, TOKENS), duplicate),
    "retrieval_score": (
        lambda r: published.retrieval_score(r, TOKENS, NEEDLE, prompt=PROMPT),
        lambda c: copy_needle(c, NEEDLE, PROMPT, distinct=True),
    ),
    "retrieval_rate": (
        lambda r: published.retrieval_rate(r, TOKENS, NEEDLE, prompt=PROMPT),
        lambda c: copy_needle(c, NEEDLE, PROMPT, distinct=False),
    ),
    "lookback_ratio": (
        lambda r: published.lookback_ratio(r, 30),
        lambda c: look_back(c, 30),
    ),
    "attention_tracker": (
        lambda r: published.attention_tracker(r, (2, 33), (33, 36)),
        lambda c: (
            sum_keys(c, -1, 2, 33) / (sum_keys(c, -1, 2, 33) + sum_keys(c, -1, 33, 36))
        ),
    ),
    "instruction_attention": (
        lambda r: published.instruction_attention(r, (2, 33)),
        lambda c: sum_keys(c, -1, 2, 33),
    ),
    "rerank_score": (
        lambda r: published.rerank_score(r, (30, 35), [(0, 10), (10, 29)]),
        lambda c: rerank(c, (30, 35), [(0, 10), (10, 29)]),
    ),
    "h2o": (published.h2o, lambda c: c.w.sum(1)),
    "observed_attention": (
        published.observed_attention,
        lambda c: group(c.w.sum(1) / count_after(c), "mean"),
    ),
    "snapkv": (lambda r: published.snapkv(r, last=7), lambda c: snap(c, 7, 5)),
    "snapkv_grouped": (
        lambda r: published.snapkv_grouped(r, last=7, pool=3),
        lambda c: group(snap(c, 7, 3), "mean") / 7,
    ),
    "tova": (published.tova, lambda c: c.w[:, -1].mean(0)),
    "kvzip": (lambda r: published.kvzip(r, (6, 33)), lambda c: zip_keys(c, 6, 33)),
    "laplacian_diagonal": (
        published.laplacian_diagonal,
        lambda c: c.w.sum(1) / count_after(c) - np.diagonal(c.w, axis1=1, axis2=2),
    ),
    "visible_laplacian_diagonal": (
        published.visible_laplacian_diagonal,
        lambda c: visible_mean(c) - np.diagonal(c.w, axis1=1, axis2=2),
    ),
    "alignment_rows": (
        lambda r: published.alignment_rows(r, [4, 1]),
        lambda c: c.w[[4, 1]],
    ),
    "largest_logit": (
        published.largest_logit,
        lambda c: np.where(c.logits > -math.inf, c.raw, -math.inf).max((1, 2)),
    ),
    "largest_softmax_logit": (
        published.largest_softmax_logit,
        lambda c: c.logits.max((1, 2)),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", DENSE)
def test_a_preset_is_its_published_formula(name, setting, dtype):
    fast, slow = DENSE[name]
    case = draw(dtype, **SETTINGS[setting])
    if "laplacian" in name and not np.array_equal(case.q, case.k):
        with pytest.raises(OptionError, match="expected the same tokens"):
            fast(case.record)
        return
    found, expected = np.asarray(fast(case.record), dtype="float64"), slow(case)
    size = np.nanmax(np.abs(expected))
    limit = 1e-5 if dtype == torch.float32 else 1e-11
    assert found.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    assert np.nanmax(np.abs(found - expected)) <= limit * size


def test_scores_differ_where_papers_differ():
    """Formulas that give the same numbers on these cases would prove nothing."""
    case = draw(**SETTINGS["window"])
    pairs = (
        ("previous_token", "previous_token_share"),
        ("induction_score", "prefix_matching"),
        ("retrieval_score", "retrieval_rate"),
        ("laplacian_diagonal", "visible_laplacian_diagonal"),
    )
    for names in pairs:
        one, other = (np.asarray(DENSE[name][1](case)) for name in names)
        assert np.nanmax(np.abs(one - other)) > 0.001, names
    capped = draw(**SETTINGS["softcap"])
    logits = [DENSE[x][1](capped) for x in ("largest_logit", "largest_softmax_logit")]
    assert (logits[0] > logits[1] + 1).all()


def test_a_window_lowers_the_sink_rate_as_it_is_published():
    n, reach = 60, 5
    case = draw(reach=reach)
    record = replace(
        case.record,
        q=torch.zeros(HEADS, n, WIDTH, dtype=torch.float64),
        k=torch.zeros(SHARED, n, WIDTH, dtype=torch.float64),
        lse=torch.log(torch.arange(1, n + 1).clamp(max=reach + 1).double()).expand(
            HEADS, n
        ),
        q_positions=torch.arange(n),
        k_positions=torch.arange(n),
    )
    equal = sum(1 / (i + 1) for i in range(reach + 1))  # of queries that may see key 0
    found = [
        float(f(record).values[0])
        for f in (published.sink_rate, published.visible_sink_rate)
    ]
    assert found == pytest.approx([equal / n, equal / (reach + 1)])
    assert found[0] < 0.3 < found[1]  # the paper's threshold


def test_a_logit_far_above_the_cap_does_not_overflow():
    case = draw(torch.float32, softcap=1.5)
    record = replace(case.record, q=case.record.q * 100)  # exp(raw - lse) is inf
    logits = np.where(
        case.logits > -math.inf, 1.5 * np.tanh(case.raw * 100 / 1.5), -math.inf
    )
    lse = np.log(np.exp(logits).sum(-1))
    record = replace(record, lse=torch.as_tensor(lse, dtype=torch.float32))
    expected = np.where(case.logits > -math.inf, case.raw * 100, -math.inf).max((1, 2))
    assert expected.min() > 200
    np.testing.assert_allclose(
        np.asarray(published.largest_logit(record)), expected, rtol=1e-5
    )


@pytest.mark.parametrize("frames", [None, 21, 3])
@pytest.mark.parametrize("width", [1, 7])
def test_alignment_is_what_whisper_aligns(frames, width):
    case = draw()
    record = replace(case.record, mask=None)
    logits = case.raw
    lse = np.log(np.exp(logits).sum(-1))
    whole = replace(case, w=np.exp(logits - lse[..., None]))
    record = replace(record, lse=torch.as_tensor(lse))
    found = published.alignment(record, [4, 1], frames=frames, width=width)
    filtered = width if (frames or N) > width // 2 else 1  # as Whisper, not a few
    expected = align(whole, [4, 1], frames, filtered)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-9)
    with pytest.raises(OptionError, match="width=4, expected an odd"):
        published.alignment(record, [0], width=4)


def test_the_whole_re_ranking_score_subtracts_a_blank_question():
    cases = draw(), draw(softcap=0.7)
    records = [[c.record] * 2 for c in cases]  # two layers
    questions, documents = ((30, 35), (31, 33)), [(0, 10), (10, 29)]
    found = published.calibrated_rerank_score(*records, *questions, documents)
    expected = rerank_calibrated(cases, questions, documents)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-10)
    rng, at = np.random.default_rng(0), np.arange(N)
    weights = [np.tril(rng.random((HEADS, N, N)) + 1) for _ in range(2)]
    weights[1][:, :, 5] *= 50  # what a blank question looks at is an outlier
    weights = [w / w.sum(-1, keepdims=True) for w in map(np.tril, weights)]
    cases = [Case(make_record(torch.as_tensor(w)), w, w, w, at, at) for w in weights]
    records = [[c.record] * 2 for c in cases]
    found = published.calibrated_rerank_score(*records, *questions, documents)
    expected = rerank_calibrated(cases, questions, documents)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-10)
    plain = [
        rerank(c, x, documents).sum(0) * 2
        for c, x in zip(cases, questions, strict=True)
    ]
    assert found.values[0] > plain[0][0] - plain[1][0] + 0.1  # it was left out
    one = published.calibrated_rerank_score(*records, *questions, [(3, 4)])
    assert np.isfinite(np.asarray(one)).all()
    with pytest.raises(OptionError, match="2 and 1 records"):
        published.calibrated_rerank_score(
            records[0], records[1][:1], *questions, documents
        )
    with pytest.raises(OptionError, match="no queries of the question"):
        published.calibrated_rerank_score(*records, (50, 60), (31, 33), documents)


def test_a_prompt_is_no_decoding_step():
    """The strongest key of prompt queries is not counted (Wu et al. 2024)."""
    tokens = [1, 2, 3, 1, 2, 3, 9]
    w = torch.full((1, 7, 7), 1e-3, dtype=torch.float64).tril()
    for query, key in (
        (2, 1),
        (3, 1),
        (4, 2),
        (5, 0),
    ):  # copies 2 and 3 inside the prompt
        w[0, query, key] = 1
    record = make_record(w)
    scores = {
        prompt: float(
            published.retrieval_score(record, tokens, (0, 3), prompt=prompt).values[0]
        )
        for prompt in (3, 4, 6)
    }
    assert scores == pytest.approx({3: 2 / 3, 4: 2 / 3, 6: 0})
    rate = published.retrieval_rate(record, tokens, (0, 3), prompt=4)
    assert float(rate.values[0]) == pytest.approx(2 / 3)
    nothing = published.retrieval_score(record, tokens, (0, 3), prompt=7)
    assert np.isnan(nothing.values).all()
    assert nothing.missing.all()


def make_record(w):
    """Return a record that has these weights, whatever they are: as a bias."""
    heads, n, _ = w.shape
    lse = w.sum(-1).log()
    return Record(
        name="layer",
        q=torch.zeros(heads, n, 2, dtype=w.dtype),
        k=torch.zeros(heads, n, 2, dtype=w.dtype),
        lse=lse,
        scale=1.0,
        q_positions=torch.arange(n),
        k_positions=torch.arange(n),
        mask=causal(),
        bias=w.log(),
    )


def test_a_record_of_a_training_step_has_scores():
    record = draw().record
    tensors = {name: getattr(record, name).clone() for name in ("q", "k", "lse")}
    learning = replace(record, **{n: x.requires_grad_() for n, x in tensors.items()})
    for name in ("tova", "h2o", "sink_rate", "largest_logit", "previous_token"):
        ask = getattr(published, name)
        np.testing.assert_allclose(np.asarray(ask(learning)), np.asarray(ask(record)))


def test_scores_that_do_not_fit_are_refused():
    with pytest.raises(OptionError, match="fewer queries than keys, and an odd pool"):
        published.snapkv(draw().record, last=N)
    with pytest.raises(OptionError, match="an odd pool"):
        published.snapkv_grouped(draw().record, last=4, pool=4)
    record, short = draw().record, draw(n_q=3).record
    refused = {
        "last=4 and pool=5 for 3 queries": lambda: published.snapkv(short, last=4),
        "key=37: layer has 37 keys": lambda: published.sink_rate(record, key=N),
        "key=-1: layer has 37 keys": lambda: published.visible_sink_rate(
            record, key=-1
        ),
        "-1 is no head of layer": lambda: published.alignment(record, [-1]),
        "an empty list of heads": lambda: published.alignment_rows(record, []),
        "context=0, expected": lambda: published.lookback_ratio(record, 0),
        "3 queries and 37 keys": lambda: published.laplacian_diagonal(short),
        "0 queries after the context (0, 37)": lambda: published.kvzip(record, (0, N)),
        "and 0 keys in it": lambda: published.kvzip(record, (4, 4)),
        "36 tokens, and a query at": lambda: published.prefix_matching(
            record, TOKENS[:36]
        ),
    }
    needles = ((4, 4), TOKENS, 30), ((4, 32), TOKENS, 30), ((4, 6), TOKENS[:36], 30)
    needles += (((4, 6), TOKENS, 50),)
    for needle, tokens, prompt in needles:
        words = f"needle={needle} and prompt={prompt} in {len(tokens)} tokens"
        refused[words] = partial(
            published.retrieval_score, record, tokens, needle, prompt=prompt
        )
    for words, ask in refused.items():
        with pytest.raises(OptionError, match=re.escape(words)):
            ask()


EMPTY = {
    "previous_token": (),
    "previous_token_share": (),
    "induction_score": (TOKENS,),
    "prefix_matching": (TOKENS,),
    "duplicate_token": (TOKENS,),
    "lookback_ratio": (4,),
    "rerank_score": ((0, 4), [(4, 8)]),
    "h2o": (),
    "tova": (),
    "alignment_rows": ([0],),
    "largest_logit": (),
    "largest_softmax_logit": (),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("n_k", [0, N])
@pytest.mark.parametrize("name", EMPTY)
def test_a_record_without_queries_or_keys_has_a_score_of_nothing(name, n_k):
    n_q = 0 if n_k else 3
    record = draw(n_q=n_q or 1).record
    record = replace(
        record,
        q=record.q[:, :1].expand(-1, n_q, -1),
        k=record.k[:, :n_k],
        lse=torch.full((HEADS, n_q), -math.inf, dtype=torch.float64),
        q_positions=torch.arange(n_q),
        k_positions=torch.arange(n_k),
    )
    found = np.asarray(getattr(published, name)(record, *EMPTY[name]).values)
    assert not np.nan_to_num(found, nan=0).any()
    if "logit" in name:
        assert np.isnan(found).all()
    if not n_q:
        assert np.isnan(np.asarray(published.sink_rate(record))).all()
        with pytest.raises(OptionError, match="has no queries"):
            published.attention_tracker(record, (0, 4), (4, 8))


def make_recording(tokens=TOKENS):
    case = draw()
    record, dense = case.record, case
    recording = Recording(
        model="Toy", records=(record, record), sequences=(0, 1), tokens=(tokens, ())
    )
    return recording, dense


def test_a_table_has_the_numbers_of_every_head():
    recording, case = make_recording()
    weights, scores = case.w, case.logits
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
        "induction": average(collect(case, find_last_same)),
        "local": (weights * (distance < 64)).sum(-1).mean(1),
        "distance": (weights * distance).sum(-1).mean(1),
        "logit": scores.max((1, 2)),
    }
    assert list(expected) == NUMBERS  # a new statistic needs its formula here
    for name, numbers in expected.items():
        np.testing.assert_allclose(rows[name], numbers, rtol=1e-10, err_msg=name)
    unknown = table.rows[table.rows["sequence"] == 1]
    assert np.isnan(unknown["induction"]).all()  # its tokens are not known


def test_a_table_keeps_the_whole_name_of_a_layer(tmp_path):
    record = draw().record
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
        first = len(last) - len(NUMBERS)
        assert last[first + NUMBERS.index("induction")] == "–"
        assert last[first] == f"{some.rows['entropy'][-1]:.3f}"
        several = len({*some.rows["sequence"]}) > 1
        assert printed.startswith("sequence") == several


def test_a_table_prints_and_goes_to_json_and_parquet(tmp_path):
    table = make_table(make_recording()[0])
    first, *lines = str(table.head(2)).splitlines()
    assert first.split() == ["layer", "head", *NUMBERS]
    assert lines[0].split()[:3] == ["0", "0", f"{table.rows['entropy'][0]:.3f}"]
    table.to_json(tmp_path / "t.json")
    rows = json.loads((tmp_path / "t.json").read_text("utf-8"))
    assert rows[1]["sink"] == table.rows["sink"][1]
    assert rows[-1]["induction"] is None
    table.to_parquet(tmp_path / "t.parquet")
    back = pq.read_table(tmp_path / "t.parquet").to_pydict()
    assert back["name"] == ["layer"] * len(table)
    np.testing.assert_array_equal(back["distance"], table.rows["distance"])
