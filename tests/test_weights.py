"""Real weights: every family against transformers, damage, refusals, SmolLM2."""

import json
import struct
import time
from copy import deepcopy
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Core
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
)

from regard.errors import FileError, OptionError
from regard.models.load import load as load_any
from regard.nn.decoder import CausalTransformer
from regard.nn.families import read_config, read_gguf_config
from regard.nn.generation import generate
from regard.nn.gguf_file import open_gguf
from regard.nn.tokens import build_gguf_tokenizer
from regard.nn.weights import convert_state, load, read_weights
from regard.plain.decoder import Decoder

TOKENS = [*sorted(ByteLevel.alphabet()), "he", "ll", "hell", "<|end|>"]
MERGES = ["h e", "l l", "he ll"]
V = len(TOKENS)  # 260
HEIR = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": V - 1,
    "pad_token_id": None,
}
GPT2 = {
    "vocab_size": V,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": None,
    "eos_token_id": V - 1,
}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
OLD = "original_max_position_embeddings"
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, OLD: 16, "beta_fast": 2.0}
GAIN = {"mscale": 0.7, "mscale_all_dim": 2.0, "truncate": False}
LLAMA3 = {
    **ROPE,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    OLD: 32,  # waves of 6, 30, 140 and 660 tokens: short, between, long
}
MIXED = ["full_attention", "sliding_attention"]
SLIDING = {"use_sliding_window": True, "sliding_window": 5}
CASES = {
    "gpt2": ("gpt2", GPT2),
    "gpt2 untied": ("gpt2", {**GPT2, "n_inner": 40, "tie_word_embeddings": False}),
    "gpt2 exact gelu": ("gpt2", {**GPT2, "activation_function": "gelu"}),
    "llama": ("llama", {**HEIR, "rope_parameters": ROPE}),
    "llama tied": ("llama", {**HEIR, "tie_word_embeddings": True, "head_dim": 16}),
    "llama biases": ("llama", {**HEIR, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {**HEIR, "sliding_window": 5, "head_dim": 10}),
    "mistral whole": ("mistral", {**HEIR, "sliding_window": None}),
    "qwen2": ("qwen2", HEIR),
    "qwen2 sliding": (
        "qwen2",
        {
            **HEIR,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 0,
        },
    ),
    "qwen3": ("qwen3", {**HEIR, "head_dim": 12, "tie_word_embeddings": True}),
    "qwen2 last layers": ("qwen2", {**HEIR, **SLIDING, "max_window_layers": 1}),
    "qwen3 layer types": ("qwen3", {**HEIR, **SLIDING, "layer_types": MIXED[::-1]}),
    "llama3": ("llama", {**HEIR, "rope_parameters": LLAMA3}),
    "linear": ("llama", {**HEIR, "rope_parameters": {**ROPE, **LINEAR}}),
    "yarn": ("qwen2", {**HEIR, "rope_parameters": {**ROPE, **YARN}}),
    "yarn gain": (
        "llama",
        {**HEIR, "head_dim": 32, "rope_parameters": {**ROPE, **YARN, **GAIN}},
    ),
    "dynamic": (
        "llama",
        {**HEIR, "rope_parameters": {**ROPE, **LINEAR, "rope_type": "dynamic"}},
    ),
}
STRETCHED = ["llama3", "linear", "yarn", "yarn gain"]


@torch.no_grad()
def build(case):
    """Return a model of transformers whose weights all matter."""
    kind, options = CASES[case]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**options))
    for name, x in model.named_parameters():
        if "norm" in name or "ln_" in name:
            x.copy_(1 + 0.3 * torch.randn_like(x))
        else:
            x.normal_(std=0.3)
    return model.float().eval()


def save(model, folder, **options):
    model.save_pretrained(folder, **options)
    core = Core(BPE({token: i for i, token in enumerate(TOKENS)}, []))
    core.save(str(folder / "tokenizer.json"))
    return folder


def draw_ids(n=24):
    return torch.randint(0, V, (2, n), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def measure(theirs, ours):
    """Return the largest difference of logits."""
    ids = draw_ids()
    expected = theirs(ids).logits
    assert expected.std() > 0.5
    return (ours(ids) - expected).abs().max().item()


# --- folders -------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*STRETCHED, "qwen2 last layers"])
def test_stretching_and_windows_matter(case, tmp_path):
    """So that the next test says something about them."""
    theirs = build(case)
    ours, _ = load(save(theirs, tmp_path))
    plain = CausalTransformer(
        replace(ours.config, stretch=(), gain=1.0, window=None, window_layers=None)
    )
    plain.load_state_dict(ours.state_dict())
    assert measure(theirs, plain) > 0.01


def test_layers_with_and_without_a_window_generate_as_transformers(tmp_path):
    theirs = build("qwen3 layer types")
    ours, _ = load(save(theirs, tmp_path))
    assert ours.config.window_layers == (0,)
    prompts = draw_ids(9)
    for prompt in prompts:
        new = theirs.generate(prompt[None], max_new_tokens=12, do_sample=False)
        wanted = [x for x in new[0, 9:].tolist() if x != V - 1]
        assert generate(ours, [prompt.tolist()], 12, stop=[V - 1]) == [wanted]
    both = generate(ours, [prompts[0].tolist(), prompts[1, :5].tolist()], 8)
    alone = [generate(ours, [prompts[0].tolist()], 8)[0]]
    alone += generate(ours, [prompts[1, :5].tolist()], 8)
    assert both == alone


@pytest.mark.parametrize("case", CASES)
def test_a_folder_gives_the_logits_of_transformers(case, tmp_path):
    theirs = build(case)
    ours, tokenizer = load(save(theirs, tmp_path))
    assert not ours.training
    assert all(x.requires_grad for x in ours.parameters())
    assert measure(theirs, ours) < 1e-4
    assert tokenizer.stop == {V - 1}


def test_a_sharded_folder_gives_the_same_weights(tmp_path):
    theirs = build("llama")
    _, whole = read_weights(save(theirs, tmp_path / "whole"))
    folder = save(theirs, tmp_path / "shards", max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    _, parts = read_weights(folder)
    assert whole.keys() == parts.keys()
    assert all((whole[name] == parts[name]).all() for name in whole)


@pytest.mark.parametrize(
    "case", ["gpt2", "mistral", "qwen3", "qwen2 last layers", "llama3", "yarn"]
)
def test_the_plain_decoder_takes_the_same_weights(case, tmp_path):
    theirs = build(case)
    config, weights = read_weights(save(theirs, tmp_path))
    assert all(x.dtype == np.float32 for x in weights.values())
    ids = draw_ids()
    with torch.no_grad():
        expected = theirs(ids).logits.numpy()
    ours = Decoder(config, weights)(ids[0].numpy())
    np.testing.assert_allclose(ours, expected[0], atol=1e-4)


def test_a_live_model_is_converted_without_files():
    theirs = build("llama tied")
    state = theirs.state_dict()
    config = read_config(theirs.config.to_dict())
    weights = convert_state(state, config)
    assert [(n, tuple(x.shape)) for n, x in weights.items()] == list(config.shapes())
    with torch.no_grad():
        for x in weights.values():
            x.zero_()  # a copy: the live model does not notice
    assert all(x.abs().max() > 0 for x in state.values())


def test_a_window_counts_the_token_itself(tmp_path):
    """transformers' sliding_window=5 is a token and four before it, as is window=5."""
    theirs = build("mistral")
    ours, _ = load(save(theirs, tmp_path))
    assert ours.config.window == 5
    state = ours.state_dict()
    for window in (4, 6):
        other = CausalTransformer(replace(ours.config, window=window))
        other.load_state_dict(state)
        assert measure(theirs, other.eval()) > 0.1


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_converted_to_the_dtype_asked_for(stored, tmp_path):
    theirs = build("qwen2")
    with torch.no_grad():
        for x in theirs.parameters():
            x.copy_(x.to(stored))
    folder = save(deepcopy(theirs).to(stored), tmp_path)
    assert {x.dtype for x in load_file(folder / "model.safetensors").values()} == {
        stored
    }
    ours, _ = load(folder)
    assert measure(theirs, ours) < 1e-4
    half, _ = load(folder, dtype=torch.bfloat16)
    assert {x.dtype for x in half.parameters()} == {torch.bfloat16}
    for name, x in ours.named_parameters():
        assert torch.equal(half.get_parameter(name), x.to(torch.bfloat16))
    ids = draw_ids()
    with torch.no_grad():
        assert half(ids).dtype == torch.bfloat16
        near = torch.cosine_similarity(half(ids).float(), ours(ids), dim=-1)
    assert near.min() > 0.99
    with pytest.raises(OptionError, match=r"dtype=torch.int8, expected torch.float32"):
        load(folder, dtype=torch.int8)


def test_old_files_may_carry_fixed_numbers_and_a_tied_head(tmp_path):
    theirs = build("gpt2")
    folder = save(theirs, tmp_path)
    file = folder / "model.safetensors"
    state = load_file(file)
    old = {name.removeprefix("transformer."): x for name, x in state.items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril().to(torch.uint8)
    old["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    old["lm_head.weight"] = old["wte.weight"].clone()
    save_file(old, file)
    assert measure(theirs, load(folder)[0]) < 1e-4
    old["lm_head.weight"][3, 4] += 1
    save_file(old, file)
    with pytest.raises(FileError, match=r"lm_head.weight differs from wte.weight"):
        load(folder)


# --- GGUF ----------------------------------------------------------------------------


def interleave(x, heads):
    """Permute rows as llama.cpp's converter does."""
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(x.shape)


def translate(model):
    """Yield the tensors of a model of transformers as llama.cpp stores them."""
    config = model.config
    kind = next(k for k, name in MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads = {}
    if kind == MODEL_ARCH.LLAMA:
        heads = {
            "q_proj": config.num_attention_heads,
            "k_proj": config.num_key_value_heads,
        }
    for name, x in model.state_dict().items():
        stem, _, end = name.rpartition(".")
        if stem == "lm_head" and config.tie_word_embeddings:
            continue
        layer = stem.rpartition(".")[2]
        y = interleave(x, heads[layer]) if layer in heads else x
        y = y.T if layer in ("c_attn", "c_proj", "c_fc") and end == "weight" else y
        yield f"{names.get_name(stem)}.{end}", y.contiguous().numpy()


def write_words(writer, *, pieces):
    """Write a vocabulary of bytes; pieces: as SentencePiece, else as of GPT-2."""
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    writer.add_tokenizer_pre("default" if pieces else "gpt-2")
    if not pieces:
        writer.add_token_list(TOKENS)
        writer.add_token_merges(MERGES)
        writer.add_token_types([1] * (V - 1) + [3])
        writer.add_eos_token_id(V - 1)
        return
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    writer.add_token_list(["<unk>", "<s>", "</s>", *bytes_, "▁"])
    writer.add_token_types([2, 3, 3, *[6] * 256, 1])
    writer.add_token_scores([0.0] * V)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_gguf(path, model, *, extra=(), tensors=None, pieces=False):
    """Write a model of transformers as a GGUF file."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        head = getattr(config, "head_dim", None) or 8
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_key_length(head)
        writer.add_value_length(head)
        writer.add_rope_dimension_count(head)
    write_words(writer, pieces=pieces)
    for key, value in extra:
        writer.add_key_value(key, value, kind_of(value))
    for name, x in tensors or translate(model):
        writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def kind_of(value):
    kinds = {
        str: "STRING",
        int: "UINT32",
        float: "FLOAT32",
        list: "ARRAY",
        bool: "BOOL",
    }
    return gguf.GGUFValueType[kinds[type(value)]]


GGUF = ["gpt2", "gpt2 untied", "llama", "llama tied", "qwen2", "qwen3"]
SCALED = {  # as llama.cpp's converter writes them; llama3 is a tensor
    "linear": [
        ("llama.rope.scaling.type", "linear"),
        ("llama.rope.scaling.factor", 4.0),
    ],
    "yarn": [
        ("qwen2.rope.scaling.type", "yarn"),
        ("qwen2.rope.scaling.factor", 4.0),
        ("qwen2.rope.scaling.original_context_length", 16),
        ("qwen2.rope.scaling.yarn_beta_fast", 2.0),
    ],
}


def list_factors(case):
    """Return the tensor of llama3: how much slower every pair turns in transformers."""
    if case != "llama3":
        return []
    rotary = build(case).model.rotary_emb
    plain = 500.0 ** -(torch.arange(0, 8, 2) / 8)
    return [("rope_freqs.weight", (plain / rotary.inv_freq).numpy())]


@pytest.mark.parametrize("case", [*GGUF, "llama3", *SCALED])
def test_a_gguf_file_gives_the_logits_of_transformers(case, tmp_path):
    theirs = build(case)
    tensors = [*translate(theirs), *list_factors(case)]
    extra = SCALED.get(case, ())
    path = write_gguf(tmp_path / "model.gguf", theirs, extra=extra, tensors=tensors)
    ours, tokenizer = load(path)
    assert measure(theirs, ours) < 1e-4
    assert tokenizer.encode("hello<|end|>") == [V - 2, TOKENS.index("o"), V - 1]
    assert tokenizer.stop == {V - 1}


def test_a_gguf_file_with_sentencepiece_is_loaded(tmp_path):
    theirs = build("llama")
    ours, words = load(write_gguf(tmp_path / "model.gguf", theirs, pieces=True))
    assert measure(theirs, ours) < 1e-4
    assert words.encode("é a") == [1, 259, 3 + 0xC3, 3 + 0xA9, 259, 3 + ord("a")]
    assert words.decode([259, 3 + 0xC3, 3 + 0xA9]) == "é"
    assert words.stop == {2}


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_layers_that_ours_lacks_are_left_to_transformers(kind, tmp_path):
    """Of Gemma every other layer has a window, and other angles."""
    settings = {**HEIR, "head_dim": 8, "sliding_window": 5, "layer_types": MIXED}
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**settings))
    folder = save(theirs.float().eval(), tmp_path)
    with pytest.raises(FileError, match=f"model_type='{kind}', expected one of"):
        load(folder)
    ours, _ = load_any(folder)
    ids = draw_ids()
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_the_rows_of_q_and_k_are_put_back(tmp_path):
    """So that the test above says something about them."""
    theirs = build("llama")
    tensors = [(n, x) for n, x in translate(theirs)]
    wrong = dict(tensors)
    straight = theirs.state_dict()["model.layers.0.self_attn.q_proj.weight"].numpy()
    assert (wrong["blk.0.attn_q.weight"] != straight).any()
    wrong["blk.0.attn_q.weight"] = straight
    path = write_gguf(tmp_path / "model.gguf", theirs, tensors=wrong.items())
    assert measure(theirs, load(path)[0]) > 0.1


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "BF16"])
def test_quantized_tensors_are_read_as_gguf_reads_them(kind, rng, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    x = rng.normal(size=(6, 64)).astype(np.float32)
    raw = gguf.quantize(x, kind)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(tmp_path / "x.gguf")
    assert file.entries["x"].shape == (6, 64)
    assert (file.read("x") == gguf.dequantize(raw, kind)).all()
    assert np.abs(file.read("x") - x).max() < 0.3


# --- refusals ------------------------------------------------------------------------


REFUSED = [
    ("llama", {"model_type": "bert"}, "model_type='bert', expected one of 'gpt2', 'll"),
    (
        "llama",
        {"rope_parameters": {**ROPE, "rope_type": "longrope", "factor": 2.0}},
        "rope_type='longrope', expected one of 'default', 'dynamic', 'linear', 'llama3'",
    ),
    (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 0}, "rope_parameters": None},
        "rope_type='linear' with factor=0, expected a positive number",
    ),
    (
        "llama3",
        {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}},
        "low_freq_factor=1 and high_freq_factor=1, expected the second to be larger",
    ),
    (
        "llama3",
        {"rope_parameters": {**LLAMA3, "beta_fast": 1.0}},
        "rope_type='llama3' with beta_fast=1.0, which is not supported",
    ),
    (
        "llama",
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5, but only 1.0 is supported",
    ),
    ("llama", {"rope_parameters": {"a": ROPE}}, "rope_parameters=.*all layers"),
    ("llama", {"rope_parameters": [1]}, "rope_parameters=.*expected the settings"),
    ("llama", {"hidden_act": "relu"}, "hidden_act='relu', but only silu is supported"),
    (
        "llama",
        {"attention_bias": True},
        "attention_bias=True, mlp_bias=False: expected",
    ),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config=.*only None"),
    (
        "llama",
        {"hidden_size": "32"},
        "hidden_size='32', expected an integer of at least 1",
    ),
    ("llama", {"hidden_size": None}, "settings are missing: hidden_size"),
    (
        "llama",
        {"num_hidden_layers": 0},
        "num_hidden_layers=0, expected an integer of at least 1",
    ),
    ("llama", {"num_hidden_layers": 2**40}, f"{2**40} layers, but only 21 tensors"),
    ("llama", {"num_hidden_layers": 3}, "6 of 21 weights are missing, .*layers.2.inp"),
    ("llama", {"num_hidden_layers": 1}, "9 tensors do not belong to this model"),
    (
        "llama",
        {"num_key_value_heads": 3},
        "do not fit together: 4 heads cannot share 3",
    ),
    (
        "llama",
        {"max_position_embeddings": 2**31},
        "a context of 2147483648 tokens, exp",
    ),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan, expected a positive"),
    (
        "llama",
        {"tie_word_embeddings": 1},
        "tie_word_embeddings=1, expected true or fal",
    ),
    (
        "llama",
        {"vocab_size": 7},
        r"embed.weight should be \(7, 32\), but .*\(260, 32\)",
    ),
    (
        "llama",
        {"num_attention_heads": 2},
        r"qkv.weight should be \(48, 32\), but mod.*q_",
    ),
    ("mistral", {"layer_types": MIXED}, "sliding_window=5 with layer_types of"),
    ("mistral", {"layer_types": MIXED[:1]}, "sliding_window=5 with layer_types of"),
    (
        "mistral",
        {"sliding_window": 0},
        "sliding_window=0, expected an integer of at least 1",
    ),
    ("qwen2 sliding", {"layer_types": ["chunked"] * 2}, "of .'chunked'. for 2 layers"),
    ("qwen2 sliding", {"layer_types": MIXED * 2}, "for 2 layers is not supported"),
    ("qwen2", {"layer_types": MIXED}, "sliding_window=None with layer_types of"),
    (
        "qwen2 sliding",
        {"layer_types": None, "max_window_layers": "1"},
        "max_window_layers='1' of 2 layers, expected integers",
    ),
    ("gpt2", {"activation_function": "swish"}, "activation_function='swish', expected"),
    (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True},
        "by_inverse_layer_idx=True, but",
    ),
]


@pytest.mark.parametrize(
    ("case", "change", "message"), REFUSED, ids=lambda x: str(x)[:40]
)
def test_a_config_that_would_be_loaded_wrongly_is_refused(
    case, change, message, tmp_path
):
    folder = save(build(case), tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FileError, match=message):
        load(folder)


def test_transformers_of_all_layers_alike_may_say_so(tmp_path):
    folder = save(build("qwen2 sliding"), tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    assert read_config(settings).window == 5
    untold = {**settings, "layer_types": None, "max_window_layers": 1}  # transformers 4
    assert read_config(untold).window_layers == (1,)
    assert read_config({**untold, "max_window_layers": 2}).window is None
    assert read_config({**untold, "max_window_layers": 0}).window_layers is None
    assert read_config({**settings, "layer_types": MIXED[:1] * 2}).window is None
    assert (
        read_config(
            {**settings, "use_sliding_window": False, "layer_types": None}
        ).window
        is None
    )
    old = {k: x for k, x in settings.items() if k != "rope_parameters"}
    assert read_config({**old, "rope_theta": 7.0}).base == 7.0  # transformers 4
    assert read_config(old).base == 10_000.0


GGUF_REFUSED = [
    (
        [("llama.rope.scaling.type", "longrope")],
        [],
        "rope.scaling.type='longrope', expected 'none', 'linear' or 'yarn'",
    ),
    (
        [("llama.rope.scaling.factor", 4.0)],
        [],
        "rope.scaling.type='None', expected 'none', 'linear' or 'yarn'",
    ),
    (
        [("llama.rope.scaling.type", "yarn")],
        [],
        "rope_type='yarn' with factor=None, expected a positive number",
    ),
    ([("llama.expert_count", 8)], [], "llama.expert_count=8: expected 0"),
    ([("llama.attention.sliding_window", 8)], [], "sliding_window=8: not supported"),
    ([("llama.vocab_size", 99)], [], "llama.vocab_size=99: expected 260"),
    ([("split.count", 3)], [], "in 3 files, expected one whole model"),
    ([("general.type", "adapter")], [], "general.type='adapter'"),
    ([("llama.head_counts", [4, 2])], [], r"llama.head_counts=array.*: not supported"),
    ([], [("rope_freqs.weight", np.ones(3, np.float32))], "stretch has 3 numbers, exp"),
    ([], [("rope_freqs.weight", np.zeros(4, np.float32))], "expected positive numbers"),
]


@pytest.mark.parametrize(("extra", "tensors", "message"), GGUF_REFUSED)
def test_a_gguf_file_that_would_be_loaded_wrongly_is_refused(
    extra, tensors, message, tmp_path
):
    theirs = build("llama")
    tensors = [*translate(theirs), *tensors]
    path = write_gguf(tmp_path / "x.gguf", theirs, extra=extra, tensors=tensors)
    with pytest.raises(FileError, match=message):
        load(path)


def test_an_unknown_architecture_or_tokenizer_is_refused(tmp_path):
    theirs = build("llama")
    good = write_gguf(tmp_path / "x.gguf", theirs).read_bytes()
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(
        good.replace(
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama",
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0bloom",
        )
    )
    with pytest.raises(
        FileError, match=r"general.architecture='bloom', expected one of"
    ):
        load(bad)
    bad.write_bytes(good.replace(b"gpt-2", b"gpt-3"))
    with pytest.raises(FileError, match=r"pre='gpt-3': .*read_weights"):
        load(bad)
    config, weights = read_weights(bad)  # the weights alone are fine
    assert [(n, x.shape) for n, x in weights.items()] == list(config.shapes())


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "x.pth"])
def test_pickles_are_never_opened(name, tmp_path):
    theirs = build("gpt2")
    folder = save(theirs, tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), folder / name)
    for path in (folder, folder / name):
        with pytest.raises(FileError, match=rf"{name} is a pickle.*never.*safetensors"):
            load(path)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(FileError, match="there is no file or folder"):
        load(tmp_path / "nothing")
    with pytest.raises(FileError, match=r"holds no model.safetensors"):
        load(tmp_path)
    folder = save(build("gpt2"), tmp_path)
    with pytest.raises(FileError, match="Give the folder that contains"):
        load(folder / "model.safetensors")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileError, match=r"no tokenizer.json.*read_weights\(path\)"):
        load(folder)
    read_weights(folder)
    (folder / "config.json").write_text("[1, 2]")
    with pytest.raises(FileError, match=r"config.json holds \[1, 2\], expected an obj"):
        load(folder)
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(FileError, match=r"config.json cannot be read"):
        load(folder)


def test_an_index_must_not_lead_out_of_its_folder(tmp_path):
    theirs = build("gpt2")
    (save(theirs, tmp_path) / "model.safetensors").rename(
        tmp_path / "other.safetensors"
    )
    folder = save(theirs, tmp_path / "inner")
    (folder / "model.safetensors").unlink()
    for name in ("../other.safetensors", "gone.safetensors", 3):
        index = json.dumps({"weight_map": {"wte.weight": name}})
        (folder / "model.safetensors.index.json").write_text(index)
        with pytest.raises(FileError, match=r"names .*, which is not there"):
            load(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(FileError, match="has no weight_map"):
        load(folder)


def test_missing_unexpected_and_wrong_tensors_are_named(tmp_path):
    folder = save(build("qwen3"), tmp_path)
    file = folder / "model.safetensors"
    state = load_file(file)
    key = "model.layers.1.self_attn.k_proj.weight"

    def refuse(change, message):
        save_file({n: x for n, x in {**state, **change}.items() if x is not None}, file)
        with pytest.raises(FileError, match=message):
            load(folder)

    refuse(
        {key: None}, r"blocks.1.attention.qkv.weight should be \(96, 32\), but .*v_p"
    )
    refuse(
        {key: torch.zeros(24, 31)}, r"should be .* \(48, 32\), \(24, 31\), \(24, 32\)"
    )
    refuse({key: torch.tensor(1.0)}, r"should be .*\(48, 32\), \(\), \(24, 32\)")
    refuse({key: state[key].to(torch.int8)}, "k_proj.weight is torch.int8, expected")
    refuse({key: state[key].to(torch.float8_e4m3fn)}, "k_proj.weight is torch.float8")
    refuse(
        {"model.layers.1.self_attn.q_norm.weight": None}, "1 of .* weights are missi"
    )
    refuse(
        {"model.norm.bias": torch.zeros(32)}, "1 tensors do not belong .*model.norm.b"
    )
    refuse(
        {key[6:]: torch.zeros(24, 32)}, "layers.1.self_attn.k_proj.weight .*the same"
    )
    refuse({"score.weight": torch.zeros(3)}, "1 tensors do not belong .*score.weight")


# --- damage --------------------------------------------------------------------------


def attempt(path):
    """Load a damaged model: it loads, or it is refused with words."""
    try:
        model, _ = load(path)
    except FileError as error:
        assert len(str(error)) > 20
        return False
    assert model.config.layers == 2
    return True


def flip(data, at):
    """Return the bytes with one bit fallen over."""
    return (
        data[: at // 8] + bytes([data[at // 8] ^ (1 << at % 8)]) + data[at // 8 + 1 :]
    )


def test_a_damaged_gguf_file_loads_or_is_refused(rng, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", build("llama"))
    data = path.read_bytes()
    header = min(entry.start for entry in open_gguf(path).entries.values())
    for at in [*range(33), *rng.integers(0, len(data), size=150)]:
        path.write_bytes(data[:at])
        assert not attempt(path), at
    loaded = 0
    for at in rng.integers(0, 8 * header, size=300):
        path.write_bytes(flip(data, int(at)))
        loaded += attempt(path)
    assert 0 < loaded < 300
    path.write_bytes(rng.bytes(5_000))
    assert not attempt(path)
    path.write_bytes(b"GGUF" + rng.bytes(5_000))
    assert not attempt(path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_folder_loads_or_is_refused(name, rng, tmp_path):
    path = save(build("llama"), tmp_path) / name
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = 8 + size if name == "model.safetensors" else len(data)
    for at in [*range(20), *rng.integers(0, len(data) - 2, size=60)]:
        path.write_bytes(data[:at])
        assert not attempt(tmp_path), at
    for at in rng.integers(0, 8 * header, size=150):
        path.write_bytes(flip(data, int(at)))
        attempt(tmp_path)


def test_settings_of_any_type_are_taken_or_refused(tmp_path):
    values = [
        None,
        True,
        -1,
        0,
        3,
        2**70,
        0.5,
        float("nan"),
        "",
        "x",
        [],
        [3],
        {},
        {"a": 1},
    ]
    refused = 0
    for case in ("gpt2", "mistral", "qwen2 sliding", "llama3", "yarn gain"):
        settings = build(case).config.to_dict()
        rope = settings.get("rope_parameters", {})
        changes = [{key: value} for key in settings for value in values]
        changes += [
            {"rope_parameters": {**rope, key: value}}
            for key in rope
            for value in values
        ]
        untold = {"layer_types": None, "max_window_layers": 1}
        changes += [{**x, **untold} for x in changes]
        for change in changes:
            try:
                read_config({**settings, **change})
            except FileError:
                refused += 1
    assert refused > 300
    scaled = {"extra": SCALED["linear"]}
    for how in ({}, {"pieces": True}, scaled):
        file = open_gguf(write_gguf(tmp_path / "x.gguf", build("llama"), **how))
        shapes = {name: entry.shape for name, entry in file.entries.items()}
        for key in file.settings:
            for value in [*values, np.ones(2), np.ones(0, int)]:
                try:
                    read_gguf_config({**file.settings, key: value}, shapes)
                    build_gguf_tokenizer({**file.settings, key: value})
                except FileError:
                    refused += 1
    assert refused > 600


def test_absurd_counts_are_refused_at_once(tmp_path):
    path = tmp_path / "x.gguf"

    def head(*parts, tensors=1, keys=1):
        return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + b"".join(parts)

    def text(x):
        return struct.pack("<Q", len(x)) + x

    def tensor(*shape, name=b"x", kind=0, offset=0):
        axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        return text(name) + axes + struct.pack("<IQ", kind, offset)

    huge = 2**62
    array = text(b"a") + struct.pack("<I", 9)
    filled = bytes(4_096)
    wrong = {
        "the magic needs 4 bytes": b"GG",
        "starts with b'FUGG', expected b'GGUF'": b"FUGG" + filled,
        "is GGUF version 1, expected 2 or 3": b"GGUF\1\0\0\0" + filled,
        "is GGUF version 50331648": b"GGUF\0\0\0\3" + filled,  # big-endian
        "a key needs 8 bytes": head(keys=huge),
        "the name of a tensor needs 8 bytes": head(keys=0, tensors=huge),
        f"a key needs {huge} bytes": head(struct.pack("<Q", huge)),
        "a is of the unknown kind 99": head(text(b"a"), struct.pack("<I", 99)),
        "a needs 4611686018427387904 bytes": head(array, struct.pack("<IQ", 0, huge)),
        "a needs 8 bytes": head(array, struct.pack("<IQ", 8, huge)),
        "a is an array of the unknown kind 9": head(array, struct.pack("<IQ", 9, huge)),
        "a key is not UTF-8 text": head(text(b"\xff\xfe")),
        "the key 'a' occurs twice": head(
            *[text(b"a") + struct.pack("<IB", 0, 1)] * 2, keys=2
        ),
        "x has 5 axes": head(tensor(1, 1, 1, 1, 1), keys=0),
        "x has the shape (), expected rows of": head(tensor(), keys=0),
        "x has the shape (0,)": head(tensor(0), keys=0),
        "x has the shape (33,), expected rows of a multiple of 32": head(
            tensor(33, kind=8), keys=0
        ),
        "x is of the unknown kind 77": head(tensor(4, kind=77), keys=0),
        f"needs {4 * huge} bytes at 64": head(tensor(huge), keys=0),
        f"needs 16 bytes at {huge + 64}": head(tensor(4, offset=huge), keys=0),
        "the tensor x occurs twice": head(
            tensor(4), tensor(4), filled, keys=0, tensors=2
        ),
        "its tensors overlap": head(
            tensor(1_000), tensor(1_000, name=b"y"), filled, keys=0, tensors=2
        ),
    }
    start = time.perf_counter()
    for message, data in wrong.items():
        path.write_bytes(data)
        with pytest.raises(FileError) as caught:
            load(path)
        assert message in str(caught.value), (message, str(caught.value))
    path.write_bytes(b"")
    with pytest.raises(FileError, match="cannot be read"):
        load(path)
    assert time.perf_counter() - start < 5


# --- a real model --------------------------------------------------------------------


def test_smollm_loads_in_seconds_and_in_half_precision(smollm):
    start = time.process_time()
    model, _ = load(smollm, dtype=torch.bfloat16)
    assert time.process_time() - start < 15  # 2 on a machine at rest
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16}
