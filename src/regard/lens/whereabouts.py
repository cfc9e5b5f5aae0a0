"""Track which module is running: a stack of names per thread, maintained by hooks.

    enter a module ─▶ push its name        leave it, even by an error ─▶ pop it

The intercepting mode is active only while a module of the model is running. After the
first pass only the modules that attended ("spoke"), and those named attention, keep
their hooks: a decoding step is short, and hooks on hundreds of modules would slow it
down. An ablation does not track which modules attended, so it keeps all hooks; it also
visits forward passes inside a backward pass.

Next: intercept.py
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

Visit = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
SILENT = (nn.ModuleList, nn.ModuleDict, nn.Softmax, nn.Dropout)  # never attend
CLOSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class Whereabouts(threading.local):
    """The modules that are running in this thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.on = 0  # how often the mode was entered in this thread
        self.held = False  # an outer interception reports this call
        self.shared: tuple[Any, Any] | None = None  # k and v before they are repeated
        self.closed = False  # inside a module that runs without modes
        self.shadow = False  # such a module is run again, only to be recorded

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


class Hooks:
    """The hooks that track which module of a model is running."""

    def __init__(
        self, model: nn.Module, mode: Any, here: Whereabouts, visit: Visit | None = None
    ) -> None:
        self.model, self.mode, self.here = model, mode, here
        self.visit = visit  # called for every module that is entered
        self.handles: dict[str, list[Any]] = {}
        self.spoke: dict[str, str] = {}  # module: door
        self.narrow: set[str] = set()  # modules whose door activates the mode itself
        self.passes = self.running = 0  # done, and now, in all threads
        self.over: Callable[[], None] | None = None
        self.lock = threading.Lock()

    def attach(
        self, begin: Callable[..., None], over: Callable[[], None] | None = None
    ) -> None:
        """Hook every module; call `begin` before, and `over` after, each pass."""
        self.over = over
        closed: list[str] = []
        for name, module in self.model.named_modules():
            if isinstance(module, SILENT) or name.startswith(tuple(closed)):
                continue
            if isinstance(module, CLOSED):  # hooks would change how torch runs it
                closed.append(f"{name}." if name else "")
                continue
            self.handles[name] = [
                module.register_forward_pre_hook(
                    self.make_enter(name), with_kwargs=self.visit is not None
                ),
                module.register_forward_hook(self.make_leave(name), always_call=True),
            ]
        if isinstance(self.model, CLOSED):
            return
        self.handles["(pass)"] = [
            self.model.register_forward_pre_hook(
                self.make_begin(begin), with_kwargs=True
            ),
            self.model.register_forward_hook(self.end, always_call=True),
        ]

    def make_begin(self, begin: Callable[..., None]) -> Callable[..., None]:
        """Return the hook that runs before a pass of the whole model."""

        def enter(module: nn.Module, args: Any, named: Any) -> None:
            if not is_recomputing():
                with self.lock:
                    self.running += 1
            begin(module, args, named)

        return enter

    def make_enter(self, name: str) -> Callable[..., None]:
        """Return the hook that runs before a module."""

        def enter(_module: nn.Module, args: Any, named: Any = None) -> None:
            if self.visit is not None:
                self.visit(name, args, named)
            elif is_recomputing():
                return
            if not self.here.stack and name not in self.narrow:
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

    def end(self, _module: nn.Module, _args: Any, out: Any) -> None:
        """Count a finished pass of the whole model."""
        if is_recomputing():
            return
        if self.over is not None:
            self.over()
        with self.lock:
            self.running -= 1
            if self.running:  # another thread would miss its hooks
                return
            if not self.passes and out is not None and self.spoke:
                self.thin()
            self.passes += 1

    def thin(self) -> None:
        """Keep only the hooks of modules that attended, or are named attention."""
        names = dict(self.model.named_modules())
        doors = self.spoke.items()
        self.narrow = {name for name, door in doors if door.startswith("transformers")}
        for name in [n for n in self.handles if n != "(pass)"]:
            words = (name.rpartition(".")[2] + type(names[name]).__name__).lower()
            if name not in self.spoke and "att" not in words:
                for handle in self.handles.pop(name):
                    handle.remove()

    def detach(self) -> None:
        """Remove all hooks, and reset what an interrupt left behind."""
        for handles in self.handles.values():
            for handle in handles:
                handle.remove()
        self.handles.clear()
        self.here.stack.clear()
        while self.here.on:
            self.mode.__exit__(None, None, None)
            self.here.on -= 1


def is_recomputing() -> bool:
    """Return whether this is a forward pass inside a backward pass (checkpointing)."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001
