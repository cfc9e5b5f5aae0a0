"""The torch modules: judged by the plain decoder, in values and gradients."""

import numpy as np
import pytest
import torch
from configurations import draw_config, draw_trained

import regard
from regard import plain
from regard.engine import choose
from regard.errors import OptionError, ShapeError
from regard.nn import CausalTransformer, MultiHeadAttention
from regard.nn.attention import Linear
from regard.nn.cache import Cache
from regard.plain import Config, Decoder

SMALL = Config(
    vocabulary=40,
    context=32,
    width=24,
    layers=2,
    heads=4,
    kv_heads=2,
    position="rotary",
    norm="rms",
    activation="swiglu",
    bias=False,
)


def make_model(config, seed, dtype=torch.float32):
    """Return a model and its weights, all of them away from their start."""
    weights = {n: torch.from_numpy(w) for n, w in draw_trained(config, seed).items()}
    model = CausalTransformer(config).to(dtype)
    model.load_state_dict(weights)
    return model, weights


def draw_tokens(seed, shape=(2, 13)):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 40, shape))


@pytest.mark.parametrize("seed", range(48))
def test_nn_is_plain(seed):
    config, tokens = draw_config(seed), draw_tokens(seed)
    model, weights = make_model(config, seed)
    single = {n: w.float() for n, w in weights.items()}
    with torch.no_grad():
        mine, judge = model(tokens), Decoder(config, single)(tokens)
    size = max(1, float(judge.abs().max()))
    assert float((mine - judge).abs().max()) < 1e-5 * size


@pytest.mark.parametrize("seed", range(24))
def test_nn_and_its_gradients_are_plain_in_double_precision(seed):
    config, tokens = draw_config(seed), draw_tokens(seed)
    model, weights = make_model(config, seed, torch.float64)
    for weight in weights.values():
        weight.requires_grad_()
    mine, judge = model(tokens), Decoder(config, weights)(tokens)
    torch.testing.assert_close(mine, judge, atol=1e-11, rtol=1e-11)
    toward = torch.from_numpy(np.random.default_rng(0).normal(size=mine.shape))
    (mine * toward).sum().backward()
    (judge * toward).sum().backward()
    for name, weight in model.named_parameters():
        expected = weights[name].grad
        torch.testing.assert_close(weight.grad, expected, atol=1e-10, rtol=1e-9)


def test_random_configs_take_every_option():
    configs = [draw_config(seed) for seed in range(48)]
    for name, n in {"activation": 4, "norm": 2, "position": 4, "window": 4}.items():
        assert len({getattr(config, name) for config in configs}) == n
    assert len({config.heads // config.shared for config in configs}) > 3


@pytest.mark.parametrize("seed", range(16))
def test_reading_on_from_a_cache_is_reading_at_once(seed):
    config, tokens = draw_config(seed), draw_tokens(seed)
    model, _ = make_model(config, seed, torch.float64)
    cache = Cache(config, 2, 20, dtype=torch.float64)
    pieces = tokens.split([5, 1, 3, 1, 1, 2], 1)
    with torch.no_grad():
        logits = torch.cat([model(piece, cache=cache) for piece in pieces], 1)
        torch.testing.assert_close(logits, model(tokens), atol=1e-11, rtol=1e-11)
    assert cache.longest == 13


@pytest.mark.parametrize("seed", range(16))
def test_sequences_of_different_lengths_share_a_cache(seed):
    config, tokens = draw_config(seed), draw_tokens(seed, (3, 12))
    model, _ = make_model(config, seed, torch.float64)
    cache = Cache(config, 3, 12, dtype=torch.float64)
    lengths = torch.tensor([9, 2, 6])
    filled = torch.where(torch.arange(9) < lengths[:, None], tokens[:, :9], 7)
    with torch.no_grad():
        expected = model(tokens)
        model(filled, cache=cache)
        cache.lengths = lengths
        for step in range(3):
            at = lengths + step
            logits = model(tokens[range(3), at][:, None], cache=cache)
            torch.testing.assert_close(
                logits[:, 0], expected[range(3), at], atol=1e-11, rtol=1e-11
            )


@pytest.mark.parametrize("seed", range(16))
def test_left_padding_is_invisible(seed):
    config = draw_config(seed)
    model, _ = make_model(config, seed)
    texts = [draw_tokens(i, (n,)) for i, n in enumerate((13, 1, 7))]
    for extra in (0, 3, 20):
        longest = 13 + extra
        tokens = torch.full((3, longest), 5)
        valid = torch.zeros(3, longest, dtype=torch.bool)
        for row, text in enumerate(texts):
            tokens[row, longest - len(text) :] = text
            valid[row, longest - len(text) :] = True
        with torch.no_grad():
            logits = model(tokens, valid=valid)
            for row, text in enumerate(texts):
                alone = model(text[None])[0]
                mine = logits[row, longest - len(text) :]
                size = max(1, float(alone.abs().max()))
                assert float((mine - alone).abs().max()) < 1e-5 * size


def test_the_cache_says_when_it_is_full():
    model, cache = CausalTransformer(SMALL), Cache(SMALL, 1, 4)
    with pytest.raises(
        ShapeError, match=r"5 more tokens after 0 .* Cache\(config, batch, 5"
    ):
        model(draw_tokens(0, (1, 5)), cache=cache)
    with pytest.raises(ShapeError, match="33 tokens, but this model reads 32 at most"):
        model(draw_tokens(0, (1, 33)))
    with pytest.raises(OptionError, match="valid= cannot be combined with cache="):
        model(draw_tokens(0, (1, 2)), cache=cache, valid=torch.ones(1, 2, dtype=bool))


def test_the_model_has_the_weights_that_the_config_names():
    for seed in range(20):
        config = draw_config(seed)
        model = CausalTransformer(config)
        mine = {n: tuple(w.shape) for n, w in model.state_dict().items()}
        assert mine == dict(config.shapes())


def test_tied_weights_stay_tied(tmp_path):
    model, tokens = CausalTransformer(SMALL), draw_tokens(0)
    assert "head.weight" not in model.state_dict()
    before = model(tokens).detach()
    with torch.no_grad():
        model.embed.weight[3] += 1
    after = model(tokens).detach()
    assert (after[..., 3] != before[..., 3]).all()  # as the head
    copy = CausalTransformer(SMALL)
    copy.load_state_dict(model.to(torch.float64).to(torch.float32).state_dict())
    assert torch.equal(copy(tokens), after)
    model(tokens).sum().backward()
    assert model.embed.weight.grad is not None


def test_dropout_is_off_in_eval():
    config = Config(vocabulary=40, context=32, width=24, layers=2, heads=4, dropout=0.5)
    model, tokens = CausalTransformer(config), draw_tokens(0)
    plain = CausalTransformer(Config(**{**vars(config), "dropout": 0.0}))
    plain.load_state_dict(model.state_dict())
    model.train()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), plain.eval()(tokens))


def test_attention_weights_are_dropped_in_training_and_shown_before():
    attention = MultiHeadAttention(12, 3, dropout=0.5).double()
    x, mask = torch.randn(1, 6, 12, dtype=torch.float64), regard.causal()
    shown = attention.look(x, mask)
    rows = shown.weights.sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows))
    torch.manual_seed(0)
    dropped = attention(x, mask)
    torch.manual_seed(0)
    keep = torch.nn.functional.dropout(shown.weights, 0.5)
    _, _, v = attention.project(x, None, None)
    expected = attention.out((keep @ v).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(dropped, expected)
    whole = attention.eval()(x, mask)
    joined = attention.out(shown.out.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(whole, joined)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_attention_to_a_context_is_plain_multi_head(kv_heads, bias, rng):
    attention = MultiHeadAttention(
        16, 4, kv_heads=kv_heads, head_width=6, bias=bias, qk_norm=1e-6
    ).double()
    x, context = (torch.from_numpy(rng.normal(size=(2, n, 16))) for n in (5, 7))
    with torch.no_grad():
        for weight in attention.parameters():
            weight.add_(torch.from_numpy(rng.normal(size=weight.shape)) / 5)

    def norm(q, k):
        pairs = ((q, attention.q_norm), (k, attention.k_norm))
        return tuple(plain.rms_norm(y, n.weight, 1e-6) for y, n in pairs)

    for other in (None, context):
        expected = plain.multi_head(
            x,
            plain.Linear(attention.qkv.weight, attention.qkv.bias),
            plain.Linear(attention.out.weight, attention.out.bias),
            heads=4,
            kv_heads=kv_heads,
            context=other,
            prepare=norm,
        )
        torch.testing.assert_close(attention(x, context=other), expected)
    with pytest.raises(OptionError, match="rotation= with context="):
        attention(x, context=context, rotation=(x, x))
    with pytest.raises(OptionError, match="4 heads cannot share -2 heads of keys"):
        MultiHeadAttention(8, 4, kv_heads=-2)


def test_one_row_is_the_same_product():
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        linear = Linear(33, 17).to(dtype)
        x = torch.randn(4, 1, 33, dtype=dtype)
        one = torch.stack([linear(row) for row in x])
        torch.testing.assert_close(one, linear(x), atol=tolerance, rtol=tolerance)
        assert linear(x[0, 0]).shape == (17,)
        x[0].requires_grad_()
        torch.testing.assert_close(
            torch.autograd.grad(linear(x[:1]).sum(), linear.weight)[0],
            x[0].detach().expand(17, 33),
        )


def test_autocast_keeps_the_fused_kernel():
    model, _ = make_model(SMALL, 0)
    kernels = []
    for block in model.blocks:
        block.attention.register_forward_pre_hook(
            lambda module, args: kernels.append(
                choose(
                    *module.project(args[0], None, model.turn(slice(0, 13), args[0]))
                )
            )
        )
    with torch.autocast("cpu", torch.bfloat16):
        model(draw_tokens(0))
    assert [choice.kernel for choice in kernels] == ["flash", "flash"]


def test_half_precision_stays_close():
    model, _ = make_model(SMALL, 0)
    tokens = draw_tokens(0)
    with torch.no_grad():
        exact = model(tokens)
        rough = model.to(torch.bfloat16)(tokens)
    assert rough.dtype == torch.bfloat16
    assert float((rough.float() - exact).abs().max()) < 0.05 * float(exact.abs().max())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("seed", [1, 5])
def test_the_model_compiles_as_one_graph(seed):
    config = draw_config(seed)
    config = Config(**{**vars(config), "window": None})
    model, _ = make_model(config, seed)
    tokens = draw_tokens(seed)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), model(tokens))
    compiled(tokens).sum().backward()
    mine = {n: w.grad.clone() for n, w in model.named_parameters()}
    model.zero_grad()
    model(tokens).sum().backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(mine[name], weight.grad, atol=1e-5, rtol=1e-4)
