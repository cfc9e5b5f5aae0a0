"""The results of a search over pairs: files of shards, means with intervals, a table.

    results/000003-5f3a90c1.json    shard 3; the last part is the CRC-32
    change[p, h]                    of the measure of pair p, by patching head h
    mean[h] ± t s[h] / √P           over P pairs: Student's interval, s with P - 1
    share[h]                        mean[h] / mean of clean - corrupted

Pairs are in the order of their lines, whichever worker ran them when, so that the means
are the same to the bit. A file with a wrong CRC is set aside, and its shard runs again.

Next: search_pairs.py
"""

from __future__ import annotations

import csv
import json
import math
import zlib
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.atlas.search_settings import read_search_plan
from regard.atlas.tally import Numbers
from regard.atomic_file import write_atomically
from regard.display import Displayed
from regard.errors import FileError, OptionError
from regard.student import FEW, SURE, student

HEADS = ("layer", "name", "head", "change", "half", "share", "estimate", "sure")
PAIRS = ("line", "clean", "corrupted", "correlation", "set_aside")
ARRAYS = ("clean", "corrupted", "changes", "estimates")  # of a pair
SHOWN = 10  # heads that print() lists
NAMED = 5  # pairs set aside that print() lists
WRONG = (AttributeError, KeyError, TypeError, ValueError, RecursionError)


@dataclass(frozen=True)
class PairChanges:
    """What the patch of each head changes in one pair; heads layer by layer."""

    line: int
    clean: float  # the measure of the clean run
    corrupted: float
    changes: tuple[float, ...]
    estimates: tuple[float, ...]  # of the changes, by attribution patching


@dataclass(frozen=True)
class ShardResult:
    """The result of one shard."""

    number: int
    layers: tuple[str, ...]  # empty if all pairs were set aside
    heads: tuple[int, ...]  # of each layer
    pairs: tuple[PairChanges, ...]
    aside: tuple[tuple[int, str], ...]  # line, reason
    weights: str = ""  # digest of the parameters that a function returned


def pack_shard(result: ShardResult) -> bytes:
    """Return a result as JSON, in which numbers keep every bit."""
    return json.dumps(asdict(result), allow_nan=False).encode()


def unpack_shard(data: bytes) -> ShardResult:
    """Return the result that pack_shard encoded."""
    try:
        found: Any = json.loads(data)
        pairs = tuple(
            PairChanges(
                int(x["line"]),
                float(x["clean"]),
                float(x["corrupted"]),
                tuple(map(float, x["changes"])),
                tuple(map(float, x["estimates"])),
            )
            for x in found["pairs"]
        )
        heads = tuple(map(int, found["heads"]))
        sizes = {len(x) for pair in pairs for x in (pair.changes, pair.estimates)}
        if sizes - {sum(heads)} or len(heads) != len(found["layers"]):
            raise ValueError("rows that do not fit")
        aside = tuple((int(line), str(why)) for line, why in found["aside"])
        layers = tuple(map(str, found["layers"]))
        number, weights = int(found["number"]), str(found.get("weights", ""))
        return ShardResult(number, layers, heads, pairs, aside, weights)
    except WRONG as error:
        raise FileError(f"it is no result of a search: {str(error)!a:.200}") from error


def store_shard(folder: Path, data: bytes) -> ShardResult:
    """Write the result of a shard, and return it."""
    result = unpack_shard(data)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{result.number:06d}-{zlib.crc32(data):08x}.json"
    with write_atomically(folder / name) as new:
        new.write_bytes(data)
    return result


def read_shards(folder: Path) -> tuple[dict[int, ShardResult], list[str]]:
    """Return the stored results by number, and the names of damaged files."""
    found, damaged = {}, []
    for path in sorted(folder.glob("*.json")):
        data = path.read_bytes()
        try:
            number, _, crc = path.stem.partition("-")
            if zlib.crc32(data) != int(crc, 16):
                raise FileError("its crc is another one.")
            found[int(number)] = unpack_shard(data)
        except ValueError:
            damaged.append(path.name)
    return found, damaged


@dataclass(frozen=True, kw_only=True, eq=False)
class PairSearch(Displayed):
    """What each head changes in each pair. R: all heads, layer by layer."""

    model: str
    layers: tuple[str, ...]
    heads: tuple[int, ...]  # of each layer
    lines: tuple[int, ...]  # of the P pairs
    clean: Numbers  # (P,), the measure of each clean run
    corrupted: Numbers  # (P,)
    changes: Numbers  # (P, R)
    estimates: Numbers  # (P, R), by attribution patching
    aside: tuple[tuple[int, str], ...]  # line, reason
    left: int = 0  # pairs that were not run yet

    @property
    def places(self) -> list[tuple[int, int]]:
        """The (layer, head) of every row."""
        return [(x, head) for x, n in enumerate(self.heads) for head in range(n)]

    @property
    def mean(self) -> Numbers:
        """The mean change by each head, (R,)."""
        return np.asarray(self.changes.mean(0))

    def half(self, sure: float = SURE) -> Numbers:
        """Return half of the interval of each mean, (R,); NaN below 8 pairs."""
        return find_half_of(self.changes, sure)

    @property
    def is_sure(self) -> NDArray[np.bool_]:
        """Whether 0 is outside an interval that holds for all heads together, (R,)."""
        return np.abs(self.mean) > self.half(1 - (1 - SURE) / self.changes.shape[1])

    @property
    def share(self) -> Numbers:
        """The mean change, as a share of the way from corrupted to clean, (R,).

        NaN if the interval of this way contains 0, or is not known.
        """
        way = (self.clean - self.corrupted)[:, None]  # (P, 1)
        is_known = np.abs(way.mean(0)) > find_half_of(way, SURE)
        return self.mean / np.where(is_known, way.mean(0), math.nan)

    @property
    def correlation(self) -> float:
        """Of the mean estimates with the mean changes, over heads."""
        return correlate(self.estimates.mean(0), self.mean)

    @property
    def correlations(self) -> Numbers:
        """Of the estimates with the changes of each pair, (P,)."""
        rows = zip(self.estimates, self.changes, strict=True)
        return np.array([correlate(a, b) for a, b in rows])

    def save(self, folder: str | Path) -> None:
        """Write heads.csv, with a row for each head, and pairs.csv."""
        columns = (self.mean, self.half(), self.share, self.estimates.mean(0))
        numbers = zip(*(x.tolist() for x in (*columns, self.is_sure)), strict=True)
        heads = [
            (layer, self.layers[layer], head, *row)
            for (layer, head), row in zip(self.places, numbers, strict=True)
        ]
        write_csv(Path(folder) / "heads.csv", HEADS, heads)
        ends = (x.tolist() for x in (self.clean, self.corrupted, self.correlations))
        pairs = [(*row, "") for row in zip(self.lines, *ends, strict=True)]
        pairs += [(line, "", "", "", reason) for line, reason in self.aside]
        write_csv(Path(folder) / "pairs.csv", PAIRS, sorted(pairs, key=lambda x: x[0]))

    def __str__(self) -> str:
        count, total = len(self.lines), self.changes.shape[1]
        lines = [
            f"{count} pairs, {total} heads; one head at a time, the corrupted run gets",
            "the output that this head has in the clean run",
            "",
            "logit(answer) - logit(wrong)    mean   above 0",
        ]
        for name, x in (("clean", self.clean), ("corrupted", self.corrupted)):
            lines.append(f"  {name:26}  {x.mean():+6.2f}   {(x > 0).sum()} of {count}")
        lines += ["", "layer  head  change   95 % interval       share  estimate"]
        half, sure, share = self.half(), self.is_sure, self.share
        guess = self.estimates.mean(0)
        for row in np.argsort(-np.abs(self.mean), kind="stable")[:SHOWN]:
            layer, head = self.places[row]
            low, high = (self.mean[row] + x * half[row] for x in (-1, 1))
            interval = f"{low:+.3f} to {high:+.3f}" if count >= FEW else "unknown"
            part = "unknown" if np.isnan(share[row]) else f"{share[row]:.1%}"
            lines.append(
                f"{layer:5}  {head:4}  {self.mean[row]:+6.3f}   {interval:16} "
                f"{'*' if sure[row] else ' '}{part:>7}    {guess[row]:+6.3f}"
            )
        return "\n".join([*lines, "", *self.explain()])

    def explain(self) -> list[str]:
        """Return what the columns mean, and what is missing."""
        marked = f"{self.is_sure.sum()} of {self.changes.shape[1]} heads"
        lines = [
            "change     of the logit difference, mean over pairs",
            "share      of the way from the corrupted to the clean run",
            "estimate   of the change, by attribution patching: one backward pass",
            f"*          0 is outside of an interval for all heads at once: {marked}",
        ]
        if len(self.lines) < FEW:
            lines[-1] = f"An interval needs at least {FEW} pairs."
        elif np.isnan(self.share).all():
            lines[1] += ": unknown, as this way may be 0"
        ones = self.correlations
        lines.append(
            f"Correlation of estimate and change over heads: {self.correlation:.2f} "
            f"(in single pairs {ones.min():.2f} to {ones.max():.2f})"
        )
        if self.aside:
            named = [f"  line {line}: {why}" for line, why in self.aside[:NAMED]]
            more = len(self.aside) - NAMED
            named += [f"  and {more} more, in pairs.csv"] if more > 0 else []
            told = f"Pairs set aside, not in these numbers: {len(self.aside)}"
            lines += [told, *named]
        if self.left:
            lines.append(f"Pairs that were not run yet: {self.left}")
        return lines


def find_half_of(samples: Numbers, sure: float) -> Numbers:
    """Return half of the interval of the mean of (P, R), (R,); NaN below 8 samples."""
    count = len(samples)
    if count < FEW:
        return np.full(samples.shape[1], math.nan)
    error = samples.std(0, ddof=1) / math.sqrt(count)
    return np.asarray(student(sure, count - 1) * error)


def correlate(a: Numbers, b: Numbers) -> float:
    """Return the correlation of two rows; NaN if one of them is constant."""
    if not (np.ptp(a) > 0 and np.ptp(b) > 0):
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])


def write_csv(path: Path, names: Collection[str], rows: Any) -> None:
    """Write a table."""
    with write_atomically(path) as new, new.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([names, *rows])


def read_search(folder: str | Path) -> PairSearch:
    """Return the search that a folder holds, as far as it was run."""
    folder = Path(folder)
    plan, _ = read_search_plan(folder)
    shards = [x for _, x in sorted(read_shards(folder / "results")[0].items())]
    aside = tuple(one for shard in shards for one in shard.aside)
    pairs = [one for shard in shards for one in shard.pairs]
    kinds = {(x.layers, x.heads) for x in shards if x.pairs}
    if not pairs:
        told = f" Line {aside[0][0]}: {aside[0][1]}." if aside else ""
        raise OptionError(f"no pair was searched; {len(aside)} were set aside.{told}")
    if len(kinds) > 1:
        raise FileError(f"{folder} holds results of models with other layers.")
    ((layers, heads),) = kinds
    return PairSearch(
        model=plan.model,
        layers=layers,
        heads=heads,
        lines=tuple(x.line for x in pairs),
        aside=aside,
        left=plan.count - len(pairs) - len(aside),
        **{name: np.array([getattr(x, name) for x in pairs]) for name in ARRAYS},
    )
