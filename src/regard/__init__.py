"""Attention you can read, see and scale.

Next: definition/attention.py
"""

from regard.definition.attention import attention
from regard.definition.blocked import merge
from regard.definition.steps import explain
from regard.masks.patterns import causal, padding, same, where, window

__version__ = "0.1.0"

__all__ = [
    "attention",
    "causal",
    "explain",
    "merge",
    "padding",
    "same",
    "where",
    "window",
]
