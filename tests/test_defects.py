"""Defects that fresh eyes found, in the lens and in interventions: each is a test."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    LlamaConfig,
    OlmoConfig,
    Qwen3Config,
    StaticCache,
)

import regard
from regard.ablate import knock_out
from regard.ablate.active import ACTIVE
from regard.errors import OptionError


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Attention(nn.Module):
    """Attention with one head and a softmax of its own."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in "qkv")

    def forward(self, x):
        return (self.q(x) @ self.k(x).mT / 4).softmax(-1) @ self.v(x)


def find_weights(module, x):
    return (module.q(x) @ module.k(x).mT / 4).softmax(-1)


def test_a_path_with_cross_in_it_is_no_cross_attention():
    class Causal(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cross_decoder = Causal()

        def forward(self, x):
            return self.cross_decoder(x)

    model, x = Model(), torch.randn(1, 2, 5, 8)
    with regard.watch(model) as seen:
        model(x)
    expected = (x[0] @ x[0].mT / 8**0.5).masked_fill(
        ~torch.ones(5, 5).tril().bool(), -torch.inf
    )
    assert torch.allclose(seen.layer(0).weights(), expected.softmax(-1), atol=1e-6)


def test_a_model_that_changes_how_it_attends_is_recorded_in_every_pass():
    class Changing(Attention):
        def forward(self, x):
            q, k, v = (f(x)[:, None] for f in (self.q, self.k, self.v))
            if x.shape[1] < 8:
                return F.scaled_dot_product_attention(q, k, v)
            return (q @ k.mT / 4).softmax(-1) @ v

    model, sizes = nn.Sequential(Changing()), (5, 6, 12, 7, 16, 5, 20, 5)
    given = [torch.randn(1, n, 16) for n in sizes]
    with regard.watch(model) as seen:
        for x in given:
            model(x)
    assert [r.shape[1] for r in seen.records] == [*sizes]
    for record, x in zip(seen.records, given, strict=True):
        assert torch.allclose(record.weights(), find_weights(model[0], x), atol=1e-6)


def test_kernels_align_is_causal_with_the_first_key_also_beside_a_cache():
    class Layer(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    model, k = Layer(), torch.randn(1, 1, 6, 8)
    with regard.watch(model) as seen:
        model(k[:, :, :4], k[:, :, :4])
        model(k[:, :, 4:5], k[:, :, :5])
        model(k[:, :, 5:6], k[:, :, :6])
    found = seen.layer(0).weights()[0]
    first = torch.eye(6)[0]
    assert torch.allclose(found[4:], first.expand(2, 6), atol=1e-6)


class Own(nn.MultiheadAttention):
    def forward(self, x):
        q, k, v = F.linear(x, self.in_proj_weight).chunk(3, -1)
        return (q @ k.mT / 4).softmax(-1) @ v


@pytest.mark.parametrize(
    ("make", "run"),
    [
        (Attention, lambda model, x: model.forward(x)),
        (lambda: nn.Sequential(Attention()), lambda model, x: model[0].forward(x)),
        (lambda: Own(16, 1), lambda model, x: model(x)),
    ],
)
def test_forward_may_be_called_without_hooks(make, run):
    model, x = make(), torch.randn(1, 5, 16)
    with regard.watch(model) as seen:
        run(model, x)
    (record,) = seen.records
    assert record.shape == (1, 5, 5)
    assert not record.certificate.failed


def test_a_mode_that_compares_functions_sees_those_of_torch():
    class Softmax1(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is F.scaled_dot_product_attention:
                q, k, v = args
                e = (q @ k.mT / q.shape[-1] ** 0.5).exp()
                return e / (1 + e.sum(-1, keepdim=True)) @ v
            if func is torch.Tensor.softmax:
                return args[0] * 0
            return func(*args, **(kwargs or {}))

    class Model(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x) + x.softmax(-1)

    model, x = Model(), torch.randn(1, 2, 5, 8)
    with Softmax1():
        before = model(x)
        with regard.watch(model) as seen:
            watched = model(x)
    assert torch.equal(before, watched)
    assert "2 softmaxes or attention calls ran no operator" in str(seen)


@pytest.mark.parametrize("enter", [regard.watch, partial(regard.knock_out, layers=[0])])
def test_lazy_modules_may_be_initialised_inside_a_block(enter):
    model = nn.Sequential(nn.LazyLinear(16), Attention())
    with enter(model):
        model(torch.randn(1, 5, 8))
    assert model[0].in_features == 8


def test_a_tensor_of_a_subclass_may_be_made_inside_a_watch():
    class Model(nn.Module):
        def forward(self, q, k):
            bias = causal_lower_right(5, 9)
            return F.scaled_dot_product_attention(q, k, k, attn_mask=bias)

    model, q, k = Model(), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    before = model(q, k)
    names = {x: vars(torch.Tensor).get(x) for x in ("__new__", "_make_subclass")}
    with regard.watch(model) as seen:
        assert torch.equal(model(q, k), before)
    assert names == {x: vars(torch.Tensor).get(x) for x in names}
    logits = q[0] @ k[0].mT / 8**0.5
    hidden = ~torch.ones(5, 9).tril(4).bool()
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    got = torch.stack([r.weights() for r in seen.records]).reshape(2, 5, 9)
    assert torch.allclose(got, expected, atol=1e-6)


WRITES = {
    "all": lambda x: x.mul_(3),
    "a part": lambda x: x[:, :, 2:].add_(1),
    "out": lambda x: torch.mul(x, 3, out=x),
    "zeros": lambda x: x.zero_(),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("change", [lambda x: x, lambda x: F.dropout(x, 0.3, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_queries_and_keys_that_are_written_to_before_the_values(
    how, change, dtype, mode
):
    class Reusing(nn.Module):
        def forward(self, q, k, v, target):
            weights = change((q @ k.mT / 4).softmax(-1))
            WRITES[how](target)
            return weights @ v

    model, expected = Reusing(), []
    for i in range(3):
        with mode(), regard.watch(model) as seen:
            given = [torch.randn(1, 2, 5, 16, dtype=dtype) for _ in "qkvo"]
            expected = (given[0] @ given[1].mT / 4).softmax(-1)[0]
            model(*given[:3], given[(0, 1, 3)[i]])
        assert seen.records or "written to" in seen.coverage()[0].reason
        assert seen.records or i < 2
        for record in seen.records:
            assert torch.allclose(record.weights(), expected.float(), atol=2e-2)


def test_a_cache_of_keys_and_values_in_one_array_is_recorded():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(2, 1, 2, 5, 16))

        def forward(self, q, k, v):
            self.cache[0].copy_(k)
            weights = (q @ self.cache[0].mT / 4).softmax(-1)
            self.cache[1].copy_(v)  # of the same array, after the keys were used
            return weights @ self.cache[1]

    q, k, v = (torch.randn(1, 2, 5, 16) for _ in "qkv")
    model = Cached()
    with regard.watch(model) as seen:
        model(q, k, v)
    expected = (q @ k.mT / 4).softmax(-1)[0]
    assert torch.allclose(seen.layer(0).weights(), expected, atol=1e-6)


def test_a_layer_that_attends_in_another_way_later_is_noted():
    class Changing(nn.Module):
        own = False

        def forward(self, x):
            if self.own:
                return (x @ x.mT / 4).log_softmax(-1).exp() @ x
            return F.scaled_dot_product_attention(x, x, x)

    model, x = nn.Sequential(Changing()), torch.randn(1, 2, 5, 16)
    with regard.watch(model) as seen:
        for _ in range(5):
            model(x)
        model[0].own = True
        for _ in range(2):
            model(x)
    assert len(seen.records) == 6
    assert "in 1 of its passes no call was observed" in seen.coverage()[0].note


def test_heads_that_are_rows_of_one_head_are_reported():
    class MultiQuery(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.kv = nn.Linear(32, 32), nn.Linear(32, 16)

        def forward(self, x):
            n = x.shape[1]
            k, v = self.kv(x)[:, None].chunk(2, -1)
            q = self.q(x).view(len(x), 1, n * 4, 8)
            return F.scaled_dot_product_attention(q, k, v)

    model = MultiQuery()
    with regard.watch(model) as seen:
        model(torch.randn(2, 5, 32))
    assert "4 times as many heads" in seen.coverage()[0].note


def test_a_core_that_is_given_folded_heads_has_heads_in_every_pass():
    class Core(nn.Module):
        def forward(self, q, k, v):
            return (q @ k.mT / 8**0.5).softmax(-1) @ v

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.core = nn.Linear(32, 96), Core()

        def forward(self, x):
            b, n, _ = x.shape
            parts = self.qkv(x).view(b, n, 3, 4, 8).permute(2, 0, 3, 1, 4)
            return self.core(*parts.reshape(3, b * 4, n, 8))

    model = Model()
    with regard.watch(model) as seen:
        for n in (5, 6, 7, 8):
            model(torch.randn(2, n, 32))
    assert [r.shape for r in seen.records] == [
        (4, n, n) for n in (5, 5, 6, 6, 7, 7, 8, 8)
    ]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes can be forked")
def test_a_forked_process_does_not_change_a_record():
    code = (
        "import os, torch, regard\n"
        "class M(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.nn.functional.scaled_dot_product_attention(x, x, x)\n"
        "m = M()\n"
        "with torch.no_grad(), regard.watch(m) as seen: m(torch.randn(1, 4, 64, 32))\n"
        "before = seen.layer(0).q.clone()\n"
        "if os.fork() == 0:\n"
        "    seen.layer(0).q.zero_(); os._exit(0)\n"
        "os.wait(); assert torch.equal(before, seen.layer(0).q)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_tokens_after_embeddings_are_not_shifted():
    config = GPT2Config(
        vocab_size=50, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=None
    )
    model = GPT2LMHeadModel(config).eval()
    x = model.get_input_embeddings()(torch.arange(3, 9)[None])
    with regard.watch(model) as seen:
        model.generate(
            inputs_embeds=x, max_new_tokens=4, do_sample=False, pad_token_id=0
        )
    assert seen.recording.tokens == ((),)


def test_float64_with_a_softmax_in_float32_is_recorded():
    model = make_llama(attn_implementation="eager").double()
    with regard.watch(model) as seen:
        model(torch.randint(0, 60, (1, 9)))
    assert len(seen.records) == 2


# --- interventions --------------------------------------------------------------------


def make_llama(kind=LlamaConfig, **options):
    config = kind(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=60,
        initializer_range=0.4,
        **options,
    )
    return AutoModelForCausalLM.from_config(config).double().eval()


LEFT = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
IDS = torch.arange(14).reshape(2, 7)


class Twice(nn.Module):
    """Two texts through one model, as in a bi-encoder."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(self, x, first, y, second):
        self.lm(x, attention_mask=first)
        return self.lm(y, attention_mask=second).logits


class Tower(nn.Module):
    """An encoder, and a language model with padding that only it knows of."""

    def __init__(self, lm):
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
        config = BertConfig(num_attention_heads=4, vocab_size=60, **sizes)
        self.enc, self.lm = BertModel(config).double().eval(), lm

    def forward(self, x, first, y, second):
        self.enc(x)
        return self.lm(y, attention_mask=second).logits


@pytest.mark.parametrize("kind", [Twice, Tower])
def test_a_model_that_a_wrapper_calls_later_has_a_pass_of_its_own(kind):
    model = make_llama()
    wrapper = kind(model)
    with regard.knock_out(model, keys=[2]):
        expected = model(IDS, attention_mask=LEFT).logits
    with regard.knock_out(wrapper, layers=["lm"], keys=[2]):
        found = wrapper(IDS, torch.ones_like(LEFT), IDS, LEFT)
    assert torch.allclose(found[LEFT.bool()], expected[LEFT.bool()], atol=1e-9)


def test_a_generation_in_a_forward_is_edited_in_every_step():
    class Generating(nn.Module):
        def __init__(self, lm):
            super().__init__()
            self.lm = lm

        def forward(self, ids, mask):
            done = self.lm.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=4,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
            return torch.stack(done.logits)

    model = make_llama()
    wrapper = Generating(model)
    for edit in ({"keys": [2]}, {"heads": [(0, 1)]}):
        with regard.knock_out(model, **edit):
            expected = wrapper(IDS, LEFT)
        with regard.knock_out(wrapper, **edit), regard.watch(wrapper) as seen:
            assert torch.allclose(wrapper(IDS, LEFT), expected, atol=1e-9)
        assert len(seen.layers) == 2


def test_an_interrupt_that_is_caught_in_the_block_leaves_nothing():
    def stop(*_):
        raise KeyboardInterrupt

    model = make_llama()
    with regard.knock_out(model, [(0, 1)]):
        expected = model(IDS).logits
    with regard.knock_out(model, [(0, 1)]), regard.watch(model) as seen:
        hook = model.model.layers[1].mlp.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model(IDS)
        hook.remove()
        here = ACTIVE[-1].run.here
        assert (here.names, here.now.depth) == ([], 0)
        assert torch.equal(model(IDS).logits, expected)
        model(IDS)
    assert len(seen.layers) == 2


def test_a_layer_that_is_replaced_in_the_block_is_refused_and_reported():
    model, other = make_llama(), make_llama().model.layers[0]

    def replace_layer():
        model(IDS)
        model.model.layers[0] = other
        model(IDS)

    with (
        pytest.raises(OptionError, match=r"model.layers.0 was added or replaced"),
        regard.knock_out(model, [(0, 1)]),
    ):
        replace_layer()
    other = make_llama().model.layers[0]
    with regard.watch(model) as seen:
        replace_layer()
    assert "modules were added or replaced" in str(seen)


def test_circuits_refuse_what_is_no_matrix():
    read = regard.circuits.read_circuit
    with pytest.raises(OptionError, match="half precision"):
        read(make_llama().bfloat16(), 0, 1)
    # an embedding that is 0, of padding, has no direction
    with pytest.raises(OptionError, match="normalises q and k"):
        read(make_llama(Qwen3Config, pad_token_id=0), 0, 1)
    with pytest.raises(OptionError, match="clips"):
        read(make_llama(OlmoConfig, clip_qkv=0.2, pad_token_id=0), 0, 1)


class Hops(Attention):
    """Weights of weights: no product takes the first ones as such."""

    def forward(self, x):
        first = (self.q(x) @ self.k(x).mT / 4).softmax(-1)
        return (self.k(x) @ self.q(x).mT / 4).softmax(-1) @ first @ self.v(x)


class Summed(Attention):
    """Weights times values, summed without a product."""

    def forward(self, x):
        weights = (self.q(x) @ self.k(x).mT / 4).softmax(-1)
        return (weights[..., None] * self.v(x)[:, None]).sum(2)


@pytest.mark.parametrize("make", [Hops, Summed])
def test_a_softmax_that_compares_two_arrays_is_not_called_a_gate(make):
    model = make()
    with regard.watch(model) as seen:
        model(torch.randn(1, 5, 16))
    assert "a softmax is not recorded: it compares two arrays" in str(seen)
    assert "gates" not in str(seen)


def test_a_softmax_of_a_projection_is_called_a_gate():
    model = nn.Sequential(nn.Linear(16, 4), nn.Softmax(-1))
    with regard.watch(model) as seen:
        model(torch.randn(1, 5, 16))
    assert "1 other softmaxes: gates" in str(seen)
    assert "compares" not in str(seen)


@torch.compile(backend="eager")
def double(x):
    return x * 2


def test_a_compiled_function_that_a_forward_uses_is_noted():
    class Model(Attention):
        def forward(self, x):
            return super().forward(double(x))

    model = Model()
    with regard.watch(model) as seen:
        model(torch.randn(1, 5, 16))
    assert "compiled code runs uncompiled" in seen.coverage()[0].note


def test_values_of_a_matrix_keep_their_bits():
    class Model(Attention):
        def forward(self, x):
            linalg, w = torch.linalg, self.q.weight
            norms = linalg.svdvals(w), linalg.matrix_norm(w, 2), linalg.cond(w)
            others = linalg.eigvalsh(w @ w.mT), linalg.norm(w, 2)
            return super().forward(x / linalg.norm(x, dim=-1, keepdim=True)), (
                norms + others
            )

    model, x = Model(), torch.randn(1, 5, 16)
    out, values = model(x)
    with regard.watch(model) as seen:
        again, watched = model(x)
    assert torch.equal(out, again)
    assert all(torch.equal(a, b) for a, b in zip(values, watched, strict=True))
    x = x / torch.linalg.norm(x, dim=-1, keepdim=True)
    torch.testing.assert_close(seen.records[0].weights()[0], find_weights(model, x)[0])


class ByHand(Attention):
    """Attends by exp and a sum, beside a softmax or alone."""

    def __init__(self, turned=False, beside=True):
        super().__init__()
        self.turned, self.beside = turned, beside

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = k @ q.mT if self.turned else q @ k.mT
        dim = -2 if self.turned else -1
        weights = (scores - scores.amax(dim, keepdim=True)).exp_()
        weights = weights / weights.sum(dim, keepdim=True)
        out = (weights.mT if self.turned else weights) @ v
        return out + (q @ k.mT).softmax(-1) @ v if self.beside else out


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_a_softmax_by_hand_is_reported_beside_one_that_is_recorded(turned, beside):
    model = ByHand(turned, beside)
    with regard.watch(model) as seen:
        for _ in range(4):
            model(torch.randn(1, 5, 16))
    reasons = [x.reason for x in seen.coverage()]
    by_hand = "its weights are computed by exp, not by a softmax"
    assert reasons == [by_hand] + [""] * beside
    assert len(seen.records) == 4 * beside


def test_a_logsumexp_of_scores_is_not_called_attention():
    class Contrast(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            return (x @ x.mT).exp().sum(-1).log()

    model = Contrast(8, 8)
    with regard.watch(model) as seen:
        model(torch.randn(1, 5, 8))
    assert not seen.coverage()


COPIES = {
    "views": lambda x: x,
    "copies": lambda x: x.contiguous(),
    "scaled": lambda x: x * 0.7,
    "normed": lambda x: F.layer_norm(x, (16,)),
}


@pytest.mark.parametrize("copy", COPIES)
def test_blocks_of_queries_are_noted_however_they_are_cut(copy):
    class Blocks(Attention):
        def forward(self, x):
            q, k, v = self.q(x), self.k(x), self.v(x)
            some = [COPIES[copy](q[:, i : i + 4]) for i in (0, 4, 8)]
            return torch.cat([(y @ k.mT).softmax(-1) @ v for y in some], 1)

    model = Blocks()
    with regard.watch(model) as seen:
        model(torch.randn(2, 12, 16))
    assert ["a piece of an array" in x.note for x in seen.coverage()] == [0, 1, 1]


def test_parts_of_the_features_of_queries_are_no_blocks():
    class Differential(Attention):
        def forward(self, x):
            (q, p), (k, j) = (y(x).chunk(2, -1) for y in (self.q, self.k))
            weights = (q @ k.mT).softmax(-1) - (p * 2 @ j.mT).softmax(-1)
            return weights @ self.v(x)

    model = Differential()
    with regard.watch(model) as seen:
        model(torch.randn(2, 12, 16))
    assert not any("a piece of an array" in x.note for x in seen.coverage())


def test_heads_that_a_core_with_parameters_is_given_folded_stay_heads():
    class Core(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.randn(7, 7))

        def forward(self, q, k, v):
            return (q @ k.mT + self.bias).softmax(-1) @ v

    class Folded(Attention):
        def __init__(self):
            super().__init__()
            self.core = Core()

        def forward(self, x):
            q, k, v = (
                y(x).unflatten(-1, (2, 8)).transpose(1, 2).reshape(-1, x.shape[1], 8)
                for y in (self.q, self.k, self.v)
            )
            return self.core(q, k, v)

    model = Folded()
    with regard.watch(model) as seen:
        for _ in range(6):
            model(torch.randn(3, 7, 16))
    assert [x.shape for x in seen.records] == [(2, 7, 7)] * 18


def test_a_sequence_without_tokens_has_no_weights():
    class Masked(Attention):
        def forward(self, x, attention_mask):
            q, k, v = (y(x)[:, None] for y in (self.q, self.k, self.v))
            seen = attention_mask.bool()[:, None, None]
            return F.scaled_dot_product_attention(q, k, v, seen)

    model = Masked()
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
    with regard.watch(model) as seen:
        model(torch.randn(2, 4, 16), attention_mask=mask)
    assert [r.weights().shape for r in seen.records] == [(1, 4, 4), (1, 0, 0)]
    assert len(seen.attentions) == 1


def test_weights_of_which_some_rows_are_used_are_recorded_whole():
    class First(Attention):
        def forward(self, x):
            weights = (self.q(x) @ self.k(x).mT / 4).softmax(-1)
            return weights[:, :1] @ self.v(x)

    model, x = First(), torch.randn(2, 5, 16)
    with regard.watch(model) as seen:
        model(x)
    assert not any(x.reason for x in seen.coverage())
    for b, record in enumerate(seen.records):
        torch.testing.assert_close(record.weights()[0], find_weights(model, x)[b])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize("transform", ["grad", "vmap", "jacrev", "jvp"])
def test_function_transforms_are_recorded_without_an_error(transform):
    model, x = Attention(), torch.randn(3, 5, 16)
    transforms = {
        "grad": lambda: torch.func.grad(lambda y: model(y).sum())(x),
        "vmap": lambda: torch.func.vmap(model)(x),
        "jacrev": lambda: torch.func.jacrev(lambda y: model(y)[:, 0, :2])(x),
        "jvp": lambda: torch.func.jvp(model, (x,), (x,)),
    }
    expected = transforms[transform]()
    with regard.watch(model) as seen:
        found = transforms[transform]()
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)
    assert "failed:" not in str(seen)
    assert len(seen.records) == 3


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_a_scripted_activation_is_no_failure():
    class Model(Attention):
        def __init__(self):
            super().__init__()
            self.act = torch.jit.script(nn.GELU())

        def forward(self, x):
            return self.act(super().forward(x))

    model = Model()
    with regard.watch(model) as seen:
        model(torch.randn(1, 5, 16))
    assert "failed:" not in str(seen)
    assert len(seen.records) == 1


@pytest.mark.parametrize("folded", [True, False])
def test_heads_that_a_product_takes_as_rows_are_noted(folded):
    class MultiQuery(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.c = nn.Linear(12, 36), nn.Linear(12, 12)

        def forward(self, x):
            q, c = self.q(x).unflatten(-1, (3, 12)), self.c(x)
            q = q if folded else q.transpose(1, 2)
            c = c if folded else c[:, None]
            if folded:
                return (q.flatten(1, 2) @ c.mT).softmax(-1) @ c
            return (q @ c.mT).softmax(-1) @ c

    model = MultiQuery()
    with regard.watch(model) as seen:
        model(torch.randn(2, 6, 12))
    assert ("counted as queries" in seen.coverage()[0].note) == folded
    assert seen.records[0].shape == ((1, 18, 6) if folded else (3, 6, 6))


def test_a_mask_of_one_of_two_texts_takes_no_rows_of_the_other():
    class Reader(nn.Module):
        def forward(self, x, context, attention_mask):
            hidden = (attention_mask == 0)[:, None]
            scores = (x @ context.mT).masked_fill(hidden, -torch.inf)
            return scores.softmax(-1) @ context

    model = Reader()
    x, context = torch.randn(2, 1, 6, 12)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    with regard.watch(model) as seen:
        model(x, context, attention_mask=mask)
    scores = (x @ context.mT).masked_fill(mask[:, None] == 0, -torch.inf)
    torch.testing.assert_close(seen.records[0].weights(), scores.softmax(-1))


@pytest.mark.parametrize("spread", [0.1, 0.5])
@pytest.mark.parametrize("kind", ["llama", "gpt-oss"])
def test_logits_that_are_rounded_and_then_widened_are_explained(kind, spread):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 100,
        "eos_token_id": None,
        "initializer_range": spread,
        "attn_implementation": "eager",
    }
    if kind == "gpt-oss":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
        config = GptOssConfig(**sizes)
    else:
        config = LlamaConfig(**sizes)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    ids = torch.randint(100, (2, 20))
    with regard.watch(model) as seen:
        model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert [r.shape for r in seen.records] == [(4, 24, 24)] * 4
    assert "stored as logits" not in str(seen)
    assert all(r.certificate.failed == 0 for r in seen.records)


def test_a_wrong_formula_is_not_explained_by_rounding():
    class Warm(Attention):
        def forward(self, x):
            scores = (self.q(x) @ self.k(x).mT).float()
            scores.numpy()[...] *= 1.2  # which no operator shows
            return scores.softmax(-1).to(x.dtype) @ self.v(x)

    model = Warm().to(torch.bfloat16)
    x = 4 * torch.randn(1, 9, 16, dtype=torch.bfloat16)
    with regard.watch(model) as seen:
        model(x)
    assert "stored as logits" in seen.coverage()[0].note


def test_a_key_is_hidden_behind_the_padding_of_a_mask_as_long_as_its_cache():
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=60,
        initializer_range=0.3,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    ids, mask = torch.randint(60, (2, 6)), torch.ones(2, 16).long()
    mask[1, :2] = mask[:, 6:] = 0
    places = (mask[:, :6].cumsum(1) - 1).clamp(0)

    def run(n, **given):
        with knock_out(model, keys=[1]):
            return model(
                ids, attention_mask=mask[:, :n], position_ids=places, **given
            ).logits

    cache = StaticCache(config=config, max_cache_len=16)
    found, expected = run(16, past_key_values=cache), run(6)
    torch.testing.assert_close(found[1, 2:], expected[1, 2:])
