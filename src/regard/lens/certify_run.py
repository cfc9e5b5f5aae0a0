"""What certifies the record of a run: rows of every call, and what it returned.

Next: ../recording/certificate.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import regard.lens.coverage_notes as notes
from regard.lens.captured_rows import CapturedRows
from regard.lens.tally import Tally
from regard.lens.witness import ROWS, Witness
from regard.recording.certificate import Claim, Outputs, Rows, certify_all, settle_lse
from regard.recording.record import Record

Kept = NDArray[np.bool_]  # which rows of all calls are in a record


Made = tuple[int, int, Claim]  # place among all sequences, number of its layer


def certify_made(
    made: Sequence[Made], tallies: Mapping[tuple[str, bool], Tally]
) -> list[tuple[int, int, Record]]:
    """Return the records that are certified, or cannot be, of layers without a reason.

    A record that fails, and rows that are in no record, are reported.
    """
    certified = certify_all([claim for *_, claim in made])
    found = []
    for (place, layer, claim), sampled in zip(made, certified, strict=True):
        record, x = settle_lse(claim.record, sampled)
        if x is not None and x.failed:
            why = notes.FAILED.format(x.failed, x.rows, x.error, x.tolerance)
            tallies[record.name, True].reasons[why] = None
        found.append((place, layer, replace(record, certificate=x)))
    for tally in tallies.values():
        lost = tally.rows - tally.in_records - sum(tally.left_out.values())
        if lost and not tally.reasons:
            tally.notes[notes.LOST.format(lost, tally.rows)] = None
    return [x for x in found if not tallies[x[2].name, True].reasons]


def make_claim(
    record: Record, calls: Sequence[CapturedRows], b: int, kept: Kept, u: Tensor | None
) -> Claim:
    """Return what is to be checked of the record of a sequence.

    b: the sequence; u: the values of its keys times r, (Hk, Nk, 1), if they are known
    """
    place, first = np.cumsum(kept) - 1, 0
    seeded = np.random.default_rng(len(kept))  # the same rows in all layers
    rows, seen = [], []
    for call in calls:
        mine = np.flatnonzero(kept[first : first + call.n_q])
        some = seeded.permutation(mine)[:ROWS]
        rows.append(place[first + np.sort(some)])
        if call.witness is not None and u is not None:
            seen.append(list_outputs(call.witness, b, kept[first:], place[first:]))
        first += call.n_q
    outputs = join_outputs(calls, seen, u) if seen and u is not None else None
    start = calls[0].start, calls[0].first, record.shape[2]
    places = (start, tuple(x.n_q for x in calls), kept.tobytes())
    return Claim(record, np.concatenate(rows), outputs, places)


def list_outputs(
    witness: Witness, b: int, kept: Kept, place: NDArray[np.intp]
) -> tuple[Rows, Tensor, Tensor]:
    """Return the rows of a witness that are in a record, and their outputs, (H, R)."""
    rows = witness.rows.cpu().numpy()
    there = np.flatnonzero(kept[rows])
    out, size = (x[b][:, there] for x in (witness.out, witness.size))
    return place[rows[there]], out, size


def join_outputs(
    calls: Sequence[CapturedRows],
    seen: Sequence[tuple[Rows, Tensor, Tensor]],
    u: Tensor,
) -> Outputs:
    """Return the outputs of all calls."""
    rows, out, size = zip(*seen, strict=True)
    return Outputs(
        rows=np.concatenate(rows),
        out=torch.cat(out, 1).to(u.device),
        size=torch.cat(size, 1).to(u.device),
        values=u[..., 0],
        eps=max(x.witness.eps for x in calls if x.witness is not None),
    )
