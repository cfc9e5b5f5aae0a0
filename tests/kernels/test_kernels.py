"""The kernels, in Triton's interpreter, against the definition in float64."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_cases import DTYPES, draw_case, name_masks

from regard import masks
from regard.kernels import tile_lists
from regard.kernels.run_kernels import KernelInput, run_columns, run_rows
from regard.stats.kernel_pass import read_kernel_input

# a row without keys: -inf - -inf, which the kernel discards
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
SEEDS = range(7)
# products of halves are exact in float32, and so is what is left to round
TOLERANCE = {"rtol": 3e-5, "atol": 1e-5}


def agree(found, expected):
    torch.testing.assert_close(found.double(), expected, **TOLERANCE)


def share(features, heads):
    return features.repeat_interleave(heads // len(features), 0)


def check_rows(case, found):
    weights, logits = case.truth.weights, case.truth.logits
    heads = len(weights)
    agree(found.total, weights.sum(-1))
    agree(found.entropy, case.truth.entropy)
    agree(found.largest_logit, logits.amax(-1))
    agree(found.sums, weights @ share(case.key_features, heads))
    at = case.targets.clamp(min=0).expand(heads, -1, -1)
    there = (case.targets >= 0).expand(heads, -1, -1)
    agree(found.picked, torch.where(there, weights.gather(2, at), 0.0))


def check_top(case, found):
    """The largest logits in order, and keys that have them."""
    few = min(case.top, case.record.k.shape[1])
    logits = case.truth.logits
    expected = logits.topk(few, -1).values
    agree(found.top_logits[..., :few], expected)
    keys = found.top_keys.long()
    assert bool(((keys == -1) == (found.top_logits == -math.inf)).all())
    there = keys[..., :few] >= 0
    held = logits.gather(2, keys[..., :few].clamp(min=0))
    agree(held[there], expected[there])
    for a in range(few):
        for b in range(a):
            assert not bool(
                ((keys[..., a] == keys[..., b]) & (keys[..., a] >= 0)).any()
            )


def check_columns(case, found):
    weights = case.truth.weights
    agree(found.total, weights.sum(1))
    agree(found.largest, weights.amax(1))
    agree(found.sums, weights.mT @ share(case.query_features, len(weights)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", name_masks(1))
@pytest.mark.parametrize("seed", SEEDS)
def test_both_kernels_are_the_definition(seed, mask, dtype):
    case = draw_case(seed, mask, dtype)
    call = read_kernel_input(case.record)
    rows = run_rows(call, case.key_features, case.targets, case.top)
    check_rows(case, rows)
    check_top(case, rows)
    check_columns(case, run_columns(call, case.query_features))


def test_the_page_has_the_number_of_combinations():
    page = Path(__file__).parents[2] / "docs" / "accelerators.md"
    n_masks = len(name_masks(1))
    told = f"{len(SEEDS) * n_masks * len(DTYPES)} combinations of {n_masks} masks"
    assert told in " ".join(page.read_text("utf-8").split())


def make_call(n_q=150, n_k=150, width=16, heads=2, **options):
    make = torch.Generator().manual_seed(0)
    q, k = (torch.randn(heads, n, width, generator=make) for n in (n_q, n_k))
    options = {"mask": masks.causal(), "lse": torch.full((heads, n_q), 6.0), **options}
    return KernelInput(q=q, k=k, scale=width**-0.5, **options)


def test_of_equal_logits_the_earlier_keys_come_first():
    call = make_call(n_q=70, n_k=150, mask=masks.window(60, 60) & ~masks.keys(3, 5))
    found = run_rows(replace(call, k=0 * call.k), top=4)
    assert found.top_keys[0, 0].tolist() == [0, 1, 2, 5]
    assert found.top_keys[1, 69].tolist() == [9, 10, 11, 12]
    found = run_rows(replace(call, mask=masks.keys(148, 149)), top=4)
    assert found.top_keys[0, 0].tolist() == [148, -1, -1, -1]
    assert found.top_logits[0, 0].tolist()[1:] == [-math.inf] * 3


def test_a_lost_row_is_nan_and_so_are_the_keys_that_it_may_attend_to():
    lse = torch.full((2, 150), 6.0)
    lse[1, 100] = math.nan
    call = make_call(lse=lse)
    rows = run_rows(call, torch.ones(1, 150, 1), torch.zeros(150, 1))
    for x in (rows.total, rows.entropy, rows.largest_logit, rows.sums, rows.picked):
        assert x.isnan().nonzero()[:, :2].tolist() == [[1, 100]]
    columns = run_columns(call, torch.ones(1, 150, 1))
    for x in (columns.total, columns.largest, columns.sums[..., 0]):
        assert bool(x[1, :101].isnan().all())
        assert not bool(x[1, 101:].isnan().any())
        assert not bool(x[0].isnan().any())


def test_lists_of_few_blocks_give_the_same_numbers(monkeypatch):
    call = make_call(n_q=300, n_k=200, mask=name_masks(2)["per head"])
    whole = run_rows(call), run_columns(call)
    monkeypatch.setattr(tile_lists, "AT_ONCE", 1)
    monkeypatch.setattr(tile_lists, "CELLS", 1)
    parts = run_rows(call), run_columns(call)
    assert torch.equal(whole[0].entropy, parts[0].entropy)
    assert torch.equal(whole[1].largest, parts[1].largest)


@pytest.mark.parametrize("side", ["rows", "columns"])
def test_only_undecided_tiles_have_bits_and_a_list_has_few(side, monkeypatch):
    shape, block = (4, 8_192, 8_192), (128, 64)
    tiled = tile_lists.TiledMask(masks.causal(), 0, shape, block)
    (lists,) = tiled.list_tiles(side, torch.zeros(0))
    assert lists.bits.shape == (
        2 * 64,
        128,
    )  # two tiles across each block of the diagonal
    full = (lists.ends[..., 1] - lists.ends[..., 0]).sum()
    assert int(full) == 2 * 64 * 63 // 2
    monkeypatch.setattr(tile_lists, "AT_ONCE", 256)
    scattered = tile_lists.TiledMask(
        name_masks(1)["every third"], 0, (4, 2_048, 2_048), block
    )
    sizes = [len(x.bits) for x in scattered.list_tiles(side, torch.zeros(0))]
    assert sum(sizes) == 2_048 * 2_048 // (128 * 64)
    assert max(sizes) <= 256


@pytest.mark.parametrize(("n_q", "n_k"), [(0, 5), (5, 0)])
def test_without_queries_or_keys_there_is_nothing(n_q, n_k):
    call = make_call(n_q, n_k)
    rows, columns = run_rows(call), run_columns(call)
    assert rows.total.tolist() == [[0.0] * n_q] * 2
    assert rows.largest_logit.tolist() == [[-math.inf] * n_q] * 2
    assert columns.largest.tolist() == [[0.0] * n_k] * 2


def round_to_tf32(x):
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x1000) & 0xFFFFE000).view(np.float32)


def test_three_products_of_tf32_have_the_precision_of_float32():
    """What NVIDIA's matrix units do with float32; the interpreter multiplies float32 itself."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(64, 128)).astype(np.float32) for _ in range(2))
    exact = q.astype(np.float64) @ k.T.astype(np.float64)
    parts = [(round_to_tf32(x), round_to_tf32(x - round_to_tf32(x))) for x in (q, k)]
    (q_high, q_low), (k_high, k_low) = parts
    three = q_low @ k_high.T + q_high @ k_low.T + q_high @ k_high.T
    single = np.abs(q @ k.T - exact).max()
    assert np.abs(three - exact).max() < 4 * single
    assert np.abs(q_high @ k_high.T - exact).max() > 100 * single
