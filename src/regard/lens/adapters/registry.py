"""The adapters: those of the library, and those that are registered from outside.

    with register(adapter):     or register(adapter), for the rest of the process
        with regard.watch(model) as seen:
            model(...)

Next: hear.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from regard.lens.adapters.adapter import Adapter
from regard.lens.adapters.engine import ENGINE
from regard.lens.adapters.flex import FLEX
from regard.lens.adapters.sdpa import SDPA
from regard.lens.adapters.transformers_eager import EAGER
from regard.run.monkeypatch import put

BUILT_IN = (ENGINE, EAGER, SDPA, FLEX)
REGISTERED: list[Adapter] = []


class Registration:
    """A registered adapter; it ends with its `with`, if it is used as one."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter

    def __enter__(self) -> Adapter:
        return self.adapter

    def __exit__(self, *_error: object) -> None:
        REGISTERED.remove(self.adapter)


def register(adapter: Adapter) -> Registration:
    """Use an adapter in every watch and ablation that begins from now on."""
    REGISTERED.append(adapter)
    return Registration(adapter)


def list_adapters() -> tuple[Adapter, ...]:
    """Return all adapters."""
    return (*BUILT_IN, *REGISTERED)


@contextmanager
def patch_places(
    model: nn.Module,
    make: Callable[[Adapter, Any], Any],  # adapter and function -> a stand-in
    fail: Callable[[Exception], None],
    *,
    is_outermost: bool = False,
) -> Iterator[None]:
    """Patch what the adapters find in a model, while the `with` lasts."""
    with ExitStack() as patches:
        for adapter in list_adapters():
            try:
                found = {(id(x), name): (x, name) for x, name in adapter.find(model)}
                for owner, name in found.values():
                    change = partial(make, adapter)
                    patches.enter_context(
                        put(owner, name, change, is_outermost=is_outermost)
                    )
            except Exception as error:  # noqa: BLE001 (the model runs without it)
                fail(error)
        yield
