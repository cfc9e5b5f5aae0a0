"""The table of an atlas: means of every head with intervals, examples, differences.

    table = read_table("prose")              the folder of `regard atlas run`
    table.mean("induction")                  (layers, heads), NaN where there is none
    table.half("induction")                  half of each 95 % confidence interval
    table.interval                           "student", or "sequence" after a run with
                                             a stopping rule (confidence.py)
    table.examples("induction", 18, 8)       where the values of that head are largest

    compare_atlases(a, b, "induction").marked    significant differences: larger than
                                             the interval of 1 - 5 % / (layers · heads)

Next: page.py
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.atlas.confidence import find_half
from regard.atlas.settings import SEQUENCE, STUDENT, read_interval
from regard.atlas.store import OTHER, WRONG, encode_result, unpack
from regard.atlas.tally import DOUBTS, Numbers, Tally
from regard.atomic_file import write_atomically
from regard.errors import FileError, OptionError
from regard.stats.registry import find_statistic
from regard.student import SURE

TABLE, EXAMPLES = "table.parquet", "examples.json"
KINDS = {
    **dict.fromkeys(("folder", "model", "corpus", "precision", "interval"), str),
    **dict.fromkeys(("documents", "of", "tokens", "length", "pieces"), int),
    **dict.fromkeys(("shards", "aside", "copies"), int),
    **dict.fromkeys(("packed", "whole"), bool),
    **dict.fromkeys(("left_out", "missed", "reasons"), dict),
    "set_aside": list,
}
NAN = re.compile("ArithmeticError: .*NaN")  # from worker.py of any version


@dataclass(frozen=True)
class Example:
    """A token where a value of a head is among its largest, with the text around it."""

    value: float
    document: str
    piece: int = 0
    position: int = 0
    before: str = ""
    token: str = ""
    after: str = ""


Found = Mapping[tuple[str, int, int], tuple[Example, ...]]


@dataclass(frozen=True, eq=False)
class AtlasTable:
    """A tally with its metadata and examples."""

    about: dict[str, Any]
    tally: Tally
    found: Found  # by statistic, layer and head

    @property
    def layers(self) -> tuple[str, ...]:
        """The modules, in the order in which they ran."""
        return self.tally.layers

    @property
    def heads(self) -> tuple[int, ...]:
        """The number of heads of each layer."""
        return self.tally.heads

    @property
    def statistics(self) -> tuple[str, ...]:
        """The statistics that were measured."""
        return self.tally.statistics

    def mean(self, statistic: str) -> Numbers:
        """Return the mean (or maximum, see is_largest) of queries, (layers, heads)."""
        tally = self.tally
        return self.lay(statistic, tally.peak if is_largest(statistic) else tally.mean)

    @property
    def interval(self) -> str:
        """The kind of confidence interval, "student" or "sequence"."""
        return str(self.about.get("interval", STUDENT))

    @property
    def with_nan(self) -> int:
        """The number of documents set aside because of NaN."""
        reasons = count_aside(self.about)
        return sum(count for reason, count in reasons.items() if NAN.match(reason))

    def half(self, statistic: str, sure: float = SURE) -> Numbers:
        """Return half of the confidence interval of each mean; NaN if unknown."""
        s, tally = self.index(statistic), self.tally
        packed = bool(self.about.get("packed"))  # draws are not independent
        if is_largest(statistic) or (self.interval == SEQUENCE and packed):
            return self.lay(statistic, tally.peak * np.nan)
        one = replace(
            tally,
            statistics=(statistic,),
            sums=tally.sums[s : s + 1],
            peak=tally.peak[s : s + 1],
        )
        if self.interval == STUDENT:
            half = one.half(sure) + np.where(one.doubt == 2, np.nan, 0.0)
        else:
            length, pieces = self.about["length"], self.about["pieces"]
            half = find_half(one, length=length, pieces=pieces, sure=sure)
        return self.lay(statistic, np.broadcast_to(half, tally.peak.shape))

    def doubt(self, statistic: str) -> Numbers:
        """Return why Student's intervals may not hold, as indices of DOUBTS."""
        used = self.interval == STUDENT and not is_largest(statistic)
        return self.lay(statistic, self.tally.doubt.astype(np.float64) * used)

    def count(self, statistic: str) -> Numbers:
        """Return the number of documents behind each mean."""
        return self.lay(statistic, self.tally.sums[..., 0])

    def unit(self, statistic: str) -> str:
        """Return the unit of a statistic."""
        return find_statistic(statistic).unit

    def examples(self, statistic: str, layer: int, head: int) -> tuple[Example, ...]:
        """Return the examples of a head, largest first."""
        return self.found.get((statistic, layer, head), ())

    def index(self, statistic: str) -> int:
        """Return the index of a statistic."""
        if statistic not in self.statistics:
            known = ", ".join(self.statistics)
            raise OptionError(f"no statistic {statistic!r} here, expected {known}.")
        return self.statistics.index(statistic)

    def lay(self, statistic: str, numbers: Numbers) -> Numbers:
        """Return the numbers of one statistic as an array (layers, heads)."""
        row = numbers[self.index(statistic)]
        grid = np.full((len(self.heads), max(self.heads, default=0)), np.nan)
        grid[np.arange(grid.shape[1]) < np.array(self.heads)[:, None]] = row
        return grid

    def list_rows(self) -> list[dict[str, Any]]:
        """Return a dict for each statistic and head, for JSON; None if unknown."""
        rows = []
        for name in self.statistics:
            grids = {x: getattr(self, x)(name) for x in ("mean", "half", "count")}
            notes = self.doubt(name)
            for layer, head in self.tally.places:
                found = {x: float(grid[layer, head]) for x, grid in grids.items()}
                row = {x: y if math.isfinite(y) else None for x, y in found.items()}
                where = {"layer": layer, "name": self.layers[layer], "head": head}
                last = {"nan": self.with_nan, "note": DOUBTS[int(notes[layer, head])]}
                rows.append({"statistic": name, **where, **row, **last})
        return rows

    def list_halves(self) -> Numbers:
        """Return half of every interval, in the order of the rows."""
        grids = (self.half(name) for name in self.statistics)
        shape = np.arange(max(self.heads, default=0)) < np.array(self.heads)[:, None]
        parts = [grid[shape] for grid in grids if self.heads]
        return np.concatenate(parts) if parts else np.zeros(0)

    def save(self, folder: Path) -> None:
        """Write the table as Parquet, and the examples as JSON."""
        tally = self.tally
        largest = np.array([[is_largest(x)] for x in tally.statistics], bool)
        mean = np.where(largest, tally.peak, tally.mean)
        more: dict[str, Any] = {
            "mean": mean.ravel(),
            "half": self.list_halves(),
            "interval": [self.interval] * mean.size,
            "nan": [self.with_nan] * mean.size,
            "note": [row["note"] for row in self.list_rows()],
        }
        with write_atomically(folder / TABLE) as new:
            new.write_bytes(encode_result(tally, self.about, more))
        rows = [
            {"statistic": s, "layer": layer, "head": head, "places": [*map(vars, x)]}
            for (s, layer, head), x in self.found.items()
        ]
        with write_atomically(folder / EXAMPLES) as new:
            new.write_text(json.dumps(rows), "utf-8")


def is_largest(statistic: str) -> bool:
    """Return whether a statistic is reduced by the maximum over queries."""
    return find_statistic(statistic).reduction == "max"


def read_table(folder: str | Path) -> AtlasTable:
    """Return the table in the folder of an atlas."""
    folder = Path(folder)
    try:
        tally, about = unpack((folder / TABLE).read_bytes())
        check_about(about)
        if "interval" not in about:  # written by an earlier version
            about["interval"] = read_interval(folder)
        rows = json.loads((folder / EXAMPLES).read_bytes())
        found = {
            (row["statistic"], row["layer"], row["head"]): tuple(
                Example(**place) for place in row["places"]
            )
            for row in rows
        }
    except FileNotFoundError:
        raise FileError(
            f"{folder} has no table yet. Write: regard atlas run {folder}"
        ) from None
    except (OSError, *WRONG) as error:
        raise FileError(f"the table of {folder} is damaged: {error!a:.200}") from error
    return AtlasTable(about, tally, found)


def check_about(about: Any) -> None:
    """Raise ValueError for metadata with other fields or types than we write."""
    if not isinstance(about, dict):
        raise ValueError("it says nothing of itself")  # noqa: TRY004 (the file is invalid)
    for name, value in about.items():
        if type(value) is not KINDS.get(name) or (type(value) is int and value < 0):
            raise ValueError(f"{name!r:.40} is a {type(value).__name__}")
    if about.get("interval", STUDENT) not in (STUDENT, SEQUENCE):
        raise ValueError(f"intervals of the kind {about['interval']!r:.40}")
    for name in ("left_out", "reasons"):
        if not all(type(n) is int and n >= 0 for n in about.get(name, {}).values()):
            raise ValueError(f"{name} has counts that are no numbers")
    for pair in about.get("set_aside", ()):
        if not (type(pair) is list and [type(x) for x in pair] == [str, str]):
            raise ValueError(f"set_aside holds {pair!r:.40}, not a name and a reason")
    if not all(type(reason) is str for reason in about.get("missed", {}).values()):
        raise ValueError("missed has reasons that are no text")


def count_aside(about: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of documents set aside for each reason.

    Tables of earlier versions list up to a thousand documents, and count all.
    """
    named = Counter(reason for _, reason in about.get("set_aside", ()))
    found = Counter(about.get("reasons") or named)
    found[OTHER] += about.get("aside", 0) - sum(found.values())
    return {reason: count for reason, count in found.items() if count > 0}


@dataclass(frozen=True, eq=False)
class AtlasDifference:
    """One statistic of two atlases: the second minus the first."""

    difference: Numbers  # (layers, heads)
    half: Numbers  # of its 95 % interval
    marked: NDArray[np.bool_]  # larger than its simultaneous interval
    alone: int  # how many are larger than their own interval
    chance: float  # expected number of these if nothing differed
    interval: str = STUDENT  # if SEQUENCE, chance is an upper bound


def compare_atlases(a: AtlasTable, b: AtlasTable, statistic: str) -> AtlasDifference:
    """Compare two atlases of models with the same heads.

    If nothing differed, one head in twenty would still exceed its own 95 % interval, so
    a mark requires an interval that holds for all heads at once (Bonferroni). Student
    intervals add in quadrature. Confidence sequences do not: if either atlas has one,
    the error is split between the two intervals, and their halves are added.
    """
    if a.heads != b.heads:
        raise OptionError(
            f"{len(a.heads)} layers with {sum(a.heads)} heads cannot be compared with "
            f"{len(b.heads)} layers with {sum(b.heads)}, expected the same heads."
        )
    difference = b.mean(statistic) - a.mean(statistic)
    known = ~np.isnan(difference)
    n = max(1, int(known.sum()))
    half, wide = (
        join_halves(a, b, statistic, sure) for sure in (SURE, 1 - (1 - SURE) / n)
    )
    alone = np.abs(difference) > half
    chance = float((1 - SURE) * (~np.isnan(half)).sum())
    marked = np.abs(difference) > wide
    kind = SEQUENCE if SEQUENCE in (a.interval, b.interval) else STUDENT
    return AtlasDifference(difference, half, marked, int(alone.sum()), chance, kind)


def join_halves(a: AtlasTable, b: AtlasTable, statistic: str, sure: float) -> Numbers:
    """Return half of the interval of a difference."""
    if a.interval == b.interval == STUDENT:
        half: Numbers = np.hypot(a.half(statistic, sure), b.half(statistic, sure))
        return half
    each = 1 - (1 - sure) / 2
    return a.half(statistic, each) + b.half(statistic, each)
