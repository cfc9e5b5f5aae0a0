"""Three ways to run the shards of a plan, with the same results.

    run_loop    one after the other in this process, without child processes
    run_pool    worker processes on this machine, each with the model; the default
    run_ray     Ray Data: one actor with the model per worker, on any machines

Each takes shards and yields results as they complete, in any order. Only the driver
writes files. If a worker dies, its shard is run again (supervisor.py).

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

from regard.atlas.supervisor import Supervisor
from regard.atlas.work_plan import WorkPlan, WorkShard, open_worker
from regard.errors import OptionError
from regard.threads import count_cores, hold_threads

STORE = 512 << 20  # bytes of Ray's object store: results are small
Results = Generator[bytes, None, None]
Shards = Iterable[WorkShard]
SPARE = 2  # logical CPUs for Ray's own tasks: without one it hangs


@dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """The runner and its workers."""

    runner: str = "pool"  # "loop", "pool" or "ray"
    workers: int | None = None  # one per core unless given
    threads: int | None = 1  # of torch in each worker; None: torch's default
    address: str | None = None  # of a Ray cluster; a local one is started unless given

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
        """The number of workers."""
        return self.workers or count_cores()

    def run(self, plan: WorkPlan, shards: Shards) -> Results:
        """Yield the results of the shards as they complete."""
        return RUNNERS[self.runner](plan, shards, self)


def run_loop(plan: WorkPlan, shards: Shards, crew: RunnerOptions) -> Results:
    """Run one shard after the other in this process."""
    worker = open_worker(plan, threads=None)
    for shard in shards:
        with hold_threads(crew.threads):  # the process is the caller's
            done = worker(shard)
        yield done


def run_pool(plan: WorkPlan, shards: Shards, crew: RunnerOptions) -> Results:
    """Run the shards in local processes, each supervised by a thread."""
    left = iter(shards)
    free: SimpleQueue[Supervisor] = SimpleQueue()
    with ExitStack() as stack:
        guards = [Supervisor(plan, threads=crew.threads) for _ in range(crew.size)]
        for guard in guards:
            free.put(stack.enter_context(guard))
        pool = ThreadPoolExecutor(crew.size)
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        for guard in guards:  # runs before shutdown: wakes threads that wait
            stack.callback(guard.cancel)

        def work(shard: WorkShard) -> bytes:
            guard = free.get()
            try:
                return guard.run(shard)
            finally:
                free.put(guard)

        running: set[Future[bytes]] = set()
        while True:
            more = islice(left, crew.size + 1 - len(running))  # one is queued
            running |= {pool.submit(work, shard) for shard in more}
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def run_ray(plan: WorkPlan, shards: Shards, crew: RunnerOptions) -> Results:
    """Run the shards on a Ray cluster, with one actor and model per worker.

    Ray distributes shards, collects results, and restarts actors on the remaining
    nodes. An item that kills its process is handled by the actor's supervisor.
    """
    try:
        import ray  # noqa: PLC0415 (optional)
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
        cpus = ray.cluster_resources().get("CPU", 1.0)
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
    """Connect to a cluster, or start a local one without telemetry."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # it logs to our terminal
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    given: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    given["address"] = crew.address or "local"
    if not crew.address:
        given |= {"num_cpus": crew.size + SPARE, "object_store_memory": STORE}
        given |= {"include_dashboard": False}
    try:
        ray.init(**given)
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()  # it gives its node 30 s, which a busy machine may exceed
        ray.init(**given)


class Actor:
    """A Ray actor: the supervisor of a worker process with the model."""

    def __init__(self, plan: WorkPlan, threads: int | None) -> None:
        self.guard = Supervisor(plan, threads=threads)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        shards = (pickle.loads(x) for x in batch["shard"])  # noqa: S301 (our own)
        return {"result": [self.guard.run(shard) for shard in shards]}


RUNNERS = {"loop": run_loop, "pool": run_pool, "ray": run_ray}
