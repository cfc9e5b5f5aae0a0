"""Parity with JAX: dot_product_attention, and jit, vmap and grad of our own.

JAX lays out (B, N, H, D), counts causal and windows from the first key (our q_start=0),
and gives a row that sees nothing the average of all values, where we give 0; such rows
are compared by their place only.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
from regard.errors import ArrayError
from regard.masks import (
    added,
    alibi,
    array,
    everything,
    keys,
    last,
    per_head,
    prefix,
    table,
)

# --- dot_product_attention -----------------------------------------------------------

HEADS = 4
LENGTHS = [(7, 7), (4, 9), (9, 4)]
SHARED = {"MHA": 4, "GQA": 2, "MQA": 1}
PATTERNS = {  # (mask, lengths) -> what they and we are told
    "none": lambda mask, lengths: ({}, None),
    "mask": lambda mask, lengths: ({"mask": mask}, mask),
    "causal": lambda mask, lengths: ({"is_causal": True}, regard.causal()),
    "window": lambda mask, lengths: (
        {"local_window_size": (3, 1)},
        regard.window(3, 1),
    ),
    "lengths": lambda mask, lengths: (
        {"key_value_seq_lengths": lengths},
        regard.padding(lengths=lengths),
    ),
}
TOGETHER = {
    "one number for the window": lambda mask, lengths: (
        {"local_window_size": 2},
        regard.window(2, 2),
    ),
    "causal, window, lengths": lambda mask, lengths: (
        {
            "is_causal": True,
            "local_window_size": (3, 1),
            "key_value_seq_lengths": lengths,
        },
        regard.causal() & regard.window(3, 1) & regard.padding(lengths=lengths),
    ),
    "causal, mask": lambda mask, lengths: (
        {"is_causal": True, "mask": mask},
        regard.causal() & array(mask),
    ),
}
WAYS = list(itertools.product(PATTERNS, (False, True)))  # with and without a bias
GROUPS = [  # a compilation each
    *itertools.product(LENGTHS, ["GQA"], [jnp.float32]),
    *itertools.product([(4, 9)], ["MHA", "MQA"], [jnp.float32]),
    ((4, 9), "GQA", jnp.bfloat16),
]
MASKED, PADDED = (0.1, 0.4, 0.5, 0.7, 0.9), ((0, 3), (2, 0), (1, 1), (3, 1), (2, 3))
DRAWS = list(zip(MASKED, PADDED, strict=True))  # how much of each


def attend_theirs(ways, q, k, v, mask, lengths, bias):
    """Return (out, lse) for every way, so that a shape is compiled for once."""
    done = []
    for pattern, biased in ways:
        options, _ = (PATTERNS | TOGETHER)[pattern](mask, lengths)
        out, lse = jax.nn.dot_product_attention(
            q, k, v, bias=bias if biased else None, return_residual=True, **options
        )
        done.append((out.swapaxes(1, 2), lse.swapaxes(1, 2)))
    return done


def attend_ours(ways, q, k, v, mask, lengths, bias):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    done = []
    for pattern, biased in ways:
        _, seen = (PATTERNS | TOGETHER)[pattern](mask, lengths)
        bias_ = bias if biased else None
        ours = regard.attention(q, k, v, seen, bias=bias_, q_start=0)
        done.append((ours.out, ours.lse))
    return done


def draw_group(rng, n_q, n_k, n_shared, dtype, masked=0.4, padded=(2, 0)):
    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype=dtype)

    mask = rng.random((2, HEADS, n_q, n_k)) > masked
    mask[:, 1, 0] = False  # a row that sees nothing
    return (
        normal(2, n_q, HEADS, 8),
        normal(2, n_k, n_shared, 8),
        normal(2, n_k, n_shared, 8),
        jnp.asarray(mask),
        jnp.asarray([n_k - n for n in padded], dtype=jnp.int32),
        normal(1, HEADS, n_q, n_k),
    )


def test_at_least_300_calls_are_compared():
    assert len(WAYS) * len(GROUPS) * len(DRAWS) >= 300


@pytest.mark.parametrize(("lengths", "shared", "dtype"), GROUPS)
def test_out_and_lse_equal_those_of_dot_product_attention(rng, lengths, shared, dtype):
    compare_all(rng, WAYS, *lengths, SHARED[shared], dtype)


def test_masks_that_come_together_equal_those_of_dot_product_attention(rng):
    compare_all(rng, [(pattern, False) for pattern in TOGETHER], 4, 9, 2, jnp.float32)


def compare_all(rng, ways, n_q, n_k, n_shared, dtype):
    attend = [jax.jit(partial(fn, ways)) for fn in (attend_theirs, attend_ours)]
    for masked, padded in DRAWS:
        inputs = draw_group(rng, n_q, n_k, n_shared, dtype, masked, padded)
        for way, expected, got in zip(
            ways, *(fn(*inputs) for fn in attend), strict=True
        ):
            compare(got, expected, dtype, way)


def compare(got, expected, dtype, way):
    assert got[0].dtype == expected[0].dtype == dtype
    assert got[1].dtype == jnp.float32
    assert expected[1].dtype == dtype  # they round the lse
    out, lse, their_out, their_lse = (
        np.asarray(x, dtype=np.float64) for x in (*got, *expected)
    )
    empty = their_lse < -1e30  # their -inf is 0.7 times the lowest float32
    np.testing.assert_array_equal(lse == -np.inf, empty, err_msg=str(way))
    np.testing.assert_array_equal(out[empty], 0, err_msg=str(way))
    units = 16 if dtype is jnp.float32 else 3  # they round the weights, too
    bound = units * float(jnp.finfo(dtype).eps)
    for mine, other in ((out, their_out), (lse, their_lse)):
        np.testing.assert_allclose(
            mine[~empty], other[~empty], rtol=bound, atol=bound, err_msg=str(way)
        )


@pytest.mark.parametrize(
    "pattern", ["none", "causal", "window", "lengths", "causal, window, lengths"]
)
def test_gradients_equal_those_of_dot_product_attention(rng, pattern):
    q, k, v, mask, lengths, bias = draw_group(rng, 7, 7, 2, jnp.float32)
    weight = jnp.asarray(rng.normal(size=(2, 7, HEADS, 8)), dtype=jnp.float32)
    options, formula = (PATTERNS | TOGETHER)[pattern](mask, lengths)

    def theirs(q, k, v, bias):
        out = jax.nn.dot_product_attention(q, k, v, bias=bias, **options)
        return jnp.sum(out * weight)

    def ours(q, k, v, bias):
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        out = regard.attention(q, k, v, formula, bias=bias).out
        return jnp.sum(out.swapaxes(1, 2) * weight)

    every = (0, 1, 2, 3)
    expected = jax.jit(jax.grad(theirs, argnums=every))(q, k, v, bias)
    got = jax.jit(jax.grad(ours, argnums=every))(q, k, v, bias)
    for mine, other in zip(got, expected, strict=True):
        assert float(jnp.abs(other).max()) > 0.1
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)


# --- jit, vmap, grad against NumPy ---------------------------------------------------

IDS = np.asarray([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 3]])
VALID = np.asarray([[True] * 7, [False] * 3 + [True] * 4])
LEFT = np.asarray([7, 3])
GIVEN = np.random.default_rng(5).random((2, 4, 7, 7)) > 0.5
NUMBERS = np.random.default_rng(6).normal(size=(4, 7, 7))
BY_HEAD = NUMBERS[:, 0, 0]

# what is traced, and how a call is made of it; the same on NumPy gives the numbers
CALLS = {
    "nothing": ((), dict),
    "causal": ((), lambda: {"mask": regard.causal()}),
    "window": ((), lambda: {"mask": regard.window(2, 1)}),
    "each head its own": (
        (),
        lambda: {"mask": per_head([regard.causal(), last(2), everything(), prefix(3)])},
    ),
    "function": (
        (),
        lambda: {"mask": regard.where(lambda b, h, q, k: (q + k) % 3 < b + 1)},
    ),
    "mask": ((GIVEN,), lambda mask: {"mask": mask}),
    "documents": ((IDS,), lambda ids: {"mask": regard.causal() & regard.same(ids)}),
    "documents for all": ((IDS[0],), lambda ids: {"mask": regard.same(ids)}),
    "lengths": ((LEFT,), lambda lengths: {"mask": regard.padding(lengths=lengths)}),
    "padding": (
        (VALID,),
        lambda valid: {"mask": regard.causal() & regard.padding(valid)},
    ),
    "prefix": ((LEFT,), lambda n: {"mask": prefix(n)}),
    "all of it": (
        (IDS, LEFT, VALID),
        lambda ids, n, valid: {
            "mask": (regard.causal() & regard.same(ids) & regard.padding(lengths=n))
            | ~regard.padding(valid)
        },
    ),
    "bias": ((NUMBERS,), lambda bias: {"bias": bias}),
    "bias formula": ((NUMBERS,), lambda bias: {"bias": added(bias)}),
    "alibi": ((BY_HEAD,), lambda slopes: {"bias": alibi(slopes)}),
    "table": ((NUMBERS[:, 0],), lambda values: {"bias": table(values)}),
    "sink": ((BY_HEAD,), lambda sink: {"sink": sink, "mask": regard.window(1)}),
    "softcap and scale": ((), lambda: {"softcap": 1.5, "scale": 0.9}),
    "starts": ((LEFT,), lambda n: {"mask": regard.causal(), "q_start": n - 3}),
}


@pytest.fixture
def qkv(rng):
    """NumPy arrays of float64, with grouped heads and d_v != d_k."""
    sizes = (2, 4, 7, 8), (2, 2, 7, 8), (2, 2, 7, 5)
    return [rng.normal(size=size) for size in sizes]


def to_jax(arrays):
    return [jnp.asarray(x) for x in arrays]


def see_all(make, q, k, v, *data):
    done = regard.attention(q, k, v, **make(*data), see=("scores", "logits", "weights"))
    return {name: x for name, x in vars(done).items() if x is not None}


@pytest.mark.parametrize(("data", "make"), CALLS.values(), ids=CALLS)
def test_jit_gives_the_numbers_of_numpy(qkv, data, make):
    expected = see_all(make, *qkv, *data)
    got = jax.jit(lambda *x: see_all(make, *x))(*to_jax(qkv), *to_jax(data))
    assert set(got) == set(expected)
    for name, x in expected.items():
        assert x.dtype == got[name].dtype == np.float64
        np.testing.assert_allclose(got[name], x, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("name", ["causal", "mask", "bias", "sink"])
def test_jitted_blocks_give_the_numbers_of_numpy(qkv, name):
    data, make = CALLS[name]
    expected = regard.attention(*qkv, **make(*data))

    @jax.jit
    def attend(q, k, v, *data):
        done = regard.attention(q, k, v, **make(*data), block=(3, 4))
        return done.out, done.lse

    out, lse = attend(*to_jax(qkv), *to_jax(data))
    np.testing.assert_allclose(out, expected.out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected.lse, rtol=1e-12, atol=1e-12)


def test_one_compilation_serves_other_ids_and_lengths(qkv):
    """The ids are data, not a part of the program."""
    traced = []

    @jax.jit
    def attend(q, k, v, ids, lengths):
        traced.append(ids)
        mask = regard.causal() & regard.same(ids) & regard.padding(lengths=lengths)
        return regard.attention(q, k, v, mask).out

    for ids, lengths in ((IDS, LEFT), (IDS[::-1], LEFT - 2), (IDS * 0, LEFT[::-1])):
        mask = regard.causal() & regard.same(ids) & regard.padding(lengths=lengths)
        expected = regard.attention(*qkv, mask).out
        got = attend(*to_jax(qkv), jnp.asarray(ids), jnp.asarray(lengths))
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
    assert len(traced) == 1


def test_vmap_gives_the_numbers_of_numpy(qkv):
    """Each sample brings its own ids and lengths."""

    def attend(q, k, v, ids, n):
        mask = regard.causal() & regard.same(ids) & regard.padding(lengths=n[None])
        done = regard.attention(q, k, v, mask)
        return done.out, done.lse

    batched = regard.causal() & regard.same(IDS) & regard.padding(lengths=LEFT)
    expected = regard.attention(*qkv, batched)
    out, lse = jax.jit(jax.vmap(attend))(*to_jax([*qkv, IDS, LEFT]))
    np.testing.assert_allclose(out, expected.out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected.lse, rtol=1e-12, atol=1e-12)


def test_vmap_over_heads_shares_the_keys(qkv):
    q, k, v = qkv
    q, k, v = q[0], k[0, 0], v[0, 0]
    expected = regard.attention(q, k[None], v[None], regard.causal()).out
    attend = jax.vmap(
        lambda q, k, v: regard.attention(q, k, v, regard.causal()).out,
        in_axes=(0, None, None),
    )
    np.testing.assert_allclose(
        attend(*to_jax((q, k, v))), expected, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(
    "name",
    ["nothing", "documents", "all of it", "softcap and scale", "bias", "sink", "alibi"],
)
def test_grad_gives_the_slopes_of_numpy(rng, qkv, name):
    """A step along a random direction changes NumPy's numbers as the gradient says."""
    data, make = CALLS[name]
    floats = [x.dtype.kind == "f" for x in data]
    weight = rng.normal(size=(2, 4, 7, 5))

    def loss(xp, *x):
        done = regard.attention(*x[:3], **make(*x[3:]))
        seen = xp.where(xp.isinf(done.lse), 0.0, done.lse)  # an empty row has no slope
        return xp.sum(done.out * weight) + xp.sum(seen)

    at = [*qkv, *data]
    moving = [0, 1, 2, *(i for i, is_float in enumerate(floats, start=3) if is_float)]
    gradient = jax.jit(jax.grad(lambda *x: loss(jnp, *x), argnums=tuple(moving)))
    for i, slope in zip(moving, gradient(*to_jax(at)), strict=True):
        way = rng.normal(size=at[i].shape)
        step = 1e-5
        up, down = (
            loss(np, *at[:i], at[i] + sign * step * way, *at[i + 1 :])
            for sign in (1, -1)
        )
        expected = (up - down) / (2 * step)
        assert abs(expected) > 1e-3
        np.testing.assert_allclose(np.sum(slope * way), expected, rtol=1e-6, atol=1e-8)


@pytest.fixture
def narrow():
    """JAX as it is by default, without integers of 64 bits."""
    jax.config.update("jax_enable_x64", False)
    yield jnp.zeros(1)
    jax.config.update("jax_enable_x64", True)


WRAP = {  # what it would be in 32 bits: all ids are 0, or one key is left
    "ids": (regard.same(np.array([2**40, 0])), "from 0 to 1099511627776"),
    "bound": (keys(0, np.array([2**32 + 1])), "from 4294967297 to 4294967297"),
    "lengths": (regard.padding(lengths=[-(2**40)]), "from -1099511627776 to"),
    "bias": (added(np.full((1, 1), 2**32)), "from 4294967296 to 4294967296"),
}


@pytest.mark.parametrize("name", WRAP)
def test_integers_that_jax_would_cut_are_refused(narrow, name):
    formula, ends = WRAP[name]
    words = f"integers {ends}.* do not fit int32. Use smaller ones, or write jax.config"
    with pytest.raises(ArrayError, match=words):
        formula.dense((1, 1, 1, 2), q_start=0, like=narrow)
    with pytest.raises(ArrayError, match=words):
        jax.jit(lambda x: formula.dense((1, 1, 1, 2), q_start=0, like=x))(narrow)


def test_integers_that_fit_are_those_of_numpy(narrow):
    for formula in (
        regard.same(np.array([2**31 - 1, -(2**31), 2**31 - 1])),
        keys(0, np.array([2**31 - 1])),
        keys(0, 2**32 + 1),
        regard.causal() & regard.window(2**40),
    ):
        found = np.asarray(formula.dense((1, 1, 3, 3), like=narrow))
        assert found.tolist() == formula.dense((1, 1, 3, 3)).tolist()
