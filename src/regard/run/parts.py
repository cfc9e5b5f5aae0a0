"""The parts of a model that have a meaning: whole models, towers, decoders.

    find_models     the model, and those that a wrapper calls
    find_towers     what reads pictures or sounds, not text
    is_decoder, is_cross
                    layers of an encoder-decoder model

Next: passes.py
"""

from __future__ import annotations

import re

from torch import nn

CROSS = re.compile(r"cross|encoder_attn|EncDec", re.IGNORECASE)


def find_module(model: nn.Module, name: str) -> nn.Module:
    """Return a module by its name, also of a scripted model."""
    return dict(model.named_modules())[name]


def is_inside(name: str, other: str) -> bool:
    """Return whether a module is another one, or a part of it."""
    return not other or name == other or name.startswith((f"{other}.", f"{other}#"))


def find_models(model: nn.Module) -> tuple[str, ...]:
    """Return the names of whole models: the model, and those that a wrapper calls.

    Their arguments are a cache and a mask, which the wrapper may not have.
    """
    parts = dict(model.named_modules())
    told = [x for x, part in parts.items() if getattr(part, "config", None) is not None]
    outer = [x for x in told if not any(x != y and is_inside(x, y) for y in told)]
    able = [x for x, part in parts.items() if callable(getattr(part, "generate", None))]
    return tuple(dict.fromkeys(["", *outer, *able]))


def find_towers(model: nn.Module) -> tuple[str, ...]:
    """Return how the names of layers begin that read pictures or sounds, not text."""
    return tuple(
        f"{name}."
        for name, part in model.named_modules()
        if name and getattr(part, "main_input_name", "input_ids") != "input_ids"
    )


def is_decoder(model: nn.Module, name: str) -> bool:
    """Return whether a layer is in the decoder of an encoder-decoder model."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "is_encoder_decoder", False)) and "decoder" in name


def is_cross(model: nn.Module, name: str) -> bool:
    """Return whether a layer is cross-attention, judged by its name."""
    parent, _, last = name.partition("#")[0].rpartition(".")
    if last == "multihead_attn":  # of torch's decoder, beside its self-attention
        return getattr(find_module(model, parent), "self_attn", None) is not None
    return CROSS.search(name) is not None
