"""The forward passes of one thread, and the sessions that they form.

A session is a group of passes that continue each other: the steps of a generation. The
first layer that attends in a pass decides whether the pass continues the session.

    the first layer that is kept          the pass belongs to
    continues its run                     the session of this run, which is reordered or
                                          cropped with it
    begins a run                          a new session
    attends between passes: an encoder    the next session, or the last one if the same
                                          method of the model ran it

Next: watch.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.lens.assemble import Continued, LayerRun
from regard.lens.captured_call import CapturedCall
from regard.lens.captured_rows import extend
from regard.lens.mask_store import MaskStore
from regard.run.given import Given, refer_to
from regard.run.passes import Pass

Told = tuple[tuple[int, ...], list[int], list[int]]  # tokens, padding, which are real


@dataclass
class Session:
    """Passes that continue each other."""

    size: int  # sequences
    pieces: list[Tensor] = field(default_factory=list)  # tokens of each pass
    valid: Tensor | None = None
    cache: Any = None
    told: Tensor | None = None  # the order into which the cache was put since
    has_gaps: bool = False  # the tokens of some passes are unknown

    def add(self, given: Given, how: Continued | None, *, whole: bool) -> None:
        """Add the tokens of a pass."""
        if how is not None and how.order is not None:
            self.reorder(how.order)
        if how is not None and how.cropped is not None:
            self.crop(how.cropped)
        if given.tokens is not None and whole:
            self.pieces.append(given.tokens)
        self.has_gaps |= given.tokens is None  # it was given embeddings
        if given.valid is not None:
            self.valid = given.valid
        self.cache = given.cache or self.cache

    def reorder(self, order: Tensor) -> None:
        """Put the sequences into another order; some may be repeated or left out."""
        if {x.shape[0] for x in self.pieces} == {self.size}:
            self.pieces = [x.index_select(0, order) for x in self.pieces]
        if self.valid is not None and self.valid.shape[0] == self.size:
            self.valid = self.valid.index_select(0, order)
        self.size = len(order)

    def crop(self, end: int) -> None:
        """Remove tokens from a position on."""
        if self.pieces and {x.shape[0] for x in self.pieces} == {self.size}:
            self.pieces = [torch.cat(self.pieces, 1)[:, :end]]

    def list_tokens(self, dropped: set[int]) -> Iterator[Told]:
        """Yield the tokens of each sequence, its padding, and which of all is not.

        dropped: the sequences whose records are without their padding
        """
        pieces = [] if self.has_gaps else self.pieces  # else it was given embeddings
        if not pieces and self.valid is not None:
            some = (x.int().tolist() for x in self.valid[: self.size])
            yield from (((), [], [] if all(x) else x) for x in some)
        if {x.shape[0] for x in pieces} != {self.size}:  # unknown
            return
        for b, row in enumerate(torch.cat(pieces, 1)):
            real = torch.ones(len(row), dtype=torch.bool, device=row.device)
            if self.valid is not None and b < len(self.valid):
                real = extend(self.valid[b], len(row)).to(row.device)
            some = [] if bool(real.all()) else real.int().tolist()
            if b not in dropped:
                real = torch.ones_like(real)
            yield tuple(row[real].tolist()), row[~real].tolist(), some


class Passes:
    """What one thread ran: the runs of each layer, and its sessions."""

    def __init__(self, now: Pass, *, on_host: bool = False) -> None:
        self.now, self.on_host = now, on_host  # whether arrays leave the device at once
        self.method_ran: bool | None = None  # a method of the model has run a pass;
        # None if no method of it is running
        self.runs: dict[str, list[LayerRun]] = {}
        self.sessions: list[Session] = []
        self.is_joined = False  # the session of the pass that runs is known
        self.current = 0  # it
        self.known: int | None = None  # the session whose cache the pass was given
        self.how: Continued | None = None  # how the pass continues an earlier one
        self.is_new = False  # the pass does not continue an earlier one
        self.store = MaskStore()

    def list_told(self, number: int) -> dict[int, Told]:
        """Return the tokens of a session's sequences, and which were padding."""
        if number >= len(self.sessions):
            return {}
        runs = [run for runs in self.runs.values() for run in runs]
        dropped = {b for run in runs if run.session == number for b in run.dropped}
        return dict(enumerate(self.sessions[number].list_tokens(dropped)))

    def begin(self) -> None:
        """Begin a pass, or add what only the model in a wrapper was given."""
        cache = self.now.given.cache and self.now.given.cache()
        known = [] if cache is None else [n for n, _ in self.list_sessions(cache)]
        self.known, self.is_joined = known[-1] if known else None, False
        self.store.begin_pass()

    def end(self, cache: Any = None) -> None:
        """End a pass, which may return a cache for the next one."""
        if self.is_joined:
            session = self.sessions[self.current]
            session.told, session.cache = None, session.cache or refer_to(cache)
            self.method_ran = None if self.method_ran is None else True
        self.is_joined = False

    def add(
        self, name: str, call: CapturedCall, *, keep_v: bool, tower: bool = False
    ) -> LayerRun:
        """Add a call to the last run of its layer, or begin a new one.

        tower: its queries are no tokens: a text may have several pictures
        """
        runs = self.runs.setdefault(name, [])
        last, begun = self.find_last(runs), self.is_begun
        if self.is_first_use and has_all_keys(call):
            last = None  # the cache is new, and was empty
        if last is not None and last.is_cross and not begun:
            last = self.follow(last)
        how = None if last is None else last.continue_with(call, self.find_told(last))
        if how is None or last is None:
            last = LayerRun(
                name,
                call,
                self.store,
                keep_v=keep_v,
                on_host=self.on_host,
                valid=self.now.given.valid,
            )
            runs.append(last)
            self.find_session(last)
        if begun:
            self.begin_running(call, last, how, tower=tower)
        return last

    def find_session(self, run: LayerRun) -> None:
        """Set the session of a new run, and whether its passes come later."""
        run.session = self.current if self.is_inside else len(self.sessions)
        run.is_before = not (self.is_begun or self.is_inside)

    def begin_running(
        self, call: CapturedCall, run: LayerRun, how: Continued | None, *, tower: bool
    ) -> None:
        """Find the session of a pass by its first call."""
        self.is_joined, self.is_new, self.how = True, how is None, how
        if how is None:
            tokens = self.now.given.tokens if tower else None
            self.sessions.append(Session(len(call.q if tokens is None else tokens)))
        self.current = min(run.session, len(self.sessions) - 1)
        whole = run.rows[0].start == 0  # else the tokens before are unknown
        self.sessions[self.current].add(self.now.given, how, whole=whole)

    def find_valid(self, session: int, places: range) -> Tensor | None:
        """Return which tokens of some sequences are not padding, if that was given."""
        some = self.sessions[session].valid if session < len(self.sessions) else None
        if some is None or places.step == 1 or len(some) <= places[-1]:
            return some
        return some[list(places)]

    @property
    def is_begun(self) -> bool:
        """Whether a pass is running, and no call of it was kept."""
        return bool(self.now.depth) and not self.is_joined

    @property
    def is_inside(self) -> bool:
        """Whether a call is a part of the current session, not of a new one."""
        return self.is_joined or (not self.now.depth and bool(self.method_ran))

    @property
    def is_first_use(self) -> bool:
        """Whether the pass was given a cache that no earlier pass has used."""
        cached = self.now.depth and self.now.given.cache is not None
        return bool(cached) and self.known is None

    def find_last(self, runs: list[LayerRun]) -> LayerRun | None:
        """Return the run that a call may continue: of the same cache, if known."""
        known = self.known if self.now.depth else None
        some = [x for x in runs if known is None or x.session == known]
        return some[-1] if some else None

    def find_told(self, run: LayerRun) -> Continued:
        """Return what the cache, and the first layer of the pass, tell about a run."""
        if run.is_cross or run.session >= len(self.sessions):
            return Continued(goes_on=self.is_joined and not self.is_new)
        how = self.how if self.is_joined else None
        return Continued(
            self.sessions[run.session].told, None if how is None else how.cropped
        )

    def follow(self, run: LayerRun) -> LayerRun | None:
        """Do to a run of cross-attention what the first layer of the pass showed.

        Returns the run, None if the pass is new: the same keys, other queries.
        """
        how = self.how
        if self.is_new:
            return None
        if not self.is_joined or how is None:
            return run
        if how.order is not None and int(how.order.max()) < run.batch:
            run.reorder(how.order)
        if how.cropped == 0:
            run.restart()
        elif how.cropped is not None:
            run.crop_rows(how.cropped)
        return run

    def group_runs(self) -> Iterator[tuple[int, int, list[tuple[range, LayerRun]]]]:
        """Yield each session: its number and size, and its runs in order.

        Each run comes with the numbers of its sequences. If a layer has several runs in
        a session, their sequences follow each other. If each text of an encoder is read
        by several sequences (beams), it has the number of the first of them.
        """
        for number in range(len(self.sessions) + 1):
            size, found = 0, []
            for runs in self.runs.values():
                first = 0
                for run in (x for x in runs if x.session == number):
                    found.append((range(first, first + run.batch), run))
                    first += run.batch
                size = max(size, first)
            readers = {run.batch for _, run in found if run.is_cross}
            for i, (some, run) in enumerate(found):
                if run.is_before and readers == {size} and size % run.batch == 0:
                    step = size // run.batch
                    found[i] = (range(some.start, size, step), run)
            yield number, size, found

    def list_sessions(self, cache: Any) -> Iterator[tuple[int, Session]]:
        """Yield the sessions that use a cache."""
        for number, session in enumerate(self.sessions):
            if session.cache is not None and session.cache() is cache:
                yield number, session

    def reorder(self, cache: Any, order: Tensor | None, repeats: int = 1) -> None:
        """Note how the sequences of a cache are put into another order, as for beams.

        order: which of the sequences are there now; each is repeated
        """
        for _, session in self.list_sessions(cache):
            before = session.told
            if before is None:
                before = torch.arange(session.size)
            some = before if order is None else before[order.cpu()]
            session.told = some.repeat_interleave(repeats)

    def crop(self, cache: Any, length: int) -> None:
        """Remove what was cropped from a cache: guesses that were rejected."""
        for number, session in self.list_sessions(cache):
            if 0 < length < sum(x.shape[1] for x in session.pieces):
                session.crop(length)
            for run in (x for runs in self.runs.values() for x in runs):
                inside = run.session == number and not run.is_cross
                if inside and 0 < length < run.end:
                    run.crop(length)


def has_all_keys(call: CapturedCall) -> bool:
    """Return whether a call has as many queries as keys, so that none was cached."""
    return bool(call.q.shape[2] == call.k.shape[2])
