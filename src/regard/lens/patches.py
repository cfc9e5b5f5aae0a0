"""What a watch patches: torch's attention function, its fast paths, methods and caches.

Next: adapters/adapter.py
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.nn import functional as F  # noqa: N812

from regard.lens.adapters.hear import patch_adapters
from regard.lens.attention_interface import follow_interface
from regard.lens.captured_call import CapturedCall
from regard.lens.module_stack import (
    FAST_PATH,
    ModuleStack,
    PassHook,
    is_recomputing,
    is_tracing,
)
from regard.lens.monkeypatch import put
from regard.lens.observer import compute

COMPILER = "torch._dynamo"  # loading it takes as long as loading torch
BIAS = "torch.nn.attention.bias"  # loads it
LIBRARIES = ("torch", "transformers", "builtins", "regard", "peft", "diffusers")


class Samples(threading.local):
    """The calls of one vmapped call in this thread, None if none is running."""

    calls: list[CapturedCall] | None = None


@contextmanager
def patch_all(model: nn.Module, watcher: Any) -> Iterator[None]:
    """Patch what operators alone do not show, inside the context manager."""
    with ExitStack() as stack:
        stack.enter_context(run_uncompiled())
        stack.enter_context(follow_interface())
        stack.enter_context(patch_sdpa(watcher))
        stack.enter_context(patch_fast_paths(model, watcher))
        stack.enter_context(patch_adapters(model, watcher))
        stack.enter_context(patch_methods(model, watcher))
        stack.enter_context(patch_caches(watcher))
        yield


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


@contextmanager
def patch_sdpa(watcher: Any) -> Iterator[None]:
    """Hear calls of F.scaled_dot_product_attention where nothing else is heard."""
    stack = watcher.stack

    def make(before: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(before)
        def stand_in(*args: Any, **named: Any) -> Any:
            mask: Any = named.get("attn_mask", args[3] if len(args) > 3 else None)
            file = sys.modules.get(BIAS)
            if file is not None and isinstance(mask, file.CausalBias):
                # it compares this function with the one in F
                own = type(mask).__torch_function__
                return own(F.scaled_dot_product_attention, (type(mask),), args, named)
            deaf = not stack.names or stack.observer.muted
            if deaf or is_tracing() or is_recomputing():
                return before(*args, **named)
            given = [x for x in args[:3] if isinstance(x, Tensor)]
            if any(is_batchedtensor(x) for x in given):
                return run_samples(watcher, before, args, named)
            count_if_empty(watcher, given[:2])
            return run_heard(stack, before, args, named)

        return stand_in

    with put(F, "scaled_dot_product_attention", make):
        yield


def count_if_empty(watcher: Any, arrays: Sequence[Tensor]) -> None:
    """Count a call for which torch runs no operator."""
    try:
        with compute():
            if not all(x.numel() for x in arrays):
                watcher.count_empty(watcher.stack.name)
    except Exception as error:  # noqa: BLE001 (nothing of ours reaches the model)
        watcher.fail(error)


def run_heard(
    stack: ModuleStack, before: Callable[..., Any], args: Any, named: Any
) -> Any:
    """Run a call, and hear its operators even if those around it are not heard."""
    stack.in_sdpa += 1
    narrow = not stack.entered
    if narrow:
        stack.observer.finder.narrow = True
        stack.observer.__enter__()
    try:
        return before(*args, **named)
    finally:
        stack.in_sdpa -= 1
        if narrow:
            stack.observer.__exit__(None, None, None)
            stack.observer.flush()
            stack.observer.finder.narrow = False


def run_samples(watcher: Any, before: Callable[..., Any], args: Any, named: Any) -> Any:
    """Run a call under vmap: torch runs it once per sample, which is one call."""
    module = watcher.stack.name
    outer, watcher.samples.calls = watcher.samples.calls, []
    try:
        return before(*args, **named)
    finally:
        calls, watcher.samples.calls = watcher.samples.calls, outer
        try:
            with compute():
                watcher.complete_samples(module, calls)
        except Exception as error:  # noqa: BLE001 (nothing of ours reaches the model)
            watcher.fail(error)


@contextmanager
def patch_fast_paths(model: nn.Module, watcher: Any) -> Iterator[None]:
    """Name the torch modules that run differently when they have hooks."""
    stack, hooks = watcher.stack, watcher.hooks
    begin, end = (PassHook(hooks, x) for x in (hooks.enter_pass, hooks.leave_pass))
    names = {
        id(module): name
        for name, module in model.named_modules()
        if isinstance(module, FAST_PATH)
    }

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def forward(module: nn.Module, *args: Any, **named: Any) -> Any:
            name = names.get(id(module))
            if name is None or is_tracing() or is_recomputing():
                return original(module, *args, **named)
            if not name:  # the whole model, which has no hooks
                begin(module, args, named)
            out = None
            try:
                with stack.inside(name, hear=True):
                    out = original(module, *args, **named)
                return out
            finally:
                if not name:
                    end(module, args, out)

        return forward

    with ExitStack() as patches:
        for kind in FAST_PATH if names else ():
            patches.enter_context(put(kind, "forward", make))
        yield


@contextmanager
def patch_methods(model: nn.Module, watcher: Any) -> Iterator[None]:
    """Hear methods of a model's own class that are called instead of its forward."""
    stack = watcher.stack

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def method(self: Any, *args: Any, **named: Any) -> Any:
            if self is not model or stack.names or is_tracing() or is_recomputing():
                return original(self, *args, **named)
            watcher.hooks.ran.add("")
            watcher.mine.method_ran = False
            try:
                with stack.inside("", hear=True):
                    return original(self, *args, **named)
            finally:
                watcher.mine.method_ran = None

        return method

    with ExitStack() as patches:
        for kind in type(model).__mro__:
            if kind.__module__.partition(".")[0] in LIBRARIES:
                continue
            for name, value in list(vars(kind).items()):
                if (
                    isinstance(value, FunctionType)
                    and not name.startswith("_")
                    and name != "forward"
                ):
                    patches.enter_context(put(kind, name, make))
        yield


@contextmanager
def patch_caches(watcher: Any) -> Iterator[None]:
    """Hear that tokens of a transformers cache are removed, or sequences reordered."""

    def note_crop(cache: Any, _length: int) -> None:
        watcher.mine.crop(cache, int(cache.get_seq_length()))

    def note_order(cache: Any, order: Tensor) -> None:
        watcher.mine.reorder(cache, order)

    def note_repeats(cache: Any, repeats: int) -> None:
        watcher.mine.reorder(cache, None, repeats=repeats)

    notes = {
        "crop": note_crop,
        "reorder_cache": note_order,
        "batch_select_indices": note_order,
        "batch_repeat_interleave": note_repeats,
    }
    library = sys.modules.get("transformers.cache_utils")
    kinds = (
        [x for x in vars(library).values() if isinstance(x, type)] if library else []
    )
    with ExitStack() as patches:
        for kind in kinds:
            whole = "get_seq_length" in dir(kind) and "update" in dir(kind)
            for name, note in notes.items():
                if whole and isinstance(vars(kind).get(name), FunctionType):
                    make = partial(watch_method, watcher=watcher, note=note)
                    patches.enter_context(put(kind, name, make))
        yield


def watch_method(
    original: Callable[..., Any], watcher: Any, note: Callable[..., None]
) -> Callable[..., Any]:
    """Return a method of a cache that is noted after it has run."""

    @wraps(original)
    def method(cache: Any, *args: Any, **named: Any) -> Any:
        done = original(cache, *args, **named)
        try:
            with compute():
                note(cache, *args, *named.values())
        except Exception as error:  # noqa: BLE001 (nothing of ours reaches the model)
            watcher.fail(error)
        return done

    return method
