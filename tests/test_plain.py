"""The plain transformer: each part against its formula, in every library."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from configurations import draw_config, draw_trained
from torch.nn import functional as F  # noqa: N812

import regard
from regard.errors import OptionError, ShapeError
from regard.plain import (
    Config,
    Decoder,
    Linear,
    Sampling,
    feed_forward,
    init_weights,
    layer_norm,
    multi_head,
    rms_norm,
    softmax,
)
from regard.plain.feedforward import erf, gelu, gelu_tanh, relu, silu
from regard.plain.multihead import attend_listed, attend_stacked, fuse


def test_softmax_sums_to_one_or_to_zero(library):
    x = library.make([[1e30, 1e30, -np.inf], [-np.inf] * 3, [0.0, math.log(3), -1e30]])
    expected = [[0.5, 0.5, 0], [0, 0, 0], [0.25, 0.75, 0]]
    np.testing.assert_allclose(np.asarray(softmax(x)), expected, atol=1e-15)


def test_norms_are_those_of_torch(library, rng):
    x, weight, bias = rng.normal(size=(3, 5, 8)) * 3 + 1
    weight, bias = weight[0], bias[0]
    like = [torch.from_numpy(y) for y in (x, weight, bias)]
    mine = layer_norm(library.make(x), library.make(weight), library.make(bias), 1e-3)
    theirs = F.layer_norm(like[0], (8,), like[1], like[2], 1e-3)
    np.testing.assert_allclose(np.asarray(mine), theirs, atol=1e-13)
    mine = rms_norm(library.make(x), library.make(weight), 1e-3)
    theirs = F.rms_norm(like[0], (8,), like[1], 1e-3)
    np.testing.assert_allclose(np.asarray(mine), theirs, atol=1e-13)


def test_norms_of_half_precision_are_computed_in_single():
    x = torch.full((512,), 300.0, dtype=torch.float16)  # 300² is inf in float16
    x[::2] = -300
    expected = (x / 300).float()
    assert torch.equal(rms_norm(x).float(), expected)
    assert torch.equal(layer_norm(x).float(), expected)


def test_activations_are_those_of_torch(library, rng):
    x = np.concatenate([rng.normal(size=200) * 4, [-50.0, 0.0, 50.0]])
    like = torch.from_numpy(x)
    pairs = {
        relu: F.relu(like),
        silu: F.silu(like),
        gelu: F.gelu(like),
        gelu_tanh: F.gelu(like, approximate="tanh"),
    }
    for mine, theirs in pairs.items():
        np.testing.assert_allclose(
            np.asarray(mine(library.make(x))), theirs, atol=1e-12, rtol=1e-13
        )


def test_erf_is_exact():
    x = np.linspace(-8, 8, 4001)
    exact = [math.erf(t) for t in x]
    np.testing.assert_allclose(erf(x), exact, atol=1e-14)


def test_feed_forward_is_its_formula(library, rng):
    x, up, down = (
        rng.normal(size=(5, 4)),
        rng.normal(size=(6, 4)),
        rng.normal(size=(4, 6)),
    )
    u, d, b = rng.normal(size=6), rng.normal(size=4), library.make
    mine = feed_forward(b(x), Linear(b(up), b(u)), Linear(b(down), b(d)), "relu")
    theirs = np.maximum(x @ up.T + u, 0) @ down.T + d
    np.testing.assert_allclose(np.asarray(mine), theirs, atol=1e-13)
    mine = feed_forward(b(x), Linear(b(up)), Linear(b(down[:, :3])), "swiglu")
    gate, value = x @ up[:3].T, x @ up[3:].T
    theirs = gate / (1 + np.exp(-gate)) * value @ down[:, :3].T
    np.testing.assert_allclose(np.asarray(mine), theirs, atol=1e-13)
    with pytest.raises(OptionError, match='activation="tanh", expected one of relu'):
        feed_forward(b(x), Linear(b(up)), Linear(b(down)), "tanh")


@pytest.mark.parametrize("crossed", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("d", [3, 4], ids=["other width", "H d = D"])
def test_three_ways_to_write_heads_give_the_same_numbers(library, rng, crossed, d):
    n_heads, width, make = 3, 12, library.make
    x = make(rng.normal(size=(2, 5, width)))
    context = make(rng.normal(size=(2, 7, width))) if crossed else None
    weights = rng.normal(size=(3, n_heads, d, width)) / 3
    out = Linear(
        make(rng.normal(size=(width, n_heads * d))), make(rng.normal(size=width))
    )
    heads = [
        tuple(Linear(make(weights[j, h])) for j in range(3)) for h in range(n_heads)
    ]
    mask = None if crossed else regard.causal()
    options = {"mask": mask, "context": context}
    listed = attend_listed(x, heads, out, **options)
    stacked = attend_stacked(x, *(make(w) for w in weights), out, **options)
    fused = multi_head(x, fuse(heads), out, heads=n_heads, **options)
    np.testing.assert_allclose(np.asarray(stacked), np.asarray(listed), atol=1e-12)
    np.testing.assert_allclose(np.asarray(fused), np.asarray(listed), atol=1e-12)
    # written out, so that a swap of q and k in all three would show
    first, other = np.asarray(x)[0], np.asarray(x if context is None else context)[0]
    rows = []
    for h in range(n_heads):
        q, k, v = (y @ weights[j, h].T for j, y in enumerate((first, other, other)))
        scores = q @ k.T / math.sqrt(d)
        if not crossed:
            scores[np.triu_indices(5, 1)] = -np.inf
        part = np.exp(scores)
        rows.append(part / part.sum(-1, keepdims=True) @ v)
    expected = np.concatenate(rows, -1) @ np.asarray(out.weight).T + np.asarray(
        out.bias
    )
    np.testing.assert_allclose(np.asarray(fused)[0], expected, atol=1e-12)


def test_fused_biases_stand_beside_their_rows(rng):
    x = rng.normal(size=(4, 6))
    heads = [
        tuple(Linear(rng.normal(size=(3, 6)), rng.normal(size=3)) for _ in "qkv")
        for _ in range(2)
    ]
    out = Linear(rng.normal(size=(6, 6)))
    np.testing.assert_allclose(
        multi_head(x, fuse(heads), out, heads=2),
        attend_listed(x, heads, out),
        atol=1e-12,
    )


def run_everywhere(config, weights, tokens):
    def run(make, jit=lambda fn: fn):
        decoder = Decoder(config, {n: make(w) for n, w in weights.items()})
        return np.asarray(jit(decoder.__call__)(make(tokens)))

    numpy, torch_ = run(np.asarray), run(torch.from_numpy)
    return {"numpy": numpy, "torch": torch_, "jax": run(jnp.asarray, jax.jit)}


@pytest.mark.parametrize("seed", range(12))
def test_the_decoder_is_the_same_on_numpy_torch_and_jax(seed):
    config = draw_config(seed)
    tokens = np.random.default_rng(seed).integers(0, 40, (2, 11))
    found = run_everywhere(config, draw_trained(config, seed), tokens)
    assert np.abs(found["numpy"]).max() > 0.1
    np.testing.assert_allclose(found["torch"], found["numpy"], atol=1e-11, rtol=1e-11)
    np.testing.assert_allclose(found["jax"], found["numpy"], atol=1e-11, rtol=1e-11)


def test_the_decoder_never_looks_ahead():
    config = draw_config(3)
    decoder = Decoder(config, draw_trained(config, 3))
    tokens = np.arange(12)
    changed = tokens.copy()
    changed[7:] = 0
    np.testing.assert_allclose(decoder(tokens)[:7], decoder(changed)[:7], atol=1e-13)
    assert np.abs(decoder(tokens)[7:] - decoder(changed)[7:]).max() > 1e-3


def test_random_weights_have_the_widths_they_are_said_to_have():
    config = Config(vocabulary=500, context=64, width=96, layers=8, heads=4)
    weights = init_weights(config)
    assert weights["embed.weight"].std() == pytest.approx(0.02, rel=0.02)
    assert weights["blocks.3.attention.out.weight"].std() == pytest.approx(
        0.005, rel=0.05
    )
    assert weights["blocks.0.attention.qkv.weight"].std() == pytest.approx(
        0.02, rel=0.02
    )
    assert (weights["norm.weight"] == 1).all()
    assert (weights["norm.bias"] == 0).all()


def test_weights_that_do_not_fit_are_named():
    config = Config(vocabulary=9, context=8, width=4, layers=1, heads=2)
    weights = init_weights(config)
    with pytest.raises(
        ShapeError, match=r"norm.weight: given nothing, expected \(4,\)"
    ):
        Decoder(config, {n: w for n, w in weights.items() if n != "norm.weight"})
    with pytest.raises(ShapeError, match=r"extra: given \(2,\), expected nothing"):
        Decoder(config, {**weights, "extra": np.zeros(2)})
    with pytest.raises(ShapeError, match="9 tokens, but this model reads 8 at most"):
        Decoder(config, weights)(np.zeros(9, dtype=int))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "a width of 8 cannot be split into 3 heads"),
        ({"kv_heads": 3, "heads": 4}, "4 heads cannot share 3 heads"),
        ({"norm": "batch"}, "norm='batch', expected one of 'layer', 'rms'"),
        ({"kv_heads": -2}, "kv_heads=-2, .* at least 1, or 0 for the same as heads."),
        ({"head_width": -8}, "head_width=-8, .* at least 1, or 0 for width / heads."),
        ({"hidden": -1}, "hidden=-1, .* at least 1, or 0 for 4"),
        ({"hidden": 2.5}, "hidden=2.5, expected an integer of at least 1, or 0"),
        (
            {"position": "rotary", "head_width": 3},
            "a head has the odd width 3. Set an even head_width=.",
        ),
        ({"dropout": 1.0}, "expected 0 <= dropout < 1"),
        ({"layers": 0}, "layers=0, expected an integer of at least 1"),
        ({"window": 0}, "window=0, expected at least 1 or None"),
    ],
)
def test_configs_that_cannot_be_are_refused(options, message):
    usual = {"vocabulary": 9, "context": 8, "width": 8, "layers": 1, "heads": 2}
    with pytest.raises(OptionError, match=message):
        Config(**{**usual, **options})


def test_generate_repeats_the_argmax_and_reads_the_last_tokens_of_a_long_text():
    config = Config(vocabulary=30, context=6, width=16, layers=2, heads=2)
    decoder = Decoder(config, draw_trained(config, 1))
    tokens = [3, 1, 4]
    for token in decoder.generate(tokens, 8):
        logits = decoder(np.asarray(tokens[-6:]))
        assert token == logits[-1].argmax()
        tokens.append(token)
    assert len(tokens) == 11


def test_a_seed_gives_the_same_tokens_on_every_library():
    config = Config(vocabulary=30, context=4, width=16, layers=2, heads=2)
    weights = draw_trained(config, 1)
    sampling = Sampling(temperature=1.0, top_k=20)
    drawn = {}
    for make in (np.asarray, torch.from_numpy, jnp.asarray):
        decoder = Decoder(config, {n: make(w) for n, w in weights.items()})
        drawn[make] = [
            list(decoder.generate([1, 2, 3], 5, sampling=sampling, seed=s))
            for s in range(3)
        ]
    first, *others = drawn.values()
    assert all(other == first for other in others)
    assert len({tuple(tokens) for tokens in first}) == 3
