"""Run a model on a text, a picture or a sound, and return its labelled attention.

    seen = regard.read("The cat sat on the mat", model="google-bert/bert-base-uncased")
    print(seen)                    which layers were seen
    seen.page("map.html")          the map, with the text of every token

Next: seen.py
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from regard.errors import OptionError, ShapeError
from regard.models.image_tokens import find_patches
from regard.models.inputs import (
    ModelInput,
    choose_tower,
    decode_token,
    find_rate,
    is_chat,
    make_inputs,
    open_sound,
    tell_kind,
)
from regard.models.load import load
from regard.seen import Seen, watch


def read(
    what: Any,
    *,
    model: Any,
    image: Any = None,
    audio: Any = None,
    target: str | None = None,
    layers: Collection[str] | None = None,
    keep: str = "qk",
    download: bool = False,
) -> Seen:
    """Return the attention of a model on one input, or on each of a list of inputs.

    >>> path = "SmolLM2-135M-Instruct.Q4_1.gguf"  # doctest: +SKIP
    >>> seen = read("The cat sat", model=path)  # doctest: +SKIP

    what: a text, the messages of a chat, the file or array of a picture or of a sound,
        whatever the model reads, or a mapping of its named inputs
    model: a GGUF file, a folder, a name in the local Hugging Face cache, or the pair
        (model, tokenizer)
    image, audio: a picture or a sound beside the text, for models that read both
    target: the text that an encoder-decoder has written so far
    layers, keep: as in regard.watch
    download: ask the Hugging Face hub for a model that is not in the cache
    """
    network, words = open_pair(model, download=download)
    several = isinstance(what, list) and not is_chat(what)
    inputs = [
        sort_given(network, x, ModelInput(None, image, audio, target))
        for x in (what if several else [what])
    ]
    if not inputs:
        raise OptionError("an empty list, expected a text or a list of texts.")
    tower = choose_tower(network, inputs[0])
    named = [make_inputs(tower, words, given) for given in inputs]
    was_training = tower.training
    tower.eval()  # no dropout
    try:
        with watch(tower, layers=layers, keep=keep) as seen, torch.inference_mode():
            for x in named:
                run_network(tower, x)
    finally:
        tower.train(was_training)
    return label_inputs(seen, tower, words, inputs, named)


def open_pair(model: Any, *, download: bool) -> tuple[Any, Any]:
    """Return a network and its tokenizer, loaded if `model` is a name."""
    if isinstance(model, str | Path):
        return load(model, download=download)
    if isinstance(model, nn.Module):
        raise OptionError(
            f"model=a {type(model).__name__} alone, expected it with its tokenizer or "
            "processor: model=(model, tokenizer)."
        )
    match model:
        case (nn.Module() as network, words):
            return network, words
    raise OptionError(
        f"model={model!r:.60}, expected the name of a model, or (model, tokenizer)."
    )


def sort_given(network: Any, what: Any, rest: ModelInput) -> ModelInput:
    """Return an input under the name of its kind."""
    kind = "text" if isinstance(what, Mapping) else tell_kind(network)
    is_word = isinstance(what, str) or is_chat(what)
    if kind == "text" and not isinstance(what, Mapping | str) and not is_chat(what):
        kind = guess_input(network, what)
    if kind in ("image", "audio") and is_word and getattr(rest, kind) is not None:
        kind = "text"
    if kind not in ("text", "image", "audio"):
        raise OptionError(
            f"a {type(network).__name__} is called with {kind}=. Give its inputs by "
            f"name: regard.read({{{kind!r}: tensor}}, …)."
        )
    return replace(rest, **{kind: what})


def guess_input(network: Any, what: Any) -> str:
    """Return what an array is, for a network that reads text and something else."""
    reads = getattr(network, "input_modalities", ()) or ()
    sound = getattr(what, "ndim", 0) == 1
    kind = "audio" if sound and "audio" in reads else "image"
    return kind if kind in reads and what is not None else "text"


def run_network(network: Any, named: Mapping[str, Any]) -> Any:
    """Call a network; one that does not know the name input_ids gets them first."""
    called = inspect.signature(network.forward).parameters
    if "input_ids" in named and "input_ids" not in called:
        return network(named["input_ids"])
    return network(**named)


# --- labels --------------------------------------------------------------------------


def label_inputs(
    seen: Seen,
    network: Any,
    words: Any,
    inputs: list[ModelInput],
    named: list[dict[str, Any]],
) -> Seen:
    """Return a recording with a text for every token, patch or moment.

    named: what the network was called with, for each of the inputs
    """
    kind = tell_kind(network)
    if any(seen.recording.tokens):
        labelled = seen.label(lambda ids: decode_token(words, ids[0]))
        return place_images(mark_unnamed(labelled, network), network, named)
    for i, given in enumerate(inputs):
        if kind == "image" and given.image is not None:
            seen = label_patches(seen, named[i], i)
        elif kind == "audio" and given.audio is not None:
            seen = label_moments(seen, words, named[i], given.audio, i)
    return seen


def place_images(seen: Seen, network: Any, named: list[dict[str, Any]]) -> Seen:
    """Return a recording with the pictures of an image-text model beside its text.

    If it is not known which token is which patch, a note says so.
    """
    config, first = getattr(network, "config", None), 0
    for x in named:
        count = len(x["input_ids"]) if "input_ids" in x else 0
        here, first = slice(first, first + count), first + count
        if "pixel_values" not in x or config is None:
            continue
        found = seen.recording
        try:
            images = find_patches(config, x, found.tokens[here], found.texts[here])
        except ShapeError as error:
            notes = found.notes | {"images_missing": str(error)}
            seen = Seen(replace(found, notes=notes))
            continue
        for image in images:
            seen = seen.picture(
                image.pixels,
                grid=image.grid,
                tokens=image.tokens,
                sequence=here.start + image.sequence,
            )
    return seen


def mark_unnamed(seen: Seen, network: Any) -> Seen:
    """Return a recording in which layers that do not read the tokens are marked.

    The patches of a vision tower must not get the names of words.
    """
    found = seen.recording
    others = tuple(
        f"{name}."
        for name, part in network.named_modules()
        if name and getattr(part, "main_input_name", "input_ids") != "input_ids"
    )
    pairs = zip(found.records, found.sequences, strict=True)
    strange = [
        record.name
        for record, i in pairs
        if (others and record.name.startswith(others))
        or int(record.q.shape[1]) != len(found.tokens[i])
    ]
    decoders = [*found.notes.get("decoders", ()), *strange]
    notes = found.notes | {"decoders": list(dict.fromkeys(decoders))}
    return Seen(replace(found, notes=notes))


def label_patches(seen: Seen, named: Mapping[str, Any], i: int) -> Seen:
    """Return a recording with the picture, if its patches form a known grid.

    It is the picture that the model was given, which a processor may have cropped.
    """
    try:
        return seen.picture(named["pixel_values"][0], sequence=i)
    except (KeyError, ShapeError):  # windows, or a grid that is no square
        return seen


def label_moments(
    seen: Seen, words: Any, named: Mapping[str, Any], audio: Any, i: int
) -> Seen:
    """Return a recording with its sound on a time axis, and the words of a decoder."""
    rate = find_rate(words)
    own = getattr(words, "feature_extractor", words)
    samples = open_sound(audio, rate)
    padded = getattr(own, "chunk_length", None)  # Whisper always hears 30 seconds
    heard = len(samples) if padded is None else round(padded * rate)
    until = min(len(samples), heard) / rate
    samples = np.pad(samples[:heard], (0, max(0, heard - len(samples))))
    spoken = named.get("decoder_input_ids")
    ids = [] if spoken is None else spoken[0].tolist()
    told = [decode_token(words, token) for token in ids]
    return seen.sound(samples, heard / rate, until=until, words=told, sequence=i)
