"""Attribution patching: estimate what a patch of each head would change, in two passes.

    change[h] ≈ Σ over tokens i of  (z_source[h, i] - z[h, i]) · ∂ measure / ∂ z[h, i]

z is what a head outputs. One forward and one backward pass give the estimate for every
head and token, where search_heads runs the model once for each head. The estimate is of
first order: it is bad for a head that saturates, or whose patch moves far. Compare it
with a search of some layers: `found.correlate(search)`.

Next: attribute_weights.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.ablate.ablation import Tokens
from regard.ablate.attribute_weights import trace_gradients
from regard.ablate.replacement import CallPlace, MeanOutputs, RecordedOutputs
from regard.ablate.search_heads import HeadSearch, Measure, rank_heads, read_outputs_of
from regard.ablate.trace_heads import TracedOutputs
from regard.arguments import suggest
from regard.display import Displayed
from regard.errors import OptionError
from regard.run.call_edit import ReplacedHeads, Turn


@dataclass(frozen=True, kw_only=True)
class HeadAttribution(Displayed):
    """An estimate of what a patch of each head changes."""

    layers: tuple[str, ...]
    tokens: tuple[Tensor, ...]  # of each layer (H, N): by head and token
    before: float  # the measure without a patch

    @property
    def changes(self) -> Tensor:
        """The estimated change by each head, (L, H); NaN where there is no head."""
        return self.sum_tokens([Tokens(slice(None))])[..., 0]

    def sum_tokens(self, places: Sequence[Tokens]) -> Tensor:
        """Return the estimated change by each head at each place, (L, H, P)."""
        shape = len(self.layers), max(len(x) for x in self.tokens), len(places)
        found = torch.full(shape, math.nan, dtype=torch.float64)
        for row, x in zip(found, self.tokens, strict=True):
            at = torch.arange(x.shape[1])
            row[: len(x)] = torch.stack([x[:, y.holds(at)].sum(1) for y in places], 1)
        return found

    def correlate(self, search: HeadSearch) -> float:
        """Return the correlation with the changes that a search measured."""
        if search.layers != self.layers:
            raise OptionError(
                f"a search of {len(search.layers)} layers and an attribution of "
                f"{len(self.layers)}, expected both of the same model."
            )
        at = search.places
        mine = self.changes if at is None else self.sum_tokens(at)
        both = torch.stack([mine.flatten(), search.changes.flatten()])
        return float(torch.corrcoef(both[:, ~both.isnan().any(0)])[0, 1])

    def __str__(self) -> str:
        change = self.changes
        lines = [
            f"without a patch   {self.before:.4g}",
            "layer  head   estimated change",
        ]
        for layer, head in rank_heads(change):
            lines.append(f"{layer:5}  {head:4}   {float(change[layer, head]):+.4g}")
        return "\n".join(lines)


class ComparedOutputs(TracedOutputs):
    """Keeps the outputs of every layer as they are, and what would replace them."""

    by_position = True

    def __init__(self, source: RecordedOutputs | MeanOutputs) -> None:
        super().__init__(Turn.LATE)
        self.source = source
        self.new: dict[str, Tensor] = {}

    def replace(self, place: CallPlace) -> ReplacedHeads:
        """Return a function that keeps the outputs of a call."""
        found = self.source.replace(place).outputs
        assert isinstance(found, Tensor)
        self.new[place.layer] = found.detach()
        return super().replace(place)


@suggest
def attribute_heads(
    model: nn.Module, inputs: Mapping[str, Any] | Tensor, source: Any, measure: Measure
) -> HeadAttribution:
    """Estimate what patching each head with another run changes, by one gradient.

    inputs: of one sequence: tokens (1, N), or the keyword arguments of the model
    source: a recording of one sequence with values, or average_outputs(recordings)
    measure: called with logits (1, N, vocabulary); returns a number for each sequence
    """
    kept = ComparedOutputs(read_outputs_of(source))
    before, slopes = trace_gradients(model, inputs, measure, kept)
    tokens = []
    for layer, slope in slopes.items():
        shapes = [(x.shape[1], x.shape[3]) for x in (slope, kept.new[layer])]
        if shapes[0] != shapes[1]:
            raise OptionError(
                f"{layer} has {shapes[0][0]} heads of {shapes[0][1]} numbers, and its "
                f"record {shapes[1][0]} of {shapes[1][1]}: the source is of another "
                "model. Record it with this one."
            )
        apart = kept.new[layer] - kept.own[layer].detach()  # (1, H, N, D)
        parts = (apart * slope).sum(-1)[0, :, kept.real[layer][0]]
        tokens.append(parts.double().cpu())
    return HeadAttribution(layers=tuple(slopes), tokens=tuple(tokens), before=before)
