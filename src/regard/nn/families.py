"""Model families: tables that map external settings and weight names to ours.

    config.json or GGUF settings ─▶ Config        tensor names ─▶ names of Config.shapes

GPT-2 is Config's defaults; Llama and its derivatives differ from each other in three
options. So a family is a few lines in the tables below. Unknown settings that would
change the result raise a FileError, because a model loaded with wrong settings still
produces plausible text.

Next: rope_scaling.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from regard.errors import FileError, OptionError
from regard.nn.rope_scaling import LENGTH, stretch_rotary
from regard.plain.config import Config

# --- names of weights: theirs -> ours, where # is the layer number -------------------
# Tensors that map to one name are concatenated by rows, in the order given here.

NAMES = {
    # Llama and its derivatives, in transformers
    "embed_tokens": "embed",
    "layers.#.input_layernorm": "blocks.#.attention_norm",
    "layers.#.self_attn.q_proj": "blocks.#.attention.qkv",
    "layers.#.self_attn.k_proj": "blocks.#.attention.qkv",
    "layers.#.self_attn.v_proj": "blocks.#.attention.qkv",
    "layers.#.self_attn.q_norm": "blocks.#.attention.q_norm",
    "layers.#.self_attn.k_norm": "blocks.#.attention.k_norm",
    "layers.#.self_attn.o_proj": "blocks.#.attention.out",
    "layers.#.post_attention_layernorm": "blocks.#.feed_norm",
    "layers.#.mlp.gate_proj": "blocks.#.feed.up",
    "layers.#.mlp.up_proj": "blocks.#.feed.up",
    "layers.#.mlp.down_proj": "blocks.#.feed.down",
    "norm": "norm",
    "lm_head": "head",
    # GPT-2, in transformers
    "wte": "embed",
    "wpe": "positions",
    "h.#.ln_1": "blocks.#.attention_norm",
    "h.#.attn.c_attn": "blocks.#.attention.qkv",
    "h.#.attn.c_proj": "blocks.#.attention.out",
    "h.#.ln_2": "blocks.#.feed_norm",
    "h.#.mlp.c_fc": "blocks.#.feed.up",
    "h.#.mlp.c_proj": "blocks.#.feed.down",
    "ln_f": "norm",
    # all of them, in GGUF
    "token_embd": "embed",
    "position_embd": "positions",
    "blk.#.attn_norm": "blocks.#.attention_norm",
    "blk.#.attn_qkv": "blocks.#.attention.qkv",
    "blk.#.attn_q": "blocks.#.attention.qkv",
    "blk.#.attn_k": "blocks.#.attention.qkv",
    "blk.#.attn_v": "blocks.#.attention.qkv",
    "blk.#.attn_q_norm": "blocks.#.attention.q_norm",
    "blk.#.attn_k_norm": "blocks.#.attention.k_norm",
    "blk.#.attn_output": "blocks.#.attention.out",
    "blk.#.ffn_norm": "blocks.#.feed_norm",
    "blk.#.ffn_gate": "blocks.#.feed.up",
    "blk.#.ffn_up": "blocks.#.feed.up",
    "blk.#.ffn_down": "blocks.#.feed.down",
    "output_norm": "norm",
    "output": "head",
}
IGNORED = (  # constant buffers in old files
    ".rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
)
TRANSPOSED = (  # GPT-2 stores (in, out)
    ".attn.c_attn.weight",
    ".attn.c_proj.weight",
    ".mlp.c_fc.weight",
    ".mlp.c_proj.weight",
)

# --- settings: theirs -> Config's ----------------------------------------------------

LLAMA_SETTINGS = {
    "vocab_size": "vocabulary",
    "max_position_embeddings": "context",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_width",
    "intermediate_size": "hidden",
    "rms_norm_eps": "eps",
    "tie_word_embeddings": "tied",
}
GPT2_SETTINGS = {
    "vocab_size": "vocabulary",
    "n_positions": "context",
    "n_embd": "width",
    "n_layer": "layers",
    "n_head": "heads",
    "n_inner": "hidden",
    "layer_norm_epsilon": "eps",
    "tie_word_embeddings": "tied",
}
GGUF_SETTINGS = {  # prefixed with the family name in the file
    "context_length": "context",
    "embedding_length": "width",
    "block_count": "layers",
    "attention.head_count": "heads",
    "attention.head_count_kv": "kv_heads",
    "attention.key_length": "head_width",
    "feed_forward_length": "hidden",
    "rope.freq_base": "base",
}
GGUF_ROPE = {  # GGUF_SETTINGS of rotary scaling; llama3 has a tensor, rope_freqs
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": LENGTH,
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
ONLY = {  # the only supported values of these keys in config.json
    "quantization_config": None,
    "dual_chunk_attention_config": None,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}

LLAMA: dict[str, Any] = {
    "activation": "swiglu",
    "norm": "rms",
    "position": "rotary",
    "bias": False,
    "tied": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"tied": True},  # Config's defaults otherwise
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": {**LLAMA, "qkv_bias": True},
    "qwen3": {**LLAMA, "qk_norm": True},
}
OPTIONAL = {  # settings that files may omit, because the defaults agree with Config's
    "gpt2": {"kv_heads", "head_width", "hidden", "base", "eps"},
    "llama": {"kv_heads", "head_width", "base"},
    "mistral": {"head_width"},
    "qwen2": {"head_width", "base"},
    "qwen3": {"base"},
}
WINDOWED: dict[str, int | None] = {  # sliding_window alone decides; if it is omitted
    "mistral": 4_096,
}
MAX_WINDOW_LAYERS = 28  # of Qwen: these first layers have no window
FULL, SLIDING = "full_attention", "sliding_attention"
MANY = 10_000  # layers, if they differ
LONGEST = 2**18  # largest context; the position tables would need too much memory


def read_config(theirs: Mapping[str, Any]) -> Config:
    """Return the Config of a config.json, or of a live model's config.to_dict()."""
    family = str(theirs.get("model_type"))
    if family not in FAMILIES:
        known = ", ".join(map(repr, FAMILIES))
        raise FileError(f"model_type={family!r:.80}, expected one of {known}.")
    for key, only in ONLY.items():
        if theirs.get(key, only) != only:
            raise FileError(f"{key}={theirs[key]!r:.80}, but only {only} is supported.")
    if family == "gpt2":
        activation = str(theirs.get("activation_function", "gelu_new"))
        if activation not in ACTIVATIONS:
            known = ", ".join(map(repr, ACTIVATIONS))
            raise FileError(
                f"activation_function={activation!r:.80}, expected one of {known}."
            )
        return make_config(
            family, theirs, GPT2_SETTINGS, {"activation": ACTIVATIONS[activation]}
        )
    biases = [theirs.get(key, False) for key in ("attention_bias", "mlp_bias")]
    if biases not in ([False, False], [True, True]):
        raise FileError(
            f"attention_bias={biases[0]!r:.40}, mlp_bias={biases[1]!r:.40}: expected "
            "both or neither. (Biases of q, k and v only are model_type 'qwen2'.)"
        )
    rope = find_rope(theirs)
    base = read_setting("rope_theta", rope.get("rope_theta", 10_000.0), "base")
    options = {"base": base, **find_windows(family, theirs)}
    if biases[0]:
        options["bias"] = True
    config = make_config(family, theirs, LLAMA_SETTINGS, options)
    return stretch_rotary(config, rope)


def find_rope(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings, under their names in transformers 5."""
    found = {"rope_theta": theirs.get("rope_theta", 10_000.0)}
    for name in ("rope_scaling", "rope_parameters"):  # transformers 4 and 5
        rope = theirs.get(name) or {}
        if not isinstance(rope, Mapping) or any(
            isinstance(x, Mapping) for x in rope.values()
        ):
            raise FileError(
                f"{name}={rope!r:.200}, expected the settings of all layers: rope_type "
                "and its numbers."
            )
        found |= rope
    return found


def find_windows(family: str, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sliding window, including the token itself, and the layers with it."""
    always, kinds = family in WINDOWED, theirs.get("layer_types")
    window = theirs.get("sliding_window", WINDOWED.get(family, 4_096))
    if not always and not theirs.get("use_sliding_window", False):
        window = None
    if window is not None:
        window = read_setting("sliding_window", window, "window")
    if not isinstance(kinds, list):
        return {"window": window, **find_last_layers(theirs, window, always=always)}
    names = {*map(str, kinds)}
    wrong = names - {FULL, SLIDING} or len(kinds) != theirs.get("num_hidden_layers")
    if wrong or (always and names != {SLIDING}) or (window is None and names != {FULL}):
        raise FileError(
            f"sliding_window={window!r:.40} with layer_types of {sorted(names)!r:.200} "
            f"for {theirs.get('num_hidden_layers')!r:.40} layers is not supported."
        )
    sliding = tuple(i for i, kind in enumerate(kinds) if kind == SLIDING)
    some = {"window_layers": sliding} if len(names) == 2 else {}
    return {"window": window if sliding else None, **some}


def find_last_layers(
    theirs: Mapping[str, Any], window: int | None, *, always: bool
) -> dict[str, Any]:
    """Return the layers with a window by the rule of Qwen: all but the first few."""
    layers = theirs.get("num_hidden_layers")
    first = 0 if always else theirs.get("max_window_layers", MAX_WINDOW_LAYERS)
    if window is None or first == 0 or not isinstance(layers, int):
        return {}
    if not isinstance(first, int) or layers > MANY:
        raise FileError(
            f"max_window_layers={first!r:.40} of {layers} layers, expected integers, "
            f"and at most {MANY} layers."
        )
    if first >= layers:
        return {"window": None}
    return {"window_layers": tuple(range(first, layers))}


def read_gguf_config(
    settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Config:
    """Return the Config of a GGUF file from its settings and tensor shapes."""
    family = str(settings.get("general.architecture"))
    if family not in FAMILIES or family == "mistral":  # in GGUF, mistral is llama
        known = ", ".join(repr(x) for x in FAMILIES if x != "mistral")
        raise FileError(
            f"general.architecture={family!r:.80}, expected one of {known}. Models of "
            "other families are loaded from a folder of safetensors."
        )
    kind = str(settings.get("general.type", "model"))
    if kind != "model" or "split.count" in settings:
        raise FileError(
            f"general.type={kind!r:.40} in {settings.get('split.count', 1)!s:.9} files"
            ", expected one whole model. Merge its files: llama-gguf-split --merge."
        )
    start, embedding = f"{family}.", shapes.get("token_embd.weight", (0,))
    own = {k.removeprefix(start): x for k, x in settings.items() if k.startswith(start)}
    tokens = settings.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != embedding[0]:
        raise FileError(
            f"{len(tokens)} tokens, but token_embd.weight is {embedding}: expected a "
            "row for each."
        )
    norm = "layer_norm" if family == "gpt2" else "layer_norm_rms"
    table = {**GGUF_SETTINGS, f"attention.{norm}_epsilon": "eps"}
    options = {
        "vocabulary": embedding[0],
        "tied": "output.weight" not in shapes,
    }
    if "blk.0.attn_q.bias" in shapes:
        options["qkv_bias"] = True
    config = make_config(family, own, table, options)
    config = stretch_gguf(config, own)
    only = {
        "vocab_size": config.vocabulary,
        "rope.dimension_count": config.head,
        "attention.value_length": config.head,
        "attention.causal": True,
        "expert_count": 0,
        "expert_used_count": 0,
    }
    for key in own.keys() - table.keys():
        if not isinstance(own[key], (int, str)) or own[key] != only.get(key):
            known = f"expected {only[key]!r}" if key in only else "not supported"
            raise FileError(f"{start}{key}={own[key]!r:.80}: {known}.")
    return config


def stretch_gguf(config: Config, own: dict[str, Any]) -> Config:
    """Return a config with the rotary scaling of a file, taken out of its settings."""
    rope = {ours: own.pop(key) for key, ours in GGUF_ROPE.items() if key in own}
    own.pop("rope.scaling.finetuned", None)  # how it was trained
    kind = str(rope.get("rope_type"))
    if rope and kind not in ("none", "linear", "yarn"):
        raise FileError(
            f"rope.scaling.type={kind!r:.40}, expected 'none', 'linear' or 'yarn'."
        )
    return stretch_rotary(config, rope) if kind in ("linear", "yarn") else config


def make_config(
    family: str,
    theirs: Mapping[str, Any],
    table: Mapping[str, str],
    options: Mapping[str, Any],
) -> Config:
    """Return the Config of a family with the settings listed in a table."""
    found = {**FAMILIES[family], **options}
    missing = []
    for key, ours in table.items():
        if theirs.get(key) is not None:
            found[ours] = read_setting(key, theirs[key], ours)
        elif ours not in found and ours not in OPTIONAL[family]:
            missing.append(key)
    if missing:
        raise FileError(f"settings are missing: {', '.join(missing)}.")
    if found["context"] > LONGEST:
        raise FileError(
            f"a context of {found['context']} tokens, expected at most {LONGEST}."
        )
    try:
        return Config(**found)
    except OptionError as error:
        raise FileError(f"the settings do not fit together: {error}") from None


def read_setting(key: str, value: Any, ours: str) -> Any:
    """Return a setting; raise if its type or range is not what Config expects."""
    if ours == "tied":
        fits, kind = isinstance(value, bool), "true or false"
    elif ours in ("eps", "base"):
        fits = isinstance(value, int | float) and 0 < value < math.inf
        kind = "a positive number"
    else:
        fits, kind = type(value) is int and value > 0, "an integer of at least 1"
    if not fits:
        raise FileError(f"{key}={value!r:.80}, expected {kind}.")
    return value
