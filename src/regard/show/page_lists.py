"""The lists of weights of a page whose cells do not fit: every head, and their mean.

    choose_least(chosen, room)     the least weight whose lists fit, from some rows
    walk_lists(x, level, ...)      zoom levels and lists of a record, in one walk
    fit_means(…), fit_lists(…)     packed; with a larger least weight if they do not fit

The mean over the heads is what the text view shows first, so its list comes first, with
a much smaller least weight. It exists if all records of a sequence have the same
queries and keys, and a matrix of them fits into memory. Only records that read the
tokens of the sequence have lists.

Next: page_overview.py
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from regard.arrays import to_numpy
from regard.recording.record import Record
from regard.show.page_parts import Chosen, pack_mask
from regard.show.page_size import BASE64, spread_indices
from regard.show.weight_lists import (
    ListedWeights,
    WeightList,
    WholeTiles,
    list_matrix,
    measure_step,
    pack_lists,
)
from regard.show.zoom_levels import Levels, encode_levels
from regard.stats.columns import cut_rows
from regard.stats.pyramid import Pyramid
from regard.stats.replay import to_torch
from regard.stats.tile import AllowedMap
from regard.stats.tile_walk import walk

LEASTS = (0.01, 0.014, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3)
MEANS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03)
STEPS, MEAN_STEPS = 256, 4096  # codes of a weight
ENTRY, ROW = 1.4, 1.3  # bytes of an entry and of a row, compressed
CELL = 1.3  # of a mean
SAMPLE = 16  # rows in which entries are counted
MATRIX = 2**29  # most bytes of the matrices of means
PIECE = 2**28  # most bytes of tiles that are copied at a time
SHARE = 0.2  # most of the room for the mean


@dataclass
class Means:
    """The sums of the weights over all heads of a sequence, and how many there are."""

    total: dict[int, NDArray[np.float32]]  # (n_q, n_k) of each sequence
    heads: dict[int, int] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)  # number of a record of it


def start_means(chosen: Sequence[Chosen], readable: Sequence[bool]) -> Means:
    """Return sums of 0 for the sequences that can have a mean."""
    by_sequence: dict[int, list[int]] = {}
    for n, (x, reads) in enumerate(zip(chosen, readable, strict=True)):
        if reads:
            by_sequence.setdefault(x.sequence, []).append(n)
    means, bytes_left = Means({}), MATRIX
    for sequence, numbers in by_sequence.items():
        records = [chosen[n].record for n in numbers]
        n_q, n_k = records[0].shape[1:]
        bytes_left -= 4 * n_q * n_k
        if bytes_left >= 0 and all(is_same_place(records[0], x) for x in records):
            means.total[sequence] = np.zeros((n_q, n_k), np.float32)
            means.heads[sequence] = sum(x.heads for x in records)
            means.first[sequence] = numbers[0]
    return means


def is_same_place(one: Record, other: Record) -> bool:
    """Return whether two records have the same queries and the same keys."""
    pairs = zip(*((x.q_positions, x.k_positions) for x in (one, other)), strict=True)
    return all(np.array_equal(to_numpy(a), to_numpy(b)) for a, b in pairs)


def choose_least(records: Sequence[Record], room: float) -> float | None:
    """Return the least weight whose lists take at most `room` bytes; None: none."""
    counts, rows = np.zeros(len(LEASTS)), 0
    for record in records:
        some = spread_indices(int(record.q.shape[1]), SAMPLE)
        rows += record.heads * int(record.q.shape[1])
        (found,) = walk(cut_rows(record, np.asarray(some)), ListedWeights(LEASTS[0]))
        scale = record.q.shape[1] / max(1, len(some))
        weights = np.concatenate([x.weights for x in found])
        counts += [scale * (weights >= least).sum() for least in LEASTS]
    for least, count in zip(LEASTS, counts, strict=True):
        if BASE64 * (ENTRY * count + ROW * rows) <= room:
            return least
    return None


def estimate_means(means: Means, room: float) -> float:
    """Return the bytes of the lists of the means."""
    cells = sum(x.size for x in means.total.values())
    return min(SHARE * room, BASE64 * CELL * cells / 2)


def walk_lists(
    x: Chosen, level: int, least: float | None, means: Means
) -> tuple[list[Levels], list[WeightList]]:
    """Return the zoom levels and the lists of a record; add to the means."""
    total = means.total.get(x.sequence) if least is not None else None
    reducers: list[Any] = [Pyramid(level), AllowedMap((2**level, 2**level))]
    if least is not None:
        reducers.append(ListedWeights(least))
    if total is not None:
        reducers.append(WholeTiles())
    _, n_q, n_k = x.record.shape
    step = x.record.heads if total is None else max(1, PIECE // max(1, 4 * n_q * n_k))
    levels: list[Levels] = []
    lists: list[WeightList] = []
    for start in range(0, x.record.heads, step):
        heads = range(start, min(start + step, x.record.heads))
        found, reach, *more = walk(x.record, *reducers, heads=heads)
        levels += encode_levels(found, reach)
        lists += more[0] if more else []
        if total is not None:
            for rows, keys, weights in (x for tiles in more[1] for x in tiles):
                total[rows, keys] += weights  # always in the same order
    return levels, lists


def fit_means(
    means: Means, chosen: Sequence[Chosen], readable: Sequence[bool], room: float
) -> tuple[dict[str, bytes], dict[str, dict[str, Any]]]:
    """Return the lists of the means, as blobs and descriptions, by sequence."""
    blobs: dict[str, bytes] = {}
    about: dict[str, dict[str, Any]] = {}
    each = room * SHARE / max(1, len(means.total))
    for sequence, total in means.total.items():
        mean = total / np.float32(means.heads[sequence])
        for least in MEANS:
            if BASE64 * CELL * np.count_nonzero(mean >= least) > 1.1 * each:
                continue  # without packing it
            blob = pack_lists([list_matrix(mean, least)], least, MEAN_STEPS)
            if BASE64 * len(blob) <= each:
                pairs = zip(chosen, readable, strict=True)
                own = [x.record for x, r in pairs if r and x.sequence == sequence]
                blobs[f"mean-{sequence}"] = blob
                blobs[f"mask-mean-{sequence}"] = zlib.compress(
                    pack_mask(join_masks(own))
                )
                about[str(sequence)] = {
                    "record": means.first[sequence],
                    "heads": means.heads[sequence],
                    **describe_lists(least, MEAN_STEPS),
                }
                break
    return blobs, about


def fit_lists(
    lists: Sequence[Sequence[WeightList]], least: float, room: float
) -> tuple[dict[str, bytes], dict[str, Any] | None]:
    """Return the lists of all records as blobs, and their description; {} and None."""
    while True:
        blobs = {
            f"lists-{n}": pack_lists(found, least, STEPS)
            for n, found in enumerate(lists)
            if found
        }
        if BASE64 * sum(map(len, blobs.values())) <= room:
            every = [x for found in lists for x in found]
            rest = np.concatenate([x.rest for x in every])
            share = 1 - float(np.nanmean(rest)) if not np.isnan(rest).all() else 0.0
            return blobs, describe_lists(least, STEPS) | {"share": round(share, 3)}
        larger = [x for x in LEASTS if x > least]
        if not larger:
            return {}, None
        least = larger[0]
        lists = [[x.raise_to(least) for x in found] for found in lists]


def describe_lists(least: float, steps: int) -> dict[str, Any]:
    """Return what a browser needs to read lists, and how exact their weights are."""
    return {"least": least, "steps": steps, "off": measure_step(least, steps)}


def join_masks(records: Sequence[Record]) -> Record:
    """Return a record whose mask is where any head of some records may look."""
    _, n_q, n_k = records[0].shape
    like = to_torch(records[0].q)
    union = like.new_zeros(1, n_q, n_k, dtype=torch.bool)
    for record in records:
        seen = record.allowed()
        union |= True if seen is None else to_torch(seen).any(0)
    return replace(records[0], mask=union)
