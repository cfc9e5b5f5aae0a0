"""What a watch patches: torch's attention function, its fast paths, methods and caches.

Next: adapters/adapter.py
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from regard.lens.adapters.hear import patch_adapters, run_muted
from regard.lens.captured_call import CapturedCall
from regard.lens.observer import Observer
from regard.run.modules import RunningModules
from regard.run.monkeypatch import put, put_back
from regard.run.own_work import compute

BIAS = "torch.nn.attention.bias"  # loads it
# torch computes them in another way under any mode, and their last bits differ
VALUES = ("svdvals", "eigvals", "eigvalsh", "matrix_norm", "norm", "cond")
LIBRARIES = ("torch", "transformers", "builtins", "peft", "diffusers")


class Samples(threading.local):
    """The calls of one vmapped call in this thread, None if none is running."""

    calls: list[CapturedCall] | None = None


@contextmanager
def patch_all(model: nn.Module, watcher: Any) -> Iterator[None]:
    """Patch what operators alone do not show, inside the context manager."""
    with ExitStack() as stack:
        stack.enter_context(patch_softmax(watcher))
        stack.enter_context(patch_sdpa(watcher))
        stack.enter_context(patch_adapters(model, watcher))
        stack.enter_context(patch_methods(model, watcher))
        stack.enter_context(patch_caches(watcher))
        for name in ("__new__", "_make_subclass"):
            stack.enter_context(put(Tensor, name, make_static))
        for name in VALUES:
            stack.enter_context(put(torch.linalg, name, run_unobserved))
        yield


def run_unobserved(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is run without the observer, if no other mode is there."""

    @wraps(original)
    def run(*args: Any, **named: Any) -> Any:
        modes = _get_current_dispatch_mode_stack()
        if len(modes) != 1 or not isinstance(modes[0], Observer):
            return original(*args, **named)
        with _disable_current_modes():
            return run_muted(modes[0], original, args, named)

    return run


def make_static(original: Callable[..., Any]) -> Any:
    """Return what makes a tensor of a subclass, which torch cannot do under a mode."""
    return staticmethod(run_unobserved(original))


@contextmanager
def patch_softmax(watcher: Any) -> Iterator[None]:
    """Count softmaxes, and observe those that run where nothing attended before."""

    def make(owner: Any, before: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(before)
        def stand_in(*args: Any, **named: Any) -> Any:
            here = watcher.here
            inside = here.name or (here.names and here.now.depth)
            if inside and not (here.mode.is_deaf or watcher.run.is_away):
                with watcher.run.contain():
                    here.mode.called += 1
                    here.enter_mode()
            with show_original(owner, "softmax"):
                return before(*args, **named)

        return stand_in

    with ExitStack() as patches:
        for owner in (Tensor, torch):
            patches.enter_context(put(owner, "softmax", partial(make, owner)))
        yield


def show_original(owner: Any, name: str) -> AbstractContextManager[None]:
    """Put a function back while modes may compare it with what they are called with."""
    modes = torch._C._len_torch_function_stack()  # noqa: SLF001
    return put_back(owner, name) if modes else nullcontext()


@contextmanager
def patch_sdpa(watcher: Any) -> Iterator[None]:
    """Hear calls of F.scaled_dot_product_attention where nothing else is heard."""
    here = watcher.here

    def make(before: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(before)
        def stand_in(*args: Any, **named: Any) -> Any:
            mask: Any = named.get("attn_mask", args[3] if len(args) > 3 else None)
            file = sys.modules.get(BIAS)
            if file is not None and isinstance(mask, file.CausalBias):
                # it compares this function with the one in F
                own = type(mask).__torch_function__
                return own(F.scaled_dot_product_attention, (type(mask),), args, named)
            if not here.names or here.mode.is_deaf or watcher.run.is_away:
                return before(*args, **named)
            given = [x for x in args[:3] if isinstance(x, Tensor)]
            if any(is_batchedtensor(x) for x in given):
                return run_samples(watcher, before, args, named)
            count_call(watcher, given[:2])
            with show_original(F, "scaled_dot_product_attention"):
                return run_heard(here, before, args, named)

        return stand_in

    with put(F, "scaled_dot_product_attention", make):
        yield


def count_call(watcher: Any, arrays: Sequence[Tensor]) -> None:
    """Count a call; torch runs no operator for one without queries or keys."""
    try:
        with compute():
            if all(x.numel() for x in arrays):
                watcher.here.mode.called += 1
            else:
                watcher.count_empty(watcher.here.name)
    except Exception as error:  # noqa: BLE001 (nothing of ours reaches the model)
        watcher.fail(error)


def run_heard(
    here: RunningModules, before: Callable[..., Any], args: Any, named: Any
) -> Any:
    """Run a call, and observe its operators even if those around it are not."""
    observer, narrow = here.mode, not here.entered
    observer.in_sdpa += 1
    if narrow:
        observer.finder.narrow = True
        observer.__enter__()
    try:
        return before(*args, **named)
    finally:
        observer.in_sdpa -= 1
        if narrow:
            observer.__exit__(None, None, None)
            observer.flush()
            observer.finder.narrow = False


def run_samples(watcher: Any, before: Callable[..., Any], args: Any, named: Any) -> Any:
    """Run a call under vmap: torch runs it once per sample, which is one call."""
    module = watcher.here.name
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
def patch_methods(model: nn.Module, watcher: Any) -> Iterator[None]:
    """Hear methods of a model's own class that are called instead of its forward."""
    run = watcher.run
    # only modules attend in our models, so that a generation is not observed as a whole
    is_ours = type(model).__module__.startswith("regard.")

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def method(self: Any, *args: Any, **named: Any) -> Any:
            if self is not model or run.here.names or run.is_away:
                return original(self, *args, **named)
            run.ran.add("")
            watcher.mine.method_ran = False
            try:
                with run.inside_method(needs_mode=not is_ours):
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
