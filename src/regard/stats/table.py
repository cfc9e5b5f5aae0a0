"""What every head did, in one table: a row for each sequence, layer and head.

    entropy    of a query's weights, in bits                      mean over queries
    sink       weight on the first key                            mean over queries
    previous   weight on the token before                         mean over queries
    self       weight on the token itself                         mean over queries
    induction  weight on the key after the last same token        mean over queries
    local      mass on the last 64 tokens                         mean over queries
    distance   how far back the mean key is, in tokens            mean over queries
    logit      the largest logit                                  of all queries
    nan_rows   how many queries have one of these numbers as NaN

A mean is over the queries that have the number: the first token has none before it. A
query whose number is NaN makes the mean NaN; it is printed as "nan", and what no query
has as "–". For each layer two calls of the kernel, a narrow one, and one walk for the
largest logit.

Next: lens/intercept.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from regard.arrays import to_numpy
from regard.errors import OptionError
from regard.masks.patterns import window
from regard.record import Record, Recording
from regard.stats.cells import ask_induction, ask_offset
from regard.stats.named import Named
from regard.stats.over_queries import find_nan, max_of, mean_of, take
from regard.stats.plan import Ask, Direct, make_plan
from regard.stats.reducers import LargestLogit
from regard.stats.rows import ask_entropy, ask_masked_mass, ask_mass, ask_mean_distance
from regard.stats.walk import walk

ALL_HEADS = -1
NEAR = 64  # tokens that count as local
PLACE = ("sequence", "layer", "name", "head")
NUMBERS = (
    "entropy",
    "sink",
    "previous",
    "self",
    "induction",
    "local",
    "distance",
    "logit",
)
COLUMNS = (*PLACE, *NUMBERS, "nan_rows")
LISTED = 8  # heads that are named below a printed table
Rows = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of COLUMNS: pandas.DataFrame(table.rows) and polars take them so."""

    rows: Rows
    cut: int = 0  # heads with NaN that `head` left out

    def sort(self, by: str, *, up: bool = False) -> Table:
        """Return the same rows in the order of a column, largest first, NaN last."""
        if by not in COLUMNS:
            raise OptionError(
                f"there is no column {by!r}, expected one of {', '.join(COLUMNS)}."
            )
        column = self.rows[by]
        order = np.argsort(column, kind="stable")
        if not up:
            order = order[::-1]
        if column.dtype.kind == "f":
            known = ~np.isnan(column[order])
            order = np.concatenate([order[known], order[~known]])
        return replace(self, rows=self.rows[order])

    def by_layer(self) -> Table:
        """Return a row for each layer: means over its heads, the largest logit.

        A head without a value is left out; one whose value is NaN makes it NaN.
        """
        places = np.unique(self.rows[["sequence", "layer"]])
        rows = np.zeros(len(places), self.rows.dtype)
        for row, place in zip(rows, places, strict=True):
            mine = self.rows[self.rows[["sequence", "layer"]] == place]
            row["sequence"], row["layer"] = place
            row["name"], row["head"] = mine["name"][0], ALL_HEADS
            row["nan_rows"] = mine["nan_rows"].sum()
            for name in NUMBERS:
                there = ~np.isnan(mine[name]) | (mine["nan_rows"] > 0)
                how = np.max if name == "logit" else np.mean
                row[name] = how(mine[name][there]) if there.any() else np.nan
        return replace(self, rows=rows)

    def head(self, n: int = 10) -> Table:
        """Return the first n rows."""
        cut = int((self.rows[n:]["nan_rows"] > 0).sum())
        return replace(self, rows=self.rows[:n], cut=self.cut + cut)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Let NumPy take the rows."""
        return np.asarray(self.rows, dtype=dtype, copy=copy)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        from rich.console import Console  # noqa: PLC0415 (only to print)
        from rich.table import Table as Drawn  # noqa: PLC0415

        drawn = Drawn(box=None, pad_edge=False)
        several = len(np.unique(self.rows["sequence"])) > 1
        places = ["sequence", "layer"] if several else ["layer"]
        for name in (*places, "head", *NUMBERS):
            drawn.add_column(name, justify="right")
        for row in self.rows:
            numbers = (write_number(row[name], row["nan_rows"]) for name in NUMBERS)
            head = "all" if row["head"] == ALL_HEADS else str(row["head"])
            drawn.add_row(*(str(row[name]) for name in places), head, *numbers)
        page = StringIO()
        Console(file=page, width=100).print(drawn)
        return "\n".join([page.getvalue().rstrip("\n"), *self.list_nan()])

    def list_nan(self) -> list[str]:
        """Return which rows of the table have NaN, and how many of them are cut off."""
        lost = self.rows[self.rows["nan_rows"] > 0]
        lines = []
        for row in lost[:LISTED]:
            head = "" if row["head"] == ALL_HEADS else f", head {row['head']}"
            where = f"sequence {row['sequence']}, layer {row['layer']}{head}"
            lines.append(f"NaN in {where}: {count(row['nan_rows'], 'query')}")
        more = len(lost) - len(lines) + self.cut
        if more:
            lines.append(f"NaN in {count(more, 'row')} of the table not listed here")
        return lines

    def list_rows(self) -> list[dict[str, Any]]:
        """Return a dict for each row, ready for JSON.

        None is a number that no query has, or NaN if "nan_rows" is above 0.
        """
        return [
            {
                name: None if isinstance(x, float) and not math.isfinite(x) else x
                for name, x in zip(COLUMNS, row, strict=True)
            }
            for row in self.rows.tolist()
        ]

    def to_json(self, path: str | Path) -> None:
        """Write a list of objects."""
        text = json.dumps(self.list_rows(), allow_nan=False)
        Path(path).write_text(text, "utf-8")

    def to_parquet(self, path: str | Path) -> None:
        """Write a Parquet file, which needs pyarrow."""
        try:
            import pyarrow as pa  # noqa: PLC0415 (only here)
            import pyarrow.parquet as pq  # noqa: PLC0415
        except ImportError:
            raise OptionError(
                "a Parquet file needs pyarrow: pip install pyarrow. to_json does not."
            ) from None
        columns = {name: pa.array(self.rows[name]) for name in COLUMNS}
        pq.write_table(pa.table(columns), path)


def write_number(x: float, nan_rows: int) -> str:
    """Return a number, "nan" if queries have NaN, a dash for what is not defined."""
    return "–" if math.isnan(x) and not nan_rows else f"{x:.3f}"


def count(n: int, word: str) -> str:
    """Return a number with its noun.

    >>> count(1, "query"), count(2, "query"), count(3, "row")
    ('1 query', '2 queries', '3 rows')
    """
    more = f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"
    return f"{n} {word if n == 1 else more}"


def make_table(
    recording: Recording, *, progress: Callable[[int, int], object] | None = None
) -> Table:
    """Return the table of a recording.

    progress: called with the records done, and all; what it raises ends the work
    """
    names = list(dict.fromkeys(record.name for record in recording.records))
    fields, parts = make_fields(names), []
    pairs = zip(recording.records, recording.sequences, strict=True)
    for n, (record, sequence) in enumerate(pairs, start=1):
        tokens = recording.tokens[sequence] if sequence < len(recording.tokens) else ()
        rows = np.zeros(record.heads, fields)
        rows["sequence"], rows["layer"] = sequence, names.index(record.name)
        rows["name"], rows["head"] = record.name, np.arange(record.heads)
        for name, values in describe(record, tokens):
            rows[name] = values
        parts.append(rows)
        if progress is not None:
            progress(n, len(recording.records))
    return Table(np.concatenate(parts) if parts else np.zeros(0, fields))


def make_fields(names: Sequence[str]) -> np.dtype[Any]:
    """Return what a row holds, with room for the longest of the layers' names."""
    kinds = ("i4", "i4", f"U{max(map(len, names), default=0) or 1}", "i4")
    numbers = ((name, "f8") for name in NUMBERS)
    return np.dtype([*zip(PLACE, kinds, strict=True), *numbers, ("nan_rows", "i4")])


def list_asks(record: Record, tokens: Sequence[int]) -> dict[str, Ask | Direct]:
    """Return the questions behind a row; make_plan(...) says what they cost."""
    first = (to_numpy(record.k_positions) == 0)[:, None]
    asks: dict[str, Ask | Direct] = {
        "entropy": ask_entropy(record),
        "sink": ask_mass(record, first),
        "previous": ask_offset(record, 1),
        "self": ask_offset(record, 0),
        "local": ask_masked_mass(record, window(NEAR - 1)),
        "distance": ask_mean_distance(record),
    }
    if len(tokens) > int(to_numpy(record.q_positions).max(initial=-1)):
        asks["induction"] = ask_induction(record, tokens)
    return asks


def describe(record: Record, tokens: Sequence[int]) -> Iterator[tuple[str, Rows]]:
    """Yield each of NUMBERS and "nan_rows", (H,)."""
    found = measure_rows(record, tokens)
    lost = np.zeros((record.heads, record.q.shape[1]), bool)
    for named in found.values():
        lost |= find_nan(named)
    yield "nan_rows", lost.sum(1)
    for name in NUMBERS:
        if name not in found:
            yield name, np.full(record.heads, np.nan)
        elif name == "logit":
            yield name, take(max_of(found[name]))
        else:
            yield name, take(mean_of(found[name]))


def measure_rows(
    record: Record, tokens: Sequence[int], names: Sequence[str] = NUMBERS
) -> dict[str, Named]:
    """Return the numbers of every query, (H, Nq) each.

    A query that has none is NaN, and marked in `missing`; any other NaN was computed.
    What needs the tokens is left out where they are not known.
    """
    asks = list_asks(record, tokens)
    found = make_plan({x: asks[x] for x in names if x in asks}).run()
    rows = {name: squeeze(named) for name, named in found.items()}
    if "entropy" in rows:
        bits = take(rows["entropy"]) / math.log(2)
        rows["entropy"] = replace(rows["entropy"], values=bits)
    if "logit" in names:
        (rows["logit"],) = walk(record, LargestLogit())
    return rows


def squeeze(named: Named) -> Named:
    """Return a statistic of one feature without that axis."""
    if named.axes[-1] != "feature":
        return named
    missing = None if named.missing is None else named.missing[..., 0]
    return Named(named.values[..., 0], named.axes[:-1], named.how, missing)
