"""A record as print() and a notebook show it: its facts, and small maps of its heads.

    print(seen.layer(3))          heads, queries and keys, scale, mask
    seen.layer(3)                 in a notebook, also a map of each head if it is short

A pixel is the largest weight of its cells, on a logarithmic scale from 0.001 to 1.

Next: coverage.py
"""

from __future__ import annotations

import math
from typing import Any

from regard.arrays import is_array, namespace, to_numpy
from regard.display import (
    shade_weights,
    write_code,
    write_facts,
    write_line,
    write_pictures,
)

QUICK = 2**21  # most weights of a record that is drawn at once
PICTURES = 8  # heads


def list_facts(record: Any) -> list[tuple[str, str]]:
    """Return names and values that describe a Record."""
    (H, Nq, Nk), (Hk, _, D) = record.shape, record.k.shape
    library = namespace(q=record.q).__name__.split(".")[-1]
    kept = "q and k" if record.v is None else "q, k and v"
    dtype = str(record.q.dtype).split(".")[-1]
    shared = f" of queries, {Hk} of keys" if Hk != H else ""
    facts = [
        ("heads", f"{H}{shared}"),
        ("queries, keys", f"{Nq}, {Nk}"),
        ("arrays", f"{kept}, {library}, {dtype}, {D} numbers per head"),
        ("scale", f"{record.scale:.4g}"),
        ("mask", describe_part(record.mask)),
    ]
    for name in ("softcap", "bias", "sink"):
        x = getattr(record, name)
        if x is not None:
            facts.append((name, describe_part(x)))
    return facts


def describe_part(x: Any) -> str:
    """Return a number, a formula, or the shape of an array as text."""
    return f"array {tuple(x.shape)}" if is_array(x) else str(x)


def write_record(record: Any) -> str:
    """Return the text of print(record)."""
    lines = (f"  {name}: {text}" for name, text in list_facts(record))
    return "\n".join([record.name, *lines])


def show_record(record: Any) -> str:
    """Return the HTML of a Record."""
    text = write_line(record.name, strong=True) + write_facts(list_facts(record))
    cells = math.prod(record.shape)
    if cells > QUICK:
        return text + write_code("", "seen.widget()", "shows the map of a long record")
    if not cells:
        return text
    n = min(record.heads, PICTURES)
    maps = map(shade_weights, to_numpy(record.weights(heads=slice(n))))
    pictures = zip((f"head {h}" for h in range(n)), maps, strict=True)
    more = f"; {n} of {record.heads} heads" if n < record.heads else ""
    note = f"queries down, keys across; blue from 0.001 (faint) to 1 (full){more}"
    return text + write_pictures(pictures) + write_line(note)
