"""Attention you can read, see and scale.

Next: definition/attention.py
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.arguments import name_missing
from regard.definition.attention import attention
from regard.definition.blocked import merge
from regard.definition.steps import explain
from regard.masks.patterns import causal, padding, same, where, window

__version__ = "0.1.0"

if TYPE_CHECKING:
    from regard.attribution.sources import sources
    from regard.judge.run_check import check
    from regard.models.load import load
    from regard.models.read import read
    from regard.seen import compare_seen as compare
    from regard.seen import open_seen as open  # noqa: A004
    from regard.seen import watch
else:

    def __getattr__(name: str) -> Any:
        """Import heavy or torch-dependent attributes on first access."""
        if name not in LATER:
            raise name_missing("regard", name, {*LATER, *__all__})
        module, _, attribute = LATER[name].partition(":")
        try:
            found = import_module(module)
        except ModuleNotFoundError as missing:
            raise ImportError(
                f'regard.{name} needs {missing.name}: pip install "regard[torch]"'
            ) from missing
        return getattr(found, attribute) if attribute else found


LATER = {
    "ablate": "regard.ablate",
    "circuits": "regard.ablate.circuits",
    "check": "regard.judge.run_check:check",
    "compare": "regard.seen:compare_seen",
    "direct_logits": "regard.ablate.direct_logits",
    "doctor": "regard.doctor",
    "effect": "regard.ablate:effect",
    "engine": "regard.engine",
    "judge": "regard.judge",
    "knock_out": "regard.ablate:knock_out",
    "lens": "regard.lens",
    "load": "regard.models.load:load",
    "nn": "regard.nn",
    "open": "regard.seen:open_seen",
    "patch_heads": "regard.ablate:patch_heads",
    "plain": "regard.plain",
    "read": "regard.models.read:read",
    "sources": "regard.attribution.sources:sources",
    "stats": "regard.stats",
    "value_weights": "regard.ablate.value_weights",
    "watch": "regard.seen:watch",
}

__all__ = [
    "attention",
    "causal",
    "check",
    "compare",
    "explain",
    "load",
    "merge",
    "open",
    "padding",
    "read",
    "same",
    "sources",
    "watch",
    "where",
    "window",
]
