"""Direct logit attribution: parts add up, and are what the frozen norm sees of a write."""

from functools import partial

import pytest
import torch
from intervened_models import GROUPED, OPENAI, T5, Family, stir, tokens
from intervened_models import TEXT as TEXT_SIZES
from layers_by_hand import Written, make
from test_circuits import SIZES

import regard
from regard.ablate import trace_heads
from regard.ablate.direct_logits import attribute_logits
from regard.errors import OptionError
from regard.nn.decoder import CausalTransformer
from regard.plain.config import Config

ROTARY = {"norm": "rms", "position": "rotary", "kv_heads": 2}
KINDS = {
    "gpt2": Config(**SIZES),
    "llama": Config(**SIZES, **ROTARY, bias=False, tied=False),
    "wide": Config(**SIZES, **ROTARY, head_width=10, bias=True),
}
TEXT = torch.tensor([[3, 14, 15, 9, 2, 6]])


def read_writes(model, text):
    """Return what each head adds to the residual stream, by hand: L of (H, N, width)."""
    caught = []
    hooks = [
        block.attention.out.register_forward_pre_hook(lambda _, x: caught.append(x[0]))
        for block in model.blocks
    ]
    with torch.no_grad():
        model(text)
    for hook in hooks:
        hook.remove()
    d = model.config.head
    return [
        torch.stack(
            [
                z[0, :, h : h + d] @ block.attention.out.weight[:, h : h + d].T
                for h in range(0, z.shape[-1], d)
            ]
        )
        for z, block in zip(caught, model.blocks, strict=True)
    ]


@pytest.mark.parametrize("versus", [None, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_adds_what_the_frozen_norm_sees_of_its_write(kind, versus):
    torch.manual_seed(0)
    model = stir(CausalTransformer(KINDS[kind]), 0.3).double()
    found = attribute_logits(model, TEXT, 7, versus=versus, at=4)
    with torch.no_grad():
        logits = model(TEXT)[0, 4]
        stream = []
        hook = model.norm.register_forward_pre_hook(lambda _, x: stream.append(x[0]))
        model(TEXT)
        hook.remove()
    expected = float(logits[7] - (0 if versus is None else logits[versus]))
    assert abs(found.logit - expected) < 1e-12
    assert abs(float(found.heads.sum()) + found.rest - expected) < 1e-10

    x = stream[0][0, 4]
    size = x.pow(2).mean() if model.config.norm == "rms" else x.var(correction=0)
    size = (size + model.config.eps).sqrt()
    for layer, writes in enumerate(read_writes(model, TEXT)):
        for head, write in enumerate(writes[:, 4]):
            if model.config.norm == "layer":
                write = write - write.mean()  # noqa: PLW2901
            seen = model.predict(write / size * model.norm.weight).detach()
            seen = seen[7] - (0 if versus is None else seen[versus])
            assert abs(float(found.heads[layer, head]) - float(seen)) < 1e-10
            assert abs(float(seen)) > 1e-4


G = {**GROUPED, "head_dim": 8}
SANDWICH = {**G, "query_pre_attn_scalar": 16, "sliding_window": 5}
FIELD = {  # class, options, last norm
    "gpt2": ("GPT2LMHeadModel", OPENAI, "transformer.ln_f"),
    "llama": ("LlamaForCausalLM", GROUPED, "model.norm"),
    "qwen3": ("Qwen3ForCausalLM", G, "model.norm"),
    "parallel": ("GPTNeoXForCausalLM", TEXT_SIZES, "gpt_neox.final_layer_norm"),
    "own softmax": (
        "BloomForCausalLM",
        {**OPENAI, "hidden_size": 32},
        "transformer.ln_f",
    ),
    "scaled": (
        "GraniteForCausalLM",
        {**GROUPED, "residual_multiplier": 0.22, "logits_scaling": 3.0},
        "model.norm",
    ),
    "norm without weights": ("OlmoForCausalLM", GROUPED, "model.norm"),
    "norm of the write": ("Gemma3ForCausalLM", SANDWICH, "model.norm"),
    "no norm before": ("Olmo2ForCausalLM", GROUPED, "model.norm"),
}


def freeze_by_hand(norm, x, write):
    """Return what a norm of x makes of a part of it, with the size of x."""
    kind = type(norm).__name__
    weight = getattr(norm, "weight", None)
    gain = 1 if weight is None else weight.detach()
    if "RMS" in kind:
        gain = 1 + gain if kind.startswith("Gemma") else gain
        eps = getattr(norm, "eps", None) or norm.variance_epsilon
        return gain * write / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    size = (x.var(-1, keepdim=True, correction=0) + getattr(norm, "eps", 1e-5)).sqrt()
    return gain * (write - write.mean(-1, keepdim=True)) / size


@pytest.mark.parametrize("name", FIELD)
def test_models_of_the_field(name):
    cls, options, last = FIELD[name]
    model = Family(cls, options, (), "").build().double()
    inputs = {"input_ids": tokens()[:1]}
    found = attribute_logits(model, inputs, 7, versus=9, at=6)
    kept = {}

    def keep(_module, args, out, name):
        kept[name] = args[0][0, 6].detach(), out[0, 6].detach()

    norm = model.get_submodule(last)
    norm.register_forward_hook(partial(keep, name="last"))
    with trace_heads(model) as traced:
        logits = model(**inputs).logits[0, 6].detach()
    assert abs(found.logit - float(logits[7] - logits[9])) < 1e-10
    assert abs(float(found.heads.sum()) + found.rest - found.logit) < 1e-10
    x, _ = kept["last"]
    unembed = model.get_output_embeddings().weight.detach()
    unembed = (unembed[7] - unembed[9]) / options.get("logits_scaling", 1)
    for at, layer in enumerate(traced.layers):
        block = model.get_submodule(layer.rpartition(".")[0])
        for head in range(4):
            if name in ("norm of the write", "no norm before"):
                after, out = block.post_attention_layernorm, block.self_attn.o_proj
                z = traced.outputs(layer)[0, :, 6]  # (H, Dv)
                alone = torch.zeros_like(z)
                alone[head] = z[head]
                whole, part = (out(x.flatten()).detach() for x in (z, alone))
                write = freeze_by_hand(after, whole, part)  # they have no biases
            else:
                write = traced.writes(layer, head)[0, 6]
            expected = float(freeze_by_hand(norm, x, write) @ unembed)
            assert abs(float(found.heads[at, head]) - expected) < 1e-10
            assert abs(expected) > 1e-6


@pytest.mark.parametrize(
    ("cls", "options", "more", "why"),
    [
        ("Gemma2ForCausalLM", SANDWICH, {}, "not a linear function"),  # tanh of logits
        ("BertForMaskedLM", TEXT_SIZES, {}, "only through other layers"),
        (
            "T5ForConditionalGeneration",
            T5,
            {"decoder_input_ids": tokens(5)[:1]},
            "only through other layers",
        ),
    ],
)
def test_models_whose_heads_do_not_add_to_logits_are_refused(cls, options, more, why):
    model = Family(cls, options, (), "").build()
    with pytest.raises(OptionError, match=why):
        attribute_logits(model, {"input_ids": tokens()[:1], **more}, 7)


class Unnormed(torch.nn.Module):
    """A layer and an MLP without norms: their path to the logits is not linear."""

    def __init__(self, activation):
        super().__init__()
        self.model = make(Written)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(24, 24), activation, torch.nn.Linear(24, 24)
        ).double()

    def forward(self, text):
        x = self.model.embed(text)
        x = x + self.model.layers[0](x)
        x = x + self.mlp(x)
        return self.model.norms[2](x) @ self.model.embed.weight.T


@pytest.mark.parametrize("activation", [torch.nn.GELU(), torch.nn.ReLU()])
def test_a_path_that_is_not_linear_is_refused(activation):
    model = Unnormed(activation).eval()
    with pytest.raises(OptionError, match="not a linear function"):
        attribute_logits(model, TEXT % 11, 7)


def test_it_is_printed_and_refuses_what_it_cannot_do():
    torch.manual_seed(0)
    model = stir(CausalTransformer(KINDS["gpt2"]))
    text = str(attribute_logits(model, TEXT, 7, versus=8))
    assert text.splitlines()[1] == "layer  head      adds"
    assert len(text.splitlines()) == 2 + 8
    with pytest.raises(OptionError, match=r"expected one sequence: \(1, N\)"):
        attribute_logits(model, TEXT[0], 7)
    after = CausalTransformer(Config(**SIZES, norm_first=False))
    with pytest.raises(OptionError, match="through a norm after the layer"):
        attribute_logits(after.eval(), TEXT, 7)
    with pytest.raises(OptionError, match="in training mode"):
        attribute_logits(after.train(), TEXT, 7)
    n = TEXT.shape[1]
    for options in ({"at": n}, {"at": -n - 1}, {"answer": 50}, {"versus": -1}):
        with pytest.raises(OptionError, match=f"there are {n} positions and 50 tokens"):
            attribute_logits(model, TEXT, **{"answer": 7, **options})
    assert regard.direct_logits.attribute_logits is attribute_logits
