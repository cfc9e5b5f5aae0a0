"""Tiles of a map against the dense square, and against the pyramid."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.errors import OptionError
from regard.masks.patterns import causal, where, window
from regard.recording.record import Record
from regard.stats.pyramid import Pyramid
from regard.stats.tile import read_tile
from regard.stats.tile_walk import walk

N_Q, N_K = 70, 90  # queries stand behind 20 keys


def make_record(mask, n_q=N_Q, n_k=N_K):
    """Return a record of 4 heads that share 2, and its weights by definition."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(4, n_q, 8)), rng.normal(size=(2, n_k, 8))
    q_at, k_at = np.arange(n_q) + n_k - n_q, np.arange(n_k)
    allowed = np.ones((n_q, n_k), bool)
    if mask is not None:
        one = np.zeros((1, 1, 1, 1), int)
        cells = mask(one, one, q_at.reshape(1, 1, -1, 1), k_at.reshape(1, 1, 1, -1))
        allowed = np.broadcast_to(cells[0, 0], allowed.shape)
    logits = 0.35 * np.einsum("hid,hjd->hij", q, np.repeat(k, 2, 0))
    logits = np.where(allowed, logits, -math.inf)
    total = np.exp(logits).sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.log(total)
    weights = np.exp(logits) / np.where(total > 0, total, 1)[..., None]
    arrays = {"q": q, "k": k, "lse": lse, "q_positions": q_at, "k_positions": k_at}
    arrays = {name: torch.from_numpy(x) for name, x in arrays.items()}
    return Record(name="layer", scale=0.35, mask=mask, **arrays), weights, allowed


MASKS = {
    "none": None,
    "causal": causal(),
    "window": causal() & window(9),
    "some rows blind": where(lambda b, h, q, k: (q % 3 == 0) & (k % 2 == 0)),
}
RECORDS = {name: make_record(mask) for name, mask in MASKS.items()}


@st.composite
def ranges(draw, n):
    start = draw(st.integers(0, n - 1))
    return slice(start, draw(st.integers(start + 1, n + 20)))


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(sorted(RECORDS)),
    st.integers(0, 3),
    ranges(N_Q),
    ranges(N_K),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.sampled_from(["max", "mass"]),
)
def test_any_rectangle_at_any_zoom_is_exact(name, head, rows, keys, size, how):
    record, weights, allowed = RECORDS[name]
    found = read_tile(record, head, rows, keys, size, how=how)
    across = math.ceil((keys.stop - keys.start) / size[1])
    down = math.ceil((rows.stop - rows.start) / size[0])
    assert found.cells == (down, across)
    cells, seen = weights[head, rows, keys], allowed[rows, keys]
    assert found.values.shape == tuple(
        math.ceil(n / c) for n, c in zip(cells.shape, found.cells, strict=True)
    )
    for a in range(found.values.shape[0]):
        for b in range(found.values.shape[1]):
            part = (
                slice(a * down, (a + 1) * down),
                slice(b * across, (b + 1) * across),
            )
            x = cells[part].max() if how == "max" else cells[part].sum(1).mean()
            assert abs(float(found.values[a, b]) - x) < 1e-12
            assert bool(found.allowed[a, b]) == bool(seen[part].any())


def test_one_cell_a_pixel_is_the_weight_itself():
    record, weights, _ = RECORDS["causal"]
    for how in ("max", "mass"):
        found = read_tile(record, 2, slice(5, 37), slice(8, 40), 32, how=how)
        assert found.cells == (1, 1)
        assert np.abs(found.values.numpy() - weights[2, 5:37, 8:40]).max() < 1e-14
        assert found.how == "walk: one weight a pixel"
    assert (found.rows, found.keys, found.head) == (slice(5, 37), slice(8, 40), 2)


def test_tiles_fit_together_into_the_levels_of_the_pyramid():
    record, _, _ = make_record(causal(), n_q=700, n_k=1300)
    (levels,) = walk(record, Pyramid(finest=1), heads=(1,))
    for level in (1, 3, 4):
        side = 32 * 2**level
        for how, maps in (("max", levels.max), ("mass", levels.mass)):
            rows = [
                torch.cat(
                    [
                        read_tile(
                            record,
                            1,
                            slice(i, i + side),
                            slice(j, j + side),
                            32,
                            how=how,
                        ).values
                        for j in range(0, 1300, side)
                    ],
                    1,
                )
                for i in range(0, 700, side)
            ]
            assert torch.allclose(torch.cat(rows), maps[level].values[0], rtol=1e-12)


@pytest.mark.parametrize("how", ["max", "mass"])
def test_a_rectangle_of_many_blocks_is_exact(how):
    record, weights, allowed = make_record(causal(), n_q=700, n_k=1300)
    found = read_tile(record, 3, slice(0, 700), slice(0, 1300), (50, 100), how=how)
    assert found.cells == (14, 13)
    cells = weights[3].reshape(50, 14, 100, 13)
    pooled = cells.max((1, 3)) if how == "max" else cells.sum(3).mean(1)
    assert np.abs(found.values.numpy() - pooled).max() < 1e-12
    seen = allowed.reshape(50, 14, 100, 13).any((1, 3))
    assert (found.allowed.numpy() == seen).all()
    assert 0 < seen.sum() < seen.size


def test_a_part_may_be_counted_from_the_end_or_left_open():
    record, weights, _ = RECORDS["none"]
    found = read_tile(record, 0, slice(-10, None), slice(None, 12), 20)
    assert found.rows == slice(60, 70)
    assert np.abs(found.values.numpy() - weights[0, -10:, :12]).max() < 1e-14


@pytest.mark.parametrize("past", [slice(70, 90), slice(500, 600)])
def test_past_the_end_there_are_no_pixels(past):
    record, _, _ = RECORDS["causal"]
    found = read_tile(record, 0, past, slice(0, 20), 10)
    assert found.values.shape == (0, 10)
    assert found.cells == (2 if past.start == 70 else 10, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": 0}, "size=0, expected the most pixels"),
        ({"size": (4, 4, 4)}, "expected the most pixels"),
        ({"rows": slice(0, 9, 3)}, "rows=.*, expected a run"),
        ({"keys": 7}, "keys=7, expected a run"),
        ({"head": 4}, "4 is no head of layer, expected numbers from 0 to 3"),
        ({"how": "mean"}, 'expected "max" or "mass"'),
    ],
)
def test_what_cannot_be_read_is_refused(change, words):
    given = {"head": 0, "rows": slice(0, 8), "keys": slice(0, 8), "size": 4}
    record, _, _ = RECORDS["none"]
    with pytest.raises(OptionError, match=words):
        read_tile(record, **given | change)


LONG = """
import json, torch
from memory import read_peak, reset_peak
from regard.engine.choose import attend
from regard.masks.patterns import causal
from regard.recording.record import Record
from regard.stats.tile import read_tile

n, at = 65_536, torch.arange(65_536)
q, k = torch.randn(2, 1, n, 64, generator=torch.Generator().manual_seed(0))
lse = torch.full((1, n), 12.0)
record = Record(name="long", q=q, k=k, lse=lse, scale=0.125, q_positions=at,
                k_positions=at, mask=causal())
read_tile(record, 0, slice(0, 512), slice(0, 512), 256)
before = reset_peak()
found = read_tile(record, 0, slice(32_768, 49_152), slice(0, n), 256, how="mass")
result = {"MB": read_peak() - before, "cells": found.cells}
row = record.weights(slice(32_768, 32_832))[0].double()
result["error"] = float((found.values[0] - row.view(64, 256, 256).sum(2).mean(0)).abs().max())
result["size"] = float(found.values[0].max())
print(json.dumps(result))
"""


@pytest.mark.slow
def test_memory_is_linear_at_65536_tokens(run_apart):
    result = run_apart(LONG)
    assert result["MB"] < 100
    assert result["cells"] == [64, 256]
    assert result["error"] < 1e-5 * result["size"]
