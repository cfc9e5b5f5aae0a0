"""Hunt: recordings, opened, looked at, and saved again.

    bytes ─▶ as they are          ┐
          ─▶ with right checksums ┴─▶ open_recording ─▶ saved and opened: the same

A file whose checksum is wrong comes nowhere, so each input is tried a second time with
the checksums of what it holds: a stranger can compute them, too.

Next: gguf_model.py
"""

from __future__ import annotations

import json
import random
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from damage import damage_bytes, damage_tree, read_tree
from hunt import Target, main

from regard.arrays import is_array
from regard.errors import RegardError
from regard.recording import array_file
from regard.recording import file as recording
from regard.recording.array_file import ArrayEntry, checksum_header, to_bytes
from regard.recording.file import open_recording, save_recording
from regard.recording.record import Record, Recording
from regard.seen import Seen
from regard.show.map_source import MapSource

KNOWN: tuple[str, ...] = ()
KNOWN += (*recording.NODES, *array_file.BYTES, *sorted(recording.ARRAYS))
KNOWN += ("0.q", "0.k", "0.lse", "0.mask", "0.q_positions", "decoders", "pictures")
CELLS = 2**14  # of a record whose weights are computed


def check(data: bytes) -> None:
    """Open a file; if it opens, it holds together."""
    with suppress(RegardError):
        hold(data)
    hold(mend(data))


def hold(data: bytes) -> None:
    """Open, look, save, open: what is read is what was written."""
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        first, second = Path(folder) / "a.regard", Path(folder) / "b.regard"
        first.write_bytes(data)
        before = open_recording(first, verify=True)
        try:
            save_recording(second, before)
            after = open_recording(second)
            look(before)
        except RegardError as error:
            raise AssertionError("a file that opens is refused later") from error
        for name in ("model", "sequences", "tokens", "texts", "notes"):
            assert getattr(before, name) == getattr(after, name), name
        assert repr(before.coverage) == repr(after.coverage)
        for x, y in zip(before.records, after.records, strict=True):
            assert write(x) == write(y), x.name


def write(record: Record) -> list[Any]:
    """Return all of a record in a form that can be compared, NaN included."""
    parts = vars(record).values()
    return [bytes(to_bytes(x)) if is_array(x) else repr(x) for x in parts]


def look(found: Recording) -> None:
    """Do what a map does first."""
    assert all(c.isprintable() or c in "\t\n" for c in str(Seen(found)))
    source = MapSource(found)
    json.dumps(source.about)
    source.close()
    for record in found.records:
        if record.heads * record.q.shape[1] * record.k.shape[1] <= CELLS:
            weights = record.weights()
            assert weights.shape == (
                record.heads,
                record.q.shape[1],
                record.k.shape[1],
            )


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes] | None:
    """Return the table of arrays, what is said, and the numbers, if they are there."""
    n = int.from_bytes(data[:8], "little")
    table = read_tree(data[8 : 8 + n])
    metadata = table.pop("__metadata__", None) if isinstance(table, dict) else None
    text = metadata.get("regard") if isinstance(metadata, dict) else None
    about = read_tree(text) if isinstance(text, str) else None
    return (table, about, data[8 + n :]) if isinstance(about, dict) else None


def mend(data: bytes) -> bytes:
    """Return a file with the checksums of what it holds, as far as there is a form."""
    if (parts := unpack(data)) is None:
        return data
    table, about, numbers = parts
    entries = {}
    for name, x in table.items():
        with suppress(TypeError, KeyError, ValueError, OverflowError):
            start, stop = x["data_offsets"]
            entries[name] = ArrayEntry(x["dtype"], tuple(x["shape"]), start, stop)
            if isinstance(about.get("crc"), dict):
                about["crc"][name] = f"{zlib.crc32(numbers[start:stop]):08x}"
    text = json.dumps(about)
    checksum = "none"
    with suppress(TypeError, ValueError):
        checksum = checksum_header(text, entries)
    metadata = {"regard": text, "checksum": checksum}
    raw = json.dumps({"__metadata__": metadata, **table}).encode()
    raw += b" " * (-(8 + len(raw)) % 64)
    return len(raw).to_bytes(8, "little") + raw + numbers


def damage(rng: random.Random, data: bytes) -> bytes:
    """Change what a file says, where its arrays stand, or any bytes."""
    parts = unpack(data)
    if parts is None or rng.random() < 0.2:
        return damage_bytes(rng, data)
    table, about, numbers = parts
    if rng.random() < 0.7:
        about = damage_tree(rng, about, KNOWN)
    elif rng.random() < 0.5:
        table = damage_tree(rng, table, KNOWN)
    else:
        place = table.get(rng.choice([*table, "0.q"]))
        if isinstance(place, dict) and isinstance(place.get("shape"), list):
            rng.shuffle(place["shape"])
        numbers = damage_bytes(rng, numbers)[: len(numbers)].ljust(len(numbers))
    if not isinstance(about, dict) or not isinstance(table, dict):
        return damage_bytes(rng, data)
    raw = json.dumps({"__metadata__": {"regard": json.dumps(about)}, **table}).encode()
    raw += b" " * (-(8 + len(raw)) % 64)
    return mend(len(raw).to_bytes(8, "little") + raw + numbers)


TARGET = Target("recording", check, damage)
if __name__ == "__main__":
    main(TARGET)
