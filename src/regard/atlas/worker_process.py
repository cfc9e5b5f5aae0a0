"""The process in which a worker runs: `python -m regard.atlas.worker_process FD`.

It reads a plan, then shards, from a pipe, and ends when the pipe does: whoever started
it may be killed too.

Next: supervisor.py
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection

from regard.errors import RegardError


def answer_shards(line: Connection) -> None:
    """Answer shard after shard until nobody asks any more."""
    plan, threads = line.recv()
    if threads is not None:  # before torch counts the cores
        os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        from regard.atlas.worker import Worker  # noqa: PLC0415 (after the line above)

        worker = Worker(plan, threads=threads)
        line.send(("ready", None))
        while True:
            shard, skip = line.recv()
            line.send(("done", worker(shard, skip=skip)))
    except (RegardError, ImportError) as error:
        line.send(("refused", str(error)))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started us
    try:
        answer_shards(Connection(int(sys.argv[1])))
    except (EOFError, ConnectionError):  # nobody asks any more
        sys.exit(0)
