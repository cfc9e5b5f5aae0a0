"""The process that runs a worker: `python -m regard.atlas.worker_process FD`.

It reads a plan, then shards, from a pipe. It exits when the pipe closes, so it does not
outlive a parent that is killed.

Next: supervisor.py
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection

from regard.atlas.work_plan import open_worker
from regard.errors import RegardError


def answer_shards(line: Connection) -> None:
    """Answer shards from the pipe until it is closed."""
    plan, threads = line.recv()
    if threads is not None:  # before torch is imported
        os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        worker = open_worker(plan, threads=threads)
        line.send(("ready", None))
        while True:
            shard, skip = line.recv()
            line.send(("done", worker(shard, skip=skip)))
    except (RegardError, ImportError) as error:
        line.send(("refused", str(error)))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    try:
        answer_shards(Connection(int(sys.argv[1])))
    except (EOFError, ConnectionError):  # the pipe is closed
        sys.exit(0)
