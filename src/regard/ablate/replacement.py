"""What replaces the output of a head: its output in another run, or a mean.

    recorded   z[h, i] of another recording, at the same position i
    mean       the mean of z[h, i] over all queries and sequences of some recordings

    z[h, i] = sum over keys j of  weights[h, i, j] v[j]

Both are computed for a layer when it is first asked for, from recordings with values:
regard.watch(model, keep="qkv").

Next: patch_heads.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.errors import OptionError
from regard.recording.head_outputs import compute_outputs
from regard.recording.record import Record, Recording


class Replacement(Protocol):
    """The outputs that heads get instead of their own."""

    by_position: bool  # whether they depend on the positions of the queries
    heads: dict[str, int]  # the number of heads of each layer that can be replaced

    def find_outputs(self, layer: str, q_at: Tensor, taken: Tensor) -> Tensor:
        """Return outputs for a call, (B or 1, H, Nq or 1, Dv).

        q_at: positions of its queries, (B or 1, Nq)
        taken: which of them are replaced, (B or 1, Nq)
        """


def find_recording(source: Any) -> Recording:
    """Return the recording of a source: a Recording, or what regard.watch gave."""
    recording = getattr(source, "recording", source)
    if isinstance(recording, Recording) and recording.records:
        return recording
    raise OptionError(
        f"source is a {type(source).__name__}, expected a recording with records. "
        'Write `with regard.watch(model, keep="qkv") as source:` around a run, or '
        "average_outputs(source)."
    )


def count_recorded_heads(recording: Recording) -> dict[str, int]:
    """Return the number of heads of each layer of a recording."""
    return {record.name: record.heads for record in recording.records}


def find_records_of(recording: Recording, layer: str) -> list[Record]:
    """Return the records of a layer, one for each sequence that it read."""
    pairs = zip(recording.records, recording.sequences, strict=True)
    found = {n: record for record, n in pairs if record.name == layer}
    if not found:
        raise OptionError(
            f"the source has no record of {layer}; it has {recording.layers}. Record "
            "it with the same model, or name other heads."
        )
    return [found[n].to("torch") for n in sorted(found)]


class RecordedOutputs:
    """The outputs of heads in a recording, at the same positions."""

    by_position = True

    def __init__(self, recording: Recording) -> None:
        self.recording, self.heads = recording, count_recorded_heads(recording)
        self.known: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def find_outputs(self, layer: str, q_at: Tensor, taken: Tensor) -> Tensor:
        """Return the recorded outputs; those that are not taken are 0."""
        if layer not in self.known:
            records = find_records_of(self.recording, layer)
            self.known[layer] = [
                (compute_outputs(x).detach(), x.q_positions) for x in records
            ]
        known = self.known[layer]
        batch = len(taken)
        if len(known) not in (1, batch):
            raise OptionError(
                f"{layer} was called with {batch} sequences, and the source has "
                f"{len(known)}; expected one for all of them, or one for each."
            )
        at = q_at.expand(batch, -1)
        rows = [
            place_rows(layer, *known[i % len(known)], at[i], taken[i])
            for i in range(batch)
        ]
        return torch.stack(rows)


def place_rows(
    layer: str, z: Tensor, positions: Tensor, at: Tensor, taken: Tensor
) -> Tensor:
    """Return the outputs z (H, N, Dv) at other positions, (H, Nq, Dv)."""
    z, positions = z.to(at.device), positions.to(at.device)
    slots = torch.full(
        (int(torch.cat([positions, at]).max()) + 2,), -1, device=at.device
    )
    slots[positions] = torch.arange(len(positions), device=at.device)
    found = torch.where(taken, slots[at], 0)  # padding is at -1, the last slot
    if bool((found < 0).any()):
        missing = int(at[found < 0][0])
        raise OptionError(
            f"{layer}: token {missing} is to be replaced, but the source has tokens "
            f"{int(positions.min())} to {int(positions.max())}, counted from 0. Name "
            "the tokens to replace: queries=slice(0, 4)."
        )
    return z[:, found] * taken[:, None]


class MeanOutputs:
    """The mean output of each head, over queries and sequences."""

    by_position = False

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.recordings, self.heads = recordings, count_recorded_heads(recordings[0])
        self.known: dict[str, Tensor] = {}

    def find_outputs(self, layer: str, q_at: Tensor, taken: Tensor) -> Tensor:
        """Return the means, (1, H, 1, Dv)."""
        if layer not in self.known:
            found = [x for r in self.recordings for x in find_records_of(r, layer)]
            totals = [compute_outputs(x).detach().double().sum(1) for x in found]
            count = sum(x.q.shape[1] for x in found)
            self.known[layer] = (torch.stack(totals).sum(0) / count)[None, :, None]
        return self.known[layer].to(q_at.device)


def read_replacement(source: Any) -> Replacement:
    """Return what replaces outputs: a mean, or what was recorded."""
    if isinstance(source, MeanOutputs):
        return source
    return RecordedOutputs(find_recording(source))


def average_outputs(*sources: Any) -> MeanOutputs:
    """Return the mean output of each head in some recordings, for patch_heads.

    sources: recordings with values, of one or of many texts
    """
    if not sources:
        raise OptionError("average_outputs() of nothing, expected recordings.")
    return MeanOutputs([find_recording(x) for x in sources])
