"""Ablate or replace heads, or hide keys, in a running model; measure the effect.

Next: knock_out.py
"""

from regard.ablate.attribute_heads import attribute_heads
from regard.ablate.attribute_weights import attribute_weights
from regard.ablate.average_searches import average_searches
from regard.ablate.effect import effect
from regard.ablate.knock_out import knock_out
from regard.ablate.patch_heads import patch_heads
from regard.ablate.record_path import record_path
from regard.ablate.replacement import average_outputs
from regard.ablate.search_heads import search_heads
from regard.ablate.trace_heads import trace_heads

__all__ = [
    "attribute_heads",
    "attribute_weights",
    "average_outputs",
    "average_searches",
    "effect",
    "knock_out",
    "patch_heads",
    "record_path",
    "search_heads",
    "trace_heads",
]
