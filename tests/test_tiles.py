"""Tile proofs: never wrong, mostly sharp, and cheap at 131,072 tokens."""

import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from formulas import calls
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard
from regard import masks
from regard.engine import block_mask, sdpa_arguments
from regard.errors import MaskError
from regard.masks.primitives import ArrayMask, Where
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
        data = any(isinstance(x, Where | ArrayMask) for x in formula.walk())
        for i, rows in enumerate(proved.rows):
            for j, keys in enumerate(proved.keys):
                cells = dense[..., rows, keys]
                every, some = cells.all((2, 3)), cells.any((2, 3))
                true = np.where(every, FULL, np.where(some, UNDECIDED, EMPTY))
                proof = proofs[:, :, i, j]
                assert ((proof == UNDECIDED) | (proof == true)).all()
                assert (settled[:, :, i, j] == true).all()
                if not data:  # no proof is expected of these
                    found.update(f"{kind}" for kind in true.ravel())
                    found.update(f"proved {kind}" for kind in proof.ravel())

    check()
    assert sum(found[str(kind)] for kind in (EMPTY, UNDECIDED, FULL)) >= 5_000
    assert found[f"proved {EMPTY}"] > 0.8 * found[str(EMPTY)]
    assert found[f"proved {FULL}"] > 0.8 * found[str(FULL)]


def draw_starts(data, formula, batch, q_start):
    """Return a start for each sequence; an array has rows for one of them only."""
    fixed = any(isinstance(x, ArrayMask) for x in formula.walk())
    some = st.integers(q_start if fixed else 0, q_start)
    return np.array(data.draw(st.lists(some, min_size=batch, max_size=batch)))


@given(
    calls(most=40),
    st.sampled_from([(4, 4), (8, 4), (5, 7), (16, 16), (64, 64)]),
    st.data(),
)
@settings(max_examples=150)
def test_block_masks_are_those_of_torch(call, block, data):
    """Which tiles are empty, full or mixed, and every cell of the function in them."""
    formula, shape, q_start = call
    if data.draw(st.booleans()):
        q_start = draw_starts(data, formula, shape[0], q_start)
    starts = torch.as_tensor(q_start).expand(shape[0])
    ours = block_mask(formula, shape, q_start=q_start, block=block)
    placed = formula.place(torch.empty(0))
    theirs = create_block_mask(
        lambda b, h, q, k: placed(b, h, q + starts[b], k),
        *shape,
        device="cpu",
        BLOCK_SIZE=block,
    )
    for kind in ("", "full_"):
        mine, other = (list_blocks(x, kind) for x in (ours, theirs))
        assert torch.equal(mine.expand(other.shape), other)
    mine, other = ours.to_dense(), theirs.to_dense()
    assert torch.equal(mine.expand(other.shape), other)
    at = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    dense = torch.tensor(formula.dense(shape, q_start=q_start))
    assert torch.equal(torch.as_tensor(ours.mask_mod(*at)).expand(shape), dense)
    assert torch.equal(torch.as_tensor(theirs.mask_mod(*at)).expand(shape), dense)


def list_blocks(mask, kind):
    """Return which tiles of a BlockMask are of a kind, (B, H, query, key tiles)."""
    counts, at = (getattr(mask, f"{kind}kv_{x}") for x in ("num_blocks", "indices"))
    chosen = torch.arange(at.shape[-1]) < counts[..., None]
    return torch.zeros_like(chosen).scatter(-1, at.long(), chosen)


DOCUMENTS = np.array([[0] * 256, [0] * 128 + [1] * 128])
BY_PART = {
    "where by batch": masks.where(lambda b, h, q, k: (b == 0) | (q // 128 == k // 128)),
    "where by head": masks.where(lambda b, h, q, k: (h == 0) | (k <= q)),
    "array by batch": masks.array(
        (DOCUMENTS[:, :, None] == DOCUMENTS[:, None, :])[:, None]
    ),
    "array by head": masks.array(
        np.stack([np.ones((256, 256), bool), np.tri(256, dtype=bool)])
    ),
}


@pytest.mark.parametrize("name", BY_PART)
def test_the_tiles_of_one_head_or_sequence_are_not_those_of_all(name):
    """Compiled FlexAttention asks no formula in a tile that is listed as full."""
    mask, shape = BY_PART[name], (2, 2, 256, 256)
    listed = block_mask(mask, shape).to_dense().bool().numpy()
    tiles = mask.dense(shape).reshape(2, 2, 2, 128, 2, 128)
    assert (np.broadcast_to(listed, (2, 2, 2, 2)) == tiles.any((3, 5))).all()
    full = list_blocks(block_mask(mask, shape), "full_").numpy()
    assert (np.broadcast_to(full, (2, 2, 2, 2)) == tiles.all((3, 5))).all()


def test_masks_that_do_not_differ_keep_one_entry_for_all_heads():
    for mask, lead in [
        (masks.where(lambda b, h, q, k: k <= q), (1, 1)),
        (masks.array(np.tri(256, dtype=bool)), (1, 1)),
        (BY_PART["where by head"], (1, 64)),
        (BY_PART["array by batch"], (2, 1)),
    ]:
        assert mask.tiles((2, 64, 256, 256)).settle().kinds.shape[:2] == lead


def make_dense(mask, shape):
    return mask.dense(shape)


def settle(mask, shape):
    return mask.tiles(shape).settle()


@pytest.mark.parametrize("make", [block_mask, sdpa_arguments, make_dense, settle])
def test_a_shape_without_the_axis_of_a_function_is_refused(make):
    for name, shape in [("batch", (2, 256, 256)), ("head", (256, 256))]:
        with pytest.raises(MaskError, match=f"may differ by {name}, but the shape"):
            make(BY_PART[f"where by {name}"], shape)
        make(BY_PART[f"where by {name}"], (2, 2, 256, 256))
    make(BY_PART["where by head"], (2, 256, 256))
    make(masks.where(lambda b, h, q, k: k < q), (256, 256))


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
import pytest
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


def test_tiles_say_if_other_heads_or_sequences_differ():
    told = "batch 0 and head 0; others differ"
    for name, mask in BY_PART.items():
        tiles = mask.tiles((2, 2, 256, 256))
        assert str(tiles).split("\n") == ["▒▒", "▒▒"]
        assert str(tiles.settle()).split("\n")[2:] == [told], name
    both = masks.per_head([masks.causal()] * 2).tiles((2, 256, 256))
    assert str(both).split("\n") == ["▒·", "■▒"]
    apart = masks.per_head([masks.causal(), masks.everything()]).tiles((2, 256, 256))
    assert str(apart).split("\n") == ["▒·", "■▒", told]


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
