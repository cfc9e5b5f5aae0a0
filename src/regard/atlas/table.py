"""What every head did over a corpus: means with their intervals, examples, differences.

    table = read_table("prose")              the folder of `regard atlas run`
    table.mean("induction")                  (layers, heads), NaN where there is none
    table.half("induction")                  half of each 95 % interval
    table.examples("induction", 18, 8)       where that head did it most

    compare(a, b, "induction").marked        differences that are no chance: larger than
                                             the interval of 1 - 5 % / (layers · heads)

Next: page.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.atlas.store import WRONG, pack, unpack
from regard.atlas.tally import SURE, Numbers, Tally
from regard.errors import FileError, OptionError
from regard.whole_file import write_whole

UNITS = {"entropy": "bits", "distance": "tokens", "logit": "logit"}  # else: weight
TABLE, EXAMPLES = "table.parquet", "examples.json"
KINDS = {
    **dict.fromkeys(("folder", "model", "corpus", "precision"), str),
    **dict.fromkeys(("documents", "of", "tokens", "length", "pieces"), int),
    **dict.fromkeys(("shards", "aside", "copies"), int),
    **dict.fromkeys(("packed", "whole"), bool),
    **dict.fromkeys(("left_out", "missed"), dict),
    "set_aside": list,
}
LARGEST = ("logit",)  # of these the peak is told: a mean of largest says little


@dataclass(frozen=True)
class Example:
    """One of the places where a head did something most."""

    value: float
    document: str
    piece: int = 0
    position: int = 0
    before: str = ""
    token: str = ""
    after: str = ""


Found = Mapping[tuple[str, int, int], tuple[Example, ...]]


@dataclass(frozen=True, eq=False)
class Table:
    """A tally, what it was made from, and the words around its examples."""

    about: dict[str, Any]
    tally: Tally
    found: Found  # by statistic, layer and head

    @property
    def layers(self) -> tuple[str, ...]:
        """The modules, in the order in which they ran."""
        return self.tally.layers

    @property
    def heads(self) -> tuple[int, ...]:
        """How many heads each layer has."""
        return self.tally.heads

    @property
    def statistics(self) -> tuple[str, ...]:
        """What was measured."""
        return self.tally.statistics

    def mean(self, statistic: str) -> Numbers:
        """Return the mean over all queries, (layers, heads); of a logit the largest."""
        tally = self.tally
        return self.lay(statistic, tally.peak if statistic in LARGEST else tally.mean)

    def half(self, statistic: str, sure: float = SURE) -> Numbers:
        """Return half of the interval of each mean; NaN where it is not known."""
        half = self.tally.half(sure)
        return self.lay(statistic, half * np.nan if statistic in LARGEST else half)

    def count(self, statistic: str) -> Numbers:
        """Return the documents behind each mean."""
        return self.lay(statistic, self.tally.sums[..., 0])

    def unit(self, statistic: str) -> str:
        """Return what the numbers are counted in."""
        return UNITS.get(statistic, "weight")

    def examples(self, statistic: str, layer: int, head: int) -> tuple[Example, ...]:
        """Return where a head did it most, the largest first."""
        return self.found.get((statistic, layer, head), ())

    def lay(self, statistic: str, numbers: Numbers) -> Numbers:
        """Return the numbers of one statistic, a row for each layer."""
        if statistic not in self.statistics:
            known = ", ".join(self.statistics)
            raise OptionError(f"no statistic {statistic!r} here, expected {known}.")
        row = numbers[self.statistics.index(statistic)]
        grid = np.full((len(self.heads), max(self.heads, default=0)), np.nan)
        grid[np.arange(grid.shape[1]) < np.array(self.heads)[:, None]] = row
        return grid

    def list_rows(self) -> list[dict[str, Any]]:
        """Return a dict for each statistic and head, for JSON: unknown is None."""
        rows = []
        for name in self.statistics:
            grids = {x: getattr(self, x)(name) for x in ("mean", "half", "count")}
            for layer, head in self.tally.places:
                found = {x: float(grid[layer, head]) for x, grid in grids.items()}
                row = {x: y if math.isfinite(y) else None for x, y in found.items()}
                where = {"layer": layer, "name": self.layers[layer], "head": head}
                rows.append({"statistic": name, **where, **row})
        return rows

    def save(self, folder: Path) -> None:
        """Write the table as Parquet, and the examples as JSON."""
        tally = self.tally
        largest = np.isin(tally.statistics, LARGEST)[:, None]
        mean = np.where(largest, tally.peak, tally.mean)
        half = np.where(largest, np.nan, tally.half())
        more = {"mean": mean.ravel(), "half": half.ravel()}
        with write_whole(folder / TABLE) as new:
            new.write_bytes(pack(tally, self.about, more))
        rows = [
            {"statistic": s, "layer": layer, "head": head, "places": [*map(vars, x)]}
            for (s, layer, head), x in self.found.items()
        ]
        with write_whole(folder / EXAMPLES) as new:
            new.write_text(json.dumps(rows), "utf-8")


def read_table(folder: str | Path) -> Table:
    """Return the table of the folder of an atlas."""
    folder = Path(folder)
    try:
        tally, about = unpack((folder / TABLE).read_bytes())
        check_about(about)
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
    return Table(about, tally, found)


def check_about(about: Any) -> None:
    """Refuse what is told of a table if it is of another kind than we write."""
    if not isinstance(about, dict):
        raise ValueError("it says nothing of itself")  # noqa: TRY004 (no bug of ours)
    for name, value in about.items():
        if type(value) is not KINDS.get(name) or (type(value) is int and value < 0):
            raise ValueError(f"{name!r:.40} is a {type(value).__name__}")


@dataclass(frozen=True, eq=False)
class Difference:
    """One statistic of two atlases, the second less the first."""

    difference: Numbers  # (layers, heads)
    half: Numbers  # of its 95 % interval
    marked: NDArray[np.bool_]  # larger than its simultaneous interval
    alone: int  # larger than their own interval
    chance: float  # so many of these by chance, if nothing differed


def compare(a: Table, b: Table, statistic: str) -> Difference:
    """Return what differs between two atlases of models with the same heads.

    Of 270 heads one in twenty would differ by its own interval where nothing does; so
    a mark needs an interval that holds for all heads at once (Bonferroni).
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
        np.hypot(a.half(statistic, sure), b.half(statistic, sure))
        for sure in (SURE, 1 - (1 - SURE) / n)
    )
    alone = np.abs(difference) > half
    chance = float((1 - SURE) * (~np.isnan(half)).sum())
    marked = np.abs(difference) > wide
    return Difference(difference, half, marked, int(alone.sum()), chance)
