"""Replace an attribute of a module or class while a `with` lasts (monkeypatch).

Next: own_work.py
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn

Make = Callable[[Any], Any]
LOCK = threading.RLock()
# the original, the patches, and whether the original is a parent's
PATCHED: dict[tuple[int, str], tuple[Any, list[tuple[bool, Make]], bool]] = {}


@contextmanager
def put(
    owner: Any, name: str, make: Make, *, is_outermost: bool = False
) -> Iterator[None]:
    """Monkeypatch an attribute with `make(value)` while the `with` lasts.

    Several patches may overlap and end in any order: the value is always the original
    with the remaining patches applied. Without any, it is the original itself. A patch
    that edits a call is outermost, so that those that hear it hear it as edited.
    """
    key, entry = (id(owner), name), (is_outermost, make)
    with LOCK:
        inherited = name not in vars(owner)
        value = getattr(owner, name) if inherited else vars(owner)[name]
        original, makers, inherited = PATCHED.setdefault(key, (value, [], inherited))
        makers.append(entry)
        setattr(owner, name, compose(original, makers))
    try:
        yield
    finally:
        with LOCK:
            makers.remove(entry)
            setattr(owner, name, compose(original, makers))
            if not makers:
                del PATCHED[key]
                if inherited:
                    delattr(owner, name)


@contextmanager
def put_back(owner: Any, name: str) -> Iterator[None]:
    """Put the original back for the duration of the block: a mode compares with it."""
    with LOCK:
        original, makers, inherited = PATCHED[id(owner), name]
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    try:
        yield
    finally:
        with LOCK:
            setattr(owner, name, compose(original, makers))


def compose(original: Any, makers: Sequence[tuple[bool, Make]]) -> Any:
    """Return the original with all patches applied."""
    value = original
    for _, make in sorted(makers, key=lambda entry: entry[0]):
        value = make(value)
    return value


def list_files(model: nn.Module) -> list[ModuleType]:
    """Return the Python files that define the classes of a model."""
    names = sorted({type(module).__module__ for module in model.modules()})
    return [sys.modules[name] for name in names if name in sys.modules]
