"""What a thread does that is not a forward pass of the model.

    compute           something of ours: no mode observes or edits it
    remove_mode       a mode that an interrupt left on its stack is taken off
    is_recomputing    a forward pass inside a backward pass (checkpointing)
    is_tracing        a compiler or an exporter reads the model
    run_uncompiled    compiled code runs uncompiled, so that its calls can be followed

Next: modules.py
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.overrides import _pop_mode as pop_function
from torch.overrides import _push_mode as push_function
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from regard.run.monkeypatch import put

COMPILER = "torch._dynamo"  # loading it takes as long as loading torch


class Computing(threading.local):
    """Whether this thread computes something of ours (thread-local)."""

    on = False


COMPUTING = Computing()


class compute:  # noqa: N801 (it is used like a function)
    """Compute something of our own, which no mode of anyone observes."""

    def __enter__(self) -> None:
        others = torch._C._len_torch_dispatch_stack()  # noqa: SLF001
        self.modes = _disable_current_modes() if others else nullcontext()
        self.modes.__enter__()
        self.functions = torch._C.DisableTorchFunction()  # noqa: SLF001
        self.functions.__enter__()
        self.before, COMPUTING.on = COMPUTING.on, True

    def __exit__(self, *error: object) -> None:
        COMPUTING.on = self.before
        self.functions.__exit__(*error)
        self.modes.__exit__(*error)


@contextmanager
def keep_functions() -> Iterator[None]:
    """Enable torch's functions again, if an interrupt left them disabled."""
    before, state = COMPUTING.on, torch._C._get_torch_function_state()  # noqa: SLF001
    try:
        yield
    finally:
        COMPUTING.on = before
        torch._C._set_torch_function_state(state)  # noqa: SLF001


def remove_mode(mode: Any) -> None:
    """Take a mode off its stack, if an interrupt left it there."""
    if isinstance(mode, TorchFunctionMode):
        held, pop, push = _get_current_function_mode_stack, pop_function, push_function
    else:
        held, pop, push = _get_current_dispatch_mode_stack, _pop_mode, _push_mode
    above = []
    while any(x is mode for x in held()):
        top = pop()
        if top is not mode:
            above.append(top)
        elif getattr(mode, "old_dispatch_mode_flags", ()):
            push(mode)  # so that it sets torch's flags as they were
            mode.__exit__(None, None, None)
    for x in reversed(above):
        push(x)


def is_recomputing() -> bool:
    """Return whether this is a forward pass inside a backward pass (checkpointing)."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001


def is_tracing() -> bool:
    """Return whether a compiler or an exporter is reading the model."""
    return bool(torch.compiler.is_compiling())


@contextmanager
def run_uncompiled() -> Iterator[None]:
    """Let compiled code run uncompiled, without loading a compiler that nobody uses."""
    if COMPILER in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
        return

    def make(before: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(before)
        def stand_in(*args: Any, **named: Any) -> Any:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            return before(*args, **named)

        return stand_in

    with ExitStack() as stack, put(torch, "compile", make):
        yield
