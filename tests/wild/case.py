"""One model of the field: how it is built, how it is run, what must be installed.

A module of cases has a function `list_cases() -> Iterable[Case]`, which must be cheap:
it imports nothing of the library, or only its list of names. `build` does the rest.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Run = Callable[[nn.Module], Any]


class NotBuiltError(Exception):
    """Raised by `build`, with why: the model cannot be made here. It is no mistake."""


@dataclass(frozen=True)
class Case:
    """A model to watch.

    name: unique in its library, without spaces: "bert", "vit_tiny_patch16_224"
    library: "transformers", "timm", "x-transformers", …: a row of the table
    build: returns (model, run). The model is in eval mode, with random weights from a
        seed. run(model) returns its output, a tree of tensors; it may be called several
        times and must return the same each time (the judge seeds torch before each
        call, disables gradients and calls nothing else).
    needs: import names that must be installed, else the case is skipped
    """

    name: str
    library: str
    build: Callable[[], tuple[nn.Module, Run]]
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """The import names that are not installed."""
        return tuple(x for x in self.needs if importlib.util.find_spec(x) is None)
