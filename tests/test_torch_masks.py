"""Masks given to torch: what its own functions return is what the definition returns."""

import warnings

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

import regard
from regard import causal, masks, padding, same, window
from regard.engine import block_mask, sdpa_arguments

KEYS = 70  # more than one tile of 32, the last one is cut


def draw(rng, queries, heads=2):
    shapes = [(2, heads, n, 8) for n in (queries, KEYS, KEYS)]
    return [torch.tensor(rng.normal(size=shape)) for shape in shapes]


MASKS = {
    "causal": causal(),
    "window": causal() & window(9),
    "documents": causal() & same(np.arange(KEYS) // 20),
    "lengths": causal() & padding(lengths=[KEYS, 50]),
    "heads": masks.per_head([causal(), causal() & window(3)]),
    "prefix": masks.prefix(5),
}
STARTS = [(KEYS, 0), (1, KEYS - 1), (33, KEYS - 33), (33, 10), (40, np.array([30, 7]))]


def run_flex(q, k, v, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # once in a process: it is not compiled
        return flex_attention(q, k, v, **options)


def find_tiles(mask, blocks, start):
    """Return which tiles have a cell; uncompiled, flex_attention does not look."""
    cells = torch.tensor(mask.dense((2, 2, *blocks.seq_lengths), q_start=start))
    n_q, n_k = (-n % 32 for n in blocks.seq_lengths)
    cells = torch.nn.functional.pad(cells, (0, n_k, 0, n_q))
    return cells.unflatten(3, (-1, 32)).unflatten(2, (-1, 32)).any(-1).any(-2)


@pytest.mark.parametrize(("queries", "start"), STARTS)
def test_sdpa_computes_what_the_mask_says(rng, queries, start):
    q, k, v = draw(rng, queries)
    for mask in MASKS.values():
        arguments = sdpa_arguments(mask, (2, 2, queries, KEYS), q_start=start)
        torch.testing.assert_close(
            scaled_dot_product_attention(q, k, v, **arguments),
            regard.attention(q, k, v, mask, q_start=start).out,
        )


@pytest.mark.parametrize(("name", "at"), [*zip(MASKS, [0, 1, 2, 3, 4, 3], strict=True)])
def test_flex_attention_computes_what_the_mask_says(rng, name, at):
    queries, start = STARTS[at]
    q, k, v = draw(rng, queries)
    blocks = block_mask(MASKS[name], (2, 2, queries, KEYS), q_start=start, block=32)
    tiles = find_tiles(MASKS[name], blocks, start)
    assert torch.equal(blocks.to_dense().bool().expand_as(tiles), tiles)
    torch.testing.assert_close(
        run_flex(q, k, v, block_mask=blocks),
        regard.attention(q, k, v, MASKS[name], q_start=start).out,
    )


@pytest.mark.parametrize("mask", [None, causal(), causal() & window(9)])
@pytest.mark.parametrize(("queries", "start"), STARTS)
def test_a_bias_is_added_where_the_mask_allows(rng, mask, queries, start):
    q, k, v = draw(rng, queries)
    bias = masks.alibi(np.array([0.5, 0.03]))
    arguments = sdpa_arguments(
        mask, (2, 2, queries, KEYS), q_start=start, bias=bias, dtype=q.dtype
    )
    assert arguments["attn_mask"].dtype == q.dtype
    torch.testing.assert_close(
        scaled_dot_product_attention(q, k, v, **arguments),
        regard.attention(q, k, v, mask, bias=bias, q_start=start).out,
    )


def test_a_row_without_keys_is_zero_with_a_bias_too(rng):
    q, k, v = draw(rng, KEYS)
    bias = masks.alibi(np.array([0.5, 0.03]))
    mask = padding(lengths=[KEYS, 0])
    arguments = sdpa_arguments(mask, (2, 2, KEYS, KEYS), bias=bias, dtype=q.dtype)
    out = scaled_dot_product_attention(q, k, v, **arguments)
    assert (out[1] == 0).all()
    assert (out[0] != 0).all()


def test_an_ambiguous_position_is_refused():
    for make in (block_mask, sdpa_arguments):
        with pytest.raises(regard.errors.PositionError, match="Write q_start=3 if"):
            make(causal(), (1, 4))
    with pytest.raises(regard.errors.PositionError, match="Write q_start=3 if"):
        sdpa_arguments(None, (1, 1, 1, 4), bias=masks.alibi(np.array([0.5])))


def test_one_new_token_needs_no_mask():
    nothing = {"attn_mask": None, "is_causal": False}
    assert sdpa_arguments(causal(), (1, 4), q_start=3) == nothing
    dense = sdpa_arguments(causal(), (2, 4), q_start=2)["attn_mask"]
    assert dense.tolist() == [[True, True, True, False], [True] * 4]
