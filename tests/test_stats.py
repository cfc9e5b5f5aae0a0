"""Statistics of attention against the dense weights in float64, written out here."""

import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from formulas import formulas
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import masks
from regard.arrays import to_numpy
from regard.errors import MaskError, OptionError, ShapeError
from regard.masks import Mask
from regard.recording.record import Record
from regard.stats.cells import ask_offset, cells, find_targets, induction, offset
from regard.stats.columns import ask_received, mean_received, queries_of, received
from regard.stats.gradients import gradient_keys, gradient_received, gradient_rows
from regard.stats.named_array import NamedArray
from regard.stats.plan import DirectAsk, make_plan
from regard.stats.rows import (
    ask_entropy,
    ask_masked_mass,
    ask_mass,
    ask_mean_distance,
    ask_span_mass,
    entropy,
    masked_mass,
    mass,
    mean_distance,
    mean_position,
    span_mass,
    span_pairs,
)

TOLERANCE = {np.float32: 1e-5, np.float64: 1e-11}
SPANS = [(0, 3), (2, 7), (5, 5), (9, 90)]  # they overlap, and one is empty


@dataclass(frozen=True)
class Case:
    record: Record
    weights: np.ndarray  # (H, Nq, Nk), float64
    allowed: np.ndarray  # (H, Nq, Nk)
    dtype: type

    def check(self, named, expected, axes):
        """Compare a statistic with the dense one, relative to its largest number."""
        assert isinstance(named, NamedArray)
        assert named.axes == axes
        assert named.how
        found = to_numpy(named.values)
        assert type(named.values) is type(self.record.q)
        assert found.dtype in (self.dtype, np.int64)
        assert found.shape == expected.shape
        assert np.array_equal(np.isnan(found), np.isnan(expected))
        error = np.nan_to_num(np.abs(found - expected)).max(initial=0)
        size = np.nan_to_num(np.abs(expected)).max(initial=0)
        assert error <= TOLERANCE[self.dtype] * size + 1e-30


def write_out(mask, n_heads, q_at, k_at):
    """Return which cells a formula, an array or nothing allows."""
    if isinstance(mask, Mask):
        far = 1 + max(q_at.max(initial=0), k_at.max(initial=0))
        return mask.dense((n_heads, far, far))[:, q_at][:, :, k_at]
    whole = np.ones((n_heads, q_at.size, k_at.size), bool)
    return whole if mask is None else whole & mask


def make_case(
    heads=(4, 2),
    positions=(range(9), range(9)),
    mask=None,
    *,
    width=8,
    dtype=np.float64,
    sink=False,
    softcap=None,
    bias=False,
    seed=0,
    give=torch.from_numpy,
):
    """Return a record and its weights, from the formula in float64."""
    rng = np.random.default_rng(seed)
    (n_heads, n_shared), (q_at, k_at) = heads, map(np.asarray, positions)
    q = rng.normal(size=(n_heads, q_at.size, width)).astype(dtype)
    k, v = rng.normal(size=(2, n_shared, k_at.size, width)).astype(dtype)
    shared = [h // (n_heads // n_shared) for h in range(n_heads)]
    logits = 0.4 * q.astype(float) @ k.astype(float)[shared].swapaxes(1, 2)
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    added = rng.normal(size=(1, q_at.size, k_at.size)).astype(dtype)
    added[rng.random(added.shape) < 0.1] = -np.inf
    logits = logits + added if bias else logits
    allowed = write_out(mask, n_heads, q_at, k_at)
    logits = np.where(allowed, logits, -np.inf)
    if bias:
        allowed = allowed & (added > -np.inf)
    beside = rng.normal(size=n_heads).astype(dtype)
    total = np.exp(logits).sum(-1) + (
        np.exp(beside.astype(float))[:, None] if sink else 0
    )
    empty = total == 0
    record = Record(
        name="layer",
        q=give(q),
        k=give(k),
        v=give(v),
        lse=give(np.where(empty, -np.inf, np.log(total + empty)).astype(dtype)),
        scale=0.4,
        q_positions=give(q_at.astype(np.int64)),
        k_positions=give(k_at.astype(np.int64)),
        softcap=softcap,
        sink=give(beside) if sink else None,
        mask=give(mask) if isinstance(mask, np.ndarray) else mask,
        bias=give(added) if bias else None,
    )
    weights = np.exp(logits) / (total + empty)[..., None]
    return Case(record, weights, allowed, dtype)


@st.composite
def cases(draw):
    """A record of any kind."""
    n_heads, _ = heads = draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2)]))
    n_q, n_k = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    first_q, first_k = draw(st.integers(0, 12)), draw(st.sampled_from([0, 0, 0, 3]))
    q_at, k_at = first_q + np.arange(n_q), first_k + np.arange(n_k)
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    if draw(st.integers(0, 4)) == 0:  # gaps, and any order
        k_at = rng.permutation(2 * n_k)[:n_k]
    far = int(max(q_at.max(), k_at.max())) + 1
    kind = draw(st.sampled_from(["none", "causal", "formula", "formula", "array"]))
    mask = {
        "none": st.none(),
        "causal": st.just(masks.causal()),
        "formula": formulas(far, far, 0, 1, n_heads),
        "array": st.just(
            rng.random((draw(st.sampled_from([1, n_heads])), n_q, n_k)) < 0.6
        ),
    }[kind]
    return make_case(
        heads,
        (q_at, k_at),
        draw(mask),
        width=draw(st.sampled_from([3, 8])),
        dtype=draw(st.sampled_from([np.float32, np.float64])),
        sink=draw(st.booleans()),
        softcap=draw(st.sampled_from([None, None, 2.0])),
        bias=draw(st.sampled_from([False, False, True])),
        seed=seed,
        give=draw(st.sampled_from([torch.from_numpy, np.asarray])),
    )


def lend(x):
    """Return an array as an opened recording has it."""
    x.flags.writeable = False
    return x


def average(x, by):
    """Divide; NaN for the mean over nothing."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(by > 0, x / by, np.nan)


quick = settings(max_examples=60)


@quick
@given(cases())
def test_mass_on_features_is_the_weights_times_features(case):
    rng, (n_heads, _, n_k) = np.random.default_rng(1), case.weights.shape
    n_shared = case.record.k.shape[0]
    axes = ("head", "query", "feature")
    features = rng.normal(size=(n_k, 11)).astype(case.dtype)  # more than the width
    case.check(mass(case.record, features), case.weights @ features, axes)
    some = rng.random((n_k, 2)) < 0.5
    case.check(mass(case.record, some), case.weights @ some, axes)
    for heads in {1, n_shared, n_heads}:
        by_head = rng.normal(size=(heads, n_k, 2)).astype(case.dtype)
        expected = case.weights @ by_head.repeat(n_heads // heads, 0)
        case.check(mass(case.record, by_head), expected, axes)


@quick
@given(cases())
def test_entropy_is_that_of_the_dense_weights(case):
    seen = np.where(case.weights > 0, case.weights, 1)
    expected = -(seen * np.log(seen)).sum(-1)
    found = entropy(case.record)
    assert found.how.startswith(
        "H" if case.record.softcap is case.record.bias else "strips"
    )
    error = np.abs(to_numpy(found.values) - expected).max(initial=0)
    assert error <= TOLERANCE[case.dtype] * max(1, expected.max(initial=0))
    assert found.axes == ("head", "query")
    assert to_numpy(found.values).min(initial=0) >= 0


@quick
@given(cases())
def test_mean_position_and_distance_are_means_over_the_mass_on_keys(case):
    q_at, k_at = (
        to_numpy(x) for x in (case.record.q_positions, case.record.k_positions)
    )
    total = case.weights.sum(-1)
    where = average(case.weights @ k_at, total)
    case.check(mean_position(case.record), where, ("head", "query"))
    far = average((case.weights * (q_at[:, None] - k_at)).sum(-1), total)
    found = mean_distance(case.record)
    error = np.nan_to_num(np.abs(to_numpy(found.values) - far)).max(initial=0)
    assert error <= TOLERANCE[case.dtype] * max(q_at.max(), k_at.max(), 1)
    assert np.array_equal(np.isnan(to_numpy(found.values)), np.isnan(far))


@quick
@given(cases(), st.data())
def test_masked_mass_is_the_mass_of_the_cells_that_both_masks_allow(case, data):
    q_at, k_at = (
        to_numpy(x) for x in (case.record.q_positions, case.record.k_positions)
    )
    far, n_heads = int(max(q_at.max(), k_at.max())) + 1, case.weights.shape[0]
    inner = data.draw(formulas(far, far, 0, 1, n_heads))
    expected = (case.weights * write_out(inner, n_heads, q_at, k_at)).sum(-1)
    case.check(masked_mass(case.record, inner), expected, ("head", "query"))


@quick
@given(cases())
def test_span_mass_sums_rows_and_rectangles_of_the_weights(case):
    q_at, k_at = (
        to_numpy(x) for x in (case.record.q_positions, case.record.k_positions)
    )
    rows = np.stack([(q_at >= a) & (q_at < b) for a, b in SPANS])
    keys = np.stack([(k_at >= a) & (k_at < b) for a, b in SPANS])
    found = span_mass(case.record, SPANS)
    case.check(found, case.weights @ keys.T, ("head", "query", "span"))
    sums = rows @ case.weights @ keys.T
    n_rows, n_keys = rows.sum(1)[:, None], keys.sum(1)
    axes = ("head", "query span", "key span")
    for per, by in (("sum", np.array(1)), ("query", n_rows), ("cell", n_rows * n_keys)):
        found = span_pairs(case.record, SPANS, SPANS, per=per)
        case.check(found, average(sums, by), axes)


@quick
@given(cases(), st.integers(1, 30))
def test_received_is_the_sum_of_a_column(case, last):
    rng, axes = np.random.default_rng(1), ("head", "key")
    n_heads, n_q, _ = case.weights.shape
    columns = case.weights.swapaxes(1, 2)
    case.check(received(case.record), columns.sum(-1), axes)
    rows = slice(-last, None)
    case.check(received(case.record, rows=rows), columns[..., rows].sum(-1), axes)
    for shape in ((n_q, 12), (n_heads, n_q, 2)):
        features = rng.normal(size=shape).astype(case.dtype)
        found = received(case.record, features)
        case.check(found, columns @ features, (*axes, "feature"))
        found = received(case.record, features, rows=rows)
        expected = columns[..., rows] @ features[..., rows, :]
        case.check(found, expected, (*axes, "feature"))


@quick
@given(cases(), st.integers(1, 30))
def test_mean_received_divides_by_the_queries_that_may_see_a_key(case, last):
    for rows in (slice(None), slice(-last, None)):
        count = case.allowed[:, rows].sum(1)
        found = queries_of(case.record, rows=rows)
        assert np.array_equal(to_numpy(found.values), count)
        expected = average(case.weights[:, rows].sum(1), count)
        case.check(mean_received(case.record, rows=rows), expected, ("head", "key"))


@quick
@given(cases(), st.integers(-4, 9))
def test_cells_are_the_weights_at_pairs_offsets_and_induction_targets(case, n):
    rng = np.random.default_rng(2)
    q_at, k_at = (
        to_numpy(x) for x in (case.record.q_positions, case.record.k_positions)
    )
    i, j = (rng.integers(0, x.size, 30) for x in (q_at, k_at))
    found = cells(case.record, q_at[i], k_at[j])
    case.check(found, case.weights[:, i, j], ("head", "pair"))
    place = {int(at): column for column, at in enumerate(k_at)}
    tokens = rng.integers(0, 5, int(max(q_at.max(), k_at.max())) + 1)

    def target(at):
        before = [p for p in range(at) if tokens[p] == tokens[at]]
        return before[-1] + 1 if before else -1

    for found, keys in (
        (offset(case.record, n), q_at - n),
        (induction(case.record, tokens), [target(at) for at in q_at]),
    ):
        expected = np.full(case.weights.shape[:2], np.nan)
        for row, key in enumerate(keys):
            if key in place:
                expected[:, row] = case.weights[:, row, place[key]]
        case.check(found, expected, ("head", "query"))


@pytest.mark.parametrize("sink", [False, True])
def test_weight_times_gradient_is_what_autograd_says(sink):
    case = make_case(mask=masks.causal(), sink=sink)
    v = case.record.v.clone().requires_grad_()
    w = torch.from_numpy(case.weights).requires_grad_()
    out = w @ v.repeat_interleave(2, 0)
    out.retain_grad()
    (out**3).sum().backward()
    product = (w * w.grad).detach().numpy()
    found = gradient_rows(out.detach(), out.grad)
    case.check(found, product.sum(-1), ("head", "query"))
    found = gradient_keys(v.detach(), v.grad)
    shared = product.sum(1).reshape(2, 2, -1).sum(1)
    case.check(found, shared, ("group", "key"))
    found = gradient_received(case.record, out.grad)
    case.check(found, product.sum(1), ("head", "key"))
    assert np.allclose(found.share(2, "sum").values, shared)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "mask",
    [
        None,
        masks.causal(),
        masks.causal() & masks.window(150),
        masks.causal() & masks.same(np.arange(2000) // 190),
        masks.per_head([masks.causal(), masks.window(40, 3)]),
    ],
    ids=repr,
)
@pytest.mark.parametrize("first", [0, 300])
def test_long_records_are_the_same_in_strips_and_tiles(mask, dtype, first):
    positions = (first + np.arange(700), np.arange(1000))
    case = make_case((2, 1), positions, mask, dtype=dtype)
    features = np.random.default_rng(1).normal(size=(1000, 8)).astype(dtype)
    columns = case.weights.swapaxes(1, 2)
    axes = ("head", "query")
    case.check(mass(case.record, features), case.weights @ features, (*axes, "feature"))
    case.check(received(case.record), columns.sum(-1), ("head", "key"))
    count = case.allowed.sum(1)
    assert np.array_equal(to_numpy(queries_of(case.record).values), count)
    seen = np.where(case.weights > 0, case.weights, 1)
    case.check(entropy(case.record), -(seen * np.log(seen)).sum(-1), axes)
    inner = masks.window(100)
    near = write_out(inner, 2, positions[0], positions[1])
    case.check(masked_mass(case.record, inner), (case.weights * near).sum(-1), axes)


@quick
@given(cases(), st.integers(0, 20))
def test_parts_of_the_keys_or_queries_add_up(case, at):
    record = case.record
    whole = slice(None)

    def cut(rows, keys):
        mask, bias = record.mask, record.bias
        both = None if bias is None else bias[:, rows, keys]
        formula = mask is None or isinstance(mask, Mask)
        return replace(
            record,
            q=record.q[:, rows],
            lse=record.lse[:, rows],
            q_positions=record.q_positions[rows],
            k=record.k[:, keys],
            v=None,
            k_positions=record.k_positions[keys],
            mask=mask if formula else mask[:, rows, keys],
            bias=both,
        )

    parts = [cut(whole, slice(0, at)), cut(whole, slice(at, None))]
    features = np.random.default_rng(3).normal(size=(case.weights.shape[2], 3))
    sums = mass(parts[0], features[:at]).values + mass(parts[1], features[at:]).values
    case.check(NamedArray(sums, (), "-"), to_numpy(mass(record, features).values), ())
    sums = entropy(parts[0]).values + entropy(parts[1]).values
    error = np.abs(to_numpy(sums) - to_numpy(entropy(record).values)).max()
    assert error <= 3 * TOLERANCE[case.dtype]
    parts = [cut(slice(0, at), whole), cut(slice(at, None), whole)]
    sums = received(parts[0]).values + received(parts[1]).values
    case.check(NamedArray(sums, (), "-"), to_numpy(received(record).values), ())


@pytest.mark.parametrize("n_q, n_k", [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.keys(0, 2)], ids=repr)
def test_a_record_without_queries_or_keys_has_no_mass(n_q, n_k, mask):
    case = make_case(positions=(np.arange(n_q), np.arange(n_k)), mask=mask)
    record, rows, columns = case.record, np.zeros((4, n_q)), np.zeros((4, n_k))
    case.check(entropy(record), rows, ("head", "query"))
    case.check(masked_mass(record, masks.window(2)), rows, ("head", "query"))
    case.check(mean_position(record), rows * np.nan, ("head", "query"))
    case.check(offset(record, 0), rows * np.nan, ("head", "query"))
    case.check(received(record), columns, ("head", "key"))
    case.check(mean_received(record), columns * np.nan, ("head", "key"))
    found = mass(record, np.ones((n_k, 2)))
    case.check(found, rows[..., None] * [1, 1], ("head", "query", "feature"))
    assert make_plan({"x": ask_masked_mass(record, masks.causal())}).cost == 0


def test_a_read_only_numpy_record_gives_numpy_without_a_warning():
    case = make_case(mask=masks.causal(), give=lend)
    assert type(entropy(case.record).values) is np.ndarray
    case.check(received(case.record), case.weights.sum(1), ("head", "key"))


WITHOUT_TORCH = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(name, name="torch")

sys.meta_path.insert(0, Block())
import numpy as np
from regard import causal
from regard.recording.record import Record
from regard.stats.columns import received
from regard.stats.rows import entropy, mass
rng = np.random.default_rng(0)
q, k = rng.normal(size=(4, 9, 8)), rng.normal(size=(2, 9, 8))
logits = np.where(np.tri(9) > 0, q @ k.repeat(2, 0).swapaxes(1, 2), -np.inf)
lse = np.log(np.exp(logits).sum(-1))
w, at = np.exp(logits - lse[..., None]), np.arange(9)
record = Record(name="x", q=q, k=k, lse=lse, scale=1.0, q_positions=at, k_positions=at,
                mask=causal())
assert np.allclose(received(record).values, w.sum(1), rtol=1e-12)
assert "torch" not in sys.modules
assert np.allclose(mass(record, np.eye(9)).values, w, rtol=1e-12)
seen = np.where(w > 0, w, 1)
assert np.allclose(entropy(record).values, -(seen * np.log(seen)).sum(-1), atol=1e-12)
"""


def test_without_torch_the_definition_runs():
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True)


def test_half_precision_is_computed_in_float32():
    case = make_case(positions=(range(200), range(200)), mask=masks.causal(), width=64)
    record = case.record
    half = {name: getattr(record, name).bfloat16() for name in ("q", "k")}
    q, k = (x.double() for x in half.values())
    logits = 0.4 * q @ k.repeat_interleave(2, 0).mT
    logits = logits.masked_fill(~torch.from_numpy(case.allowed), -torch.inf)
    lse = logits.logsumexp(-1)
    w = (logits - lse[..., None]).exp()
    record = replace(record, **half, lse=lse.float(), v=None)
    found = received(record).values
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), w.sum(1), rtol=1e-5, atol=1e-6)
    features = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    found = mass(record, features).values.double()
    torch.testing.assert_close(found, w @ features.double(), rtol=1e-5, atol=1e-5)


def test_a_plan_packs_features_and_says_what_it_costs():
    case = make_case(
        (2, 1), (range(700), range(700)), masks.causal(), width=16, sink=True
    )
    record, rng = case.record, np.random.default_rng(1)
    asks = {
        "spans": ask_span_mass(record, SPANS),
        "entropy": ask_entropy(record),
        "many": ask_mass(record, rng.normal(size=(700, 20))),
        "distance": ask_mean_distance(record),
        "near": ask_masked_mass(record, masks.window(9)),
        "received": ask_received(record),
        "by": ask_received(record, rng.normal(size=(700, 2))),
        "late": ask_received(record, rows=slice(-100, None)),
        "previous": ask_offset(record, 1),
    }
    plan = make_plan(asks)
    lines = str(plan).splitlines()
    calls = [[(p.name, p.first, p.last) for p in step.pieces] for step in plan.steps]
    assert calls == [
        [("many", 0, 16)],
        [("many", 16, 20), ("entropy", 0, 12)],
        [("entropy", 12, 16), ("spans", 0, 4), ("distance", 0, 1)],
        [("near", 0, 0)],
        [("by", 0, 2), ("received", 0, 0)],
        [("late", 0, 0)],
    ]
    costs = [step.cost for step in plan.steps]
    assert costs[:3] == [1, 1, 1]
    assert 0.2 < costs[3] < 0.8
    assert costs[4] == 1
    assert 0.1 < costs[5] < 0.3
    assert plan.cost == pytest.approx(sum(costs))
    assert lines[-1] == f"{plan.cost:6.2f}  forward calls in all"
    found = plan.run()
    assert list(found) == list(asks)
    for name, ask in asks.items():
        alone = make_plan({name: ask}).run()[name]
        assert alone.axes == found[name].axes
        torch.testing.assert_close(
            alone.values, found[name].values, rtol=1e-12, atol=1e-12, equal_nan=True
        )


def test_the_plan_runs_as_many_calls_as_it_says(monkeypatch):
    case = make_case(mask=masks.causal())
    calls = []
    real = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def count(*given, **options):
        calls.append(given[0].shape)
        return real(*given, **options)

    monkeypatch.setattr("regard.engine.flash.forward", count)
    plan = make_plan(
        {
            "a": ask_mass(case.record, np.ones((9, 3))),
            "b": ask_mass(case.record, np.eye(9)[:, :5]),
            "c": ask_entropy(case.record),
            "d": ask_received(case.record),
        }
    )
    plan.run()
    assert len(calls) == len(plan.steps) == plan.cost == 3


def test_where_an_identity_does_not_hold_it_is_said():
    capped = make_case(softcap=2.0).record
    assert isinstance(ask_entropy(capped), DirectAsk)
    assert "softcap" in entropy(capped).how
    assert "bias" in entropy(make_case(bias=True).record).how
    assert "strips of the weights" in str(make_plan({"x": ask_entropy(capped)}))


def test_induction_targets_follow_the_last_occurrence():
    assert find_targets([1, 2, 1, 3, 1, 1]).tolist() == [-1, -1, 1, -1, 3, 5]


def test_what_does_not_fit_is_refused_in_words():
    record = make_case().record
    with pytest.raises(ShapeError, match=r"\(9, F\).*Write x\[:, None\]"):
        mass(record, np.ones(9))
    with pytest.raises(ShapeError, match=r"features have the shape \(3, 9, 2\)"):
        mass(record, np.ones((3, 9, 2)))
    with pytest.raises(MaskError, match="expected a formula"):
        masked_mass(record, np.ones((9, 9), bool))
    with pytest.raises(MaskError, match="does not cover"):
        masked_mass(record, masks.same(np.zeros(4, int)))
    with pytest.raises(OptionError, match="expected 0 <= first <= last"):
        span_mass(record, [(4, 2)])
    with pytest.raises(OptionError, match="expected two positions"):
        span_mass(record, [(4, 2.5)])
    with pytest.raises(OptionError, match='expected "sum", "query" or "cell"'):
        span_pairs(record, SPANS, SPANS, per="mean")
    with pytest.raises(OptionError, match="no key at position 9"):
        cells(record, [3], [9])
    with pytest.raises(ShapeError, match=r"expected \(pairs,\) each"):
        cells(record, [3, 4], [1])
    with pytest.raises(OptionError, match="tokens of the whole sequence"):
        induction(record, [1, 2])
    with pytest.raises(OptionError, match="ask_entropy"):
        make_plan({"entropy": entropy(record)})
    with pytest.raises(OptionError, match='keep="qkv"'):
        gradient_received(replace(record, v=None), record.q)
    with pytest.raises(ShapeError, match=r"\(H, Nq, Dv\) = \(4, 9, 8\)"):
        gradient_received(record, record.q[:, :3])


LONG = """
import json, math
import torch
from memory import read_peak, reset_peak
from regard import causal, window
from regard.engine.choose import attend
from regard.recording.record import Record
from regard.stats.cells import offset
from regard.stats.columns import mean_received, received
from regard.stats.rows import entropy, mass, masked_mass, mean_distance

torch.set_num_threads(1)
n = 65_536
def record(n):
    q, k = torch.randn(2, 1, n, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        lse = attend(q, k, k, causal() & window(2047)).lse
    at = torch.arange(n)
    return Record(name="x", q=q, k=k, lse=lse, scale=0.125, q_positions=at,
                  k_positions=at, mask=causal() & window(2047))
long, ways = record(n), {
    "mass": lambda r: mass(r, torch.arange(r.k.shape[1])[:, None] % 64 == torch.arange(64)),
    "entropy": entropy, "distance": mean_distance, "received": received,
    "mean received": mean_received, "previous": lambda r: offset(r, 1),
    "near": lambda r: masked_mass(r, window(63)),
}
short, found = record(600), {}
for name, way in ways.items():
    way(short)
    before = reset_peak()
    values = way(long).values
    found[name] = [read_peak() - before, float(values.nansum())]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_memory_is_linear_at_65536_tokens(run_apart):
    found = run_apart(LONG)
    assert {name: mb for name, (mb, _) in found.items() if mb >= 400} == {}
    assert found["received"][1] == pytest.approx(65_536, rel=1e-4)
    assert found["mass"][1] == pytest.approx(65_536, rel=1e-4)
