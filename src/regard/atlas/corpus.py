"""A corpus: its documents, their order, and where each one is stored.

    files ─▶ every document hashed ─▶ ordered by hash ─▶ manifest ─▶ shards ─▶ texts

    digest = BLAKE2b-128 of the UTF-8 text      depends on the text alone

Documents are sorted by digest: a random order, but the same on every machine and for
every file format. So the first n documents are a random sample, and exact copies are
adjacent; one of them is kept. Memory holds 40 bytes per document, never its text:
workers read the text again from its file and detect whether it has changed.

The manifest is a Parquet file with a row per document: shard, digest, file, at, name.

Next: worker.py
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from regard.atlas.corpus_files import WHOLE, SourceFile, list_sources, read_source
from regard.atomic_file import write_atomically
from regard.errors import FileError, OptionError

VERSION = 1
NAMED = 1_000  # documents left out that are listed by name; all are counted
GROUP = 4_096  # approximate rows in a row group of a manifest
PAUSE = 0.1  # seconds between two calls of progress
CHANGED = "it changed since the atlas was begun"
SCHEMA = pa.schema(
    {
        "shard": pa.int64(),
        "digest": pa.string(),
        "file": pa.binary(),  # a path need not be UTF-8
        "at": pa.int64(),
        "name": pa.string(),
    }
)
Indices = NDArray[np.int64]


class DocumentEntry(NamedTuple):
    """Where a document is stored."""

    digest: str
    file: str
    at: int  # byte offset of a line, row of a table, or 0 in a text file
    name: str


@dataclass(frozen=True)
class Shard:
    """The documents that a worker processes at a time, without their texts."""

    number: int
    places: tuple[DocumentEntry, ...]
    field: str = "text"


@dataclass(frozen=True)
class Document:
    """A text with its digest and display name."""

    digest: str
    name: str
    text: str


@dataclass(frozen=True, eq=False)
class Corpus:
    """An open manifest."""

    manifest: Path
    digest: str  # of all documents in order, independent of the shard size
    field: str
    size: int  # documents in a shard
    documents: int
    different: int  # distinct documents found, before sampling
    copies: int
    counts: dict[str, int]  # items left out, by reason
    left_out: tuple[tuple[str, str], ...]  # the first of these: name, reason
    table: Any

    def __len__(self) -> int:
        return self.documents

    @property
    def shards(self) -> int:
        """The number of shards."""
        return -(-self.documents // self.size)

    def shard(self, number: int) -> Shard:
        """Return one shard, counted from 0."""
        if not 0 <= number < self.shards:
            raise OptionError(
                f"there is no shard {number}, expected 0 to {self.shards - 1}."
            )
        group, row = divmod(number * self.size, measure_group(self.size))
        try:
            rows = self.table.read_row_group(group, use_threads=False)
            columns = rows.slice(row, self.size).to_pydict()
        except (OSError, ValueError, pa.ArrowException):
            raise FileError(f"{self.manifest} is damaged: plan it again.") from None
        columns["file"] = map(os.fsdecode, columns["file"])
        places = zip(*(columns[name] for name in DocumentEntry._fields), strict=True)
        return Shard(
            number, tuple(DocumentEntry(*place) for place in places), self.field
        )


# Plan


def plan_corpus(
    paths: Sequence[str | Path],
    manifest: str | Path,
    *,
    field: str = "text",
    shard: int = 32,
    documents: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Corpus:
    """Find all documents in files and folders, write the manifest and open it.

    field: the JSON field or table column that holds the text
    shard, documents: documents per shard; size of a random sample (default: all)
    progress: called with (bytes read, total bytes); an exception in it stops the work
    """
    for name, value in (("shard", shard), ("documents", documents)):
        if value is None and name == "documents":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise OptionError(f"{name}={value!r}, expected a whole number from 1.")
    paths = [paths] if isinstance(paths, str | Path) else paths
    sources = list_sources(paths)
    index = find_documents(sources, field, progress)
    order = index.sort()
    if not len(order):
        first = ": ".join(index.left_out[0]) if index.left_out else "no files"
        raise FileError(
            f"no documents in {', '.join(map(str, paths))} ({first}). "
            f"Give files of text, .jsonl, .parquet or .arrow with a field {field!r}."
        )
    order, different = order[:documents], len(order)
    rows, whole = measure_group(shard), blake2b(digest_size=16)
    groups = [order[i : i + rows] for i in range(0, len(order), rows)]
    for group in groups:
        whole.update(index.digests(group))
    about = {
        "version": VERSION,
        "digest": whole.hexdigest(),
        "field": field,
        "size": shard,
        "documents": len(order),
        "different": different,
        "copies": len(index.at) - different,
        "counts": index.counts,
        "left_out": index.left_out,
    }
    tables = (index.describe(group, sources) for group in groups)
    write_manifest(Path(manifest), about, tables)
    return open_corpus(manifest)


class Index:
    """The location of every document, as five numbers, and the items left out."""

    def __init__(self) -> None:
        self.high, self.low = array("Q"), array("Q")  # halves of the digest
        self.file, self.at, self.line = array("q"), array("q"), array("q")
        self.counts: Counter[str] = Counter()
        self.left_out: list[tuple[str, str]] = []

    def add(self, text: str, *, file: int, at: int, line: int) -> None:
        """Record where a text is stored."""
        high, low = struct.unpack(">QQ", digest_text(text))
        self.high.append(high)
        self.low.append(low)
        self.file.append(file)
        self.at.append(at)
        self.line.append(line)

    def leave_out(self, name: str, reason: str) -> None:
        """Record an item that is not a document, and why."""
        self.counts[reason] += 1
        if len(self.left_out) < NAMED:
            self.left_out.append((name, reason))

    def sort(self) -> Indices:
        """Return the distinct documents, sorted by digest."""
        high, low = np.frombuffer(self.high, "u8"), np.frombuffer(self.low, "u8")
        order = np.lexsort((low, high))  # stable, so the first copy is kept
        new = np.zeros(len(order), bool)
        new[:1] = True
        for half in (high, low):
            ordered = half[order]
            new[1:] |= ordered[1:] != ordered[:-1]
        return order[new]

    def digests(self, rows: Indices) -> bytes:
        """Return the digests of some documents, 16 bytes each."""
        halves = (np.frombuffer(x, "u8")[rows] for x in (self.high, self.low))
        return np.stack([*halves], axis=1).astype(">u8").tobytes()

    def describe(self, rows: Indices, sources: Sequence[SourceFile]) -> dict[str, Any]:
        """Return the manifest's columns for some documents, except `shard`."""
        raw = self.digests(rows).hex()
        files = [sources[self.file[i]] for i in rows]
        lines = ["" if self.line[i] == WHOLE else f":{self.line[i]}" for i in rows]
        return {
            "digest": [raw[32 * i : 32 * i + 32] for i in range(len(rows))],
            "file": [os.fsencode(file.path) for file in files],
            "at": [self.at[i] for i in rows],
            "name": [x.name + line for x, line in zip(files, lines, strict=True)],
        }


def find_documents(
    sources: Sequence[SourceFile],
    field: str,
    progress: Callable[[int, int], object] | None,
) -> Index:
    """Read every file once, and record where its documents are."""
    index, done, shown = Index(), 0, 0.0
    total = sum(source.size for source in sources)
    for number, source in enumerate(sources):
        if source.refused:
            index.leave_out(source.name, source.refused)
            continue
        for found in read_source(source.path, field):
            if found.refused:
                line = "" if found.line == WHOLE else f":{found.line}"
                index.leave_out(source.name + line, found.refused)
            else:
                index.add(found.text, file=number, at=found.at, line=found.line)
            if progress is not None and time.monotonic() > shown + PAUSE:
                shown = time.monotonic()
                progress(done + int(found.part * source.size), total)
        done += source.size
    if progress is not None:
        progress(total, total)
    return index


def digest_text(text: str) -> bytes:
    """Return the BLAKE2b-128 digest of a text."""
    return blake2b(text.encode(), digest_size=16).digest()


# The manifest


def measure_group(size: int) -> int:
    """Return the rows per row group: a multiple of the shard size."""
    return size * max(1, GROUP // size)


def write_manifest(
    path: Path, about: dict[str, Any], tables: Iterator[dict[str, Any]]
) -> None:
    """Write a manifest atomically."""
    text = json.dumps(about)
    schema = SCHEMA.with_metadata({"regard": text, "checksum": checksum_text(text)})
    row = 0
    try:
        with (
            write_atomically(path) as new,
            new.open("wb") as file,
            pq.ParquetWriter(file, schema, write_page_checksum=True) as writer,
        ):
            for columns in tables:
                n = len(columns["at"])
                shards = np.arange(row, row + n) // about["size"]
                writer.write_table(pa.table({"shard": shards, **columns}, schema))
                row += n
    except OSError as error:
        raise FileError(f"{path} was not written: {error}") from error


def open_corpus(manifest: str | Path) -> Corpus:
    """Open a manifest written by plan_corpus, and verify it."""
    path = Path(manifest)
    try:
        table = pq.ParquetFile(path, page_checksum_verification=True)
        about = read_manifest(table)
        check_rows(table, about)
    except FileNotFoundError:
        raise FileError(
            f"there is no manifest {path}: plan_corpus writes it."
        ) from None
    except (OSError, ValueError, pa.ArrowException) as error:
        why = str(error) if isinstance(error, FileError) else "it is damaged"
        raise FileError(f"{path} cannot be opened: {why}. Plan it again.") from None
    left_out = tuple((name, reason) for name, reason in about.pop("left_out"))
    return Corpus(manifest=path, table=table, left_out=left_out, **about)


def read_manifest(table: Any) -> dict[str, Any]:
    """Return the metadata of a manifest, after verifying it."""
    metadata = table.schema_arrow.metadata or {}
    text = metadata.get(b"regard", b"").decode()
    if not text or not table.schema_arrow.equals(SCHEMA):
        raise FileError("it is no manifest of a corpus")
    if metadata.get(b"checksum") != checksum_text(text).encode():
        raise FileError("it is damaged")
    about: dict[str, Any] = json.loads(text)
    if (version := about.pop("version")) != VERSION:
        raise FileError(f"it is of version {version}, expected {VERSION}")
    return about


def check_rows(table: Any, about: dict[str, Any]) -> None:
    """Verify the page checksums, the row order, and the digest of all documents."""
    whole, row, last = blake2b(digest_size=16), 0, ""
    for batch in table.iter_batches(GROUP, use_threads=False):
        shards, digests, *_ = (column.to_pylist() for column in batch.columns)
        numbers = np.arange(row, row := row + len(digests)) // about["size"]
        rising = all(a < b for a, b in pairwise([last, *digests]))
        if not rising or shards != numbers.tolist():
            raise FileError("its rows are not in order")
        whole.update(bytes.fromhex("".join(digests)))
        last = digests[-1]
    if row != about["documents"] or whole.hexdigest() != about["digest"]:
        raise FileError("it is damaged")


def checksum_text(text: str) -> str:
    """Return the CRC-32 of a text, in hex."""
    return f"{zlib.crc32(text.encode()):08x}"


# Read


def read_shard(shard: Shard) -> Iterator[Document | tuple[str, str]]:
    """Yield the documents of a shard; for a missing one, its name and the reason.

    Each file is opened once and read from start to end.
    """
    found: dict[tuple[str, int], str] = {}
    gone: dict[str, str] = {}
    by_place = sorted(shard.places, key=lambda place: (place.file, place.at))
    for file, places in groupby(by_place, key=lambda place: place.file):
        for x in read_source(file, shard.field, [place.at for place in places]):
            if x.at == WHOLE:
                gone[file] = x.refused
            else:
                found[file, x.at] = x.text
    for digest, file, at, name in shard.places:
        text = found.pop((file, at), None)
        if text is None:
            yield name, gone.get(file, CHANGED)
        elif digest_text(text).hex() != digest:
            yield name, CHANGED
        else:
            yield Document(digest, name, text)
