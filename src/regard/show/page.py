"""One HTML file that needs no server and no network.

    page = make_page(recording)             every head, at most 15 MB by default
    page = make_page(recording, heads={18: [7, 8]})
    print(page)                             270 heads, 14.1 MB, weights within 8.3 %
    page.write("map.html")

    recording ─▶ estimated size     all cells fit:  factors, mask, thumbnails
                 (page_size.py)     otherwise:      an overview (page_overview.py)

A page holds q and k, not weights: 512 tokens and 270 heads have 35 million weights. q
and k are rounded as finely as the limit allows (compressed_record.py); the page states
the error. Records of more than 1,024 tokens also have their coarse levels. If even
coarse rounding does not fit, a page has an overview of every head, and the cells of the
strongest ones.

Next: page_parts.py
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from regard.arrays import to_numpy
from regard.display import Displayed
from regard.errors import OptionError
from regard.recording.record import Recording
from regard.show.log_codes import encode_weights
from regard.show.map_source import MapSource, describe_record
from regard.show.page_file import write_html
from regard.show.page_overview import ExactHead, write_overview
from regard.show.page_parts import (
    Chosen,
    compress_all,
    find_stored,
    pack_levels,
    pack_mask,
    pack_small,
    pick_heads,
)
from regard.show.page_rollout import pack_rollout
from regard.show.page_size import COARSEST, FINEST, choose_error
from regard.show.text_request import find_longest
from regard.show.text_tint import measure_values
from regard.show.zoom_levels import build_all_levels, sketch
from regard.stats.table import HeadTable

LIMIT = 15_000_000  # bytes
EXACT = 5e-4  # weights with at most this relative error are called exact
NOTE = "this file holds the text that the model read"

Heads = Mapping[int, Sequence[int] | None]
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Page(Displayed):
    """A finished page."""

    html: bytes = field(repr=False)
    heads: int
    typical: float  # median relative error of weights above 0.001
    worst: float  # the largest relative error that was measured
    overview: int = 0  # cells per side of an overview pixel; 0: all cells are held
    exact: tuple[ExactHead, ...] = ()  # with an overview: heads whose cells are held
    least: float | None = None  # with an overview: least weight held of every head
    share: float = 0.0  # of all weight that is at least that
    mean: float | None = None  # least mean over all heads that is held

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return len(self.html)

    def write(self, path: str | Path) -> None:
        """Write the file."""
        Path(path).write_bytes(self.html)

    def __str__(self) -> str:
        about = f"{self.heads} heads, {self.size / 1e6:.1f} MB"
        off = f"half within {self.typical:.2%}, all that were measured {self.worst:.2%}"
        sure = "exact" if self.worst <= EXACT else f"rounded: {off}"
        if not self.overview:
            return f"{about}, weights {sure}"
        pixel = f"{self.overview} × {self.overview} cells per pixel"
        lines = [f"{about}: too many cells, so an overview of all heads, {pixel}."]
        if self.least is not None:
            lines.append(
                f"The text view has the weights of all heads from {self.least:g} on, "
                f"which hold {self.share:.0%} of the attention"
                + (f", and their mean from {self.mean:g} on." if self.mean else ".")
            )
        if self.exact:
            lines.append(f"Single cells ({sure}) are held for the strongest heads:")
            lines += [f"  {x}" for x in self.exact]
        lines.append("For the cells of other heads, give heads= or a higher limit=.")
        return "\n".join(lines)


def make_page(
    recording: Recording,
    *,
    heads: Heads | None = None,
    limit: int | None = None,
    table: HeadTable | None = None,
    progress: Progress | None = None,
) -> Page:
    """Return a page of some or all heads, as exact as the limit allows.

    heads: numbers by layer, {18: [7, 8], 3: None}, None for all heads of the layer; by
        default, all heads of all layers
    limit: bytes of the file; LIMIT by default
    table: the table of the recording, if it is known; computed otherwise
    progress: called with records done and in total; there may be several rounds
    """
    limit = LIMIT if limit is None else limit
    if not limit > 0:
        raise OptionError(f"limit={limit!r}, expected a number of bytes above 0.")
    chosen = choose_heads(recording, heads)
    if not chosen:
        raise OptionError("the recording has no records: there is nothing to show.")
    fixed = prepare(recording, chosen, table, limit)
    room = limit - len(write_html(fixed["meta"], fixed["blobs"]))
    error = choose_error([x.record for x in chosen], room)
    page = None if error is None else fit_cells(fixed, chosen, error, limit, progress)
    return page or make_overview(fixed, chosen, limit, progress)


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


def prepare(
    recording: Recording,
    chosen: Sequence[Chosen],
    table: HeadTable | None,
    limit: int,
) -> dict[str, Any]:
    """Return the parts of a page that are always the same: description and masks."""
    source = MapSource(recording)
    rows = list_rows(source, chosen, table)
    few = source.few if table is None else [x.pack() for x in table.few]
    wanted = {(x.sequence, x.layer, h) for x in chosen for h in x.heads}
    named = ("sequence", "layer", "head")
    kept = [row for row in rows if tuple(row[name] for name in named) in wanted]
    once = {tuple(row[name] for name in named): row for row in reversed(kept)}
    kept = list(reversed(once.values()))  # if a layer ran twice, its first run
    masks: dict[bytes, int] = {}
    blobs: dict[str, bytes] = {}
    records: list[dict[str, Any]] = []
    for x in chosen:
        mask = zlib.compress(pack_mask(x.record))
        about = describe_record(x.sequence, x.layer, x.record) | {"heads": x.heads}
        about |= source.name_tokens(x.sequence, x.record)
        about |= add_values(source, x, blobs, len(records))
        records.append(about | {"mask": masks.setdefault(mask, len(masks))})
    blobs |= {f"mask-{i}": mask for mask, i in masks.items()}
    meta = source.about | {"records": records, "table": kept, "tableAll": len(records)}
    meta["sequences"] = [
        x | {"ways": x["ways"] | {"rollout": add_rollout(source, i, blobs, limit)}}
        for i, x in enumerate(meta["sequences"])
    ]
    meta |= {"few": few, "note": NOTE, "rounded": None}
    return {"meta": meta, "blobs": blobs}


def add_rollout(source: MapSource, i: int, blobs: dict[str, bytes], limit: int) -> str:
    """Add the rollout of a sequence; return why not, if it does not fit."""
    count = source.about["sequences"][i]["count"]
    packed, why = pack_rollout(source.list_readers(i), count, limit)
    if packed:
        blobs[f"rollout-{i}"] = packed
    return why


def add_values(
    source: MapSource, x: Chosen, blobs: dict[str, bytes], n: int
) -> dict[str, Any]:
    """Add the lengths of the values of a record, if they are known; describe them."""
    ways = source.about["sequences"][x.sequence]["ways"]
    record = source.find(x.sequence, x.layer)
    if ways["value"] or not all(source.name_tokens(x.sequence, record).values()):
        return {}
    sizes = measure_values(record) / find_longest(source, x.sequence)
    codes = encode_weights(to_numpy(sizes), np.ones(sizes.shape, bool))
    halves = (codes >> 8).astype(np.uint8), (codes & 255).astype(np.uint8)
    blobs[f"values-{n}"] = zlib.compress(b"".join(half.tobytes() for half in halves))
    return {"values": [h * len(sizes) // record.heads for h in x.heads]}


def list_rows(
    source: MapSource, chosen: Sequence[Chosen], table: HeadTable | None
) -> list[dict[str, Any]]:
    """Return the rows of the table, computed unless it is given."""
    if table is not None:
        rows = table.list_rows()
        return [{k: x for k, x in row.items() if k != "name"} for row in rows]
    for x in chosen:
        source.tabulate(x.sequence, x.layer)
    return [row for rows in source.rows.values() for row in rows]


def fit_cells(
    fixed: dict[str, Any],
    chosen: Sequence[Chosen],
    error: float,
    limit: int,
    progress: Progress | None,
) -> Page | None:
    """Return a page of all cells within the limit; None if there is none."""
    fixed = add_levels(fixed, chosen)
    error = max(FINEST, error / 1.1)  # the estimate may be a little too high
    while error <= COARSEST:
        page, numbers = build(fixed, chosen, error, progress)
        if page.size <= limit:
            return page
        saved = max(1.0, numbers / 6)  # base64 bytes if every number loses a bit
        error *= 2 ** (0.1 + (page.size - limit) / saved)
    return None


def add_levels(fixed: dict[str, Any], chosen: Sequence[Chosen]) -> dict[str, Any]:
    """Return the parts with the thumbnails, and with levels for long texts."""
    blobs, records = dict(fixed["blobs"]), []
    for n, (x, about) in enumerate(zip(chosen, fixed["meta"]["records"], strict=True)):
        small, stored = sketch(x.record), find_stored(x.record)
        blobs[f"small-{n}"] = pack_small(small)
        if stored:
            found = build_all_levels(x.record, stored)
            blobs[f"levels-{n}"] = pack_levels(found, stored)
        records.append(about | {"small": small.level, "stored": stored})
    return {"meta": fixed["meta"] | {"records": records}, "blobs": blobs}


def build(
    fixed: dict[str, Any],
    chosen: Sequence[Chosen],
    error: float,
    progress: Progress | None,
) -> tuple[Page, int]:
    """Return a page rounded to an error, and how many numbers it stores."""
    blobs, offs, numbers = dict(fixed["blobs"]), [], 0
    records = []
    with compress_all(chosen, error) as done:
        for n, cells in enumerate(done):
            offs.append((cells.typical, cells.worst))
            numbers += cells.numbers
            blobs[f"factors-{n}"] = cells.blob
            records.append(fixed["meta"]["records"][n] | cells.about)
            if progress is not None:
                progress(n + 1, len(chosen))
    typical, worst = float(np.median([a for a, _ in offs])), max(b for _, b in offs)
    off = None if worst <= EXACT else {"typical": typical, "worst": worst}
    html = write_html(fixed["meta"] | {"records": records, "rounded": off}, blobs)
    return Page(html, count_heads(chosen), typical, worst), numbers


def make_overview(
    fixed: dict[str, Any],
    chosen: Sequence[Chosen],
    limit: int,
    progress: Progress | None,
) -> Page:
    """Return a page with an overview of every head and the cells of some."""
    html, overview = write_overview(fixed, chosen, limit, progress)
    offs = [(x.typical, x.worst) for x in overview.exact] or [(0.0, 0.0)]
    typical, worst = float(np.median([a for a, _ in offs])), max(b for _, b in offs)
    return Page(
        html,
        count_heads(chosen),
        typical,
        worst,
        overview=overview.cells,
        exact=overview.exact,
        least=overview.least,
        share=overview.share,
        mean=overview.mean,
    )


def count_heads(chosen: Sequence[Chosen]) -> int:
    """Return the number of heads of a page."""
    return sum(len(x.heads) for x in chosen)
