"""The data of a map: tiles, rows, columns and thumbnails of a recording.

    source = MapSource(seen.recording)
    source.tile(Spot(0, 18, 8), level=0, x=3, y=7)   256 × 256 weights, as codes
    source.row(Spot(0, 18, 8), 5808)                 the strongest keys of a query
    source.gallery(0, 18)                            a small map of each head

    level below `finest`   computed on request from q, k and lse    milliseconds
    level `finest` and up  from one pass over the head              in a thread, cached

If a pass takes longer than PATIENCE, a preview is returned: the middle query of each
pixel alone. Its mass is a fair sample, its max is far too low: max has no preview.

Next: server.py
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.arrays import to_numpy
from regard.errors import OptionError, RegardError
from regard.recording.record import Record, Recording
from regard.recording.recording_text import describe_certificates
from regard.show.background_jobs import Jobs, LruCache
from regard.show.layer_kinds import find_kind, is_causal
from regard.show.log_codes import encode_weights
from regard.show.sound_input import find_sounds
from regard.show.text_blocks import describe_text
from regard.show.text_rollout import describe_ways
from regard.show.vision_input import (
    find_images,
    find_pictures,
    name_image_tokens,
)
from regard.show.zoom_levels import (
    Levels,
    Sheet,
    build_levels,
    measure_levels,
    preview,
    sketch,
)
from regard.stats.pooled import PooledMap, Pooling
from regard.stats.reducers import is_run
from regard.stats.registry import list_statistics
from regard.stats.replay import to_torch
from regard.stats.table import make_table
from regard.stats.tile import read_tile
from regard.stats.tile_walk import walk

TILE = 256  # pixels on a side
TOP = 20
LIMIT = 256 * 2**20  # bytes of cached levels and thumbnails
PATIENCE = 0.5  # seconds until a preview is returned: 8,192 tokens need none
WAIT = 120.0  # seconds until UnfinishedError is raised
CELLS = 2**36  # most cells computed in advance: about three minutes
ASKED, AHEAD, LATER = 0, 1, 2  # urgency: the lowest runs first

Report = Callable[[str, int, int], object]


class MissingError(OptionError):
    """A sequence, layer, head or tile that the recording does not have."""


class UnfinishedError(RegardError):
    """A result that is still being computed."""


class Spot(NamedTuple):
    """One head of one layer for one sequence."""

    sequence: int
    layer: int
    head: int


class MapSource:
    """Answer requests about a recording; thread-safe."""

    def __init__(
        self,
        recording: Recording,
        *,
        report: Report | None = None,
        limit: int = LIMIT,
    ) -> None:
        """Store the recording; compute nothing yet.

        report: called with the name of a job, the amount done and the total
        limit: bytes of the cache
        """
        self.recording, self.report = recording, report
        self.names = list(dict.fromkeys(record.name for record in recording.records))
        pairs = zip(recording.records, recording.sequences, strict=True)
        self.records: dict[tuple[int, int], Record] = {}
        for record, sequence in pairs:  # if a layer ran twice, the first
            if all(measure_levels(record)[0]):  # a record of padding has no cells
                self.records.setdefault(
                    (sequence, self.names.index(record.name)), record
                )
        self.marked: dict[tuple[int, int], Record] = {}  # text_request.py
        self.longest: dict[int, float] = {}  # value of a sequence
        self.kept = LruCache(limit)
        self.passes, self.chores = Jobs("passes"), Jobs("chores")
        self.clock, self.prepared = itertools.count(1), False
        self.rows: dict[tuple[int, int], list[dict[str, Any]]] = {}  # of the table
        self.few: list[dict[str, Any]] = []  # its numbers of too few queries

    def close(self) -> None:
        """Stop all jobs and wait for them to end."""
        for jobs in (self.passes, self.chores):
            jobs.close()

    def find(self, sequence: int, layer: int, head: int = 0) -> Record:
        """Return a record; raise MissingError if it or the head does not exist."""
        record = self.records.get((sequence, layer))
        if record is None:
            raise MissingError(
                f"there is no layer {layer} with sequence {sequence}; there are layers "
                f"0 to {len(self.names) - 1}."
            )
        if not 0 <= head < record.heads:
            raise MissingError(
                f"there is no head {head} in layer {layer}, expected 0 to "
                f"{record.heads - 1}."
            )
        return record

    def meta(self) -> dict[str, Any]:
        """Return the description of the recording and the table, ready for JSON."""
        return self.about | self.table()

    def table(self) -> dict[str, Any]:
        """Return the statistics of every head once all are known, and the progress."""
        whole = len(self.rows) == len(self.records)
        table = [row for key in self.records for row in self.rows[key]] if whole else []
        every = 0 if self.is_long else len(self.records)
        done = {"table": table, "few": self.few if whole else []}
        return done | {"tableDone": len(self.rows), "tableAll": every}

    @cached_property
    def is_long(self) -> bool:
        """Whether a pass over all cells takes minutes; then nothing is precomputed."""
        sizes = ((r.heads, *measure_levels(r)[0]) for r in self.records.values())
        return sum(map(math.prod, sizes)) > CELLS

    @cached_property
    def about(self) -> dict[str, Any]:
        """The description of the recording, which never changes."""
        tokens, texts = self.recording.tokens, self.recording.texts
        n = max([len(tokens), len(texts), *(s + 1 for s, _ in self.records)])
        firsts = {r.name: r for r in reversed(self.recording.records)}
        images, spans = find_images(self.recording), self.recording.notes.get("spans")
        return {
            "model": self.recording.model,
            "title": str(self.recording.notes.get("title") or self.recording.model),
            "sequences": [
                describe_text(
                    tokens[i] if i < len(tokens) else (),
                    name_image_tokens(texts[i] if i < len(texts) else (), i, images),
                    describe_ways(self.list_readers(i)),
                    spans.get(str(i)) if isinstance(spans, dict) else (),
                )
                for i in range(n)
            ],
            "layers": [
                {"name": name, "heads": r.heads, "keyHeads": int(r.k.shape[0])}
                | {"kind": find_kind(self.recording, r)}
                for name, r in ((x, firsts[x]) for x in self.names)
            ],
            "records": [
                describe_record(*key, r) | self.name_tokens(key[0], r)
                for key, r in self.records.items()
            ],
            "levels": {"tile": TILE},
            "statistics": [x.pack() for x in list_statistics()],
            "pictures": find_pictures(self.recording),
            "images": images,
            "sounds": find_sounds(self.recording),
            "certified": "".join(describe_certificates(self.recording)),
            "imagesMissing": str(self.recording.notes.get("images_missing", "")),
            "compared": self.recording.notes.get("compared"),
        }

    def list_readers(self, i: int) -> list[Record]:
        """Return the layers whose queries and keys are the tokens of sequence i."""
        mine = (x for (sequence, _), x in self.records.items() if sequence == i)
        return [x for x in mine if all(self.name_tokens(i, x).values())]

    def name_tokens(self, sequence: int, record: Record) -> dict[str, bool]:
        """Return whether the queries and the keys are the tokens of the sequence.

        A decoder's queries are not; its keys are if n_k ≠ n_q is the token count.
        """
        decoders = self.recording.notes.get("decoders", [])
        own = record.name not in decoders
        one, found = slice(sequence, sequence + 1), self.recording
        tokens: Any = found.tokens[one]
        named = tokens if any(tokens) else found.texts[one]  # moments of a sound
        (n_q, n_k), _, _ = measure_levels(record)
        across = n_q != n_k and [n_k] == [len(x) for x in named]
        return {"qNamed": own, "kNamed": own or across}

    def tile(
        self, spot: Spot, *, level: int, x: int, y: int, how: Pooling = "max"
    ) -> Sheet:
        """Return a tile, cut off at the edge of the map; x counts keys, y queries."""
        record = self.find(*spot)
        if how not in ("max", "mass"):
            raise OptionError(f'how={how!r}, expected "max" or "mass".')
        n, finest, coarsest = measure_levels(record)
        known = 0 <= level <= coarsest
        span = TILE << level if known else TILE
        if not (known and 0 <= y * span < n[0] and 0 <= x * span < n[1]):
            raise MissingError(
                f"there is no tile x={x} y={y} at level {level}: {n[0]} queries and "
                f"{n[1]} keys have levels 0 to {coarsest}, {TILE} pixels a tile."
            )
        rows, keys = slice(y * span, (y + 1) * span), slice(x * span, (x + 1) * span)
        if level < finest:
            found = read_tile(record, spot.head, rows, keys, TILE, how=how)
            codes = encode_weights(to_numpy(found.values), to_numpy(found.allowed))
            return Sheet(codes, level, how)
        levels = self.await_levels(spot, PATIENCE if how == "mass" else WAIT)
        if levels is not None:
            part = slice(y * TILE, (y + 1) * TILE), slice(x * TILE, (x + 1) * TILE)
            return Sheet(levels[level, how][part], level, how)
        if how == "max":
            raise UnfinishedError(
                f"layer {spot.layer}, head {spot.head} is still being made. Ask again."
            )
        return preview(record, spot.head, level, (rows, keys))

    def await_levels(self, spot: Spot, seconds: float) -> Levels | None:
        """Return the coarse levels of a head; None if they take more than `seconds`."""
        levels: Levels | None = self.kept.get(spot)
        if levels is not None:
            return levels
        # the newest request first: it is the one that the user is viewing
        urgency, work = -next(self.clock), partial(self.build, spot)
        try:
            return self.passes.ask(spot, work, urgency).result(seconds)  # type: ignore[no-any-return]
        except TimeoutError:
            return None

    def build(self, spot: Spot) -> Levels:
        """Compute the coarse levels of a head, unless they are cached."""
        made: Levels | None = self.kept.get(spot)
        if made is None:
            made = build_levels(
                self.find(*spot),
                spot.head,
                progress=partial(
                    self.tell, self.passes, f"layer {spot.layer}, head {spot.head}"
                ),
            )
            self.kept.put(spot, made, sum(x.nbytes for x in made.values()))
        return made

    def row(self, spot: Spot, query: int) -> dict[str, Any]:
        """Return the strongest keys of a query, its entropy in bits, and its sum."""
        weights = self.line(spot, 0, query)
        seen = weights[weights > 0]
        found = name_top(weights, float(-(seen * np.log2(seen)).sum()))
        if str(spot.sequence) in self.about["pictures"]:
            known = [None if math.isnan(x) else x for x in weights.tolist()]
            found["weights"] = known  # one per patch of the picture; JSON has no NaN
        return found

    def column(self, spot: Spot, key: int) -> dict[str, Any]:
        """Return the queries that attend to a key most; entropy is of their shares."""
        weights = self.line(spot, 1, key)
        seen = weights[weights > 0]
        shares = seen / seen.sum()
        return name_top(weights, float(-(shares * np.log2(shares)).sum()))

    def line(self, spot: Spot, axis: int, at: int) -> NDArray[np.float64]:
        """Return one row (axis 0) or column (axis 1) of the weights."""
        record = self.find(*spot)
        n, _, _ = measure_levels(record)
        if not 0 <= at < n[axis]:
            kind = ("query", "key")[axis]
            raise MissingError(f"there is no {kind} {at}, expected 0 to {n[axis] - 1}.")
        if not n[1 - axis]:
            return np.zeros(0)
        one, whole = slice(at, at + 1), slice(0, n[1 - axis])
        rows, keys = (one, whole) if axis == 0 else (whole, one)
        (found,) = walk(
            record,
            PooledMap(1),
            heads=(spot.head,),
            rows=rows,
            keys=keys,
            block=max(n),  # one long tile
            workers=1,
        )
        return to_numpy(found.values).reshape(-1).astype(np.float64)

    def gallery(self, sequence: int, layer: int) -> Sheet:
        """Return a max map of at most 64 pixels per side for every head of a layer."""
        self.find(sequence, layer)
        key = sequence, layer
        made: Sheet | None = self.kept.get(key)
        if made is None:
            try:
                work = partial(self.sketch, *key)
                made = self.chores.ask(key, work, ASKED).result(WAIT)
            except TimeoutError:
                raise UnfinishedError(
                    f"the gallery of layer {layer} is still being made. Ask again."
                ) from None
        return made

    def sketch(self, sequence: int, layer: int) -> Sheet:
        """Compute the thumbnails of a layer, unless they are cached."""
        made: Sheet | None = self.kept.get((sequence, layer))
        if made is not None:
            return made
        made = sketch(
            self.find(sequence, layer),
            progress=partial(self.tell, self.chores, f"gallery of layer {layer}"),
        )
        self.kept.put((sequence, layer), made, made.codes.nbytes)
        return made

    def prepare(self) -> None:
        """Queue all thumbnails, then the table, unless that would take minutes."""
        if self.is_long or self.prepared:
            return
        self.prepared = True
        for key in self.records:
            self.chores.ask(key, partial(self.sketch, *key), AHEAD)
        for key in self.records:
            self.chores.ask(("table", *key), partial(self.tabulate, *key), LATER)

    def tabulate(self, sequence: int, layer: int) -> None:
        """Compute the table rows of one record."""
        record = self.find(sequence, layer)
        one = replace(self.recording, records=(record,), sequences=(sequence,))
        place = {"sequence": sequence, "layer": layer}
        table = make_table(one)
        self.few += [x.pack() | place for x in table.few]
        self.rows[sequence, layer] = [
            {name: x for name, x in row.items() if name != "name"} | place
            for row in table.list_rows()
        ]
        self.tell(self.chores, "table", len(self.rows), len(self.records))

    def tell(self, jobs: Jobs, what: str, done: int, whole: int) -> None:
        """Report the progress of a job; raise CancelledError if jobs are closed."""
        if jobs.closed.is_set():
            raise CancelledError
        if self.report is not None:
            self.report(what, done, whole)


def describe_record(sequence: int, layer: int, record: Record) -> dict[str, Any]:
    """Return the description of a record, ready for JSON."""
    (n_q, n_k), finest, coarsest = measure_levels(record)
    q, k = (to_torch(x) for x in (record.q_positions, record.k_positions))
    return {
        "layer": layer,
        "sequence": sequence,
        "heads": list(range(record.heads)),
        "nq": n_q,
        "nk": n_k,
        "qStart": int(q[0]) if n_q else 0,
        "kStart": int(k[0]) if n_k else 0,
        "causal": is_causal(record),
        "finest": finest,
        "coarsest": coarsest,
        "qPositions": None if is_run(q) else q.tolist(),  # None: qStart, qStart + 1, …
        "kPositions": None if is_run(k) else k.tolist(),
    }


def name_top(weights: NDArray[np.float64], bits: float) -> dict[str, Any]:
    """Return the largest weights of a row or column, ready for JSON."""
    best, total = np.argsort(-weights, kind="stable")[:TOP], float(weights.sum())
    known = math.isfinite(total)
    top = [{"index": int(i), "weight": float(weights[i])} for i in best]
    return {
        "entropy": max(0.0, bits) if known else None,
        "unit": "bits",
        "total": total if known else None,
        "nan": int(np.isnan(weights).sum()),
        "top": [x for x in top if x["weight"] > 0],
    }
