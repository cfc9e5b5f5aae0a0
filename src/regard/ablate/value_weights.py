"""Value-weighted attention: how much of what a query writes comes from each key.

    found = weigh_values(model, tokens)
    found.cells(17, 3)          (Nq, Nk), of layer 17 and head 3

    cell[h, i, j] = weights[h, i, j] · ‖W_O[h] v[j]‖       (Kobayashi et al. 2020)

A head may attend to a token and take nothing from it: the value of an attention sink is
nearly 0. W_O of each head is found by following z to what the head writes, without the
names of modules (follow_write.py). Biases are no part of it.

Only the norms are kept, (H, Nk). Cells are computed when they are asked for, and their
sums are those of stats.received, so that memory is linear in the length.

Next: direct_logits.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.ablate.ablation import check_model
from regard.ablate.effect import check_evaluating
from regard.ablate.replacement import find_record_of
from regard.ablate.search_heads import RepeatedInputs, rank_heads
from regard.ablate.trace_heads import TracedHeads, trace_into
from regard.arguments import suggest
from regard.display import Displayed
from regard.lens import capture
from regard.recording.head_outputs import expect_values
from regard.recording.record import Record, Recording
from regard.run.call_edit import Turn
from regard.stats.columns import received

EVERY = slice(None)


@dataclass(frozen=True, kw_only=True, eq=False)
class ValueWeights(Displayed):
    """A recording, and the size of what each head would write for each key."""

    recording: Recording  # of one sequence, with values
    norms: dict[str, Tensor]  # ‖W_O v‖ of each layer, (H, Nk)

    def find(self, layer: int) -> tuple[Record, Tensor]:
        """Return the record and the norms of a layer, by its number."""
        name = list(self.norms)[layer]
        return find_record_of(self.recording, name), self.norms[name]

    def cells(
        self, layer: int, head: int, *, rows: slice = EVERY, keys: slice = EVERY
    ) -> Tensor:
        """Return the cells of a head, (rows, keys)."""
        record, norms = self.find(layer)
        weights = torch.as_tensor(record.weights(rows, head, keys=keys))
        return weights * norms[head, keys]

    def received(self, layer: int) -> Tensor:
        """Return the sum of the cells of each key, (H, Nk)."""
        record, norms = self.find(layer)
        return torch.as_tensor(received(record).values) * norms

    def __str__(self) -> str:
        lines = ["most attended key: its share of the attention, and value-weighted"]
        lines.append("layer  head   key   attention   value-weighted")
        keys, shares, weighted = [], [], []
        for layer in range(len(self.norms)):
            record, norms = self.find(layer)
            plain = torch.as_tensor(received(record).values)
            key = plain.argmax(-1, keepdim=True)  # (H, 1)
            keys.append(key[:, 0])
            shares.append(take_share(plain, key))
            weighted.append(take_share(plain * norms, key))
        changes = nn.utils.rnn.pad_sequence(
            [a - b for a, b in zip(shares, weighted, strict=True)],
            batch_first=True,
            padding_value=torch.nan,
        )
        for layer, head in rank_heads(changes):
            lines.append(
                f"{layer:5}  {head:4}  {int(keys[layer][head]):4}   "
                f"{float(shares[layer][head]):9.1%}   "
                f"{float(weighted[layer][head]):14.1%}"
            )
        return "\n".join(lines)


@suggest
def weigh_values(model: nn.Module, inputs: Mapping[str, Any] | Tensor) -> ValueWeights:
    """Run a model once; return its attention, weighted by what each value writes.

    inputs: of one sequence: tokens (1, N), or the keyword arguments of the model
    """
    check_model(model)
    check_evaluating(model)
    sequence, traced = RepeatedInputs(model, inputs), TracedHeads(Turn.FIRST)
    with (
        capture(model, keep="qkv") as seen,
        torch.enable_grad(),
        trace_into(traced, model),
    ):
        sequence.run()
    norms = {}
    for layer in traced.layers:
        v = torch.as_tensor(expect_values(find_record_of(seen.recording, layer)))
        heads = traced.outputs(layer).shape[1]
        v = v.detach().repeat_interleave(heads // len(v), 0)
        matrices = [traced.read_projection(layer, head) for head in range(heads)]
        norms[layer] = (v @ torch.stack(matrices)).norm(dim=-1)
    return ValueWeights(recording=seen.recording, norms=norms)


def take_share(sums: Tensor, key: Tensor) -> Tensor:
    """Return the share of one key of each head, (H,)."""
    return (sums.gather(-1, key) / sums.sum(-1, keepdim=True))[:, 0]
