"""The mean of many searches over heads, with confidence intervals.

    found = [search_heads(model, x, source, measure) for x, source, measure in pairs]
    print(average_searches(found))

    mean        of the change by each patch, over the pairs
    interval    the middle 95 % of the means of resampled pairs (bootstrap)

A pair of prompts is one sample: heads of the same pair are not independent, so that
pairs are resampled, not heads. A search that was kept on disk can be averaged later:
it is a dataclass of tensors, which torch.save stores.

Next: effect.py
"""

from __future__ import annotations

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

RESAMPLES, ENDS = 2000, (0.025, 0.975)


@dataclass(frozen=True, kw_only=True)
class HeadChanges(Displayed):
    """The mean change by each head, with a confidence interval."""

    layers: tuple[str, ...]
    mean: Tensor  # (L, H) or (L, H, P), float64; NaN where no head was patched
    low: Tensor  # of the same shape, the 95 % interval of the mean
    high: Tensor
    pairs: int
    places: Places = None  # the P places; None: all tokens at once

    @property
    def is_sure(self) -> Tensor:
        """Whether each interval excludes 0."""
        return (self.low > 0) | (self.high < 0)

    def __str__(self) -> str:
        lines = [
            f"mean change over {self.pairs} pairs, 95 % confidence interval",
            f"{name_columns(self.places)}   change   interval",
        ]
        for at in rank_heads(self.mean):
            mean, low, high = (float(x[at]) for x in (self.mean, self.low, self.high))
            row = name_row(at, self.places)
            lines.append(f"{row}  {mean:+7.4g}   {low:+.4g} to {high:+.4g}")
        return "\n".join(lines)


def average_searches(searches: Sequence[HeadSearch]) -> HeadChanges:
    """Return the mean change by each head over searches with different pairs."""
    layers = {x.layers for x in searches}
    if len(searches) < 2 or len(layers) > 1:
        raise OptionError(
            f"{len(searches)} searches of {len(layers)} models, expected at least two "
            "searches of the same model: one pair has no confidence interval."
        )
    if any(x.places != searches[0].places for x in searches):
        raise OptionError(
            "searches at other tokens, expected the same queries= in all of them."
        )
    changes = torch.stack([x.changes for x in searches])  # (pairs, L, H, …)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(
        len(searches), (RESAMPLES, len(searches)), generator=generator
    )
    means = torch.stack([changes[rows].mean(0) for rows in chosen])  # (R, L, H, …)
    ends = torch.tensor(ENDS, dtype=means.dtype)
    low, high = torch.quantile(means, ends, dim=0)
    return HeadChanges(
        layers=layers.pop(),
        mean=changes.mean(0),
        low=low,
        high=high,
        pairs=len(searches),
        places=searches[0].places,
    )
