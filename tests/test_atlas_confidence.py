"""Intervals of a run that stops by what it sees: valid at any time, and said to be so."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stopping import LENGTH, SHARD, SOURCES, Runs, render, simulate

from regard.atlas.confidence import (
    PENALTIES,
    RATES,
    SHARES,
    compute_evidence,
    estimate_growth,
    find_half,
    is_narrow,
    mirror,
    scale_sums,
    threshold,
)
from regard.atlas.job import know_enough
from regard.atlas.settings import SEQUENCE, STUDENT, Settings
from regard.atlas.table import AtlasTable, compare_atlases
from regard.atlas.tally import NOWHERE, Tally, merge_sums, merge_tallies, sum_draw
from regard.atlas.terminal_table import draw_atlas_table, draw_difference, draw_head
from regard.stats.registry import find_statistic

ROOT = Path(__file__).parent.parent
SIZE = {"length": 100, "pieces": 1}
ABOUT = {"length": 100, "pieces": 1, "packed": False}


def tally(n, y, statistic="sink", peak=None):
    """Return the tally of documents: n queries, sums y, each (documents, heads)."""
    n, y = np.broadcast_arrays(np.asarray(n), np.asarray(y, float))
    heads = n.shape[1]
    highest = y.max(0)[None] / n.max() if peak is None else np.full((1, heads), peak)
    sums = merge_sums(sum_draw(n, y)[:, None])
    top = np.full((1, heads, 1), NOWHERE)
    return Tally(("layer",), (heads,), (statistic,), sums, highest, top)


def draw(seed=0, documents=300, heads=5):
    rng = np.random.default_rng(seed)
    n = np.repeat(rng.integers(1, 101, (documents, 1)), heads, 1)
    return n, n * rng.beta(0.5, 2, (documents, heads))


# ---- the formula


def test_each_factor_is_at_most_a_fair_bet_and_every_term_falls_with_the_mean():
    x = np.linspace(-1, 1, 4001)[:, None]
    assert (np.exp(RATES * x - PENALTIES * x * x) <= 1 + RATES * x + 1e-15).all()
    assert (2 * PENALTIES <= RATES).all()  # so the set of means is an interval
    assert SHARES.sum() == pytest.approx(1, abs=1e-15)


def test_the_sums_of_a_tally_are_those_of_its_documents():
    n, y = draw()
    sums = scale_sums(tally(n, y), **SIZE)
    for r, side, values in (
        (0.13, sums, y),
        (0.77, mirror(sums), n - y),
    ):
        x = (values - r * n) / 100
        logs = RATES * x.sum(0)[:, None] - PENALTIES * (x * x).sum(0)[:, None]
        expected = np.log((SHARES * np.exp(logs)).sum(-1))
        found = compute_evidence(side, np.full((1, 5), r))
        np.testing.assert_allclose(found[0], expected, rtol=1e-9)


def test_an_interval_ends_where_the_evidence_does():
    found = tally(*draw())
    half = find_half(found, **SIZE)
    sums = scale_sums(found, **SIZE)
    ends = []
    for side in (sums, mirror(sums)):
        grid = np.linspace(0, 1, 20_001)
        evidence = np.array(
            [compute_evidence(side, np.full((1, 5), r))[0] for r in grid]
        )
        assert (np.diff(evidence, axis=0) <= 1e-9).all()  # it falls
        first = np.array([grid[evidence[:, h] < math.log(40)][0] for h in range(5)])
        ends.append(side[0, 0] / side[1, 0] - first)
    np.testing.assert_allclose(half[0], np.maximum(*ends), atol=6e-5)
    for width in np.linspace(0.01, 0.2, 39):
        same = is_narrow(found, width, **SIZE) == (half <= width)
        assert same.all()
    assert (find_half(found, sure=0.999, **SIZE) > half).all()
    assert threshold(0.95) == pytest.approx(math.log(40))


def test_documents_may_come_in_any_order_and_grouping():
    n, y = draw()
    parts = [tally(n[i : i + 50], y[i : i + 50]) for i in range(0, 300, 50)]
    one = find_half(tally(n, y), **SIZE)
    for order in itertools.islice(itertools.permutations(parts), 0, 720, 97):
        two = merge_tallies(
            [merge_tallies(order[:2], keep=1), merge_tallies(order[2:], keep=1)], keep=1
        )
        np.testing.assert_allclose(find_half(two, **SIZE), one, rtol=1e-9)


def test_a_mean_in_other_units_has_an_interval_in_these_units():
    n, y = draw()
    plain = find_half(tally(n, y), **SIZE)
    bits = math.log2(100)
    found = find_half(tally(n, bits * y, "entropy", peak=bits), **SIZE)
    np.testing.assert_allclose(found, bits * plain, rtol=1e-9)
    tokens = 198 * y - 99 * n  # from -99 to 99
    found = find_half(tally(n, tokens, "distance", peak=99.0), **SIZE)
    np.testing.assert_allclose(found, 198 * plain, rtol=1e-9)
    assert find_statistic("distance").bound(100) == (-99, 99)


def test_a_document_is_as_long_as_all_of_its_pieces_may_be():
    found = tally(*draw())
    whole = find_half(found, length=100, pieces=1)
    np.testing.assert_array_equal(find_half(found, length=50, pieces=2), whole)
    assert (find_half(found, length=100, pieces=2) > whole).all()


def test_without_a_bound_there_is_no_interval():
    n, y = draw()
    assert np.isfinite(find_half(tally(n, y, peak=1.0), **SIZE)).all()
    for broken in (tally(n, y, peak=1.2), tally(n, y, "logit")):
        assert np.isnan(find_half(broken, **SIZE)).all()
        assert not is_narrow(broken, 0.99, **SIZE).any()
        assert estimate_growth(broken, 0.5, rows=[0], **SIZE) == math.inf


@pytest.mark.parametrize("value", [0.0, 0.4, 1.0])
def test_equal_documents_have_no_interval_of_nothing(value):
    halves = []
    for documents in (1, 8, 100, 10_000):
        n = np.full((documents, 1), 100)
        found = tally(n, value * n)
        halves.append(find_half(found, **SIZE).item())
        if documents >= 8:
            assert found.half().item() < 1e-12  # of Student: the rule stopped here
    assert halves[0] >= 0.6
    assert all(a > b for a, b in itertools.pairwise(halves[1:]))
    # no sequence is narrower than the chance to see no other document at all
    for documents, half in zip((8, 100, 10_000), halves[1:], strict=True):
        assert half > 1 - (0.05 / 2) ** (1 / documents) or half == max(value, 1 - value)


def test_the_estimate_is_what_it_takes():
    found = tally(*draw())
    growth = estimate_growth(found, 0.01, rows=[0], **SIZE)
    assert growth > 1
    by = np.array([1, 1, 1, 1, 0, 1, 1, 1, 1, 1])
    for factor, expected in ((growth, True), (growth / 1.02, False)):
        grown = replace(found, sums=found.sums * np.where(by, factor, 1))
        assert is_narrow(grown, 0.01, **SIZE).all() == expected
    assert estimate_growth(found, 0.9, rows=[0], **SIZE) == 1


# ---- coverage


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(("heads", "runs"), [(1, 200), (8, 40), (270, 4)])
def test_a_run_that_stops_by_itself_covers_the_truth(name, heads, runs):
    row = simulate(SOURCES[name], heads, 0.05, runs=runs, seed=7)
    assert row["sequence"]["stopped"] == runs
    assert row["sequence"]["coverage"] >= 0.94
    if heads == 1 and "normal(0.3" not in name:  # what the rule was before
        assert row["student"]["coverage"] < 0.94


@pytest.mark.parametrize("name", SOURCES)
def test_the_truth_is_rarely_rejected_at_any_time(name):
    source, heads = SOURCES[name], 1_000
    run = Runs(source, heads, 1, 3)
    ever, student = np.zeros(heads, bool), np.zeros(heads, bool)
    for _ in range(150):
        found = run.read_shard()
        sums = scale_sums(found, length=256, pieces=1)
        for side, r in ((sums, source.mean), (mirror(sums), 1 - source.mean)):
            ever |= (compute_evidence(side, np.full((1, heads), r)) >= math.log(40))[0]
        student |= (np.abs(found.mean - source.mean) > found.half())[0]
    assert ever.mean() <= 0.05
    assert student.mean() > 0.15


def test_the_committed_coverage_is_at_least_94_percent():
    rows = json.loads((ROOT / "benchmarks" / "stopping.json").read_text())
    assert {(x["source"], x["heads"]) for x in rows} == {
        (name, heads) for name in SOURCES for heads in (1, 8, 270)
    }
    assert min(x["sequence"]["coverage"] for x in rows) >= 0.94
    assert all(x["sequence"]["stopped"] == x["runs"] for x in rows)
    assert render(rows) in (ROOT / "docs" / "scale.md").read_text("utf-8")


@pytest.mark.parametrize("heads", [1, 8])
def test_the_benchmark_stops_where_the_atlas_does(heads):
    source = SOURCES["beta(0.1, 5)"]
    row = simulate(source, heads, 0.05, runs=1, seed=5)
    run = Runs(source, 1, heads, 5)
    plan = Settings(
        model="none",
        corpus=("none",),
        statistics=("sink",),
        length=LENGTH,
        shard=SHARD,
        until_interval=0.05,
    )
    while not know_enough(run.read_shard(), plan):
        assert run.documents < 1_000
    assert row["sequence"]["documents"] == run.documents


# ---- what is shown


def make_table(kind, seed=0, shift=0.0, **about):
    n, y = draw(seed)
    return AtlasTable(ABOUT | {"interval": kind} | about, tally(n, y * (1 - shift)), {})


def test_what_is_shown_names_its_interval():
    fixed, stopped = make_table(STUDENT), make_table(SEQUENCE)
    np.testing.assert_array_equal(fixed.half("sink"), fixed.tally.half())
    expected = find_half(stopped.tally, **SIZE)
    np.testing.assert_array_equal(stopped.half("sink"), expected)
    assert (stopped.half("sink") > fixed.half("sink")).all()
    for show in (lambda x: draw_atlas_table(x, "sink"), lambda x: draw_head(x, 0, 1)):
        assert "Student interval" in show(fixed)
        assert "confidence sequence" in show(stopped).replace("\n", " ")
    assert np.isnan(make_table(SEQUENCE, packed=True).half("sink")).all()


def test_two_kinds_of_intervals_are_compared_with_care():
    fixed, stopped = make_table(STUDENT), make_table(SEQUENCE, 1, shift=0.6)
    for a, b in ((stopped, stopped), (stopped, fixed), (fixed, stopped)):
        found = compare_atlases(a, b, "sink")
        expected = a.half("sink", 0.975) + b.half("sink", 0.975)
        np.testing.assert_allclose(found.half, expected)
        assert found.interval == SEQUENCE
    # a mark: both at half of 5 % / 5 heads; by Student alone these would have one
    wide = fixed.half("sink", 1 - 0.005) + stopped.half("sink", 1 - 0.005)
    marked = compare_atlases(fixed, stopped, "sink").marked
    np.testing.assert_array_equal(marked, np.abs(found.difference) > wide)
    assert not marked.all()
    assert compare_atlases(
        fixed, make_table(STUDENT, 1, shift=0.6), "sink"
    ).marked.all()
    drawn = " ".join(draw_difference(fixed, stopped, "sink", "ab").split())
    assert "if few of them carry the mean) in the first atlas" in drawn
    assert "confidence sequence" in drawn
    assert "at most 1 comparison in 20" in drawn
