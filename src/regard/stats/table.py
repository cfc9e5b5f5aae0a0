"""A table of head statistics: one row for each sequence, layer and head.

    sequence, layer, name, head     the head
    entropy, sink, …                one column for each statistic of registry.py
    nan_rows                        how many queries have NaN in one of them

Means are over the queries that have a value: the first token has no previous token. A
query whose value is NaN makes the mean NaN, which is printed as "nan"; a statistic
without any value is printed as "–", and one that too few queries have is named below
the table (few_queries.py). A layer costs two full calls of the kernel, a narrow one,
and one walk for the largest logit.

Next: lens/watch.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from regard.display import Displayed, write_code, write_html_table, write_line
from regard.errors import OptionError
from regard.recording.indices import read_index
from regard.recording.record import Record, Recording
from regard.stats.few_queries import FewQueries, find_few, list_few
from regard.stats.named_array import NamedArray
from regard.stats.over_queries import find_nan, max_of, mean_of, to_float64
from regard.stats.plan import Ask, DirectAsk, make_plan
from regard.stats.registry import LOST, PLACE, STATISTICS, Statistic, find_statistic
from regard.stats.table_formats import (
    make_arrow,
    make_pandas,
    make_polars,
    write_parquet,
)
from regard.stats.tile_walk import walk
from regard.threads import use_threads

ALL_HEADS = -1
SHOWN = 20  # rows shown in a notebook
LISTED = 8  # heads listed below a printed table
Rows = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class HeadTable(Displayed):
    """Rows with named columns.

    table["entropy"]                  a column, as a NumPy array
    table[table["sink"] > 0.5]        some rows, by booleans, numbers or a slice
    table[0]                          one row, as a dict
    """

    rows: Rows
    cut: int = 0  # heads with NaN that `head` removed
    few: tuple[FewQueries, ...] = ()  # numbers of too few queries, by record

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns."""
        return self.rows.dtype.names or ()

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of the statistics."""
        return self.columns[len(PLACE) : -1]

    def sort(self, by: str, *, up: bool | None = None) -> HeadTable:
        """Return the rows sorted by a column, NaN last.

        up: the smallest first; by default, as the registry defines for the statistic
        """
        column = self[by]
        if up is None:
            up = by in self.statistics and find_statistic(by).ascending
        order = np.argsort(column, kind="stable")
        if not up:
            order = order[::-1]
        if column.dtype.kind == "f":
            known = ~np.isnan(column[order])
            order = np.concatenate([order[known], order[~known]])
        return replace(self, rows=self.rows[order])

    def by_layer(self) -> HeadTable:
        """Return one row for each layer: the mean, or the max, over its heads.

        Heads without a value are skipped; a head with NaN makes the result NaN.
        """
        places = np.unique(self.rows[["sequence", "layer"]])
        rows = np.zeros(len(places), self.rows.dtype)
        for row, place in zip(rows, places, strict=True):
            mine = self.rows[self.rows[["sequence", "layer"]] == place]
            row["sequence"], row["layer"] = place
            row["name"], row["head"] = mine["name"][0], ALL_HEADS
            row["nan_rows"] = mine["nan_rows"].sum()
            for name in self.statistics:
                there = ~np.isnan(mine[name]) | (mine["nan_rows"] > 0)
                reduce = getattr(np, find_statistic(name).reduction)
                row[name] = reduce(mine[name][there]) if there.any() else np.nan
        return replace(self, rows=rows)

    def pick(
        self, numbers: Sequence[str] | None, sequence: int
    ) -> tuple[Rows, list[Statistic]]:
        """Return the rows of a sequence, and the statistics to draw.

        numbers: names of statistics; by default, those with `charted` in the registry
        """
        rows, known = self.rows[self.rows["sequence"] == sequence], self.statistics
        if numbers is None:
            numbers = [name for name in known if find_statistic(name).charted]
        if not numbers or not set(numbers) <= set(known):
            raise OptionError(
                f"numbers={numbers}, expected some of {', '.join(known)}."
            )
        if not len(rows):
            raise OptionError(f"there is no sequence {sequence} in the table.")
        return rows, [find_statistic(name) for name in numbers]

    def head(self, n: int = 10) -> HeadTable:
        """Return the first n rows."""
        cut = int((self.rows[n:]["nan_rows"] > 0).sum())
        return replace(self, rows=self.rows[:n], cut=self.cut + cut)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Return the rows as a NumPy array."""
        return np.asarray(self.rows, dtype=dtype, copy=copy)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, which: Any) -> Any:
        """Return a column by its name, one row as a dict, or some rows as a table."""
        if isinstance(which, str):
            return self.rows[self.find_column(which)]
        if isinstance(which, list | tuple) and any(isinstance(x, str) for x in which):
            return self.rows[[self.find_column(x) for x in which]]
        found = read_index(which, len(self), "row")
        if isinstance(found, int):
            return dict(zip(self.columns, self.rows[found].item(), strict=True))
        return replace(self, rows=self.rows[found])

    def find_column(self, name: str) -> str:
        """Return the name of a column; raise OptionError if there is none."""
        if name not in self.columns:
            known = ", ".join(self.columns)
            raise OptionError(f"there is no column {name!r}, expected one of {known}.")
        return name

    def __str__(self) -> str:
        from rich.console import Console  # noqa: PLC0415 (only to print)
        from rich.table import Table as Drawn  # noqa: PLC0415

        drawn = Drawn(box=None, pad_edge=False)
        several = len(np.unique(self.rows["sequence"])) > 1
        places = ["sequence", "layer"] if several else ["layer"]
        for name in (*places, "head", *self.statistics):
            drawn.add_column(name, justify="right")
        for row in self.rows:
            lost = row["nan_rows"]
            numbers = (format_number(row[name], lost) for name in self.statistics)
            head = "all" if row["head"] == ALL_HEADS else str(row["head"])
            drawn.add_row(*(str(row[name]) for name in places), head, *numbers)
        page = StringIO()
        width = max(100, sum(len(name) + 7 for name in self.columns))
        # without force_jupyter=False, rich draws into the cell of a notebook instead
        Console(file=page, width=width, force_jupyter=False).print(drawn)
        notes = [*self.list_few(), *self.list_nan()]
        return "\n".join([page.getvalue().rstrip("\n"), *notes])

    def to_html(self) -> str:
        """Return the first rows, shaded from the least to the largest of a column."""
        rows, names = self.rows[:SHOWN], self.statistics
        several = len(np.unique(self.rows["sequence"])) > 1
        places = ["sequence", "layer"] if several else ["layer"]
        cells = []
        for row in rows:
            head = "all" if row["head"] == ALL_HEADS else str(row["head"])
            numbers = [format_number(row[x], row[LOST]) for x in names]
            cells.append([*(str(row[x]) for x in places), head, *numbers])
        columns = [np.zeros(len(rows))] * (len(places) + 1)
        columns += [shade_column(self.rows[x])[:SHOWN] for x in names]
        shades = np.stack(columns, 1).tolist()
        text = write_html_table([*places, "head", *names], cells, shades=shades)
        more = len(self) - len(rows)
        if more:
            text += write_code(
                f"{write_count(more, 'more row')}:",
                'table.sort("entropy"), table.by_layer(), table.to_pandas()',
            )
        return text + "".join(map(write_line, [*self.list_few(), *self.list_nan()]))

    def list_few(self) -> list[str]:
        """Return lines about statistics that too few queries of the rows have."""
        here = {tuple(x) for x in self.rows[["sequence", "layer"]].tolist()}
        several = len({sequence for sequence, _ in here}) > 1
        shown = (x for x in self.few if (x.sequence, x.layer) in here)
        return list_few(shown, several=several)

    def list_nan(self) -> list[str]:
        """Return lines that list the rows with NaN, and count those not listed."""
        lost = self.rows[self.rows["nan_rows"] > 0]
        lines = []
        for row in lost[:LISTED]:
            head = "" if row["head"] == ALL_HEADS else f", head {row['head']}"
            where = f"sequence {row['sequence']}, layer {row['layer']}{head}"
            lines.append(f"NaN in {where}: {write_count(row['nan_rows'], 'query')}")
        more = len(lost) - len(lines) + self.cut
        if more:
            lines.append(
                f"NaN in {write_count(more, 'row')} of the table not listed here"
            )
        return lines

    def list_rows(self) -> list[dict[str, Any]]:
        """Return a dict for each row, ready for JSON.

        None means that no query has a value, or NaN if "nan_rows" is above 0.
        """
        return [
            {
                name: None if isinstance(x, float) and not math.isfinite(x) else x
                for name, x in zip(self.columns, row, strict=True)
            }
            for row in self.rows.tolist()
        ]

    def to_json(self, path: str | Path) -> None:
        """Write the rows as a JSON list of objects."""
        text = json.dumps(self.list_rows(), allow_nan=False)
        Path(path).write_text(text, "utf-8")

    def to_parquet(self, path: str | Path) -> None:
        """Write a Parquet file; requires pyarrow."""
        write_parquet(self.rows, path)

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame."""
        return make_pandas(self.rows)

    def to_polars(self) -> Any:
        """Return a polars.DataFrame; a statistic without a value is null."""
        return make_polars(self.rows)

    def to_arrow(self) -> Any:
        """Return a pyarrow.Table; a statistic without a value is null."""
        return make_arrow(self.rows)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Export the rows to any library that reads the Arrow PyCapsule protocol."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def __dataframe__(
        self,
        nan_as_null: bool = False,  # noqa: FBT001, FBT002 (as the protocol has it)
        allow_copy: bool = True,  # noqa: FBT001, FBT002
    ) -> Any:
        """Export the rows to libraries that read the dataframe interchange protocol."""
        return self.to_arrow().__dataframe__(nan_as_null, allow_copy)


def format_number(x: float, nan_rows: int) -> str:
    """Return a number as text, "nan" if queries have NaN, a dash without a value."""
    return "–" if math.isnan(x) and not nan_rows else f"{x:.3f}"


def shade_column(column: Rows) -> Rows:
    """Return a column from 0, its least value, to 1, its largest; NaN is 0."""
    known = column[np.isfinite(column)]
    low, high = (known.min(), known.max()) if known.size else (0.0, 0.0)
    shades: Rows = np.nan_to_num((column - low) / (high - low or 1), posinf=1, neginf=0)
    return shades


def write_count(n: int, word: str) -> str:
    """Return a number with its noun.

    >>> write_count(1, "query"), write_count(2, "query"), write_count(3, "row")
    ('1 query', '2 queries', '3 rows')
    """
    more = f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"
    return f"{n} {word if n == 1 else more}"


def make_table(
    recording: Recording, *, progress: Callable[[int, int], object] | None = None
) -> HeadTable:
    """Return the table of a recording.

    progress: called with the number of records done and in total; may raise to stop
    """
    names = list(dict.fromkeys(record.name for record in recording.records))
    fields, parts = make_fields(names), []
    few: list[FewQueries] = []
    pairs = zip(recording.records, recording.sequences, strict=True)
    for n, (record, sequence) in enumerate(pairs, start=1):
        layer = names.index(record.name)
        rows = np.zeros(record.heads, fields)
        rows["sequence"], rows["layer"] = sequence, layer
        rows["name"], rows["head"] = record.name, np.arange(record.heads)
        tokens = find_tokens(recording, record, sequence)
        found = measure_rows(record, tokens, tuple(STATISTICS))
        for name, values in describe(record, found):
            rows[name] = values
        few += find_few(found, sequence, layer)
        parts.append(rows)
        if progress is not None:
            progress(n, len(recording.records))
    rows = np.concatenate(parts) if parts else np.zeros(0, fields)
    return HeadTable(rows, few=tuple(few))


def find_tokens(recording: Recording, record: Record, sequence: int) -> Sequence[int]:
    """Return the tokens of a record's queries; () if they are not known.

    The queries of a decoder are not the tokens that its encoder read.
    """
    if record.name in recording.notes.get("decoders", ()):
        return ()
    return recording.tokens[sequence] if sequence < len(recording.tokens) else ()


def make_fields(names: Sequence[str]) -> np.dtype[Any]:
    """Return the dtype of a row, wide enough for the longest layer name."""
    kinds = ("i4", "i4", f"U{max(map(len, names), default=0) or 1}", "i4")
    numbers = ((name, "f8") for name in STATISTICS)
    return np.dtype([*zip(PLACE, kinds, strict=True), *numbers, (LOST, "i4")])


def describe(
    record: Record, found: Mapping[str, NamedArray]
) -> Iterator[tuple[str, Rows]]:
    """Yield each statistic and "nan_rows", (H,)."""
    lost = np.zeros((record.heads, record.q.shape[1]), bool)
    for name, named in found.items():
        lost |= find_nan(named)
        reduce = max_of if find_statistic(name).reduction == "max" else mean_of
        yield name, to_float64(reduce(named))
    yield LOST, lost.sum(1)


def measure_rows(
    record: Record, tokens: Sequence[int], names: Sequence[str]
) -> dict[str, NamedArray]:
    """Return the statistics of every query, (H, Nq) each.

    Queries without a value are NaN and marked in `missing`; any other NaN was computed.
    If the record does not have a statistic, all of its queries are missing.
    """
    shape = record.heads, record.q.shape[1]
    with use_threads(math.prod(shape) * record.k.shape[1] * record.q.shape[2]):
        asked = {name: find_statistic(name).request(record, tokens) for name in names}
        asks = {name: x for name, x in asked.items() if isinstance(x, Ask | DirectAsk)}
        walked = {
            name: x for name, x in asked.items() if name not in asks and x is not None
        }
        reduced = walk(record, *walked.values()) if walked else ()
        found = make_plan(asks).run() | dict(zip(walked, reduced, strict=True))
    nothing = NamedArray(
        np.full(shape, np.nan), ("head", "query"), "", np.ones(shape, bool)
    )
    return {name: squeeze(found.get(name, nothing)) for name in names}


def squeeze(named: NamedArray) -> NamedArray:
    """Return a statistic of one feature without its feature axis."""
    if named.axes[-1] != "feature":
        return named
    missing = None if named.missing is None else named.missing[..., 0]
    return NamedArray(named.values[..., 0], named.axes[:-1], named.how, missing)
