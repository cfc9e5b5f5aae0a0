"""Which module is running: a stack of names per thread, kept by hooks.

    wide      every module has hooks, and the observer hears a whole pass
    narrow    only modules in which something was heard have hooks, and those that
              never ran. The observer hears them alone, or, where all of their calls go
              through F.scaled_dot_product_attention, only that call.

A pass is wide if it is one of the first two, every 64th, or if a module runs for the
first time or a known one does not attend: a decoding step is short, and hearing each of
its operators would slow it down.

Next: watch.py
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from regard.lens.observer import Observer, compute
from regard.lens.tally import is_inside

PASSED_OVER = (  # they never attend by themselves
    nn.ModuleList,
    nn.ModuleDict,
    nn.Softmax,
    nn.LogSoftmax,
    nn.Dropout,
    nn.Identity,
)
FAST_PATH = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
CROSS = re.compile(r"cross|encoder_attn|EncDec", re.IGNORECASE)
FIRST, AGAIN = 2, 64  # wide passes: the first …, every …th


class ModuleStack(threading.local):
    """The modules that are running in this thread, innermost last."""

    def __init__(self, make: Callable[[], Observer]) -> None:
        self.names: list[str] = []
        self.entered: list[int] = []  # depths at which the observer was entered
        self.observer = make()
        self.passes = 0  # of whole models, one in another
        self.in_sdpa = 0  # inside of a patched function, heard in narrow passes too

    @property
    def name(self) -> str:
        """The innermost module."""
        return self.names[-1] if self.names else ""

    def push(self, name: str, *, hear: bool) -> None:
        """Enter a module."""
        if hear and not self.entered:
            self.observer.__enter__()
            self.entered.append(len(self.names))
        self.names.append(name)

    def pop(self, name: str) -> None:
        """Leave a module, and those inside of it that an error left behind."""
        if name not in self.names:
            return
        while self.names.pop() != name:
            pass
        if self.entered and len(self.names) <= self.entered[-1]:
            self.leave()

    def leave(self) -> None:
        """Stop hearing."""
        self.entered.pop()
        try:
            self.observer.__exit__(None, None, None)
        finally:
            self.observer.flush()

    @contextmanager
    def inside(self, name: str, *, hear: bool) -> Iterator[None]:
        """Push a module's name while the `with` lasts."""
        fail = self.observer.finder.listener.fail
        try:
            self.push(name, hear=hear)
        except Exception as error:  # noqa: BLE001 (nothing of ours reaches the model)
            fail(error)
        try:
            yield
        finally:
            try:
                self.pop(name)
            except Exception as error:  # noqa: BLE001
                fail(error)

    def reset(self) -> None:
        """Forget what an interrupt left behind."""
        self.names.clear()
        self.passes = 0
        while self.entered:
            self.leave()


def is_recomputing() -> bool:
    """Return whether this is a forward pass inside a backward pass (checkpointing)."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001


def is_tracing() -> bool:
    """Return whether a compiler or an exporter is reading the model."""
    return bool(torch.compiler.is_compiling())


def is_decoder(model: nn.Module, name: str) -> bool:
    """Return whether a layer is in the decoder of an encoder-decoder model."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "is_encoder_decoder", False)) and "decoder" in name


def find_module(model: nn.Module, name: str) -> nn.Module:
    """Return a module by its name, also of a scripted model."""
    return dict(model.named_modules())[name]


def is_cross(model: nn.Module, name: str) -> bool:
    """Return whether a layer is cross-attention, judged by its name."""
    parent, _, last = name.partition("#")[0].rpartition(".")
    if last == "multihead_attn":  # of torch's decoder, beside its self-attention
        return getattr(find_module(model, parent), "self_attn", None) is not None
    return CROSS.search(name) is not None


def find_towers(model: nn.Module) -> tuple[str, ...]:
    """Return how the names of layers begin that read pictures or sounds, not text."""
    return tuple(
        f"{name}."
        for name, part in model.named_modules()
        if name and getattr(part, "main_input_name", "input_ids") != "input_ids"
    )


def find_models(model: nn.Module) -> tuple[str, ...]:
    """Return the names of whole models: the model, and those that a wrapper calls.

    Their arguments are a cache and a mask, which the wrapper may not have.
    """
    parts = dict(model.named_modules())
    told = [x for x, part in parts.items() if getattr(part, "config", None) is not None]
    outer = [x for x in told if not any(x != y and is_inside(x, y) for y in told)]
    able = [x for x, part in parts.items() if callable(getattr(part, "generate", None))]
    return tuple(dict.fromkeys(["", *outer, *able]))


class Hook:
    """A hook of a module, which a copy of the model does not have."""

    def __init__(self, hooks: Hooks, act: Callable[[str], None], name: str) -> None:
        self.hooks, self.act, self.name = hooks, act, name

    def __call__(self, *_given: Any) -> None:
        if is_recomputing() or is_tracing():
            return
        try:
            self.act(self.name)
        except Exception as error:  # noqa: BLE001 (nothing of ours reaches the model)
            self.hooks.fail(error)

    def __reduce__(self) -> Any:
        return do_nothing_instead, ()  # for copies, and for files


class PassHook:
    """A hook of a whole model, which a copy of the model does not have."""

    def __init__(self, hooks: Hooks, act: Callable[..., None]) -> None:
        self.hooks, self.act = hooks, act

    def __call__(self, *given: Any) -> None:
        if is_recomputing() or is_tracing():
            return
        try:
            with compute():
                self.act(*given)
        except Exception as error:  # noqa: BLE001 (nothing of ours reaches the model)
            self.hooks.fail(error)

    def __reduce__(self) -> Any:
        return do_nothing_instead, ()


def do_nothing_instead() -> Callable[..., None]:
    """Return a hook that does nothing."""
    return do_nothing


def do_nothing(*_given: Any) -> None:
    """Do nothing."""


class Hooks:
    """The hooks that track which module of a model is running."""

    def __init__(
        self,
        model: nn.Module,
        stack: ModuleStack,
        fail: Callable[[Exception], None],
    ) -> None:
        self.model, self.stack, self.fail = model, stack, fail
        self.handles: dict[str, list[Any]] = {}
        self.ran: set[str] = set()
        self.heard: dict[str, bool] = {}  # modules; whether only F.sdpa was called
        self.attended: dict[str, int] = {}  # calls of modules in this pass
        self.wide = True
        self.passes = self.running = 0  # done, and now, in all threads
        self.lock = threading.RLock()
        self.begin: Callable[..., None] | None = None
        self.over: Callable[[Any], None] | None = None

    def attach(self, begin: Callable[..., None], over: Callable[[Any], None]) -> None:
        """Hook every module; call `begin` before, and `over` after, each pass."""
        self.begin, self.over = begin, over
        self.hook_modules()
        for name in find_models(self.model):
            module = find_module(self.model, name)
            if isinstance(module, FAST_PATH):
                continue
            try:
                self.handles[f"(pass) {name}"] = [
                    module.register_forward_pre_hook(
                        PassHook(self, self.enter_pass), with_kwargs=True, prepend=True
                    ),
                    module.register_forward_hook(
                        PassHook(self, self.leave_pass), always_call=True
                    ),
                ]
            except Exception as error:  # noqa: BLE001 (a scripted module refuses hooks)
                self.fail(error)

    def hook_modules(self) -> None:
        """Hook every module that is not hooked yet."""
        closed: list[str] = []
        for name, module in self.model.named_modules():
            known = name in self.handles or isinstance(module, PASSED_OVER)
            if known or name.startswith(tuple(closed)):
                continue
            if isinstance(module, FAST_PATH):  # hooks would change how torch runs it
                closed.append(f"{name}." if name else "")
                continue
            try:
                self.handles[name] = [
                    module.register_forward_pre_hook(Hook(self, self.enter, name)),
                    module.register_forward_hook(
                        Hook(self, self.leave, name), always_call=True, prepend=True
                    ),
                ]
            except Exception as error:  # noqa: BLE001 (a scripted module refuses hooks)
                self.fail(error)

    def enter_pass(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a pass of the whole model, or of a model in a wrapper."""
        self.stack.passes += 1
        if self.stack.passes == 1:
            with self.lock:
                self.running += 1
        assert self.begin is not None
        self.begin(module, args, kwargs)

    def leave_pass(self, _module: nn.Module, _args: Any, out: Any) -> None:
        """End a pass of the whole model."""
        self.stack.passes = max(0, self.stack.passes - 1)
        if self.stack.passes:
            return
        assert self.over is not None
        self.over(out)
        with self.lock:
            self.running = max(0, self.running - 1)
            if not self.running:
                self.plan(finished=out is not None)

    def plan(self, *, finished: bool) -> None:
        """Choose how the next pass is heard."""
        silent = any(name in self.heard and not n for name, n in self.attended.items())
        self.attended.clear()
        if finished:
            self.passes += 1
        early = self.passes < FIRST or self.passes % AGAIN == 0
        wide = not finished or silent or early or not self.heard
        if wide and not self.wide:
            self.hook_modules()
        elif not wide:
            self.unhook_silent()
        self.wide = wide

    def unhook_silent(self) -> None:
        """Remove the hooks of modules that ran, and in which nothing was heard."""
        for name in self.ran - self.heard.keys():
            for handle in self.handles.pop(name, ()):
                handle.remove()

    def enter(self, name: str) -> None:
        """Enter a module."""
        self.ran.add(name)
        self.attended.setdefault(name, 0)
        hear = self.wide or not self.heard.get(name, False)
        self.stack.push(name, hear=hear)

    def leave(self, name: str) -> None:
        """Leave a module."""
        self.stack.pop(name)

    def note(self, name: str, *, only_sdpa: bool) -> None:
        """Note that something was heard in a module."""
        self.attended[name] = self.attended.get(name, 0) + 1
        self.heard[name] = only_sdpa and self.heard.get(name, True)

    def detach(self) -> None:
        """Remove all hooks, and reset what an interrupt left behind."""
        for handles in self.handles.values():
            for handle in handles:
                handle.remove()
        self.handles.clear()
        self.stack.reset()
