"""The walk against the dense square in float64, and reducers against their promise."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from formulas import formulas
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.engine.choose import attend
from regard.errors import OptionError
from regard.masks.patterns import causal, same, where, window
from regard.recording.record import Record
from regard.stats.pooled import PooledMap
from regard.stats.pyramid import Pyramid
from regard.stats.reducer import Scope, Tile
from regard.stats.reducer_check import check_reducer
from regard.stats.reducers import (
    ColumnMax,
    ColumnSums,
    Entropy,
    LargestLogit,
    OffsetProfile,
    RowSums,
)
from regard.stats.strongest import TopK
from regard.stats.tile_walk import walk

FAR = 26  # positions are below it
TOLERANCE = {"float32": 1e-5, "float64": 1e-11}
OURS = [
    RowSums(),
    ColumnSums(),
    ColumnMax(),
    LargestLogit(),
    Entropy(),
    OffsetProfile(),
    TopK(3),
    TopK(30),
    PooledMap(4),
    PooledMap((3, 5), "mass"),
    Pyramid(),
    Pyramid(finest=0),
]


def define(q, k, allowed, *, scale, softcap=None, bias=None, sink=None):
    """Return logits, lse and weights (H, Nq, Nk), written out in float64."""
    q, k = np.asarray(q, float), np.asarray(k, float)
    k = np.repeat(k, len(q) // len(k), axis=0)
    logits = scale * np.einsum("hid,hjd->hij", q, k)
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    if bias is not None:
        logits = logits + np.asarray(bias, float)
    logits = np.where(allowed, logits, -np.inf)
    total = np.exp(logits).sum(-1)
    if sink is not None:
        total = total + np.exp(np.asarray(sink, float))[:, None]
    lse = np.full(total.shape, -np.inf)
    np.log(total, out=lse, where=total > 0)
    return logits, lse, np.exp(logits - np.where(total > 0, lse, 0)[..., None])


@st.composite
def records(draw, dtype="float64", whole_numbers=False):
    """A record of any kind, and its logits and weights by definition."""
    shared, group = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]))
    heads = shared * group
    places = st.lists(st.integers(0, FAR - 1), min_size=1, max_size=FAR, unique=True)
    q_at, k_at = (np.asarray(sorted(draw(places))) for _ in range(2))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    shape = (heads, len(q_at), len(k_at))
    kind = draw(st.sampled_from(["none", "formula", "array", "by head"]))
    if kind == "none":
        mask, allowed = None, np.ones(shape, bool)
    elif kind == "formula":
        mask = draw(formulas(FAR, FAR, 0, 1, heads))
        h = np.arange(heads).reshape(1, -1, 1, 1)
        at = q_at.reshape(1, 1, -1, 1), k_at.reshape(1, 1, 1, -1)
        cells = mask(np.zeros((1, 1, 1, 1), int), h, *at)
        allowed = np.broadcast_to(cells[0], shape)
    else:
        mask = rng.random((heads if kind == "by head" else 1, *shape[1:])) < 0.6
        allowed = np.broadcast_to(mask, shape)

    def numbers(*shape):
        x = rng.integers(-2, 3, shape) if whole_numbers else rng.normal(size=shape)
        return x.astype(dtype)

    q, k = numbers(heads, len(q_at), 4), numbers(shared, len(k_at), 4)
    bias = draw(st.sampled_from([None, 1, heads]))
    options = {
        "scale": draw(st.sampled_from([0.5, 2.0])),
        "softcap": draw(st.sampled_from([None, 3.0])),
        "bias": None if bias is None else numbers(bias, *shape[1:]),
        "sink": draw(st.sampled_from([None, numbers(heads)])),
    }
    logits, lse, weights = define(q, k, allowed, **options)
    to = draw(st.sampled_from([np.asarray, torch.from_numpy]))
    arrays = {"q": q, "k": k, "lse": lse.astype(dtype)}
    arrays |= {"q_positions": q_at, "k_positions": k_at}
    arrays |= {n: options.pop(n) for n in ("bias", "sink")}
    arrays |= {} if kind == "formula" else {"mask": mask}
    arrays = {n: x if x is None else to(x.copy()) for n, x in arrays.items()}
    if kind == "formula":
        arrays["mask"] = mask
    return Record(name="layer", **arrays, **options), logits, weights


def is_near(found, expected, tolerance, floor=1e-30):
    """Tell whether arrays agree, relative to the largest number."""
    found, expected = np.asarray(found, float), np.asarray(expected, float)
    assert found.shape == expected.shape
    endless = np.isinf(expected)
    assert (found[endless] == expected[endless]).all()
    found, expected = found[~endless], expected[~endless]
    size = max(np.abs(expected).max(initial=0), floor)
    return np.abs(found - expected).max(initial=0) <= tolerance * size


def pool_densely(weights, cells, how):
    """Return the map (H, pixels, pixels), pixel by pixel."""
    rows, keys = (range(0, n, c) for n, c in zip(weights.shape[1:], cells, strict=True))
    pixels = np.zeros((len(weights), len(rows), len(keys)))
    for a, i in enumerate(rows):
        for b, j in enumerate(keys):
            x = weights[:, i : i + cells[0], j : j + cells[1]]
            pixels[:, a, b] = x.max((1, 2)) if how == "max" else x.sum(2).mean(1)
    return pixels


def check_all(record, logits, weights, tolerance, **options):
    """Walk with every reducer and compare each with the dense computation."""
    (
        sums,
        columns,
        largest,
        logit,
        both,
        profile,
        best,
        all_,
        maps,
        mass,
        levels,
        fine,
    ) = walk(record, *OURS, **options)
    assert is_near(sums, weights.sum(2), tolerance)
    assert is_near(columns, weights.sum(1), tolerance)
    assert is_near(largest, weights.max(1), tolerance)
    assert is_near(logit, logits.max(2), tolerance, floor=1)
    logs = np.log(np.where(weights > 0, weights, 1))
    entropy = -(weights * logs).sum(2)
    assert is_near(both.entropy, entropy, tolerance, floor=1)
    spread = (weights * (-logs - entropy[..., None]) ** 2).sum(2)
    assert is_near(both.varentropy, spread, tolerance, floor=1)

    apart = np.asarray(record.q_positions)[:, None] - np.asarray(record.k_positions)
    offsets = profile.offsets.tolist()
    assert offsets == list(range(apart.min(), apart.max() + 1))
    by_offset = np.stack([weights[:, apart == d].sum(1) for d in offsets], 1)
    assert is_near(profile.mass, by_offset, tolerance)

    for k, found in ((3, best), (30, all_)):
        order = -np.sort(-np.pad(weights, ((0, 0), (0, 0), (0, k))), axis=2)[..., :k]
        assert is_near(found.weight, order, tolerance)
        index = found.index.values.numpy()
        assert ((index == -1) == (found.weight.values.numpy() == 0)).all()
        there = np.take_along_axis(weights, np.maximum(index, 0), 2)
        assert is_near(np.where(index >= 0, there, 0), order, tolerance)
        held = [x[x >= 0] for x in index.reshape(-1, k)]
        assert all(len(set(x.tolist())) == len(x) for x in held)

    assert is_near(maps, pool_densely(weights, (4, 4), "max"), tolerance)
    assert is_near(mass, pool_densely(weights, (3, 5), "mass"), tolerance)
    for built, first in ((levels, 3), (fine, 0)):
        assert min(built.max) == min(built.mass) == first
        for level in built.max:
            for how, found in (("max", built.max), ("mass", built.mass)):
                side = (2**level, 2**level)
                expected = pool_densely(weights, side, how)
                assert is_near(found[level], expected, tolerance)
        assert built.max[max(built.max)].values.shape[1:] == (1, 1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@settings(deadline=None, max_examples=50)
@given(st.data())
def test_every_reducer_equals_the_dense_computation(dtype, data):
    record, logits, weights = data.draw(records(dtype))
    block = data.draw(st.integers(4, FAR))
    workers = data.draw(st.sampled_from([1, 1, 2]))
    check_all(record, logits, weights, TOLERANCE[dtype], block=block, workers=workers)


def take(result):
    """Return every array of a result."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, dict):
        return [x for value in result.values() for x in take(value)]
    if result is None or isinstance(result, (str, int)):
        return []
    parts = result if isinstance(result, tuple) else vars(result).values()
    return [x for part in parts for x in take(part)]


EXACT = {ColumnMax(), LargestLogit(), TopK(3), TopK(30), PooledMap(4)}


@settings(deadline=None, max_examples=50)
@given(records(whole_numbers=True), st.sampled_from(OURS), st.data())
def test_any_tiles_in_any_order_merged_in_any_way_give_the_same(made, reducer, data):
    record, _, weights = made
    n_q, n_k = weights.shape[1:]
    at = [torch.as_tensor(x) for x in (record.q_positions, record.k_positions)]
    scope = Scope(n_q, n_k, *at, torch.float64)
    w = torch.from_numpy(weights[0].copy())
    whole = reducer.add(reducer.start(scope), cut_tile(w, at, (0, n_q), (0, n_k)))
    expected = take(reducer.finish([whole]))
    tiles = [
        cut_tile(w, at, rows, keys)
        for rows in data.draw(cuts(n_q))
        for keys in data.draw(cuts(n_k))
    ]
    tiles = data.draw(st.permutations(tiles))
    n_states = data.draw(st.integers(1, 4))
    states = [reducer.start(scope) for _ in range(n_states)]
    for tile in tiles:
        i = data.draw(st.integers(0, n_states - 1))
        states[i] = reducer.add(states[i], tile)
    while len(states) > 1:
        other = states.pop(data.draw(st.integers(0, len(states) - 1)))
        i = data.draw(st.integers(0, len(states) - 1))
        states[i] = reducer.merge(states[i], other)
    found = take(reducer.finish(states))
    assert len(found) == len(expected) > 0
    for x, y in zip(found, expected, strict=True):
        if reducer in EXACT or not x.is_floating_point():
            assert torch.equal(x, y)
        else:
            assert is_near(x, y, 1e-14 * 100)


def cuts(n):
    """The numbers 0 … n-1 in runs."""
    inner = st.sets(st.integers(1, max(1, n - 1)), max_size=4)
    ends = inner.map(lambda some: [0, *sorted(i for i in some if i < n), n])
    return ends.map(lambda x: list(pairwise(x)))


def cut_tile(w, at, rows, keys):
    """Return some cells of a dense head, as a tile without a mask."""
    rows, keys = slice(*rows), slice(*keys)
    cells = w[rows, keys].clone()
    lse = cells.new_zeros(len(cells))
    return Tile(0, rows, keys, at[0][rows], at[1][keys], cells, cells.log(), lse, None)


@settings(deadline=None, max_examples=40)
@given(records(whole_numbers=True), st.integers(2, FAR), st.sampled_from([1, 3]))
def test_neither_blocks_nor_workers_change_a_whole_number_or_a_maximum(made, block, n):
    record, _, _ = made
    some = walk(record, *OURS, block=FAR, workers=1)
    others = walk(record, *OURS, block=block, workers=n)
    for reducer, mine, theirs in zip(OURS, some, others, strict=True):
        for x, y in zip(take(mine), take(theirs), strict=True):
            if reducer in EXACT or not x.is_floating_point():
                assert torch.equal(x, y)
            else:
                assert is_near(x, y, 1e-13)


def make_record(n=64, heads=2, mask=None, dtype=torch.float32, **options):
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, n, 8, generator=rng).to(dtype) for _ in range(3))
    mask = causal() if mask is None else mask
    lse = attend(q, k, v, mask).lse
    at = torch.arange(n)
    arrays = {"q": q, "k": k, "lse": lse, "q_positions": at, "k_positions": at}
    arrays |= {"mask": mask} | options
    return Record(name="layer", scale=8**-0.5, **arrays)


class Visits:
    """Which tiles came, and whether each had a mask."""

    def start(self, scope):
        return []

    def add(self, state, tile):
        masked = tile.allowed is not None
        return [*state, (tile.head, tile.rows.start, tile.keys.start, masked)]

    def merge(self, state, other):
        return state + other

    def finish(self, states):
        return [place for state in states for place in state]


def test_only_tiles_that_the_mask_leaves_are_visited_and_full_ones_meet_no_mask():
    (found,) = walk(make_record(), Visits(), heads=(1,), block=16, workers=1)
    assert found == [
        (1, i, j, i == j) for i in range(0, 64, 16) for j in range(0, i + 1, 16)
    ]
    (found,) = walk(make_record(mask=causal() & window(15)), Visits(), block=16)
    assert {(i - j) // 16 for _, i, j, _ in found} == {0, 1}
    (found,) = walk(
        make_record(mask=where(lambda b, h, q, k: k < 16 + 0 * q)), Visits(), block=16
    )
    assert {j for _, _, j, _ in found} == {0}  # not proved, but looked at


def test_positions_with_gaps_are_proved_by_the_positions():
    at = torch.arange(64) * 3 + 5
    record = make_record(q_positions=at, k_positions=at + 48, mask=causal())
    (found,) = walk(record, Visits(), heads=(0,), block=16, workers=1)
    assert {(i - j) // 16 for _, i, j, _ in found} == {1, 2, 3}
    ids = torch.arange(300) // 48
    record = make_record(q_positions=at, k_positions=at, mask=same(ids))
    (sums,) = walk(record, OffsetProfile(), block=16)
    assert set((sums.offsets[sums.mass.values[0] > 0] % 3).tolist()) == {0}
    assert int(sums.offsets[sums.mass.values[0] > 0].max()) == 45


def test_a_part_of_the_rows_and_keys_is_counted_from_its_first():
    record = make_record()
    weights = record.weights().double().numpy()[:, 10:50, 3:30]
    found = walk(
        record, ColumnMax(), TopK(2), rows=slice(10, 50), keys=slice(3, 30), block=16
    )
    assert is_near(found[0], weights.max(1), 1e-5)
    assert (found[1].index.values[:, :, 0].numpy() == weights.argmax(2)).mean() > 0.95
    assert found[1].index.axes == ("head", "query", "rank")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_walked_in_float32(dtype):
    record = make_record(dtype=dtype)
    q, k = record.q.double().numpy(), record.k.double().numpy()
    allowed = np.tri(64, dtype=bool)
    logits, lse, weights = define(q, k, allowed, scale=record.scale)
    exact = make_record(dtype=dtype, lse=torch.from_numpy(lse).float())
    largest, logit = walk(exact, ColumnMax(), LargestLogit(), block=20)
    assert largest.values.dtype == torch.float32
    assert is_near(largest, weights.max(1), 1e-5)
    assert is_near(logit, logits.max(2), 1e-5)


def test_a_weight_too_small_for_float32_does_not_hide_the_largest_logit():
    record = make_record(lse=torch.full((2, 64), 300.0))  # a sink takes it all
    logit, best = walk(record, LargestLogit(), TopK(2))
    dots = (record.q @ record.k.transpose(1, 2) * record.scale).double()
    dots = dots.masked_fill(torch.ones(64, 64).triu(1).bool(), -math.inf)
    assert is_near(logit, dots.amax(2).numpy(), 1e-4)  # 300 - 300 leaves fewer digits
    assert (best.index.values == -1).all()
    assert (best.weight.values == 0).all()


def test_a_row_that_a_bias_hides_from_everything_has_no_weights():
    bias = torch.zeros(1, 64, 64)
    bias[:, 7] = -math.inf
    record = make_record(bias=bias)
    record.lse[:, 7] = -math.inf
    sums, logit, largest = walk(record, RowSums(), LargestLogit(), ColumnMax())
    assert (sums.values[:, 7] == 0).all()
    assert (logit.values[:, 7] == -math.inf).all()
    assert is_near(largest, record.weights().amax(1), 1e-5)


def test_what_nobody_may_see_does_not_leak():
    record = make_record()
    record.k[:, -1] = math.nan
    sums, best = walk(record, RowSums(), TopK(4), rows=slice(0, 63), block=16)
    assert is_near(sums, np.ones((2, 63)), 1e-5)
    assert not best.weight.values.isnan().any()


def test_equal_weights_are_told_apart_by_the_earlier_key():
    record = make_record(
        q=torch.zeros(2, 64, 8), lse=torch.arange(1.0, 65).log().expand(2, 64)
    )
    for block in (7, 16, 64):
        (found,) = walk(record, TopK(5), block=block)
        expected = torch.arange(5).where(
            torch.arange(5) <= torch.arange(64)[:, None], -1
        )
        assert (found.index.values == expected).all()


def test_torch_has_its_threads_back_and_no_worker_is_left():
    before, threads = torch.get_num_threads(), threading.active_count()
    torch.set_num_threads(2)
    try:
        walk(make_record(), ColumnSums(), block=8, workers=3)
        assert torch.get_num_threads() == 2
        seen = []

        def stop(done, total):
            seen.append((done, total))
            if done == 5:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            walk(make_record(), ColumnSums(), block=8, workers=2, progress=stop)
        assert seen == [(n, 16) for n in range(1, 6)]
        assert torch.get_num_threads() == 2
        assert threading.active_count() == threads
    finally:
        torch.set_num_threads(before)


def ask_new_thread(ask=torch.get_num_threads):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask).result()


def test_a_thread_that_is_born_during_a_walk_leaves_torch_its_threads():
    before, record = torch.get_num_threads(), make_record()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(1) as young, ThreadPoolExecutor(1) as late:

            def meet(*_):
                young.submit(torch.get_num_threads).result()  # it is given 1
                late.submit(walk, record, ColumnSums()).result()

            walk(record, ColumnSums(), workers=1, progress=meet)
            assert (torch.get_num_threads(), ask_new_thread()) == (2, 2)
            assert late.submit(torch.get_num_threads).result() == 2
            young.submit(walk, record, ColumnSums()).result()
            assert young.submit(torch.get_num_threads).result() == 2
            assert (torch.get_num_threads(), ask_new_thread()) == (2, 2)
    finally:
        torch.set_num_threads(before)


def test_a_worker_has_one_torch_thread_and_no_gradients():
    class Look(Visits):
        def add(self, state, tile):
            return [*state, (torch.get_num_threads(), torch.is_grad_enabled())]

    record = make_record()
    record.q.requires_grad_()
    for workers in (1, 2):
        (found,) = walk(record, Look(), block=16, workers=workers)
        assert set(found) == {(1, False)}


def test_an_error_of_a_reducer_reaches_the_caller():
    class Broken(Visits):
        def add(self, state, tile):
            raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        walk(make_record(), Broken(), workers=2)


def test_no_rows_no_keys_no_heads_give_empty_results():
    record = make_record()
    for part in ({"rows": slice(0, 0)}, {"keys": slice(5, 5)}):
        sums, logit, best, maps = walk(
            record, ColumnSums(), LargestLogit(), TopK(2), PooledMap(8), **part
        )
        assert not sums.values.any()
        assert (logit.values == -math.inf).all()
        assert (best.index.values == -1).all()
        assert not maps.values.any()
    assert walk(record, ColumnSums(), heads=())[0].values.numel() == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heads": (2,)}, r"2 is no head of layer, expected numbers from 0 to 1"),
        ({"heads": (-1,)}, "-1 is no head"),
        ({"rows": 3}, "rows=3, expected a run"),
        ({"keys": slice(0, 9, 2)}, "expected a run of them"),
        ({"block": 0}, "block=0, expected a whole number"),
        ({"workers": 0}, "workers=0, expected a whole number"),
    ],
)
def test_what_cannot_be_walked_is_refused(options, words):
    with pytest.raises(OptionError, match=words):
        walk(make_record(), RowSums(), **options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TopK(0), "k=0, expected"),
        (lambda: PooledMap(0), "cells=0, expected how many"),
        (lambda: PooledMap(4, "mean"), 'how=\'mean\', expected "max" or "mass"'),
        (lambda: Pyramid(-1), "finest=-1, expected a level"),
    ],
)
def test_what_cannot_be_reduced_is_refused(make, words):
    with pytest.raises(OptionError, match=words):
        make()


@pytest.mark.parametrize("block", [8, 24, 40])
def test_a_pixel_may_lie_in_several_tiles(block):
    record = make_record()
    big, wide = walk(record, PooledMap(16), PooledMap((32, 5)), block=block)
    weights = record.weights().double().numpy()
    assert is_near(big, pool_densely(weights, (16, 16), "max"), 1e-5)
    assert is_near(wide, pool_densely(weights, (32, 5), "max"), 1e-5)


def test_maps_say_what_a_pixel_is():
    big, small = PooledMap((8, 4), "mass"), PooledMap(1)
    big, small, levels = walk(make_record(), big, small, Pyramid())
    assert big.how == "walk: mass, the sum over keys, mean over queries, of 8 × 4 cells"
    assert small.how == "walk: one weight a pixel"
    assert levels.max[4].how == "walk: max, the largest weight of 16 × 16 cells"
    rows = levels.mass[3].values.sum(2)
    assert torch.allclose(rows, torch.ones_like(rows))


def test_a_long_head_has_a_coarser_finest_level():
    at = torch.arange(1)
    found = [
        Pyramid().start(Scope(n, m, at, at, torch.float32)).level
        for n, m in ((1, 1), (32_768, 5), (5, 32_769), (65_536, 65_536), (131_073, 1))
    ]
    assert found == [3, 3, 4, 4, 6]


@pytest.mark.parametrize("reducer", OURS, ids=repr)
def test_the_trial_finds_nothing_wrong_with_ours(reducer):
    check_reducer(reducer)


class Sum:
    """A right one, for others to be wrong in one point."""

    def start(self, scope):
        return torch.zeros(scope.n_k, dtype=torch.float64)

    def add(self, state, tile):
        state[tile.keys] += tile.weights.sum(0)
        return state

    def merge(self, state, other):
        return state + other

    def finish(self, states):
        return torch.stack(states)


class NoMerge:
    start, add, finish = Sum.start, Sum.add, Sum.finish


class Forgets(Sum):
    def add(self, state, tile):
        state[tile.keys] += tile.weights.sum(0)


class MergesToNone(Sum):
    def merge(self, state, other):
        state += other


class KeepsViews(Sum):
    def start(self, scope):
        return []

    def add(self, state, tile):
        return [*state, tile.weights]

    def finish(self, states):
        return float(sum(x.sum() for x in states[0]))


class Writes(Sum):
    def add(self, state, tile):
        state[tile.keys] += tile.weights.mul_(2).sum(0)
        return state


class Remembers(Sum):
    def __init__(self):
        self.total = 0.0

    def add(self, state, tile):
        self.total += float(tile.weights.sum())
        return state

    def finish(self, states):
        return self.total


class KeepsTheLast(Sum):
    def add(self, state, tile):
        return tile.weights.sum(0)


class Averages(Sum):
    def merge(self, state, other):
        return (state + other) / 2


class TakesTheFirst(Sum):
    def merge(self, state, other):
        return torch.where(state > 0, state, other)


class CountsMasked(Sum):
    def start(self, scope):
        return 0

    def add(self, state, tile):
        return state + tile.weights.numel()

    def finish(self, states):
        return states


class StartsAtOne(Sum):
    def start(self, scope):
        return torch.ones(scope.n_k, dtype=torch.float64)


class DependsOnOrder(Sum):
    def add(self, state, tile):
        state *= 0.5
        return Sum.add(self, state, tile)


@pytest.mark.parametrize(
    ("reducer", "words"),
    [
        (NoMerge(), r"NoMerge has no merge\(\), expected the four verbs"),
        (Forgets(), "Forgets.add returned None, expected the state"),
        (MergesToNone(), "MergesToNone.merge returned None"),
        (KeepsViews(), r"once the memory of a tile is used again \(copy"),
        (Writes(), "Writes.add writes into the tile"),
        (Remembers(), r"when walked again \(keep what you know in the state"),
        (KeepsTheLast(), "when the keys come in two tiles: an array of the shape"),
        (Averages(), "when two states are merged: "),
        (TakesTheFirst(), "when states of different rows are merged: "),
        (
            CountsMasked(),
            "when a tile without any allowed cell is left out: 417 in place of 480",
        ),
        (StartsAtOne(), "when two states are merged: "),
        (DependsOnOrder(), "when the keys come in two tiles: "),
    ],
    ids=lambda x: type(x).__name__,
)
def test_the_trial_says_what_is_wrong_with_a_strangers_reducer(reducer, words):
    check_reducer(Sum())
    with pytest.raises(OptionError, match=words):
        check_reducer(reducer)


LONG = """
import json, torch
from memory import read_peak, reset_peak
from regard.engine.choose import attend
from regard.masks.patterns import causal, window
from regard.recording.record import Record
from regard.stats.pooled import PooledMap
from regard.stats.pyramid import Pyramid
from regard.stats.reducers import *
from regard.stats.strongest import TopK
from regard.stats.tile_walk import walk

def make(n):
    q, k = torch.randn(2, 1, n, 64, generator=torch.Generator().manual_seed(0))
    at = torch.arange(n)
    mask = causal() & window(4095)  # a few minutes without it, and as much memory
    lse = attend(q, k, k, mask).lse
    return Record(name="long", q=q, k=k, lse=lse, scale=0.125, q_positions=at,
                  k_positions=at, mask=mask)

ALL = (TopK(8), ColumnSums(), ColumnMax(), LargestLogit(), Entropy(), OffsetProfile(),
       RowSums(), PooledMap(256), PooledMap(256, "mass"), Pyramid())
walk(make(2048), *ALL)
record = make(65_536)
before = reset_peak()
found = walk(record, *ALL, workers=2)
result = {"MB": read_peak() - before}
levels = found[-1]
row = record.weights(slice(40_000, 40_016))[0]
pixels = row.view(16, -1, 16)
result["max"] = float((levels.max[4].values[0, 2500] - pixels.amax((0, 2))).abs().max())
result["mass"] = float((levels.mass[4].values[0, 2500] - pixels.sum(2).mean(0)).abs().max())
result["best"] = float((found[0].weight.values[0, 40_000:40_016] - row.topk(8).values).abs().max())
result["levels"] = list(levels.max)
print(json.dumps(result))
"""


@pytest.mark.slow
def test_memory_is_linear_at_65536_tokens_with_every_reducer(run_apart):
    result = run_apart(LONG)
    assert result["MB"] < 400
    assert result["levels"] == list(range(4, 17))
    assert max(result["max"], result["mass"], result["best"]) < 1e-7
