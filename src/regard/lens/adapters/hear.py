"""How a watch hears the calls of an adapter.

    the function runs, and the observer hears none of its operators
    the adapter describes the call, and the watch records it
    an error of the adapter becomes the reason why the call was not kept

Next: ../watch.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from regard.lens.adapters.adapter import Adapter
from regard.lens.adapters.registry import patch_places
from regard.lens.captured_call import CapturedCall
from regard.lens.observer import Observer
from regard.run.own_work import COMPUTING, compute

UNCHECKED = "its output was not compared: the adapter gives none"


def patch_adapters(model: nn.Module, watcher: Any) -> AbstractContextManager[None]:
    """Hear the calls of all adapters while the `with` lasts."""
    return patch_places(model, partial(hear_calls, watcher), watcher.fail)


def hear_calls(
    watcher: Any, adapter: Adapter, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that reports its calls to a watcher."""
    if not adapter.can_watch:
        return original

    @wraps(original)
    def stand_in(*args: Any, **named: Any) -> Any:
        here = watcher.here
        deaf = not here.names or here.mode.muted or COMPUTING.on
        if deaf or watcher.run.is_away:
            return original(*args, **named)
        result = run_muted(here.mode, original, args, named)
        here.mode.in_sdpa += 1  # it is heard without the observer
        try:
            with compute(), torch.no_grad():
                report(watcher, adapter, result, args, named)
        except Exception as error:  # noqa: BLE001 (nothing of ours reaches the model)
            watcher.fail(error)
        finally:
            here.mode.in_sdpa -= 1
        return result

    return stand_in


def report(
    watcher: Any,
    adapter: Adapter,
    result: Any,
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> None:
    """Describe a call that has run, and record it, or say why not."""
    module = watcher.here.name
    call: Any = None
    assert adapter.describe is not None
    try:
        call = adapter.describe(result, *args, **named)
    except Exception as error:  # noqa: BLE001
        call = describe_failure(adapter, error)
    if not isinstance(call, CapturedCall):
        if not isinstance(call, str):
            kind = type(call).__name__
            call = describe_failure(adapter, TypeError(f"it described a {kind}"))
        watcher.drop(module, call, attention=True, via=adapter.name)
        return
    note = call.note if adapter.out else "; ".join(filter(None, (call.note, UNCHECKED)))
    watcher.complete(module, replace(call, via=adapter.name, note=note))


def describe_failure(adapter: Adapter, error: Exception) -> str:
    """Return an error of an adapter as a reason."""
    return f"the adapter {adapter.name} failed: {type(error).__name__}: {error}"


def run_muted(
    observer: Observer | None,
    original: Callable[..., Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> Any:
    """Run a call, and let an observer hear none of its operators.

    What was known of the memory of its results is forgotten: it may have been used for
    something else before, and the observer has not heard that it is new.
    """
    if observer is None:
        return original(*args, **named)
    observer.muted += 1
    try:
        result = original(*args, **named)
    finally:
        observer.muted -= 1
    with suppress(Exception):  # a tensor without memory of its own
        for x in find_results(result):
            observer.finder.trace.origins.pop(x.untyped_storage().data_ptr(), None)
    return result


def find_results(result: Any) -> Iterator[Tensor]:
    """Yield the tensors of a result: one, several, or the fields of a dataclass."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for x in result:
            yield from find_results(x)
    elif isinstance(result, Mapping):
        yield from find_results(list(result.values()))
    elif is_dataclass(result):
        yield from find_results([getattr(result, x.name) for x in fields(result)])
