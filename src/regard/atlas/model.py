"""The model of an atlas: loaded by its name, or by your own function.

    name                     a GGUF file, a folder, or a name in the Hugging Face cache,
                             as regard.load takes them: safetensors, never pickle
    package.module:function  your function, which returns a Model, such as a vllm.LLM

A model that reads text beside something else reads only the text: of an encoder-decoder
the encoder runs, of CLIP the text tower.

Next: chunks.py
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import FileError, OptionError
from regard.find_model import find_model
from regard.models.from_transformers import (
    load_processor,
    load_their_config,
    load_their_network,
)
from regard.models.inputs import (
    ModelInput,
    choose_tower,
    encode_string,
    find_tokenizer,
    has_decoder,
    measure_context,
    tell_kind,
)
from regard.models.load import explain_not_ours
from regard.nn.weights import load, open_source


@dataclass(frozen=True)
class Words:
    """A tokenizer, and the context length of the model."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    context: int


@dataclass(frozen=True)
class Model:
    """The network, how to run it, and its tokenizer."""

    network: Any  # an nn.Module, a vllm.LLM or a llama_cpp.Llama
    run: Callable[[Tensor], object]  # tokens (B, N); the result is ignored
    words: Words


def open_model(name: str, *, precision: str = "float32", device: str = "cpu") -> Model:
    """Return the model of a name, or the one that module:function returns."""
    dtype = getattr(torch, precision)
    if is_function(name):
        found = call_function(name)
    else:
        path = find_model(name)
        reason = explain_not_ours(path)
        if reason is None:
            network, tokenizer = load(path, dtype=dtype)
            words = Words(tokenizer.encode, tokenizer.decode, network.config.context)
            # read stops at the hidden states: predictions are not needed
            found = Model(network, network.read, words)
        else:
            theirs = load_their_network(path, reason, dtype=dtype, bare=True)
            theirs = choose_text_part(theirs)
            found = Model(theirs, theirs, open_their_words(path, reason))
    if isinstance(found.network, nn.Module):  # an engine has its own device
        found.network.to(device).eval()
    return found


def open_model_with_logits(name: str, *, precision: str, device: str) -> Model:
    """Return a model whose network returns logits for tokens (B, N)."""
    path = None if is_function(name) else find_model(name)
    reason = None if path is None else explain_not_ours(path)
    if path is None or reason is None:  # called, a decoder of ours returns logits
        found = open_model(name, precision=precision, device=device)
    else:
        theirs = load_their_network(path, reason, dtype=getattr(torch, precision))
        found = Model(theirs.to(device), theirs, open_their_words(path, reason))
    if not isinstance(found.network, nn.Module) or has_decoder(found.network):
        kind = type(found.network).__name__
        raise OptionError(
            f"{name} is a {kind}, expected an nn.Module that predicts the next token."
        )
    return found


def is_function(name: str) -> bool:
    """Return whether a name is module:function, rather than the name of a model."""
    try:
        return ":" in name and "://" not in name and not Path(name).exists()
    except OSError:  # not a valid file name
        return True


def choose_text_part(network: Any) -> Any:
    """Return the part of a network that reads text; raise if there is none."""
    part = choose_tower(network, ModelInput(text=""))
    part = part.get_encoder() if has_decoder(part) else part
    if tell_kind(part) != "text":
        raise OptionError(
            f"an atlas reads texts, but a {type(network).__name__} reads "
            f"{tell_kind(part)}. To see it on one input: regard show"
        )
    return part


def open_words(name: str) -> Words:
    """Return the tokenizer and context length, without reading weights from files."""
    if is_function(name):
        return call_function(name).words
    path = find_model(name)
    reason = explain_not_ours(path)
    if reason is not None:
        return open_their_words(path, reason)
    source = open_source(path)
    tokenizer = source.make_tokenizer()
    return Words(tokenizer.encode, tokenizer.decode, source.config.context)


def open_their_words(path: Path, reason: FileError) -> Words:
    """Return the tokenizer and context length from transformers."""
    words = load_processor(path, reason)
    tokenizer = find_tokenizer(words)
    return Words(
        encode=lambda text: encode_string(words, text),
        decode=lambda ids: str(tokenizer.decode(ids)),
        context=measure_context(load_their_config(path, reason), words),
    )


def call_function(name: str) -> Model:
    """Import and call module:function, and return its Model."""
    place, _, function = name.partition(":")
    sys.path.append("")  # the current directory
    try:
        found = getattr(importlib.import_module(place), function)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise OptionError(
            f"there is no model {name!r}, expected a GGUF file, a folder, a Hugging "
            f"Face name, or module:function ({error})."
        ) from error
    finally:
        sys.path.remove("")
    if not isinstance(found, Model):
        kind = type(found).__name__
        raise OptionError(
            f"{name} returns a {kind}, expected regard.atlas.model.Model."
        )
    return found
