"""Record the attention of transformers' generate_batch, by layer and request.

    prepare      the requests of the next batch, with their positions
    hear         a layer attends: its rows go to their requests
    finish       one record per layer and request, after those of other passes

Rows are placed by their position (request_rows.py). Keys are those that the cache
returned. The mask is compared with the record's for each batch, and the output of a
part of each layer is computed again from the keys of the record.

Next: paged_transformers.py
"""

from __future__ import annotations

import math
import re
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from regard.lens.check_rebuild import find_largest_difference, find_tolerance
from regard.lens.tally import Tally
from regard.lens.watch import Watcher
from regard.recording.evidence import Covered
from regard.recording.record import Record, Recording
from regard.run.chosen_layers import is_chosen
from regard.serving.layer_engine import attend_layer, compute_lse
from regard.serving.paged_batch import (
    MASKED,
    MISFIT,
    BatchedCall,
    Cut,
    PagedBatch,
    PagedRequest,
    Scheduled,
    check_batch_mask,
    copy_rows,
    crop_pieces,
    cut_batch,
    read_call_facts,
)
from regard.serving.request_rows import (
    LayerFacts,
    LayerRows,
    RequestRows,
    make_record,
    place,
    refuse_layer,
)

CHECKED, OFTEN = 2, 64  # calls of a layer that are checked: the first, every …th
ROWS = 8  # the last rows of a request in a batch, whose output is computed again
PARTIAL = "requests have no queries for a prefix that was in the cache"
REBUILT = "its output could not be rebuilt"
UNKNOWN = "the requests of a batch are not known"
UNHEARD = "it attends with a paged cache, and its queries were not heard"
UNREAD = "keys of a prefix that was in the cache could not be read"
Session = tuple[int, dict[str, PagedRequest]]
NUMBERED = re.compile(r"req_(\d+)(?:__child#(\d+))?")


class BatchThread(threading.local):
    """What runs in this thread."""

    batch: PagedBatch | None = None
    call: BatchedCall | None = None  # the attention call that is running
    warming = False  # the batches are made up


class PagedRecorder:
    """Records the batches of a model that is being watched."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.mine = BatchThread()
        self.lock = threading.RLock()
        self.closed = False
        self.layers: dict[str, Tally] = {}
        self.facts: dict[str, LayerFacts] = {}  # of layers that were recorded
        self.requests: list[PagedRequest] = []
        # by cache: its number, and its requests by name
        self.sessions: weakref.WeakKeyDictionary[Any, Session]
        self.sessions = weakref.WeakKeyDictionary()
        self.caches = 0
        self.forks: list[tuple[Any, Any]] = []  # states: a child, its parent

    # --- batches ---------------------------------------------------------------------

    def prepare(self, cache: Any, requests: Any) -> None:
        """Note the batch that runs next in this thread, before it is prepared."""
        scheduled = [
            Scheduled(x.state, int(x.state.position_offset), int(x.query_length))
            for x in requests
        ]
        self.mine.batch = PagedBatch(weakref.ref(cache), scheduled)

    def find_request(self, cache: Any, part: Scheduled) -> PagedRequest:
        """Return the request of a state; a new one begins if it is not known."""
        state, name = part.state, part.state.request_id
        if cache not in self.sessions:
            self.sessions[cache] = self.caches, {}
            self.caches += 1
        number, known = self.sessions[cache]
        found = known.get(name)
        if found is not None and any(x is state for x in found.states):
            return found
        if found is not None and state._true_initial_tokens:  # noqa: SLF001
            found.states.append(state)  # it was preempted, and begins again
            return found
        found = PagedRequest(RequestRows(name), number, [state])
        parent = next((old for new, old in self.forks if new is state), None)
        for other in self.requests:
            if parent is not None and any(x is parent for x in other.states):
                copy_prefix(other.rows, found.rows, part.first)
        known[name] = found
        self.requests.append(found)
        return found

    def find_cuts(self, call: BatchedCall) -> list[Cut]:
        """Return the parts of the batch that is running, and check its mask."""
        batch, kind = self.mine.batch, call.allocator.layer_type
        if batch is None:
            raise ValueError(UNKNOWN)
        cache = call.named["cache"]
        if batch.cache() is not cache:
            raise ValueError(MISFIT)
        if kind not in batch.cuts:
            requests = [self.find_request(cache, part) for part in batch.scheduled]
            batch.cuts[kind] = cut_batch(call, batch, requests)
        cuts, mask = batch.cuts[kind], call.mask
        if mask is None and not call.named.get("is_causal"):
            raise ValueError(MASKED)
        if mask is not None and batch.masks.get(kind) is not mask:
            check_batch_mask(mask, cuts, call.window)
            batch.masks[kind] = mask
        return cuts

    # --- layers ----------------------------------------------------------------------

    def hear(self, call: BatchedCall) -> None:
        """Record a call of a layer; an error of ours becomes a reason."""
        watcher, module = self.watcher, self.watcher.here.name
        watcher.wide.note(module, only_sdpa=True)
        if self.mine.warming:
            return
        name = watcher.here.now.name_layer(module)
        with self.lock:
            if self.closed:
                return
            heard = self.layers.setdefault(name, Tally("", attention=True))
            heard.via, heard.calls = "generate_batch", heard.calls + 1
            heard.kept = heard.calls
            if not self.is_wanted(name):
                heard.reasons["not asked for"] = None
            if heard.reasons:
                return
            try:
                self.add(name, call, heard)
            except Exception as error:  # noqa: BLE001 (of this layer only)
                heard.reasons[refuse_for(error)] = None

    def refuse(self, reason: str) -> None:
        """Keep the reason why the layer that is running is not recorded."""
        with self.lock:
            name = self.watcher.here.name
            heard = self.layers.setdefault(name, Tally("", attention=True))
            heard.reasons[reason] = None

    def is_wanted(self, name: str) -> bool:
        """Return whether a layer is to be recorded; it has been counted."""
        return is_chosen(self.watcher.layers, list(self.layers).index(name), name)

    def add(self, name: str, call: BatchedCall, heard: Tally) -> None:
        """Add the rows of a call to their requests."""
        assert call.k is not None
        assert call.v is not None
        cuts = self.find_cuts(call)
        if name not in self.facts:
            self.facts[name], note = read_call_facts(name, call)
            heard.notes |= {note: None} if note else {}
        for cut in cuts:
            layer = cut.request.rows.layer(name)
            # what comes before is known, or is read from the cache with the rest
            first = cut.first if layer.known >= cut.first else cut.first_key
            window = call.window or cut.first + 1
            if layer.known < cut.first and first > max(0, cut.first + 1 - window):
                raise ValueError(UNREAD)
            keys = slice(cut.keys.start + first - cut.first_key, cut.keys.stop)
            layer.put(layer.q, cut.first, copy_rows(call.q, cut.rows))
            layer.add_keys(first, copy_rows(call.k, keys))
            if self.watcher.keep_v:
                layer.put(layer.v, first, copy_rows(call.v, keys))
        if call.edited or heard.calls <= CHECKED or heard.calls % OFTEN == 0:
            self.check(name, call, heard, cuts)

    def check(
        self, name: str, call: BatchedCall, heard: Tally, cuts: list[Cut]
    ) -> None:
        """Compute the output of some rows again, from the keys of the record."""
        assert call.v is not None
        for cut in cuts:
            layer = cut.request.rows.layer(name)
            heard.add_error(find_batch_error(call, cut, layer, self.facts[name]))
        if not heard.error <= max(map(find_tolerance, (call.q.dtype, call.v.dtype))):
            heard.reasons[REBUILT] = None

    # --- the result ------------------------------------------------------------------

    def finish(self, recording: Recording) -> Recording:
        """Return a recording of other passes with that of the batches."""
        with self.lock:
            self.closed = True
        requests = [
            x for x in sorted(self.requests, key=order_request) if x.rows.layers
        ]
        coverage = {name: cover(name, heard) for name, heard in self.layers.items()}
        if not coverage:
            return recording
        found = [
            (number, record)
            for number, request in enumerate(requests, len(recording.tokens))
            for record in self.make_records(request, coverage)
        ]
        kept = [(n, x) for n, x in found if not coverage[x.name].reason]
        notes = recording.notes | {
            name: [*recording.notes.get(name, ()), *[[]] * len(requests)]
            for name in ("valid", "hidden")
        }
        names = [""] * len(recording.tokens) + [x.rows.name for x in requests]
        return replace(
            recording,
            records=(*recording.records, *(record for _, record in kept)),
            sequences=(*recording.sequences, *(number for number, _ in kept)),
            tokens=(*recording.tokens, *(x.list_tokens() for x in requests)),
            coverage=tuple(join_passes(recording.coverage, coverage)),
            notes=notes | {"requests": names},
        )

    def make_records(
        self, request: PagedRequest, coverage: dict[str, Covered]
    ) -> Iterator[Record]:
        """Yield the records of a request; a layer that has none says why."""
        for name, heard in self.layers.items():
            rows = request.rows.layers.get(name)
            if coverage[name].reason or rows is None or not rows.q:
                continue
            try:
                record = make_record(self.facts[name], request.rows, compute_lse)
            except Exception as error:  # noqa: BLE001 (of this layer only)
                coverage[name] = refuse_layer(coverage[name], refuse_for(error))
                continue
            if int(record.q_positions[0]) > 0:
                heard.notes[PARTIAL] = None
                coverage[name] = cover(name, heard)
            yield record


def find_batch_error(
    call: BatchedCall, cut: Cut, layer: LayerRows, facts: LayerFacts
) -> float:
    """Return the error of the last rows of a request, computed from what is kept."""
    assert call.v is not None
    k, at = place(layer.k)
    n = cut.keys.stop - cut.keys.start
    last = cut.end - int(at[0])  # one past its last key in the record
    if call.named.get("block_table") is not None:
        return 0.0  # the values are in the cache only
    if int(at[-1]) - int(at[0]) + 1 != len(at) or last < n:
        raise ValueError("some of its keys between others are missing")
    stop = cut.rows.stop
    # the record does not know of an ablation: all rows tell whether there was one
    first = cut.rows.start if call.edited else max(cut.rows.start, stop - ROWS)
    rows = slice(first, stop)
    done = attend_layer(
        layer.q[-1].rows[rows.start - stop :].transpose(0, 1),
        k[:, last - n : last],
        call.v[0, :, cut.keys],
        facts,
        n - (stop - rows.start),
    )
    return find_largest_difference(done.out[0], call.out[0, rows].transpose(0, 1))


def copy_prefix(parent: RequestRows, child: RequestRows, end: int) -> None:
    """Give a sample the rows before a position, which its parent ran for both."""
    for name, layer in parent.layers.items():
        mine = child.layer(name)
        mine.q, mine.k, mine.v = (
            crop_pieces(pieces, end) for pieces in (layer.q, layer.k, layer.v)
        )
        mine.known = min(layer.known, end)


def order_request(request: PagedRequest) -> tuple[float, ...]:
    """Return where a request comes among others: as in what generate_batch returns.

    It numbers its requests; the further samples of one come before it.
    """
    match = NUMBERED.fullmatch(request.rows.name)
    number, child = match.groups() if match else (math.inf, None)
    return request.session, float(number), math.inf if child is None else float(child)


def cover(name: str, heard: Tally) -> Covered:
    """Return the coverage of a layer."""
    found = heard.cover(name)
    return refuse_layer(found, found.reason) if found.reason else found


def join_passes(
    ordinary: tuple[Covered, ...], batches: dict[str, Covered]
) -> Iterator[Covered]:
    """Yield the coverage of each layer, of all passes."""
    rest = dict(batches)
    for one in ordinary:
        other = rest.pop(one.name, None) if one.attention else None
        yield one if other is None else join_covered(one, other)
    yield from rest.values()


def join_covered(one: Covered, batch: Covered) -> Covered:
    """Return the coverage of a layer that ran in batches, and in other passes."""
    notes = [one.note, batch.note]
    reasons = list(dict.fromkeys(filter(None, (one.reason, batch.reason))))
    if bool(one.reason) != bool(batch.reason):
        where = "in other passes" if one.reason else "in generate_batch"
        notes.append(f"not recorded {where}: {reasons.pop()}")
    return Covered(
        name=one.name,
        via=", ".join(dict.fromkeys(filter(None, (one.via, batch.via)))),
        calls=one.calls + batch.calls,
        kept=one.kept + batch.kept,
        error=max(one.error, batch.error),
        reason="; ".join(reasons),
        note="; ".join(dict.fromkeys(filter(None, notes))),
    )


def refuse_for(error: Exception) -> str:
    """Return an error of a layer as a reason; a ValueError is a sentence of ours."""
    said = str(error)
    if type(error) is ValueError:
        return said
    return f"the observer failed: {type(error).__name__}: {said}"
