"""What was heard of each layer, counted for the coverage.

    calls    how often it attended; kept    how many of these are in the recording
    reasons  why it is not kept;   notes    what a reader must know

Next: watch.py
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections import Counter

from torch import nn

from regard.recording.evidence import Covered

ORIGINAL = "_torchdynamo_orig_callable"  # an attribute of functions that are compiled


class Tally:
    """What was heard of one layer, for the coverage."""

    def __init__(self, via: str, *, attention: bool) -> None:
        self.via, self.attention = via, attention
        self.calls = self.kept = 0
        self.error = 0.0
        self.rows = self.in_records = 0
        self.left_out: Counter[str] = Counter()
        self.reasons: dict[str, None] = {}
        self.notes: dict[str, None] = {}

    def add_error(self, error: float) -> None:
        """Keep the largest error; NaN is the worst."""
        if not (error <= self.error or math.isnan(self.error)):
            self.error = error

    def cover(self, name: str) -> Covered:
        """Return the coverage of the layer."""
        return Covered(
            name=name,
            via=self.via,
            calls=self.calls,
            kept=0 if self.reasons else self.kept,
            error=self.error,
            reason="; ".join(self.reasons),
            attention=self.attention,
            note="; ".join(self.notes),
            rows=self.rows,
            in_records=self.in_records * (not self.reasons),
            left_out={why: n for why, n in self.left_out.items() if n > 0},
        )


class Tallies:
    """What was heard of all layers, and errors of ours."""

    def __init__(self) -> None:
        self.tallies: dict[tuple[str, bool], Tally] = {}  # by layer, attention or not
        self.failures: dict[str, None] = {}

    def count(self, name: str, via: str = "", *, attention: bool) -> Tally:
        """Count a call of a layer."""
        new = Tally(via, attention=attention)
        tally = self.tallies.setdefault((name, attention), new)
        tally.calls += 1
        return tally

    def fail(self, error: Exception) -> None:
        """Keep an error of ours; it does not reach the model."""
        where = traceback.extract_tb(error.__traceback__)[-1:]
        at = "".join(f" ({x.name}, line {x.lineno})" for x in where)
        self.failures[f"{type(error).__name__}: {error}{at}"] = None


def find_compiled(model: nn.Module) -> list[str]:
    """Return the names of modules that are compiled, or use a compiled function."""
    uses = {kind: uses_compiled(kind) for kind in {type(x) for x in model.modules()}}
    return [
        name
        for name, module in model.named_modules()
        if getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
        or uses[type(module)]
        or any(ORIGINAL in getattr(x, "__dict__", ()) for x in vars(module).values())
    ]


def uses_compiled(kind: type[nn.Module]) -> bool:
    """Return whether the forward of a class uses a compiled global function."""
    forward = inspect.unwrap(getattr(kind, "forward", uses_compiled))
    names = getattr(getattr(forward, "__code__", None), "co_names", ())  # not scripted
    used = (forward.__globals__.get(name) for name in names)
    return any(ORIGINAL in getattr(x, "__dict__", ()) for x in used)
