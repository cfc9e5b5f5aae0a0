"""Named arrays and JSON metadata in one memory-mapped safetensors file.

    8 bytes   n
    n bytes   {"0.q": {dtype, shape, data_offsets}, …, "__metadata__": {…}} as JSON
    the rest  the data of all arrays, one array after the other

    __metadata__   regard: {version, crc: {"0.q": …}, …} as JSON; the crc of each head,
                   in chunks, so that a part that is read can be verified alone
                   checksum: of regard and of the table of arrays

Other programs can read it like any safetensors file. (The safetensors package is not
used here: it copies what it reads, and needs all data at once to write.) Files are not
trusted: every offset is checked against the file size before use. Error messages say
"it"; the caller adds the file name.

Next: recording/file.py
"""

from __future__ import annotations

import json
import math
import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.arrays import Array, to_numpy
from regard.errors import ArrayError, FileError, OptionError

VERSION = 2
READABLE = {1, VERSION}  # a file of version 1 has no certificates
CHUNK = 2**20  # bytes with one checksum
HEADER = 2**26  # maximum size of a header, in bytes
LONGEST = 2**62  # maximum size of an axis
EMPTY = 2**16  # maximum size of an axis of an empty array

CODES: dict[
    str, tuple[str, np.dtype[Any]]
] = {  # dtype: (its name in safetensors, the NumPy dtype to read it with)
    "float64": ("F64", np.dtype("<f8")),
    "float32": ("F32", np.dtype("<f4")),
    "float16": ("F16", np.dtype("<f2")),
    "bfloat16": ("BF16", np.dtype("<i2")),
    "int64": ("I64", np.dtype("<i8")),
    "int32": ("I32", np.dtype("<i4")),
    "int16": ("I16", np.dtype("<i2")),
    "int8": ("I8", np.dtype("i1")),
    "uint8": ("U8", np.dtype("u1")),
    "bool": ("BOOL", np.dtype("?")),
}
BYTES = dict(CODES.values())


class ArrayEntry(NamedTuple):
    """The dtype, shape and byte range (after the header) of an array."""

    code: str
    shape: tuple[int, ...]
    start: int
    stop: int


class ArrayFile:
    """An open file: its metadata and arrays."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size, head = os.fstat(file.fileno()).st_size, file.read(8)
            n = int.from_bytes(head, "little")
            if len(head) < 8 or n > min(HEADER, size - 8):
                raise FileError("it is truncated, or not a safetensors file.")
            self.about, self.entries = read_header(file.read(n), size)
            # torch has no read-only tensors, so bfloat16 uses a copy-on-write mapping
            codes = {entry.code for entry in self.entries.values()}
            mapped = np.memmap(file, np.uint8, "c" if "BF16" in codes else "r")
        self.size, self.data = size, mapped.view(np.ndarray)[8 + n :]
        self.made: dict[tuple[str, bool], Array] = {}

    def find(self, name: Any) -> ArrayEntry:
        """Return the entry of an array."""
        if not isinstance(name, str) or name not in self.entries:
            raise FileError("it is damaged: an array is missing.")
        return self.entries[name]

    def array(self, name: str, *, in_torch: bool = False) -> Array:
        """Return a memory-mapped array, the same object each time."""
        code, shape, start, stop = self.find(name)  # first: a name may be anything
        if (name, in_torch) not in self.made:
            x = self.data[start:stop].view(BYTES[code]).reshape(shape)
            x.flags.writeable = in_torch
            self.made[name, in_torch] = view_in_torch(x, code) if in_torch else x
        return self.made[name, in_torch]

    def verify(self, *names: str, head: int | None = None) -> None:
        """Check arrays against their CRC; bool arrays must contain only 0 and 1.

        names: of the arrays; default: all. head: only this entry of their first axis
        """
        crc = self.about.get("crc")
        for name in names or self.entries:
            code, shape, start, stop = self.find(name)
            raw = self.data[start:stop]
            odd = code == "BOOL" and raw.max(initial=0) > 1
            known = crc.get(name) if isinstance(crc, dict) else None
            if odd or not has_checksum(raw, shape, known, head):
                raise FileError(f"it is damaged: the data of {name:.40} is invalid.")


def has_checksum(
    raw: NDArray[np.uint8], shape: tuple[int, ...], known: Any, head: int | None
) -> bool:
    """Return whether the data of an array, or of one head, has its checksums."""
    if isinstance(known, str):  # version 1: one for the whole array
        return known == f"{zlib.crc32(raw.data):08x}"
    heads = split_by_head(raw, shape)
    if not isinstance(known, list) or len(known) != len(heads):
        return False
    some = range(len(heads)) if head is None else [head]
    return all(known[i] == checksum_chunks(heads[i]) for i in some)


def split_by_head(raw: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return the bytes of each head: one row for each entry of the first of 3 axes."""
    return raw.reshape(shape[0] if len(shape) == 3 and raw.size else 1, -1)


def checksum_chunks(raw: NDArray[np.uint8]) -> list[str]:
    """Return the checksums of consecutive chunks."""
    parts = (raw[i : i + CHUNK] for i in range(0, max(1, raw.size), CHUNK))
    return [f"{zlib.crc32(x.data):08x}" for x in parts]


def read_header(raw: bytes, size: int) -> tuple[dict[str, Any], dict[str, ArrayEntry]]:
    """Return the metadata of a file of this size, and the entries of its arrays."""
    header = parse(raw)
    metadata = header.pop("__metadata__", None)
    text = metadata.get("regard") if isinstance(metadata, dict) else None
    if not isinstance(text, str) or "version" not in (about := parse(text)):
        raise FileError("it is not a file of regard, expected a saved recording.")
    version = about["version"] if type(about["version"]) is int else "unknown"
    if version not in READABLE:
        raise FileError(
            f"it has format version {version!s:.20}, expected version {VERSION}. "
            "Install a newer release: pip install -U regard."
        )
    entries = {name: read_entry(x) for name, x in header.items()}
    first, at = 8 + len(raw), 0
    for x in sorted(entries.values(), key=lambda x: (x.start, x.stop)):
        width = BYTES[x.code].itemsize
        expected = (at, at + math.prod(x.shape) * width)
        if (x.start, x.stop) != expected or (first + at) % width:
            raise FileError("it is damaged: its arrays are not contiguous.")
        at = x.stop
    if first + at != size:
        raise FileError(f"it has {size:,} bytes, but its arrays end at {first + at:,}.")
    if metadata.get("checksum") != checksum_header(text, entries):
        raise FileError("it is damaged: its header does not match its checksum.")
    return about, entries


def parse(text: str | bytes) -> dict[str, Any]:
    """Return a JSON object as a dict."""
    try:
        text = text if isinstance(text, str) else text.decode()
        found = json.loads(text, parse_constant=parse_number, parse_float=parse_number)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise FileError("it is damaged, or not a safetensors file.")
    return found


def parse_number(text: str) -> float:
    """Return a finite number; raise ValueError for NaN and infinity."""
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number


def read_entry(x: Any) -> ArrayEntry:
    """Return the entry of an array; check what can be checked without the others."""
    match x:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [start, stop]}:
            numbers = (*shape, start, stop)
            whole = all(type(n) is int and 0 <= n <= LONGEST for n in numbers)
            sane = whole and len(shape) <= 4 and (0 not in shape or max(shape) <= EMPTY)
            if sane and code in BYTES and len(x) == 3:
                return ArrayEntry(code, tuple(shape), start, stop)
    raise FileError("it is damaged: an array has no valid dtype, shape or offsets.")


def view_in_torch(x: NDArray[Any], code: str) -> Array:
    """Return an array as a torch tensor, without a copy."""
    try:
        import torch  # noqa: PLC0415  needed for bfloat16 only
    except ModuleNotFoundError:
        raise ImportError(
            'bfloat16 arrays need torch: pip install "regard[torch]"'
        ) from None
    tensor = torch.from_numpy(x)
    return tensor.view(torch.bfloat16) if code == "BF16" else tensor


def write_arrays(path: Path, about: dict[str, Any], arrays: dict[str, Array]) -> None:
    """Write the header, the data, and the header again with the CRCs."""
    entries, at = {}, 0
    kinds = {name: CODES[name_dtype(x)] for name, x in arrays.items()}
    for name in sorted(arrays, key=lambda name: -kinds[name][1].itemsize):  # aligned
        (code, dtype), shape = kinds[name], tuple(map(int, arrays[name].shape))
        stop = at + math.prod(shape) * dtype.itemsize
        entries[name], at = ArrayEntry(code, shape, at, stop), stop
    crc: dict[str, Any] = {}
    for name, x in entries.items():
        heads = x.shape[0] if len(x.shape) == 3 and x.stop > x.start else 1
        chunks = max(1, -(-(x.stop - x.start) // heads // CHUNK))
        crc[name] = [["0" * 8] * chunks] * heads
    about = {"version": VERSION, **about, "crc": crc}
    with path.open("wb") as file:
        file.write(pack_header(about, entries))
        for name, entry in entries.items():
            raw = to_bytes(arrays[name])
            rows = split_by_head(np.frombuffer(raw, np.uint8), entry.shape)
            crc[name] = [checksum_chunks(x) for x in rows]
            file.write(raw)
        file.seek(0)
        file.write(pack_header(about, entries))  # has the same length


def pack_header(about: dict[str, Any], entries: dict[str, ArrayEntry]) -> bytes:
    """Return the header of a file, padded to a multiple of 64 bytes."""
    try:
        text = json.dumps(about, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(
            f"names, texts and notes cannot be saved as JSON: {error}. "
            "Use strings, finite numbers, True, False, None, lists and dicts of these."
        ) from None
    table: dict[str, Any] = {
        name: {"dtype": x.code, "shape": x.shape, "data_offsets": (x.start, x.stop)}
        for name, x in entries.items()
    }
    metadata = {"regard": text, "checksum": checksum_header(text, entries)}
    raw = json.dumps({"__metadata__": metadata, **table}).encode()
    raw += b" " * (-(8 + len(raw)) % 64)
    if len(raw) > HEADER:
        raise OptionError(
            f"names, tokens, texts and notes take {len(raw):,} bytes, expected at most "
            f"{HEADER:,}. Save fewer sequences in one file."
        )
    return len(raw).to_bytes(8, "little") + raw


def checksum_header(text: str, entries: dict[str, ArrayEntry]) -> str:
    """Return the checksum of a header."""
    return f"{zlib.crc32(json.dumps([text, entries], sort_keys=True).encode()):08x}"


def name_dtype(x: Array) -> str:
    """Return the name of a dtype that can be saved."""
    name = x.dtype.name if isinstance(x, np.ndarray) else str(x.dtype)
    if (name := name.removeprefix("torch.")) not in CODES:
        raise ArrayError(f"{name} cannot be saved. Convert it to {', '.join(CODES)}.")
    return name


def to_bytes(x: Array) -> memoryview:
    """Return the bytes of an array, as they are stored in the file."""
    name = name_dtype(x)
    if name != "bfloat16":
        raw = np.ascontiguousarray(to_numpy(x), CODES[name][1])
    elif type(x).__module__.startswith("torch"):
        import torch  # noqa: PLC0415  x is a tensor, so torch is installed

        raw = x.detach().cpu().contiguous().view(torch.int16).numpy()
    else:
        raw = np.ascontiguousarray(x).view(CODES[name][1])
    flat: memoryview = raw.reshape(-1).view(np.uint8).data
    return flat
