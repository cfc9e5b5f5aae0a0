"""Run the model on one shard of documents and return the result; used by all runners.

    chunks ─▶ recorded model ─▶ values of every query ─▶ tally of each document ─▶ sum

A document that fails for any reason is set aside with that reason, and the rest of its
batch runs again without it. So every mean is over complete documents; a NaN is a reason
to set a document aside, and is never dropped silently.

Next: supervisor.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from regard.arrays import to_numpy
from regard.atlas.chunks import KILLER, Chunk, batch_pieces, cut_shard, explain_error
from regard.atlas.corpus import Shard
from regard.atlas.model import open_model
from regard.atlas.settings import Settings
from regard.atlas.store import Result, pack_result
from regard.atlas.tally import (
    Tally,
    join_pieces,
    merge_tallies,
    tally_document,
    tally_nothing,
)
from regard.recording.record import Record
from regard.seen import Seen, watch
from regard.stats.over_queries import find_nan
from regard.stats.table import measure_rows


@dataclass
class Work:
    """The state of a shard while it runs."""

    aside: dict[str, str]  # digests of documents set aside, and why
    tallies: list[tuple[Chunk, Tally]] = field(default_factory=list)
    missed: dict[str, str] = field(default_factory=dict)  # layers not recorded, and why


class Worker:
    """A plan and its loaded model, which runs any shard."""

    def __init__(self, plan: Settings, *, threads: int | None = 1) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.plan = plan
        self.model = open_model(
            plan.model, precision=plan.precision, device=plan.device
        )

    def __call__(self, shard: Shard, *, skip: Collection[str] = ()) -> bytes:
        """Return the result of a shard, packed as a file.

        skip: digests of documents to set aside
        """
        reasons = dict.fromkeys(skip, KILLER)
        while True:
            pieces, aside = cut_shard(shard, self.plan, self.model.words, reasons)
            work = Work({x: reasons.get(x, why) for x, why in aside.items()})
            for batch in batch_pieces(pieces, self.plan.batch):
                self.run(batch, work)
            failed = work.aside.keys() - aside.keys()
            if not (self.plan.packed and failed):
                return pack_result(self.finish(shard, work))
            # other packs hold the rest of a failed document: pack again without it
            reasons |= {x: work.aside[x] for x in failed}

    def run(self, batch: Sequence[Chunk], work: Work) -> None:
        """Tally chunks of one length; if the batch fails, run each chunk alone."""
        try:
            work.tallies += list(self.measure(batch, work))
        except Exception as error:  # noqa: BLE001 (any error becomes the reason)
            if len(batch) == 1:
                work.aside |= dict.fromkeys(batch[0].owners, explain_error(error))
                return
            for piece in batch:
                self.run([piece], work)

    def measure(
        self, batch: Sequence[Chunk], work: Work
    ) -> Iterator[tuple[Chunk, Tally]]:
        """Yield the tally of each chunk."""
        seen = self.watch(batch)
        for covered in seen.coverage():
            if covered.reason and (covered.attention or not covered.via):
                work.missed[covered.name] = covered.reason
        records: list[list[Record]] = [[] for _ in batch]
        pairs = zip(seen.recording.records, seen.recording.sequences, strict=True)
        for record, sequence in pairs:
            if sequence >= len(batch):
                raise LookupError(f"{record.name} runs more than once for a text")
            records[sequence].append(record)
        for piece, mine in zip(batch, records, strict=True):
            if not mine:
                raise LookupError("no layer of the model could be seen")
            tally = tally_document(
                [record.name for record in mine],
                [self.describe(record, piece) for record in mine],
                self.plan.statistics,
                document=piece.document,
                piece=piece.number,
            )
            yield piece, tally

    def describe(self, record: Record, piece: Chunk) -> dict[str, np.ndarray]:
        """Return the values of every query, (H, Nq), by statistic."""
        lse = to_numpy(record.lse)
        found = measure_rows(record, piece.tokens, self.plan.statistics)
        lost = (find_nan(x).any() for x in found.values())
        if np.isnan(lse).any() or any(lost):  # else these queries would be skipped
            raise ArithmeticError(f"NaN in {record.name}")
        rows = {name: to_numpy(x.values).astype("f8") for name, x in found.items()}
        if any(np.isinf(x).any() for x in rows.values()) or np.isposinf(lse).any():
            raise ArithmeticError(f"{record.name} has numbers without bounds")
        return rows

    def watch(self, batch: Sequence[Chunk]) -> Seen:
        """Run the model on chunks of one length, and return the recording."""
        tokens = torch.tensor([piece.tokens for piece in batch])
        with watch(self.model.network) as seen, torch.inference_mode():
            self.model.run(tokens.to(self.plan.device))
        return seen

    def finish(self, shard: Shard, work: Work) -> Result:
        """Return the result of a shard.

        One draw is a document with all its chunks; if packed, it is one pack.
        """
        packed, aside = self.plan.packed, work.aside
        draws: dict[tuple[int, int], list[Tally]] = {}
        done = sorted(work.tallies, key=lambda x: (x[0].document, x[0].number))
        done = [x for x in done if aside.keys().isdisjoint(x[0].owners)]
        for piece, tally in done:
            draw = (piece.document, piece.number if packed else 0)
            draws.setdefault(draw, []).append(tally)
        parts = [join_pieces(x) for x in draws.values()]
        nothing = tally_nothing(self.plan.statistics)
        names = {place.digest: place.name for place in shard.places}
        return Result(
            first=shard.number,
            last=shard.number + 1,
            tally=merge_tallies(parts or [nothing], keep=self.plan.examples),
            documents=len(shard.places) - len(aside),
            tokens=sum(len(piece.tokens) for piece, _ in done),
            n_aside=len(aside),
            aside=tuple((x, names[x], reason) for x, reason in aside.items()),
            reasons=dict(Counter(aside.values())),
            missed=work.missed,
        )
