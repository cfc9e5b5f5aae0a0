"""Masks and biases as formulas of position. `python -m regard.masks` draws them.

Next: masks/algebra.py
"""

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
