"""Tile proofs: never wrong, mostly sharp, and cheap at 131,072 tokens."""

import warnings
from collections import Counter

import numpy as np
import torch
from formulas import calls
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard
from regard import masks
from regard.engine.flex import block_mask
from regard.masks.tiles import EMPTY, FULL, UNDECIDED


def test_proofs_are_never_wrong_and_mostly_found():
    found = Counter()

    @given(calls(), st.tuples(st.integers(1, 9), st.integers(1, 9)))
    @settings(max_examples=300)
    def check(call, block):
        formula, shape, q_start = call
        proved = formula.tiles(shape, block=block, q_start=q_start)
        settled = np.broadcast_to(
            proved.settle().kinds, (*shape[:2], *proved.kinds.shape[2:])
        )
        proofs = np.broadcast_to(proved.kinds, settled.shape)
        dense = formula.dense(shape, q_start=q_start)
        for i, rows in enumerate(proved.rows):
            for j, keys in enumerate(proved.keys):
                cells = dense[..., rows, keys]
                every, some = cells.all((2, 3)), cells.any((2, 3))
                true = np.where(every, FULL, np.where(some, UNDECIDED, EMPTY))
                proof = proofs[:, :, i, j]
                assert ((proof == UNDECIDED) | (proof == true)).all()
                assert (settled[:, :, i, j] == true).all()
                found.update(f"{kind}" for kind in true.ravel())
                found.update(f"proved {kind}" for kind in proof.ravel())

    check()
    assert sum(found[str(kind)] for kind in (EMPTY, UNDECIDED, FULL)) >= 5_000
    assert found[f"proved {EMPTY}"] > 0.8 * found[str(EMPTY)]
    assert found[f"proved {FULL}"] > 0.8 * found[str(FULL)]


@given(calls(most=40), st.sampled_from([(4, 4), (8, 4), (16, 16)]))
@settings(max_examples=40)
def test_block_masks_are_those_of_torch(call, block):
    formula, shape, q_start = call
    ours = block_mask(formula, shape, q_start=q_start, block=block)
    placed = formula.place(torch.empty(0))
    theirs = create_block_mask(
        lambda b, h, q, k: placed(b, h, q + q_start, k),
        *shape,
        device="cpu",
        BLOCK_SIZE=block,
    )
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert torch.equal(mine.expand(other.shape), other)
    assert torch.equal(
        ours.to_dense().expand(theirs.to_dense().shape), theirs.to_dense()
    )


def test_a_block_mask_runs_in_flex_attention(rng):
    q, k, v = (torch.tensor(rng.normal(size=(2, 2, 200, 16))) for _ in range(3))
    mask = masks.causal() & masks.window(50) & masks.same(np.arange(200) // 70)
    ours = block_mask(mask, (200, 200))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # once in a process: it is not compiled
        out = flex_attention(q, k, v, block_mask=ours)
    torch.testing.assert_close(out, regard.attention(q, k, v, mask).out)


LONG = """
import json, sys, time
import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask
from memory import read_peak, reset_peak
from regard import causal, same, window
from regard.engine.flex import block_mask

n, compare = int(sys.argv[1]), sys.argv[2] == "compare"
cuts = np.sort(np.random.default_rng(0).choice(n, n // 1_500, replace=False))
ids = np.searchsorted(cuts, np.arange(n), side="right")
mask = causal() & window(4095) & same(ids)
block_mask(mask, (512, 512))  # warm up
before, start = reset_peak(), time.perf_counter()
ours = block_mask(mask, (n, n))
result = {"seconds": time.perf_counter() - start, "MB": read_peak() - before}
if compare:
    t = torch.as_tensor(ids)
    start = time.perf_counter()
    theirs = create_block_mask(
        lambda b, h, q, k: (k <= q) & (q - k <= 4095) & (t[q] == t[k]),
        None, None, n, n, device="cpu",
    )
    result["torch seconds"] = time.perf_counter() - start
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    result["same"] = all(
        torch.equal(getattr(ours, name), getattr(theirs, name)) for name in names
    )
    result["tiles"] = [int(ours.kv_num_blocks.sum()), int(ours.full_kv_num_blocks.sum())]
print(json.dumps(result))
"""


def test_blockmask_needs_no_square(run_apart):
    result = run_apart(LONG, "131072", "alone")
    assert result["seconds"] < 5
    assert result["MB"] < 200


def test_a_long_block_mask_equals_torchs_and_is_20_times_faster(run_apart):
    result = run_apart(LONG, "16384", "compare")
    assert result["same"]
    assert min(result["tiles"]) > 100
    assert result["torch seconds"] > 20 * result["seconds"]


def test_tiles_draw_themselves():
    tiles = (masks.causal() & masks.window(7)).tiles((32, 32), block=4)
    assert str(tiles).split() == [
        "▒·······",
        "■▒······",
        "▒■▒·····",
        "·▒■▒····",
        "··▒■▒···",
        "···▒■▒··",
        "····▒■▒·",
        "·····▒■▒",
    ]
