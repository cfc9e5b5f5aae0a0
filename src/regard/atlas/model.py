"""The model of an atlas: loaded by regard, by transformers, or by your own function.

    model.gguf, folder       loaded by regard.load: GGUF and safetensors, never pickle
    folder                   of any other model family, loaded by transformers
    package.module:function  your function, which returns a Model

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
from regard.nn.weights import load, open_source

OPTIONS: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
FAR = 1 << 30  # context length of a model that does not specify one


@dataclass(frozen=True)
class Words:
    """A tokenizer, and the context length of the model."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    context: int


@dataclass(frozen=True)
class Model:
    """The network, how to run it, and its tokenizer."""

    network: nn.Module
    run: Callable[[Tensor], object]  # tokens (B, N); the result is ignored
    words: Words


def open_model(name: str, *, precision: str = "float32", device: str = "cpu") -> Model:
    """Return the model at a path, or the one that module:function returns."""
    dtype = getattr(torch, precision)
    if not Path(name).exists():
        found = call_function(name)
    else:
        try:
            network, tokenizer = load(name, dtype=dtype)
            words = Words(tokenizer.encode, tokenizer.decode, network.config.context)
            # read stops at the hidden states: predictions are not needed
            found = Model(network, network.read, words)
        except FileError as reason:  # an unsupported model family
            theirs = load_theirs("AutoModel", name, reason, dtype=dtype)
            found = Model(theirs, theirs, open_their_words(name, reason))
    found.network.to(device).eval()
    return found


def open_words(name: str) -> Words:
    """Return the tokenizer and context length, without reading weights from files."""
    if not Path(name).exists():
        return call_function(name).words
    try:
        source = open_source(Path(name))
        tokenizer = source.make_tokenizer()
        return Words(tokenizer.encode, tokenizer.decode, source.config.context)
    except FileError as reason:
        return open_their_words(name, reason)


def open_their_words(name: str, reason: FileError) -> Words:
    """Return the tokenizer and context length from transformers."""
    tokenizer = load_theirs("AutoTokenizer", name, reason)
    config = load_theirs("AutoConfig", name, reason).get_text_config()
    return Words(
        encode=lambda text: list(tokenizer(text, verbose=False)["input_ids"]),
        decode=lambda ids: str(tokenizer.decode(ids)),
        context=int(getattr(config, "max_position_embeddings", FAR)),
    )


def load_theirs(
    kind: str, name: str, reason: FileError, *, dtype: torch.dtype | None = None
) -> Any:
    """Load a local folder with transformers, without pickle or remote code."""
    try:
        import transformers  # noqa: PLC0415 (optional)
    except ImportError:
        raise FileError(f'{reason} For others: pip install "regard[hf]"') from reason
    more = {} if dtype is None else {"dtype": dtype, "use_safetensors": True}
    try:
        return getattr(transformers, kind).from_pretrained(name, **OPTIONS, **more)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise FileError(f"{name} cannot be read: {reason} {error}") from error


def call_function(name: str) -> Model:
    """Import and call module:function, and return its Model."""
    place, _, function = name.partition(":")
    sys.path.append("")  # the current directory
    try:
        found = getattr(importlib.import_module(place), function)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise OptionError(
            f"there is no model {name!r}, expected a GGUF file, a safetensors folder, "
            f"or module:function ({error})."
        ) from error
    finally:
        sys.path.remove("")
    if not isinstance(found, Model):
        kind = type(found).__name__
        raise OptionError(
            f"{name} returns a {kind}, expected regard.atlas.model.Model."
        )
    return found
