"""The results of an atlas on disk: written atomically, verified, merged in one order.

    results/0-000000012-5f3a90c1.parquet     shard 12; the last part is the CRC-32
    results/1-000000192-….parquet            shards 192 to 255, merged

Results are written to a temporary file, then renamed. 64 consecutive files are merged
into one of the next level, so four million shards leave a few hundred files. Sums are
always added in the same order, so the table is bit for bit the same whichever worker
ran which shard when. A file with a wrong CRC is set aside, and its shards run again.

Next: settings.py
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from regard.atlas.tally import CUBES, PLACE, SUMS, Tally, merge_tallies
from regard.atomic_file import write_atomically
from regard.errors import FileError

GROUP = 64  # consecutive results that are merged into one
# the columns that are read back; the others are for other programs
NUMBERS = [*SUMS, "peak", *(f"top_{name}" for name in PLACE.names or ())]
WRONG = (AttributeError, KeyError, TypeError, ValueError, OverflowError, MemoryError)
MANY = 1 << 16  # limit for heads per layer, and places per head
NAMED = 1000  # documents set aside that are listed by name; all are counted
KINDS = 500  # distinct reasons that are counted separately
OTHER = "other reasons"


@dataclass(frozen=True, eq=False)
class Result:
    """The merged result of consecutive shards."""

    first: int
    last: int  # one past the last shard
    tally: Tally
    documents: int  # not counting those set aside
    tokens: int
    n_aside: int = 0
    aside: tuple[tuple[str, str, str], ...] = ()  # digest, name, reason
    reasons: dict[str, int] = field(default_factory=dict)  # documents per reason
    missed: dict[str, str] = field(default_factory=dict)  # layers not recorded, and why


def merge_results(results: Sequence[Result], *, keep: int) -> Result:
    """Merge the results of consecutive shards."""
    ends = [(x.first, x.last) for x in results]
    if any(a[1] != b[0] for a, b in pairwise(ends)):
        raise FileError(f"shards {ends} do not follow each other.")
    missed: dict[str, str] = {}
    for x in results:
        missed |= x.missed
    return Result(
        first=results[0].first,
        last=results[-1].last,
        tally=merge_tallies([x.tally for x in results], keep=keep),
        documents=sum(x.documents for x in results),
        tokens=sum(x.tokens for x in results),
        n_aside=sum(x.n_aside for x in results),
        aside=tuple(one for x in results for one in x.aside)[:NAMED],
        reasons=count_reasons(results),
        missed=missed,
    )


def count_reasons(results: Sequence[Result]) -> dict[str, int]:
    """Return the number of documents set aside for each reason.

    Results of earlier versions only list names, and not of all documents.
    """
    found: Counter[str] = Counter()
    for x in results:
        known = x.reasons or Counter(reason for _, _, reason in x.aside)
        for reason, count in known.items():
            found[reason if reason in found or len(found) < KINDS else OTHER] += count
        if (rest := x.n_aside - sum(known.values())) > 0:
            found[OTHER] += rest
    return dict(found)


def pack_result(result: Result) -> bytes:
    """Return a result as the bytes of a Parquet file."""
    about = {name: value for name, value in vars(result).items() if name != "tally"}
    return encode_result(result.tally, about)


def unpack_result(data: bytes) -> Result:
    """Return the result that pack_result encoded."""
    tally, about = unpack(data)
    try:
        about["aside"] = tuple((a, b, c) for a, b, c in about["aside"])
        result = Result(tally=tally, **about)
        counts = (result.first, result.last, result.documents, result.tokens)
        if not all(type(n) is int and n >= 0 for n in (*counts, result.n_aside)):
            raise ValueError("counts that are no numbers")
    except WRONG as error:
        raise FileError(f"it is no result of an atlas: {str(error)!a:.200}") from error
    return result


def encode_result(
    tally: Tally, about: dict[str, Any], more: dict[str, Any] | None = None
) -> bytes:
    """Return a Parquet file with a row for each statistic and head.

    about: metadata, stored as JSON
    more: further columns, for other programs that read the file
    """
    s, r, k = tally.top.shape
    layers, heads = [x for x, _ in tally.places], [x for _, x in tally.places]
    columns: dict[str, Any] = {
        "statistic": pa.array(np.repeat(np.array(tally.statistics, object), r)),
        "layer": pa.array(layers * s, pa.int32()),
        "name": pa.array([tally.layers[i] for i in layers] * s, pa.string()),
        "head": pa.array(heads * s, pa.int32()),
        **(more or {}),
    }
    for i, name in enumerate(SUMS):
        columns[name] = pa.array(tally.sums[..., i].ravel())
    columns["peak"] = pa.array(tally.peak.ravel())
    for name in PLACE.names or ():
        flat = pa.array(np.ascontiguousarray(tally.top[name]).ravel())
        columns[f"top_{name}"] = pa.FixedSizeListArray.from_arrays(flat, k)
    shape = {"layers": tally.layers, "heads": tally.heads}
    shape |= {"statistics": tally.statistics, "top": k}
    told = {"regard": json.dumps({"shape": shape, "about": about})}
    sink = pa.BufferOutputStream()
    table = pa.table(columns).replace_schema_metadata(told)
    pq.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue())


def unpack(data: bytes) -> tuple[Tally, dict[str, Any]]:
    """Return the tally and the metadata of a file."""
    try:
        file = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False)
        table = file.read(columns=NUMBERS, use_threads=False)  # it is small
        told = json.loads(file.schema_arrow.metadata[b"regard"])
        layers, heads, names, k = read_shape(told["shape"])
        shape = (len(names), sum(heads))
        sums = np.stack([read_column(table, name).reshape(shape) for name in SUMS], -1)
        top = np.zeros((*shape, k), PLACE)
        for name in PLACE.names or ():
            top[name] = read_column(table, f"top_{name}").reshape(*shape, k)
        peak = read_column(table, "peak").reshape(shape)
        return Tally(layers, heads, names, sums, peak, top), told["about"]
    except (pa.ArrowException, OSError, *WRONG) as error:
        raise FileError(f"it is no result of an atlas: {str(error)!a:.200}") from error


def read_shape(told: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], Any, int]:
    """Validate and return layers, heads, statistics and places per head."""
    layers, heads, names = (
        tuple(told[name]) for name in ("layers", "heads", "statistics")
    )
    words = (*layers, *names)
    if not all(isinstance(x, str) and x.isprintable() and len(x) < 500 for x in words):
        raise ValueError("names that are no words")
    if len({*names}) < len(names) or len(heads) != len(layers):
        raise ValueError("names that do not fit")
    sizes = (*heads, told["top"])
    if not all(type(n) is int and 0 < n < MANY for n in sizes):
        raise ValueError("sizes that are no numbers")
    return layers, heads, names, told["top"]


def read_column(table: Any, name: str) -> Any:
    """Return a column as one array, with lists flattened."""
    if name in CUBES and name not in table.column_names:  # of an earlier version
        return np.full(table.num_rows, np.nan)
    column = table.column(name).combine_chunks()
    if pa.types.is_fixed_size_list(column.type):
        column = column.flatten()
    return column.to_numpy(zero_copy_only=False)


class Store:
    """The folder of results, and the merge ("fold") of those before the first gap."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.levels: list[list[Result]] = []  # fewer than GROUP each, in order
        self.paths: dict[tuple[int, int], Path] = {}  # by level and first shard
        self.waiting: dict[int, int] = {}  # first shard of results not folded: level
        self.later: set[int] = set()  # all shards of these results
        self.damaged: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("*.parquet"), reverse=True):  # merged ones first
            self.admit(path)
        while self.waiting.get(self.first_missing):  # merged, so folded before
            self.fold()

    @property
    def parts(self) -> list[Result]:
        """The folded results, in the order of the shards."""
        return [x for row in reversed(self.levels) for x in row]

    @property
    def first_missing(self) -> int:
        """The first shard that is not folded."""
        return self.parts[-1].last if self.parts else 0

    def has(self, number: int) -> bool:
        """Return whether a shard is done."""
        return number < self.first_missing or number in self.later

    def commit(self, data: bytes) -> None:
        """Store the result of a shard, unless it is already stored."""
        result = unpack_result(data)
        if not self.has(result.first):
            self.write(0, result, data)
            self.wait(0, result)

    def wait(self, level: int, result: Result) -> None:
        """Register a stored result that is not folded yet."""
        self.waiting[result.first] = level
        self.later |= set(range(result.first, result.last))

    def fold(self) -> bool:
        """Fold the next result in order; return False if it is missing."""
        first = self.first_missing
        if first not in self.waiting:
            return False
        level = self.waiting.pop(first)
        # read from disk: too many may wait to keep them in memory
        result = unpack_result(self.paths[level, first].read_bytes())
        self.later -= set(range(result.first, result.last))
        self.push(level, result)
        return True

    def push(self, level: int, result: Result) -> None:
        """Add a result to its level; merge a full level into the next one."""
        self.levels += [[] for _ in range(level + 1 - len(self.levels))]
        row = self.levels[level]
        row.append(result)
        if len(row) < GROUP:
            return
        whole = merge_results(row, keep=self.keep)
        self.write(level + 1, whole, pack_result(whole))
        for part in row:
            if (path := self.paths.pop((level, part.first), None)) is not None:
                path.unlink()
        row.clear()
        self.push(level + 1, whole)

    def total(self) -> Result | None:
        """Return the merge of all shards before the first missing one."""
        return merge_results(self.parts, keep=self.keep) if self.parts else None

    def write(self, level: int, result: Result, data: bytes) -> None:
        """Write a result to its file."""
        name = f"{level}-{result.first:09d}-{zlib.crc32(data):08x}.parquet"
        with write_atomically(self.folder / name) as new:
            new.write_bytes(data)
        self.paths[level, result.first] = self.folder / name

    def admit(self, path: Path) -> None:
        """Register a file of an earlier run, unless it is damaged or already merged."""
        try:
            level, first, crc = path.stem.split("-")
            data = path.read_bytes()
            if zlib.crc32(data) != int(crc, 16):
                raise FileError("its crc is another one.")
            result = unpack_result(data)
            if result.first != int(first):
                raise FileError("it holds other shards.")
        except (OSError, ValueError) as error:
            self.damaged.append(f"{path.name}: {error}")
            path.replace(path.with_suffix(".damaged"))
            return
        if result.first in self.later:
            path.unlink()
            return
        self.paths[int(level), result.first] = path
        self.wait(int(level), result)
