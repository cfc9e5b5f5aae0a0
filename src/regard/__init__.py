"""Attention you can read, see and scale.

Next: definition/attention.py
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.definition.attention import attention
from regard.definition.blocked import merge
from regard.definition.steps import explain
from regard.masks.patterns import causal, padding, same, where, window

__version__ = "0.1.0"

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Load `regard.engine` when it is first used: it needs torch."""
        if name == "engine":
            try:
                return import_module("regard.engine")
            except ModuleNotFoundError as missing:
                raise ImportError(
                    f'regard.engine needs {missing.name}: pip install "regard[torch]"'
                ) from missing
        raise AttributeError(f"module 'regard' has no attribute '{name}'")


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
