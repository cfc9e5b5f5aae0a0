"""Track which module of an ablated model is running: a stack of names per thread.

    enter a module ─▶ push its name        leave it, even by an error ─▶ pop it

The editing mode is active only while a module of the model is running, also when it
runs again inside of a backward pass.

Next: intercept.py
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

Visit = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
SILENT = (nn.ModuleList, nn.ModuleDict, nn.Softmax, nn.Dropout)  # never attend
CLOSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class RunningModules(threading.local):
    """The modules that are running in this thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.on = 0  # how often the mode was entered in this thread
        self.held = False  # a function that is edited as a whole is running

    @property
    def name(self) -> str:
        """The innermost module."""
        return self.stack[-1] if self.stack else ""

    @contextmanager
    def inside(self, name: str, mode: Any) -> Iterator[None]:
        """Push a module's name while the `with` lasts, with the mode active."""
        with nullcontext() if self.stack else mode:
            self.stack.append(name)
            try:
                yield
            finally:
                self.stack.pop()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Edit nothing while the `with` lasts."""
        before, self.held = self.held, True
        try:
            yield
        finally:
            self.held = before


class AblationHooks:
    """The hooks that track which module of a model is running."""

    def __init__(
        self, model: nn.Module, mode: Any, here: RunningModules, visit: Visit
    ) -> None:
        self.model, self.mode, self.here = model, mode, here
        self.visit = visit  # called for every module that is entered
        self.handles: list[Any] = []

    def attach(self) -> None:
        """Hook every module."""
        closed: list[str] = []
        for name, module in self.model.named_modules():
            if isinstance(module, SILENT) or name.startswith(tuple(closed)):
                continue
            if isinstance(module, CLOSED):  # hooks would change how torch runs it
                closed.append(f"{name}." if name else "")
                continue
            enter, leave = self.make_enter(name), self.make_leave(name)
            self.handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave, always_call=True),
            ]

    def make_enter(self, name: str) -> Callable[..., None]:
        """Return the hook that runs before a module."""

        def enter(_module: nn.Module, args: Any, named: Any) -> None:
            self.visit(name, args, named)
            if not self.here.stack:
                self.mode.__enter__()
                self.here.on += 1
            self.here.stack.append(name)

        return enter

    def make_leave(self, name: str) -> Callable[..., None]:
        """Return the hook that runs after a module, even if it raised."""

        def leave(_module: nn.Module, _args: Any, _out: Any) -> None:
            if self.here.stack and self.here.stack[-1] == name:
                self.here.stack.pop()
                if not self.here.stack and self.here.on:
                    self.mode.__exit__(None, None, None)
                    self.here.on -= 1

        return leave

    def detach(self) -> None:
        """Remove all hooks, and reset what an interrupt left behind."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.here.stack.clear()
        while self.here.on:
            self.mode.__exit__(None, None, None)
            self.here.on -= 1
