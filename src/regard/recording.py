"""A recording on disk: saved in one move, opened without reading its arrays.

    records   [{name, sequence, scale, softcap, arrays: {"q": "0.q", …}, formula}, …]
    formula   ["all", [["band", 0, null], ["same", "0.mask", null]]]; see NODES
    and       version, model, tokens, texts, coverage, notes, crc

This JSON and the arrays are one safetensors file (array_file.py). An array that several
records share is stored once, and so are equal positions, masks and biases. A formula
with a node that is not in NODES (any where(fn)), or deeper than DEPTH, is written out
over the record's positions: it is a bool array from then on. In the notes, tuples come
back as lists. A record with bfloat16 opens in torch, as NumPy has no such numbers; any
other one opens in NumPy, read-only.

The header has a checksum, which is always checked. Each array has a crc. It is checked
at opening in files up to SMALL, in larger ones by open_recording(path, verify=True). A
file may be replaced while it is open, but not cut short: the system ends a program that
reads what is gone.

Next: seen.py
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.array_file import ArrayFile, name_dtype, to_bytes, write_arrays
from regard.arrays import Array, is_array, to_numpy
from regard.errors import FileError, MaskError, RegardError
from regard.masks.algebra import And, Mask, Not, Or, PerHead
from regard.masks.primitives import Band, Given, Keys, Same, Valid
from regard.record import Covered, Record, Recording
from regard.whole_file import write_whole

SMALL = 2**24  # bytes of a file that is checked whole at opening
CELLS, STRIP = 2**28, 2**22  # of a mask that is written out: at most, and at once
DEPTH = 64  # of a formula
FAR = 2**62  # bounds of a formula: beyond any position, far from overflow
SEQUENCES = 2**16  # a map lists them all
LABEL = 500  # characters of a name


class Part(NamedTuple):
    """What one part of a node may be."""

    codes: frozenset[str] = frozenset()  # an array of these dtypes …
    axes: tuple[int, ...] = ()  # … and as many axes
    number: bool = False
    null: bool = False
    mask: bool = False
    masks: bool = False  # a list of one or more


WHOLE, BITS = frozenset({"I64", "I32", "I16", "I8", "U8"}), frozenset({"BOOL"})
BOUND, END = Part(number=True, null=True), Part(WHOLE, (1,), number=True)
IDS, OTHER_IDS = Part(WHOLE, (1, 2)), Part(WHOLE, (1, 2), null=True)
INNER, SEVERAL = Part(mask=True), Part(masks=True)
NODES: dict[str, tuple[Callable[..., Mask], tuple[Part, ...]]] = {
    "band": (Band, (BOUND, BOUND)),  # causal, window, everything
    "keys": (Keys, (END, END)),  # keys, prefix, padding(lengths=…)
    "same": (Same, (IDS, OTHER_IDS)),
    "valid": (Valid, (Part(BITS, (2,)),)),  # padding
    "given": (Given, (Part(BITS, (4,)), Part(number=True))),  # array
    "all": (And, (SEVERAL,)),
    "any": (Or, (SEVERAL,)),
    "and": (operator.and_, (INNER, INNER)),  # as files had it before "all" and "any"
    "or": (operator.or_, (INNER, INNER)),
    "not": (Not, (INNER,)),
    "per_head": (PerHead, (SEVERAL,)),
}
NAMES = {node: name for name, (node, _) in NODES.items()}
NEEDED = {"q", "k", "lse", "q_positions", "k_positions"}
ARRAYS = NEEDED | {"v", "sink", "bias", "mask"}
ALONE = {"q", "k", "lse", "v"}  # large, and never equal to others
NOTHING = type(None)


def save_recording(path: str | Path, recording: Recording) -> None:
    """Write a recording into one file, which is whole or as it was before."""
    path = Path(path)
    arrays = Arrays()
    about = describe(recording, arrays)
    try:
        with write_whole(path) as new:
            write_arrays(new, about, arrays.found)
            open_recording(new)  # what could not be opened is not kept
    except (OSError, FileError) as error:
        raise FileError(f"{path} was not written: {error}") from error


def describe(recording: Recording, arrays: Arrays) -> dict[str, Any]:
    """Return everything but the numbers as JSON has it, and gather the arrays."""
    pairs = zip(recording.records, recording.sequences, strict=True)
    return {
        "model": recording.model,
        "records": [
            {
                "name": record.name,
                "sequence": operator.index(sequence),
                "scale": float(record.scale),
                "softcap": None if record.softcap is None else float(record.softcap),
                **describe_arrays(record, f"{i}.", arrays),
            }
            for i, (record, sequence) in enumerate(pairs)
        ],
        "tokens": [list(map(operator.index, row)) for row in recording.tokens],
        "texts": list(map(list, recording.texts)),
        "coverage": [
            # as text, because JSON has no NaN
            {**vars(x), "calls": operator.index(x.calls), "error": str(float(x.error))}
            for x in recording.coverage
        ],
        "notes": recording.notes,
    }


def describe_arrays(record: Record, prefix: str, arrays: Arrays) -> dict[str, Any]:
    """Return what a record's arrays are called in the file, and its formula."""
    mask, formula = record.mask, None
    names = {
        field: arrays.put(prefix + field, x, alone=field in ALONE)
        for field in sorted(ARRAYS)
        if is_array(x := getattr(record, field))
    }
    if isinstance(mask, Mask) and is_known(mask):
        formula = write_formula(mask, lambda x: arrays.put(f"{prefix}mask", x))
    elif isinstance(mask, Mask):
        names["mask"] = arrays.put_equal(f"{prefix}mask", write_out(record))
    return {"arrays": names, "formula": formula}


class Arrays:
    """The arrays of a file by name, each of them once."""

    def __init__(self) -> None:
        self.found: dict[str, Array] = {}
        self.names: dict[int | tuple[Any, ...], str] = {}

    def put(self, name: str, x: Array, *, alone: bool = False) -> str:
        """Return the name of an array, which someone else keeps alive."""
        if id(x) not in self.names:
            self.names[id(x)] = self.add(name, x) if alone else self.put_equal(name, x)
        return self.names[id(x)]

    def put_equal(self, name: str, x: Array) -> str:
        """Return the name of an array with the same numbers."""
        digest = hashlib.sha256(to_bytes(x)).digest()
        key = (name_dtype(x), tuple(x.shape), digest)
        if key not in self.names:
            self.names[key] = self.add(name, x)
        return self.names[key]

    def add(self, name: str, x: Array) -> str:
        """Take an array in, under a name that is free."""
        free = name if name not in self.found else f"{name}.{len(self.found)}"
        self.found[free] = x
        return free


def is_known(mask: Any, depth: int = 0) -> bool:
    """Tell whether a formula is made of NODES, and not too deep."""
    known = type(mask) in NAMES and depth < DEPTH
    return known and all(is_known(part, depth + 1) for part in mask.parts)


def write_formula(mask: Mask, put: Callable[[Array], str]) -> list[Any]:
    """Return a formula as a tree: the name of a node, then its parts."""

    def write(x: Any) -> Any:
        if isinstance(x, Mask):
            return write_formula(x, put)
        if isinstance(x, tuple):
            return [write(y) for y in x]
        return put(x) if is_array(x) else x

    return [NAMES[type(mask)], *map(write, vars(mask).values())]


def write_out(record: Record) -> NDArray[np.bool_]:
    """Return the mask over the positions of a record, (H or 1, Nq, Nk)."""
    n_q, n_k = record.q.shape[1], record.k.shape[1]
    step = max(1, STRIP // max(1, record.heads * n_k))
    strips: list[NDArray[np.bool_]] = []
    for first in range(0, max(1, n_q), step):
        strips.append(to_numpy(record.allowed(slice(first, first + step))))
        if (cells := strips[0].shape[0] * n_q * n_k) > CELLS:
            raise MaskError(
                f"{record.name}: {record.mask!r} cannot be saved as a formula, and has "
                f"{cells:,} cells, of which at most {CELLS:,} are written out. Write "
                "it with causal, window, same, padding and keys, joined by & | ~."
            )
    return np.concatenate(strips, axis=1)


def open_recording(path: str | Path, *, verify: bool = False) -> Recording:
    """Open a recording; its arrays stay in the file until they are used.

    verify: hold all numbers against their crc, as is always done in small files
    """
    path = Path(path)
    try:
        file = ArrayFile(path)
        if verify or file.size <= SMALL:
            file.verify()
        return read_recording(file)
    except (OSError, RegardError) as error:
        said = " ".join(str(error).split())
        raise FileError(f"{path.name} cannot be opened: {said}") from error


def read_recording(file: ArrayFile) -> Recording:
    """Return what describe() was given."""
    about = file.about
    rows, notes = take(about, "records", list), take(about, "notes", dict)
    expect(notes.get("decoders", []), "decoders", list)  # a map looks names up in it
    texts = [expect(x, "a text", list) for x in take(about, "texts", list)]
    tokens = [expect(x, "tokens", list) for x in take(about, "tokens", list)]
    return Recording(
        model=label(about, "model"),
        records=tuple(read_record(file, row) for row in rows),
        sequences=tuple(count(row, "sequence", SEQUENCES) for row in rows),
        tokens=tuple(tuple(map(number, row)) for row in tokens),
        texts=tuple(tuple(expect(x, "a text", str) for x in row) for row in texts),
        coverage=tuple(map(read_covered, take(about, "coverage", list))),
        notes=notes,
    )


def read_record(file: ArrayFile, row: Any) -> Record:
    """Return one record, whose arrays fit together."""
    names, tree = take(row, "arrays", dict), take(row, "formula", list, NOTHING)
    fields = [*names, "mask"] if tree is not None else [*names]
    if not NEEDED <= set(fields) <= ARRAYS or len(set(fields)) < len(fields):
        raise FileError("it is damaged: a record lacks arrays, or has too many.")
    in_torch = any(file.find(name).code == "BF16" for name in names.values())
    arrays = {x: file.array(name, in_torch=in_torch) for x, name in names.items()}
    if tree is not None:
        arrays["mask"] = read_formula(file, tree)
    return Record(
        name=label(row, "name"),
        scale=take(row, "scale", float),
        softcap=take(row, "softcap", float, NOTHING),
        **arrays,
    )


def read_covered(row: Any) -> Covered:
    """Return what became of one module."""
    error = take(row, "error", str)
    try:
        size = float(error)
    except ValueError:
        raise FileError("it is damaged: an error that is no number.") from None
    name, door, reason = (label(row, key) for key in ("name", "door", "reason"))
    calls = count(row, "calls")
    return Covered(name=name, door=door, calls=calls, error=size, reason=reason)


def read_formula(file: ArrayFile, tree: Any, depth: int = 0) -> Mask:
    """Return the formula of a tree, which is made of NODES and of nothing else."""
    if depth >= DEPTH:
        raise FileError(f"it has a mask that is more than {DEPTH} deep.")
    if type(tree) is not list or not tree or type(tree[0]) is not str:
        raise FileError("it is damaged: a mask that is no formula.")
    if tree[0] not in NODES:
        raise FileError(
            f"it has a mask of a kind that is not known here, {tree[0]!r:.40}. It may "
            "be from a newer version: pip install -U regard."
        )
    node, parts = NODES[tree[0]]
    if len(tree) != 1 + len(parts):
        raise FileError(f"it is damaged: a mask, {tree[0]}, of {len(tree) - 1} parts.")
    pairs = zip(tree[1:], parts, strict=True)
    return node(*(read_part(file, x, part, depth + 1) for x, part in pairs))


def read_part(file: ArrayFile, x: Any, part: Part, depth: int) -> Any:
    """Return a part of a node: nothing, a number, an array, a mask or several."""
    if x is None and part.null:
        return None
    if type(x) is int and part.number:
        return number(x)
    if type(x) is list and part.mask:
        return read_formula(file, x, depth)
    if type(x) is list and part.masks and x:
        return tuple(read_formula(file, y, depth) for y in x)
    if type(x) is str:
        code, shape, *_ = file.find(x)
        if code in part.codes and len(shape) in part.axes and 0 not in shape:
            return file.array(x)
    raise FileError("it is damaged: a part of a mask is of another kind or shape.")


def expect(value: Any, what: str, *kinds: type) -> Any:
    """Return a value, which must be of one of these kinds."""
    if type(value) not in kinds:
        names = " or ".join(kind.__name__ for kind in kinds)
        kind = type(value).__name__
        raise FileError(f"it is damaged: {what} is {kind}, expected {names}.")
    return value


def take(table: Any, key: str, *kinds: type) -> Any:
    """Return table[key], which must be of one of these kinds."""
    return expect(expect(table, "an entry", dict).get(key), key, *kinds)


def label(table: Any, key: str) -> str:
    """Return table[key], a text that is printed: it must not steer a terminal."""
    text: str = take(table, key, str)
    if len(text) > LABEL or not all(c.isprintable() or c in " \t\n" for c in text):
        raise FileError(f"it is damaged: {key} is {text!r:.40}, which is no name.")
    return text


def number(x: Any) -> int:
    """Return a whole number of a size that can be computed with."""
    if not -FAR <= expect(x, "a number", int) <= FAR:
        raise FileError("it is damaged: a number beyond all bounds.")
    return int(x)


def count(table: Any, key: str, end: int = FAR) -> int:
    """Return table[key], which must count something, up to an end."""
    if not 0 <= (n := number(take(table, key, int))) < end:
        raise FileError(f"it is damaged: {key} is {n}, expected 0 … {end - 1}.")
    return n
