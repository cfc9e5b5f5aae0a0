"""How a case of another library is written: a class, its options and its inputs.

    Recipe("vit_pytorch.cait:CaiT", {"depth": 2}, image)

Libraries are imported when a model is built, not when cases are listed. What needs more
than a constructor and a call is a function that returns (model, run).
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from wild.case import Case
from wild.stir import Run, seeded

Maker = Callable[[], tuple[nn.Module, Run]]


@dataclass(frozen=True)
class Recipe:
    """A model that its class makes and that one call runs."""

    path: str  # "package.module:Class"
    options: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[], tuple | dict] = tuple
    call: str = ""  # a method other than forward

    def __call__(self) -> tuple[nn.Module, Run]:
        """Make the model and its run."""
        return load(self.path)(**self.options), feed(self.inputs(), self.call)


def load(path: str) -> Any:
    """Return what "package.module:name" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def feed(inputs: tuple | dict, call: str = "") -> Run:
    """Return a run that calls a model with these inputs."""

    def run(model: nn.Module) -> Any:
        method = getattr(model, call) if call else model
        return method(**inputs) if isinstance(inputs, dict) else method(*inputs)

    return run


def list_recipes(
    library: str, recipes: dict[str, Maker], *, needs: Iterable[str]
) -> Iterable[Case]:
    """Yield the cases of one library."""
    for name, make in recipes.items():
        yield Case(name, library, partial(seeded, make), needs=tuple(needs))


# --- inputs, drawn when a model is built ----------------------------------------------


def words(n: int = 16, *, batch: int = 2, vocabulary: int = 64) -> tuple:
    """Draw tokens (B, N)."""
    return (torch.randint(0, vocabulary, (batch, n)),)


def image(size: int = 32, *, batch: int = 2) -> tuple:
    """Draw images (B, 3, size, size)."""
    return (torch.randn(batch, 3, size, size),)


def vectors(n: int = 16, width: int = 32, *, batch: int = 2) -> tuple:
    """Draw a sequence of vectors (B, N, width)."""
    return (torch.randn(batch, n, width),)
