"""Run a worker in a child process. If the child dies, its shard is run again.

    supervisor ─▶ plan ─▶ child: "ready"    supervisor ─▶ shard ─▶ child: result

A child that is killed, runs out of memory or crashes is restarted. If one shard kills
three children in a row, its items (documents, or pairs of prompts) are run one at a
time. Those that kill three children on their own are set aside, listed and counted;
then the shard is run without them.

Next: runners.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Pipe
from typing import Any, Self

from regard.atlas.work_plan import WorkPlan, WorkShard
from regard.errors import RegardError

LIVES = 3  # attempts to run a shard
STARTS = 8  # attempts to start a child
NONE: frozenset[str] = frozenset()


class Dead(Exception):  # noqa: N818 (an event, not an error)
    """The child process died."""


class Supervisor:
    """Manages one child process at a time, started when it is needed."""

    def __init__(self, plan: WorkPlan, *, threads: int | None = 1) -> None:
        self.plan, self.threads = plan, threads
        self.child: subprocess.Popen[bytes] | None = None
        self.line: Any = None
        self.words = tempfile.TemporaryFile()  # noqa: SIM115 (the child's stderr)
        self.over = False

    def run(self, shard: WorkShard) -> bytes:
        """Return the result of a shard, restarting the child as needed."""
        if (done := self.ask(shard, NONE)) is not None:
            return done
        one_by_one = (replace(shard, places=(place,)) for place in shard.places)
        alone = [x for x in one_by_one if self.ask(x, NONE) is None]
        guilty = frozenset(x.places[0].digest for x in alone)
        if len(guilty) == len(shard.places) > 1:
            raise RegardError(
                f"every {self.plan.item} of shard {shard.number} ends its process, so "
                f"it is not the {self.plan.item}s. It said: {self.last_words}"
            )
        if (done := self.ask(shard, guilty)) is not None:
            return done
        raise RegardError(
            f"shard {shard.number} ends its process though each {self.plan.item} of it "
            f"runs alone. Is there memory for batch={self.plan.batch}? It said: "
            f"{self.last_words}"
        )

    def ask(self, shard: WorkShard, skip: frozenset[str]) -> bytes | None:
        """Return the child's result, or None if LIVES children die on the shard."""
        for _ in range(LIVES):
            self.start()
            with suppress(Dead):
                return bytes(self.speak((shard, skip)))
        return None

    def start(self) -> None:
        """Start a child unless one is running, and wait until its model is loaded."""
        for _ in range(STARTS):
            if self.child is None:
                self.launch()
                with suppress(Dead):
                    self.speak((self.plan, self.threads))
        if self.child is None:
            raise RegardError(f"a worker cannot start. It said: {self.last_words}")

    def launch(self) -> None:
        """Start the child process; the plan is sent later."""
        if self.over:
            raise RegardError("the work was stopped.")
        self.line, theirs = Pipe()
        # not a fork, which would copy the locks of our threads
        self.child = subprocess.Popen(  # noqa: S603 (our own module)
            [sys.executable, "-m", "regard.atlas.worker_process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.words,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()

    def speak(self, words: Any) -> Any:
        """Send one message to the child and return its answer."""
        try:
            self.line.send(words)
            kind, told = self.line.recv()
        except (EOFError, OSError) as error:
            self.stop()
            raise Dead from error
        if kind == "refused":
            raise RegardError(told)
        return told

    @property
    def last_words(self) -> str:
        """The last line that a child wrote to stderr."""
        self.words.seek(0)
        lines = self.words.read().decode("utf-8", "replace").split("\n")
        return next((x.strip() for x in reversed(lines) if x.strip()), "nothing.")[:300]

    def stop(self) -> None:
        """Kill the child; it has no state to save."""
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.line.close()
            self.child = None

    def cancel(self) -> None:
        """Kill the child, even while a thread waits for it, and start no other."""
        self.over = True
        if self.child is not None:
            self.child.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.words.close()
