"""What the runners need of a plan: its worker, and shards of items that may fail.

    worker = open_worker(plan, threads=1)     loads the model
    worker(shard, skip=digests)               returns the result as bytes

An atlas (settings.py) and a search (search_settings.py) are plans. Their items are
documents, and pairs of prompts.

Next: supervisor.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from typing import Any, ClassVar, Protocol


class WorkItem(Protocol):
    """An item of a shard."""

    @property
    def digest(self) -> str:
        """Identifies the item in its shard."""


class WorkShard(Protocol):
    """The items that a worker processes at a time: a dataclass that can be pickled."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def number(self) -> int:
        """Identifies the shard, from 0."""

    @property
    def places(self) -> Sequence[WorkItem]:
        """The items."""


class WorkPlan(Protocol):
    """Settings that can be pickled, and the name of the class that runs them."""

    worker: ClassVar[str]  # module:class, so that a plan is read without torch
    item: ClassVar[str]  # what messages call an item

    @property
    def device(self) -> str:
        """Where the model runs."""

    @property
    def batch(self) -> int:
        """How many rows run at once, for messages."""


class ShardWorker(Protocol):
    """A loaded model that runs any shard."""

    def __call__(self, shard: Any, *, skip: Collection[str] = ()) -> bytes:
        """Return the result of a shard; skip: digests of items to set aside."""


def open_worker(plan: WorkPlan, *, threads: int | None) -> ShardWorker:
    """Load the model of a plan, and return its worker.

    threads: of torch; None: as they are
    """
    module, _, name = plan.worker.partition(":")
    kind: Callable[..., ShardWorker] = getattr(import_module(module), name)
    return kind(plan, threads=threads)
