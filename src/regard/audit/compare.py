"""Where the weights of two runs of the same tokens first differ, and why.

    logits alike, weights not                    the masks differ
    q alike, k those of another head             the heads are grouped otherwise
    q or k not, in the first layer               positions: padding was not taken off
    q or k not, in a later one                   something else ran before it

The weights of both are computed again tile by tile, from q, k and lse.

Next: lens/watch.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.audit.audited_record import AuditedRecord, read_record
from regard.audit.finding import Finding, combine, tell
from regard.audit.row_summary import BLOCK, Region, read_region
from regard.errors import OptionError, ShapeError
from regard.masks.algebra import Mask
from regard.record import Record, Recording
from regard.stats.nonfinite import mark_nonfinite
from regard.stats.reducer import Rows, Scope, Tile, start_rows
from regard.stats.reducers import LargestLogit
from regard.stats.walk import walk

BEFORE = ("inputs differ", "positions differ")  # in a later layer, in the first


def compare(
    one: Recording, other: Recording, *, tolerance: float = 1e-3
) -> tuple[Finding, ...]:
    """Return the first layer of each sequence in which the weights differ.

    Run a text alone and in a padded batch, or a model and its reference. The layers
    after the first that differs are not named: their inputs differ because of it.
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
        (read_record(record, number), read_record(theirs[number, record.name], number))
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
    """Yield what is different in the first layer that is."""
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


@dataclass(frozen=True)
class Gap:
    """How far weights, and logits that both see, are from those of another record."""

    other: Region
    unmasked: Record  # the other one without its mask

    def start(self, scope: Scope) -> tuple[Rows, Tensor]:
        """Begin with no difference."""
        return start_rows(scope), torch.zeros((), dtype=scope.dtype)

    def add(self, state: tuple[Rows, Tensor], tile: Tile) -> tuple[Rows, Tensor]:
        """Keep the larger differences."""
        (gap, apart), off = state, tile.weights
        cells = self.other.look(tile)
        if cells is not None:  # what the other one hides has no weight there
            logits = self.unmasked.logits(tile.rows, tile.keys, heads=tile.head)
            far = (tile.logs + tile.lse[:, None]).sub_(logits).masked_fill_(~cells, 0)
            apart = apart.maximum(far.abs_().amax())
            lse = self.unmasked.lse[tile.head, tile.rows, None]
            off = off - logits.sub_(lse).masked_fill_(~cells, -math.inf).exp_()
        here = gap.at(tile.rows)
        torch.maximum(here, off.abs().nan_to_num(1).amax(1), out=here)
        return gap, apart

    def merge(
        self, state: tuple[Rows, Tensor], other: tuple[Rows, Tensor]
    ) -> tuple[Rows, Tensor]:
        """Keep the larger differences."""
        mine, theirs = state[0].pair(other[0])
        torch.maximum(mine, theirs, out=mine)
        return state[0], state[1].maximum(other[1])

    def finish(self, states: Sequence[tuple[Rows, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the gaps of weights, (H, Nq), and of logits, (H,)."""
        gaps, apart = zip(*states, strict=True)
        return torch.stack([x.whole() for x in gaps]), torch.stack(apart)


def measure(mine: AuditedRecord, theirs: AuditedRecord) -> tuple[Tensor, Tensor]:
    """Return how far weights are apart, (H, Nq), and logits that both see, (H,)."""
    shapes = [tuple(x.record.lse.shape) for x in (mine, theirs)]
    if shapes[0] != shapes[1] or len(mine.at_k) != len(theirs.at_k):
        raise ShapeError(
            f"{mine.record.name} has {shapes[0]} heads and queries and "
            f"{len(mine.at_k)} keys in one recording, {shapes[1]} and "
            f"{len(theirs.at_k)} in the other, expected the same."
        )
    one, other = (mark_nonfinite(x.record) for x in (mine, theirs))
    lse = other.lse.masked_fill(other.lse == -math.inf, 0)
    other = replace(other, lse=lse)
    reducer = Gap(read_region(other), replace(other, mask=None))
    ((gap, apart),) = walk(one, reducer, block=BLOCK)
    rest = find_hidden(one, other)
    if rest is not None:
        (largest,) = walk(replace(other, mask=rest), LargestLogit(), block=BLOCK)
        gap = gap.maximum((largest.values - lse).exp().nan_to_num(1))
    return gap, apart


def find_hidden(one: Record, other: Record) -> Mask | Tensor | None:
    """Return the cells that the other record sees and the first hides; None if none."""
    if one.mask is None:
        return None
    places = ((x.q_positions, x.k_positions) for x in (one, other))
    alike = all(torch.equal(x, y) for x, y in zip(*places, strict=True))
    if (
        alike
        and isinstance(one.mask, Mask)
        and (other.mask is None or isinstance(other.mask, Mask))
    ):
        return ~one.mask if other.mask is None else other.mask & ~one.mask
    seen, theirs = one.allowed(), other.allowed()
    assert seen is not None  # one.mask is not None
    hidden: Tensor = ~seen
    return hidden if theirs is None else hidden & theirs


def name_cause(mine: AuditedRecord, theirs: AuditedRecord, heads: Tensor) -> str | None:
    """Return what differs in these heads (H,), if their queries do not."""
    q = is_alike(mine.record.q, theirs.record.q)
    if mine.from_logits or not bool(q[heads].all()):
        return None
    k, keys = spread(mine)[heads], spread(theirs)
    if bool(is_alike(k, keys[heads]).all()):
        return "masks differ"
    others = all(bool(is_alike(x.expand_as(keys), keys).any()) for x in k)
    return "head grouping differs" if others else None


def spread(case: AuditedRecord) -> Tensor:
    """Return the keys that each head of the queries sees, (H, Nk, D)."""
    k: Tensor = case.record.k
    return k.repeat_interleave(case.record.heads // len(k), 0)


def is_alike(x: Tensor, y: Tensor) -> Tensor:
    """Tell of which heads (H,) the numbers are equal, up to rounding."""
    return (x - y).abs().flatten(1).amax(1) <= 1e-3 * y.abs().max()
