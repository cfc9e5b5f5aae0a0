"""Compare two recordings head by head: two checkpoints, or two prompts.

    moved = ½ Σ_k |p_k - p'_k| + ½ |r - r'|     the weight of a query that moved

p and p' are the weights of a query on the keys that both have, r and r' what is left
for other keys and the sink. So `moved` is the total variation distance: 0 if nothing
changed, 1 if no key keeps any weight. It is computed tile by tile, in memory linear in
the length. Different prompts are aligned by a diff of their tokens (alignment.py), or
by named spans, whose mass on each other is compared.

Next: ../seen.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import numpy as np

from regard.arrays import to_numpy
from regard.errors import OptionError, ShapeError
from regard.recording.record import Record, Recording
from regard.recording.spans import Span
from regard.stats.alignment import Pair, align_records, align_tokens
from regard.stats.nonfinite import mark_nonfinite
from regard.stats.registry import LOST, PLACE, STATISTICS, find_statistic
from regard.stats.rows import span_pairs
from regard.stats.table import (
    ALL_HEADS,
    HeadTable,
    Rows,
    describe,
    find_tokens,
    measure_rows,
)

TILE = (256, 1024)  # rows and keys of the weights that are compared at once
MOVED = ("moved", "moved_most", "moved_at")
MASS = ("mass", "mass_other", "mass_change")
Floats = np.ndarray[Any, np.dtype[np.float64]]
Pairs = Iterator[tuple[int, int, Record, Record]]  # sequence, layer, and its records


@dataclass(frozen=True, eq=False)
class HeadComparison(HeadTable):
    """One row for each head, or for each pair of spans of it.

    moved, moved_most, moved_at     mean and largest over the queries, and where
    entropy, entropy_other, entropy_change, …     each statistic: both, and other - one
    from_span, to_span, mass, mass_other, mass_change     instead, if spans were given
    """

    how: str = ""  # how the tokens were aligned

    @property
    def statistics(self) -> tuple[str, ...]:
        """None: the columns are differences, which are sorted largest first."""
        return ()

    def by_layer(self) -> HeadComparison:
        """Return one row for each layer: the mean of its heads, of moved_most the max.

        Rows of spans are averaged for each pair of spans.
        """
        place = [x for x in ("sequence", "layer", "from_span", "to_span") if x in self]
        rows = []
        for at in np.unique(self.rows[place]):
            mine = self.rows[self.rows[place] == at]
            row = mine[:1].copy()
            row["head"] = ALL_HEADS
            row[LOST] = mine[LOST].sum()
            for name in self.columns:
                if row[name].dtype.kind == "f":
                    row[name] = mine[name].mean()
            if "moved_most" in self:
                top = mine[np.argmax(mine["moved_most"])]
                row["moved_most"], row["moved_at"] = top["moved_most"], top["moved_at"]
            rows.append(row)
        return replace(self, rows=np.concatenate(rows) if rows else self.rows)

    def __contains__(self, column: object) -> bool:
        return column in self.columns

    def list_shown(self) -> list[str]:
        """Return the columns that are printed: those of one statistic are too many."""
        several = len(np.unique(self.rows["sequence"])) > 1
        place = ["sequence", "layer", "head"] if several else ["layer", "head"]
        if "mass" in self:
            return [*place, "from_span", "to_span", *MASS]
        charted = (x for x in STATISTICS if find_statistic(x).charted)
        changes = (f"{x}_change" for x in charted)
        return [*place, *MOVED, *(x for x in changes if x in self)]

    def __str__(self) -> str:
        from rich.console import Console  # noqa: PLC0415 (only to print)
        from rich.table import Table as Drawn  # noqa: PLC0415

        drawn, names = Drawn(box=None, pad_edge=False), self.list_shown()
        for name in names:
            drawn.add_column(name, justify="right")
        for row in self.rows:
            drawn.add_row(*(write_value(name, row[name]) for name in names))
        page = StringIO()
        width = max(100, sum(len(name) + 20 for name in names))
        Console(file=page, width=width).print(drawn)
        lines = [line.rstrip() for line in page.getvalue().splitlines()]
        return "\n".join([self.how, *lines, *self.list_nan()])


def write_value(name: str, x: Any) -> str:
    """Return a value as text."""
    if name.endswith("_change"):
        return "–" if np.isnan(x) else f"{x:+.3f}"
    if isinstance(x, np.floating):
        return "–" if np.isnan(x) else f"{x:.3f}"
    return "all" if name == "head" and x == ALL_HEADS else str(x)


def compare_heads(
    one: Recording,
    other: Recording,
    *,
    spans: Any = None,
    progress: Callable[[int, int], object] | None = None,
) -> HeadComparison:
    """Return what differs between the heads of two recordings.

    spans: (those of one, those of other), to compare the mass between named spans
    progress: called with the number of layers done and in total; may raise to stop
    """
    pairs = list(pair_records(one, other))
    named = None if spans is None else read_named(spans, pairs)
    parts, said = [], dict[str, None]()
    for n, (sequence, layer, mine, theirs) in enumerate(pairs, start=1):
        tokens = [x.tokens[sequence : sequence + 1] for x in (one, other)]
        first, second = (x[0] if x else () for x in tokens)
        if named is None:
            known = align_tokens(first, second)
            rows, keys = align_records(mine, theirs, known)
            both = ((one, mine), (other, theirs))
            named_by = tuple(find_tokens(*pair, sequence) for pair in both)
            part = compare_weights(mine, theirs, rows, keys, named_by)
            said[known.how] = None
        else:
            part = compare_spans(mine, theirs, *named)
            said[f"the spans {', '.join(x.name for x in named[0])}"] = None
        part["sequence"], part["layer"] = sequence, layer
        parts.append(part)
        if progress is not None:
            progress(n, len(pairs))
    names = " and ".join(dict.fromkeys((one.model, other.model)))
    return HeadComparison(np.concatenate(parts), how=f"{names}: {'; '.join(said)}")


def pair_records(one: Recording, other: Recording) -> Pairs:
    """Yield the records of each sequence and layer, paired by their numbers."""
    sizes = [(len(x.layers), len(set(x.sequences))) for x in (one, other)]
    for i, what in enumerate(("layers", "sequences")):
        if sizes[0][i] != sizes[1][i]:
            raise OptionError(
                f"one recording has {sizes[0][i]} {what} and the other {sizes[1][i]}, "
                "expected the same number: heads are compared by their numbers."
            )
    theirs = index_records(other)
    mine = index_records(one)
    if not mine.keys() & theirs.keys():
        raise OptionError("the recordings have no layer in common, or are empty.")
    for (sequence, layer), record in mine.items():
        found = theirs.get((sequence, layer))
        if found is None:
            continue
        if found.heads != record.heads:
            raise ShapeError(
                f"layer {layer}, {record.name}, has {record.heads} heads in one "
                f"recording and {found.heads} in the other, expected the same number: "
                "heads are compared by their numbers."
            )
        yield sequence, layer, record, found


def index_records(recording: Recording) -> dict[tuple[int, int], Record]:
    """Return the records by the number of their sequence and of their layer."""
    names = recording.layers
    pairs = zip(recording.records, recording.sequences, strict=True)
    return {(number, names.index(record.name)): record for record, number in pairs}


def compare_weights(
    one: Record,
    other: Record,
    rows: Pair,
    keys: Pair,
    tokens: Sequence[Sequence[int]],
) -> Rows:
    """Return a row for each head: how much moved, and the statistics of both."""
    kinds = ("i4", "i4", f"U{max(1, len(one.name))}", "i4")
    words = [f"{x}{end}" for x in STATISTICS for end in ("", "_other", "_change")]
    fields = [*zip(PLACE, kinds, strict=True), *((x, "f8") for x in MOVED[:2])]
    fields += [(MOVED[2], "i8"), *((x, "f8") for x in words), (LOST, "i4")]
    found = np.zeros(one.heads, np.dtype(fields))
    found["name"], found["head"] = one.name, np.arange(one.heads)
    moved = measure_moved(one, other, rows, keys)
    found["moved"], top = moved.mean(1), moved.argmax(1)
    found["moved_most"] = moved[np.arange(one.heads), top]
    found["moved_at"] = to_numpy(one.q_positions)[rows[0]][top]
    mine, theirs = (
        dict(describe(x, measure_rows(x, y, tuple(STATISTICS))))
        for x, y in zip((one, other), tokens, strict=True)
    )
    for name in STATISTICS:
        found[name], found[f"{name}_other"] = mine[name], theirs[name]
        found[f"{name}_change"] = theirs[name] - mine[name]
    found[LOST] = mine[LOST] + theirs[LOST]
    return found


def measure_moved(one: Record, other: Record, rows: Pair, keys: Pair) -> Floats:
    """Return the total variation distance of every pair of rows, (H, rows)."""
    one, other = mark_nonfinite(one), mark_nonfinite(other)
    shape = one.heads, len(rows[0])
    apart, left = np.zeros(shape), np.zeros(shape)
    for r in cut(rows, TILE[0]):
        at = slice(r.start, r.stop)
        for c in cut(keys, TILE[1]):
            p, q = (
                to_numpy(x.weights(i[at], keys=j[c.start : c.stop])).astype("f8")
                for x, i, j in zip((one, other), rows, keys, strict=True)
            )
            apart[:, at] += np.abs(p - q).sum(-1)
            left[:, at] += (p - q).sum(-1)
    return (apart + np.abs(left)) / 2


def cut(pair: Pair, size: int) -> Iterator[range]:
    """Yield the indices 0 … n - 1 in pieces."""
    n = len(pair[0])
    return (range(i, min(i + size, n)) for i in range(0, n, size))


def read_named(spans: Any, pairs: Sequence[Any]) -> tuple[list[Span], list[Span]]:
    """Return the spans that both recordings have, in the order of the first."""
    try:
        mine, theirs = (list_spans(x) for x in spans)
    except (TypeError, ValueError):
        raise OptionError(
            f"spans={spans!r:.80}, expected (spans of one, spans of other), each as "
            'seen.spans returns them or {"question": (3, 9)}.'
        ) from None
    if len({sequence for sequence, *_ in pairs}) > 1:
        raise OptionError(
            "spans= is for one sequence in each recording, and there are several. "
            "Record each prompt alone."
        )
    common = [name for name in mine if name in theirs]
    if not common:
        raise OptionError(
            f"the spans have no name in common: {', '.join(mine)} in one, "
            f"{', '.join(theirs)} in the other. Give corresponding parts the same name."
        )
    return [mine[x] for x in common], [theirs[x] for x in common]


def list_spans(spans: Any) -> dict[str, Span]:
    """Return spans by name, from a sequence of them or a mapping to ranges."""
    if isinstance(spans, Mapping):
        return {str(x): Span(str(x), *map(int, ends)) for x, ends in spans.items()}
    if not all(isinstance(x, Span) for x in spans):
        raise TypeError
    return {x.name: x for x in spans}


def compare_spans(
    one: Record, other: Record, mine: Sequence[Span], theirs: Sequence[Span]
) -> Rows:
    """Return a row for each head and pair of spans: the mean mass of a query on it."""
    names = [x.name for x in mine]
    text = f"U{max(map(len, names))}"
    kinds = ("i4", "i4", f"U{max(1, len(one.name))}", "i4")
    fields = [*zip(PLACE, kinds, strict=True), ("from_span", text), ("to_span", text)]
    fields += [*((x, "f8") for x in MASS), (LOST, "i4")]
    found = np.zeros((one.heads, len(names), len(names)), np.dtype(fields))
    found["name"], found["head"] = one.name, np.arange(one.heads)[:, None, None]
    found["from_span"] = np.array(names)[:, None]
    found["to_span"] = np.array(names)
    for name, record, spans in (("mass", one, mine), ("mass_other", other, theirs)):
        values = to_numpy(span_pairs(record, spans, spans, per="query").values)
        found[name] = values
        found[LOST] += np.isnan(values)
    found["mass_change"] = found["mass_other"] - found["mass"]
    return found.reshape(-1)
