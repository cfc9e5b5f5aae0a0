"""The forward pass that runs in a thread: what it was given, and its layers.

    state     event                            next
    IDLE      a pass begins                    BEGUN     what it was given is kept
    BEGUN     a model inside of it is called   BEGUN     so is what only it was given
    BEGUN     a layer attends                  RUNNING   layers are numbered
    RUNNING   a layer attends                  RUNNING
    RUNNING   a model inside of it is called   RUNNING   nothing: it is a part
    RUNNING   it is called again               BEGUN     a pass in the pass begins
    any       the pass ends                    IDLE

A call of a part of the model alone, as of an encoder, is not a pass: the state is IDLE.

Next: given.py
"""

from __future__ import annotations

import enum
from typing import Any

from torch import Tensor

from regard.run.given import Given


class State(enum.Enum):
    """Where a thread is, between and in passes."""

    IDLE = "no pass is running"
    BEGUN = "a pass began, and no layer has attended"
    RUNNING = "a layer has attended"


class Pass:
    """The pass of one thread, or the last one."""

    def __init__(self) -> None:
        self.depth = 0  # whole models that are running, one inside of the other
        self.given = Given()
        self.kept: Tensor | None = None  # the padding of earlier passes
        self.numbers: dict[str, int] = {}  # attention calls of modules in this pass
        self.sizes: dict[str, tuple[int, ...]] = {}  # of a module's first array
        self.slots: dict[str, Any] = {}  # of our own caches, by module
        self.called: set[str] = set()  # the models that this pass has called
        self.outer: list[tuple[int, Given, dict[str, int]]] = []  # of passes in it

    @property
    def state(self) -> State:
        """Where the thread is."""
        if not self.depth:
            return State.IDLE
        return State.RUNNING if self.numbers else State.BEGUN

    @property
    def is_paged(self) -> bool:
        """Whether a pass is running whose keys are those of many requests."""
        return bool(self.depth) and self.given.is_paged

    @property
    def valid(self) -> Tensor | None:
        """Which tokens are not padding, (B, N).

        A later step of a generation may have no mask, and keeps that of the first.
        """
        known = self.given.valid
        return self.kept if known is None and self.given.before else known

    def begin(self, name: str, given: Given) -> bool:
        """Begin a pass, or add what a model inside was given; return whether it did."""
        before, self.depth = self.state, self.depth + 1
        is_inner = before is State.RUNNING and self.is_inner(name, given)
        if before is State.IDLE:
            self.called.clear()
            self.begin_part(given)
        elif before is State.BEGUN:
            self.given = self.given.complete(given)
        elif is_inner:
            self.outer.append((self.depth, self.given, {**self.numbers}))
            self.begin_part(given)
        self.called.add(name)
        return before is not State.RUNNING or is_inner

    def is_inner(self, name: str, given: Given) -> bool:
        """Return whether a model has a pass of its own inside of the pass that runs.

        It was called before in the pass, or only it knows of padding.
        """
        knows = self.given.valid is None and given.valid is not None
        return name in self.called or knows

    def begin_part(self, given: Given) -> None:
        """Begin a call of a part of the model, alone."""
        self.kept, self.given = self.valid, given
        self.numbers.clear()

    def end(self) -> bool:
        """End a pass, or a model inside of it; return whether a pass ended."""
        inner = bool(self.outer) and self.outer[-1][0] == self.depth
        if inner:
            _, self.given, self.numbers = self.outer.pop()
        self.depth = max(0, self.depth - 1)
        if not self.depth:
            self.numbers.clear()
            self.outer.clear()
        return inner or not self.depth

    def name_layer(self, module: str) -> str:
        """Return the name of the next attention of a module in this pass."""
        number = self.numbers[module] = self.numbers.get(module, 0) + 1
        return module if number == 1 else f"{module}#{number}"
