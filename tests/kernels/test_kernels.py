"""The kernels, in Triton's interpreter, against the definition in float64."""

import math
from dataclasses import replace

import pytest
import torch
from attention_cases import DTYPES, draw_case, name_masks

from regard import masks
from regard.kernels import run_kernels, tile_lists
from regard.kernels.run_kernels import KernelCall, run_columns, run_rows
from regard.stats.kernel_pass import read_call

# a row without keys: -inf - -inf, which the kernel discards
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
SEEDS = range(7)
# products of halves are exact in float32, and so is what is left to round
TOLERANCE = {"rtol": 3e-5, "atol": 3e-6}


def agree(found, expected):
    torch.testing.assert_close(found.double(), expected, **TOLERANCE)


def share(features, heads):
    return features.repeat_interleave(heads // len(features), 0)


def check_rows(case, found):
    weights, logits = case.truth.weights, case.truth.logits
    heads = len(weights)
    agree(found.total, weights.sum(-1))
    torch.testing.assert_close(
        found.entropy.double(), case.truth.entropy, rtol=3e-5, atol=1e-5
    )
    torch.testing.assert_close(
        found.largest_logit.double(), logits.amax(-1), rtol=3e-5, atol=1e-5
    )
    agree(found.sums, weights @ share(case.key_features, heads))
    at = case.targets.clamp(min=0).expand(heads, -1, -1)
    there = (case.targets >= 0).expand(heads, -1, -1)
    agree(found.picked, torch.where(there, weights.gather(2, at), 0.0))


def check_top(case, found):
    """The largest logits in order, and keys that have them."""
    few = min(case.top, case.record.k.shape[1])
    logits = case.truth.logits
    expected = logits.topk(few, -1).values
    torch.testing.assert_close(
        found.top_logits[..., :few].double(), expected, rtol=3e-5, atol=1e-5
    )
    keys = found.top_keys.long()
    assert bool(((keys == -1) == (found.top_logits == -math.inf)).all())
    there = keys[..., :few] >= 0
    held = logits.gather(2, keys[..., :few].clamp(min=0))
    torch.testing.assert_close(held[there], expected[there], rtol=3e-5, atol=1e-5)
    for a in range(few):
        for b in range(a):
            assert not bool(((keys[..., a] == keys[..., b]) & (keys[..., a] >= 0)).any())


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
    call = read_call(case.record)
    rows = run_rows(call, case.key_features, case.targets, case.top)
    check_rows(case, rows)
    check_top(case, rows)
    check_columns(case, run_columns(call, case.query_features))
