"""The definition against plain loops, on every array library."""

import itertools

import numpy as np
import pytest
from spec import attend_by_loops

import regard
from regard.definition.attention import STEPS
from regard.masks import alibi, causal, window

OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": True},
    "sink": {"sink": True},
    "all": {"scale": 0.7, "softcap": 1.5, "bias": True, "sink": True},
}


def draw_inputs(rng, heads=4, shared=2, n_q=5, n_k=7, width=3, out_width=2):
    q = rng.normal(size=(heads, n_q, width))
    k = rng.normal(size=(shared, n_k, width))
    v = rng.normal(size=(shared, n_k, out_width))
    return q, k, v


@pytest.mark.parametrize("shared", [1, 2, 4], ids=["MQA", "GQA", "MHA"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
def test_definition_equals_plain_loops(library, rng, option, masked, shared):
    q, k, v = draw_inputs(rng, shared=shared)
    given = dict(OPTIONS[option])
    given |= {"bias": rng.normal(size=(4, 5, 7))} if "bias" in given else {}
    given |= {"sink": rng.normal(size=4)} if "sink" in given else {}
    allowed = rng.random((4, 5, 7)) < 0.6 if masked else None
    if masked:
        allowed[1, 2] = False  # a row that sees nothing
    out, lse, weights = attend_by_loops(q, k, v, allowed, **given)
    make = library.make
    seen = regard.attention(
        make(q),
        make(k),
        make(v),
        None if allowed is None else library.asarray(allowed),
        **{n: make(x) if isinstance(x, np.ndarray) else x for n, x in given.items()},
        see=STEPS,
    )
    np.testing.assert_allclose(np.asarray(seen.out), out, atol=1e-13)
    np.testing.assert_allclose(np.asarray(seen.lse), lse, atol=1e-13)
    np.testing.assert_allclose(np.asarray(seen.weights), weights, atol=1e-13)


def test_asking_to_see_gives_the_same_bits(library, rng):
    q, k, v = draw_inputs(rng, n_q=7)
    sets = [s for n in range(5) for s in itertools.combinations(STEPS, n)]
    for dtype in library.dtypes:
        arrays = [library.make(x, dtype) for x in (q, k, v)]
        outs = [
            regard.attention(*arrays, causal(), softcap=2.0, see=see) for see in sets
        ]
        for seen, see in zip(outs, sets, strict=True):
            assert bool(np.asarray(seen.out == outs[0].out).all())
            assert bool(np.asarray(seen.lse == outs[0].lse).all())
            assert all((getattr(seen, s) is not None) == (s in see) for s in STEPS)


def test_dtypes_in_are_dtypes_out_and_lse_is_at_least_float32(library, rng):
    q, k, v = draw_inputs(rng)
    for dtype in library.dtypes:
        seen = regard.attention(
            *(library.make(x, dtype) for x in (q, k, v)), see=("weights",)
        )
        wide = library.double if dtype is library.double else library.single
        assert seen.out.dtype == dtype
        assert seen.lse.dtype == wide
        assert seen.weights.dtype == wide


def test_low_precision_is_only_rounding(library, rng):
    q, k, v = draw_inputs(rng)
    for dtype in library.half:
        low = [library.make(x, dtype) for x in (q, k, v)]
        exact = [library.asarray(x, dtype=library.double) for x in low]
        seen, true = regard.attention(*low), regard.attention(*exact)
        out = library.asarray(seen.out, dtype=library.double)
        np.testing.assert_allclose(np.asarray(out), np.asarray(true.out), atol=8e-3)
        np.testing.assert_allclose(
            np.asarray(seen.lse), np.asarray(true.lse), atol=2e-6
        )


def test_one_sequence_needs_no_head_axis(library, rng):
    x = rng.normal(size=(6, 3))
    seen = regard.attention(*(library.make(x),) * 3, causal())
    out, lse, _ = attend_by_loops(*(x[None],) * 3, np.tri(6, dtype=bool)[None])
    assert tuple(seen.out.shape) == (6, 3)
    np.testing.assert_allclose(np.asarray(seen.out), out[0], atol=1e-13)
    np.testing.assert_allclose(np.asarray(seen.lse), lse[0], atol=1e-13)


def test_axes_before_the_heads_broadcast(library, rng):
    q = rng.normal(size=(2, 3, 4, 5, 3))
    k, v = rng.normal(size=(1, 3, 2, 6, 3)), rng.normal(size=(3, 2, 6, 2))
    seen = regard.attention(*(library.make(x) for x in (q, k, v)))
    assert tuple(seen.out.shape) == (2, 3, 4, 5, 2)
    for a, b in itertools.product(range(2), range(3)):
        out, _, _ = attend_by_loops(q[a, b], k[0, b], v[b])
        np.testing.assert_allclose(np.asarray(seen.out)[a, b], out, atol=1e-13)


def test_no_keys_give_zero_and_no_queries_give_nothing(library, rng):
    q, k, v = (library.make(x) for x in draw_inputs(rng))
    seen = regard.attention(q, k[:, :0, :], v[:, :0, :], see=("weights",))
    assert tuple(seen.weights.shape) == (4, 5, 0)
    assert np.asarray(seen.out).tolist() == np.zeros((4, 5, 2)).tolist()
    assert np.isneginf(np.asarray(seen.lse)).all()
    assert tuple(regard.attention(q[:, :0, :], k, v).out.shape) == (4, 0, 2)


def test_edit_changes_a_step_and_all_after_it(library, rng):
    q, k, v = (library.make(x) for x in draw_inputs(rng))
    plain = regard.attention(q, k, v, see=STEPS)
    doubled = regard.attention(q, k, v, edit={"scores": lambda s: 2 * s}, see=STEPS)
    scaled = regard.attention(q, k, v, scale=2 / 3**0.5)
    np.testing.assert_allclose(np.asarray(doubled.scores), 2 * np.asarray(plain.scores))
    np.testing.assert_allclose(
        np.asarray(doubled.out), np.asarray(scaled.out), atol=1e-13
    )
    silenced = regard.attention(q, k, v, edit={"weights": lambda w: 0 * w})
    assert np.abs(np.asarray(silenced.out)).max() == 0
    assert np.asarray(silenced.lse).tolist() == np.asarray(plain.lse).tolist()


def test_steps_are_in_the_order_of_the_contract(library, rng):
    q, k, v = (library.make(x) for x in draw_inputs(rng, n_q=7))
    seen = regard.attention(
        q,
        k,
        v,
        causal() & window(3),
        bias=alibi([0.1, 0.2, 0.3, 0.4]),
        softcap=0.5,
        see=STEPS,
    )
    scores, capped, logits, weights = (np.asarray(getattr(seen, s)) for s in STEPS)
    keys = np.repeat(np.asarray(k), 2, axis=0)
    dots = np.asarray(q) @ keys.transpose(0, 2, 1)
    np.testing.assert_allclose(scores, dots / 3**0.5, atol=1e-13)
    np.testing.assert_allclose(capped, 0.5 * np.tanh(scores / 0.5), atol=1e-13)
    distance = np.arange(7)[:, None] - np.arange(7)
    bias = -np.asarray([0.1, 0.2, 0.3, 0.4])[:, None, None] * np.abs(distance)
    inside = (distance >= 0) & (distance <= 3)
    expected = np.where(inside, capped + bias, -np.inf)
    np.testing.assert_allclose(logits, expected, atol=1e-13)
    lse = np.asarray(seen.lse)
    np.testing.assert_allclose(weights, np.exp(logits - lse[..., None]), atol=1e-13)


def test_queries_can_start_at_another_place_in_every_batch(library, rng):
    q = rng.normal(size=(3, 4, 2, 3))
    k, v = rng.normal(size=(2, 3, 2, 8, 3))
    starts = np.asarray([0, 3, 6])
    make = library.make
    together = regard.attention(
        make(q), make(k), make(v), causal(), q_start=library.asarray(starts)
    )
    for b, start in enumerate(starts.tolist()):
        alone = regard.attention(
            make(q[b]), make(k[b]), make(v[b]), causal(), q_start=start
        )
        np.testing.assert_allclose(
            np.asarray(together.out)[b], np.asarray(alone.out), atol=1e-13
        )


def test_the_start_can_be_any_kind_of_number(library, rng):
    q, k, v = (library.make(x) for x in rng.normal(size=(3, 2, 4, 6, 3)))
    q = q[:, :, 4:, :]
    expected = np.asarray(regard.attention(q, k, v, causal(), q_start=4).out)
    whole = library.asarray(4)
    for start in (
        np.int64(4),
        np.asarray([4, 4]),
        [4, 4],
        whole,
        library.asarray([4, 4]),
    ):
        for block in (None, 2):
            seen = regard.attention(q, k, v, causal(), q_start=start, block=block)
            np.testing.assert_allclose(np.asarray(seen.out), expected, atol=1e-13)


def test_a_number_of_numpy_widens_nothing(library, rng):
    given = rng.normal(size=(3, 4, 6, 3))
    q, k, v = (library.make(x, library.single) for x in given)
    plain = regard.attention(q, k, v, scale=0.5, softcap=2.0)
    for half, two in ((np.float64(0.5), np.float64(2)), map(np.asarray, (0.5, 2.0))):
        seen = regard.attention(q, k, v, scale=half, softcap=two)
        assert seen.lse.dtype == plain.lse.dtype
        assert np.array_equal(np.asarray(seen.lse), np.asarray(plain.lse))


def test_a_read_only_array_is_enough(rng):
    q, k, v = draw_inputs(rng)
    for x in (q, k, v):
        x.setflags(write=False)
    assert regard.attention(q, k, v).out.shape == (4, 5, 2)
