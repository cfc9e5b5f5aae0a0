"""Attention × gradient: what each weight contributes to a measure, to first order.

    found = attribute_weights(model, tokens, lambda logits: logits[:, -1, answer])
    found.cells(17, 3)          (Nq, Nk), of layer 17 and head 3

    cell[h, i, j] = weights[h, i, j] · ∂ measure / ∂ weights[h, i, j]
    ∂ measure / ∂ weights[h, i, j] = g[h, i] · v[j]       g = ∂ measure / ∂ z

z = weights v is the output of a head. Its gradient g has the shape of q, and nothing
quadratic is kept: cells are computed when they are asked for, and the sum of a row is
g[h, i] · z[h, i].

Next: trace_heads.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from regard.ablate.ablation import check_model, read_ablation
from regard.ablate.effect import check_evaluating
from regard.ablate.intervene import intervene
from regard.ablate.replacement import find_record_of
from regard.ablate.search_heads import Measure, RepeatedInputs, rank_heads, read_measure
from regard.ablate.trace_heads import TracedOutputs
from regard.arguments import expect_function, suggest
from regard.display import Displayed
from regard.errors import OptionError
from regard.lens import capture
from regard.recording.head_outputs import compute_outputs, expect_values
from regard.recording.record import Record, Recording
from regard.run.call_edit import Turn

EVERY = slice(None)


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightAttribution(Displayed):
    """A recording, and the gradient of a measure by the output of each head."""

    recording: Recording  # of one sequence, with values
    slopes: dict[str, Tensor]  # g of each layer, (H, Nq, Dv)
    value: float  # of the measure

    @property
    def heads(self) -> Tensor:
        """The sum of the cells of each head, (L, H), float64; NaN: no head."""
        sums = [self.rows(layer).sum(1) for layer in range(len(self.slopes))]
        return pad_sequence(sums, batch_first=True, padding_value=math.nan)

    def find(self, layer: int) -> tuple[Record, Tensor]:
        """Return the record and the slopes of a layer, by its number."""
        name = list(self.slopes)[layer]
        return find_record_of(self.recording, name), self.slopes[name]

    def rows(self, layer: int) -> Tensor:
        """Return the sum of the cells of each query, (H, Nq), float64."""
        record, slope = self.find(layer)
        return (compute_outputs(record).double() * slope.double()).sum(-1)

    def cells(
        self, layer: int, head: int, *, rows: slice = EVERY, keys: slice = EVERY
    ) -> Tensor:
        """Return the cells of a head, (rows, keys)."""
        record, slope = self.find(layer)
        v = expect_values(record)
        v = v[head // (record.heads // len(v)), keys]  # (Nk, Dv)
        weights = record.weights(rows, head, keys=keys)
        return torch.as_tensor(weights * (slope[head, rows] @ v.mT))

    def __str__(self) -> str:
        heads = self.heads
        lines = [f"measure   {self.value:.4g}", "layer  head   attention × gradient"]
        for layer, head in rank_heads(heads):
            lines.append(f"{layer:5}  {head:4}   {float(heads[layer, head]):+.4g}")
        return "\n".join(lines)


@suggest
def attribute_weights(
    model: nn.Module, inputs: Mapping[str, Any] | Tensor, measure: Measure
) -> WeightAttribution:
    """Run a model forward and backward; return what each weight contributes.

    inputs: of one sequence: tokens (1, N), or the keyword arguments of the model
    measure: called with logits (1, N, vocabulary); returns a number for each sequence
    """
    kept = TracedOutputs(Turn.FIRST)  # z as it is computed from the recorded weights
    with capture(model, keep="qkv") as seen:
        value, slopes = trace_gradients(model, inputs, measure, kept)
    for name in slopes:
        find_record_of(seen.recording, name)
    found = {name: slope[0][:, kept.real[name][0]] for name, slope in slopes.items()}
    return WeightAttribution(recording=seen.recording, slopes=found, value=value)


def trace_gradients(
    model: nn.Module,
    inputs: Mapping[str, Any] | Tensor,
    measure: Measure,
    kept: TracedOutputs,
) -> tuple[float, dict[str, Tensor]]:
    """Run a model forward and backward; return the measure and ∂ measure / ∂ z.

    kept: gets the output z of each layer, (1, H, N, Dv)
    """
    check_model(model)
    expect_function("measure", measure, "logits")
    check_evaluating(model)
    ablation = read_ablation(model, None, None, (None, None), kept)
    with torch.enable_grad():
        with intervene(model, ablation):
            logits = RepeatedInputs(model, inputs).run()
        value = read_measure(measure, logits)
        if not value.requires_grad:  # of an argmax, detached, or in inference_mode
            raise OptionError("the measure has no gradient, expected one by logits.")
        found = torch.autograd.grad(
            value.sum(), list(kept.own.values()), allow_unused=True
        )
    slopes = {
        layer: torch.zeros_like(z) if slope is None else slope
        for (layer, z), slope in zip(kept.own.items(), found, strict=True)
    }
    return float(value[0].detach()), slopes
