"""The coverage of a recording: how, or why not, each attention module was recorded.

    seen.coverage()          a tuple of Covered; a notebook shows it as a table

Next: hidden_tokens.py
"""

from __future__ import annotations

from collections.abc import Iterable

from regard.display import Displayed, write_html_table, write_line
from regard.recording.evidence import Covered

ROWS = 40  # rows of a table in a notebook
COMPARES = "it compares two arrays, as attention does; what takes it is not known"
HEAD = ("layer", "recorded as", "calls", "error", "reason or note")


class Coverage(tuple[Covered, ...], Displayed):
    """The coverage of every module; a tuple that prints a line for each of them."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no attention was seen"

    def to_html(self) -> str:
        """Return a table, layers that were not recorded first if there are many."""
        if not self:
            return write_line(str(self))
        return write_coverage(x for x in self if x.attention) + "".join(
            write_line(x) for x in self.describe_others()
        )

    def describe_others(self) -> list[str]:
        """Return lines about what is not attention: other softmaxes, versions."""
        others = [x for x in self if not x.attention]
        calls = sum(x.calls for x in others if COMPARES not in x.reason)
        kinds = "gates, routers, outputs, or attention to learnt keys"
        lines = [f"{calls} other softmaxes: {kinds}"] if calls else []
        for x in (x for x in others if COMPARES in x.reason):
            where = x.name or "the model itself"
            lines.append(f"{where}: a softmax is not recorded: {x.reason}")
        return lines + [x.reason or x.note for x in others if not x.via]


def write_coverage(layers: Iterable[Covered]) -> str:
    """Return a table of layers."""
    every = list(layers)
    shown = every
    if len(every) > ROWS:  # none that is missing may be left out for one that is not
        shown = sorted(every, key=lambda x: not x.reason)[:ROWS]
    rows = [
        (
            x.name or "the model itself",
            x.via or "–",
            str(x.calls),
            f"{x.error:.0e}" if x.via else "–",
            "; ".join(filter(None, (x.reason, x.note))),
        )
        for x in shown
    ]
    table = write_html_table(HEAD, rows, texts=2, last_text=True)
    more = len(every) - len(shown)
    return table + (
        write_line(f"and {more} more layers; print() lists all") if more else ""
    )
