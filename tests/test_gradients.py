"""Gradients of the definition and of the blocked path: right, and finite everywhere."""

import jax
import numpy as np
import pytest
import torch

import regard
from regard.masks import added, alibi, array, causal, padding, same, table, window

CASES = {
    "plain": {},
    "causal": {"mask": causal()},
    "documents": {"mask": causal() & same([0, 0, 1, 1, 1])},
    "softcap": {"mask": causal(), "softcap": 1.5},
    "sink": {"mask": causal(), "sink": True},
    "empty rows": {"mask": causal() & ~window(1)},
    "empty rows and sink": {"mask": ~causal(), "sink": True},
    "a batch of padding": {"mask": padding(lengths=[0, 3])},
    "bias": {"bias": True},
    "everything": {
        "mask": causal() & ~window(1),
        "softcap": 1.5,
        "sink": True,
        "bias": True,
    },
}


def draw(rng, case, heads=4, shared=2):
    """Inputs with grouped heads and d_v != d_k."""
    x = {
        "q": rng.normal(size=(2, heads, 5, 3)),
        "k": rng.normal(size=(2, shared, 5, 3)),
        "v": rng.normal(size=(2, shared, 5, 2)),
    }
    x |= {"bias": rng.normal(size=(heads, 5, 5))} if case.get("bias") else {}
    return x | ({"sink": rng.normal(size=heads)} if case.get("sink") else {})


def call(case, block):
    """Return attention as a function of its floating point arrays."""

    def run(x):
        seen = regard.attention(
            x["q"],
            x["k"],
            x["v"],
            case.get("mask"),
            bias=x.get("bias"),
            sink=x.get("sink"),
            softcap=case.get("softcap"),
            block=block,
        )
        return seen.out, seen.lse

    return run


@pytest.mark.parametrize("block", [None, (2, 3)], ids=["dense", "blocked"])
@pytest.mark.parametrize("name", CASES)
def test_torch_gradients_equal_finite_differences(rng, name, block):
    inputs = draw(rng, CASES[name])
    run = call(CASES[name], block)

    def flat(*arrays):
        out, lse = run(dict(zip(inputs, arrays, strict=True)))
        finite = torch.where(torch.isneginf(lse), 0.0, lse)  # -inf has no difference
        return out, finite

    arrays = [torch.tensor(x, requires_grad=True) for x in inputs.values()]
    # along random directions; number by number where everything comes together
    assert torch.autograd.gradcheck(flat, arrays, fast_mode=name != "everything")
    grads = torch.autograd.grad(flat(*arrays)[0].square().sum(), arrays)
    assert all(torch.isfinite(g).all() for g in grads)


# tiles of one shape: JAX compiles for each
@pytest.mark.parametrize("block", [None, (5, 1)], ids=["dense", "blocked"])
@pytest.mark.parametrize("name", CASES)
def test_jax_and_torch_agree_on_gradients(rng, name, block):
    inputs = draw(rng, CASES[name])
    run = call(CASES[name], block)
    by_jax = jax.grad(lambda x: (run(x)[0] ** 2).sum())(
        {n: jax.numpy.asarray(x) for n, x in inputs.items()}
    )
    tensors = {n: torch.tensor(x, requires_grad=True) for n, x in inputs.items()}
    (run(tensors)[0] ** 2).sum().backward()
    for n in inputs:
        assert np.isfinite(np.asarray(by_jax[n])).all()
        np.testing.assert_allclose(
            np.asarray(by_jax[n]), tensors[n].grad.numpy(), atol=1e-12
        )


def test_learned_biases_get_gradients(rng):
    q, k, v = (torch.tensor(rng.normal(size=(4, 5, 3))) for _ in range(3))
    slopes = torch.rand(4, dtype=torch.float64, requires_grad=True)
    values = torch.rand((4, 5), dtype=torch.float64, requires_grad=True)
    dense = torch.rand((5, 5), dtype=torch.float64, requires_grad=True)

    def run(slopes, values, dense):
        bias = alibi(slopes) + table(values) + added(dense)
        return regard.attention(q, k, v, causal(), bias=bias).out

    assert torch.autograd.gradcheck(run, (slopes, values, dense))


def test_a_garbage_key_that_nobody_sees_spoils_no_gradient(rng):
    q, k, v = (torch.tensor(rng.normal(size=(2, 4, 5, 3))) for _ in range(3))
    k[1, :, 3:], v[1, :, 3:] = float("nan"), float("inf")
    for x in (q, k, v):
        x.requires_grad_()
    for mask in (padding(lengths=[5, 3]), array(torch.arange(5)[None] < 3)):
        out = regard.attention(q, k, v, mask & causal()).out
        grads = torch.autograd.grad(out[1].sum(), (q, k, v), allow_unused=True)
        assert torch.isfinite(out[1]).all()
        assert all(torch.isfinite(g).all() for g in grads)
