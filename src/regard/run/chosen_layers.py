"""Layers as a user names them: by number, by module, or by a module around them.

    0                           the first layer that attends
    "model.layers.3"            the attention inside of this module
    "model.layers.3.attn#2"     the second time that this module attends in a pass
    "model.layers.3.attn#1"     the first time only, and nothing inside of it

Next: ../lens/watch.py
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from regard.errors import OptionError

Layers = Collection[int | str] | None  # as a user gives them; None: all
Layer = int | str


def read_layers(layers: Any, names: Sequence[str]) -> tuple[Layer, ...] | None:
    """Return the chosen layers, None for all; raise OptionError for unknown ones."""
    if layers is None:
        return None
    one = isinstance(layers, str) or not isinstance(layers, Iterable)
    some = tuple(read_layer(x, names) for x in ([layers] if one else layers))
    if not some:
        raise OptionError("an empty list of layers: leave it out for all.")
    return some


def read_layer(layer: Any, names: Sequence[str]) -> Layer:
    """Return a layer as its number or name; raise OptionError if there is none."""
    if isinstance(layer, str):
        if layer.partition("#")[0] in names:
            return layer
    elif is_count(layer):
        return operator.index(layer)
    shown = repr(layer) if isinstance(layer, str | int) else f"of type {type(layer)}"
    raise OptionError(
        f"there is no layer {shown}. Layers are numbered from 0 in the order "
        "in which they attend, or named as in model.named_modules()."
    )


def is_count(x: Any) -> bool:
    """Return whether x is an integer of 0 or more, of Python or of NumPy."""
    return is_integer(x) and operator.index(x) >= 0


def is_integer(x: Any) -> bool:
    """Return whether x is an integer, of Python or of NumPy, and not a bool."""
    try:
        return not isinstance(x, bool) and operator.index(x) is not None
    except TypeError:  # also an array of several numbers
        return False


def is_chosen(layers: Collection[Layer] | None, number: int, name: str) -> bool:
    """Return whether a layer is among those that were chosen; None means all."""
    return layers is None or any(is_layer(x, number, name) for x in layers)


def is_layer(layer: Layer, number: int, name: str) -> bool:
    """Return whether `layer` is the number, the name or a parent's name of a layer."""
    if isinstance(layer, int):
        return layer == number
    if layer.endswith("#1"):  # the first call has the name of its module
        return name == layer.removesuffix("#1")
    return name == layer or name.startswith((f"{layer}.", f"{layer}#"))
