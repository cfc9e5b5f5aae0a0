"""What replaces the output of a head: that of another run, a mean, or a function.

    recorded   z[h, i] of another recording, at the same position i
    mean       the mean of z[h, i] over all queries and sequences of some recordings
    function   f(z), of the outputs of the layer
    inputs     the output of the same call, with q, k or v of another recording

    z[h, i] = sum over keys j of  weights[h, i, j] v[j]

Outputs are computed for a layer when it is first asked for, from recordings with
values: regard.watch(model, keep="qkv").

Next: patch_heads.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.errors import OptionError
from regard.recording.head_outputs import compute_outputs
from regard.recording.record import Record, Recording
from regard.run.call_edit import NewInput, ReplacedHeads
from regard.run.own_work import compute

COMPILED = "_orig_mod."  # in the names of modules of torch.compile(model)


@dataclass(frozen=True, kw_only=True)
class CallPlace:
    """Where a call is: its layer, and which tokens its queries and keys are."""

    layer: str
    heads: Tensor  # (B or 1, H, 1, 1), which are replaced
    q_at: Tensor  # (B, Nq), positions; padding is at -1
    k_at: Tensor  # (B, Nk)
    q_taken: Tensor  # (B, Nq), which queries are replaced
    k_taken: Tensor  # (B, Nk), which keys and values are replaced
    scale: float | None  # of q · k

    @property
    def here(self) -> Tensor:
        """The heads and queries that are replaced, (B, H, Nq, 1)."""
        return self.heads & self.q_taken[:, None, :, None]


class Replacement(Protocol):
    """What heads output instead of their own outputs."""

    by_position: bool  # whether it depends on the positions of the queries

    def replace(self, place: CallPlace) -> ReplacedHeads:
        """Return what replaces the outputs of a call."""


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
    name = layer.replace(COMPILED, "")
    found = {n: x for x, n in pairs if x.name.replace(COMPILED, "") == name}
    if not found:
        raise OptionError(
            f"the source has no record of {layer}; it has {recording.layers}. Record "
            "it with the same model, or name other heads."
        )
    return [found[n].to("torch") for n in sorted(found)]


def find_record_of(recording: Recording, layer: str) -> Record:
    """Return the record of a layer that read one sequence."""
    found = find_records_of(recording, layer)
    if len(found) > 1:
        raise OptionError(
            f"{layer} attends in {len(found)} parts, windows or copies of its input, "
            "expected one sequence: what its heads contribute is not in one record."
        )
    return found[0]


def sum_values(record: Record) -> Tensor:
    """Return the outputs of a record's heads, while a model runs that is observed."""
    with compute():
        return compute_outputs(record).detach()


Rows = tuple[Tensor, Tensor]  # values of tokens (H, N, D), and their positions (N,)


class RecordedOutputs:
    """The outputs of heads in a recording, at the same positions."""

    by_position = True

    def __init__(self, recording: Recording) -> None:
        self.recording, self.heads = recording, count_recorded_heads(recording)
        self.known: dict[str, list[Rows]] = {}

    def replace(self, place: CallPlace) -> ReplacedHeads:
        """Return the recorded outputs; those that are not taken are 0."""
        layer = place.layer
        if layer not in self.known:
            records = find_records_of(self.recording, layer)
            self.known[layer] = [(sum_values(x), x.q_positions) for x in records]
        known = self.known[layer]
        return ReplacedHeads(
            place.here, gather_rows(layer, known, place.q_at, place.q_taken)
        )


@dataclass(frozen=True)
class RecordedInputs:
    """q, k or v of a recording, at the same positions: the call is run with them."""

    recording: Recording
    parts: str  # some of "qkv"
    by_position = True

    def replace(self, place: CallPlace) -> ReplacedHeads:
        """Return the recorded arrays."""
        layer = place.layer
        records = find_records_of(self.recording, layer)
        for record in records:
            self.check_record(record, place)
        inputs = {}
        for name in self.parts:
            at, taken = place.k_at, place.k_taken
            if name == "q":
                at, taken = place.q_at, place.q_taken
            known = [
                (getattr(x, name), x.q_positions if name == "q" else x.k_positions)
                for x in records
            ]
            values = gather_rows(layer, known, at, taken)
            inputs[name] = NewInput(taken, values)
        return ReplacedHeads(place.here, inputs=inputs)

    def check_record(self, record: Record, place: CallPlace) -> None:
        """Raise OptionError if the arrays of a record are not those of the call."""
        heads = place.heads.shape[1]
        if record.heads != heads:
            raise OptionError(
                f"{place.layer} has {heads} heads, and its record {record.heads}: the "
                "source is of another model. Record it with this one."
            )
        if "v" in self.parts and record.v is None:
            raise OptionError(
                f"{record.name} was recorded without values. Record with "
                'regard.watch(model, keep="qkv"), without dropout.'
            )
        scale = place.scale
        same = scale is not None and math.isclose(scale, record.scale, rel_tol=1e-5)
        if self.parts != "v" and not same:
            raise OptionError(
                f"{record.name} multiplies q · k by {scale or 'something'}, and "
                f"its record by {record.scale}, so that q and k cannot be taken from "
                'it. Replace outputs: parts="z".'
            )


def gather_rows(layer: str, known: list[Rows], at: Tensor, taken: Tensor) -> Tensor:
    """Return known rows at the positions of a call, (B, H, N, D); 0 if not taken.

    at, taken: positions and which of them are wanted, (B, N)
    """
    batch = len(taken)
    if len(known) not in (1, batch):
        raise OptionError(
            f"{layer} was called with {batch} sequences, and the source has "
            f"{len(known)}; expected one for all of them, or one for each."
        )
    rows = [
        place_rows(layer, *known[i % len(known)], at[i], taken[i]) for i in range(batch)
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
            "the tokens to replace: queries=slice(0, 4), or keys= for k and v."
        )
    return z[:, found] * taken[:, None]


class MeanOutputs:
    """The mean output of each head, over queries and sequences."""

    by_position = False

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.recordings, self.heads = recordings, count_recorded_heads(recordings[0])
        self.known: dict[str, Tensor] = {}

    def replace(self, place: CallPlace) -> ReplacedHeads:
        """Return the means."""
        layer = place.layer
        if layer not in self.known:
            found = [x for r in self.recordings for x in find_records_of(r, layer)]
            totals = [sum_values(x).double().sum(1) for x in found]
            count = sum(x.q.shape[1] for x in found)
            self.known[layer] = (torch.stack(totals).sum(0) / count)[None, :, None]
        return ReplacedHeads(place.here, self.known[layer].to(place.q_at.device))


class FunctionError(OptionError):
    """An error of a user's function: it is raised at once, and not contained."""


@dataclass(frozen=True)
class ChangedOutputs:
    """A function of the outputs (B, H, Nq, Dv) of a layer."""

    function: Callable[[Tensor], Tensor]
    by_position = False

    def replace(self, place: CallPlace) -> ReplacedHeads:
        """Return the function."""
        return ReplacedHeads(place.here, self.compute)

    def compute(self, z: Tensor) -> Tensor:
        """Return new outputs, or raise."""
        try:
            new = self.function(z)
        except Exception as error:
            raise FunctionError(
                f"the function raised {type(error).__name__}: {error}"
            ) from error
        if isinstance(new, Tensor) and new.shape == z.shape:
            return new
        shape = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
        raise FunctionError(
            f"the function returned {shape}, expected outputs like those it was given, "
            f"{tuple(z.shape)}"
        )


def read_replacement(source: Any, parts: str = "z") -> Replacement:
    """Return what replaces outputs: a function, a mean, or what was recorded."""
    inputs = "qk" if parts == "pattern" else parts
    if parts != "z" and (not inputs or not set(inputs) <= set("qkv")):
        raise OptionError(
            f"parts={parts!r}, expected 'z', 'pattern', or some of 'q', 'k' and 'v' "
            "together: parts='qk'."
        )
    if isinstance(source, MeanOutputs) or callable(source):
        if parts != "z":
            raise OptionError(
                f"parts={parts!r} of {type(source).__name__}, expected a recording: a "
                "mean and a function replace outputs only. Leave parts= out."
            )
        return source if isinstance(source, MeanOutputs) else ChangedOutputs(source)
    recording = find_recording(source)
    return (
        RecordedOutputs(recording)
        if parts == "z"
        else RecordedInputs(recording, inputs)
    )


def average_outputs(*sources: Any) -> MeanOutputs:
    """Return the mean output of each head in some recordings, for patch_heads.

    sources: recordings with values, of one or of many texts
    """
    if not sources:
        raise OptionError("average_outputs() of nothing, expected recordings.")
    return MeanOutputs([find_recording(x) for x in sources])
