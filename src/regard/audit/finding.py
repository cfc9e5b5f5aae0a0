"""The findings of an audit: what, in which layer and heads, and what to do about it.

    error     weight on forbidden cells, or values that are not finite
    warning   probably an error, depending on what was intended
    note      worth knowing, not an error

Next: audit.py
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from regard.audit.audited_record import FUTURE, OUTSIDE, AuditedRecord
from regard.display import Displayed, write_html_table, write_line

ADVICE = {  # all possible findings, and what to do about them
    "weight on padding": "Hide padding from all queries, as in mask & padding(valid).",
    FUTURE: "Mask it with is_causal=True or causal(). It is right only in an encoder.",
    "weight on other documents": "Packed texts need causal() & same(documents).",
    OUTSIDE: "The mask that ran allows more than expect= does.",
    "expected keys hidden": "The mask that ran forbids what expect= allows.",
    "mask polarity flipped": "True is: attend for SDPA, ignore in MultiheadAttention.",
    "softcap after the mask": "Hidden cells keep one finite logit: cap, then mask.",
    "cache misaligned": "is_causal counts from key 0; with a cache, mask by q_start.",
    "own token hidden": "The future begins after the diagonal: triu(diagonal=1).",
    "window too wide": "If W counts the query too, write last(W) or window(W - 1).",
    "window too narrow": "If W counts others only, write last(W + 1) or window(W).",
    "windows differ by one": "Other layers of its kind look back one key more or less.",
    "no tokens left": "It hides a whole sequence. Is it inverted? 1 means attend.",
    "tokens hidden as padding": "It is 1 for tokens, 0 for padding. Is it inverted?",
    "one kind of token left": "It hides a text and keeps padding? Give pad= or valid=.",
    "not finite": "NaN or infinity: an overflow, or a softmax of nothing, before this.",
    "empty rows": "They see no key. If they are padding, say so with valid=.",
    "rows do not sum to 1": "The mask that ran is not the one that was recorded.",
    "dead head": "All its weights are equal: it only averages, as in a new model.",
    "saturated head": "One key takes all, no gradient is left: is the scale missing?",
    "sink": "It rests on the first token, as heads of trained models do: no fault.",
    "positions do not start at 0": "What came before these rows was not watched.",
    "queries not placed": "Nobody said where they stand, so expect= was not applied.",
    "not audited": "This layer was not kept: read the coverage of the recording.",
    "positions differ": "q or k differ in the first layer: shift positions by padding.",
    "head grouping differs": "Keys of other heads: repeat_interleave, do not tile.",
    "masks differ": "q and k are the same, the weights are not: mask, bias or scale.",
    "inputs differ": "q or k differ here first: look at what runs before this layer.",
}
Level = Literal["error", "warning", "note"]
ROWS = 40  # findings shown in a notebook
LEVELS: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A finding in one layer; the numbers are those of the worst sequence."""

    what: str  # a key of ADVICE
    layer: str
    worst: dict[int, float] = field(default_factory=dict)  # first number, by head
    numbers: dict[str, float] = field(default_factory=dict)
    level: Level = "error"

    @property
    def heads(self) -> tuple[int, ...]:
        """The affected heads; empty if they are not known."""
        return tuple(self.worst)

    @property
    def advice(self) -> str:
        """What to do about the finding."""
        return ADVICE[self.what]

    @property
    def details(self) -> str:
        """The affected heads and the numbers of the worst sequence, as text."""
        heads = ", ".join(map(str, self.heads[:16])) + ", …" * (len(self.heads) > 16)
        found = ", ".join(f"{name} {x:.4g}" for name, x in self.numbers.items())
        return f"heads {heads}: {found}" if heads else found

    def __str__(self) -> str:
        layer = self.layer or "the model itself"
        place = f"{layer}, {self.details}" if self.heads else f"{layer}: {self.details}"
        return f"{self.level}: {self.what} in {place}. {self.advice}"


class Findings(tuple[Finding, ...], Displayed):
    """All findings; a tuple that prints a line for each of them."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "nothing found"

    def to_html(self) -> str:
        """Return a table of the findings."""
        if not self:
            return write_line(str(self))
        rows = [
            (x.level, x.what, x.layer or "the model itself", x.details, x.advice)
            for x in self[:ROWS]
        ]
        head = ("level", "what", "layer", "details", "what to do")
        more = len(self) - len(rows)
        told = write_line(f"and {more} more; print() lists all") if more else ""
        return write_html_table(head, rows, texts=len(head)) + told


def tell(
    case: AuditedRecord,
    what: str,
    hit: Tensor,  # (H, Nq)
    values: Tensor,  # broadcasts to hit
    *,
    unit: str = "mass",
    level: Level = "error",
) -> Iterator[Finding]:
    """Yield one finding for the rows in `hit`, if there are any."""
    if not bool(hit.any()):
        return
    values = values.double().expand(hit.shape).masked_fill(~hit, -math.inf)
    heads = hit.any(1).nonzero()[:, 0].tolist()
    yield Finding(
        what=what,
        layer=case.record.name,
        worst={h: float(values[h].max()) for h in heads},
        numbers={
            unit: float(values.max()),
            "rows": int(hit.any(0).sum()),
            "sequence": case.sequence,
            "query": int(case.at_q[int(values.argmax()) % hit.shape[1]]),
        },
        level=level,
    )


def combine(found: list[Finding], names: list[str]) -> tuple[Finding, ...]:
    """Return the findings merged over all sequences: one per kind and layer."""
    groups = defaultdict(list)
    for x in found:
        groups[x.level, x.what, x.layer].append(x)
    whole = []
    for some in groups.values():
        most = max(some, key=lambda x: max(x.worst.values(), default=0))
        heads = sorted({h for x in some for h in x.worst})
        worst = {h: max(x.worst[h] for x in some if h in x.worst) for h in heads}
        whole.append(replace(most, worst=worst))
    order = {name: i for i, name in enumerate(names)}
    whole.sort(key=lambda x: (LEVELS.index(x.level), order.get(x.layer, -1), x.what))
    return tuple(whole)
