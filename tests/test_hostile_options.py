"""Options and values that the suite never combined, each of which gave a wrong answer.

What is expected comes from the definition in float64. An error that says why is as good
where the right answer would be expensive; a number that is wrong is not.
"""

import functools
import math
import operator
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.autograd.functional import hessian, hvp

import regard
from regard import attention, causal, same, where, window
from regard.engine import attend
from regard.errors import GradientError, OptionError
from regard.masks import alibi, keys, table

WINDOW = causal() & window(9)
close = functools.partial(torch.testing.assert_close, atol=1e-9, rtol=1e-9)


def make(*shape, dtype=torch.float64, seed=0, grad=False):
    """Return q, k and v."""
    torch.manual_seed(seed)
    return [torch.randn(shape, dtype=dtype).requires_grad_(grad) for _ in "qkv"]


def loss(run, mask, **options):
    """Return a function of one tensor, which is q, k and v at once."""

    def compute(x):
        done = run(x, x, x, mask, **options)
        return done.out.square().sum() + done.lse.sin().sum()

    return compute


# --- second derivatives ----------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, causal(), WINDOW, same(np.arange(7) // 3)])
def test_second_derivatives_are_those_of_the_definition(mask):
    x, *_ = make(1, 2, 7, 3)
    fast, slow = loss(attend, mask), loss(attention, mask)
    expected = hessian(slow, x)
    assert expected.abs().sum() > 1
    close(hessian(fast, x), expected)
    close(hvp(fast, x, x.cos())[1], hvp(slow, x, x.cos())[1])


def test_a_gradient_penalty_is_that_of_the_definition():
    for sink in (None, torch.tensor([0.5, -1.0], dtype=torch.float64)):
        found = []
        for run in (attend, attention):
            q, k, v = make(2, 2, 6, 4, grad=True)
            out = run(q, k[:, :1], v[:, :1], WINDOW, sink=sink).out
            (dq,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
            (out.sum() + dq.square().sum()).backward()
            found.append((q.grad, k.grad, v.grad))
        close(*found)


def test_lse_alone_has_second_derivatives():
    q, k, v = make(1, 1, 5, 4)
    expected = hessian(lambda q: attention(q, k, v, WINDOW).lse.pow(3).sum(), q)
    for x in (v, v.clone().requires_grad_()):
        found = hessian(lambda q, x=x: attend(q, k, x, WINDOW).lse.pow(3).sum(), q)
        close(found, expected)


def test_a_value_alone_has_second_derivatives():
    q, k, v = make(1, 1, 5, 4)
    expected = hessian(lambda v: attention(q, k, v, WINDOW).out.pow(3).sum(), v)
    close(hessian(lambda v: attend(q, k, v, WINDOW).out.pow(3).sum(), v), expected)


# --- scales of 0 and less ----------------------------------------------------------------


@pytest.mark.parametrize("scale", [0, -0.0, -1, -0.3, -50.0, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("q_start", [0, 3])
def test_a_scale_of_0_or_less_with_causal(scale, dtype, q_start):
    q, k, v = (x.requires_grad_() for x in make(2, 2, 20, 8, dtype=dtype))
    rows = q[:, :, : 20 - q_start]
    options = {"scale": scale, "q_start": q_start}
    wide = [x.double() for x in (rows, k, v)]
    expected = attention(*wide, causal(), **options)
    done = attend(rows, k, v, causal(), **options)
    room = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
    for a, b in ((done.out, expected.out), (done.lse, expected.lse)):
        torch.testing.assert_close(a.double(), b, atol=room, rtol=room)
    grads = [
        torch.autograd.grad(x.out.sum() + x.lse.sum(), (q, k, v))
        for x in (done, expected)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=30 * room, rtol=10 * room)


def test_scales_and_caps_that_are_no_numbers_are_refused():
    q, k, v = make(1, 2, 5, 4)
    for name in ("scale", "softcap"):
        for bad in ("a", [1.0, 2.0], math.nan, math.inf, -math.inf):
            for run in (attend, attention):
                with pytest.raises(OptionError, match=f"^{name}=.*expected a"):
                    run(q, k, v, **{name: bad})
    with pytest.raises(OptionError, match="expected a number above 0"):
        attend(q, k, v, softcap=torch.tensor(-1.0))


# --- in-place changes between forward and backward -----------------------------------------

IDS = torch.arange(20) // 5


CHANGES = {
    "mask": (lambda: {"mask": torch.rand(20, 20) > 0.5}, lambda x: x["mask"].fill_(True)),
    "view": (lambda: {"mask": torch.rand(20, 20) > 0.5}, lambda x: x["mask"][3].logical_not_()),
    "bias": (lambda: {"bias": torch.rand(20, 20).double()}, lambda x: x["bias"].zero_()),
    "ids": (lambda: {"mask": same(IDS.clone())}, lambda x: x["mask"].ids_q.zero_()),
    "slopes": (
        lambda: {"bias": alibi(torch.ones(2).double())},
        lambda x: x["bias"].slopes.zero_(),
    ),
    "scale": (lambda: {"scale": torch.tensor(0.3)}, lambda x: x["scale"].mul_(3)),
    "softcap": (lambda: {"softcap": torch.tensor(3.0)}, lambda x: x["softcap"].mul_(3)),
}  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"softcap": 2.0}, {"block": 8}], ids=str)
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_after_the_forward_pass_is_refused(name, more):
    make_options, change = CHANGES[name]
    options = {**more, **make_options()}
    q, k, v = make(1, 2, 20, 8, grad=True)
    done = attend(q, k, v, **options)
    change(options)
    with pytest.raises(GradientError, match="changed in place between"):
        done.out.sum().backward()


def test_a_mask_of_inference_mode_that_changes_is_refused():
    q, k, v = make(1, 2, 20, 8, grad=True)
    with torch.inference_mode():
        mask = torch.rand(20, 20) > 0.5
    attend(q, k, v, mask).out.sum().backward()
    done = attend(q, k, v, mask)
    with torch.inference_mode():
        mask.fill_(True)
    with pytest.raises(GradientError, match="changed in place between"):
        done.out.sum().backward()


@pytest.mark.parametrize(
    "options", [{}, {"mask": WINDOW}, {"softcap": 2.0}, {"block": 8}]
)
def test_keys_that_change_after_the_forward_pass_are_refused(options):
    q, k, v = make(1, 2, 20, 8, grad=True)
    double = k * 2
    done = attend(q, double, v, **options)
    with torch.no_grad():
        double.mul_(3)
    with pytest.raises(RuntimeError, match=r"in ?place"):
        done.out.sum().backward()


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
def test_a_function_that_changes_its_mind_is_refused(options):
    q, k, v = make(1, 2, 20, 8, grad=True)
    ids = IDS.clone()
    done = attend(q, k, v, where(lambda b, h, q, k: ids[q] == ids[k]), **options)
    ids[3] = 7
    with pytest.raises(GradientError, match="returned different cells"):
        done.out.sum().backward()


def test_a_function_that_draws_random_numbers_is_refused():
    q, k, v = make(1, 2, 20, 8, grad=True)
    noise = where(lambda b, h, q, k: torch.rand(q.shape[2], k.shape[3]) > 0.5)
    with pytest.raises(GradientError, match="returned different cells"):
        attend(q, k, v, noise).out.sum().backward()


def test_numpy_data_of_a_mask_is_copied():
    found = []
    for change in (False, True):
        q, k, v = make(1, 2, 20, 8, grad=True)
        ids = np.arange(20) // 5
        done = attend(q, k, v, same(ids))
        ids[:] = 0 if change else ids
        done.out.square().sum().backward()
        found.append(q.grad)
    close(*found)


# --- autocast, compilers, other libraries ----------------------------------------------


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"block": 8}, {"see": ("weights",)}], ids=str)  # fmt: skip
def test_autocast_changes_nothing(options):
    found = []
    for run in (attend, attention):
        for enabled in (False, True):
            q, k, v = make(1, 4, 20, 8, dtype=torch.float32, grad=True)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                done = run(q, k[:, :2], v[:, :2], causal(), **options)
            assert done.lse.dtype == done.out.dtype == torch.float32
            done.out.square().sum().backward()
            found.append((done.out, done.lse, q.grad, k.grad))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=2e-5, rtol=1e-4)


MASKS = {
    "window": {"mask": WINDOW},
    "documents": {"mask": same(IDS)},
    "array": {"mask": torch.arange(20)[:, None] >= torch.arange(20)},
    "bias": {"bias": alibi(torch.ones(2))},
    "softcap": {"softcap": 2.0, "mask": causal()},
    "block": {"block": 8},
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("name", MASKS)
def test_a_call_with_a_plan_compiles_with_a_graph_break(name):
    torch.compiler.reset()
    options = MASKS[name]
    compiled = torch.compile(
        lambda q, k, v: 2 * attend(q, k, v, **options).out, backend="aot_eager"
    )
    found = []
    for run in (compiled, lambda q, k, v: 2 * attend(q, k, v, **options).out):
        q, k, v = make(1, 2, 20, 8, dtype=torch.float32, grad=True)
        out = run(q, k, v)
        out.square().sum().backward()
        found.append((out, q.grad, v.grad))
    torch.testing.assert_close(*found)


FAR = {  # a bound that no position reaches is none
    window(2**31): causal(),
    window(2**80): causal(),
    window(0, 2**31 - 1): window(0, None),
    window(2**31 - 1, 2**31 - 1): None,
    window(2**80, 2**80): None,
    keys(-(2**40), 2**40): None,
}


@pytest.mark.parametrize("mask", FAR, ids=repr)
def test_distances_beyond_any_position(mask):
    x = np.random.default_rng(0).normal(size=(5, 4))
    expected = attention(x, x, x, FAR[mask]).lse
    np.testing.assert_allclose(attention(x, x, x, mask).lse, expected)


@pytest.mark.parametrize("mask", FAR, ids=repr)
def test_distances_beyond_32_bits_in_jax(mask):
    x = np.random.default_rng(0).normal(size=(5, 4))
    y = jnp.asarray(x)
    expected = attention(x, x, x, mask).lse
    np.testing.assert_allclose(attention(y, y, y, mask).lse, expected, rtol=1e-4)


def test_options_that_jax_traces():
    x = np.random.default_rng(0).normal(size=(5, 4))
    for name in ("softcap", "scale"):
        traced = jax.jit(lambda x, o, name=name: attention(x, x, x, **{name: o}).lse)
        expected = attention(x, x, x, **{name: 2.0}).lse
        np.testing.assert_allclose(traced(jnp.asarray(x), 2.0), expected, rtol=1e-4)


# --- shapes, chains, rows that see nothing ----------------------------------------------


@pytest.mark.parametrize("mask", [None, causal(), WINDOW])
def test_keys_without_a_batch_when_heads_are_as_many_as_batches(mask):
    q, *_ = make(2, 4, 5, 8)
    k, v, _ = make(2, 5, 8, seed=1)
    close(attend(q, k, v, mask).out, attention(q, k, v, mask).out)


def test_lse_has_the_batches_of_v_and_can_be_written():
    q, k, v = (x.numpy() for x in make(1, 2, 5, 4))
    assert attention(q, k, v).lse.flags.writeable
    for block in (None, 2):
        done = attention(q, k, np.concatenate([v, -v]), block=block)
        assert done.lse.shape == done.out.shape[:-1] == (2, 2, 5)


def test_a_long_chain_of_masks_is_not_a_deep_tree():
    ones = [keys(i, i + 1) for i in range(10)] * 200
    some = functools.reduce(operator.or_, ones)
    none = functools.reduce(operator.and_, [~x for x in ones])
    bias = functools.reduce(operator.add, [table(np.zeros((1, 3)))] * 2000)
    assert repr(some).count("keys") == 2000
    assert some.tiles((20, 20), block=10).kinds[0, 0].tolist() == [[1, 0], [1, 0]]
    assert (none.dense((20, 20)) == (np.arange(20) >= 10)).all()
    x = np.random.default_rng(0).normal(size=(20, 4))
    done = attention(x, x, x, some, bias=bias)
    np.testing.assert_allclose(done.out, attention(x, x[:10], x[:10]).out)
    assert repr(~~some) == repr(some)


def test_a_row_that_sees_nothing_has_gradients_of_0():
    nothing = keys(0, 0)
    for options in (
        {"softcap": 2.0},
        {"bias": torch.zeros(20, 20, requires_grad=True)},
    ):
        q, k, v = make(1, 2, 20, 8, dtype=torch.float32, grad=True)
        done = attend(q, k, v, nothing, **options)
        (done.out.sum() + done.lse.clamp(min=0).sum()).backward()
        for x in (q, k, v, *options.values()):
            assert not isinstance(x, torch.Tensor) or (x.grad == 0).all()


# --- numbers beyond the range of the kernel --------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask", [WINDOW, regard.masks.prefix(3), causal(), None])
def test_a_bad_key_reaches_only_the_rows_that_see_it(bad, mask):
    q, k, v = make(1, 1, 300, 8)
    k[0, 0, 100] = bad
    expected = attention(q, k, v, mask)
    done = attend(q, k, v, mask)
    if mask is WINDOW and math.isnan(bad):
        assert done.lse.isnan().sum() == 10
    torch.testing.assert_close(done.lse, expected.lse, equal_nan=True)
    torch.testing.assert_close(done.out, expected.out, equal_nan=True)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("mask", [None, causal(), WINDOW])
def test_scores_beyond_float32_before_the_scale(sign, mask):
    q, k, v = (1 - x.abs() / 50 for x in make(1, 1, 30, 8, dtype=torch.float32))
    q, k = (sign * q).requires_grad_(), k * 1e38
    assert (q @ k.mT).isinf().all()
    with torch.no_grad():
        bare = attend(q, k, v, mask)
    done, expected = attend(q, k, v, mask), attention(q, k, v, mask)
    for x in (bare, done):
        torch.testing.assert_close(x.lse, expected.lse)
        torch.testing.assert_close(x.out, expected.out)
    grads = [torch.autograd.grad(x.out.sum(), q)[0] for x in (done, expected)]
    torch.testing.assert_close(*grads)


@pytest.fixture
def fused(monkeypatch):
    """Fail if the definition runs in the place of the kernel."""
    choose = sys.modules["regard.engine.choose"]  # the package has a function so named
    monkeypatch.setattr(choose, "run_definition", pytest.fail)


@pytest.mark.parametrize("mask", [None, causal(), WINDOW])
def test_zeros_stay_on_the_fused_kernel(fused, mask):
    zero = torch.zeros(1, 1, 20, 8)
    lse = attend(zero, zero, zero, mask).lse
    torch.testing.assert_close(lse, attention(zero, zero, zero, mask).lse)


@pytest.mark.parametrize("scale", [-1.0, 0.0])
def test_scales_of_0_and_less_stay_on_the_fused_kernel(fused, scale):
    q, k, v = make(1, 2, 20, 8)
    expected = attention(q, k, v, causal(), scale=scale)
    close(attend(q, k, v, causal(), scale=scale).lse, expected.lse)


@pytest.mark.parametrize("mask", [None, causal() | keys(0, 300)])
def test_values_whose_sum_is_beyond_float32(mask):
    q, k, v = make(1, 1, 400, 8, dtype=torch.float32)
    v = v.abs() * 3e37
    done, expected = attend(q, k, v, mask), attention(q, k, v, mask)
    assert expected.out.isfinite().all()
    torch.testing.assert_close(done.out, expected.out, atol=0, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_under_autocast(dtype):
    q, k, v = make(1, 1, 600, 8, dtype=dtype, grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        done = attend(q, k, v, WINDOW)
        (done.out.sum() + done.lse.sum()).backward()
    expected = attention(*(x.double() for x in (q, k, v)), WINDOW)
    torch.testing.assert_close(done.lse.double(), expected.lse, atol=1e-2, rtol=1e-2)


def test_a_sink_of_infinity_is_nan_as_in_the_definition():
    q, k, v = make(1, 2, 5, 4)
    sink = torch.tensor([math.inf, 1.0], dtype=torch.float64)
    expected = attention(q, k, v, sink=sink)
    done = attend(q, k, v, sink=sink)
    nothing = attention(q, k, v, keys(0, 0), sink=sink)
    tiles = attention(q, k, v, keys(0, 0), sink=sink, block=2)
    torch.testing.assert_close(tiles.out, nothing.out, equal_nan=True)
    torch.testing.assert_close(tiles.lse, nothing.lse, equal_nan=True)
    assert done.out[:, 0].isnan().all()
    assert not done.out[:, 1].isnan().any()
    torch.testing.assert_close(done.out, expected.out, equal_nan=True)
    torch.testing.assert_close(done.lse, expected.lse, equal_nan=True)
