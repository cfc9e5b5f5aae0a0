"""The pitfalls of the field, one test each, named as in docs/pitfalls.md.

Some rows are proved elsewhere with the same name: blockmask_needs_no_square in
test_tiles.py, hf_plugin_gets_its_mask in test_transformers.py.
"""

import inspect
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from spec import attend_by_loops

import regard
from regard import causal, padding, same, window
from regard.definition.attention import STEPS
from regard.definition.position import HALVES, NEIGHBOURS, rotary
from regard.errors import MaskError, OptionError, PositionError
from regard.masks import last


def draw(rng, batch=2, heads=4, n=6, width=4):
    return (rng.normal(size=(batch, heads, n, width)) for _ in range(3))


def equal(a, b, error=1e-12):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=error)


def test_looking_changes_nothing(rng):
    """Values in test_definition.py on every library; here grad mode and inference."""
    q, k, v = (torch.tensor(x, dtype=torch.float32) for x in draw(rng))
    outs = []
    for grad in (False, True):
        for see in ((), STEPS):
            inputs = [x.clone().requires_grad_(grad) for x in (q, k, v)]
            outs.append(regard.attention(*inputs, causal(), see=see).out)
    with torch.inference_mode():
        outs.append(regard.attention(q, k, v, causal(), see=("weights",)).out)
    assert all(torch.equal(outs[0], out) for out in outs)


def test_true_means_attend(rng):
    q, k, v = draw(rng)
    only_first = np.zeros((6, 6), dtype=bool)
    only_first[:, 0] = True
    out = regard.attention(q, k, v, only_first).out
    equal(out, np.broadcast_to(v[:, :, :1], out.shape))


def test_float_zero_one_mask_refused(rng):
    q, k, v = draw(rng)
    with pytest.raises(MaskError, match="Write mask > 0 for a mask of zeros and ones"):
        regard.attention(q, k, v, np.tri(6))


def test_int_mask_refused(rng):
    q, k, v = draw(rng)
    for dtype in (np.int64, np.uint8):
        with pytest.raises(MaskError, match="Write mask != 0 for a mask of zeros and"):
            regard.attention(q, k, v, np.tri(6, dtype=dtype))


def test_batch_padding_mask_refused(rng):
    q, k, v = draw(rng, batch=6)
    valid = np.arange(6) < np.asarray([[1], [2], [3], [4], [5], [6]])  # (B, Nk), B = Nq
    with pytest.raises(MaskError, match=r"Write padding\(mask\)"):
        regard.attention(q, k, v, valid)
    by_batch = regard.attention(q, k, v, padding(valid)).out
    equal(by_batch[2], regard.attention(q[2], k[2, :, :3], v[2, :, :3]).out)


def test_causal_needs_q_start(rng):
    q, k, v = draw(rng)
    for mask in (causal(), window(2), same([0, 0, 0, 1, 1, 1])):
        with pytest.raises(PositionError, match=r"q_start=4 if .* q_start=0 if"):
            regard.attention(q[:, :, :2], k, v, mask)


def test_decode_one_token_sees_all(rng):
    q, k, v = draw(rng)
    whole = regard.attention(q, k, v, causal()).out
    one = regard.attention(q[:, :, 5:], k, v, causal(), q_start=5).out
    equal(one, whole[:, :, 5:])
    first = regard.attention(q[:, :, 5:], k, v, causal(), q_start=0).out
    equal(first, v[:, :, :1])  # what torch's is_causal gives for one query


def test_chunked_prefill_equals_full(rng):
    q, k, v = draw(rng)
    mask = causal() & window(3) & same([0, 0, 1, 1, 1, 1])
    whole = regard.attention(q, k, v, mask).out
    for start, stop in ((0, 2), (2, 5), (5, 6)):
        rows = slice(start, stop)
        part = regard.attention(
            q[:, :, rows], k[:, :, :stop], v[:, :, :stop], mask, q_start=start
        )
        equal(part.out, whole[:, :, rows])


def test_future_never_leaks(library, rng):
    q, k, v = draw(rng, batch=1)
    for dtype in library.dtypes:
        arrays = [library.make(x, dtype) for x in (q, k, v)]
        before = regard.attention(*arrays, causal())
        for j in range(6):
            k2, v2 = k.copy(), v.copy()
            k2[:, :, j], v2[:, :, j] = 50, -50
            after = regard.attention(
                arrays[0], library.make(k2, dtype), library.make(v2, dtype), causal()
            )
            same_rows = before.out[:, :, :j, :] == after.out[:, :, :j, :]
            assert bool(np.asarray(same_rows).all())
            assert not bool(np.asarray(before.out == after.out).all())


def test_empty_row_is_zero(library, rng):
    q, k, v = (library.make(x) for x in draw(rng))
    seen = regard.attention(q, k, v, causal() & ~window(1), see=("weights",))
    assert not np.asarray(seen.out)[:, :, :2].any()
    assert not np.asarray(seen.weights)[:, :, :2].any()
    assert np.asarray(seen.weights)[:, :, 2:].sum(-1) == pytest.approx(1)


def test_empty_row_grad_finite(rng):
    q, k, v = (torch.tensor(x, requires_grad=True) for x in draw(rng))
    mask = causal() & ~window(1)
    regard.attention(q, k, v, mask).out.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
    assert not q.grad[:, :, :2].any()
    assert q.grad[:, :, 3:].abs().max() > 1e-3  # and the other rows still learn


def test_empty_row_lse_is_minus_inf(library, rng):
    q, k, v = (library.make(x) for x in draw(rng))
    for block in (None, 2):
        seen = regard.attention(q, k, v, causal() & ~window(1), block=block)
        assert np.isneginf(np.asarray(seen.lse)[:, :, :2]).all()
        assert np.isfinite(np.asarray(seen.lse)[:, :, 2:]).all()


def test_merge_of_parts_is_whole(rng):
    q, k, v = draw(rng)
    mask = causal().dense((6, 6))
    parts = [
        regard.attention(q, k[:, :, s], v[:, :, s], mask[:, s])
        for s in (slice(3), slice(3, 6))
    ]
    whole = regard.attention(q, k, v, mask)
    out, lse = regard.merge(*((part.out, part.lse) for part in parts))
    equal(out, whole.out)
    equal(lse, whole.lse)
    zero = np.where(np.isneginf(parts[1].lse), 0, parts[1].lse)  # what one kernel says
    wrong, _ = regard.merge((parts[0].out, parts[0].lse), (parts[1].out, zero))
    assert np.abs(wrong - whole.out).max() > 0.1


def test_lse_is_natural_log_f32(library, rng):
    q, k, v = draw(rng)
    for dtype in library.dtypes:
        arrays = [library.make(x, dtype) for x in (q, k, v)]
        seen = regard.attention(*arrays, see=("logits",))
        logits = np.asarray(seen.logits)
        assert seen.lse.dtype == (
            library.double if dtype is library.double else library.single
        )
        equal(seen.lse, np.log(np.exp(logits).sum(-1)), 1e-5)


def test_finfo_min_is_not_inf(rng):
    """-inf is a mask; the smallest finite number, added, would be a uniform row."""
    q, k, v = (torch.tensor(x, dtype=torch.float16) for x in draw(rng))
    mask = padding(lengths=[0, 6])
    seen = regard.attention(q, k, v, mask)
    assert not seen.out[0].any()
    low = torch.full((1, 1, 1, 6), torch.finfo(torch.float16).min, dtype=torch.float16)
    added = regard.attention(q, k, v, bias=low)
    assert torch.isfinite(added.out).all()  # no NaN either: sums are in float32
    twice = regard.attention(q, k, v, mask, bias=low)
    assert torch.isfinite(twice.out).all()


def test_fp16_scores_do_not_overflow(library):
    for dtype in library.half:
        x = library.make(np.full((2, 64), 40.0), dtype)  # q k = 102,400 > 65,504
        seen = regard.attention(x, x, x, see=("scores",))
        equal(seen.scores, np.full((2, 2), 40.0 * 40 * 8))
        assert bool(np.asarray(seen.out == x).all())


def test_softcap_before_mask(rng):
    q, k, v = draw(rng)
    seen = regard.attention(q, k, v, causal(), softcap=1.0, see=("logits", "weights"))
    future = np.triu(np.ones((6, 6), dtype=bool), 1)
    assert np.isneginf(seen.logits[..., future]).all()  # not -softcap
    assert not seen.weights[..., future].any()
    with_bias = regard.attention(
        q, k, v, softcap=1.0, bias=np.full((6, 6), 9.0), see=("logits",)
    )
    assert with_bias.logits.min() >= 8  # the bias is not capped


def test_gqa_group_is_contiguous(library, rng):
    q = rng.normal(size=(4, 3, 2))
    k, v = rng.normal(size=(2, 2, 3, 2))
    out = regard.attention(*(library.make(x) for x in (q, k, v))).out
    expected, _, _ = attend_by_loops(q, k[[0, 0, 1, 1]], v[[0, 0, 1, 1]])
    equal(out, expected)


def measure_peak(run):
    tracemalloc.start()
    run()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_gqa_copies_nothing(rng):
    """64 query heads on one K of 4 MB: repeating K would take 256 MB."""
    q = rng.normal(size=(64, 1, 64))
    k, v = rng.normal(size=(2, 1, 8192, 64))
    assert measure_peak(lambda: regard.attention(q, k, v)) < 8 * k.nbytes


def test_gqa_mask_no_quadratic(rng):
    """Grouped heads and a mask, blocked: no square, and no copies of K."""
    q = rng.normal(size=(8, 4096, 16)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, 4096, 16)).astype(np.float32)
    mask = causal() & window(255)
    peak = measure_peak(lambda: regard.attention(q, k, v, mask, block=128))
    assert peak < 8 * q.nbytes  # 17 MB; one square for all heads is 537 MB


def test_window_counts():
    assert window(2).dense((5, 5)).sum(1).tolist() == [1, 2, 3, 3, 3]  # two others
    assert last(2).dense((5, 5)).sum(1).tolist() == [1, 2, 2, 2, 2]  # two in all
    assert window(1, 1).dense((5, 5)).sum(1).tolist() == [2, 3, 3, 3, 2]


def test_window_alone_applies(rng):
    q, k, v = draw(rng)
    for block in (None, 2):
        out = regard.attention(q, k, v, window(0), block=block).out
        equal(out, v)


def test_mask_and_causal_compose(rng):
    q, k, v = draw(rng)
    allowed = rng.random((6, 6)) < 0.6
    both = regard.attention(q, k, v, causal() & regard.masks.array(allowed)).out
    equal(both, regard.attention(q, k, v, allowed & np.tri(6, dtype=bool)).out)


def test_documents_do_not_mix(rng):
    q, k, v = draw(rng)
    packed = regard.attention(q, k, v, causal() & same([0, 0, 1, 1, 1, 2])).out
    for rows in (slice(0, 2), slice(2, 5), slice(5, 6)):
        alone = regard.attention(*(x[:, :, rows] for x in (q, k, v)), causal()).out
        equal(packed[:, :, rows], alone)


def test_left_padding_invariant(rng):
    q, k, v = draw(rng, batch=1)
    alone = regard.attention(q, k, v, causal()).out

    def pad(x):
        return np.concatenate([rng.normal(size=x[:, :, :3].shape), x], axis=2)

    valid = np.arange(9)[None] >= 3
    padded = regard.attention(pad(q), pad(k), pad(v), causal() & padding(valid)).out
    equal(padded[:, :, 3:], alone)


def test_padding_is_noise_only(library, rng):
    """Padded or alone: the same up to the rounding of the dtype."""
    q, k, v = draw(rng, batch=1)
    for dtype in library.dtypes:
        alone = [library.make(x[:, :, :4], dtype) for x in (q, k, v)]
        padded = [library.make(x, dtype) for x in (q, k, v)]
        a = regard.attention(*alone, causal()).out
        b = regard.attention(*padded, causal() & padding(lengths=[4])).out[:, :, :4, :]
        wide = [np.asarray(library.asarray(x, dtype=library.double)) for x in (a, b)]
        equal(*wide, 1e-2 if dtype in library.half else 1e-6)


def test_garbage_in_masked_keys(library, rng):
    q, k, v = draw(rng)
    clean = regard.attention(q, k, v, padding(lengths=[6, 4])).out
    k[1, :, 4:], v[1, :, 4:] = np.nan, np.inf
    arrays = [library.make(x) for x in (q, k, v)]
    valid = library.asarray(np.arange(6)[None] < np.asarray([[6], [4]]))
    for mask in (padding(lengths=[6, 4]), padding(valid), valid[:, None, None, :]):
        for block in (None, 3):
            equal(regard.attention(*arrays, mask, block=block).out, clean)


def test_dropout_off_in_eval(rng):
    """There is no dropout in the definition, so nothing to switch off."""
    q, k, v = draw(rng)
    assert "dropout" not in str(inspect.signature(regard.attention))
    first, second = (regard.attention(q, k, v).out for _ in range(2))
    assert np.array_equal(first, second)


def test_weights_shown_before_dropout(rng):
    """Rows that are shown sum to 1 or to 0, and they are the weights that were used."""
    q, k, v = draw(rng)
    seen = regard.attention(q, k, v, causal() & ~window(0), see=("weights",))
    equal(seen.weights.sum(-1)[:, :, 0], np.zeros((2, 4)))
    equal(seen.weights.sum(-1)[:, :, 1:], np.ones((2, 4, 5)))
    equal(seen.out, seen.weights @ v)


def test_strides_do_not_matter(rng):
    q, k, v = (torch.tensor(x) for x in draw(rng))
    expected = regard.attention(q, k, v, causal()).out
    apart = [x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for x in (q, k, v)]
    spaced = [torch.stack([x, x + 1], -1)[..., 0] for x in (q, k, v)]
    for other in (apart, spaced):
        assert not any(x.is_contiguous() for x in other)
        equal(regard.attention(*other, causal()).out, expected)
    one = k[:, :1].expand(2, 4, 6, 4)  # stride 0
    copied = regard.attention(q, one.contiguous(), one.contiguous()).out
    equal(regard.attention(q, one, one).out, copied)


def test_long_masked_matches(rng):
    """A long sequence under an array mask, some rows by plain loops."""
    q, k, v = (rng.normal(size=(1, 3000, 4)).astype(np.float32) for _ in range(3))
    allowed = rng.random((1, 3000, 3000)) < 0.3
    seen = regard.attention(q, k, v, allowed)
    tiles = regard.attention(q, k, v, allowed, block=700)
    rows = [0, 1023, 1024, 2999]
    expected, _, _ = attend_by_loops(q[:, rows], k, v, allowed[:, rows])
    equal(seen.out[:, rows], expected, 1e-6)
    equal(tiles.out[:, rows], expected, 1e-6)


def test_batch_first_only(rng):
    """Axes are (B, H, N, D): batches never meet, whatever their order."""
    q, k, v = draw(rng, batch=3)
    together = regard.attention(q, k, v, causal()).out
    order = [2, 0, 1]
    equal(regard.attention(q[order], k[order], v[order], causal()).out, together[order])
    equal(regard.attention(q[1], k[1], v[1], causal()).out, together[1])


def test_argument_order(rng):
    """(q, k, v): a call with keys and values exchanged is another number."""
    names = list(inspect.signature(regard.attention).parameters)
    assert names[:4] == ["q", "k", "v", "mask"]
    q, k, v = (x[0] for x in draw(rng))
    expected, _, _ = attend_by_loops(q, k, v)
    equal(regard.attention(q, k, v).out, expected)
    assert np.abs(regard.attention(q, v, k).out - expected).max() > 0.1


def test_rope_pairing_named(rng):
    x = rng.normal(size=(3, 8))
    at = np.arange(3)
    with pytest.raises(TypeError, match="pairing"):
        rotary(x, at)
    with pytest.raises(OptionError, match=r"NEIGHBOURS\. Write pairing=HALVES for"):
        rotary(x, at, pairing="half")
    halves, neighbours = (rotary(x, at, pairing=p) for p in (HALVES, NEIGHBOURS))
    assert np.abs(halves - neighbours)[1:].max() > 0.1
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # the same turn in the other layout
    equal(rotary(x[:, order], at, pairing=HALVES), neighbours[:, order])


def test_tied_weights_stay_tied(rng):
    """One array in three roles gets the sum of three gradients."""
    x = torch.tensor(rng.normal(size=(5, 4)), requires_grad=True)
    roles = [x.detach().clone().requires_grad_() for _ in range(3)]
    regard.attention(x, x, x, causal()).out.square().sum().backward()
    regard.attention(*roles, causal()).out.square().sum().backward()
    equal(x.grad, sum(role.grad for role in roles))


def test_every_pitfall_has_its_test():
    folder = Path(__file__).parent
    page = (folder.parent / "docs" / "pitfalls.md").read_text(encoding="utf-8")
    names = re.findall(r"^\| (\w+_\w+) \|", page, flags=re.MULTILINE)
    tests = "".join(path.read_text("utf-8") for path in folder.glob("test_*.py"))
    assert len(names) == 37
    assert not [name for name in names if f"def test_{name}(" not in tests]
