"""One HTML file that needs no server and no network.

    page = make_page(recording)             every head, at most 15 MB by default
    page = make_page(recording, heads={18: [7, 8]})
    print(page)                             270 heads, 14.1 MB, weights within 8.3 %
    page.write("map.html")

    assets ─────────────────────────────▶ one script, one style, allowed by their hashes
    recording ─▶ factors, mask, thumbnails ─▶ base64 in the file ─▶ offline_source.js

A page holds q and k, not weights: 512 tokens and 270 heads have 35 million weights. q
and k are rounded as finely as the limit allows (compressed_record.py); the page states
the error. Records of more than 1,024 tokens also have their coarse levels.

Next: compressed_record.py
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from regard.arrays import to_numpy
from regard.display import Displayed
from regard.errors import OptionError
from regard.recording.record import Record, Recording
from regard.show.compressed_record import measure_error, round_record
from regard.show.log_codes import NAN
from regard.show.map_source import MapSource, describe_record
from regard.show.script_bundle import join_modules, read_asset, read_body
from regard.show.zoom_levels import Sheet, build_levels, sketch
from regard.stats.pyramid import find_level
from regard.stats.replay import to_torch

LIMIT = 15_000_000  # bytes
SIDE = 1024  # most pixels per side of a stored level
FINEST, COARSEST = 5e-5, 0.1  # smallest and largest error of the logits
EXACT = 5e-4  # weights with at most this relative error are called exact
NOTE = "this file holds the text that the model read"
STRIP = 256  # rows whose masks are packed at a time

Heads = Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class Page(Displayed):
    """A finished page."""

    html: bytes = field(repr=False)
    heads: int
    typical: float  # median relative error of weights above 0.001
    worst: float  # the largest relative error that was measured

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return len(self.html)

    def write(self, path: str | Path) -> None:
        """Write the file."""
        Path(path).write_bytes(self.html)

    def __str__(self) -> str:
        off = f"half within {self.typical:.2%}, all that were measured {self.worst:.2%}"
        sure = "exact" if self.worst <= EXACT else f"rounded: {off}"
        return f"{self.heads} heads, {self.size / 1e6:.1f} MB, weights {sure}"


def make_page(
    recording: Recording,
    *,
    heads: Heads | None = None,
    limit: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Page:
    """Return a page of some or all heads, as exact as the limit allows.

    heads: numbers by layer, {18: [7, 8]}; all heads of all layers by default
    limit: bytes of the file; LIMIT by default
    progress: called with records done and in total; there may be several rounds
    """
    chosen = choose_heads(recording, heads)
    if not chosen:
        raise OptionError("the recording has no records: there is nothing to show.")
    fixed = prepare(recording, chosen)
    limit, error = LIMIT if limit is None else limit, FINEST
    while True:
        page, numbers = build(fixed, chosen, error, progress)
        if page.size <= limit:
            return page
        saved = max(1.0, numbers / 6)  # base64 bytes if every number loses a bit
        error *= 2 ** (0.1 + (page.size - limit) / saved)
        if error > COARSEST:
            raise OptionError(
                f"{page.heads} heads need {page.size / 1e6:.1f} MB or more, limit is "
                f"{limit / 1e6:.1f} MB. Give fewer heads, as heads={{18: [7, 8]}}, or "
                "a larger limit=; seen.show() needs no file."
            )


@dataclass(frozen=True)
class Chosen:
    """Some heads of a record."""

    sequence: int
    layer: int
    heads: list[int]
    record: Record


def choose_heads(recording: Recording, heads: Heads | None) -> list[Chosen]:
    """Return the records, reduced to the requested heads."""
    source = MapSource(recording)
    every = dict.fromkeys(layer for _, layer in source.records)
    wanted = heads or every
    found = []
    for layer, numbers in wanted.items():
        there = [key for key in source.records if key[1] == layer]
        for key in there or [(0, layer)]:
            record = source.find(*key)
            kept = list(map(int, range(record.heads) if numbers is None else numbers))
            for head in kept:
                source.find(*key, head)
            found.append(Chosen(*key, kept, pick_heads(record, kept)))
    return sorted(found, key=lambda x: (x.sequence, x.layer))


def pick_heads(record: Record, heads: list[int]) -> Record:
    """Return a record reduced to some heads, each with its own copy of the keys."""
    if heads == list(range(record.heads)):
        return record
    q, k, lse = (to_torch(x) for x in (record.q, record.k, record.lse))
    shared = [h * k.shape[0] // q.shape[0] for h in heads]
    row = record.allowed(slice(0, 1))  # shows whether each head has a mask
    one = row is None or row.shape[0] == 1

    def pick(x: Any) -> Any:
        return x if x is None or x.shape[0] == 1 else x[heads]

    return replace(
        record,
        q=q[heads],
        k=k[shared],
        lse=lse[heads],
        v=None,
        sink=pick(to_torch(record.sink)),
        bias=pick(to_torch(record.bias)),
        mask=record.mask if one else pick(to_torch(record.allowed())),
    )


def prepare(recording: Recording, chosen: Sequence[Chosen]) -> dict[str, Any]:
    """Return the parts of a page that do not depend on the rounding."""
    source = MapSource(recording)
    for key in {(x.sequence, x.layer) for x in chosen}:
        source.tabulate(*key)
    wanted = {(x.sequence, x.layer, h) for x in chosen for h in x.heads}
    rows = (row for rows in source.rows.values() for row in rows)
    named = ("sequence", "layer", "head")
    kept = [row for row in rows if tuple(row[name] for name in named) in wanted]
    masks: dict[bytes, int] = {}
    blobs: dict[str, bytes] = {}
    records: list[dict[str, Any]] = []
    for x in chosen:
        mask = zlib.compress(pack_mask(x.record))
        about = describe_record(x.sequence, x.layer, x.record) | {"heads": x.heads}
        about |= source.name_tokens(x.sequence, x.record)
        small, stored = sketch(x.record, workers=source.workers), find_stored(x.record)
        about |= {"small": small.level, "stored": stored}
        blobs[f"small-{len(records)}"] = pack_small(small)
        if stored:
            blobs[f"levels-{len(records)}"] = pack_levels(x.record, stored)
        records.append(about | {"mask": masks.setdefault(mask, len(masks))})
    blobs |= {f"mask-{i}": mask for mask, i in masks.items()}
    meta = source.about | {"records": records, "table": kept, "tableAll": len(records)}
    return {"meta": meta | {"note": NOTE}, "blobs": blobs}


def build(
    fixed: dict[str, Any],
    chosen: Sequence[Chosen],
    error: float,
    progress: Callable[[int, int], object] | None,
) -> tuple[Page, int]:
    """Return a page rounded to an error, and how many numbers it stores."""
    blobs, offs, numbers = dict(fixed["blobs"]), [], 0
    records = []
    for n, x in enumerate(chosen):
        factors = round_record(x.record, error)
        offs.append(measure_error(x.record, factors.record))
        numbers += factors.a.size + factors.b.size
        blobs[f"factors-{n}"] = factors.pack()
        about = {"keyHeads": len(factors.b), "width": factors.a.shape[1]}
        about |= {"cap": factors.record.softcap}
        records.append(fixed["meta"]["records"][n] | about)
        if progress is not None:
            progress(n + 1, len(chosen))
    typical, worst = float(np.median([a for a, _ in offs])), max(b for _, b in offs)
    off = None if worst <= EXACT else {"typical": typical, "worst": worst}
    html = write_html(fixed["meta"] | {"records": records, "rounded": off}, blobs)
    return Page(html, sum(len(x.heads) for x in chosen), typical, worst), numbers


def find_stored(record: Record) -> int:
    """Return the finest level that a page stores; 0 if it needs none."""
    return find_level(record.q.shape[1], record.k.shape[1], SIDE)


def pack_levels(record: Record, level: int) -> bytes:
    """Return max and mass of a level as codes: (heads, 2, rows, columns)."""
    made = []
    for head in range(record.heads):
        found = build_levels(record, head, workers=1, finest=level)
        made += [found[level, "max"], found[level, "mass"]]
    codes = np.stack(made).astype("<u2")
    halves = (codes >> 8).astype(np.uint8), (codes & 255).astype(np.uint8)
    return zlib.compress(b"".join(half.tobytes() for half in halves))


def pack_small(small: Sheet) -> bytes:
    """Return the high bytes of thumbnail codes: 0 is masked, 1 NaN, others from 2."""
    high = np.maximum(small.codes >> 8, 2 * (small.codes > 0))
    high = np.where(small.codes == NAN, 1, high)
    return zlib.compress(high.astype(np.uint8).tobytes())


def pack_mask(record: Record) -> bytes:
    """Return the allowed keys of each row as runs: how many, then first and end.

    (heads or 1, counts of all rows, runs of all rows), as 32-bit integers
    """
    n_q, n_k = record.q.shape[1], record.k.shape[1]
    heads: list[list[Any]] = []
    for first in range(0, n_q, STRIP):
        rows = slice(first, min(n_q, first + STRIP))
        seen = record.allowed(rows)
        if seen is None:
            seen = np.ones((1, rows.stop - rows.start, n_k), bool)
        for h, cells in enumerate(to_numpy(seen)):
            heads += [[]] * (h == len(heads))
            edges = np.diff(cells.astype(np.int8), axis=1, prepend=0, append=0)
            ends = np.argwhere(edges)[:, 1].reshape(-1, 2)  # first, end; row by row
            heads[h] = [*heads[h], ((edges > 0).sum(axis=1), ends)]
    parts = [np.array([len(heads)])]
    for strips in heads:
        parts += [count for count, _ in strips] + [ends.ravel() for _, ends in strips]
    return np.concatenate(parts).astype("<i4").tobytes()


def write_html(meta: dict[str, Any], blobs: Mapping[str, bytes]) -> bytes:
    """Return the HTML file."""
    script, style = join_modules("offline_page.js"), read_asset("map.css")
    policy = (
        f"default-src 'none'; script-src {hash_source(script)}; "
        f"style-src {hash_source(style)}; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )
    data = json.dumps(meta, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # no token can end the element
    held = (
        f'<script type="text/plain" id="{name}">{base64.b64encode(x).decode()}</script>'
        for name, x in blobs.items()
    )
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<title>regard</title>",
        '<link rel="icon" href="data:,">',
        f"<style>{style}</style>",
        "</head>",
        '<body class="regard" data-view="wait">',
        read_body(),
        f'<script type="application/json" id="meta">{data}</script>',
        *held,
        f'<script type="module">{script}</script>',
        "</body>",
        "</html>",
    ]
    return "\n".join(parts).encode()


def hash_source(text: str) -> str:
    """Return the CSP source that allows a script or style of the page."""
    return (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    )
