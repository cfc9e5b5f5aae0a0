"""Sums over documents: means, intervals, examples, and that any order gives the same."""

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.atlas.store import Result, Store, merge_results, pack_result, unpack_result
from regard.atlas.tally import (
    CUBES,
    NOWHERE,
    Tally,
    join_pieces,
    merge_sums,
    merge_tallies,
    sum_draw,
    tally_document,
)
from regard.errors import FileError
from regard.student import student

LAYERS = ("first", "second")
NAMES = ("sink", "previous")


def draw(rng, heads=(2, 3), n=None):
    """Return numbers of every query, by layer and statistic, some missing."""
    n = n or int(rng.integers(3, 40))
    numbers = []
    for count in heads:
        found = {name: rng.random((count, n)) for name in NAMES}
        found["previous"][:, 0] = np.nan
        numbers.append(found)
    return numbers


def tally(numbers, document=0, piece=0, layers=LAYERS):
    return tally_document(layers, numbers, NAMES, document=document, piece=piece)


def corpus(count, seed=0):
    rng = np.random.default_rng(seed)
    return [draw(rng) for _ in range(count)]


def stack(documents, s, layer, head):
    return [x[layer][NAMES[s]][head] for x in documents]


def test_the_mean_is_over_all_queries_that_have_the_number():
    documents = corpus(12)
    found = merge_tallies([tally(x, i) for i, x in enumerate(documents)], keep=2).mean
    for s, (row, (layer, head)) in itertools.product(
        (0, 1), enumerate([(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)])
    ):
        expected = np.nanmean(np.concatenate(stack(documents, s, layer, head)))
        np.testing.assert_allclose(found[s, row], expected, rtol=1e-12)


def test_the_interval_is_that_of_a_bootstrap_over_documents():
    rng = np.random.default_rng(1)
    # long documents have large numbers: tokens alone would give a narrow interval
    documents = []
    for _ in range(60):
        n = int(rng.integers(5, 80))
        level = 0.2 + 0.005 * n + 0.1 * rng.standard_normal()
        documents.append([{name: level + 0.05 * rng.random((1, n)) for name in NAMES}])
    found = merge_tallies(
        [tally(x, i, layers=("one",)) for i, x in enumerate(documents)], keep=1
    )
    y = np.array([x[0]["sink"].sum() for x in documents])
    n = np.array([x[0]["sink"].size for x in documents])
    picks = rng.integers(0, 60, (20_000, 60))
    means = y[picks].sum(1) / n[picks].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    half = found.half()[0, 0]
    np.testing.assert_allclose(2 * half, high - low, rtol=0.06)
    rest = 60 / 59 * ((y - y.sum() / n.sum() * n) ** 2).sum()
    np.testing.assert_allclose(found.deviation[0, 0], np.sqrt(rest) / n.sum())
    every = np.concatenate([x[0]["sink"][0] for x in documents])
    assert half > 3 * 1.96 * every.std() / np.sqrt(every.size)  # not that of tokens


def test_the_interval_holds_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(2)
    hits = []
    for _ in range(400):
        parts = [
            tally([{name: rng.beta(2, 5, (1, 4)) for name in NAMES}], layers=("one",))
            for _ in range(15)
        ]
        found = merge_tallies(parts, keep=1)
        hits.append(abs(found.mean[0, 0] - 2 / 7) < found.half()[0, 0])
    assert 0.92 < np.mean(hits) < 0.98


@pytest.mark.parametrize(
    ("freedom", "expected"), [(10, 2.2281), (30, 2.0423), (100, 1.9840), (1e9, 1.9600)]
)
def test_an_interval_of_few_documents_is_wider(freedom, expected):
    np.testing.assert_allclose(student(0.95, np.array(freedom)), expected, rtol=2e-3)


def test_an_interval_for_all_heads_at_once_holds_for_few_documents():
    for heads, expected in ((270, 7.1511), (2_000, 9.7662)):  # of SciPy
        found = student(1 - 0.05 / heads, np.array(7.0))
        np.testing.assert_allclose(found, expected, rtol=1e-2)


def test_fewer_than_eight_documents_have_no_interval_and_equal_ones_one_of_nothing():
    few = merge_tallies([tally(x, i) for i, x in enumerate(corpus(7))], keep=1)
    assert np.isnan(few.half()).all()
    same = merge_tallies(
        [tally(draw(np.random.default_rng(0), n=9)) for _ in range(9)], keep=1
    )
    assert (same.half() < 1e-14).all()
    assert (same.doubt == 2).all()
    assert (few.doubt == 0).all()


def tally_means(x, n):
    """Return the tally of documents with the means x (documents, heads)."""
    shape = (1, x.shape[1])
    sums = merge_sums(sum_draw(n, n * x)[:, None])
    top = np.full((*shape, 1), NOWHERE)
    return Tally(("one",), shape[1:], ("sink",), sums, np.ones(shape), top)


@pytest.mark.parametrize("base", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("documents", [8, 30, 100])
def test_few_documents_that_differ_are_named_wherever_the_others_are(base, documents):
    """5 % of them carry the effect: Student's interval misses the truth at 8 and 30."""
    rng = np.random.default_rng(documents)
    heads, effect = 2_000, 0.2
    carries = rng.random((documents, heads)) < 0.05
    n = rng.integers(100, 400, carries.shape).astype(float)
    found = tally_means(base + effect * carries, n)
    hits = np.abs(found.mean - base - 0.05 * effect) < found.half()
    assert hits.mean() < {8: 0.4, 30: 0.8, 100: 0.93}[documents]
    count = carries.sum(0)
    assert (found.doubt[0][count == 0] == 2).all()
    seen = (count > 0) & (25 * count < documents * 5)
    assert (found.doubt[0][seen] == 1).mean() > 0.7
    if documents > 8:
        assert (found.doubt > 0).mean() > 0.97
    plain = tally_means(rng.normal(base, 0.1, carries.shape), n)
    assert (plain.doubt > 0).mean() < 0.15


def test_results_of_earlier_versions_have_no_doubt():
    before = result(7)
    table = pq.read_table(pa.BufferReader(pack_result(before))).drop_columns(CUBES)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    after = unpack_result(bytes(sink.getvalue())).tally
    np.testing.assert_array_equal(after.sums[..., :6], before.tally.sums[..., :6])
    assert np.isnan(after.sums[..., 6:]).all()
    both = merge_tallies([after] * 9, keep=1)
    assert (both.doubt != 1).all()


def test_the_examples_are_the_largest_numbers_one_of_each_document():
    documents = corpus(9)
    found = merge_tallies([tally(x, i) for i, x in enumerate(documents)], keep=3).top
    for s, (row, at) in itertools.product((0, 1), enumerate([(0, 0), (0, 1)])):
        rows = stack(documents, s, *at)
        rows = [
            np.where(np.arange(len(x)) < 1, -1, x) for x in rows
        ]  # it had no choice
        best = sorted(range(9), key=lambda i: -rows[i].max())[:3]
        place = found[s, row]
        assert place["document"].tolist() == best
        assert place["position"].tolist() == [int(rows[i].argmax()) for i in best]
        np.testing.assert_array_equal(place["value"], [rows[i].max() for i in best])


def test_places_where_a_head_had_no_choice_are_none():
    rows = np.ones((1, 70))
    rows[0, 69] = 0.5  # the only one that is more than 64 tokens in, and 64 to 68
    rows[0, 64:69] = 0.1
    local = tally_document(["a"], [{"local": rows}], ["local"], document=0)
    assert local.top[0, 0, 0].item() == (0.5, 0, 0, 69)
    assert local.peak[0, 0] == 1
    sink = tally_document(["a"], [{"sink": rows[:, :1]}], ["sink"], document=0)
    assert sink.top[0, 0, 0] == NOWHERE
    assert sink.mean[0, 0] == 1


def test_pieces_of_one_document_are_one_draw():
    whole = draw(np.random.default_rng(3), n=20)
    halves = [
        [{k: v[:, cut] for k, v in layer.items()} for layer in whole]
        for cut in (slice(0, 8), slice(8, 20))
    ]
    one = join_pieces([tally(x, 5, piece) for piece, x in enumerate(halves)])
    np.testing.assert_allclose(one.sums, tally(whole, 5).sums, rtol=1e-12)
    row = whole[0]["sink"][0].copy()
    row[[0, 8]] = -1  # the first of a piece had no choice
    at = int(row.argmax())
    assert one.top[0, 0, 0]["piece"] == (at >= 8)
    assert one.top[0, 0, 0]["position"] == at - 8 * (at >= 8)


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(6)), st.integers(1, 5), st.integers(0, 2**16))
def test_merging_in_any_order_and_grouping_gives_the_same(order, cut, seed):
    parts = [tally(x, i) for i, x in enumerate(corpus(6, seed))]
    one = merge_tallies(parts, keep=2)
    mixed = [parts[i] for i in order]
    two = merge_tallies(
        [merge_tallies(mixed[:cut], keep=2), merge_tallies(mixed[cut:], keep=2)], keep=2
    )
    np.testing.assert_allclose(one.sums, two.sums, rtol=1e-9)
    np.testing.assert_array_equal(one.peak, two.peak)
    np.testing.assert_array_equal(one.top, two.top)


def test_a_layer_that_was_not_seen_in_one_document_counts_for_the_others():
    rng = np.random.default_rng(4)
    both, one = draw(rng), draw(rng)[1:]
    found = merge_tallies([tally(one, 0, layers=("second",)), tally(both, 1)], keep=2)
    assert (found.layers, found.heads) == (("first", "second"), (2, 3))
    expected = np.concatenate([one[0]["sink"][0], both[1]["sink"][0]]).mean()
    np.testing.assert_allclose(found.mean[0, 2], expected)
    np.testing.assert_allclose(found.mean[0, 0], both[0]["sink"][0].mean())
    assert found.top[0, 0, 1] == NOWHERE


@pytest.mark.parametrize("order", [*itertools.permutations(["ad", "abd", "abcd"])])
def test_layers_stand_in_the_order_in_which_they_ran(order):
    numbers = draw(np.random.default_rng(7))[1:]
    parts = [tally(numbers * len(x), layers=tuple(x)) for x in order]
    assert merge_tallies(parts, keep=1).layers == tuple("abcd")


def test_layers_are_told_apart_by_name_and_not_by_place():
    rng = np.random.default_rng(6)
    one, two = draw(rng)[1:], draw(rng)[1:]
    parts = [tally(one, 0, layers=("a",)), tally(two, 1, layers=("b",))]
    found = merge_tallies(parts, keep=1)
    assert (found.layers, found.heads) == (("a", "b"), (3, 3))
    np.testing.assert_allclose(found.mean[0, :3], one[0]["sink"].mean(1))
    np.testing.assert_allclose(found.mean[0, 3:], two[0]["sink"].mean(1))


def result(number, documents=None):
    numbers = documents or draw(np.random.default_rng(number))
    return Result(
        first=number,
        last=number + 1,
        tally=merge_tallies([tally(numbers, number)], keep=2),
        documents=1,
        tokens=10 + number,
        n_aside=1,
        aside=((f"{number:032x}", f"</script>\u202e{number}", "it was empty"),),
        missed={"third": "it was never heard"},
    )


def test_a_result_comes_back_from_its_file_bit_by_bit():
    before = result(7)
    after = unpack_result(pack_result(before))
    for name in ("sums", "peak", "top"):
        a, b = (getattr(x.tally, name) for x in (before, after))
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
    assert {**vars(after), "tally": 0} == {**vars(before), "tally": 0}


def fill(folder, numbers, keep=2):
    store = Store(folder, keep=keep)
    for number in numbers:
        store.commit(pack_result(result(number)))
        while store.fold():
            pass
    return store


def check_same(one, two):
    assert one.tally.sums.tobytes() == two.tally.sums.tobytes()
    assert one.tally.top.tobytes() == two.tally.top.tobytes()
    assert {**vars(one), "tally": 0} == {**vars(two), "tally": 0}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The total of 150 shards in their order; two groups are merged, 22 are left."""
    folder = tmp_path_factory.mktemp("plain")
    store = fill(folder, range(150))
    assert len(list(folder.glob("1-*"))) == 2
    assert len(list(folder.glob("0-*"))) == 22
    return store.total()


def test_the_total_has_the_same_bits_in_whatever_order_results_came(tmp_path, plain):
    order = np.random.default_rng(5).permutation(150).tolist()
    check_same(fill(tmp_path, order).total(), plain)


def test_the_total_is_that_of_one_merge_of_everything(plain):
    one = merge_results([result(i) for i in range(150)], keep=2)
    np.testing.assert_allclose(one.tally.sums, plain.tally.sums, rtol=1e-12)
    assert (one.documents, one.tokens, one.n_aside) == (150, plain.tokens, 150)


def test_a_store_that_is_opened_again_goes_on_where_it_was(tmp_path, plain):
    fill(tmp_path, range(0, 150, 2))
    store = Store(tmp_path, keep=2)
    assert [store.has(n) for n in (0, 1, 148, 149)] == [True, False, True, False]
    check_same(fill(tmp_path, range(1, 150, 2)).total(), plain)


def test_a_result_that_comes_twice_is_counted_once(tmp_path, plain):
    fill(tmp_path, [*range(100), 3, 70, 99])
    check_same(fill(tmp_path, [*range(150), 149, 120]).total(), plain)
    assert len(list(tmp_path.iterdir())) == 24


def test_a_kill_between_the_merged_file_and_the_removal_counts_nothing_twice(
    tmp_path, plain
):
    store = fill(tmp_path, range(64))
    for number in (0, 17, 63):  # as if their removal never happened
        store.write(0, result(number), pack_result(result(number)))
    again = Store(tmp_path, keep=2)
    assert again.first_missing == 64
    assert not list(tmp_path.glob("0-*"))
    check_same(fill(tmp_path, range(150)).total(), plain)


def test_a_single_bit_is_never_trusted(tmp_path):
    store = fill(tmp_path, [0])
    (path,) = tmp_path.iterdir()
    data, wrong = path.read_bytes(), 0
    for at in range(0, len(data), 37):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        store = Store(tmp_path, keep=2)
        wrong += len(store.damaged)
        assert not store.has(0)
        path.with_suffix(".damaged").unlink()
    assert wrong == -(-len(data) // 37)


@pytest.mark.parametrize("harm", ["flip", "cut", "swap", "name"])
def test_a_damaged_file_is_set_aside_and_its_shards_are_missing(tmp_path, plain, harm):
    fill(tmp_path, range(70))
    path = sorted(tmp_path.glob("0-*"))[2]
    data = bytearray(path.read_bytes())
    if harm == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif harm == "cut":
        path.write_bytes(data[:-100])
    elif harm == "swap":  # a whole file, of another shard
        path.rename(path.with_name(path.name.replace("0-000000066", "0-000000099")))
        path = path.with_name(path.name.replace("0-000000066", "0-000000099"))
    else:
        path = path.rename(tmp_path / "0-what-is-this.parquet")
    store = Store(tmp_path, keep=2)
    assert len(store.damaged) == 1
    assert path.name in store.damaged[0]
    assert not store.has(66)
    assert store.has(67)
    assert path.with_suffix(".damaged").exists()
    check_same(fill(tmp_path, [*range(66, 150)]).total(), plain)


def test_a_damaged_merged_file_leaves_the_ones_after_it(tmp_path, plain):
    fill(tmp_path, range(150))
    first = min(tmp_path.glob("1-*"))
    first.write_bytes(first.read_bytes()[:-1])
    store = Store(tmp_path, keep=2)
    assert [store.has(n) for n in (0, 63, 64, 149)] == [False, False, True, True]
    check_same(fill(tmp_path, range(64)).total(), plain)


def test_what_is_no_result_is_refused_in_one_sentence():
    for data in (b"", b"PAR1", pack_result(result(0))[:-50]):
        with pytest.raises(FileError, match="no result of an atlas"):
            unpack_result(data)


def test_shards_with_a_gap_between_them_are_never_added():
    with pytest.raises(FileError, match="do not follow"):
        merge_results([result(0), result(2)], keep=1)
