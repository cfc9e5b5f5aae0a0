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
from regard.audit.row_summary import BLOCK
from regard.errors import OptionError, ShapeError
from regard.record import Record, Recording
from regard.stats.nonfinite import mark_nonfinite
from regard.stats.reducer import Rows, Scope, Tile, start_rows
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

    other: Record
    unmasked: Record  # the other one without its mask

    def start(self, scope: Scope) -> tuple[Rows, Tensor]:
        """Begin with no difference."""
        return start_rows(scope), torch.zeros((), dtype=scope.dtype)

    def add(self, state: tuple[Rows, Tensor], tile: Tile) -> tuple[Rows, Tensor]:
        """Keep the larger differences."""
        gap, apart = state
        logits = self.unmasked.logits(tile.rows, tile.keys, heads=tile.head)
        far = (tile.logs + tile.lse[:, None] - logits).abs()
        allowed = self.other.allowed(tile.rows, tile.keys, heads=tile.head)
        weights = (logits - self.other.lse[tile.head, tile.rows, None]).exp()
        if allowed is not None:
            weights.masked_fill_(~allowed, 0)
            far.masked_fill_(~allowed, 0)
        if tile.allowed is not None:
            far.masked_fill_(~tile.allowed, 0)
        here = gap.at(tile.rows)
        off = (tile.weights - weights).abs().nan_to_num(1).amax(1)
        torch.maximum(here, off, out=here)
        return gap, apart.maximum(far.amax())

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
    both = [mark_nonfinite(x.record) for x in (mine, theirs)]
    found = []
    for one, other in (both, both[::-1]):  # each skips the tiles that it does not see
        lse = other.lse.masked_fill(other.lse == -math.inf, 0)
        gap = Gap(replace(other, lse=lse), replace(other, mask=None))
        found += walk(one, gap, block=BLOCK)
    return found[0][0].maximum(found[1][0]), found[0][1]


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
