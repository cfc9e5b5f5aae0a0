"""Inputs of a model of transformers, from the names of the arguments of its forward.

`list_inputs` yields candidates, the richest first: transformers_models.py takes the
first with which the model runs.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from wild.shrink import list_parts

BATCH, WORDS, PADDING = 2, 12, 4
Inputs = dict[str, Any]


def get(config: PreTrainedConfig, *names: str, default: Any = None) -> Any:
    """Return the first of some values that a config or one of its parts has."""
    for part in list_parts(config):
        for name in names:
            found = getattr(part, name, None)
            if found is not None and not isinstance(found, PreTrainedConfig):
                return found
    return default


def first(x: Any) -> int:
    """Return a number, or the first one of several."""
    while isinstance(x, (list, tuple)):
        x = x[0]
    return int(x)


def draw_words(config: PreTrainedConfig, n: int = WORDS, batch: int = BATCH) -> Tensor:
    """Return words that are no special tokens, if there are enough words."""
    words = int(get(config, "vocab_size", default=100))
    ids = [
        x
        for part in list_parts(config)
        for name, x in vars(part).items()
        if "token" in name and isinstance(x, int)
    ]
    free = [i for i in range(min(words, 100)) if i not in ids and i > 3]
    free = free or list(range(words))
    return torch.tensor(free)[torch.randint(len(free), (batch, n))]


def hide_padding(n: int = WORDS, *, left: bool) -> Tensor:
    """Return a mask of two texts, the second of them shorter."""
    mask = torch.ones(BATCH, n, dtype=torch.long)
    mask[1, slice(0, PADDING) if left else slice(n - PADDING, n)] = 0
    return mask


def draw_image(config: PreTrainedConfig, *, frames: int = 0) -> Tensor:
    """Return two images, or videos."""
    size = get(config, "image_size", "crop_size", "input_size", default=64)
    size = size if isinstance(size, (list, tuple)) else (size, size)
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    channels = first(get(config, "num_channels", "in_channels", default=3))
    many = (frames,) if frames else ()
    return torch.randn(BATCH, *many, channels, first(size[0]), first(size[-1]))


def draw_sound(config: PreTrainedConfig) -> Tensor:
    """Return two sounds: samples, or the frames of a spectrum."""
    mel = get(config, "num_mel_bins", "feature_size", "mel_dim", "input_feat_size")
    if get(config, "conv_kernel", "sampling_rate") is not None or mel is None:
        return torch.randn(BATCH, 4000)
    return torch.randn(BATCH, int(get(config, "max_length", default=64)), int(mel))


def draw_features(config: PreTrainedConfig, *, last: bool) -> Tensor:
    """Return the spectrum of two sounds, mel bins last or first."""
    mel = int(
        get(
            config,
            "num_mel_bins",
            "feature_size",
            "input_feat_size",
            "input_feat_per_channel",
            "input_dim",
            "feature_projection_input_dim",
            default=80,
        )
    )
    frames = 2 * int(get(config, "max_source_positions", default=32) or 32)
    frames = min(frames, 1024)
    return torch.randn(BATCH, *((frames, mel) if last else (mel, frames)))


def draw_boxes(n: int = WORDS) -> Tensor:
    """Return the boxes of words on a page."""
    corner = torch.randint(0, 50, (BATCH, n, 2))
    return torch.cat([corner, corner + torch.randint(1, 50, (BATCH, n, 2))], -1)


def list_inputs(model: nn.Module, *, left: bool) -> Iterator[Inputs]:
    """Yield inputs that a model may take, the richest first."""
    config = model.config
    known = inspect.signature(model.forward).parameters
    text = make_text(config, known, left=left)
    answer = {}
    if "decoder_input_ids" in known:
        answer = {"decoder_input_ids": draw_words(config, 7)}
    senses = list(list_senses(config, known))
    if text:
        yield from filter(None, (illustrate(model, text, x, answer) for x in senses))
        yield from ({**text, **x, **answer} for x in senses)
    yield from ({**x, **answer} for x in senses)
    if answer:
        yield from senses
    if text:
        yield {**text, **answer}
        yield {"input_ids": text["input_ids"], **answer}
        yield text
        yield {"input_ids": text["input_ids"]}


def illustrate(
    model: nn.Module, text: Inputs, image: Inputs, answer: Inputs
) -> Inputs | None:
    """Return texts that begin with the tokens of an image, as many as it has."""
    token = get(model.config, "image_token_id", "image_token_index")
    find = getattr(model, "get_image_features", None)
    if token is None or find is None or "pixel_values" not in image:
        return None
    try:
        with torch.no_grad():
            found = find(**image)
    except Exception:  # noqa: BLE001 (it needs more than this)
        return None
    found = getattr(found, "pooler_output", found)
    width = get(model.config.get_text_config(), "hidden_size", "d_model")
    parts = found if isinstance(found, (list, tuple)) else [found]
    count = sum(x.numel() for x in parts) // width // BATCH
    if not 0 < count < 600:
        return None
    tokens = torch.full((BATCH, count), token)
    ids = torch.cat([text["input_ids"][:, :PADDING], tokens], 1)
    ids = torch.cat([ids, text["input_ids"][:, PADDING:]], 1)
    more = {}
    if "attention_mask" in text:
        mask = text["attention_mask"]
        parts = [mask[:, :PADDING], torch.ones_like(tokens), mask[:, PADDING:]]
        more["attention_mask"] = torch.cat(parts, 1)
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        more["mm_token_type_ids"] = (ids == token).int()
    return {"input_ids": ids, **more, **image, **answer}


def make_text(config: PreTrainedConfig, known: Any, *, left: bool) -> Inputs:
    """Return texts, the second one padded."""
    if "input_ids" not in known:
        return {}
    text = {"input_ids": draw_words(config)}
    if "attention_mask" in known:
        text["attention_mask"] = hide_padding(left=left)
        pad = get(config, "pad_token_id")
        if isinstance(pad, int) and pad >= 0:
            text["input_ids"][text["attention_mask"] == 0] = pad
    if "bbox" in known:
        text["bbox"] = draw_boxes()
    return text


def list_senses(config: PreTrainedConfig, known: Any) -> Iterator[Inputs]:
    """Yield images, videos and sounds that a model may take."""
    for make in (draw_patches, draw_images, draw_sounds, draw_states, draw_series):
        for found in make(config, known):
            if set(found) <= set(known):
                yield found


def draw_images(config: PreTrainedConfig, known: Any) -> Iterator[Inputs]:
    """Yield images and videos."""
    frames = int(first(get(config, "num_frames", "frames_per_clip", default=4)))
    if "pixel_values" in known:
        yield {"pixel_values": draw_image(config)}
        yield {"pixel_values": draw_image(config, frames=frames)}
        yield {"pixel_values": draw_image(config, frames=2)}
    yield {"pixel_values_videos": draw_image(config, frames=frames)}


def draw_patches(config: PreTrainedConfig, known: Any) -> Iterator[Inputs]:
    """Yield the patches of two images with their grids, as Qwen2-VL takes them."""
    grids = [x for x in ("grid_thw", "image_grid_thw") if x in known]
    patches = [x for x in ("hidden_states", "pixel_values") if x in known]
    if not grids or not patches:
        return
    channels = first(get(config, "in_channels", "in_chans", "num_channels", default=3))
    patch = first(get(config, "patch_size", default=14))
    for depth in (int(get(config, "temporal_patch_size", default=1)), 1):
        grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
        x = torch.randn(32, channels * depth * patch * patch)
        yield {patches[0]: x, grids[0]: grid}
        if grids[0] == "grid_thw":  # one of another size, as there is no text to fit
            x = torch.randn(48, channels * depth * patch * patch)
            yield {patches[0]: x, grids[0]: torch.tensor([[1, 4, 4], [1, 4, 8]])}


def draw_sounds(config: PreTrainedConfig, known: Any) -> Iterator[Inputs]:
    """Yield sounds, as samples or spectra."""
    if "input_values" in known:
        yield {"input_values": draw_sound(config)}
        yield {"input_values": torch.randn(BATCH, 1, 4000)}
        yield {"input_values": draw_features(config, last=True)}
    for last in (False, True):
        x = draw_features(config, last=last)
        n = x.shape[1 if last else 2]
        yield {"input_features": x, "input_features_mask": torch.ones(BATCH, n).long()}
        yield {"input_features": x}
    x = draw_features(config, last=True)
    yield {"input_features": x[:, None], "is_longer": torch.zeros(BATCH, 1).bool()}


def draw_states(config: PreTrainedConfig, known: Any) -> Iterator[Inputs]:
    """Yield hidden states, for the parts of models."""
    width = get(config, "hidden_size", "d_model", "embed_dim")
    if not isinstance(width, int):
        return
    wide = get(config, "encoder_hidden_size", "cross_attention_hidden_size")
    other = torch.randn(BATCH, 6, wide if isinstance(wide, int) else width)
    for name in ("query_embeds", "inputs_embeds", "hidden_states"):
        if name in known and "input_ids" not in known:
            x = torch.randn(BATCH, WORDS, width)
            yield {name: x, "encoder_hidden_states": other}
            yield {name: x}


def draw_series(config: PreTrainedConfig, known: Any) -> Iterator[Inputs]:
    """Yield what else is seen: regions of an image, series of numbers, steps of a game."""
    if "visual_feats" in known:
        wide = get(config, "visual_feat_dim", "visual_embedding_dim", default=32)
        boxes = torch.rand(BATCH, 5, 4)
        yield {"visual_feats": torch.randn(BATCH, 5, wide), "visual_pos": boxes}
    if "inputs" in known:
        yield {"inputs": torch.randn(BATCH, WORDS, get(config, "d_model", default=32))}
    if "past_values" in known:
        yield from draw_past(config)
    if "returns_to_go" in known:
        state, act = (get(config, x) for x in ("state_dim", "act_dim"))
        yield {
            "states": torch.randn(BATCH, WORDS, state),
            "actions": torch.randn(BATCH, WORDS, act),
            "rewards": torch.randn(BATCH, WORDS, 1),
            "returns_to_go": torch.randn(BATCH, WORDS, 1),
            "timesteps": torch.arange(WORDS).expand(BATCH, -1),
        }


def draw_past(config: PreTrainedConfig) -> Iterator[Inputs]:
    """Yield series of numbers, with what is known of their times, and without."""
    n = int(get(config, "context_length", default=16))
    wide = int(get(config, "num_input_channels", default=1))
    lags = max(get(config, "lags_sequence", default=[0]))
    times = int(get(config, "num_time_features", default=0))
    ahead = int(get(config, "prediction_length", default=4) or 4)
    past = torch.randn(BATCH, n + lags)
    yield {
        "past_values": past,
        "past_time_features": torch.randn(BATCH, n + lags, times),
        "past_observed_mask": torch.ones(BATCH, n + lags),
        "future_values": torch.randn(BATCH, ahead),
        "future_time_features": torch.randn(BATCH, ahead, times),
    }
    yield {"past_values": torch.randn(BATCH, n, wide)}
    yield {"past_values": [torch.randn(n) for _ in range(BATCH)]}
