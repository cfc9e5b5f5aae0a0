"""A page that cannot hold all cells: an overview of every head, and the cells of some.

    overview     max and mass of every head at one zoom level: a pixel stands for many
                 cells, and is within 0.26 % of their max or mass
    lists        the largest weights of every head, and the mean over all heads, for
                 the text view (page_lists.py)
    cells        of the strongest heads, at the finest rounding, while they fit; of the
                 strongest one before the lists, if they are small

The strongest heads are those with the most sink, previous and induction in turn, the
statistics for which `regard show` names a head (page_size.rank_heads). The page and the
printed text list them. A coarser overview leaves room for more heads: half of the room
at most is for the overview.

Next: page_file.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from regard.errors import OptionError
from regard.show.page_file import write_html
from regard.show.page_lists import (
    Means,
    choose_least,
    estimate_means,
    fit_lists,
    fit_means,
    start_means,
    walk_lists,
)
from regard.show.page_parts import (
    Chosen,
    CompressedCells,
    compress_cells,
    pack_levels,
    pick_heads,
)
from regard.show.page_size import (
    BASE64,
    FINEST,
    SMALLEST,
    Place,
    choose_side,
    estimate_overview,
    is_too_long,
    rank_heads,
)
from regard.show.weight_lists import WeightList
from regard.show.zoom_levels import SMALL, Levels, build_levels
from regard.stats.pyramid import find_level

INNER = 512  # most pixels per side of the level that is stored for a head with cells
LONG = 1024  # tokens from which one is stored
FIRST = 0.2  # most of the room that the cells of the strongest head take from lists
TAG = 512  # bytes at most around a blob, and to describe it


@dataclass(frozen=True)
class ExactHead:
    """A head whose cells are in the page, and why it is."""

    sequence: int
    layer: int
    head: int
    why: str  # "induction 0.913"
    typical: float = 0.0  # relative errors of its weights
    worst: float = 0.0

    def __str__(self) -> str:
        first = f"sequence {self.sequence}, " if self.sequence else ""
        why = f" ({self.why})" if self.why else ""
        return f"{first}layer {self.layer} head {self.head}{why}"


@dataclass(frozen=True)
class Overview:
    """What a page with an overview holds."""

    cells: int  # per side of a pixel, in the coarsest record
    exact: tuple[ExactHead, ...]
    least: float | None = None  # weight of every head that is in the lists
    share: float = 0.0  # of all weight that they hold
    mean: float | None = None  # least mean over all heads that is held


def write_overview(
    fixed: dict[str, Any],
    chosen: Sequence[Chosen],
    limit: int,
    progress: Callable[[int, int], object] | None,
) -> tuple[bytes, Overview]:
    """Return the HTML file, and what it holds."""
    meta, blobs = fixed["meta"], dict(fixed["blobs"])
    base = len(write_html(meta, blobs))
    strongest = list_exact(leave_out_few(meta), chosen)
    first = list(islice(strongest, 1))  # its cells come before the lists
    kept = sum(measure_blob(x) for _, _, cells, _ in first for x in cells.values())
    kept = kept if kept <= FIRST * (limit - base) else 0
    side = choose_side([x.record for x in chosen], limit - base)
    readable = [x["qNamed"] and x["kNamed"] for x in meta["records"]]
    parts = make_parts(chosen, readable, side, limit - base - kept, progress)
    levels, more = fit_overview(chosen, limit, base, parts)
    blobs |= more
    room = limit - base - sum(map(measure_blob, more.values()))
    more, about = fit_text(chosen, parts, room - kept)
    blobs |= more
    room -= sum(map(measure_blob, more.values()))
    found = []
    for n, head, cells, own in chain(first, strongest):
        room -= sum(map(measure_blob, cells.values()))
        if room < 0:
            break
        blobs |= cells
        found.append((n, head, own))
    exact = tuple(head for _, head, _ in found)
    records = []
    for n, (x, record) in enumerate(zip(chosen, meta["records"], strict=True)):
        n_q, n_k = int(x.record.q.shape[1]), int(x.record.k.shape[1])
        small = max(levels[n], find_level(n_q, n_k, SMALL))
        here = [own for m, _, own in found if m == n]
        listed = {"lists": True} if f"lists-{n}" in blobs else {}
        records.append(
            record | {"overview": levels[n], "small": small, "cells": here} | listed
        )
    overview = Overview(2 ** max(levels), exact, **summarise(about))
    meta = meta | {"records": records, "overview": describe_overview(overview)} | about
    return write_html(meta, blobs), overview


@dataclass
class Parts:
    """What one walk over every record gave."""

    side: int  # pixels of the overview
    readable: list[bool]  # whether a record reads the tokens of its sequence
    least: float | None
    means: Means
    levels: list[tuple[int, list[Levels]]]
    lists: list[list[WeightList]]


def make_parts(
    chosen: Sequence[Chosen],
    readable: list[bool],
    side: int,
    room: float,
    progress: Callable[[int, int], object] | None,
) -> Parts:
    """Walk over every record once: zoom levels, lists and the mean over heads.

    readable: whether a record reads the tokens of its sequence
    """
    records = [x.record for x in chosen]
    left = room - estimate_overview(records, side)
    read = [x for x, reads in zip(records, readable, strict=True) if reads]
    means = start_means(chosen, readable)
    left -= estimate_means(means, left)
    least = choose_least(read, left) if read and left > 0 else None
    means = means if least is not None else Means({})
    parts = Parts(side, readable, least, means, [], [])
    for n, x in enumerate(chosen):
        level = find_level(x.record.q.shape[1], x.record.k.shape[1], side)
        levels, lists = walk_lists(x, level, least if readable[n] else None, means)
        parts.levels.append((level, levels))
        parts.lists.append(lists)
        if progress is not None:
            progress(n + 1, len(chosen))
    return parts


def fit_overview(
    chosen: Sequence[Chosen], limit: int, base: int, parts: Parts
) -> tuple[list[int], dict[str, bytes]]:
    """Return the level of each record, and their maps, which fit beside the base."""
    side, made = parts.side, parts.levels
    while True:
        levels = [min(level, max(k for k, _ in found[0])) for level, found in made]
        pairs = zip(levels, made, strict=True)
        blobs = {
            f"overview-{n}": pack_levels(found, level, rough=True)
            for n, (level, (_, found)) in enumerate(pairs)
        }
        size = sum(map(measure_blob, blobs.values()))
        if base + size <= limit:
            return levels, blobs
        if side <= SMALLEST:
            raise OptionError(
                f"{sum(len(x.heads) for x in chosen)} heads need "
                f"{(base + size) / 1e6:.2f} MB even as a small overview, limit is "
                f"{limit / 1e6:.2f} MB. Give a larger limit=, or fewer heads, as "
                "heads={18: [7, 8]}; seen.show() needs no file."
            )
        side //= 2
        made = [(level + 1, found) for level, found in made]


def leave_out_few(meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the table without the numbers of too few queries."""
    few = {(x["sequence"], x["layer"], x["statistic"]) for x in meta["few"]}
    return [
        {
            name: None if (row["sequence"], row["layer"], name) in few else x
            for name, x in row.items()
        }
        for row in meta["table"]
    ]


def fit_text(
    chosen: Sequence[Chosen], parts: Parts, room: float
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the lists that fit, as blobs, and what the page says of them."""
    if parts.least is None:
        return {}, {}
    left = room - TAG * (3 + len(chosen))  # around the blobs
    blobs, means = fit_means(parts.means, chosen, parts.readable, left)
    left -= sum(map(measure_blob, blobs.values()))
    more, lists = fit_lists(parts.lists, parts.least, left)
    about = {"means": means} if means else {}
    return blobs | more, about | ({"lists": lists} if lists else {})


def summarise(about: dict[str, Any]) -> dict[str, Any]:
    """Return what is printed of the lists of a page."""
    lists, means = about.get("lists"), about.get("means", {})
    return {
        "least": lists["least"] if lists else None,
        "share": lists["share"] if lists else 0.0,
        "mean": max((x["least"] for x in means.values()), default=None),
    }


def list_exact(
    rows: Sequence[dict[str, Any]], chosen: Sequence[Chosen]
) -> Iterator[tuple[int, ExactHead, dict[str, bytes], dict[str, Any]]]:
    """Yield the record, head, blobs and description of the strongest heads, in turn."""
    numbers = {(x.sequence, x.layer): n for n, x in enumerate(chosen)}
    for place, why in rank_heads(rows).items():
        n = numbers[place[:2]]
        x = chosen[n]
        if not is_too_long(x.record):
            cells, blobs, about = compress_head(n, x, place)
            yield n, ExactHead(*place, why, cells.typical, cells.worst), blobs, about


def compress_head(
    n: int, x: Chosen, place: Place
) -> tuple[CompressedCells, dict[str, bytes], dict[str, Any]]:
    """Return the cells of one head, and the blobs and description of them."""
    head = place[2]
    at = x.heads.index(head)
    alone = Chosen(x.sequence, x.layer, [head], pick_heads(x.record, [at]))
    cells = compress_cells(alone, FINEST)
    n_q, n_k = int(x.record.q.shape[1]), int(x.record.k.shape[1])
    stored = find_level(n_q, n_k, INNER) if max(n_q, n_k) > LONG else 0
    blobs = {f"factors-{n}-{head}": cells.blob}
    if stored:
        found = build_levels(alone.record, 0, finest=stored)
        blobs[f"levels-{n}-{head}"] = pack_levels([found], stored)
    return cells, blobs, cells.about | {"head": head, "stored": stored}


def measure_blob(blob: bytes) -> int:
    """Return the bytes that a blob takes in the file, at most."""
    return int(len(blob) * BASE64) + TAG


def describe_overview(overview: Overview) -> dict[str, Any]:
    """Return what the page says of its overview, ready for JSON."""
    exact = [
        {"sequence": x.sequence, "layer": x.layer, "head": x.head, "why": x.why}
        for x in overview.exact
    ]
    return {"cells": overview.cells, "exact": exact}
