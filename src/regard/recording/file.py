"""Recordings on disk: saved atomically, opened with memory-mapped arrays.

    records   [{name, sequence, scale, softcap, arrays: {"q": "0.q", …}, formula}, …]
    formula   ["all", [["band", 0, null], ["same", "0.mask", null]]]; see NODES
    and       version, model, tokens, texts, coverage, notes, crc

This JSON and the arrays are one safetensors file (array_file.py). Arrays that several
records share are stored once, as are equal positions, masks and biases. A formula with
a node that is not in NODES (any where(fn)), or deeper than DEPTH, is stored as a bool
array over the record's positions. In the notes, tuples become lists. Records with
bfloat16, which NumPy lacks, open in torch; all others open in NumPy, read-only.

The checksum of the header is always verified. Array checksums (CRC) are verified on
opening for files up to SMALL, for larger ones with open_recording(path, verify=True). A
file may be replaced while it is open, but not truncated: reading a truncated mapping
terminates the process.

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

from regard.arrays import Array, is_array, to_numpy
from regard.atomic_file import write_atomically
from regard.errors import FileError, MaskError, RegardError
from regard.masks.algebra import And, Mask, Not, Or, PerHead
from regard.masks.primitives import ArrayMask, Band, Keys, Same, Valid
from regard.recording.array_file import ArrayFile, name_dtype, to_bytes, write_arrays
from regard.recording.evidence import Certificate, Covered, LseOrigin
from regard.recording.record import Record, Recording

SMALL = 2**24  # files up to this many bytes are verified on opening
CELLS, STRIP = 2**28, 2**22  # cells of a dense mask: maximum, and per step
DEPTH = 64  # maximum depth of a formula
FAR = 2**62  # maximum bound in a formula: beyond any position, without overflow
SEQUENCES = 2**16  # maximum number: the map lists all of them
LABEL, TEXT = 500, 4000  # maximum length of a name, and of a reason or a note


class NodeField(NamedTuple):
    """The allowed types of one field of a node."""

    codes: frozenset[str] = frozenset()  # an array with one of these dtypes …
    axes: tuple[int, ...] = ()  # … and one of these numbers of axes
    number: bool = False
    null: bool = False
    mask: bool = False
    masks: bool = False  # a list of one or more


WHOLE, BITS = frozenset({"I64", "I32", "I16", "I8", "U8"}), frozenset({"BOOL"})
BOUND, END = NodeField(number=True, null=True), NodeField(WHOLE, (1,), number=True)
IDS, OTHER_IDS = NodeField(WHOLE, (1, 2)), NodeField(WHOLE, (1, 2), null=True)
INNER, SEVERAL = NodeField(mask=True), NodeField(masks=True)
NODES: dict[str, tuple[Callable[..., Mask], tuple[NodeField, ...]]] = {
    "band": (Band, (BOUND, BOUND)),  # causal, window, everything
    "keys": (Keys, (END, END)),  # keys, prefix, padding(lengths=…)
    "same": (Same, (IDS, OTHER_IDS)),
    "valid": (Valid, (NodeField(BITS, (2,)),)),  # padding
    "given": (ArrayMask, (NodeField(BITS, (4,)), NodeField(number=True))),  # array
    "all": (And, (SEVERAL,)),
    "any": (Or, (SEVERAL,)),
    "and": (operator.and_, (INNER, INNER)),  # older files, before "all" and "any"
    "or": (operator.or_, (INNER, INNER)),
    "not": (Not, (INNER,)),
    "per_head": (PerHead, (SEVERAL,)),
}
NAMES = {node: name for name, (node, _) in NODES.items()}
NEEDED = {"q", "k", "lse", "q_positions", "k_positions"}
ARRAYS = NEEDED | {"v", "sink", "bias", "mask"}
ALONE = {"q", "k", "lse", "v"}  # large, not deduplicated by content
NOTHING = type(None)


def save_recording(path: str | Path, recording: Recording) -> None:
    """Write a recording to a file, atomically."""
    path = Path(path)
    arrays = ArrayTable()
    about = build_header(recording, arrays)
    try:
        with write_atomically(path) as new:
            write_arrays(new, about, arrays.found)
            open_recording(new)  # do not replace the old file by an invalid one
    except (OSError, FileError) as error:
        raise FileError(f"{path} was not written: {error}") from error


def build_header(recording: Recording, arrays: ArrayTable) -> dict[str, Any]:
    """Return the recording as JSON, without its arrays, which are added to `arrays`."""
    pairs = zip(recording.records, recording.sequences, strict=True)
    return {
        "model": recording.model,
        "records": [
            {
                "name": record.name,
                "sequence": operator.index(sequence),
                "scale": float(record.scale),
                "softcap": None if record.softcap is None else float(record.softcap),
                "origin": record.origin.name,
                "certificate": write_certificate(record.certificate),
                **describe_arrays(record, f"{i}.", arrays),
            }
            for i, (record, sequence) in enumerate(pairs)
        ],
        "tokens": [list(map(operator.index, row)) for row in recording.tokens],
        "texts": list(map(list, recording.texts)),
        "coverage": [
            {
                **vars(x),
                "calls": operator.index(x.calls),
                "kept": operator.index(x.kept),
                "error": str(float(x.error)),  # a string, because JSON has no NaN
                "reason": write_text(x.reason),
                "attention": bool(x.attention),
                "note": write_text(x.note),
                "rows": operator.index(x.rows),
                "in_records": operator.index(x.in_records),
                "left_out": {write_text(why): n for why, n in x.left_out.items()},
            }
            for x in recording.coverage
        ],
        "notes": recording.notes,
    }


def describe_arrays(record: Record, prefix: str, arrays: ArrayTable) -> dict[str, Any]:
    """Return the names of a record's arrays in the file, and its formula."""
    mask, formula = record.mask, None
    names = {
        field: arrays.put(prefix + field, x, alone=field in ALONE)
        for field in sorted(ARRAYS)
        if is_array(x := getattr(record, field))
    }
    if isinstance(mask, Mask) and is_storable(mask):
        formula = write_formula(mask, lambda x: arrays.put(f"{prefix}mask", x))
    elif isinstance(mask, Mask):
        names["mask"] = arrays.put_equal(f"{prefix}mask", make_dense_mask(record))
    return {"arrays": names, "formula": formula}


class ArrayTable:
    """The arrays of a file by name, without duplicates."""

    def __init__(self) -> None:
        self.found: dict[str, Array] = {}
        self.names: dict[int | tuple[Any, ...], str] = {}

    def put(self, name: str, x: Array, *, alone: bool = False) -> str:
        """Return the name of an array; the caller keeps x alive, because of id(x)."""
        if id(x) not in self.names:
            self.names[id(x)] = self.add(name, x) if alone else self.put_equal(name, x)
        return self.names[id(x)]

    def put_equal(self, name: str, x: Array) -> str:
        """Return the name of an array with equal contents; add x if there is none."""
        digest = hashlib.sha256(to_bytes(x)).digest()
        key = (name_dtype(x), tuple(x.shape), digest)
        if key not in self.names:
            self.names[key] = self.add(name, x)
        return self.names[key]

    def add(self, name: str, x: Array) -> str:
        """Add an array under a unique name, and return the name."""
        free = name if name not in self.found else f"{name}.{len(self.found)}"
        self.found[free] = x
        return free


def is_storable(mask: Any, depth: int = 0) -> bool:
    """Return whether a formula consists of NODES, and is not too deep."""
    known = type(mask) in NAMES and depth < DEPTH
    return known and all(is_storable(part, depth + 1) for part in mask.parts)


def write_formula(mask: Mask, put: Callable[[Array], str]) -> list[Any]:
    """Return a formula as a tree: [name of the node, field, …]."""

    def write(x: Any) -> Any:
        if isinstance(x, Mask):
            return write_formula(x, put)
        if isinstance(x, tuple):
            return [write(y) for y in x]
        return put(x) if is_array(x) else x

    return [NAMES[type(mask)], *map(write, vars(mask).values())]


def make_dense_mask(record: Record) -> NDArray[np.bool_]:
    """Return the mask over the positions of a record, (H or 1, Nq, Nk)."""
    n_q, n_k = record.q.shape[1], record.k.shape[1]
    step = max(1, STRIP // max(1, record.heads * n_k))
    strips: list[NDArray[np.bool_]] = []
    for first in range(0, max(1, n_q), step):
        strips.append(to_numpy(record.allowed(slice(first, first + step))))
        if (cells := strips[0].shape[0] * n_q * n_k) > CELLS:
            raise MaskError(
                f"{record.name}: {record.mask!r} cannot be saved as a formula, and its "
                f"{cells:,} cells exceed the limit of {CELLS:,} for an array. Use "
                "causal, window, same, padding and keys, combined with & | ~."
            )
    return np.concatenate(strips, axis=1)


def open_recording(path: str | Path, *, verify: bool = False) -> Recording:
    """Open a recording; its arrays are memory-mapped.

    verify: check all arrays against their CRC, as is always done for small files
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
    """Return the recording of an open file: the inverse of describe()."""
    about = file.about
    rows, notes = read_field(about, "records", list), read_field(about, "notes", dict)
    expect_kind(
        notes.get("decoders", []), "decoders", list
    )  # the map reads names from it
    texts = [expect_kind(x, "a text", list) for x in read_field(about, "texts", list)]
    tokens = [expect_kind(x, "tokens", list) for x in read_field(about, "tokens", list)]
    return Recording(
        model=read_label(about, "model"),
        records=tuple(read_record(file, row) for row in rows),
        sequences=tuple(read_count(row, "sequence", SEQUENCES) for row in rows),
        tokens=tuple(tuple(map(read_whole_number, row)) for row in tokens),
        texts=tuple(tuple(expect_kind(x, "a text", str) for x in row) for row in texts),
        coverage=tuple(map(read_covered, read_field(about, "coverage", list))),
        notes=notes,
    )


def read_record(file: ArrayFile, row: Any) -> Record:
    """Return one record."""
    names, tree = (
        read_field(row, "arrays", dict),
        read_field(row, "formula", list, NOTHING),
    )
    fields = [*names, "mask"] if tree is not None else [*names]
    if not NEEDED <= set(fields) <= ARRAYS or len(set(fields)) < len(fields):
        raise FileError("it is damaged: a record has missing or extra arrays.")
    in_torch = any(file.find(name).code == "BF16" for name in names.values())
    arrays = {x: file.array(name, in_torch=in_torch) for x, name in names.items()}
    if tree is not None:
        arrays["mask"] = read_formula(file, tree)
    return Record(
        name=read_label(row, "name"),
        scale=read_field(row, "scale", float),
        softcap=read_field(row, "softcap", float, NOTHING),
        origin=read_origin(row),
        certificate=read_certificate(row),
        **arrays,
    )


def write_certificate(certificate: Certificate | None) -> dict[str, Any] | None:
    """Return a certificate as JSON, which has no NaN and no infinity."""
    if certificate is None:
        return None
    return {
        name: str(x) if isinstance(x, float) else x
        for name, x in vars(certificate).items()
    }


def read_certificate(row: Any) -> Certificate | None:
    """Return the certificate of a record; version 1 has none."""
    told = expect_kind(row, "an entry", dict).get("certificate")
    if told is None:
        return None
    return Certificate(
        by=read_label(told, "by"),
        rows=read_count(told, "rows"),
        failed=read_count(told, "failed"),
        unknown=read_count(told, "unknown"),
        error=read_size(told, "error"),
        tolerance=read_size(told, "tolerance"),
        power=read_size(told, "power"),
    )


def read_origin(row: dict[str, Any]) -> LseOrigin:
    """Return who computed lse; nothing is known of version 1."""
    name = read_label({"origin": LseOrigin.RECORD.name, **row}, "origin")
    if name not in LseOrigin.__members__:
        raise FileError(f"it is damaged: the origin of lse is {name!r:.40}.")
    return LseOrigin[name]


def read_size(table: Any, key: str) -> float:
    """Return table[key], a number that is stored as a string."""
    try:
        return float(read_field(table, key, str))
    except ValueError:
        raise FileError(f"it is damaged: {key} is not a number.") from None


def read_covered(row: Any) -> Covered:
    """Return the coverage of one layer."""
    calls, reason = read_count(row, "calls"), read_label(row, "reason", TEXT)
    # older files have no kept, attention and note: a layer was recorded or it was not
    older = {"kept": 0 if reason else calls, "attention": True, "note": ""}
    row = older | {"rows": 0, "in_records": 0, "left_out": {}} | row
    left_out = read_field(row, "left_out", dict)
    return Covered(
        name=read_label(row, "name"),
        via=read_label(row, "via" if "via" in row else "door"),  # older files
        calls=calls,
        kept=read_count(row, "kept", calls + 1),
        error=read_size(row, "error"),
        reason=reason,
        attention=read_field(row, "attention", bool),
        note=read_label(row, "note", TEXT),
        rows=read_count(row, "rows"),
        in_records=read_count(row, "in_records"),
        left_out={write_text(x): read_count(left_out, x) for x in left_out},
    )


def read_formula(file: ArrayFile, tree: Any, depth: int = 0) -> Mask:
    """Return the formula of a tree, which must consist of NODES only."""
    if depth >= DEPTH:
        raise FileError(f"it has a mask nested more than {DEPTH} levels deep.")
    if type(tree) is not list or not tree or type(tree[0]) is not str:
        raise FileError("it is damaged: a mask is not a formula.")
    if tree[0] not in NODES:
        raise FileError(
            f"it has a mask of unknown type {tree[0]!r:.40}. The file may have been "
            "written by a newer version: pip install -U regard."
        )
    node, parts = NODES[tree[0]]
    if len(tree) != 1 + len(parts):
        raise FileError(f"it is damaged: mask {tree[0]} has {len(tree) - 1} fields.")
    pairs = zip(tree[1:], parts, strict=True)
    return node(*(read_part(file, x, part, depth + 1) for x, part in pairs))


def read_part(file: ArrayFile, x: Any, part: NodeField, depth: int) -> Any:
    """Return a field of a node: None, a number, an array, a mask or several masks."""
    if x is None and part.null:
        return None
    if type(x) is int and part.number:
        return read_whole_number(x)
    if type(x) is list and part.mask:
        return read_formula(file, x, depth)
    if type(x) is list and part.masks and x:
        return tuple(read_formula(file, y, depth) for y in x)
    if type(x) is str:
        code, shape, *_ = file.find(x)
        if code in part.codes and len(shape) in part.axes and 0 not in shape:
            return file.array(x)
    raise FileError("it is damaged: a field of a mask has the wrong type or shape.")


def expect_kind(value: Any, what: str, *kinds: type) -> Any:
    """Return a value, which must have one of these types."""
    if type(value) not in kinds:
        names = " or ".join(kind.__name__ for kind in kinds)
        kind = type(value).__name__
        raise FileError(f"it is damaged: {what} is {kind}, expected {names}.")
    return value


def read_field(table: Any, key: str, *kinds: type) -> Any:
    """Return table[key], which must have one of these types."""
    return expect_kind(expect_kind(table, "an entry", dict).get(key), key, *kinds)


def read_label(table: Any, key: str, limit: int = LABEL) -> str:
    """Return table[key], a printable string: no terminal escape sequences."""
    text: str = read_field(table, key, str)
    if len(text) > limit or not all(map(is_printable, text)):
        raise FileError(f"it is damaged: {key} is {text!r:.40}, not a valid name.")
    return text


def is_printable(character: str) -> bool:
    """Return whether a character is not a control code; tabs and line ends are none."""
    return character.isprintable() or character in " \t\n"


def write_text(text: str) -> str:
    """Return a reason or a note for a file; an error's own words may be anything."""
    return "".join(c if is_printable(c) else "?" for c in text[:TEXT])


def read_whole_number(x: Any) -> int:
    """Return an integer, which must be in the range -FAR … FAR."""
    if not -FAR <= expect_kind(x, "a number", int) <= FAR:
        raise FileError("it is damaged: a number is out of range.")
    return int(x)


def read_count(table: Any, key: str, end: int = FAR) -> int:
    """Return table[key], which must be an integer in 0 … end - 1."""
    if not 0 <= (n := read_whole_number(read_field(table, key, int))) < end:
        raise FileError(f"it is damaged: {key} is {n}, expected 0 … {end - 1}.")
    return n
