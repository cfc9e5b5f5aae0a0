"""Where the weights of two runs of the same tokens first differ, and why.

    logits alike, weights not                    the masks differ
    q alike, k those of another head             the heads are grouped otherwise
    q or k not, in the first layer               positions: padding was not taken off
    q or k not, in a later one                   something else ran before it

The weights of both are computed again tile by tile, from q, k and lse.

Next: watch.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.errors import OptionError, ShapeError
from regard.lens.evidence import Case, cut, read_record, weigh
from regard.lens.finding import Finding, combine, tell
from regard.record import Recording

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


def find_first(pairs: list[tuple[Case, Case]], tolerance: float) -> Iterator[Finding]:
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


def measure(mine: Case, theirs: Case) -> tuple[Tensor, Tensor]:
    """Return how far weights are apart, (H, Nq), and logits that both see, (H,)."""
    if mine.lse.shape != theirs.lse.shape or len(mine.at_k) != len(theirs.at_k):
        raise ShapeError(
            f"{mine.record.name} has {tuple(mine.lse.shape)} heads and queries and "
            f"{len(mine.at_k)} keys in one recording, {tuple(theirs.lse.shape)} and "
            f"{len(theirs.at_k)} in the other, expected the same."
        )
    gap, apart = torch.zeros(mine.lse.shape), torch.zeros(len(mine.lse))
    for rows, keys in cut(mine):
        tiles = [tile for x in (mine, theirs) if (tile := weigh(x, rows, keys))]
        if not tiles:
            continue
        off = tiles[0][2]  # what the other one hides has no weight there
        if len(tiles) == 2:
            (s, seen, weights), (their_s, they_see, their_weights) = tiles
            off = weights - their_weights
            far = (s - their_s).masked_fill_(~(seen & they_see), 0).abs()
            apart = apart.maximum(far.amax((1, 2)))
        gap[:, rows] = gap[:, rows].maximum(off.abs().nan_to_num(1).amax(-1))
    return gap, apart


def name_cause(mine: Case, theirs: Case, heads: Tensor) -> str | None:
    """Return what differs in these heads (H,), if their queries do not."""
    if mine.columns is not None or not bool(is_alike(mine.q, theirs.q)[heads].all()):
        return None
    k, keys = spread(mine)[heads], spread(theirs)
    if bool(is_alike(k, keys[heads]).all()):
        return "masks differ"
    others = all(bool(is_alike(x.expand_as(keys), keys).any()) for x in k)
    return "head grouping differs" if others else None


def spread(case: Case) -> Tensor:
    """Return the keys that each head of the queries sees, (H, Nk, D)."""
    return case.k.repeat_interleave(case.q.shape[0] // case.k.shape[0], 0)


def is_alike(x: Tensor, y: Tensor) -> Tensor:
    """Tell of which heads (H,) the numbers are equal, up to rounding."""
    return (x - y).abs().flatten(1).amax(1) <= 1e-3 * y.abs().max()
