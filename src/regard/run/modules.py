"""Which module is running, in each thread: a stack of names, kept by hooks.

    enter a module ─▶ push its name         leave it, even by an error ─▶ pop it
    enter a whole model, or a part alone    a pass begins, with what it was given

Each client has a mode (an observer, or the functions of torch that it edits), which is
active from the first module that needs it until that module is left.

Next: passes.py
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial, wraps
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import nn

from regard.run.attention_interface import keep_queries
from regard.run.given import Given, read_given
from regard.run.monkeypatch import put
from regard.run.own_work import (
    compute,
    is_recomputing,
    is_tracing,
    keep_functions,
    remove_mode,
    run_uncompiled,
)
from regard.run.parts import find_models
from regard.run.passes import Pass
from regard.run.suspects import looks_like_attention

PASSED_OVER = (  # they never attend by themselves
    nn.ModuleList,
    nn.ModuleDict,
    nn.Softmax,
    nn.LogSoftmax,
    nn.Dropout,
    nn.Identity,
)
Act = Callable[..., None]
# hooks would change how torch runs them: their `forward` is patched
FAST_PATH = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def find_forward(module: nn.Module) -> set[type]:
    """Return the class that defines the forward of a module, if it is a function."""
    kinds = [x for x in type(module).__mro__ if "forward" in vars(x)]
    return {x for x in kinds[:1] if isinstance(vars(x)["forward"], FunctionType)}


def has_fast_path(module: nn.Module) -> bool:
    """Return whether the forward of a module is one of those."""
    own = getattr(type(module), "forward", None)  # a scripted class has none
    return any(own is vars(x)["forward"] for x in FAST_PATH)


class Client(Protocol):
    """Who follows a model: a watch, or an intervention."""

    follows_backward: bool  # also modules that run again inside of a backward pass

    def make_mode(self) -> Any:
        """Return the mode of a thread: it has __enter__, __exit__ and flush."""

    def enter(self, name: str, args: Any, named: Any) -> bool:
        """Take note of a module that begins; return whether it needs the mode."""

    def choose_hooks(self, module: nn.Module) -> tuple[Act, Act] | None:
        """Return what is done before and after a layer; None: what `Run` does."""

    def begin(self, now: Pass) -> None:
        """Take note of a pass that begins, or of a model inside of one."""

    def end(self, out: Any) -> None:
        """Take note of a pass that ends, and of what it returned (None: an error)."""

    def fail(self, error: Exception) -> None:
        """Take an error of ours: none reaches the model."""


class RunningModules(threading.local):
    """The modules that are running in this thread, innermost last."""

    def __init__(self, make_mode: Callable[[], Any]) -> None:
        self.names: list[str] = []
        self.entered: list[int] = []  # depths at which the mode was entered
        self.make_mode = make_mode
        self.now = Pass()

    @cached_property
    def mode(self) -> Any:
        """The mode of the client."""
        return self.make_mode()

    @property
    def name(self) -> str:
        """The innermost module."""
        return self.names[-1] if self.names else ""

    def push(self, name: str, *, needs_mode: bool) -> None:
        """Enter a module."""
        if needs_mode and not self.entered:
            self.mode.__enter__()
            self.entered.append(len(self.names))
        self.names.append(name)

    def enter_mode(self) -> None:
        """Enter the mode now, until the innermost module is left."""
        if self.names and not self.entered:
            self.mode.__enter__()
            self.entered.append(len(self.names) - 1)

    def pop(self, name: str) -> None:
        """Leave a module, and those inside of it that an error left behind."""
        if name not in self.names:
            return
        while self.names.pop() != name:
            pass
        if self.entered and len(self.names) <= self.entered[-1]:
            self.leave()

    def leave(self) -> None:
        """Leave the mode."""
        self.entered.pop()
        try:
            self.mode.__exit__(None, None, None)
        finally:
            self.mode.flush()

    def reset(self) -> None:
        """Forget what an interrupt left behind."""
        self.names.clear()
        self.now.depth = 0
        while self.entered:
            self.leave()
        if "mode" in vars(self):
            remove_mode(self.mode)
            self.mode.flush()


class Run:
    """A model that is followed for one client."""

    def __init__(self, model: nn.Module, client: Client) -> None:
        self.model, self.client = model, client
        self.here = RunningModules(client.make_mode)
        self.models = find_models(model)
        self.handles: dict[str, list[Any]] = {}  # of hooks, by module
        self.layers: set[str] = set()  # of `handles`, with hooks of the client
        self.is_sparse = False  # some modules are not hooked any more
        self.parts = [*model.modules()]  # when the block was entered
        self.ran: set[str] = set()

    @property
    def is_away(self) -> bool:
        """Whether this thread runs modules that the client does not follow."""
        return is_tracing() or (is_recomputing() and not self.client.follows_backward)

    def hook_modules(self) -> None:
        """Hook every module that is not hooked yet."""
        self.is_sparse = False
        closed: list[str] = []
        for name, module in self.model.named_modules():
            known = name in self.handles or isinstance(module, PASSED_OVER)
            if known or name.startswith(tuple(closed)):
                continue
            if has_fast_path(module):
                closed.append(f"{name}." if name else "")
                continue
            acts = self.client.choose_hooks(module) if name else None
            if acts is not None:
                self.layers.add(name)
            enter, leave = (
                Hook(self, act, name) for act in acts or (self.enter, self.leave)
            )
            try:
                self.handles[name] = [
                    module.register_forward_pre_hook(enter, with_kwargs=True),
                    module.register_forward_hook(leave, always_call=True, prepend=True),
                ]
            except Exception as error:  # noqa: BLE001
                # a scripted part refuses hooks, and counts for the module around it
                if not name or not isinstance(module, torch.jit.ScriptModule):
                    self.client.fail(error)

    def list_new(self) -> list[str]:
        """Return the modules that were added or replaced inside the block."""
        known = {id(x) for x in self.parts}
        return [n for n, part in self.model.named_modules() if id(part) not in known]

    def unhook(self, names: set[str]) -> None:
        """Remove the hooks of some modules; whole models keep theirs."""
        self.is_sparse = True
        for name in names - {*self.models}:
            for handle in self.handles.pop(name, ()):
                handle.remove()

    def detach(self) -> None:
        """Remove all hooks, and reset what an interrupt left behind."""
        for handles in self.handles.values():
            for handle in handles:
                handle.remove()
        self.handles.clear()
        self.here.reset()

    def enter(self, name: str, module: nn.Module, args: Any, named: Any) -> None:
        """Enter a module."""
        whole, here, now = name in self.models, self.here, self.here.now
        alone = not (here.names or now.depth or self.is_sparse)
        if (whole or alone) and not is_recomputing():
            with compute():
                given = read_given(module, args, named)
                if not whole:
                    now.begin_part(given)
                elif now.begin(name, given):
                    self.client.begin(now)
        needs = self.client.enter(name, args, named)
        here.push(name, needs_mode=needs or has_fast_path(module))
        self.ran.add(name)

    def leave(self, name: str, _module: nn.Module, _args: Any, out: Any) -> None:
        """Leave a module; `out` is what it returned, None after an error."""
        self.here.pop(name)
        if name in self.models and not is_recomputing():
            with compute():
                if self.here.now.end():
                    self.client.end(out)

    @contextmanager
    def contain(self) -> Iterator[None]:
        """Give an error of ours to the client."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (nothing of ours reaches the model)
            self.client.fail(error)

    @contextmanager
    def inside_method(self, *, needs_mode: bool) -> Iterator[None]:
        """Follow a method of the model that is called instead of its forward."""
        with self.contain():
            self.here.now.begin_part(Given())  # layers are numbered from the first
            self.here.push("", needs_mode=needs_mode)
        try:
            yield
        finally:
            with self.contain():
                self.here.pop("")

    @contextmanager
    def patch_forwards(self) -> Iterator[None]:
        """Follow modules without hooks, and a forward that is called without them."""
        names: dict[int, str] = {}
        kinds: set[type] = set()
        for name, part in self.model.named_modules():
            fast = has_fast_path(part)
            if fast or not name or looks_like_attention(part):
                names[id(part)] = name
                kinds |= {*FAST_PATH} if fast else find_forward(part)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(original)
            def forward(module: nn.Module, *args: Any, **named: Any) -> Any:
                name = names.get(id(module))
                if name is None or self.is_away:
                    return original(module, *args, **named)
                out, is_hooked = None, self.here.names[-1:] == [name]
                if not is_hooked:
                    with self.contain():
                        self.enter(name, module, args, named)
                try:
                    out = original(module, *args, **named)
                except BaseException as error:  # torch runs hooks after an Exception
                    is_hooked &= isinstance(error, Exception)
                    raise
                finally:
                    if not is_hooked:
                        with self.contain():
                            self.leave(name, module, args, out)
                return out

            return forward

        with ExitStack() as patches:
            for kind in kinds:
                patches.enter_context(put(kind, "forward", make))
            yield


class Hook:
    """A hook of a module, which a copy of the model does not have."""

    def __init__(self, run: Run, act: Act, name: str) -> None:
        self.run, self.act = run, partial(act, name)

    def __call__(self, *given: Any) -> None:
        if self.run.is_away:
            return
        try:
            self.act(*given)
        except Exception as error:  # noqa: BLE001 (nothing of ours reaches the model)
            self.run.client.fail(error)

    def __reduce__(self) -> Any:
        return do_nothing_instead, ()  # for copies, and for files


def do_nothing_instead() -> Callable[..., None]:
    """Return a hook that does nothing."""
    return do_nothing


def do_nothing(*_given: Any) -> None:
    """Do nothing."""


@contextmanager
def follow(run: Run) -> Iterator[None]:
    """Follow a model for a client inside the context manager."""
    with ExitStack() as stack:
        stack.enter_context(keep_functions())
        stack.enter_context(run_uncompiled())
        stack.enter_context(keep_queries())
        stack.enter_context(run.patch_forwards())
        stack.callback(run.detach)
        run.hook_modules()
        yield
