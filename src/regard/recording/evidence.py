"""What is known about records besides their numbers: how they came about, and proofs.

    LseOrigin      who computed the log-sum-exp of their rows
    Certificate    what was compared with numbers that only the model knew
    Covered        how a layer was recorded, or why not, and where all of its rows are

Next: record.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class LseOrigin(Enum):
    """Who computed the log-sum-exp of a record's rows."""

    KERNEL = "the model's kernel"
    LOGITS = "the model's own logits"
    RECORD = "q and k of the record"  # it proves nothing about them


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What was checked of a record, against what only the model knew."""

    by: str  # "row sums", "outputs", or both
    rows: int  # rows of heads that were checked
    failed: int = 0
    unknown: int = 0  # rows in which other keys would not have been noticed
    error: float = 0.0  # the largest, in relation to its tolerance
    tolerance: float = 0.0  # what rounding may change in that row
    power: float = 0.0  # what other keys would change, in the head that tells least


@dataclass(frozen=True, kw_only=True)
class Covered:
    """The coverage of one attention module: how, or why not, it was recorded."""

    name: str
    via: str  # how it was intercepted: "sdpa", "transformers", …; "" if it was not
    calls: int = 0  # softmaxes and fused calls that were heard
    kept: int = 0  # how many of them are in records
    error: float = 0.0  # of its output, recomputed from the record
    reason: str = ""  # why it was not recorded
    attention: bool = True  # False: a gate, a router or an output
    note: str = ""  # what a reader of its records must know
    rows: int = 0  # queries of all calls and sequences, also those of copied beams
    in_records: int = 0  # how many of them the records have
    left_out: Mapping[str, int] = field(default_factory=dict)  # the others, by reason

    def __str__(self) -> str:
        calls = f"{self.calls} call{'' if self.calls == 1 else 's'}"
        about = f"{self.via}, {calls}, error {self.error:.0e}" if self.via else ""
        note = f"({self.note})" if self.note else ""
        said = " ".join(filter(None, (about, self.reason, note)))
        return f"{self.name or 'the model itself'}: {said}"
