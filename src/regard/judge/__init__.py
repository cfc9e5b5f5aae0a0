"""Check an attention implementation against a list of known pitfalls.

Next: run_check.py
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.judge.calls import AttentionCall
    from regard.judge.convention import Convention, Projections, read_convention
    from regard.judge.difference import find_difference
    from regard.judge.run_check import check
    from regard.judge.search import repeat_call
    from regard.judge.storage import Storage
else:

    def __getattr__(name: str) -> Any:
        """Import names lazily: find_difference does not need the report."""
        if name not in LATER:
            raise AttributeError(f"module 'regard.judge' has no attribute '{name}'")
        return getattr(import_module(LATER[name]), name)


LATER = {
    "AttentionCall": "regard.judge.calls",
    "Convention": "regard.judge.convention",
    "Projections": "regard.judge.convention",
    "check": "regard.judge.run_check",
    "find_difference": "regard.judge.difference",
    "read_convention": "regard.judge.convention",
    "repeat_call": "regard.judge.search",
    "Storage": "regard.judge.storage",
}

__all__ = [
    "AttentionCall",
    "Convention",
    "Projections",
    "Storage",
    "check",
    "find_difference",
    "read_convention",
    "repeat_call",
]
