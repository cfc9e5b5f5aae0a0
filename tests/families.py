"""Tiny models of many families: what a lens on running models is tried on.

An entry builds a model with random weights and the inputs to call it with, and says
which of its modules attend, in the order in which they do, and through which door:

    sdpa      torch.nn.functional.scaled_dot_product_attention
    mha       torch.nn.functional.multi_head_attention_forward
    flex      torch.nn.attention.flex_attention.flex_attention
    kernel    the fused kernel itself, torch.ops.aten: regard's own models
    softmax   matmul, softmax of scores (B, H, Nq, Nk), matmul
    pieces    softmaxes of parts or bands of the scores, none of the whole matrix
    hidden    exponentials written by hand: no call tells that this is attention

`eager` gives the weights (B, H, Nq, Nk) of every call, from a copy of the model that
writes them down. Weights are far from their start, so that attention is far from even.
"""

import copy
import os
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention  # at import, on purpose
from torch.overrides import TorchFunctionMode

from regard.nn.attention import MultiHeadAttention
from regard.nn.decoder import CausalTransformer
from regard.plain.config import Config

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Family:
    name: str
    kind: str  # decoder, encoder, encoder-decoder, vision, audio, multimodal, module
    build: Callable[[], tuple[nn.Module, Inputs]]  # call it as model(**inputs)
    layers: tuple[str, ...]  # the attention module of every call, in order
    doors: tuple[str, ...]  # of every call
    eager: Callable[[nn.Module, Inputs], list[Tensor]] | None
    note: str = ""

    @property
    def calls(self):
        return len(self.layers)


@contextmanager
def quiet(seed=0):
    """Draw from a seed and warn of nothing, and leave both as they were."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            yield
    finally:
        transformers.logging.set_verbosity(level)


def settle(model, inputs, *, train=False):
    """Return both, the weights moved and the model run: some things warn once."""
    with torch.no_grad():
        for module in model.modules():
            noise = 1.0 if isinstance(module, nn.Embedding) else 0.2
            for weight in module.parameters(recurse=False):
                weight.add_(torch.randn_like(weight), alpha=noise)
        model.train(train)(**inputs)
    return model, inputs


def real_rows(inputs, weights):
    """Return (B, Nq), False at the queries that are padding."""
    rows = torch.ones(weights.shape[0], weights.shape[-2], dtype=torch.bool)
    masks = {"attention_mask": 1, "src_key_padding_mask": 0}  # and what marks a token
    for name, token in masks.items():
        if name in inputs and inputs[name].shape == rows.shape:
            rows &= inputs[name] == token
    return rows


def each(*names):
    """Return the names of two layers, number by number."""
    return tuple(name.format(i) for i in range(2) for name in names)


# --- inputs, drawn when a model is built ----------------------------------------------


def text(n=16):
    return {"input_ids": torch.randint(3, 90, (2, n))}


def padded(side, n=16):
    """Return two texts, the second of them five tokens shorter."""
    ids, mask = text(n)["input_ids"], torch.ones(2, n, dtype=torch.long)
    gap = slice(0, 5) if side == "left" else slice(n - 5, n)
    ids[1, gap] = mask[1, gap] = 0
    return {"input_ids": ids, "attention_mask": mask}


def packed():
    """Return texts of two documents each, told by their positions alone."""
    at = torch.cat([torch.arange(7), torch.arange(9)]).expand(2, -1)
    return {**text(), "position_ids": at, "use_cache": False}


def image():
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


def answer():
    return {"decoder_input_ids": torch.randint(3, 90, (2, 8))}


def pictured(n=16):
    """Return texts that begin with the n patches of an image."""
    ids = torch.cat([torch.full((2, n), 99), text(8)["input_ids"]], 1)
    return {"input_ids": ids, **image()}


def two_pictures():
    """Return one text with two images of 16 patches, which count as 4 tokens each."""
    ids = text(20)["input_ids"][:1]
    for start in (2, 9):
        ids[0, start : start + 6] = torch.tensor([91, 93, 93, 93, 93, 92])
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(32, 96),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": (ids == 93).int(),
    }


# --- Hugging Face transformers --------------------------------------------------------


class Softmaxes(TorchFunctionMode):
    """Keep every softmax over four axes: the weights of an eager model."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is F.softmax and result.ndim == 4:
            self.seen.append(result)
        return result


def mha_weights(model, inputs):
    """Return the weights of every nn.MultiheadAttention of a model, head by head."""
    seen, twin = [], copy.deepcopy(model)

    def ask(module, args, kwargs):
        return args, {**kwargs, "need_weights": True, "average_attn_weights": False}

    def keep(module, args, output):
        weights = output[1].detach()
        seen.append(weights if weights.ndim == 4 else weights[None])

    found = [m for m in twin.modules() if isinstance(m, nn.MultiheadAttention)]
    for module in found:
        module.register_forward_pre_hook(ask, with_kwargs=True)
        module.register_forward_hook(keep)
    with quiet(), torch.enable_grad():  # gradients keep it off the fast path
        if found:
            twin(**inputs)
    return seen


def make_twin(model):
    """Return a transformers model with the same weights that writes attention down."""
    with quiet():
        config = copy.deepcopy(model.config)
        twin = type(model)._from_config(config, attn_implementation="eager")
        twin.load_state_dict(model.state_dict())
    return twin.train(model.training)


def read_own(output, seen):
    return list(output.attentions)


def read_pair(output, seen):
    """Read encoder, then self- and cross-attention of each layer of the decoder."""
    both = zip(output.decoder_attentions, output.cross_attentions, strict=True)
    return [*output.encoder_attentions, *(w for pair in both for w in pair)]


def read_sides(output, seen):
    sides = output.vision_model_output, output.text_model_output
    return [w for side in sides for w in side.attentions]


def read_cross_first(output, seen):
    return [*output.cross_attentions, *output.attentions]


def read_twice(output, seen):
    return [w for w in output.attentions for _ in range(2)]


def read_band(output, seen):
    """Lay out (B, H, N, 2 w + 1), the keys around each query, as (B, H, N, N)."""
    weights = []
    for band in output.attentions:
        *_, n, width = band.shape
        full = band.new_zeros(*band.shape[:2], n, n)
        for c in range(width):
            off = c - width // 2
            rows = slice(max(0, -off), n - max(0, off))
            full.diagonal(off, 2, 3).copy_(band[:, :, rows, c])
        weights.append(full)
    return weights


def read_softmaxes(output, seen):
    return seen


def hugging(
    name, model, options, *, kind, inputs, layers, door="sdpa", read=read_own, note=""
):
    """Return the entry of a model of transformers, by the name of its class."""

    def build():
        with quiet():
            given, cls = inputs(), getattr(transformers, model)
            config = cls.config_class(**copy.deepcopy(options))
            return settle(cls(config), given)

    def eager(built, given):
        with quiet(), torch.no_grad(), Softmaxes() as record:
            output = make_twin(built)(**given, output_attentions=True)
        return [*read(output, record.seen), *mha_weights(built, given)]

    doors = door if isinstance(door, tuple) else (door,) * len(layers)
    return Family(name, kind, build, layers, doors, eager if read else None, note)


def sized(numbers, base=None):
    """Return options with some more, written "name=1 other=2"."""
    pairs = (word.split("=") for word in numbers.split())
    return {**(base or {}), **{name: int(number) for name, number in pairs}}


TOKENS = sized("vocab_size=100 pad_token_id=0 bos_token_id=1 eos_token_id=2")
SIZES = sized(
    "hidden_size=32 intermediate_size=48 num_hidden_layers=2 num_attention_heads=4"
)
TEXT = sized("max_position_embeddings=64", TOKENS | SIZES)
GROUPED = sized("num_key_value_heads=2", TEXT)
OPENAI = sized("n_positions=64 n_embd=32 n_layer=2 n_head=4", TOKENS)
IMAGE = sized("image_size=16 patch_size=4", SIZES)
WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = sized("head_dim=8 query_pre_attn_scalar=16", GROUPED | WINDOW)
PAIR = sized(
    "d_model=32 encoder_layers=2 decoder_layers=2 encoder_attention_heads=4 "
    "decoder_attention_heads=4 encoder_ffn_dim=48 decoder_ffn_dim=48 "
    "decoder_start_token_id=2",
    TOKENS,
)
PAIR_LAYERS = (
    *each("model.encoder.layers.{}.self_attn"),
    *each("model.decoder.layers.{}.self_attn", "model.decoder.layers.{}.encoder_attn"),
)
SELF = each("model.layers.{}.self_attn")
BERT = each("encoder.layer.{}.attention.self")
TOWER = each("encoder.layers.{}.self_attn")
SEEING = (
    *each("model.vision_tower.encoder.layers.{}.self_attn"),
    *each("model.language_model.layers.{}.self_attn"),
)

decoder = partial(hugging, kind="decoder", inputs=text, layers=SELF)
llama = partial(decoder, model="LlamaForCausalLM", options=GROUPED)
encoder = partial(hugging, kind="encoder", inputs=text, layers=BERT)
pair = partial(hugging, kind="encoder-decoder", layers=PAIR_LAYERS, read=read_pair)
vision = partial(hugging, kind="vision", inputs=image)
multimodal = partial(hugging, kind="multimodal")

DECODERS = (
    decoder("gpt2", "GPT2LMHeadModel", OPENAI, layers=each("transformer.h.{}.attn")),
    llama("llama", note="four heads share two of keys"),
    llama(
        "llama-left",
        inputs=partial(padded, "left"),
        note="queries of the padding see no key: 0 comes out, eager has even weights",
    ),
    llama("llama-right", inputs=partial(padded, "right")),
    llama("llama-packed", inputs=packed),
    llama(
        "llama-eager",
        options={**GROUPED, "attn_implementation": "eager"},
        door="softmax",
    ),
    decoder("mistral", "MistralForCausalLM", sized("sliding_window=5", GROUPED)),
    decoder(
        "mixtral",
        "MixtralForCausalLM",
        sized("num_local_experts=4", GROUPED),
        note="the softmax of its router is no attention",
    ),
    decoder("qwen2", "Qwen2ForCausalLM", GROUPED, note="biases of q, k and v"),
    decoder(
        "qwen3",
        "Qwen3ForCausalLM",
        sized("head_dim=16", GROUPED),
        note="norms of q and k; the heads together are wider than the model",
    ),
    decoder(
        "qwen3-next",
        "Qwen3NextForCausalLM",
        sized(
            "head_dim=8 linear_num_value_heads=4 linear_num_key_heads=2 "
            "linear_key_head_dim=8 linear_value_head_dim=8 num_experts=2 "
            "num_experts_per_tok=1 moe_intermediate_size=16 "
            "shared_expert_intermediate_size=16",
            {**GROUPED, "layer_types": ["linear_attention", "full_attention"]},
        ),
        layers=SELF[1:],
        note="layer 0 is linear attention, which has no weights",
    ),
    decoder(
        "gemma2",
        "Gemma2ForCausalLM",
        {**GEMMA, "attn_logit_softcapping": 2.0},
        door="softmax",
        note="scores are capped, 2 tanh(s / 2); the scale is not that of the width",
    ),
    decoder("gemma3", "Gemma3ForCausalLM", GEMMA),
    decoder(
        "gpt-oss",
        "GptOssForCausalLM",
        sized("head_dim=8 num_local_experts=4 num_experts_per_tok=2", GROUPED | WINDOW),
        door="softmax",
        note="a sink takes part of every row: rows sum to less than 1",
    ),
    decoder(
        "neox", "GPTNeoXForCausalLM", TEXT, layers=each("gpt_neox.layers.{}.attention")
    ),
    decoder(
        "opt",
        "OPTForCausalLM",
        sized("ffn_dim=48 word_embed_proj_dim=32", TEXT),
        layers=each("model.decoder.layers.{}.self_attn"),
    ),
    decoder(
        "gptj",
        "GPTJForCausalLM",
        sized("rotary_dim=4", OPENAI),
        layers=each("transformer.h.{}.attn"),
        door="softmax",
    ),
    decoder(
        "gpt-neo",
        "GPTNeoForCausalLM",
        sized(
            "hidden_size=32 num_layers=2 num_heads=4 window_size=5 "
            "max_position_embeddings=64",
            {**TOKENS, "attention_types": [[["global", "local"], 1]]},
        ),
        layers=each("transformer.h.{}.attn.attention"),
        door="softmax",
        note="scores are not scaled",
    ),
    decoder(
        "bloom",
        "BloomForCausalLM",
        sized("hidden_size=32 n_layer=2 n_head=4", TOKENS),
        layers=each("transformer.h.{}.self_attention"),
        door="softmax",
        note="ALiBi",
    ),
    decoder(
        "falcon",
        "FalconForCausalLM",
        {**TEXT, "multi_query": True},
        layers=each("transformer.h.{}.self_attention"),
        note="one head of keys for all; broadcast, without enable_gqa",
    ),
    decoder(
        "mpt",
        "MptForCausalLM",
        sized("d_model=32 n_heads=4 n_layers=2 max_seq_len=64", TOKENS),
        layers=each("transformer.blocks.{}.attn"),
        door="softmax",
        note="ALiBi",
    ),
    decoder(
        "deepseek-v3",
        "DeepseekV3ForCausalLM",
        sized(
            "num_key_value_heads=4 q_lora_rank=16 kv_lora_rank=16 qk_nope_head_dim=8 "
            "qk_rope_head_dim=4 v_head_dim=8 n_routed_experts=4 num_experts_per_tok=2 "
            "n_group=1 topk_group=1 first_k_dense_replace=1 moe_intermediate_size=16",
            TEXT,
        ),
        note="heads of q and k are 12 wide, those of v 8",
    ),
    decoder("phi", "PhiForCausalLM", TEXT),
    decoder("phi3", "Phi3ForCausalLM", GROUPED, note="q, k and v are one matrix"),
    decoder(
        "llama4",
        "Llama4ForCausalLM",
        sized(
            "head_dim=8 intermediate_size_mlp=48 attention_chunk_size=5 "
            "num_local_experts=2 interleave_moe_layer_step=2",
            {**GROUPED, "no_rope_layers": [1, 0]},
        ),
        note="layer 0 sees chunks of 5 tokens, layer 1 everything, without positions",
    ),
    decoder(
        "diffllama",
        "DiffLlamaForCausalLM",
        GROUPED,
        layers=tuple(name for name in SELF for _ in range(2)),
        read=read_twice,
        note="two calls a layer on the same q and k, with halves of v",
    ),
    decoder(
        "jamba",
        "JambaForCausalLM",
        sized(
            "attn_layer_offset=1 attn_layer_period=2 num_experts=2 mamba_d_state=4 "
            "mamba_dt_rank=4",
            GROUPED,
        ),
        layers=SELF[1:],
        note="layer 0 is a Mamba layer",
    ),
    decoder(
        "mamba2",
        "Mamba2ForCausalLM",
        sized(
            "hidden_size=32 state_size=8 num_hidden_layers=2 num_heads=4 head_dim=16 "
            "n_groups=1 chunk_size=8",
            TOKENS,
        ),
        layers=(),
        read=None,
        note="no attention",
    ),
    decoder(
        "reformer",
        "ReformerModel",
        sized(
            "feed_forward_size=48 attention_head_size=8 num_buckets=2 hash_seed=0 "
            "lsh_attn_chunk_length=4 local_attn_chunk_length=4",
            {
                **TEXT,
                "attn_layers": ["local", "lsh"],
                "axial_pos_embds": False,
                "is_decoder": True,
            },
        ),
        layers=each("encoder.layers.{}.attention.self_attention"),
        door="hidden",
        read=None,
        note="exp(s - logsumexp s) in chunks, of sorted keys in layer 1",
    ),
)

ENCODERS = (
    encoder("bert", "BertModel", TEXT, inputs=partial(padded, "right")),
    encoder(
        "distilbert",
        "DistilBertModel",
        sized("dim=32 hidden_dim=48 n_layers=2 n_heads=4", TEXT),
        layers=each("transformer.layer.{}.attention"),
    ),
    encoder("roberta", "RobertaModel", TEXT, inputs=partial(padded, "right")),
    encoder("electra", "ElectraModel", sized("embedding_size=16", TEXT)),
    encoder(
        "modernbert",
        "ModernBertModel",
        sized(
            "local_attention=6 global_attn_every_n_layers=2 cls_token_id=1 "
            "sep_token_id=2",
            TEXT,
        ),
        layers=each("layers.{}.attn"),
        note="layer 1 sees three tokens to either side",
    ),
    encoder(
        "deberta-v2",
        "DebertaV2Model",
        sized(
            "max_relative_positions=8 position_buckets=4",
            {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        ),
        inputs=partial(padded, "right"),
        door="softmax",
        note="scores add up from content and positions; parts are scripted",
    ),
    encoder(
        "albert",
        "AlbertModel",
        sized("embedding_size=16", TEXT),
        layers=("encoder.albert_layer_groups.0.albert_layers.0.attention",) * 2,
        note="one module is both layers",
    ),
    encoder(
        "xlnet",
        "XLNetModel",
        sized("d_model=32 n_layer=2 n_head=4 d_inner=48", TOKENS),
        layers=each("layer.{}.rel_attn"),
        door="softmax",
        note="scores add up from content and positions",
    ),
    encoder(
        "longformer",
        "LongformerModel",
        sized("attention_window=8", TEXT),
        door="pieces",
        read=read_band,
        note="the softmax is over (B, N, H, 9), four keys to either side",
    ),
    encoder(
        "bigbird",
        "BigBirdModel",
        sized(
            "block_size=2 num_random_blocks=1",
            {**TEXT, "attention_type": "block_sparse"},
        ),
        inputs=partial(text, 24),
        door="pieces",
        read=None,
        note="five softmaxes a layer; it sees block 0 twice and reports it once",
    ),
    encoder(
        "perceiver",
        "PerceiverModel",
        sized(
            "num_latents=6 d_latents=32 d_model=24 num_blocks=1 "
            "num_self_attends_per_block=2 num_self_attention_heads=4 "
            "num_cross_attention_heads=4"
        ),
        inputs=lambda: {"inputs": torch.randn(2, 10, 24)},
        layers=(
            "encoder.cross_attention.attention.self",
            *each("encoder.self_attends.{}.attention.self"),
        ),
        door="softmax",
        read=read_cross_first,
        note="six learned queries look at ten inputs",
    ),
    pair(
        "t5",
        "T5ForConditionalGeneration",
        sized(
            "d_model=32 d_kv=8 d_ff=48 num_layers=2 num_heads=4 "
            "relative_attention_num_buckets=8 relative_attention_max_distance=12",
            TOKENS,
        ),
        inputs=lambda: {**text(), **answer()},
        layers=(
            *each("encoder.block.{}.layer.0.SelfAttention"),
            *each(
                "decoder.block.{}.layer.0.SelfAttention",
                "decoder.block.{}.layer.1.EncDecAttention",
            ),
        ),
        note="a learned bias; scores are not scaled",
    ),
    pair(
        "bart",
        "BartForConditionalGeneration",
        sized("max_position_embeddings=64", PAIR),
        inputs=lambda: {**padded("right"), **answer()},
    ),
)

SENSES = (
    pair(
        "whisper",
        "WhisperForConditionalGeneration",
        sized("num_mel_bins=8 max_source_positions=16 max_target_positions=16", PAIR),
        inputs=lambda: {"input_features": torch.randn(2, 8, 32), **answer()},
        kind="audio",
    ),
    hugging(
        "wav2vec2",
        "Wav2Vec2Model",
        sized(
            "num_feat_extract_layers=2 num_conv_pos_embeddings=4 "
            "num_conv_pos_embedding_groups=2",
            {
                **TOKENS,
                **SIZES,
                "conv_dim": [16, 16],
                "conv_stride": [5, 4],
                "conv_kernel": [10, 8],
            },
        ),
        inputs=lambda: {"input_values": torch.randn(2, 400)},
        kind="audio",
        layers=each("encoder.layers.{}.attention"),
    ),
    vision("vit", "ViTModel", IMAGE, layers=each("layers.{}.attention")),
    vision("dinov2", "Dinov2Model", IMAGE, layers=each("encoder.layer.{}.attention")),
    vision(
        "swin",
        "SwinModel",
        sized(
            "image_size=16 patch_size=2 embed_dim=16 window_size=4",
            {"depths": [2], "num_heads": [2]},
        ),
        layers=each("encoder.layers.0.blocks.{}.attention"),
        read=read_softmaxes,
        note="a batch of 2 images is one of 8 windows; shifted in the second layer",
    ),
    vision(
        "siglip",
        "SiglipVisionModel",
        IMAGE,
        layers=(*TOWER, "head.attention"),
        door=("sdpa", "sdpa", "mha"),
        note="the pooling head is an nn.MultiheadAttention: one query, 16 keys",
    ),
    multimodal(
        "clip",
        "CLIPModel",
        {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16},
        inputs=lambda: {**text(), **image()},
        layers=tuple(f"{side}_model.{n}" for side in ("vision", "text") for n in TOWER),
        read=read_sides,
        note="the image first",
    ),
    multimodal(
        "llava",
        "LlavaForConditionalGeneration",
        {
            "text_config": {**GROUPED, "model_type": "llama"},
            "vision_config": {**IMAGE, "model_type": "clip_vision_model"},
            "image_token_index": 99,
            "vision_feature_layer": -1,
        },
        inputs=pictured,
        layers=SEEING,
        read=read_softmaxes,
    ),
    multimodal(
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {**GROUPED, "model_type": "gemma", "head_dim": 8},
            "vision_config": {
                **IMAGE,
                "model_type": "siglip_vision_model",
                "vision_use_head": False,
            },
            "image_token_index": 99,
            "projection_dim": 32,
        },
        inputs=lambda: {
            **pictured(),
            "token_type_ids": (torch.arange(24) >= 20).long().expand(2, -1),
        },
        layers=SEEING,
        read=read_softmaxes,
        note="the first 20 tokens see each other, the rest is causal",
    ),
    multimodal(
        "qwen2-vl",
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": {
                **GROUPED,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10_000.0,
                    "mrope_section": [1, 1, 2],
                },
            },
            "vision_config": sized(
                "depth=2 embed_dim=32 hidden_size=32 num_heads=4 mlp_ratio=2 "
                "patch_size=4"
            ),
            "vision_start_token_id": 91,
            "vision_end_token_id": 92,
            "image_token_id": 93,
        },
        inputs=two_pictures,
        layers=(
            *(f"model.visual.blocks.{i}.attn" for i in (0, 0, 1, 1)),
            *each("model.language_model.layers.{}.self_attn"),
        ),
        read=read_softmaxes,
        note="a layer of the vision tower attends once for every image",
    ),
)


# --- nn.MultiheadAttention and what is made of it -------------------------------------


def native(name, make, inputs, *, kind="module", layers=("",), train=False, note=""):
    """Return the entry of a torch module whose attention is nn.MultiheadAttention."""

    def build():
        with quiet():
            return settle(make(), inputs(), train=train)

    doors = ("mha",) * len(layers)
    return Family(name, kind, build, layers, doors, mha_weights, note)


def multihead(name, given=dict, *, options=None, shape=(2, 12, 32), note=""):
    """Return the entry of one nn.MultiheadAttention, of x to itself unless given."""

    def make():
        return nn.MultiheadAttention(32, 4, **{"batch_first": True, **(options or {})})

    def inputs():
        x = torch.randn(shape)
        return {"query": x, "key": x, "value": x, **given()}

    return native(name, make, inputs, note=note)


def hide_tail(n=12):
    """Return (2, n), True at the last five keys of the second sequence."""
    return torch.arange(n) >= torch.tensor([[n], [n - 5]])


def hide_future(n=12, device=None):
    return torch.ones(n, n, dtype=torch.bool, device=device).triu(1)


def make_layer(cls, dropout):
    return cls(32, 4, 48, dropout=dropout, batch_first=True)


def make_encoder(dropout=0.0):
    return nn.TransformerEncoder(make_layer(nn.TransformerEncoderLayer, dropout), 2)


def make_decoder():
    return nn.TransformerDecoder(make_layer(nn.TransformerDecoderLayer, 0.0), 2)


def source():
    return {"src": torch.randn(2, 12, 32)}


stack = partial(native, kind="encoder", layers=each("layers.{}.self_attn"))

NATIVE = (
    multihead("mha", note="the weights it returns are means over the heads"),
    multihead("mha-no-weights", lambda: {"need_weights": False}),
    multihead("mha-by-head", lambda: {"average_attn_weights": False}),
    multihead("mha-tokens-first", options={"batch_first": False}, shape=(12, 2, 32)),
    multihead(
        "mha-tokens-first-no-weights",
        lambda: {"need_weights": False},
        options={"batch_first": False},
        shape=(12, 2, 32),
    ),
    multihead("mha-padding", lambda: {"key_padding_mask": hide_tail()}),
    multihead(
        "mha-padding-no-weights",
        lambda: {"key_padding_mask": hide_tail(), "need_weights": False},
    ),
    multihead("mha-float-mask", lambda: {"attn_mask": torch.randn(12, 12)}),
    multihead("mha-bool-mask", lambda: {"attn_mask": hide_future()}),
    multihead(
        "mha-head-mask",
        lambda: {"attn_mask": torch.randn(8, 12, 12), "need_weights": False},
        note="a mask (B H, N, N)",
    ),
    multihead(
        "mha-causal",
        lambda: {"attn_mask": hide_future(), "is_causal": True, "need_weights": False},
        note="the kernel is told is_causal, and no mask",
    ),
    multihead("mha-unbatched", shape=(12, 32)),
    multihead(
        "mha-unbatched-no-weights", lambda: {"need_weights": False}, shape=(12, 32)
    ),
    multihead(
        "mha-cross",
        lambda: {"key": torch.randn(2, 7, 16), "value": torch.randn(2, 7, 24)},
        options={"kdim": 16, "vdim": 24},
    ),
    multihead(
        "mha-more-keys",
        options={"add_bias_kv": True, "add_zero_attn": True},
        note="two keys more than tokens: a learned one and a zero",
    ),
    stack(
        "torch-encoder",
        make_encoder,
        source,
        note="without gradients one opaque kernel runs a layer, the fast path",
    ),
    stack(
        "torch-encoder-padding",
        make_encoder,
        lambda: {**source(), "src_key_padding_mask": hide_tail()},
        note="nested tensors: 0 at the padding, unless a mode stops the fast path",
    ),
    stack(
        "torch-encoder-causal",
        make_encoder,
        lambda: {**source(), "mask": hide_future(), "is_causal": True},
    ),
    stack("torch-encoder-train", make_encoder, source, train=True),
    replace(
        stack("torch-encoder-dropout", partial(make_encoder, 0.1), source, train=True),
        eager=None,
        note="random: seed before each call",
    ),
    native(
        "torch-decoder",
        make_decoder,
        lambda: {
            "tgt": torch.randn(2, 8, 32),
            "memory": torch.randn(2, 12, 32),
            "tgt_mask": hide_future(8),
            "memory_key_padding_mask": hide_tail(),
        },
        kind="encoder-decoder",
        layers=each("layers.{}.self_attn", "layers.{}.multihead_attn"),
    ),
)


# --- written by hand, as people do ----------------------------------------------------


def weigh(q, k, bend):
    """Return causal weights (B, H, N, N) of bent scores; heads may share keys."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = bend(q @ k.mT * q.shape[-1] ** -0.5)
    return scores.masked_fill(hide_future(q.shape[-2], q.device), -torch.inf).softmax(
        -1
    )


def same(scores):
    return scores


def cap(scores):
    return 2 * torch.tanh(scores / 2)


def lean(scores):
    """Add a bias that falls with the distance."""
    at = torch.arange(scores.shape[-1], device=scores.device)
    return scores - 0.3 * (at[:, None] - at).abs()


def attend_fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attend_imported(q, k, v):
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def attend_scaled(q, k, v):
    scale = 2 * q.shape[-1] ** -0.5
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def attend_masked(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, ~hide_future(q.shape[-2], q.device))


def attend_leaning(q, k, v):
    n = q.shape[-2]
    bias = lean(q.new_zeros(n, n)).masked_fill(hide_future(n, q.device), -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def attend_grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def attend_flat(q, k, v):
    """Attend with batch and heads in one axis: (B H, N, d)."""
    flat = (x.flatten(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(*flat, is_causal=True).view_as(v)


def attend_flex(q, k, v, score_mod=None):
    n = q.shape[-2]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, "cpu")
    return flex_attention(q, k, v, score_mod, mask)


def attend_flex_capped(q, k, v):
    return attend_flex(q, k, v, lambda score, b, h, i, j: cap(score))


def attend_written(q, k, v):
    scores = torch.matmul(q, k.transpose(-2, -1)) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(hide_future(q.shape[-2], q.device), float("-inf"))
    return torch.matmul(F.softmax(scores, dim=-1), v)


def attend_einsum(q, k, v):
    scores = torch.einsum("bhid,bhjd->bhij", q * q.shape[-1] ** -0.5, k)
    scores = scores + torch.triu(torch.full_like(scores[0, 0], -1e9), 1)
    return torch.einsum("bhij,bhjd->bhid", torch.softmax(scores, -1), v)


def attend_bmm(q, k, v):
    b, h, n, d = q.shape
    q, k, v = (x.reshape(b * h, n, -1) for x in (q, k, v))
    mask = q.new_zeros(n, n).masked_fill(hide_future(n, q.device), -torch.inf)
    scores = torch.baddbmm(mask, q, k.mT, alpha=d**-0.5)
    return torch.bmm(scores.softmax(dim=-1), v).view(b, h, n, -1)


def attend_hidden(q, k, v):
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(
        hide_future(q.shape[-2], q.device), -torch.inf
    )
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True) @ v


class Softmaxed(nn.Module):
    """Attention in a module of its own, with the softmax in another below it."""

    def __init__(self):
        super().__init__()
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, q, k, v):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        scores = scores.masked_fill(hide_future(q.shape[-2], q.device), -torch.inf)
        return self.softmax(scores) @ v


class SelfAttention(nn.Module):
    def __init__(self, attend, kv_heads, d_v):
        super().__init__()
        self.attend = attend() if isinstance(attend, type) else attend
        self.q = nn.Linear(32, 4 * 8)
        self.k = nn.Linear(32, kv_heads * 8)
        self.v = nn.Linear(32, kv_heads * d_v)
        self.kv_heads = kv_heads
        self.out = nn.Linear(4 * d_v, 32)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.attention = attention
        self.feed = nn.Sequential(
            nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)
        )

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.feed(x)


class Tower(nn.Module):
    """A decoder of two layers, as in nanoGPT."""

    def __init__(self, attend, *, kv_heads=4, d_v=8):
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.positions = nn.Parameter(torch.zeros(64, 32))
        self.blocks = nn.Sequential(
            *(Block(SelfAttention(attend, kv_heads, d_v)) for _ in range(2))
        )
        self.head = nn.Linear(32, 100)

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.blocks(x))


def tower(name, attend, *, door="sdpa", kv_heads=4, d_v=8, bend=same, note=""):
    """Return the entry of a Tower; bend is what happens to its scores."""

    def build():
        with quiet():
            made = Tower(attend, kv_heads=kv_heads, d_v=d_v)
            return settle(made, {"tokens": text()["input_ids"]})

    def eager(model, inputs):
        seen, twin = [], copy.deepcopy(model)

        def write(q, k, v):
            seen.append(weigh(q, k, bend))
            return seen[-1] @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)

        for block in twin.blocks:
            del block.attention.attend
            block.attention.attend = write
        with torch.no_grad():
            twin(**inputs)
        return seen

    layers = each("blocks.{}.attention")
    return Family(name, "decoder", build, layers, (door, door), eager, note)


WRITTEN = (
    tower("sdpa", attend_fused),
    tower("sdpa-imported", attend_imported, note="by a name bound at import"),
    tower("sdpa-scaled", attend_scaled, bend=lambda scores: 2 * scores),
    tower("sdpa-bool-mask", attend_masked),
    tower("sdpa-float-mask", attend_leaning, bend=lean),
    tower("sdpa-grouped", attend_grouped, kv_heads=2, note="enable_gqa"),
    tower("sdpa-wide-values", attend_fused, d_v=12, note="d_v is 12, d_k is 8"),
    tower("sdpa-flat", attend_flat, note="batch and heads are one axis: (8, 16, 8)"),
    tower("flex", attend_flex, door="flex", note="on a CPU under no_grad only"),
    tower(
        "flex-capped",
        attend_flex_capped,
        door="flex",
        bend=cap,
        note="on a CPU under no_grad only; a score_mod",
    ),
    tower("written", attend_written, door="softmax"),
    tower("written-einsum", attend_einsum, door="softmax", note="masked with -1e9"),
    tower("written-bmm", attend_bmm, door="softmax", note="scores are (8, 16, 16)"),
    replace(
        tower("written-modules", Softmaxed, door="softmax"),
        layers=each("blocks.{}.attention.attend"),
        note="the softmax is a module below the one that attends",
    ),
    tower("written-hidden", attend_hidden, door="hidden"),
)


def build_regard(position, window):
    sizes = sized("vocabulary=100 context=64 width=32 layers=2 heads=4 kv_heads=2")
    config = Config(**sizes, position=position, window=window)
    with quiet():
        return settle(CausalTransformer(config), {"tokens": text()["input_ids"]})


def regard_weights(model, inputs):
    """Return what the attention of regard says of itself."""
    seen, twin = [], copy.deepcopy(model)

    def look(module, args, kwargs):
        seen.append(module.look(*args, rotation=kwargs["rotation"]).weights)

    for module in twin.modules():
        if isinstance(module, MultiHeadAttention):
            module.register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad():
        twin(**inputs)
    return seen


REGARD = tuple(
    Family(
        name,
        "decoder",
        partial(build_regard, position, window),
        each("blocks.{}.attention"),
        ("kernel", "kernel"),
        regard_weights,
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    )
    for name, position, window in (
        ("regard", "learned", None),
        ("regard-window", "rotary", 5),
    )
)

HUGGING = (*DECODERS, *ENCODERS, *SENSES)  # of transformers
PLAIN = (*NATIVE, *WRITTEN, *REGARD)
FAMILIES = {family.name: family for family in (*HUGGING, *PLAIN)}
