"""What a watch patches: torch's attention function, its fast paths, our engine.

Next: watch.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from regard.definition.attention import Attended
from regard.engine.choose import attend
from regard.lens.huggingface import is_ours, see_engine
from regard.lens.intercept import put
from regard.lens.module_stack import FAST_PATH, ModuleStack, is_recomputing, is_tracing
from regard.lens.observer import compute

LIBRARIES = ("torch", "transformers", "builtins", "regard", "peft", "diffusers")


@contextmanager
def patch_sdpa(watcher: Any) -> Iterator[None]:
    """Hear calls of F.scaled_dot_product_attention where nothing else is heard."""
    stack = watcher.stack

    def make(before: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(before)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            if (
                mask is not None
                and type(mask) is not Tensor
                and hasattr(mask, "_dispatch")
            ):
                # a mask that is a class of its own compares this function with F's
                own = type(mask).__torch_function__
                return own(F.scaled_dot_product_attention, (type(mask),), args, kwargs)
            if not stack.names or is_tracing() or is_recomputing():
                return before(*args, **kwargs)
            with compute():
                if not all(x.numel() for x in args[:2]):
                    watcher.count_empty(stack.name)
            stack.in_sdpa += 1
            narrow = not stack.entered
            if narrow:
                stack.observer.finder.narrow = True
                stack.observer.__enter__()
            try:
                return before(*args, **kwargs)
            finally:
                stack.in_sdpa -= 1
                if narrow:
                    stack.observer.__exit__(None, None, None)
                    stack.observer.flush()
                    stack.observer.finder.narrow = False

        return stand_in

    with put(F, "scaled_dot_product_attention", make):
        yield


@contextmanager
def patch_fast_paths(model: nn.Module, stack: ModuleStack) -> Iterator[None]:
    """Name the torch modules that run differently when they have hooks."""
    names = {
        id(module): name
        for name, module in model.named_modules()
        if isinstance(module, FAST_PATH)
    }

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = names.get(id(module))
            if name is None or is_tracing() or is_recomputing():
                return original(module, *args, **kwargs)
            with stack.inside(name, hear=True):
                return original(module, *args, **kwargs)

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
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self is not model or stack.names or is_tracing() or is_recomputing():
                return original(self, *args, **kwargs)
            watcher.hooks.ran.add("")
            with stack.inside("", hear=True):
                return original(self, *args, **kwargs)

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
    """Hear that tokens are removed from a cache of transformers."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def crop(cache: Any, *args: Any, **kwargs: Any) -> Any:
            done = original(cache, *args, **kwargs)
            try:
                with compute():
                    watcher.mine.crop(cache, int(cache.get_seq_length()))
            except Exception as error:  # noqa: BLE001
                watcher.fail(error)
            return done

        return crop

    library = sys.modules.get("transformers.cache_utils")
    kinds = (
        [x for x in vars(library).values() if isinstance(x, type)] if library else []
    )
    with ExitStack() as patches:
        for kind in kinds:
            whole = "get_seq_length" in dir(kind) and "update" in dir(kind)
            if whole and isinstance(vars(kind).get("crop"), FunctionType):
                patches.enter_context(put(kind, "crop", make))
        yield


@contextmanager
def patch_engine(model: nn.Module, watcher: Any) -> Iterator[None]:
    """Report calls of regard.engine.attend as a whole."""
    with ExitStack() as patches:
        for name in sorted({type(module).__module__ for module in model.modules()}):
            file = sys.modules.get(name)
            if file and is_ours(file):
                patches.enter_context(
                    put(file, "attend", partial(watch_engine, watcher=watcher))
                )
        yield


def watch_engine(original: Callable[..., Any], watcher: Any) -> Callable[..., Any]:
    """Return a `regard.engine.attend` that reports its calls."""

    @wraps(attend)
    def stand_in(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **options: Any
    ) -> Attended:
        stack = watcher.stack
        if not stack.names or is_tracing() or is_recomputing():
            return original(q, k, v, mask, **options)
        stack.observer.muted += 1
        try:
            done = original(q, k, v, mask, **options)
            try:
                call = see_engine(done, (q, k, v), mask, options)
                watcher.complete(stack.name, call)
            except Exception as error:  # noqa: BLE001
                watcher.fail(error)
        finally:
            stack.observer.muted -= 1
        return done

    return stand_in
