"""Work in the background, and what is kept of it.

    jobs.ask(key, work, urgency) -> Future      one thread, the most urgent first
    kept.put(key, thing, bytes)                 the last ones, in so many bytes

Next: zoom_levels.py
"""

from __future__ import annotations

import atexit
import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from queue import PriorityQueue
from typing import Any


class LruCache:
    """What was made last, in so many bytes; at least one thing."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size, self.lock = limit, 0, threading.Lock()
        self.things: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable) -> Any:
        """Return a thing, now the last to be dropped; None if it is not there."""
        with self.lock:
            if key not in self.things:
                return None
            self.things.move_to_end(key)
            return self.things[key][0]

    def put(self, key: Hashable, thing: Any, size: int) -> None:
        """Keep a thing, and drop what was not asked for the longest."""
        with self.lock:
            self.size += size - self.things.pop(key, (None, 0))[1]
            self.things[key] = thing, size
            while self.size > self.limit and len(self.things) > 1:
                self.size -= self.things.popitem(last=False)[1][1]


class Jobs:
    """Work for one thread: the most urgent first, and nothing twice at a time."""

    def __init__(self, name: str) -> None:
        self.queue: PriorityQueue[tuple[float, int, Any]] = PriorityQueue()
        self.open: dict[Hashable, Future[Any]] = {}
        self.lock, self.closed = threading.Lock(), threading.Event()
        self.serial = itertools.count()
        self.thread = threading.Thread(target=self.run, name=name, daemon=True)

    def ask(
        self, key: Hashable, work: Callable[[], Any], urgency: float
    ) -> Future[Any]:
        """Return the future of a piece of work; asked again, it is as urgent."""
        with self.lock:
            if self.closed.is_set():
                raise CancelledError
            if self.thread.ident is None:
                self.thread.start()
                atexit.register(self.close)  # torch does not bear to be cut off
            future = self.open.setdefault(key, Future())
            if not future.running():
                self.queue.put((urgency, next(self.serial), (key, future, work)))
            return future

    def run(self) -> None:
        """Do the work until there will be no more."""
        while True:
            _, _, job = self.queue.get()
            if job is None or self.closed.is_set():
                return
            key, future, work = job
            if future.running() or future.done():  # it was asked for twice
                continue
            if not future.set_running_or_notify_cancel():
                continue
            try:
                found, wrong = work(), None
            except BaseException as error:  # noqa: BLE001 (who asked must hear of it)
                found, wrong = None, error
            with self.lock:
                del self.open[key]
            if wrong is None:
                future.set_result(found)
            else:
                future.set_exception(wrong)

    def close(self) -> None:
        """End the work, and let nobody wait for it."""
        with self.lock:
            self.closed.set()
            self.queue.put((-math.inf, next(self.serial), None))
            waiting = [x for x in self.open.values() if not x.running()]
        for future in waiting:
            future.cancel()
        if self.thread.ident is not None:
            self.thread.join()
            atexit.unregister(self.close)
