"""Shrink a config of transformers: every width by the same factor, two layers.

Dividing all widths of a config and of its parts by one factor keeps their relations: the
size of a head times the heads, the input of a projector, the channels of a stage. Counts
of heads stay. Layers, experts, words and images become few. The factor is not always
possible (an odd size of a head, the groups of a norm): transformers_models.py tries
several.
"""

import re
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

NUMBERS = (int, list, tuple)
FACTORS = (16, 8, 4, 2, 1)
WORDS = 128  # of a vocabulary
LAYERS = re.compile(
    r"^(num_(hidden_|encoder_|decoder_|hidden_layers_)?layers|n_layers?|layers|depth|"
    r".*encoder_layers|.*decoder_layers|.*num_hidden_layers|.*num_layers|"
    r"num_.*_layers|n_(enc|dec)oder_layers|num_blocks|num_.*attn_blocks|"
    r"resampler_depth|(en|de)coder_depth|.*_num_blocks|num_hidden_groups)$"
)
# counts of something else, or sizes that nothing else follows
KEEP = {
    "coordinate_size",
    "embedding_dimension",
    "head_hidden_size",
    "hidden_size_per_layer_input",
    "max_channels",
    "num_adapter_layers",
    "num_channels",
    "num_conv_layers",
    "num_dense_layers",
    "num_feat_extract_layers",
    "num_lstm_layers",
    "num_residual_layers",
    "out_dim",
    "patch_size",
    "quantization_dim",
    "shape_size",
    "speech_decoder_postnet_layers",
    "speech_decoder_prenet_layers",
}
WIDTH = re.compile(
    r"hidden|width|d_model|d_ff|d_kv|d_inner|d_head|d_embed|embd|embed.*(dim|size)|"
    r"embedding_(dim|size)|(^|_)dims?($|_)|intermediate|ffn|channels?(_list|$)|"
    r"channels?_size|_rank|units$|inner|proj.*(size|dim|inner)|feature_size|filters|"
    r"neck|head_size|state_size|pooler_(hidden|output)_size|bottleneck|"
    r"projection_size|expert_.*size|mamba_d_(state|head)|n_inner|feed_?forward_size|"
    r"out_features_dim|upsample_groups|kv_channels|embed_size|cell_size|mlp_size|kv_proj_dim"
)
NO_WIDTH = re.compile(r"^num_|_act|token|layers|kernel|_idx|index|dropout|prob|ratio")
FEW = {
    "first_k_dense_replace": 1,
    "num_kv_shared_layers": 0,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "num_queries": 10,
    "num_denoising": 4,
    "index_topk": 8,
    "attention_window": 8,
    "max_source_positions": 48,
}
LENGTHS = re.compile(r"position|max_seq|n_ctx|seq_len|max_length|context_length")
EXPERTS = re.compile(r"(num|n)_(.*_)?experts$|num_local_experts|n_routed_experts")
CHOSEN = re.compile(r"experts_per_tok|top_?k_experts|moe_top_?k|num_selected|moe_k$")
STAGES = ("depths", "stage_num_blocks", "blocks_per_stage", "stage_blocks")
PLACES = re.compile(r"ind(ex|ic)e?s$|_idxs$|_layers$|feature_layer|indexes$")


def shrink(config: PreTrainedConfig, factor: int) -> PreTrainedConfig:
    """Shrink a config and its parts in place, and return it."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            shrink(value, factor)
        elif isinstance(value, dict) and name == "rope_parameters":
            put(config, name, shrink_rope(value, factor))
    shrink_layers(config)
    for name, value in list(vars(config).items()):
        if isinstance(value, NUMBERS) and name[0] != "_" and name not in KEEP:
            small = over(value, lambda x, name=name: shrink_number(name, x, factor))
            put(config, name, small)
    shrink_image(config)
    return config


def put(config: Any, name: str, value: Any) -> None:
    """Set a value without the checks of the class, which know no half-done config."""
    config.__dict__[name] = value


def over(value: Any, change: Callable[[int], int]) -> Any:
    """Change every whole number of a value."""
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        return value
    if isinstance(value, int):
        return change(value)
    return type(value)(over(x, change) for x in value)


def shrink_number(name: str, x: int, factor: int) -> int:
    """Return what becomes of one number of a config, by its name."""
    if "vocab" in name and not name.startswith("type_"):
        return min(x, WORDS)
    if EXPERTS.search(name):
        return min(x, 4)
    if CHOSEN.search(name):
        return min(x, 2)
    if name in FEW:
        return min(x, FEW[name])
    if LENGTHS.search(name):
        return min(x, 512)
    is_width = WIDTH.search(name) and not NO_WIDTH.search(name)
    return max(2, x // factor) if is_width and x >= 16 else x


def shrink_rope(value: dict, factor: int) -> dict:
    """Shrink the sections of a rotary embedding of several axes."""
    small = {}
    for name, x in value.items():
        if isinstance(x, dict):
            small[name] = shrink_rope(x, factor)
        elif name == "mrope_section":
            small[name] = [max(1, i // factor) for i in x]
        else:
            small[name] = x
    return small


# --- layers ---------------------------------------------------------------------------


def shrink_layers(config: PreTrainedConfig) -> None:
    """Leave two layers, or one of each kind, and correct what points to layers."""
    own = vars(config)
    stages = {
        len(own[x])
        for x in (*STAGES, "hidden_sizes")
        if isinstance(own.get(x), (list, tuple))
    }
    counts = {
        name: x
        for name, x in own.items()
        if LAYERS.search(name)
        and name not in KEEP
        and isinstance(x, int)
        and not isinstance(x, bool)
        and x > 2
        and x not in stages
    }
    kinds = own.get("layer_types") or own.get("layers_block_type") or []
    if isinstance(kinds, (list, tuple)) and kinds:
        keep = choose_layers(list(kinds))
    else:
        keep = list(range(max(2, len(own.get("_out_indices") or []))))
    for name, count in counts.items():
        fix_places(config, name, count, keep)
    for name in STAGES:
        if isinstance(own.get(name), (list, tuple)):
            put(config, name, type(own[name])(min(x, 2) for x in own[name]))


def choose_layers(kinds: list[str]) -> list[int]:
    """Return the first layer of each kind, two at least, four at most."""
    first = sorted({kinds.index(kind) for kind in kinds})[:4]
    more = [i for i in range(len(kinds)) if i not in first]
    return sorted([*first, *more[: max(0, 2 - len(first))]])


def fix_places(
    config: PreTrainedConfig, name: str, count: int, keep: list[int]
) -> None:
    """Set a count of layers, and cut the lists with an entry for each layer."""
    own, new = vars(config), min(len(keep), count)
    put(config, name, new)
    for other, x in list(own.items()):
        if not isinstance(x, (list, tuple)) or other in ("stage_names", "depths"):
            continue
        if len(x) == count and len(keep) == new and not other.startswith("_out"):
            put(config, other, type(x)(x[i] for i in keep))
        elif PLACES.search(other) and all(isinstance(i, int) for i in x):
            last = new if other.startswith("_out") else new - 1
            at = [i if i < 0 else min(i * new // count, last) for i in x]
            put(config, other, type(x)(at))
    names = own.get("stage_names")
    if isinstance(names, list) and len(names) == count + 1:
        names = names[: new + 1]
        put(config, "stage_names", names)
        at = list(range(new + 1))[-len(own.get("_out_indices") or [0]) :]
        put(config, "_out_indices", at)
        put(config, "_out_features", [names[i] for i in at])


# --- images ---------------------------------------------------------------------------


def shrink_image(config: PreTrainedConfig) -> None:
    """Make an image of a few patches, or of some windows of 4 x 4 patches."""
    own = vars(config)
    size, patch, window = (
        own.get(x) for x in ("image_size", "patch_size", "window_size")
    )
    if not isinstance(size, NUMBERS):
        return
    side = patch * 4 if isinstance(patch, int) and patch > 4 else 64
    if isinstance(window, int) and isinstance(own.get("depths"), (list, tuple)):
        put(config, "window_size", 4)
        side = 128 if patch != 1 else 16
    put(config, "image_size", over(size, lambda x: min(x, side)))


# --- special tokens -------------------------------------------------------------------


def shrink_tokens(config: PreTrainedConfig) -> PreTrainedConfig:
    """Give every special token that is no word any more a number of its own."""
    small: dict[int, int] = {}
    for part in list_parts(config):
        for name, x in list(vars(part).items()):
            if re.search(r"token_(id|index)$|_token$", name):
                words = vars(part).get("vocab_size") or WORDS
                put(part, name, over(x, lambda i, n=words: move_token(i, n, small)))
    return config


def move_token(x: int, words: int, small: dict[int, int]) -> int:
    """Return a word that no other special token has."""
    if 0 <= x < min(words, WORDS):
        return x
    if x < 0:
        return x
    small.setdefault(x, WORDS - 1 - len(small))
    return min(small[x], words - 1)


def join_parts(config: PreTrainedConfig) -> PreTrainedConfig:
    """Let images come out as wide as words are: not all defaults do."""
    try:
        width = getattr(config.get_text_config(), "hidden_size", None)
    except ValueError:  # there are several
        return config
    for part in list_parts(config)[1:]:
        if isinstance(vars(part).get("out_hidden_size"), int) and width:
            put(part, "out_hidden_size", width)
    return config


def list_parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return a config and all configs in it."""
    parts = [x for x in vars(config).values() if isinstance(x, PreTrainedConfig)]
    return [config, *(y for x in parts for y in list_parts(x))]
