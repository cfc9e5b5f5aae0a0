"""Statistics that too few queries have: what is said beside the number.

    induction     only a query whose token occurred before has a value. On 3 repeats the
                  mean tells nothing of a head: a token or two decide it.

    count < enough     queries of a record with a value, and `enough` of registry.py:
                       "tokens repeat too rarely to tell: 3 of 120 queries, 25 needed"

The number stays in the table; the table, the terminal and the map say this of it, and
no head gets its badge. A record that does not have a statistic at all (a decoder whose
tokens are not known) has none of this: its number is "–".

Next: table.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from regard.stats.named_array import NamedArray
from regard.stats.over_queries import find_missing
from regard.stats.registry import find_statistic


@dataclass(frozen=True)
class FewQueries:
    """A statistic that too few queries of a record have."""

    sequence: int
    layer: int
    statistic: str
    count: int  # queries with a value
    queries: int

    def __str__(self) -> str:
        entry = find_statistic(self.statistic)
        count = f"{self.count:,} of {self.queries:,} queries"
        return f"{entry.too_few}: {count}, {entry.enough} needed"

    def pack(self) -> dict[str, Any]:
        """Return what a web page needs, ready for JSON."""
        return asdict(self)


def find_few(
    found: Mapping[str, NamedArray], sequence: int, layer: int
) -> Iterator[FewQueries]:
    """Yield the statistics of a record that too few of its queries have."""
    for name, named in found.items():
        if not named.how:  # the record does not have it
            continue
        missing = find_missing(named)
        count = int((~missing).sum(1).min(initial=missing.shape[1]))
        if count < find_statistic(name).enough:
            yield FewQueries(sequence, layer, name, count, missing.shape[1])


def list_few(few: Iterable[FewQueries], *, several: bool) -> list[str]:
    """Return a line for each statistic and sequence, of the layer with the most values.

    several: whether to name the sequences
    """
    best: dict[tuple[int, str], FewQueries] = {}
    for x in few:
        known = best.setdefault((x.sequence, x.statistic), x)
        if x.count > known.count:
            best[x.sequence, x.statistic] = x
    return [
        f"{x.statistic}{f' of sequence {x.sequence}' if several else ''}: {x}"
        for x in best.values()
    ]
