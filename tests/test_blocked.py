"""The blocked path against the definition, and its memory against its promise."""

import numpy as np
import pytest
from formulas import calls
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard.definition import blocked
from regard.masks import added, alibi, causal, padding, same, window

blocks = st.one_of(
    st.integers(1, 30), st.tuples(st.integers(1, 30), st.integers(1, 30))
)


@given(calls(), blocks, st.data())
def test_blocked_equals_the_definition_for_every_mask(call, block, data):
    mask, (batch, heads, n_q, n_k), q_start = call
    shared = data.draw(st.sampled_from([h for h in (1, 2, 4) if heads % h == 0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    options = {
        "softcap": data.draw(st.sampled_from([None, 2.0])),
        "sink": data.draw(st.sampled_from([None, rng.normal(size=heads)])),
        "bias": data.draw(
            st.sampled_from(
                [
                    None,
                    alibi(rng.random(heads)),
                    rng.normal(size=(1, heads, n_q, n_k)),
                    added(rng.normal(size=(n_q, n_k)), q_start=q_start),
                ]
            )
        ),
    }
    q = rng.normal(size=(batch, heads, n_q, 5))
    k = rng.normal(size=(batch, shared, n_k, 5))
    v = rng.normal(size=(batch, shared, n_k, 2))
    for dtype, error in ((np.float64, 1e-12), (np.float32, 1e-6)):
        arrays = [x.astype(dtype) for x in (q, k, v)]
        whole = regard.attention(*arrays, mask, q_start=q_start, **options)
        tiles = regard.attention(*arrays, mask, q_start=q_start, block=block, **options)
        assert tiles.out.dtype == dtype
        np.testing.assert_allclose(tiles.out, whole.out, rtol=0, atol=error)
        np.testing.assert_allclose(tiles.lse, whole.lse, rtol=error, atol=error)


@pytest.mark.parametrize("block", [1, (2, 5), 64])
def test_blocked_runs_on_every_library(library, rng, block):
    q = rng.normal(size=(2, 4, 6, 3))
    k, v = rng.normal(size=(2, 2, 2, 9, 3))
    mask = causal() & window(4) & same([0] * 4 + [1] * 5) & padding(lengths=[9, 5])
    arrays = [library.make(x) for x in (q, k, v)]
    allowed = mask.dense((2, 4, 6, 9), q_start=3, like=arrays[0])
    whole = regard.attention(*arrays, mask, q_start=3)
    for given_mask in (mask, allowed):
        tiles = regard.attention(*arrays, given_mask, q_start=3, block=block)
        np.testing.assert_allclose(
            np.asarray(tiles.out), np.asarray(whole.out), atol=1e-12
        )
        np.testing.assert_allclose(
            np.asarray(tiles.lse), np.asarray(whole.lse), atol=1e-12
        )


def test_blocked_takes_starts_that_differ_by_batch(rng):
    q = rng.normal(size=(3, 4, 2, 3))
    k, v = rng.normal(size=(2, 3, 4, 8, 3))
    starts = np.asarray([0, 3, 6])
    whole = regard.attention(q, k, v, causal(), q_start=starts)
    tiles = regard.attention(q, k, v, causal(), q_start=starts, block=(1, 3))
    np.testing.assert_allclose(tiles.out, whole.out, atol=1e-13)


def test_tiles_proved_empty_are_not_computed(rng, monkeypatch):
    """Half of the tiles of a causal mask, a stripe of a window's."""
    merged = []
    merge = blocked.merge
    monkeypatch.setattr(blocked, "merge", lambda *p: merged.append(p) or merge(*p))
    x = rng.normal(size=(64, 4))
    for mask, tiles in ((None, 64), (causal(), 36), (window(8), 15)):
        merged.clear()
        regard.attention(x, x, x, mask, block=8)
        assert len(merged) == tiles


def test_merge_is_exact_in_any_order(library, rng):
    q, k, v = (rng.normal(size=(4, 7, 3)) for _ in range(3))
    mask = causal() & window(1)  # the last keys are empty for the first rows
    dense = np.array(mask.dense((7, 7)))
    parts = [
        regard.attention(
            library.make(q),
            library.make(k[:, s]),
            library.make(v[:, s]),
            library.asarray(dense[:, s]),
        )
        for s in (slice(3), slice(3, 4), slice(4, 7))
    ]
    whole = regard.attention(*(library.make(x) for x in (q, k, v)), mask)
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        out, lse = regard.merge(*((parts[i].out, parts[i].lse) for i in order))
        np.testing.assert_allclose(np.asarray(out), np.asarray(whole.out), atol=1e-13)
        np.testing.assert_allclose(np.asarray(lse), np.asarray(whole.lse), atol=1e-13)


LONG = """
import json, time
import numpy as np
from memory import read_peak, reset_peak
import regard
from regard import causal, window

n = 65_536
q, k, v = np.random.default_rng(0).standard_normal((3, n, 64), dtype=np.float32)
regard.attention(q[:512], k[:512], v[:512], causal() & window(4095), block=256)
before, start = reset_peak(), time.perf_counter()
seen = regard.attention(q, k, v, causal() & window(4095), block=512)
result = {"MB": read_peak() - before, "seconds": time.perf_counter() - start}
rows = slice(40_000, 40_004)  # a few rows, once more by the definition
few = regard.attention(
    q[rows], k[:40_004], v[:40_004], causal() & window(4095), q_start=40_000
)
result["error"] = float(np.abs(few.out - seen.out[rows]).max())
print(json.dumps(result))
"""


def test_memory_is_linear_at_65536_tokens(run_apart):
    result = run_apart(LONG)
    assert result["MB"] < 300
    assert result["error"] < 1e-6
