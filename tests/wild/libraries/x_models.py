"""x-transformers: one decoder or encoder with each of its many options."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from wild.case import Case
from wild.libraries.recipe import feed, list_recipes, load, words
from wild.stir import Run

SIZES = {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash": {"attn_flash": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "rotary": {"rotary_pos_emb": True},
    "relative-bias": {"rel_pos_bias": True},
    "dynamic-bias": {"dynamic_pos_bias": True, "dynamic_pos_bias_log_distance": False},
    "talking-heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "memory-keys": {"attn_num_mem_kv": 4},
    "one-kv-head": {"attn_one_kv_head": True},
    "grouped": {"attn_kv_heads": 2},
    "sparse-topk": {"attn_sparse_topk": 4},
    "qk-norm": {"attn_qk_norm": True},
    "gated-values": {"attn_gate_values": True},
    "gated-heads": {"attn_head_scale": True},
    "macaron": {"macaron": True},
    "sandwich": {"sandwich_coef": 1},
    "softclamp": {"attn_softclamp_logits": True},
    "value-residual": {"add_value_residual": True},
    "cog-signed": {"attn_cog_signed": True},
    "selective": {"attn_selective": True},
    "null-key": {"attn_add_zero_kv": True},
    "laser": {"attn_laser": True},
    "forgetting": {"attn_data_dependent_alibi": True},
    "polar": {"polar_pos_emb": True},
    "sigmoid": {"attn_sigmoid": True},
    "null-key-flash": {"attn_add_zero_kv": True, "attn_flash": True},
}


def make_model(layers: str, options: dict[str, Any]) -> tuple[nn.Module, Run]:
    """Make a language model of one Decoder or Encoder."""
    stack = load(f"x_transformers:{layers}")(**SIZES, **options)
    wrap = load("x_transformers:TransformerWrapper")
    return wrap(num_tokens=64, max_seq_len=32, attn_layers=stack), feed(words())


def make_cross() -> tuple[nn.Module, Run]:
    """Make an encoder and a decoder."""
    model = load("x_transformers:XTransformer")(
        dim=32,
        enc_num_tokens=64,
        enc_depth=2,
        enc_heads=4,
        enc_max_seq_len=32,
        dec_num_tokens=64,
        dec_depth=2,
        dec_heads=4,
        dec_max_seq_len=32,
    )
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[1, 10:] = False
    source, target = *words(), *words(12)
    return model, lambda model: model(source, target, mask=mask)


def make_padded() -> tuple[nn.Module, Run]:
    """Make an encoder that is told which tokens are padding."""
    model, _ = make_model("Encoder", {})
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[1, 10:] = False
    (tokens,) = words()
    return model, lambda model: model(tokens, mask=mask)


def make_vision() -> tuple[nn.Module, Run]:
    """Make a vision transformer with registers."""
    model = load("x_transformers:ViTransformerWrapper")(
        image_size=32,
        patch_size=8,
        num_classes=10,
        num_register_tokens=2,
        attn_layers=load("x_transformers:Encoder")(**SIZES),
    )
    return model, feed((torch.randn(2, 3, 32, 32),))


def make_generation() -> tuple[nn.Module, Run]:
    """Make a decoder that generates, with its cache."""
    inner, _ = make_model("Decoder", {"rotary_pos_emb": True})
    model = load("x_transformers:AutoregressiveWrapper")(inner)
    (tokens,) = words(6)
    return model, lambda model: model.generate(tokens, 5, temperature=0.0)


def make_memory() -> tuple[nn.Module, Run]:
    """Make a Transformer-XL: the second segment looks at the first."""
    model = load("x_transformers:TransformerWrapper")(
        num_tokens=64,
        max_seq_len=16,
        max_mem_len=16,
        attn_layers=load("x_transformers:Decoder")(**SIZES, rotary_pos_emb=True),
    )
    first, second = *words(), *words()

    def run(model: nn.Module) -> Any:
        logits, memory = model(first, return_mems=True)
        return logits, model(second, mems=memory)

    return model, run


def list_cases() -> Iterable[Case]:
    """Yield every option of the table, and other wrappers."""
    makers = {
        name: partial(make_model, "Decoder", some) for name, some in OPTIONS.items()
    }
    makers["encoder"] = partial(make_model, "Encoder", {})
    makers["encoder-flash"] = partial(make_model, "Encoder", {"attn_flash": True})
    makers |= {
        "padded": make_padded,
        "cross": make_cross,
        "vision": make_vision,
        "generation": make_generation,
        "memory": make_memory,
    }
    return list_recipes("x-transformers", makers, needs=("x_transformers",))
