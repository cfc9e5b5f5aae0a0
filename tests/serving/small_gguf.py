"""Small random models for llama.cpp, written with the gguf package.

    write_model(path, "gemma2")     an architecture of KINDS

Vocabulary: the 256 bytes, and one token that ends a text.
"""

import gguf
import numpy as np

WIDTH, HEADS, SHARED, HEAD, INNER, LAYERS, LENGTH = 32, 4, 2, 32, 48, 3, 512
WINDOW, SOFTCAP, EXPERTS = 24, 5.0, 2
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
LETTERS = {**{i: chr(i) for i in BYTES}}
for i in range(256):  # the letters that GPT-2 gives to bytes
    LETTERS.setdefault(i, chr(256 + len([j for j in range(i) if j not in BYTES])))
TOKENS = [LETTERS[i] for i in range(256)] + ["<|end|>"]

RMS = {"attention.layer_norm_rms_epsilon": 1e-5}
GATED = {
    "blk.{}.attn_norm.weight": (WIDTH,),
    "blk.{}.ffn_norm.weight": (WIDTH,),
    "blk.{}.ffn_gate.weight": (INNER, WIDTH),
    "blk.{}.ffn_up.weight": (INNER, WIDTH),
    "blk.{}.ffn_down.weight": (WIDTH, INNER),
}
HEADED = {"output_norm.weight": (WIDTH,)}
EXPERT = {
    "blk.{}.attn_norm.weight": (WIDTH,),
    "blk.{}.post_attention_norm.weight": (WIDTH,),
    "blk.{}.attn_sinks.weight": (HEADS,),
    "blk.{}.attn_output.bias": (WIDTH,),
    "blk.{}.ffn_gate_inp.weight": (EXPERTS, WIDTH),
    "blk.{}.ffn_gate_inp.bias": (EXPERTS,),
    "blk.{}.ffn_gate_exps.weight": (EXPERTS, INNER, WIDTH),
    "blk.{}.ffn_gate_exps.bias": (EXPERTS, INNER),
    "blk.{}.ffn_up_exps.weight": (EXPERTS, INNER, WIDTH),
    "blk.{}.ffn_up_exps.bias": (EXPERTS, INNER),
    "blk.{}.ffn_down_exps.weight": (EXPERTS, WIDTH, INNER),
    "blk.{}.ffn_down_exps.bias": (EXPERTS, WIDTH),
    "output.weight": (len(TOKENS), WIDTH),
}
NORMED = {  # layer norms with a bias
    f"blk.{{}}.{name}.{end}": (WIDTH,)
    for name in ("attn_output_norm", "layer_output_norm")
    for end in ("weight", "bias")
}
PLAIN = {
    "blk.{}.ffn_up.weight": (INNER, WIDTH),
    "blk.{}.ffn_up.bias": (INNER,),
    "blk.{}.ffn_down.weight": (WIDTH, INNER),
    "blk.{}.ffn_down.bias": (WIDTH,),
}
KINDS = {  # settings, and tensors besides those of attention
    "llama": (RMS, GATED | HEADED),
    "qwen3": (
        RMS,
        GATED | HEADED | {f"blk.{{}}.attn_{x}_norm.weight": (HEAD,) for x in "qk"},
    ),
    "gemma2": (
        RMS | {"attention.sliding_window": WINDOW, "attn_logit_softcapping": SOFTCAP},
        GATED
        | HEADED
        | {f"blk.{{}}.post_{x}_norm.weight": (WIDTH,) for x in ("attention", "ffw")},
    ),
    "gpt-oss": (
        RMS
        | {
            "attention.sliding_window": WINDOW,
            "expert_count": EXPERTS,
            "expert_used_count": 1,
            "expert_feed_forward_length": INNER,
        },
        EXPERT | HEADED,
    ),
    "bert": (
        {
            "attention.layer_norm_epsilon": 1e-5,
            "attention.causal": False,
            "pooling_type": 1,
        },
        PLAIN
        | NORMED
        | {
            "token_types.weight": (2, WIDTH),
            "position_embd.weight": (LENGTH, WIDTH),
            "token_embd_norm.weight": (WIDTH,),
            "token_embd_norm.bias": (WIDTH,),
        },
    ),
    "bloom": (
        {"attention.layer_norm_epsilon": 1e-5},
        PLAIN
        | {
            f"{name}.{end}": (WIDTH,)
            for name in (
                "token_embd_norm",
                "output_norm",
                "blk.{}.attn_norm",
                "blk.{}.ffn_norm",
            )
            for end in ("weight", "bias")
        }
        | {
            "blk.{}.attn_output.bias": (WIDTH,),
            "blk.{}.attn_qkv.weight": (3 * WIDTH, WIDTH),
            "blk.{}.attn_qkv.bias": (3 * WIDTH,),
        },
    ),
}


def list_shapes(kind):
    """Return the shape of every tensor of an architecture, {} for its layers."""
    shared = HEADS if kind in ("bert", "bloom") else SHARED
    head = WIDTH // HEADS if kind in ("bert", "bloom") else HEAD
    attention = {
        "token_embd.weight": (len(TOKENS), WIDTH),
        "blk.{}.attn_output.weight": (WIDTH, HEADS * head),
        "blk.{}.attn_q.weight": (HEADS * head, WIDTH),
        "blk.{}.attn_k.weight": (shared * head, WIDTH),
        "blk.{}.attn_v.weight": (shared * head, WIDTH),
    }
    if kind == "bloom":
        attention = {k: x for k, x in attention.items() if k[-8] not in "qkv"}
    return attention | KINDS[kind][1]


def write_model(path, kind, *, seed=0):
    """Write a random model; return its path."""
    rng, writer = np.random.default_rng(seed), gguf.GGUFWriter(path, kind)
    small = kind in ("bert", "bloom")
    writer.add_name(f"random {kind}")
    writer.add_block_count(LAYERS)
    writer.add_context_length(LENGTH)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS if small else SHARED)
    if not small:
        writer.add_key_length(HEAD)
        writer.add_value_length(HEAD)
        writer.add_rope_dimension_count(HEAD)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for key, value in KINDS[kind][0].items():
        add[type(value)](f"{kind}.{key}", value)
    if kind == "bert":
        writer.add_token_type_count(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges([f"{LETTERS[255]} {LETTERS[255]}"])  # one is needed
    writer.add_token_types([1] * 256 + [3])
    writer.add_eos_token_id(256)
    for name, shape in list_shapes(kind).items():
        for layer in range(LAYERS) if "{}" in name else [0]:
            numbers = rng.normal(size=shape).astype(np.float32)
            is_norm = name.endswith("norm.weight")
            writer.add_tensor(
                name.format(layer), 1 + numbers / 8 if is_norm else numbers / 2
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
