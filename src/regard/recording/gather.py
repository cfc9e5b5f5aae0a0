"""Join the recordings of a tensor-parallel model: every rank computed some heads.

    rank 0   q (H/2, Nq, D)  ─┐
                              ├─  q (H, Nq, D)     heads in the order of the ranks
    rank 1   q (H/2, Nq, D)  ─┘

Each rank watches its own part of the model and saves it. One process opens all files:

    parts = [regard.open(f"rank{i}.regard").recording for i in range(world)]
    whole = regard.seen.Seen(gather_heads(parts))

What the ranks share (positions, scale, masks, tokens) must agree. A layer that is the
same on every rank is not split between them, and is kept once.

Next: file.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from regard.arrays import Array, convert, is_array, namespace, to_numpy
from regard.errors import OptionError, ShapeError
from regard.masks.algebra import Mask
from regard.masks.free_axes import find_axes
from regard.recording.evidence import Covered
from regard.recording.record import Record, Recording

SHARED = ("scale", "softcap", "q_positions", "k_positions")  # the same on every rank
BY_HEAD = ("q", "k", "v", "lse", "sink")  # a part of the heads on every rank
Key = tuple[str, int]  # the name of a layer and the number of a sequence


def gather_heads(recordings: Sequence[Recording]) -> Recording:
    """Return one recording with the heads of all ranks.

    recordings: one of each rank of a tensor-parallel model, in rank order
    """
    parts = tuple(recordings)
    check_ranks(parts)
    check_recordings(parts)
    first, *others = (dict(list_records(part)) for part in parts)
    records = [
        join_records(key, [r, *(x[key] for x in others)]) for key, r in first.items()
    ]
    notes = {name: note for name, note in parts[0].notes.items() if name != "rank"}
    return replace(
        parts[0],
        records=tuple(records),
        coverage=join_coverage(parts),
        notes=notes | {"gathered": len(parts)},
    )


def list_records(part: Recording) -> list[tuple[Key, Record]]:
    """Return the records of one rank, each with its layer and sequence."""
    pairs = zip(part.records, part.sequences, strict=True)
    return [((record.name, number), record) for record, number in pairs]


def check_ranks(parts: Sequence[Recording]) -> None:
    """Raise OptionError unless every rank is there once, and in order."""
    if not parts:
        raise OptionError("there are no recordings to join, expected one of each rank.")
    noted = [part.notes.get("rank") for part in parts]
    if all(note is None for note in noted):
        return  # recorded without torch.distributed: the order given counts
    world = len(parts)
    if [tuple(note or ()) for note in noted] != [(i, world) for i in range(world)]:
        told = ", ".join(
            f"{note[0]} of {note[1]}" if note else "unknown" for note in noted
        )
        raise OptionError(
            f"the recordings are of ranks {told}; expected all {world} ranks in order, "
            f"0 to {world - 1}."
        )


def check_recordings(parts: Sequence[Recording]) -> None:
    """Raise OptionError unless all ranks ran the same layers on the same tokens."""
    keys = [[key for key, _ in list_records(part)] for part in parts]
    for rank, part in enumerate(parts):
        if part.tokens != parts[0].tokens:
            raise OptionError(
                f"rank {rank} read other tokens than rank 0. The ranks of a "
                "tensor-parallel model read the same; recordings of data-parallel "
                "ranks are separate runs, and are not joined."
            )
        if len(set(keys[rank])) != len(keys[rank]):
            raise OptionError(f"rank {rank} has several records of a layer.")
        for name, number in sorted(set(keys[rank]) ^ set(keys[0])):
            lacks = 0 if (name, number) in keys[rank] else rank
            raise OptionError(
                f"rank {lacks} has no record of {name!r}, sequence {number}, which "
                f"another rank has{find_reason(parts[lacks], name)}. The ranks of a "
                "pipeline have different layers, and are not joined."
            )


def find_reason(part: Recording, name: str) -> str:
    """Return why a layer is not recorded, to be put behind a sentence."""
    reasons = [x.reason for x in part.coverage if x.name == name and x.reason]
    return f" ({reasons[0]})" if reasons else ""


def join_records(key: Key, parts: Sequence[Record]) -> Record:
    """Return the record of all heads of one layer and sequence."""
    check_records(key, parts)
    if all(is_same(parts[0], other) for other in parts[1:]):
        return parts[0]  # not split between the ranks
    joined: dict[str, Any] = {name: join_arrays(key, name, parts) for name in BY_HEAD}
    joined["mask"] = join_cells(key, "mask", parts, lambda record: record.allowed())
    joined["bias"] = join_cells(key, "bias", parts, lambda record: record.bias)
    return replace(parts[0], **joined)


def check_records(key: Key, parts: Sequence[Record]) -> None:
    """Raise an error unless the parts belong to the same call."""
    first = parts[0]
    for rank, other in enumerate(parts):
        for name in SHARED:
            one, two = getattr(first, name), getattr(other, name)
            if not is_same(one, two):
                raise OptionError(
                    f"{say(key)}: {name} is {write(one)} on rank 0 and {write(two)} on "
                    f"rank {rank}, expected the same on all ranks."
                )
        one, two = (x.q.shape[0] // x.k.shape[0] for x in (first, other))
        wide = first.q.shape[-1], other.q.shape[-1]
        if one != two or wide[0] != wide[1]:
            raise ShapeError(
                f"{say(key)}: q is {tuple(first.q.shape)} and k "
                f"{tuple(first.k.shape)} on rank 0, q is {tuple(other.q.shape)} and k "
                f"{tuple(other.k.shape)} on rank {rank}; expected heads of one width, "
                "and as many query heads for each key head."
            )


def join_arrays(key: Key, name: str, parts: Sequence[Record]) -> Array | None:
    """Return the heads of all ranks of q, k, v, lse or sink."""
    arrays = [getattr(part, name) for part in parts]
    if all(x is None for x in arrays):
        return None
    for rank, x in enumerate(arrays):
        if (x is None) != (arrays[0] is None):
            has, lacks = (0, rank) if x is None else (rank, 0)
            raise OptionError(
                f"{say(key)}: rank {has} has {name} and rank {lacks} has not, expected "
                "the same of all ranks."
            )
    like = arrays[0]
    return namespace(x=like).concat([convert(x, like) for x in arrays], axis=0)


def join_cells(
    key: Key, name: str, parts: Sequence[Record], read: Callable[[Record], Any]
) -> Any:
    """Return the mask or the bias of all ranks, one for all heads where it is.

    read: returns what one rank has as an array, (H or 1, Nq, Nk), or None
    """
    values = [getattr(part, name) for part in parts]
    by_head = [depends_on_head(*x) for x in zip(values, parts, strict=True)]
    if not any(by_head):
        for rank, value in enumerate(values):
            if not is_same(values[0], value):
                raise OptionError(
                    f"{say(key)}: the {name} of rank {rank}, {write(value)}, is not "
                    f"that of rank 0, {write(values[0])}; expected the same on all "
                    "ranks."
                )
        return values[0]
    like, cells = parts[0].q, [read(part) for part in parts]
    if any(x is None for x in cells):
        raise OptionError(
            f"{say(key)}: some ranks have a {name} for each head and some have none, "
            "expected the same of all ranks."
        )
    xp = namespace(x=like)
    wide = [
        xp.broadcast_to(convert(x, like), (part.heads, *x.shape[1:]))
        for x, part in zip(cells, parts, strict=True)
    ]
    return xp.concat(wide, axis=0)


def depends_on_head(value: Any, part: Record) -> bool:
    """Return whether a mask or bias is not the same for all heads."""
    if isinstance(value, Mask):
        return "head" in find_axes(value, part.q)
    return value is not None and int(value.shape[0]) > 1


def join_coverage(parts: Sequence[Recording]) -> tuple[Covered, ...]:
    """Return the coverage of rank 0, with the worst error of all ranks."""
    worst: dict[str, float] = {}
    for part in parts:
        for x in part.coverage:
            old = worst.get(x.name, 0.0)
            if not (x.error <= old or math.isnan(old)):  # NaN is the worst
                old = x.error
            worst[x.name] = old
    return tuple(replace(x, error=worst[x.name]) for x in parts[0].coverage)


def is_same(one: Any, two: Any) -> bool:
    """Return whether two values are equal; arrays may be of different libraries."""
    if is_array(one) or is_array(two):
        if not (is_array(one) and is_array(two)):
            return False
        return np.array_equal(to_numpy(one), to_numpy(two), equal_nan=True)
    if isinstance(one, tuple) and isinstance(two, tuple):
        return len(one) == len(two) and all(map(is_same, one, two))
    if is_dataclass(one) and type(one) is type(two):
        names = [field.name for field in fields(one)]
        return all(is_same(getattr(one, n), getattr(two, n)) for n in names)
    return bool(one == two)


def say(key: Key) -> str:
    """Return the name of a layer and a sequence, for a message."""
    return f"{key[0]!r}, sequence {key[1]}"


def write(value: Any) -> str:
    """Return a value for a message, arrays by their shape and ends."""
    if not is_array(value):
        return repr(value)
    flat = to_numpy(value).reshape(-1)
    ends = f" from {flat[0]} to {flat[-1]}" if flat.size else ""
    return f"{tuple(value.shape)}{ends}"
