"""The forward passes of one thread, and the sessions that they form.

A session is a group of passes that continue each other: the steps of a generation. The
first layer that attends in a pass decides whether the pass continues the session.

    state     event                           next      what is done
    IDLE      a pass begins                   BEGUN     tokens and padding are held
    IDLE      a layer attends: an encoder     IDLE      its run belongs to the next
              that runs before the model                session
    BEGUN     a layer continues its run       RUNNING   tokens are added to the session,
                                                        reordered or cropped with it
    BEGUN     a layer begins a run            RUNNING   a new session begins
    RUNNING   a layer attends                 RUNNING   its run belongs to the session
    any       the pass ends                   IDLE

Next: watch.py
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.lens.assemble import Continued, LayerRun, extend
from regard.lens.captured_call import CapturedCall
from regard.lens.mask_store import MaskStore


class State(enum.Enum):
    """Where a thread is, between and in passes."""

    IDLE = "no pass is running"
    BEGUN = "a pass began, and no layer has attended"
    RUNNING = "a layer has attended"


@dataclass
class Given:
    """What a pass was given."""

    tokens: Tensor | None = None  # (B, N)
    valid: Tensor | None = None  # (B, N), which tokens are no padding
    cache: Any = None  # a weak reference to the cache of keys
    is_packed: bool = False  # several sequences in one row


@dataclass
class Session:
    """Passes that continue each other."""

    size: int  # sequences
    pieces: list[Tensor] = field(default_factory=list)  # tokens of each pass
    valid: Tensor | None = None
    cache: Any = None

    def add(self, given: Given, how: Continued | None, *, whole: bool) -> None:
        """Add the tokens of a pass."""
        if how is not None and how.order is not None:
            self.pieces = [x.index_select(0, how.order) for x in self.pieces]
        if how is not None and how.cropped is not None:
            self.crop(how.cropped)
        if given.tokens is not None and whole:
            self.pieces.append(given.tokens)
        if given.valid is not None:
            self.valid = given.valid
        self.cache = given.cache or self.cache

    def crop(self, end: int) -> None:
        """Remove tokens from a position on."""
        if self.pieces and {x.shape[0] for x in self.pieces} == {self.size}:
            self.pieces = [torch.cat(self.pieces, 1)[:, :end]]

    def list_tokens(
        self, dropped: set[int]
    ) -> Iterator[tuple[tuple[int, ...], int, list[int]]]:
        """Yield the tokens of each sequence, how many were padding, and which not.

        dropped: the sequences whose records are without their padding
        """
        if {x.shape[0] for x in self.pieces} != {self.size}:  # unknown
            return
        for b, row in enumerate(torch.cat(self.pieces, 1)):
            real = torch.ones(len(row), dtype=torch.bool, device=row.device)
            if self.valid is not None and b < len(self.valid):
                real = extend(self.valid[b], len(row)).to(row.device)
            some = [] if bool(real.all()) else real.int().tolist()
            if b not in dropped:
                real = torch.ones_like(real)
            yield tuple(row[real].tolist()), int((~real).sum()), some


class Passes:
    """What one thread ran: the runs of each layer, and its sessions."""

    def __init__(self) -> None:
        self.state = State.IDLE
        self.given = Given()
        self.runs: dict[str, list[LayerRun]] = {}
        self.sessions: list[Session] = []
        self.how: Continued | None = None  # how the pass continues an earlier one
        self.is_new = False  # the pass does not continue an earlier one
        self.numbers: dict[str, int] = {}  # attention calls of modules in this pass
        self.store = MaskStore()

    def begin(
        self,
        tokens: Tensor | None,
        valid: Tensor | None,
        cache: Any,
        *,
        is_packed: bool = False,
    ) -> None:
        """Begin a pass."""
        try:
            held = None if cache is None else weakref.ref(cache)
        except TypeError:
            held = None
        self.given, self.state = Given(tokens, valid, held, is_packed), State.BEGUN
        self.numbers.clear()
        self.store.begin_pass()

    def end(self) -> None:
        """End a pass."""
        self.state = State.IDLE

    def name_layer(self, module: str) -> str:
        """Return the name of the next attention of a module in this pass."""
        number = self.numbers[module] = self.numbers.get(module, 0) + 1
        return module if number == 1 else f"{module}#{number}"

    def add(self, name: str, call: CapturedCall, *, keep_v: bool) -> LayerRun:
        """Add a call to the last run of its layer, or begin a new one."""
        runs = self.runs.setdefault(name, [])
        last, begun = runs[-1] if runs else None, self.state is State.BEGUN
        if last is not None and last.is_cross and self.is_new and not begun:
            last = None  # the same keys, other queries
        if last is not None and last.is_cross and not begun:
            self.follow(last)
        how = None if last is None else last.continue_with(call)
        if how is None:
            runs.append(LayerRun(name, call, self.store, keep_v=keep_v))
            inside = self.state is State.RUNNING
            runs[-1].session = len(self.sessions) - inside
        if not begun:
            return runs[-1]
        self.state, self.is_new, self.how = State.RUNNING, how is None, how
        if how is None:
            self.sessions.append(Session(call.q.shape[0]))
        whole = runs[-1].rows[0].start == 0  # else the tokens before are unknown
        self.sessions[-1].add(self.given, how, whole=whole)
        return runs[-1]

    def follow(self, run: LayerRun) -> None:
        """Do to a run of cross-attention what the first layer of the pass showed."""
        how = self.how
        if self.state is not State.RUNNING or how is None:
            return
        if how.order is not None and len(how.order) == run.batch:
            run.reorder(how.order)
        if how.cropped == 0:
            run.restart()
        elif how.cropped is not None:
            run.crop_rows(how.cropped)

    def crop(self, cache: Any, length: int) -> None:
        """Remove what was cropped from a cache: guesses that were rejected."""
        for number, session in enumerate(self.sessions):
            held = session.cache() if session.cache is not None else None
            given = sum(x.shape[1] for x in session.pieces)
            if held is not cache or not 0 < length < given:
                continue
            session.crop(length)
            for run in (x for runs in self.runs.values() for x in runs):
                if run.session == number and not run.is_cross:
                    run.crop(length)
