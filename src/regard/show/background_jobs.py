"""Background jobs, and an LRU cache of results.

    jobs.ask(key, work, urgency) -> Future      one thread, the most urgent first
    kept.put(key, thing, size)                  the latest, within a byte limit

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
    """The most recently used things up to a limit in bytes; at least one."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size, self.lock = limit, 0, threading.Lock()
        self.things: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable) -> Any:
        """Return a thing and mark it as recently used; None if it is missing."""
        with self.lock:
            if key not in self.things:
                return None
            self.things.move_to_end(key)
            return self.things[key][0]

    def put(self, key: Hashable, thing: Any, size: int) -> None:
        """Store a thing and evict the least recently used ones over the limit."""
        with self.lock:
            self.size += size - self.things.pop(key, (None, 0))[1]
            self.things[key] = thing, size
            while self.size > self.limit and len(self.things) > 1:
                self.size -= self.things.popitem(last=False)[1][1]


class Jobs:
    """A priority queue with one worker thread; it never runs a key twice at once."""

    def __init__(self, name: str) -> None:
        self.queue: PriorityQueue[tuple[float, int, Any]] = PriorityQueue()
        self.open: dict[Hashable, Future[Any]] = {}
        self.lock, self.closed = threading.Lock(), threading.Event()
        self.serial = itertools.count()
        self.thread = threading.Thread(target=self.run, name=name, daemon=True)

    def ask(
        self, key: Hashable, work: Callable[[], Any], urgency: float
    ) -> Future[Any]:
        """Return the future of a job; asking again queues it at that urgency, too."""
        with self.lock:
            if self.closed.is_set():
                raise CancelledError
            if self.thread.ident is None:
                self.thread.start()
                atexit.register(self.close)  # torch must not be interrupted
            future = self.open.setdefault(key, Future())
            if not future.running():
                self.queue.put((urgency, next(self.serial), (key, future, work)))
            return future

    def run(self) -> None:
        """Run jobs until the queue is closed."""
        while True:
            _, _, job = self.queue.get()
            if job is None or self.closed.is_set():
                return
            key, future, work = job
            if future.running() or future.done():  # it was queued twice
                continue
            if not future.set_running_or_notify_cancel():
                continue
            try:
                found, wrong = work(), None
            except BaseException as error:  # noqa: BLE001 (passed to the caller)
                found, wrong = None, error
            with self.lock:
                del self.open[key]
            if wrong is None:
                future.set_result(found)
            else:
                future.set_exception(wrong)

    def close(self) -> None:
        """Stop the thread and cancel the jobs that have not started."""
        with self.lock:
            self.closed.set()
            self.queue.put((-math.inf, next(self.serial), None))
            waiting = [x for x in self.open.values() if not x.running()]
        for future in waiting:
            future.cancel()
        if self.thread.ident is not None:
            self.thread.join()
            atexit.unregister(self.close)
