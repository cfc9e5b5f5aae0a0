"""The ring against the definition, in real processes; and what happens when one dies."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ring_worker import CASES, GROUPS

import regard
from regard import causal, masks, window
from regard.definition.contract import read_call
from regard.engine import ring
from regard.errors import (
    ArrayError,
    GradientError,
    MaskError,
    OptionError,
    ShapeError,
)

HERE = Path(__file__).parent
TOLERANCE = {"torch.float64": 1e-12, "torch.float32": 5e-6, "torch.bfloat16": 6e-2}


def start(mode, world, folder):
    worker = [sys.executable, str(HERE / "ring_worker.py"), mode]
    return [
        subprocess.Popen([*worker, str(rank), str(world), str(folder)])
        for rank in range(world)
    ]


def stop(ranks):
    for rank in ranks:
        rank.kill()
        rank.wait()


def test_the_ring_equals_the_definition_on_2_3_and_4_ranks(tmp_path):
    ranks = start("check", 4, tmp_path)
    try:
        assert [rank.wait(timeout=150) for rank in ranks] == [0] * 4
    finally:
        stop(ranks)
    rows = [row for f in tmp_path.glob("*.json") for row in json.loads(f.read_text())]
    assert len(CASES) == 80
    assert len(rows) == len(CASES) * sum(GROUPS) == 720
    assert all(len(row["errors"]) >= 5 for row in rows)
    wrong = [r for r in rows if max(r["errors"].values()) > TOLERANCE[r["dtype"]]]
    assert not wrong


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_others_raise_when_a_rank_falls_silent(how, tmp_path):
    ranks = start("circle", 3, tmp_path)
    try:
        until = time.monotonic() + 100
        while len(list(tmp_path.glob("round*"))) < 3:  # all have been round
            assert time.monotonic() < until
            time.sleep(0.05)
        ranks[1].send_signal(how)
        began = time.monotonic()
        for rank in (0, 2):
            ranks[rank].wait(timeout=20)
        assert time.monotonic() - began < 20
    finally:
        stop(ranks)
    said = [(tmp_path / f"error{rank}").read_text() for rank in (0, 2)]
    assert any("got no response from rank 1 " in text for text in said)
    assert all("got no response from rank " in text for text in said)
    assert all("Did it die, or not make the same call?" in text for text in said)
    assert not (tmp_path / "error1").exists()
    assert how == signal.SIGKILL or any("imed out" in text for text in said), said


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("n", [0, 1, 5, 37, 64, 1001])
@pytest.mark.parametrize("place", [ring.zigzag, ring.contiguous])
def test_every_position_has_one_place(place, n, world):
    places = place(n, world)
    assert len(places) == world
    found = torch.cat([ring.list_positions(runs) for runs in places])
    assert found.sort().values.tolist() == list(range(n))
    lengths = [sum(map(len, runs)) for runs in places]
    assert max(lengths) - min(lengths) <= 2


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_zigzag_shares_causal_work_evenly(world):
    def balance(places):  # position p sees p + 1 keys
        cells = [int((ring.list_positions(runs) + 1).sum()) for runs in places]
        return max(cells) / min(cells)

    assert balance(ring.zigzag(1001, world)) < 1.02
    assert balance(ring.contiguous(1001, world)) > 2.5


def sort_pairs(mask, rank, owner):
    """Return the runs of zigzag(16, 2) that meet, and under which mask."""
    places = ring.zigzag(16, 2)
    x = torch.zeros(1, 1, 8, 4)
    options = {"bias": None, "scale": None, "softcap": None, "sink": None}
    call = replace(read_call((x, x, x), None, q_start=0, **options), mask=mask)
    pairs = ring.pair_runs(call, ring.Ring(places, None, rank), owner)
    return [(rows.start // 4, keys.start // 4, pair.mask) for rows, keys, pair in pairs]


def test_pairs_of_runs_are_skipped_or_full_or_the_kernels_own_causal():
    assert sort_pairs(causal(), 0, 0) == [
        (0, 0, causal()),
        (1, 0, None),
        (1, 1, causal()),
    ]
    assert sort_pairs(causal(), 0, 1) == [(1, 0, None), (1, 1, None)]
    assert sort_pairs(causal(), 1, 0) == [(0, 0, None), (1, 0, None)]
    near = causal() & window(3)
    assert [pair[:2] for pair in sort_pairs(near, 1, 0)] == [(0, 0)]


@pytest.fixture
def alone():
    """A group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_a_ring_of_one_takes_any_axes(alone, lead):
    q, k, v = torch.randn(3, *lead, 9, 4, dtype=torch.float64)
    seen = ring.attend(q, k, v, causal(), places=ring.zigzag(9, 1), scale=0.3)
    expected = regard.attention(q, k, v, causal(), scale=0.3)
    torch.testing.assert_close(seen.out, expected.out)
    torch.testing.assert_close(seen.lse, expected.lse)


def test_a_batch_that_shares_its_keys(alone):
    q, k = torch.randn(2, 3, 9, 4), torch.randn(1, 3, 9, 4, requires_grad=True)
    seen = ring.attend(q, k, k, places=ring.zigzag(9, 1))
    torch.testing.assert_close(seen.out, regard.attention(q, k, k).out)
    seen.lse.sum().backward()
    assert k.grad.shape == k.shape


def test_sinks_may_be_minus_infinity_where_a_row_sees_nothing(alone):
    q, k, v = torch.randn(3, 1, 2, 4, 8, dtype=torch.float64)
    mask, sink = causal() & ~window(0), torch.tensor([-torch.inf, 0.5]).double()
    seen = ring.attend(q, k, v, mask, places=FOUR, sink=sink)
    expected = regard.attention(q, k, v, mask, sink=sink)
    torch.testing.assert_close(seen.out, expected.out)
    torch.testing.assert_close(seen.lse, expected.lse)


X = torch.zeros(1, 2, 4, 8)
FOUR = ring.zigzag(4, 1)
REFUSED = {
    "softcap": (
        OptionError,
        "softcap=30.0: the fused kernels of the ring do not support it. "
        "Write regard.engine.attend(...) in one process.",
        {"softcap": 30.0},
    ),
    "scale": (
        OptionError,
        "scale is an array, but the fused kernels of the ring take one number. "
        "Write scale=float(scale), or regard.engine.attend(...).",
        {"scale": torch.tensor(0.5, requires_grad=True)},
    ),
    "learned bias": (
        OptionError,
        "a trainable bias: the fused kernels of the ring do not support it. "
        "Write regard.engine.attend(...) in one process.",
        {"bias": masks.alibi(torch.ones(2, requires_grad=True))},
    ),
    "mask array": (
        MaskError,
        "mask is a Tensor, expected a formula, because each rank holds different rows "
        "and keys. Write regard.masks.array(x) for an array over the positions of the "
        "whole sequence.",
        {"mask": torch.ones(4, 4, dtype=torch.bool)},
    ),
    "bias array": (
        MaskError,
        "bias is a Tensor, expected a formula, because each rank holds different rows "
        "and keys. Write regard.masks.added(x) for an array over the positions of the "
        "whole sequence.",
        {"bias": torch.ones(4, 4)},
    ),
    "short mask": (
        MaskError,
        "array(<torch.bool array of shape (1, 1, 3, 3)>) covers 3 keys, but there are "
        "4. Axes are (..., H, Nq, Nk) = (1, 2, 4, 4).",
        {"mask": masks.array(torch.ones(3, 3, dtype=torch.bool))},
    ),
    "world": (
        OptionError,
        "places for 2 ranks, but the group has 1. Write zigzag(n, 1).",
        {"places": ring.zigzag(4, 2)},
    ),
    "length": (
        ShapeError,
        "4 queries and 4 keys on rank 0, but places assigns it 5 positions. Write "
        "q[..., mine, :] with mine = list_positions(places[0]), and likewise for k and v.",
        {"places": ring.zigzag(5, 1)},
    ),
    "twice": (
        OptionError,
        "places=((range(0, 2), range(1, 3)),), expected every position from 0 on "
        "exactly once, in ranges of step 1, as zigzag(n, world) returns them.",
        {"places": ((range(2), range(1, 3)),)},
    ),
    "step": (
        OptionError,
        "places=((range(0, 8, 2),),), expected every position from 0 on exactly once, "
        "in ranges of step 1, as zigzag(n, world) returns them.",
        {"places": ((range(0, 8, 2),),)},
    ),
    "axes": (
        ShapeError,
        "q has shape (1, 1, 2, 4, 8), expected (B, H, n, D) or fewer axes. Write "
        "q.flatten(0, -4), and likewise for k and v.",
        {"q": X[None]},
    ),
    "dtypes": (
        ArrayError,
        "q, k and v have dtypes [torch.float64, torch.float32, torch.float32], "
        "expected the same.",
        {"q": X.double()},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_ring_refuses_word_for_word(alone, name):
    error, words, options = REFUSED[name]
    with pytest.raises(error) as caught:
        ring.attend(**{"q": X, "k": X, "v": X, "places": FOUR} | options)
    assert str(caught.value) == words


def test_a_ring_has_no_second_derivatives_and_says_so(alone):
    q, k, v = torch.randn(3, 9, 4, dtype=torch.float64).requires_grad_()
    done = ring.attend(q, k, v, causal(), places=ring.zigzag(9, 1))
    with pytest.raises(GradientError, match="the ring has no second derivatives"):
        torch.autograd.grad(done.out.sum(), q, create_graph=True)


def test_a_ring_refuses_a_mask_that_changed_in_place(alone):
    q, k, v = torch.randn(3, 9, 4, dtype=torch.float64).requires_grad_()
    ids = torch.arange(9) // 3
    done = ring.attend(q, k, v, regard.same(ids), places=ring.zigzag(9, 1))
    ids.zero_()
    with pytest.raises(GradientError, match="mask was changed in place"):
        done.out.sum().backward()


def test_a_ring_keeps_numbers_in_range(alone):
    q, k, v = torch.randn(3, 40, 4)
    k = k.clone()
    k[20] = torch.nan
    mask = causal() & window(5)
    done = ring.attend(q, k, v, mask, places=ring.zigzag(40, 1))
    expected = regard.attention(q, k, v, mask)
    assert int(expected.lse.isnan().sum()) == 6
    torch.testing.assert_close(done.lse, expected.lse, equal_nan=True)
