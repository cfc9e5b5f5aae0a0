"""The engines that can be watched: what `regard.watch` accepts besides a torch model.

    Engine(name, fits, capture)
    capture(engine, layers, keep)     a `with`, after which `.recording` is complete

An engine batches requests, keeps their keys in a cache of its own, and may run in other
processes. Its adapter reads what its attention layers were given, request by request.
Nothing is imported before an engine is used.

Next: request_rows.py
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from regard.recording.record import Recording
from regard.run.chosen_layers import is_chosen, read_layers


class Captured(Protocol):
    """What a `with` of an engine yields."""

    recording: Recording  # once the `with` is left


class Capture(Protocol):
    """A function that watches an engine."""

    def __call__(
        self, model: Any, *, layers: Collection[int | str] | None, keep: str
    ) -> AbstractContextManager[Captured]:
        """Return a `with` in which the engine is watched."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How the models of one library are recognized and watched."""

    name: str
    library: str  # the package that defines its class, and of the adapter's file
    kind: str  # the name of the class

    def fits(self, model: Any) -> bool:
        """Return whether a model is of this engine, without importing it."""
        kinds = (
            (x.__module__.partition(".")[0], x.__name__) for x in type(model).__mro__
        )
        return (self.library, self.kind) in kinds

    @property
    def capture(self) -> Capture:
        """The function that watches it, from the file named after the library."""
        found: Capture = import_module(f"regard.serving.{self.library}").capture
        return found


ENGINES = (
    Engine(name="vLLM", library="vllm", kind="LLM"),
    Engine(name="llama.cpp", library="llama_cpp", kind="Llama"),
)


def match_engine(model: Any) -> Engine | None:
    """Return the engine that a model runs in, None for a model that is none."""
    return next((engine for engine in ENGINES if engine.fits(model)), None)


def choose_layers(names: list[str], layers: Any) -> list[str]:
    """Return the names of the layers to record; raise OptionError for unknown ones."""
    around = {name[:i] for name in names for i, x in enumerate(name) if x == "."}
    chosen = read_layers(layers, [*names, *around])
    return [x for i, x in enumerate(names) if is_chosen(chosen, i, x)]
