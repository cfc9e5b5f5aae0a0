"""Reader of untrusted GGUF files: settings and named tensors.

    magic, version, two counts ─▶ settings: key, kind, value
                               ─▶ tensors: name, shape, kind, offset ─▶ padding ─▶ data

A file may be truncated, damaged or malicious. So every count is checked against the
number of bytes left before it is used; a mismatch raises a FileError. Tensors stay in
the memory-mapped file until they are read. (`gguf.GGUFReader` trusts the counts and
makes an array of each of 49 152 tokens, which takes seconds. Dequantization is done by
the gguf package.)

Next: tokens.py
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from regard.errors import FileError

VERSIONS = (2, 3)
NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
TEXT, ARRAY = 8, 9
AXES = 4  # maximum number of axes of a tensor
LONGEST = 200  # maximum length of a name; the format allows 64 bytes for a tensor
PLAIN: dict[GGMLQuantizationType, Any] = {  # kinds that are not quantized
    GGMLQuantizationType.F64: np.dtype("<f8"),
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
}


@dataclass(frozen=True)
class TensorEntry:
    """Location, shape and number format of a tensor in the file."""

    shape: tuple[int, ...]  # in NumPy order: the last axis is contiguous
    kind: GGMLQuantizationType
    start: int  # in bytes, from the start of the file
    size: int  # in bytes


@dataclass(frozen=True)
class GgufFile:
    """The settings and the tensors of a GGUF file."""

    path: Path
    settings: dict[str, Any]  # numeric arrays are ndarrays, text arrays are lists
    entries: dict[str, TensorEntry]
    data: NDArray[np.uint8]  # the whole file, mapped

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor in float32."""
        entry = self.entries[name]
        raw = self.data[entry.start : entry.start + entry.size]
        if entry.kind in PLAIN:
            numbers: NDArray[Any] = raw.view(PLAIN[entry.kind]).astype(np.float32)
            return numbers.reshape(entry.shape)
        _, width = GGML_QUANT_SIZES[entry.kind]
        together = width * math.gcd(entry.size // width, 256)  # long rows are faster
        try:
            numbers = dequantize(raw.reshape(-1, together), entry.kind)
        except NotImplementedError:
            raise FileError(
                f"{self.path.name}: {name} is quantized as {entry.kind.name}, which "
                "gguf cannot read. Use another quantization of the model, such as Q8_0."
            ) from None
        return numbers.reshape(entry.shape)


def open_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file and memory-map the rest."""
    try:
        data = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise FileError(f"{path.name} cannot be read: {error}.") from None
    cursor = Cursor(data, path.name)
    if (magic := cursor.take(4, "the magic")) != b"GGUF":
        raise FileError(f"{path.name} starts with {magic!r}, expected b'GGUF'.")
    if (version := cursor.number("I", "the version")) not in VERSIONS:
        raise FileError(
            f"{path.name} is GGUF version {version}, expected 2 or 3 (little-endian)."
        )
    tensors, keys = (cursor.number("Q", "a count") for _ in range(2))
    settings: dict[str, Any] = {}
    for _ in range(keys):
        key = cursor.label("a key")
        if key in settings:
            raise FileError(f"{path.name}: the key {key!r} occurs twice.")
        settings[key] = cursor.value(cursor.number("I", key), key)
    return GgufFile(path, settings, read_entries(cursor, tensors, settings), data)


def read_entries(
    cursor: Cursor, count: int, settings: dict[str, Any]
) -> dict[str, TensorEntry]:
    """Return the entry of each tensor; raise if one exceeds the file."""
    heads: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(count):
        name = cursor.label("the name of a tensor")
        if (axes := cursor.number("I", name)) > AXES:
            cursor.refuse(f"{name} has {axes} axes, expected at most {AXES}")
        shape = tuple(cursor.number("Q", name) for _ in range(axes))[::-1]
        heads.append((name, shape, cursor.number("I", name), cursor.number("Q", name)))
    step = settings.get("general.alignment", 32)
    if not isinstance(step, int) or step < 1:
        cursor.refuse(f"general.alignment is {step!r}, expected a positive integer")
    first = -(-cursor.at // step) * step
    entries: dict[str, TensorEntry] = {}
    for name, shape, kind, offset in heads:
        if name in entries:
            cursor.refuse(f"the tensor {name} occurs twice")
        entry = count_tensor_bytes(cursor, name, shape, kind, first + offset)
        if entry.start + entry.size > cursor.size:
            cursor.refuse(
                f"{name}, {shape} in {entry.kind.name}, needs {entry.size} bytes at "
                f"{entry.start}, the file has {cursor.size}"
            )
        entries[name] = entry
    if sum(entry.size for entry in entries.values()) > cursor.size:
        cursor.refuse("its tensors overlap: together they are larger than the file")
    return entries


def count_tensor_bytes(
    cursor: Cursor, name: str, shape: tuple[int, ...], kind: int, start: int
) -> TensorEntry:
    """Return the entry of a tensor, with its size in bytes."""
    try:
        found = GGMLQuantizationType(kind)
    except ValueError:
        cursor.refuse(f"{name} is of the unknown kind {kind}")
    block, width = GGML_QUANT_SIZES[found]
    numbers = math.prod(shape)
    if not shape or not numbers or shape[-1] % block:
        cursor.refuse(
            f"{name} has the shape {shape}, expected rows of a multiple of {block}, "
            f"as {found.name} requires"
        )
    return TensorEntry(shape, found, start, numbers // block * width)


class Cursor:
    """Sequential reader that never reads beyond the end."""

    def __init__(self, data: NDArray[np.uint8], name: str) -> None:
        self.data, self.size, self.name, self.at = data.data, data.size, name, 0

    def refuse(self, what: str) -> NoReturn:
        """Raise a FileError that says what is wrong with the file."""
        raise FileError(f"{self.name} is damaged: {what}.")

    def take(self, n: int, what: str) -> bytes:
        """Return the next n bytes."""
        if n > self.size - self.at:
            self.refuse(
                f"{what} needs {n} bytes at {self.at}, the file has {self.size}"
            )
        self.at += n
        return bytes(self.data[self.at - n : self.at])

    def number(self, code: str, what: str) -> Any:
        """Return the next number; code is a format character of struct."""
        (number,) = struct.unpack(f"<{code}", self.take(struct.calcsize(code), what))
        return number

    def text(self, what: str) -> str:
        """Return the next string."""
        raw = self.take(self.number("Q", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.refuse(f"{what} is not UTF-8 text: {raw[:40]!r}")

    def label(self, what: str) -> str:
        """Return the next string, which must be short and printable."""
        name = self.text(what)
        if len(name) > LONGEST or not name.isprintable():
            self.refuse(
                f"{what} is {name!r:.80}, expected {LONGEST} characters or less"
            )
        return name

    def value(self, kind: int, key: str) -> Any:
        """Return the next value: a number, a string, or an array of these."""
        if kind in NUMBERS:
            return self.number(NUMBERS[kind], key)
        if kind == TEXT:
            return self.text(key)
        if kind != ARRAY:
            self.refuse(f"{key} is of the unknown kind {kind}")
        inner, count = self.number("I", key), self.number("Q", key)
        if inner in NUMBERS:
            item = np.dtype(NUMBERS[inner]).newbyteorder("<")
            return np.frombuffer(self.take(count * item.itemsize, key), item)
        if inner != TEXT:
            self.refuse(f"{key} is an array of the unknown kind {inner}")
        return [self.text(key) for _ in range(count)]
