"""The mean of many searches over heads, with confidence intervals.

    found = [search_heads(model, x, source, measure) for x, source, measure in pairs]
    print(average_searches(found))

    mean        of the change by each patch, over the pairs
    interval    Student's, mean ± t s / √pairs; NaN below 8 pairs

A pair of prompts is one sample: heads of the same pair are not independent. A search
that was kept on disk can be averaged later: it is a dataclass of tensors, which
torch.save stores.

Next: effect.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.ablate.search_heads import (
    HeadSearch,
    Places,
    name_columns,
    name_row,
    rank_heads,
)
from regard.display import Displayed
from regard.errors import OptionError
from regard.student import FEW, SURE, student


@dataclass(frozen=True, kw_only=True)
class HeadChanges(Displayed):
    """The mean change by each head, with a confidence interval."""

    layers: tuple[str, ...]
    mean: Tensor  # (L, H) or (L, H, P), float64; NaN where no head was patched
    low: Tensor  # of the same shape, the 95 % interval of the mean; NaN below 8 pairs
    high: Tensor
    is_sure: Tensor  # whether 0 is outside an interval that holds for all heads at once
    pairs: int
    places: Places = None  # the P places; None: all tokens at once

    def __str__(self) -> str:
        known = self.pairs >= FEW
        title = ("", "") if not known else (", 95 % confidence interval", "   interval")
        lines = [
            f"mean change over {self.pairs} pairs{title[0]}",
            f"{name_columns(self.places)}   change{title[1]}",
        ]
        for at in rank_heads(self.mean):
            mean, low, high = (float(x[at]) for x in (self.mean, self.low, self.high))
            ends = f"   {low:+.4g} to {high:+.4g}{' *' if self.is_sure[at] else ''}"
            row = f"{name_row(at, self.places)}  {mean:+7.4g}"
            lines.append(row + ends if known else row)
        marked = f"{int(self.is_sure.sum())} of {count_heads(self.mean)}"
        last = f"* 0 is outside of an interval for all of them at once: {marked}"
        few = f"An interval needs at least {FEW} pairs."
        return "\n".join([*lines, last if known else few])


def count_heads(mean: Tensor) -> int:
    """Return how many heads were patched, at each of their places."""
    return int((~mean.isnan()).sum())


def average_searches(searches: Sequence[HeadSearch]) -> HeadChanges:
    """Return the mean change by each head over searches with different pairs."""
    layers = {x.layers for x in searches}
    if len(searches) < 2 or len(layers) > 1:
        raise OptionError(
            f"{len(searches)} searches of {len(layers)} models, expected at least two "
            f"searches of the same model, and {FEW} of them for an interval."
        )
    if any(x.places != searches[0].places for x in searches):
        raise OptionError(
            "searches at other tokens, expected the same queries= in all of them."
        )
    changes = torch.stack([x.changes for x in searches])  # (pairs, L, H, …)
    mean, n = changes.mean(0), len(searches)
    error = changes.std(0) / n**0.5 if n >= FEW else torch.full_like(mean, math.nan)
    all_sure = 1 - (1 - SURE) / max(1, count_heads(mean))  # Bonferroni
    half, widest = (error * student(sure, n - 1) for sure in (SURE, all_sure))
    return HeadChanges(
        layers=layers.pop(),
        mean=mean,
        low=mean - half,
        high=mean + half,
        is_sure=mean.abs() > widest,
        pairs=n,
        places=searches[0].places,
    )
