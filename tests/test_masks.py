"""The algebra: every pattern cell by cell, the laws, the look-ups, the drawings."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from formulas import calls
from hypothesis import given

import regard
from regard import masks
from regard.definition.position import alibi_slopes
from regard.engine import attend
from regard.errors import MaskError, PositionError
from regard.masks.__main__ import main
from regard.masks.formula import evaluate, read_start
from regard.masks.tiles import EMPTY, FULL, UNDECIDED

IDS = [0, 0, 0, 1, 1, 2, 2, 2]
VALID = [[True] * 6 + [False] * 2, [False] * 3 + [True] * 5]

CELLS = {  # each pattern beside the predicate it stands for
    "everything": (masks.everything(), lambda b, h, q, k: True),
    "causal": (masks.causal(), lambda b, h, q, k: k <= q),
    "window left": (masks.window(2), lambda b, h, q, k: q - 2 <= k <= q),
    "window open left": (masks.window(None, 2), lambda b, h, q, k: k <= q + 2),
    "window open right": (masks.window(2, None), lambda b, h, q, k: q - 2 <= k),
    "window both": (masks.window(2, 3), lambda b, h, q, k: q - 2 <= k <= q + 3),
    "last": (masks.last(3), lambda b, h, q, k: 0 <= q - k < 3),
    "keys": (masks.keys(2, 5), lambda b, h, q, k: 2 <= k < 5),
    "prefix": (masks.prefix(3), lambda b, h, q, k: k <= q or k < 3),
    "prefix by batch": (
        masks.prefix([2, 5]),
        lambda b, h, q, k: k <= q or k < (2, 5)[b],
    ),
    "lengths": (masks.padding(lengths=[3, 8]), lambda b, h, q, k: k < (3, 8)[b]),
    "valid": (masks.padding(VALID), lambda b, h, q, k: VALID[b][k]),
    "same": (masks.same(IDS), lambda b, h, q, k: IDS[q] == IDS[k]),
    "same by batch": (
        masks.same([IDS, IDS[::-1]]),
        lambda b, h, q, k: (IDS, IDS[::-1])[b][q] == (IDS, IDS[::-1])[b][k],
    ),
    "same of two": (
        masks.same(IDS, IDS[::-1]),
        lambda b, h, q, k: IDS[q] == IDS[::-1][k],
    ),
    "where": (
        masks.where(lambda b, h, q, k: (q + k + b + h) % 3 == 0),
        lambda b, h, q, k: (q + k + b + h) % 3 == 0,
    ),
    "per head": (
        masks.per_head([masks.causal(), masks.window(1, 1), masks.keys(0, 2)]),
        lambda b, h, q, k: (k <= q, abs(q - k) <= 1, k < 2)[h],
    ),
    "and": (
        masks.causal() & masks.same(IDS),
        lambda b, h, q, k: k <= q and IDS[q] == IDS[k],
    ),
    "or": (
        masks.window(1) | masks.keys(0, 1),
        lambda b, h, q, k: 0 <= q - k <= 1 or k == 0,
    ),
    "not": (~masks.window(1), lambda b, h, q, k: not 0 <= q - k <= 1),
}


@pytest.mark.parametrize("name", CELLS)
def test_every_pattern_is_its_predicate(library, name):
    formula, predicate = CELLS[name]
    shape, q_start = (2, 3, 5, 8), 3
    dense = np.asarray(formula.dense(shape, q_start=q_start, like=library.make([0.0])))
    expected = np.zeros(shape, dtype=bool)
    for b, h, i, k in itertools.product(*map(range, shape)):
        expected[b, h, i, k] = predicate(b, h, q_start + i, k)
    assert dense.tolist() == expected.tolist()


def test_an_array_is_looked_up_from_its_own_start(library, rng):
    allowed = rng.random((2, 1, 5, 8)) < 0.5
    mask = masks.array(library.asarray(allowed), q_start=3)
    like = library.make([0.0])
    dense = np.asarray(mask.dense((2, 3, 5, 8), q_start=3, like=like))
    assert dense.tolist() == np.broadcast_to(allowed, (2, 3, 5, 8)).tolist()
    part = np.asarray(mask.dense((2, 3, 2, 8), q_start=4, like=like))
    assert part[:, 0].tolist() == allowed[:, 0, 1:3].tolist()


@given(calls())
def test_the_laws_of_logic_hold(call):
    formula, shape, q_start = call

    def dense(mask):
        return mask.dense(shape, q_start=q_start).tolist()

    other = masks.causal()
    assert dense(~~formula) == dense(formula)
    assert dense(~(formula & other)) == dense(~formula | ~other)
    assert dense(formula & ~formula) == np.zeros(shape, dtype=bool).tolist()


@given(calls())
def test_a_rectangle_is_cut_from_the_whole(call):
    formula, shape, q_start = call
    whole = formula.dense(shape, q_start=q_start)
    *lead, n_q, n_k = shape
    i, j = n_q // 2, n_k // 3
    part = evaluate(
        formula,
        (*lead, n_q - i, n_k - j),
        q_start=q_start + i,
        keys=np.arange(j, n_k),
        like=np.empty(0),
    )
    assert (
        np.broadcast_to(part, (*lead, n_q - i, n_k - j)) == whole[..., i:, j:]
    ).all()


def test_repr_is_the_expression():
    names = {n: getattr(masks, n) for n in masks.__all__}
    for text in (
        "causal()",
        "everything()",
        "window(4)",
        "window(4, 2)",
        "window(4, None)",
        "window(None, 2)",
        "causal() & window(4095)",
        "(causal() | keys(0, 4)) & ~same([0, 0, 1])",
        "~(causal() & window(3)) | padding(lengths=[3, 5])",
        "per_head([causal(), window(1, 1)])",
        "same([0, 0, 1], [1, 0])",
        "padding([[True, False], [True, True]])",
        "array([[[[True, False]]]], q_start=3)",
        "alibi([0.5, 0.25])",
    ):
        assert repr(eval(text, names)) == text


def test_repr_of_large_data_is_its_shape():
    mask = masks.same(np.zeros(131_072, dtype=int))
    assert repr(mask) == "same(<int64 array of shape (131072,)>)"
    assert repr(masks.where(max)) == "where(max)"


def test_equal_formulas_are_equal_and_can_be_keys():
    assert masks.causal() & masks.window(3) == masks.causal() & masks.window(3)
    assert masks.causal() != masks.window(3)
    assert len({masks.causal(), masks.causal(), ~masks.causal()}) == 2


def test_masks_have_no_truth_value():
    with pytest.raises(MaskError, match=r"causal\(\) has no truth value. Write & for"):
        bool(masks.causal())


@pytest.mark.parametrize("other", [np.ones((2, 2), bool), True, np.logical_and, 1])
def test_masks_combine_only_with_masks(other):
    with pytest.raises(MaskError, match=r"expected a mask on both sides. Write regard"):
        masks.causal() & other
    with pytest.raises(MaskError, match=r"expected a mask on both sides. Write regard"):
        other | masks.causal()


def test_data_that_does_not_reach_is_refused():
    for mask, shape, q_start, words in (
        (masks.same(IDS), (8, 9), 0, "covers 8 keys, but there are 9"),
        (masks.same(IDS), (2, 8), 7, "query positions 0 to 7, but there are 2 queries"),
        (
            masks.same(IDS),
            (2, 8),
            -1,
            "query positions 0 to 7, but there are 2 queries",
        ),
        (masks.padding(lengths=[1, 2]), (3, 1, 4, 4), 0, "2 batches, but there are 3"),
        (masks.padding(lengths=[1, 2]), (4, 4), 0, "2 batches, but there are 1"),
        (masks.padding(VALID), (2, 1, 4, 9), 0, "covers 8 keys, but there are 9"),
        (
            masks.per_head([masks.causal()] * 3),
            (2, 4, 4),
            0,
            "3 heads, but there are 2",
        ),
        (masks.array(np.ones((3, 4), bool)), (3, 4), 1, "query positions 0 to 2"),
    ):
        with pytest.raises(MaskError, match=words):
            mask.dense(shape, q_start=q_start)
        with pytest.raises(MaskError, match=words):
            mask.tiles(shape, q_start=q_start)


def test_the_end_of_the_queries_is_counted_in_wide_integers():
    ids = masks.same(np.zeros(150, int))
    for dtype in (np.int8, np.uint8, np.int64):
        with pytest.raises(MaskError, match="100 queries from q_start="):
            ids.dense((1, 1, 100, 150), q_start=np.array([100], dtype))


def test_only_formulas_that_compare_positions_ask_where_queries_start():
    for mask in (masks.causal(), masks.window(3), masks.same(IDS), ~masks.last(2)):
        with pytest.raises(PositionError, match="Write q_start=6 if the queries are"):
            mask.dense((2, 8))
    for mask in (
        masks.everything(),
        masks.keys(0, 3),
        masks.padding(lengths=[3]),
        masks.same(IDS, IDS),
        masks.array(np.ones((2, 8), bool)),
    ):
        assert mask.dense((1, 1, 2, 8)).shape == (1, 1, 2, 8)


def test_mixed_documents_are_proved_neither_empty_nor_full():
    for ids in ([0, 1, 0, 1], [0, 1, 1, 0], [0, 2, 1, 1]):
        assert (masks.same(ids).tiles((4, 4), block=2).kinds[0, 0, 0, 1]) == UNDECIDED
    apart = masks.same([0, 1, 2, 2]).tiles((4, 4), block=2).kinds[0, 0]
    assert apart.tolist() == [[UNDECIDED, EMPTY], [EMPTY, FULL]]


def test_bounds_may_be_numbers_of_any_library(library):
    for number in (np.int64(2), np.asarray(2), library.asarray(2)):
        mask = masks.prefix(number)
        assert repr(mask) == "causal() | keys(0, 2)"
        assert (mask.dense((4, 4)) == masks.prefix(2).dense((4, 4))).all()
        given = masks.array([[True]], q_start=number)
        assert repr(given) == "array([[[[True]]]], q_start=2)"
        assert read_start(number) == 2
    assert type(read_start(np.int64(2))) is int  # as kernels and labels want it
    assert masks.causal().tiles((4, 4), block=np.int64(2)).kinds.shape[2:] == (2, 2)
    assert repr(masks.per_head(m for m in [masks.last(1)])) == "per_head([window(0)])"


def test_no_tokens_have_no_tiles():
    none = masks.same(np.zeros(0, dtype=int))
    assert none.tiles((0, 0)).kinds.shape == (1, 1, 0, 0)
    some = masks.same(np.zeros(0, dtype=int), np.arange(3))
    assert some.tiles((0, 3)).kinds.shape == (1, 1, 0, 1)


def test_biases_are_their_formulas(library, rng):
    like = library.make([0.0])
    distance = np.arange(3, 8)[:, None] - np.arange(8)
    values = rng.normal(size=(2, 5))
    numbers = rng.normal(size=(5, 8))
    slopes = alibi_slopes(2)
    bias = masks.alibi(slopes) + masks.table(values) + masks.added(numbers, q_start=3)
    dense = bias.dense((2, 5, 8), q_start=3, like=like)
    clipped = np.clip(-distance, -2, 2) + 2
    expected = -slopes[:, None, None] * np.abs(distance) + values[:, clipped] + numbers
    np.testing.assert_allclose(np.asarray(dense), expected, atol=1e-15)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "uint8", "int64"])
def test_a_distance_is_not_rounded_to_the_dtype_of_the_slopes(rng, dtype):
    """bfloat16 has no 599, which is 600 there, and int8 no number above 127."""
    slopes = torch.ones(1, dtype=getattr(torch, dtype))
    dense = masks.alibi(slopes).dense((1, 1200, 1200), like=slopes)
    at = torch.arange(1200)
    assert torch.equal(dense[0].double(), -(at[:, None] - at).abs().double())
    q, k, v = torch.tensor(rng.normal(size=(3, 1, 1, 1200, 8))).bfloat16()
    far = masks.keys(0, 100)  # only distances that bfloat16 does not have
    bias = -slopes.double() * (at[:, None] - at).abs()
    for compute in (regard.attention, attend):
        out, expected = (
            compute(*(x.to(kind) for x in (q, k, v)), far, bias=b)
            .out[0, 0, -1]
            .double()
            for kind, b in ((q.dtype, masks.alibi(slopes)), (torch.float64, bias))
        )
        assert (out - expected).abs().max() < 0.02


@pytest.mark.parametrize(
    ("dtype", "value"), [("int8", 100), ("uint8", 200), ("float16", -4e4)]
)
def test_biases_add_up_without_overflow(library, dtype, value):
    if library.name == "strict" and dtype == "float16":
        pytest.skip("it has no float16")
    one = masks.added(library.asarray(np.full((1, 1), value, dtype)))
    slopes = masks.alibi(library.asarray(np.zeros(1, dtype)))
    for bias in (one + one, one + one + slopes, slopes + (one + one)):
        dense = bias.dense((1, 1, 1), like=library.make([0.0]))
        assert np.isclose(float(dense[0, 0, 0]), 2 * value, rtol=1e-3)


def test_a_bucket_without_a_value_is_no_other_bucket(library):
    """JAX takes the last value for an index beyond it, and NumPy for -1."""
    words = r"values has 16 buckets, expected 32. Write log_offsets\(16\)\."
    with pytest.raises(MaskError, match=words):
        masks.table(np.zeros((1, 16)), masks.log_offsets(32))
    masks.table(np.zeros((1, 33)), masks.log_offsets(32))
    like = library.make([0.0])
    signed = masks.table(library.make([[1.0, 2, 3]]), lambda offset: offset)
    found = np.asarray(signed.dense((1, 3, 3), like=like)).tolist()
    expected = [[1, 2, 3], [np.nan, 1, 2], [np.nan, np.nan, 1]]
    np.testing.assert_array_equal(found[0], expected)
    beyond = masks.table(library.make([[1.0, 2, 3]]), abs)
    try:
        found = np.asarray(beyond.dense((1, 5, 5), like=like))[0, 0]
    except IndexError:
        return
    np.testing.assert_array_equal(found, [1, 2, 3, np.nan, np.nan])


def test_no_queries_need_no_row_of_an_array(library):
    like, kept = library.make([0.0]), library.asarray(np.ones((1, 1, 0, 3), bool))
    assert masks.array(kept).dense((2, 4, 0, 3), like=like).shape == (2, 4, 0, 3)
    assert masks.array(kept).tiles((2, 4, 0, 3)).settle().kinds.size == 0
    q, k = (library.make(np.zeros((1, 1, n, 4))) for n in (0, 3))
    assert regard.attention(q, k, k, masks.array(kept)).out.shape == (1, 1, 0, 4)
    with pytest.raises(MaskError, match="but there are 2 queries"):
        masks.array(kept).dense((1, 1, 2, 3))


def test_every_pattern_draws_itself():
    """The golden file was looked at: `python -m regard.masks`."""
    result = CliRunner().invoke(main, [], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    drawn = "\n".join(line.rstrip() for line in result.output.splitlines()) + "\n"
    golden = Path(__file__).with_name("masks.txt").read_text(encoding="utf-8")
    assert drawn == golden
    assert CliRunner().invoke(main, ["--tokens", "3"]).exit_code == 2
