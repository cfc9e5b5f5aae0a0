"""Masks and biases as formulas of position. `python -m regard.masks` draws them.

Next: masks/algebra.py
"""

from typing import TYPE_CHECKING, Any

from regard.arguments import name_missing
from regard.masks.algebra import Mask
from regard.masks.biases import Bias, added, alibi, log_offsets, table
from regard.masks.patterns import (
    array,
    causal,
    everything,
    keys,
    last,
    padding,
    per_head,
    prefix,
    same,
    where,
    window,
)
from regard.masks.tiles import Tiles

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Say what a mask is called here."""
        raise name_missing("regard.masks", name, __all__)


__all__ = [
    "Bias",
    "Mask",
    "Tiles",
    "added",
    "alibi",
    "array",
    "causal",
    "everything",
    "keys",
    "last",
    "log_offsets",
    "padding",
    "per_head",
    "prefix",
    "same",
    "table",
    "where",
    "window",
]
