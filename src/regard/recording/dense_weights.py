"""The weights of many layers as plain arrays.

    stack_weights(recording)      (layers, heads, Nq, Nk) of one sequence
    list_attentions(recording)    a tuple over layers of (B, heads, Nq, Nk), as returned
                                  by a transformers model with output_attentions=True

A record has no padding, and transformers returns it. So the tuple puts it back where
the model was told of it, with weight 0. Keys of padding have that weight in
transformers, too; its rows of padding hold what the model computed there, which means
nothing and is not recorded. Where no padding is known, shorter sequences are filled up
with zeros at the end.

Next: file.py
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.arrays import Array, constant, convert, namespace
from regard.definition.contract import ALL
from regard.errors import OptionError, ShapeError
from regard.recording.hidden_tokens import is_tokens
from regard.recording.indices import Index
from regard.recording.memory import expect_room
from regard.recording.record import Record, Recording

Places = tuple[Sequence[int], int]  # where entries go, of how many


def stack_weights(
    recording: Recording,
    layers: Index = ALL,
    *,
    heads: Index = ALL,
    rows: Index = ALL,
    keys: Index = ALL,
    sequence: int = 0,
) -> Array:
    """Return the weights of some layers, (layers, heads, rows, keys).

    layers: a number or a name, which leaves out the axis, or several of them
    heads, rows, keys: as in Record.weights
    """
    found = recording.layer(layers, sequence=sequence)
    records = (found,) if isinstance(found, Record) else found
    if not records:
        raise OptionError(
            f"layers={layers!r} are none of {len(recording.layers)} layers of sequence "
            f"{sequence}: there is nothing to stack."
        )
    check_shapes(records)
    first = records[0]
    part = first.select(rows, keys, heads)
    cells = part.count(first.shape)
    expect_room(len(records) * cells * first.itemsize, "seen.weights()", stacklevel=4)
    parts = [x.compute_weights(part) for x in records]
    return parts[0] if isinstance(found, Record) else stack_arrays(parts)


def check_shapes(records: Sequence[Record]) -> None:
    """Raise ShapeError unless all records have the same heads, queries and keys."""
    shapes: dict[tuple[int, ...], list[str]] = {}
    for record in records:
        shapes.setdefault(record.shape, []).append(record.name)
    if len(shapes) == 1:
        return
    told = "; ".join(
        f"{shape} in {names[0]!r}"
        + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for shape, names in shapes.items()
    )
    some = max(shapes.values(), key=len)
    raise ShapeError(
        "layers of different shapes (heads, queries, keys) cannot be one array: "
        f"{told}. Give layers of one shape, as seen.weights({some[:2]!r}); "
        "seen.attentions is a tuple with one array for each layer."
    )


def list_attentions(recording: Recording) -> tuple[Array, ...]:
    """Return the weights of each layer for all sequences, (B, heads, Nq, Nk) each."""
    layers: dict[str, dict[int, Record]] = {name: {} for name in recording.layers}
    for record, number in zip(recording.records, recording.sequences, strict=True):
        layers[record.name].setdefault(number, record)
    warn_of_missing(recording)
    batches = [Batch(x, place_padding(recording, x)) for x in layers.values()]
    expect_room(sum(x.bytes for x in batches), "seen.attentions", stacklevel=4)
    return tuple(x.weights() for x in batches)


def warn_of_missing(recording: Recording) -> None:
    """Warn if the numbers of the layers are not those of the model."""
    names = recording.layers
    of = [x.name for x in recording.coverage if x.attention]
    missing = [name for name in of if name not in names]
    if missing:
        warnings.warn(
            f"seen.attentions has {len(names)} of {len(of)} attention layers: "
            f"{missing[0]!r} was not recorded. Entry i is the layer seen.layers[i]; "
            "print(seen) tells the reasons.",
            stacklevel=4,
        )


def place_padding(
    recording: Recording, batch: Mapping[int, Record]
) -> list[tuple[Places, Places]]:
    """Return where rows and keys of each sequence of a layer are in the padded batch.

    notes["valid"] is about the tokens that the model was given: the queries of a
    decoder are others, and so are its keys, unless it looks across to an encoder.
    """
    told, decoders = (recording.notes.get(x) for x in ("valid", "decoders"))
    valid = dict(enumerate(told)) if isinstance(told, list) else {}
    records = batch.values()
    is_own = all(x.name not in (decoders or []) for x in records)
    is_across = any(x.mask is None or x.shape[1] != x.shape[2] for x in records)
    places = []
    for number, record in batch.items():
        _, n_q, n_k = record.shape
        rows = find_places(n_q, valid.get(number) if is_own else None)
        keys = find_places(n_k, valid.get(number) if is_own or is_across else None)
        places.append((rows, keys))
    return places


def find_places(n: int, valid: Any) -> Places:
    """Return the places of n tokens among all, padding included, and how many."""
    real = np.asarray(valid if is_tokens(valid) else [], bool)
    if n == real.sum() < real.size:
        return np.flatnonzero(real).tolist(), real.size
    return range(n), n


@dataclass(frozen=True)
class Batch:
    """The records of one layer, and where their rows and keys are with padding."""

    records: Mapping[int, Record]  # by sequence
    places: Sequence[tuple[Places, Places]]

    @property
    def first(self) -> Record:
        """The record of the first sequence."""
        return next(iter(self.records.values()))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights, (B, heads, Nq, Nk)."""
        n_q, n_k = (max(x[side][1] for x in self.places) for side in (0, 1))
        return len(self.records), self.first.heads, n_q, n_k

    @property
    def bytes(self) -> int:
        """The size of the weights."""
        return math.prod(self.shape) * self.first.itemsize

    def weights(self) -> Array:
        """Return the weights with padding."""
        *_, n_q, n_k = self.shape
        every, parts = self.first.select(ALL, ALL, ALL), []
        pairs = zip(self.records.values(), self.places, strict=True)
        for record, ((rows, _), (keys, _)) in pairs:
            part = fill(record.compute_weights(every), rows, n_q, axis=1)
            parts.append(fill(part, keys, n_k, axis=2))
        return stack_arrays(parts)


def stack_arrays(parts: Sequence[Array]) -> Array:
    """Return arrays as one, in the library of the first."""
    first = parts[0]
    return namespace(x=first).stack([convert(x, first) for x in parts], axis=0)


def fill(x: Array, places: Sequence[int], n: int, *, axis: int) -> Array:
    """Return x with its entries at these places of n along an axis, 0 elsewhere."""
    if len(places) == n:
        return x
    xp, shape = namespace(x=x), list(x.shape)
    shape[axis] = 1
    source = np.full(n, len(places))  # the zeros that are appended
    source[list(places)] = np.arange(len(places))
    wide = xp.concat([x, constant(0, x, tuple(shape))], axis=axis)
    return xp.take(wide, convert(source, x), axis=axis)
