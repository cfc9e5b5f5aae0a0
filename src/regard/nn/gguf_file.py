"""A GGUF file: settings and named tensors, read without trusting a byte of it.

    magic, version, two counts ─▶ settings: key, kind, value
                               ─▶ tensors: name, shape, kind, offset ─▶ padding ─▶ data

A file comes from a stranger, and may be cut off or damaged. So every count is held
against the bytes that are left before anything is made of it; what does not fit is a
FileError. The numbers of a tensor stay in the mapped file until they are asked for.
(`gguf.GGUFReader` believes the counts, and makes an array of each of 49 152 tokens,
which takes seconds. The quantized kinds are its package's work here as well.)

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
AXES = 4  # the most that a tensor may have
LONGEST = 200  # characters of a name; the format allows a tensor 64 bytes
PLAIN: dict[GGMLQuantizationType, Any] = {  # kinds that are numbers already
    GGMLQuantizationType.F64: np.dtype("<f8"),
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
}


@dataclass(frozen=True)
class Entry:
    """Where the numbers of a tensor stand, and how they are written."""

    shape: tuple[int, ...]  # as NumPy counts: the last axis lies together
    kind: GGMLQuantizationType
    start: int  # in bytes, from the start of the file
    size: int  # in bytes


@dataclass(frozen=True)
class GgufFile:
    """What a file says of itself, and its tensors."""

    path: Path
    settings: dict[str, Any]  # arrays of numbers are NumPy's, of texts are lists
    entries: dict[str, Entry]
    data: NDArray[np.uint8]  # the whole file, mapped

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor in float32."""
        entry = self.entries[name]
        raw = self.data[entry.start : entry.start + entry.size]
        if entry.kind in PLAIN:
            numbers: NDArray[Any] = raw.view(PLAIN[entry.kind]).astype(np.float32)
            return numbers.reshape(entry.shape)
        _, width = GGML_QUANT_SIZES[entry.kind]
        together = width * math.gcd(entry.size // width, 256)  # longer rows: faster
        try:
            numbers = dequantize(raw.reshape(-1, together), entry.kind)
        except NotImplementedError:
            raise FileError(
                f"{self.path.name}: {name} is quantized as {entry.kind.name}, which "
                "gguf cannot read. Use another quantization of the model, as Q8_0."
            ) from None
        return numbers.reshape(entry.shape)


def open_gguf(path: Path) -> GgufFile:
    """Read the head of a GGUF file, and map the rest."""
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
            raise FileError(f"{path.name}: the key {key!r} stands there twice.")
        settings[key] = cursor.value(cursor.number("I", key), key)
    return GgufFile(path, settings, read_entries(cursor, tensors, settings), data)


def read_entries(
    cursor: Cursor, count: int, settings: dict[str, Any]
) -> dict[str, Entry]:
    """Return where each tensor stands; none may reach beyond the file."""
    heads: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(count):
        name = cursor.label("the name of a tensor")
        if (axes := cursor.number("I", name)) > AXES:
            cursor.refuse(f"{name} has {axes} axes, expected at most {AXES}")
        shape = tuple(cursor.number("Q", name) for _ in range(axes))[::-1]
        heads.append((name, shape, cursor.number("I", name), cursor.number("Q", name)))
    step = settings.get("general.alignment", 32)
    if not isinstance(step, int) or step < 1:
        cursor.refuse(f"general.alignment is {step!r}, expected 32 or the like")
    first = -(-cursor.at // step) * step
    entries: dict[str, Entry] = {}
    for name, shape, kind, offset in heads:
        if name in entries:
            cursor.refuse(f"the tensor {name} stands there twice")
        entry = measure(cursor, name, shape, kind, first + offset)
        if entry.start + entry.size > cursor.size:
            cursor.refuse(
                f"{name}, {shape} in {entry.kind.name}, needs {entry.size} bytes at "
                f"{entry.start}, the file has {cursor.size}"
            )
        entries[name] = entry
    if sum(entry.size for entry in entries.values()) > cursor.size:
        cursor.refuse("its tensors share bytes, so that it is larger than it looks")
    return entries


def measure(
    cursor: Cursor, name: str, shape: tuple[int, ...], kind: int, start: int
) -> Entry:
    """Return how many bytes a tensor takes."""
    try:
        found = GGMLQuantizationType(kind)
    except ValueError:
        cursor.refuse(f"{name} is of the unknown kind {kind}")
    block, width = GGML_QUANT_SIZES[found]
    numbers = math.prod(shape)
    if not shape or not numbers or shape[-1] % block:
        cursor.refuse(
            f"{name} has the shape {shape}, expected rows of a multiple of {block}, "
            f"as {found.name} demands"
        )
    return Entry(shape, found, start, numbers // block * width)


class Cursor:
    """Reads one thing after the other, and never beyond the end."""

    def __init__(self, data: NDArray[np.uint8], name: str) -> None:
        self.data, self.size, self.name, self.at = data.data, data.size, name, 0

    def refuse(self, what: str) -> NoReturn:
        """Say what is wrong with the file."""
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
        """Return the next number, of a kind that struct knows."""
        (number,) = struct.unpack(f"<{code}", self.take(struct.calcsize(code), what))
        return number

    def text(self, what: str) -> str:
        """Return the next text."""
        raw = self.take(self.number("Q", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.refuse(f"{what} is not UTF-8 text: {raw[:40]!r}")

    def label(self, what: str) -> str:
        """Return the next text, which must be fit to stand in a sentence."""
        name = self.text(what)
        if len(name) > LONGEST or not name.isprintable():
            self.refuse(
                f"{what} is {name!r:.80}, expected {LONGEST} characters or less"
            )
        return name

    def value(self, kind: int, key: str) -> Any:
        """Return the next value of a kind: a number, a text, or an array of these."""
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
