"""Which modules are observed: all of them in a wide pass, in others those that attend.

    wide      every module has hooks, and the observer is active in a whole pass
    narrow    only modules that attended have hooks, and those that never ran. The
              observer is active in them alone, or, where all of their calls go through
              F.scaled_dot_product_attention, only in that call.

A pass is wide if it is one of the first two, every 64th, or if a module runs for the
first time or a known one does not attend: a decoding step is short, and observing each
of its operators would slow it down.

Next: watch.py
"""

from __future__ import annotations

import threading
from collections import Counter

from regard.run.modules import Run

FIRST, AGAIN = 2, 64  # wide passes: the first …, every …th


class WidePasses:
    """What attended so far, and how the pass that runs is observed."""

    def __init__(self) -> None:
        self.heard: dict[str, bool] = {}  # modules; whether only F.sdpa was called
        self.attended: dict[str, int] = {}  # calls of modules in this pass
        self.outside = False  # some softmax compares what another module computed
        self.unseen: Counter[str] = Counter()  # narrow passes without a call, by module
        self.wide = True
        self.done = self.running = 0  # passes, in all threads
        self.lock = threading.RLock()

    def needs_observer(self, run: Run, name: str) -> bool:
        """Return whether the observer has to be active in a module."""
        self.attended.setdefault(name, 0)
        if name in self.heard:
            return self.wide or not self.heard[name]
        return self.wide or name not in run.ran

    def note(self, name: str, *, only_sdpa: bool, from_outside: bool = False) -> None:
        """Note that something attended in a module."""
        self.outside |= from_outside
        self.attended[name] = self.attended.get(name, 0) + 1
        self.heard[name] = only_sdpa and self.heard.get(name, True)

    def begin(self) -> None:
        """Count a pass that begins in a thread."""
        with self.lock:
            self.running += 1

    def end(self, run: Run, *, finished: bool) -> None:
        """Count a pass that ends; choose how the next one is observed."""
        with self.lock:
            self.running = max(0, self.running - 1)
            if not self.running:
                self.plan(run, finished=finished)

    def note_silent(self) -> bool:
        """Return whether a module that attended before did not attend in this pass."""
        silent = [x for x, n in self.attended.items() if x in self.heard and not n]
        if not self.wide:
            self.unseen.update(x for x in silent if self.heard[x])
        return bool(silent)

    def plan(self, run: Run, *, finished: bool) -> None:
        """Choose how the next pass is observed."""
        silent = self.note_silent()
        self.attended.clear()
        self.done += finished
        early = self.done < FIRST or self.done % AGAIN == 0
        wide = silent or not finished or early or not self.heard or self.outside
        if wide and not self.wide:
            run.hook_modules()
        elif not wide:
            plain = {x for x in run.layers if x.rpartition(".")[0] not in self.heard}
            run.unhook((run.ran | plain) - self.heard.keys())
        self.wide = wide
