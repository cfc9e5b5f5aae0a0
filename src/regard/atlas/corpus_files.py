"""The file formats that hold documents, and how to locate a document in them.

    .jsonl .ndjson   one JSON object per line        at: byte offset of the line
    .parquet .arrow  one row of a text column        at: row number
    any other        one document                    at: 0
    a folder         all files except hidden ones; links to folders are not followed
    a saved dataset  (state.json, data-*.arrow of `datasets`) the files it lists

Texts are used unchanged, including line endings and control characters. Only a byte
order mark (BOM) at the start of a file is removed. Files are untrusted: an item that
is not a valid document is reported with the reason, and reading continues.

Next: corpus.py
"""

from __future__ import annotations

import codecs
import json
import os
import stat
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from regard.errors import FileError

LONGEST = 2**26  # maximum bytes of a document, or of a line that holds one
LOOK = 2**13  # bytes searched for NUL, which indicates a binary file
BATCH = 256  # rows of a Parquet file read at a time
LINES = {".jsonl", ".ndjson"}
TABLES = {".parquet", ".arrow"}
PACKED = {".gz", ".bz2", ".xz", ".zst", ".zip"}
DATASET = {"state.json", "dataset_info.json"}  # files of a saved dataset
WHOLE = -1  # instead of an offset or a line: the whole file

TOO_LONG = f"it has more than {LONGEST:,} bytes, cut it into documents"
NO_TEXT = "it is no UTF-8 text"
EMPTY = "it is empty, or white space alone"
DAMAGED = "it is damaged, or not what its suffix says"
MAGIC = b"ARROW1"  # first bytes of the Arrow file format; streams lack them
AS_BYTES = {  # text types as bytes; some writers store text as binary
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


def raise_unreadable(reason: str) -> NoReturn:
    """Raise FileError with this reason."""
    raise FileError(reason)


STRICT = json.JSONDecoder(
    parse_constant=raise_unreadable, parse_int=float
)  # JSON has no NaN


class SourceFile(NamedTuple):
    """A file: path, display name, size in bytes, and why it is skipped, if it is."""

    path: str
    name: str
    size: int
    refused: str = ""


class Found(NamedTuple):
    """A document in a file, or the reason why there is none."""

    at: int
    line: int  # line counted from 1, or row counted from 0
    text: str
    refused: str = ""
    part: float = 1.0  # fraction of the file read so far


# Which files


def list_sources(paths: Sequence[str | Path]) -> list[SourceFile]:
    """Return every file once, sorted by path."""
    found: list[tuple[Any, SourceFile]] = []
    for given in map(Path, paths):
        if not os.path.lexists(given):
            raise_unreadable(
                f"there is no {given}, expected a file or a folder of documents."
            )
        found += list_files(given)
    found.sort(key=lambda pair: pair[1])
    once: dict[Any, SourceFile] = {}
    for key, source in found:
        once.setdefault(key, source)
    return list(once.values())


def list_files(given: Path) -> Iterator[tuple[Any, SourceFile]]:
    """Yield the files at a path, each with a key that identifies it."""
    # do not resolve a link to a file: its own suffix determines the format
    top = given.resolve() if given.is_dir() else given.parent.resolve() / given.name
    pending = [top]
    while pending:
        path = pending.pop()
        name = write_name(str(path.relative_to(top.parent)))
        try:
            about = path.stat()
            if stat.S_ISDIR(about.st_mode):
                if path != top and path.is_symlink():  # may be a cycle
                    raise_unreadable(
                        "it is a link to a folder, give that folder itself"
                    )
                pending += list_folder(path)
                continue
            if not stat.S_ISREG(about.st_mode):  # reading a pipe would block
                raise_unreadable("it is no ordinary file")
            key = about.st_dev, about.st_ino
            yield key, SourceFile(str(path), name, about.st_size)
        except (OSError, FileError) as error:
            yield path, SourceFile(str(path), name, 0, explain_unread(error))


def list_folder(path: Path) -> list[Path]:
    """Return the files and subfolders to read in a folder."""
    names = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}
    if names >= DATASET:  # other files may be left from an earlier save
        names = list_saved(path / "state.json")
    return [path / name for name in names - {"dataset_dict.json"}]


def list_saved(state: Path) -> set[str]:
    """Return the names of the files of a saved dataset."""
    try:
        listed = json.loads(state.read_bytes())["_data_files"]
        names = {str(entry["filename"]) for entry in listed}
    except (ValueError, LookupError, TypeError, RecursionError):
        raise_unreadable("its state.json does not list the files of a dataset")
    if any(Path(name).name != name for name in names):
        raise_unreadable("its state.json lists files outside of its folder")
    return names


def write_name(name: str) -> str:
    """Return a name that is safe to print: unprintable characters are escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in name
    )


def explain_unread(error: Exception) -> str:
    """Return why a file cannot be read, without its name: reasons are counted."""
    if isinstance(error, OSError) and error.errno:
        return f"it cannot be read: {os.strerror(error.errno)}"
    return str(error) if isinstance(error, FileError) else DAMAGED


# What is in them


def read_source(
    path: str, field: str, places: Sequence[int] | None = None
) -> Iterator[Found]:
    """Yield all documents of a file, or those at `places`, which must be ascending."""
    suffix, last = Path(path).suffix.lower(), WHOLE
    try:
        if suffix in PACKED:
            raise_unreadable(f"it is compressed ({suffix}), unpack it first")
        if suffix in TABLES:
            documents = read_rows(path, field, places)
        elif suffix not in LINES:
            documents = iter([read_document(path)])
        elif places is None:
            documents = read_lines(path, field)
        else:
            documents = find_lines(path, field, places)
        for found in documents:
            yield found
            last = found.line
    except (OSError, ValueError, pa.ArrowException) as error:
        if last == WHOLE:
            yield Found(WHOLE, WHOLE, "", explain_unread(error))
        else:
            yield Found(WHOLE, last + 1, "", "it cannot be read from here on")


def read_document(path: str) -> Found:
    """Return the single document of a text file."""
    with Path(path).open("rb") as file:
        raw = file.read(LOOK)
        if b"\0" in raw:
            return Found(0, WHOLE, "", "it is binary, or text in UTF-16")
        raw = raw.removeprefix(codecs.BOM_UTF8)
        size = min(LONGEST, os.fstat(file.fileno()).st_size)
        raw += file.read(max(0, size + 1 - len(raw)))  # allocates that much at once
    return Found(0, WHOLE, *take_bytes(raw))


def read_lines(path: str, field: str) -> Iterator[Found]:
    """Yield the documents of a JSON Lines file, skipping blank lines."""
    with Path(path).open("rb") as file:
        size, start = os.fstat(file.fileno()).st_size, 0
        for line in count(1):
            if not (raw := file.readline(LONGEST + 1)):
                return
            rest = raw
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(LONGEST)  # skip the rest of a long line
            stop = file.tell()
            if not raw.isspace():
                taken = take_line(raw, start, field)
                yield Found(start, line, *taken, part=stop / max(stop, size))
            start = stop


def find_lines(path: str, field: str, places: Sequence[int]) -> Iterator[Found]:
    """Yield the documents in the lines that begin at these byte offsets."""
    with Path(path).open("rb") as file:
        for at in places:
            file.seek(at)
            yield Found(at, WHOLE, *take_line(file.readline(LONGEST + 1), at, field))


def read_rows(path: str, field: str, places: Sequence[int] | None) -> Iterator[Found]:
    """Yield the documents of a table: all, or those in these rows."""
    arrow = path.lower().endswith(".arrow")
    cut = read_arrow(path, field) if arrow else read_parquet(path, field, places)
    for first, column, part in cut:
        rows = range(first, first + len(column))
        wanted = rows if places is None else select(places, rows)
        if not wanted:
            continue
        cells = column.view(AS_BYTES.get(column.type, column.type))
        cells.validate(full=True)  # invalid offsets could crash the process
        for row in wanted:
            yield Found(row, row, *take_cell(cells[row - first], field), part=part)


Cells = tuple[int, Any, float]  # first row, cells, fraction of the file read


def read_parquet(
    path: str, field: str, places: Sequence[int] | None
) -> Iterator[Cells]:
    """Yield a column of a Parquet file, skipping row groups without wanted rows."""
    with pq.ParquetFile(path) as file:
        check_column(file.schema_arrow, field)
        total, first = file.metadata.num_rows, 0
        for group in range(file.num_row_groups):
            rows = range(first, first + file.metadata.row_group(group).num_rows)
            if places is None or select(places, rows):
                for batch in file.iter_batches(
                    BATCH, [group], [field], use_threads=False
                ):
                    yield first, batch.column(field), first / total
                    first += len(batch)
            first = rows.stop


def read_arrow(path: str, field: str) -> Iterator[Cells]:
    """Yield a column of a memory-mapped Arrow file, so unwanted rows cost nothing.

    `datasets` writes the stream format; others write the file format, with a footer.
    """
    with pa.memory_map(path) as file:
        size, first = file.size(), 0
        if size and file.read_at(len(MAGIC), 0) == MAGIC:
            reader = pa.ipc.open_file(file)
            n = reader.num_record_batches
            batches = ((reader.get_batch(i), i / n) for i in range(n))
        else:
            reader = pa.ipc.open_stream(file)
            batches = ((batch, file.tell() / size) for batch in reader)
        check_column(reader.schema, field)
        for batch, part in batches:
            yield first, batch.column(field), part
            first += len(batch)


def select(places: Sequence[int], rows: range) -> Sequence[int]:
    """Return those of the ascending places that are in a range of rows."""
    return places[bisect_left(places, rows.start) : bisect_left(places, rows.stop)]


def check_column(schema: Any, field: str) -> None:
    """Raise FileError unless the table has one text column of this name."""
    if schema.names.count(field) != 1:
        raise_unreadable(f"it has no column {field!r}")
    kind = schema.field(field).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if kind not in {*AS_BYTES, *AS_BYTES.values()}:
        raise_unreadable(f"its column {field!r} holds no texts")


# What is a text

Taken = tuple[str, str]  # a text, or the reason why there is none


def take_bytes(raw: bytes) -> Taken:
    """Decode bytes as UTF-8 text."""
    if len(raw) > LONGEST:
        return "", TOO_LONG
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return "", NO_TEXT
    return ("", EMPTY) if not text or text.isspace() else (text, "")


def take_line(raw: bytes, at: int, field: str) -> Taken:
    """Parse a JSON object and return the text in one field."""
    line, refused = take_bytes(raw.removeprefix(codecs.BOM_UTF8) if at == 0 else raw)
    if refused:
        return "", refused
    try:
        row = STRICT.decode(line)
    except (ValueError, RecursionError):
        return "", "it is no JSON"
    if not isinstance(row, dict) or field not in row:
        return "", f"it has no field {field!r}"
    if not isinstance(row[field], str):
        return "", f"its field {field!r} is no text"
    try:
        return take_bytes(row[field].encode())
    except UnicodeEncodeError:  # tokenizers reject it too
        return "", "it holds half of a surrogate pair"


def take_cell(cell: Any, field: str) -> Taken:
    """Return the text in a cell of a table."""
    try:
        value = cell.as_py()
    except UnicodeDecodeError:  # some writers do not validate UTF-8
        return "", NO_TEXT
    if value is None:
        return "", f"it has no field {field!r}"
    return take_bytes(value if isinstance(value, bytes) else value.encode())
