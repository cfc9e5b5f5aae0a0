"""Three ways to do the shards of an atlas, with one meaning.

    run_loop    one after the other, here: nothing to go wrong, nothing to recover
    run_pool    some processes of this machine, each with the model; the default
    run_ray     Ray Data: an actor with the model for each worker, on any machines

Each takes shards and yields results as they come, in any order. Only the driver writes;
a worker that dies loses the shard it had, which is done again (supervisor.py).

Next: job.py
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue
from typing import Any

from regard.atlas.corpus import Shard
from regard.atlas.settings import Settings
from regard.atlas.supervisor import Supervisor
from regard.errors import OptionError

STORE = 512 << 20  # bytes of Ray's object store: results are small
Results = Generator[bytes, None, None]
SPARE = 2  # logical CPUs for Ray's own tasks: without one it waits for ever


@dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """Who does the work."""

    runner: str = "pool"  # "loop", "pool" or "ray"
    workers: int | None = None  # as many as there are cores, unless given
    threads: int | None = 1  # of torch, in each worker; None: as torch likes
    address: str | None = None  # of a Ray cluster; one of this machine unless given

    def __post_init__(self) -> None:
        if self.runner not in RUNNERS:
            known = ", ".join(RUNNERS)
            raise OptionError(f"runner={self.runner!r}, expected one of {known}.")
        if self.workers is not None and self.workers < 1:
            raise OptionError(f"workers={self.workers}, expected 1 or more.")
        if self.address is not None and self.runner != "ray":
            raise OptionError('an address is for Ray: write runner="ray" too.')

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self.workers or len(os.sched_getaffinity(0))

    def run(self, plan: Settings, shards: Iterable[Shard]) -> Results:
        """Yield the result of each shard, as they come."""
        return RUNNERS[self.runner](plan, shards, self)


def run_loop(plan: Settings, shards: Iterable[Shard], crew: RunnerOptions) -> Results:
    """Do one shard after the other in this process."""
    from regard.atlas.worker import Worker  # noqa: PLC0415 (only here it needs torch)

    worker = Worker(plan, threads=crew.threads)
    yield from map(worker, shards)


def run_pool(plan: Settings, shards: Iterable[Shard], crew: RunnerOptions) -> Results:
    """Do them in processes of this machine, each watched over by a thread of ours."""
    left = iter(shards)
    free: SimpleQueue[Supervisor] = SimpleQueue()
    with ExitStack() as stack:
        guards = [Supervisor(plan, threads=crew.threads) for _ in range(crew.size)]
        for guard in guards:
            free.put(stack.enter_context(guard))
        pool = ThreadPoolExecutor(crew.size)
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        for guard in guards:  # left first: who waits for a child is woken
            stack.callback(guard.cancel)

        def work(shard: Shard) -> bytes:
            guard = free.get()
            try:
                return guard.run(shard)
            finally:
                free.put(guard)

        running: set[Future[bytes]] = set()
        while True:
            more = islice(left, crew.size + 1 - len(running))  # one waits its turn
            running |= {pool.submit(work, shard) for shard in more}
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def run_ray(plan: Settings, shards: Iterable[Shard], crew: RunnerOptions) -> Results:
    """Do them on the machines of a Ray cluster, an actor with the model each.

    Ray hands out shards, moves results, and starts actors again on the nodes that are
    left; a document that ends its process never meets Ray, only the actor's guard.
    """
    try:
        import ray  # noqa: PLC0415 (an extra)
        import ray.data  # noqa: PLC0415
    except ImportError:
        raise OptionError('Ray is not here: pip install "regard[atlas]"') from None

    rows = [{"shard": pickle.dumps(shard)} for shard in shards]
    started = not ray.is_initialized()
    if started:
        start_ray(ray, crew)
    try:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        found: Any = ray.cluster_resources
        cpus = found().get("CPU", 1.0)
        share = min(1.0, max(0.1, cpus - SPARE) / crew.size)
        strategy = ray.data.ActorPoolStrategy(size=crew.size)
        done = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            Actor,
            fn_constructor_args=(plan, crew.threads),
            batch_size=1,
            compute=strategy,
            num_cpus=share,
            num_gpus=1 if plan.device.startswith("cuda") else None,
        )
        for row in done.iter_rows():
            yield row["result"]
    finally:
        if started:
            ray.shutdown()


def start_ray(ray: Any, crew: RunnerOptions) -> None:
    """Join a cluster, or start one of this machine that tells nobody."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves the machine
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # it speaks in our terminal
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    here: dict[str, Any] = {
        "num_cpus": crew.size + SPARE,
        "include_dashboard": False,
        "object_store_memory": STORE,
    }
    ray.init(
        address=crew.address or "local",
        log_to_driver=False,
        logging_level=logging.ERROR,
        **({} if crew.address else here),
    )


class Actor:
    """What Ray keeps on a machine: a guard, and so a model."""

    def __init__(self, plan: Settings, threads: int | None) -> None:
        self.guard = Supervisor(plan, threads=threads)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        shards = (pickle.loads(x) for x in batch["shard"])  # noqa: S301 (our own)
        return {"result": [self.guard.run(shard) for shard in shards]}


RUNNERS = {"loop": run_loop, "pool": run_pool, "ray": run_ray}
