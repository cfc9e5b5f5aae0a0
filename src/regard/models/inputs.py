"""What a network is called with, for a text, a chat, a picture or a sound.

    text      ─▶ tokenizer        ─▶ input_ids
    chat      ─▶ chat template    ─▶ text
    picture   ─▶ image processor  ─▶ pixel_values
    sound     ─▶ feature extractor ─▶ input_features, input_values

A network of transformers says what it reads first, as main_input_name. Any other
network is called with the tokens alone.

Next: read.py
"""

from __future__ import annotations

import inspect
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from regard.errors import FileError, OptionError
from regard.nn.chat_template import render_chat
from regard.nn.tokens import Tokenizer

READS = {  # by main_input_name
    "input_ids": "text",
    "pixel_values": "image",
    "input_features": "audio",
    "input_values": "audio",
}
TOWERS = {"text": "text_model", "image": "vision_model", "audio": "audio_model"}
EXAMPLE = {"text": '"The cat sat"', "image": '"cat.png"', "audio": '"speech.wav"'}
FAR = 1 << 30  # context length of a model that does not specify one


@dataclass(frozen=True)
class ModelInput:
    """One input: text or chat, picture and sound, and what a decoder has written."""

    text: Any = None  # a str, a list of messages or of tokens, or named tensors
    image: Any = None
    audio: Any = None
    target: str | None = None


def tell_kind(network: Any) -> str:
    """Return what a network reads first: "text", "image" or "audio"."""
    name = getattr(network, "main_input_name", "input_ids")
    return READS.get(name, str(name))


def choose_tower(network: Any, given: ModelInput) -> Any:
    """Return the part of a network that reads what is given: a tower of CLIP, or all.

    A network of two towers needs both inputs; each tower alone needs its own.
    """
    towers = {x: getattr(network, name, None) for x, name in TOWERS.items()}
    kinds = [x for x, tower in towers.items() if tower is not None]
    there = [x for x in towers if getattr(given, x) is not None]
    return towers[there[0]] if len(kinds) == 2 and len(there) == 1 else network


def make_inputs(network: Any, words: Any, given: ModelInput) -> dict[str, Any]:
    """Return the named inputs of a network, as tensors on its device."""
    if isinstance(given.text, Mapping):
        named = dict(given.text)
    elif given.image is None and given.audio is None:
        named = {"input_ids": torch.tensor([encode_text(network, words, given.text)])}
        named |= {"attention_mask": torch.ones_like(named["input_ids"])}
    else:
        named = dict(call_processor(words, given))
    called = inspect.signature(network.forward).parameters
    if has_decoder(network) and "decoder_input_ids" not in named:
        named["decoder_input_ids"] = start_decoder(network, words, given.target)
    elif given.target is not None:
        raise OptionError(
            f"target={given.target!r:.40}, but a {type(network).__name__} has no "
            "decoder of its own. Leave target= out."
        )
    if not isinstance(given.text, Mapping):  # processors make more than a model takes
        named = {x: y for x, y in named.items() if x in called or x == "input_ids"}
    return {name: place_tensor(x, network) for name, x in named.items()}


def place_tensor(x: Any, network: Any) -> Any:
    """Return a tensor on the device of a network, and in its dtype unless tokens."""
    if not isinstance(x, torch.Tensor):
        return x
    like = next(network.parameters(), x)
    return x.to(like.device, like.dtype if x.is_floating_point() else x.dtype)


# --- text ----------------------------------------------------------------------------


def encode_text(network: Any, words: Any, text: Any) -> list[int]:
    """Return the tokens of a text, a chat or tokens; raise if none, or too many."""
    if is_chat(text):
        tokens = encode_string(words, write_chat(words, text), whole=False)
    elif isinstance(text, list) and all(isinstance(i, int) for i in text):
        tokens = text
    elif isinstance(text, str):
        tokens = encode_string(words, text)
    else:
        kind = tell_kind(network)
        raise OptionError(
            f"given {type(text).__name__}, but a {type(network).__name__} reads "
            f"{kind}. Write regard.read({EXAMPLE.get(kind, '{name: tensor}')}, …)."
        )
    if not tokens:
        raise OptionError("the text is empty: there is nothing to attend to.")
    limit = measure_context(network, words)
    if len(tokens) > limit:
        raise OptionError(
            f"the text has {len(tokens):,} tokens, but this model reads {limit:,} at "
            "most. Give a shorter text, or its parts as a list."
        )
    return tokens


def is_chat(text: Any) -> bool:
    """Return whether something is a list of messages."""
    return (
        isinstance(text, Sequence)
        and not isinstance(text, str)
        and bool(text)
        and all(isinstance(x, Mapping) and "role" in x for x in text)
    )


def find_tokenizer(words: Any) -> Any:
    """Return the tokenizer of a processor, or the tokenizer itself."""
    found = getattr(words, "tokenizer", words)
    if found is None or not callable(getattr(found, "encode", None)):
        raise FileError(
            "this model has no tokenizer beside its weights, expected tokenizer.json. "
            "Give one with the model: model=(model, tokenizer)."
        )
    return found


def encode_string(
    words: Any, text: str, *, whole: bool = True, limit: int | None = None
) -> list[int]:
    """Return the tokens of a text.

    whole: with the begin and end tokens of the model
    limit: the first tokens only, with the end token if there is one
    """
    tokenizer = find_tokenizer(words)
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.encode(text, whole=whole)[:limit]
    if callable(getattr(tokenizer, "convert_ids_to_tokens", None)):  # transformers
        how: dict[str, Any] = {"add_special_tokens": whole, "verbose": False}
        if limit is not None:
            how |= {"truncation": True, "max_length": limit}
        return [int(i) for i in tokenizer(text, **how)["input_ids"]]
    return [int(i) for i in tokenizer.encode(text)][:limit]


def write_chat(words: Any, messages: Any) -> str:
    """Return a conversation as text, by the chat template of the model."""
    tokenizer = find_tokenizer(words)
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.chat(messages)
    if not has_template(words):
        raise OptionError(
            "this model has no chat template: it was not trained on chats. Give a text "
            "instead of messages."
        )
    own = words if getattr(words, "chat_template", None) else tokenizer
    template = own.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    names = getattr(tokenizer, "special_tokens_map", {})
    names = {name: x for name, x in names.items() if isinstance(x, str)}
    return render_chat(str(template), names, messages)  # in our sandbox


def has_template(words: Any) -> bool:
    """Return whether a model has a chat template."""
    tokenizer = getattr(words, "tokenizer", words)
    own = (getattr(x, "chat_template", None) for x in (words, tokenizer))
    return bool(getattr(tokenizer, "template", None)) or any(map(bool, own))


def decode_token(words: Any, token: int) -> str:
    """Return the text of one token, with the space that it begins with."""
    tokenizer = find_tokenizer(words)
    text = str(tokenizer.decode([token]))
    if isinstance(tokenizer, Tokenizer):
        piece: Any = tokenizer.core.id_to_token(token)
    elif callable(getattr(tokenizer, "convert_ids_to_tokens", None)):
        piece = tokenizer.convert_ids_to_tokens(token)
    else:
        return text
    # SentencePiece marks a space by ▁, and its decoders trim the first one.
    spaced = isinstance(piece, str) and piece.startswith("▁")
    return f" {text}" if spaced and not text.startswith(" ") else text


def measure_context(network: Any, words: Any) -> int:
    """Return how many tokens a network, or one with this config, reads at most."""
    config = getattr(network, "config", network)
    own = getattr(config, "context", None)  # of ours
    if isinstance(own, int):
        return own
    inner = getattr(config, "get_text_config", None)
    known = getattr(inner() if inner else config, "max_position_embeddings", None)
    if not isinstance(known, int) or known < 1:
        return FAR
    usual = getattr(getattr(words, "tokenizer", words), "model_max_length", FAR)
    return min(known, int(usual))  # RoBERTa has positions that no token may take


def has_decoder(network: Any) -> bool:
    """Return whether a network has a decoder with tokens of its own."""
    return "decoder_input_ids" in inspect.signature(network.forward).parameters


def start_decoder(network: Any, words: Any, target: str | None) -> torch.Tensor:
    """Return the tokens that a decoder has written: its start token, and a target."""
    config = network.config
    places = [config, getattr(config, "decoder", None)]
    places.insert(0, getattr(network, "generation_config", None))
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    found = [getattr(place, name, None) for name in names for place in places]
    first = next((x for x in found if isinstance(x, int)), 0)
    written = [] if target is None else encode_string(words, target)
    return torch.tensor([[first, *written[written[:1] == [first] :]]])


# --- pictures and sounds -------------------------------------------------------------


def call_processor(words: Any, given: ModelInput) -> Mapping[str, Any]:
    """Return the inputs that a processor makes of a picture or a sound, and a text."""
    if words is None:
        raise FileError(
            "this model has no processor beside its weights, expected "
            "preprocessor_config.json. Give tensors: regard.read({name: tensor}, …)."
        )
    parts: dict[str, Any] = {"return_tensors": "pt"}
    if given.image is not None:
        parts["images"] = open_image(given.image)
    if given.text is not None:
        chat = is_chat(given.text)
        parts["text"] = write_chat(words, given.text) if chat else given.text
    if given.audio is not None:
        rate = find_rate(words)
        parts["sampling_rate"] = rate
        sound = open_sound(given.audio, rate)
        takes = inspect.signature(type(words).__call__).parameters
        parts["raw_speech" if "raw_speech" in takes else "audio"] = sound
    try:
        found: Mapping[str, Any] = words(**parts)
    except (TypeError, ValueError, IndexError) as error:
        told = " and ".join(x for x in parts if x in ("images", "text", "audio"))
        raise OptionError(
            f"{type(words).__name__} cannot process {told or 'this sound'}: {error}"
        ) from error
    return found


def find_rate(words: Any) -> int:
    """Return the samples per second that a model expects."""
    own = getattr(words, "feature_extractor", words)
    return int(getattr(own, "sampling_rate", 16_000))


def open_image(image: Any) -> Any:
    """Return a picture: a file is opened, an array or a PIL image stays as it is."""
    if not isinstance(image, str | Path):
        return image
    try:
        from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 (optional)
    except ImportError:
        raise FileError("pictures need Pillow: pip install pillow") from None
    try:
        with Image.open(image) as opened:
            return opened.convert("RGB")
    except (OSError, UnidentifiedImageError, ValueError) as error:
        raise FileError(f"{image} cannot be opened as a picture: {error}.") from error


def open_sound(sound: Any, rate: int) -> NDArray[np.float32]:
    """Return a sound as numbers from -1 to 1; files are WAV of 16 bits."""
    if not isinstance(sound, str | Path):
        return np.asarray(sound, np.float32).reshape(-1)
    how = f"Convert it: ffmpeg -i {sound} -ar {rate} -ac 1 -c:a pcm_s16le new.wav"
    try:
        with wave.open(str(sound), "rb") as file:
            width, channels = file.getsampwidth(), file.getnchannels()
            given, raw = file.getframerate(), file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise FileError(
            f"{sound} cannot be opened as a sound: {error}. {how}"
        ) from error
    if width != 2 or given != rate:
        raise FileError(
            f"{sound} has {8 * width} bits at {given} Hz, expected 16 bits at {rate} "
            f"Hz. {how}"
        )
    numbers = np.frombuffer(raw, "<i2").reshape(-1, channels).mean(1) / 2**15
    return np.asarray(numbers, np.float32)
