"""The number of threads that torch uses for an amount of work.

    with use_threads(work):          one kernel call, or a few
        ...
    with one_thread() as limit:      workers that have one torch thread each
        ...

    threads = 1                               if work < SMALL multiply-adds
            = torch's own                     if work >= LARGE for each of them
            = min(torch's own, free cores)    otherwise

Waking a thread takes longer than a small call. If another process uses a core, each
parallel loop of torch ends when the slower thread does, while the other one spins: a
page of 101 tokens took 54 s with two threads, and 3.7 s with one. In a large call that
wait is short, and two threads get more of a busy machine than one does.

torch.set_num_threads sets the number for the calling thread, and for threads that use
torch for the first time later. Both managers restore it, also after an exception. The
number never exceeds what torch had, and does not change a result by a bit.

Next: arrays.py
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

SMALL = 2**23  # multiply-adds that one thread does in half a millisecond
LARGE = 2**29  # for each thread: longer than a thread waits for a busy core
FRESH = 0.5  # seconds for which a count of the free cores is used
SAMPLES, PAUSE = 3, 0.0005  # a daemon that runs for a moment does not count
PROC, QUOTA = Path("/proc"), Path("/sys/fs/cgroup/cpu.max")

LOCK = threading.Lock()
RUNNING: list[tuple[int, int]] = []  # thread and torch's number before each open block
LATEST = [(-FRESH, 1)]  # when the free cores were counted, and how many there were


def choose_threads(work: float, *, limit: int, free: int) -> int:
    """Return the number of threads for some work.

    work: multiply-adds
    limit: the most threads allowed
    free: cores that no other process uses

    >>> choose_threads(1e9, limit=8, free=6), choose_threads(1e6, limit=8, free=6)
    (6, 1)
    """
    if work < SMALL:
        return 1
    return limit if work >= LARGE * limit else max(1, min(limit, free))


def fit_threads(work: float, limit: int) -> int:
    """Return the number of threads for some work now, at most `limit`."""
    if limit == 1 or work < SMALL or work >= LARGE * limit:
        return choose_threads(work, limit=limit, free=1)  # without counting them
    return choose_threads(work, limit=limit, free=count_free())


def use_threads(work: float) -> AbstractContextManager[None]:
    """Return a context in which torch has the threads that suit the work.

    work: multiply-adds
    """
    import torch  # noqa: PLC0415 (the driver of an atlas does not need it)

    return hold_threads(fit_threads(work, torch.get_num_threads()))


@contextmanager
def hold_threads(n: int | None) -> Iterator[None]:
    """Set torch to n threads in the calling thread, and restore the number after.

    None changes nothing.
    """
    import torch  # noqa: PLC0415

    before = torch.get_num_threads()
    if n is None or n == before:
        yield
        return
    mine = threading.get_ident(), before
    RUNNING.append(mine)
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        RUNNING.remove(mine)


@contextmanager
def one_thread() -> Iterator[int]:
    """Set torch to one thread in the calling thread; yield the number it had before.

    A thread that first uses torch inside of a block inherits the block's number. So the
    number before is that of an open block or, if there is none, the one that a new
    thread inherits. A block inside of another one of the same thread restores what the
    outer one set.
    """
    import torch  # noqa: PLC0415

    me, own = threading.get_ident(), torch.get_num_threads()
    with LOCK:
        mine = [n for thread, n in RUNNING if thread == me]
        found = [own, *mine, *(n for _, n in RUNNING[:1])]
        if not RUNNING:
            new = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            new.start()
            new.join()
        limit = max(found)
        RUNNING.append((me, limit))
    torch.set_num_threads(1)
    try:
        yield limit
    finally:
        torch.set_num_threads(own if mine else limit)
        RUNNING.remove((me, limit))


def run_in_order(
    function: Callable[[T], R], items: Iterable[T], workers: int
) -> Generator[R]:
    """Call a function on every item, in threads with one torch thread; yield in order.

    The caller is inside of one_thread().
    """
    if workers == 1:  # starting a thread costs more than a small tile
        yield from map(function, items)
        return
    import torch  # noqa: PLC0415

    pool = ThreadPoolExecutor(workers, "regard", torch.set_num_threads, (1,))
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * workers:  # workers stay busy, few results are held
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def count_free() -> int:
    """Return the cores that no other process uses, at least 1; cached for FRESH s."""
    when, free = LATEST[0]
    if monotonic() - when >= FRESH:
        free = measure_free(count_cores(), os.cpu_count() or 1)
        LATEST[0] = monotonic(), free
    return free


def measure_free(cores: int, online: int) -> int:
    """Return how many of our cores are free: the most of a few samples.

    online: the cores of the machine, to which the runnable threads are compared
    """
    free = 1
    for n in range(SAMPLES):
        free = max(free, min(cores, online - count_others()))
        if free == cores:
            break
        if n < SAMPLES - 1:
            sleep(PAUSE)
    return free


def count_others() -> int:
    """Return how many threads of other processes are runnable now; 0 if unknown."""
    try:
        words = (PROC / "loadavg").read_text("utf-8").split()
        runnable = int(words[3].partition("/")[0])
    except (OSError, IndexError, ValueError):  # not Linux
        return 0
    own = 0
    for path in (PROC / "self/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            own += path.read_text("utf-8").rpartition(")")[2].split()[0] == "R"
    return max(0, runnable - max(1, own))


def count_cores() -> int:
    """Return the cores that this process may use, by its affinity and its cgroup."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    quota = ""
    with suppress(OSError):
        quota = QUOTA.read_text("utf-8")
    return max(1, min(cores, read_quota(quota)))


def read_quota(text: str) -> int:
    """Return the whole cores that a cgroup may use; a large number if it has no limit.

    >>> read_quota("250000 100000"), read_quota("max 100000") > 1_000
    (2, True)
    """
    words = text.split()
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return 2**31
    return max(1, int(words[0]) // int(words[1]))
