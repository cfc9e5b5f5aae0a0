"""A worker in a process of its own, which may die: its shard is simply done again.

    guard ─▶ plan ─▶ child: "ready"         guard ─▶ shard ─▶ child: result

A child that is killed, runs out of memory or crashes is started again. If one shard
ends it three times, its documents run one at a time until the guilty ones are known:
those that end three children when nothing else runs. They are set aside, named and
counted; then the shard is done as if they had never been there.

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

from regard.atlas.corpus import Shard
from regard.atlas.settings import Settings
from regard.errors import RegardError

LIVES = 3  # deaths in a row over one shard that are put down to bad luck
STARTS = 8  # deaths in a row of children that did not come to work
NONE: frozenset[str] = frozenset()


class Dead(Exception):  # noqa: N818 (it is what happened, not what went wrong)
    """The child is gone."""


class Supervisor:
    """One child at a time, started when it is needed."""

    def __init__(self, plan: Settings, *, threads: int | None = 1) -> None:
        self.plan, self.threads = plan, threads
        self.child: subprocess.Popen[bytes] | None = None
        self.line: Any = None
        self.words = tempfile.TemporaryFile()  # noqa: SIM115 (the child's stderr)
        self.over = False

    def run(self, shard: Shard) -> bytes:
        """Return the result of a shard, whatever it takes."""
        if (done := self.ask(shard, NONE)) is not None:
            return done
        one_by_one = (replace(shard, places=(place,)) for place in shard.places)
        alone = [x for x in one_by_one if self.ask(x, NONE) is None]
        guilty = frozenset(x.places[0].digest for x in alone)
        if len(guilty) == len(shard.places) > 1:
            raise RegardError(
                f"every document of shard {shard.number} ends its process, so it is "
                f"not the documents. It said: {self.last_words}"
            )
        if (done := self.ask(shard, guilty)) is not None:
            return done
        raise RegardError(
            f"shard {shard.number} ends its process though each of its documents runs "
            f"alone. Is there memory for batch={self.plan.batch}? It said: "
            f"{self.last_words}"
        )

    def ask(self, shard: Shard, skip: frozenset[str]) -> bytes | None:
        """Return what a child answers, or nothing if LIVES of them die over it."""
        for _ in range(LIVES):
            self.start()
            with suppress(Dead):
                return bytes(self.speak((shard, skip)))
        return None

    def start(self) -> None:
        """Start a child, unless there is one, and wait until its model is there."""
        for _ in range(STARTS):
            if self.child is None:
                self.launch()
                with suppress(Dead):
                    self.speak((self.plan, self.threads))
        if self.child is None:
            raise RegardError(f"a worker cannot start. It said: {self.last_words}")

    def launch(self) -> None:
        """Start a process that knows nothing yet."""
        if self.over:
            raise RegardError("the work was stopped.")
        self.line, theirs = Pipe()
        # not a fork: our threads and locks stay here
        self.child = subprocess.Popen(  # noqa: S603 (it is our own)
            [sys.executable, "-m", "regard.atlas.worker_process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.words,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()

    def speak(self, words: Any) -> Any:
        """Return the answer to one message."""
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
        """The last line that a child wrote before it died."""
        self.words.seek(0)
        lines = self.words.read().decode("utf-8", "replace").split("\n")
        return next((x.strip() for x in reversed(lines) if x.strip()), "nothing.")[:300]

    def stop(self) -> None:
        """End the child at once; it keeps nothing."""
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.line.close()
            self.child = None

    def cancel(self) -> None:
        """End the child, also while a thread waits for it, and start no other."""
        self.over = True
        if self.child is not None:
            self.child.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.words.close()
