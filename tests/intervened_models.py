"""Small models of transformers for interventions, with their output projections."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from transformers.models.vit import modeling_vit

HEADS, WIDTH, D = 4, 32, 8
TOKENS = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
}
TEXT = {**TOKENS, **SIZES, "max_position_embeddings": 64}
GROUPED = {**TEXT, "num_key_value_heads": 2}
OPENAI = {**TOKENS, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 64}
T5 = {
    **TOKENS,
    "d_model": WIDTH,
    "d_kv": D,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": HEADS,
    "decoder_start_token_id": 0,
}
WHISPER = {
    **TOKENS,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 12,
    "max_target_positions": 64,
    "decoder_start_token_id": 1,
}
VIT_LAYERS, VIT_OUT = "vit.layers.{}.attention", "o_proj"
if hasattr(modeling_vit, "ViTSelfAttention"):  # transformers 4
    VIT_LAYERS, VIT_OUT = "vit.encoder.layer.{}.attention.attention", "../output.dense"
IMAGE = {**SIZES, "image_size": 16, "patch_size": 4}


def stir(model, size=0.2):
    """Move every weight far from its start, so that attention is far from even."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(size * torch.randn_like(weight))
    return model.eval()


def tokens(n=10):
    return torch.randint(3, 60, (2, n), generator=torch.Generator().manual_seed(1))


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Family:
    name: str  # of the class
    options: dict
    layers: tuple[str, ...]  # the modules that attend, in this order
    out: str  # their output projection
    inputs: Callable[[], dict] = lambda: {"input_ids": tokens()}
    causal: Callable[[str], bool] = lambda name: True
    implementation: str | None = None  # of attention; None: the model's own choice

    def build(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            cls = getattr(transformers, self.name)
            config = cls.config_class(**self.options)
            model = stir(cls(config))
        if self.implementation:
            model.set_attn_implementation(self.implementation)
        return model


def each(*names):
    return tuple(name.format(i) for i in range(2) for name in names)


SELF = each("model.layers.{}.self_attn")
FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", OPENAI, each("transformer.h.{}.attn"), "c_proj"),
    "llama": Family("LlamaForCausalLM", GROUPED, SELF, "o_proj"),
    "bert": Family(
        "BertForMaskedLM",
        TEXT,
        each("bert.encoder.layer.{}.attention.self"),
        "../output.dense",
        causal=lambda name: False,
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        T5,
        (
            *each("encoder.block.{}.layer.0.SelfAttention"),
            *each(
                "decoder.block.{}.layer.0.SelfAttention",
                "decoder.block.{}.layer.1.EncDecAttention",
            ),
        ),
        "o",
        lambda: {"input_ids": tokens(), "decoder_input_ids": tokens(7)},
        causal=lambda name: "decoder" in name and "Self" in name,
    ),
    "vit": Family(
        "ViTForImageClassification",
        IMAGE,
        each(VIT_LAYERS),
        VIT_OUT,
        lambda: {"pixel_values": draw(2, 3, 16, 16)},
        causal=lambda name: False,
    ),
    "bloom": Family(
        "BloomForCausalLM",
        {**OPENAI, "hidden_size": WIDTH},
        each("transformer.h.{}.self_attention"),
        "dense",
    ),
    "gptj": Family(
        "GPTJForCausalLM",
        {**OPENAI, "rotary_dim": 4},
        each("transformer.h.{}.attn"),
        "out_proj",
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {**GROUPED, "head_dim": D, "query_pre_attn_scalar": 16, "sliding_window": 5},
        SELF,
        "o_proj",
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        {**GROUPED, "head_dim": D, "num_local_experts": 2, "num_experts_per_tok": 1},
        SELF,
        "o_proj",
    ),
    "mistral": Family(
        "MistralForCausalLM", {**GROUPED, "sliding_window": 4}, SELF, "o_proj"
    ),
    "qwen3": Family("Qwen3ForCausalLM", {**GROUPED, "head_dim": D}, SELF, "o_proj"),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        WHISPER,
        (
            *each("model.encoder.layers.{}.self_attn"),
            *each(
                "model.decoder.layers.{}.self_attn",
                "model.decoder.layers.{}.encoder_attn",
            ),
        ),
        "out_proj",
        lambda: {
            "input_features": draw(2, 8, 24),
            "decoder_input_ids": tokens(7),
        },
        causal=lambda name: "decoder" in name and "self" in name,
    ),
}
MAIN = ("gpt2", "llama", "bert", "t5", "vit")
for name in MAIN:
    FAMILIES[f"{name}-eager"] = replace(FAMILIES[name], implementation="eager")
EAGER = tuple(f"{name}-eager" for name in MAIN)


def open_family(name):
    family = FAMILIES[name]
    return family, family.build(), family.inputs()


def find_projection(model, layer, out):
    """Return the linear layer behind a module that attends."""
    while out.startswith("../"):
        layer, out = layer.rpartition(".")[0], out[3:]
    return model.get_submodule(f"{layer}.{out}")


def read(model, inputs, **options):
    with torch.no_grad():
        return model(**inputs, **options).logits


def largest(a, b):
    return float((a - b).abs().max())
