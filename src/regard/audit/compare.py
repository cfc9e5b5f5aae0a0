"""Find where the weights of two runs of the same tokens first differ, and why.

    logits equal, weights differ                 the masks differ
    q equal, k is that of another head           the head grouping differs
    q or k differ in the first layer             positions: padding was not subtracted
    q or k differ in a later layer               the inputs of the layer differ

The weights of both are recomputed tile by tile, from q, k and lse.

Next: lens/watch.py
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from regard.audit.audited_record import AuditedRecord, read_audited_record
from regard.audit.finding import Finding, combine, tell
from regard.audit.row_summary import BLOCK
from regard.definition.contract import ALL
from regard.errors import OptionError, ShapeError
from regard.masks.tiles import EMPTY
from regard.recording.record import Recording
from regard.stats.head_tiles import read_heads
from regard.stats.nonfinite import mark_nonfinite
from regard.stats.reducer import Tile

BEFORE = ("inputs differ", "positions differ")  # in a later layer, in the first


def compare(
    one: Recording, other: Recording, *, tolerance: float = 1e-3
) -> tuple[Finding, ...]:
    """Return the first layer of each sequence in which the weights differ.

    Run a text alone and in a padded batch, or a model and its reference. Layers after
    the first one that differs are not reported: their inputs differ because of it.
    """
    if one.tokens and other.tokens and one.tokens != other.tokens:
        raise OptionError(
            "the two recordings are of different tokens, expected the same. Padding is "
            "taken off if the model is given an attention_mask."
        )
    theirs = {
        (number, record.name): record
        for record, number in zip(other.records, other.sequences, strict=True)
    }
    pairs = [
        (
            read_audited_record(record, number),
            read_audited_record(theirs[number, record.name], number),
        )
        for record, number in zip(one.records, one.sequences, strict=True)
        if (number, record.name) in theirs
    ]
    if not pairs:
        raise OptionError(
            "the two recordings have no layer in common. Give two runs of one model, "
            "or of two whose modules have the same names."
        )
    found = [
        finding
        for number in dict.fromkeys(one.sequences)
        for finding in find_first(
            [x for x in pairs if x[0].sequence == number], tolerance
        )
    ]
    return combine(found, [case.record.name for case, _ in pairs])


def find_first(
    pairs: list[tuple[AuditedRecord, AuditedRecord]], tolerance: float
) -> Iterator[Finding]:
    """Yield the finding of the first layer that differs."""
    for i, (mine, theirs) in enumerate(pairs):
        gap, apart = measure(mine, theirs)
        hit = gap > tolerance
        if bool(hit.any()):
            heads = hit.any(1)
            what = name_cause(mine, theirs, heads) or BEFORE[i == 0]
            if bool((apart[heads] < tolerance).all()):
                what = "masks differ"
            yield from tell(mine, what, hit, gap, unit="weight")
            return


def measure(mine: AuditedRecord, theirs: AuditedRecord) -> tuple[Tensor, Tensor]:
    """Return the largest differences of weights, (H, Nq), and common logits, (H,)."""
    shapes = [tuple(x.record.lse.shape) for x in (mine, theirs)]
    if shapes[0] != shapes[1] or len(mine.at_k) != len(theirs.at_k):
        raise ShapeError(
            f"{mine.record.name} has {shapes[0]} heads and queries and "
            f"{len(mine.at_k)} keys in one recording, {shapes[1]} and "
            f"{len(theirs.at_k)} in the other, expected the same."
        )
    gap, apart = torch.zeros(shapes[0]), torch.zeros(shapes[0][0])
    records = [mark_nonfinite(x.record) for x in (mine, theirs)]
    heads = [read_heads(x, range(len(apart)), ALL, ALL) for x in records]
    for pair in zip(*heads, strict=True):
        grid, here = [x.prove(BLOCK) for x in pair], gap[pair[0].number]
        for (i, rows), (j, keys) in product(*map(enumerate, grid[0][:2])):
            kinds = [
                (x, kinds[i, j]) for x, (*_, kinds) in zip(pair, grid, strict=True)
            ]
            some = (x.compute(rows, keys, kind) for x, kind in kinds if kind != EMPTY)
            tiles = [tile for tile in some if tile is not None]
            if not tiles:
                continue
            off = tiles[0].weights  # a masked tile has weights of 0
            if len(tiles) == 2:
                far = find_distance(*tiles)
                apart[pair[0].number] = apart[pair[0].number].maximum(far)
                off = off - tiles[1].weights
            here[rows] = here[rows].maximum(off.abs().nan_to_num(1).amax(1))
    return gap, apart


def find_distance(one: Tile, other: Tile) -> Tensor:
    """Return the largest difference of logits over cells that both masks allow."""
    far = (one.logs + one.lse[:, None] - other.logs - other.lse[:, None]).abs()
    for allowed in (one.allowed, other.allowed):
        if allowed is not None:
            far.masked_fill_(~allowed, 0)
    return far.amax()


def name_cause(mine: AuditedRecord, theirs: AuditedRecord, heads: Tensor) -> str | None:
    """Return what differs in these heads (H,) if their queries are equal, or None."""
    q = is_alike(mine.record.q, theirs.record.q)
    if mine.from_logits or not bool(q[heads].all()):
        return None
    k, keys = spread(mine)[heads], spread(theirs)
    if bool(is_alike(k, keys[heads]).all()):
        return "masks differ"
    others = all(bool(is_alike(x.expand_as(keys), keys).any()) for x in k)
    return "head grouping differs" if others else None


def spread(case: AuditedRecord) -> Tensor:
    """Return the keys of each query head, (H, Nk, D)."""
    k: Tensor = case.record.k
    return k.repeat_interleave(case.record.heads // len(k), 0)


def is_alike(x: Tensor, y: Tensor) -> Tensor:
    """Return for which heads (H,) the numbers are equal up to rounding."""
    return (x - y).abs().flatten(1).amax(1) <= 1e-3 * y.abs().max()
