"""Hear an ablated pass, and tell whether the ablation met what it was to meet.

Calls are edited above autograd, where a softmax does not tell what it is for. The
verifier hears the operators below, as a watch does:

    before a softmax   if its logits come from a product of two arrays that are no
                       parameters, it is taken for attention, and edited
    afterwards         faults are: what was edited and is no attention, what attends and
                       was not edited, and a removed head that was mixed with others

Next: locate.py
"""

from __future__ import annotations

import threading

from torch import Tensor

from regard.ablate.running_modules import RunningModules
from regard.lens.captured_call import CapturedCall
from regard.lens.find_attention import AttentionFinder, describe_changes
from regard.lens.module_stack import is_recomputing, is_tracing
from regard.lens.observer import Observer
from regard.lens.softmax_call import SoftmaxCall
from regard.lens.take_weights import Taken

Verdicts = dict[tuple[str, int], bool]  # of each softmax of a module: is it attention?
# what a removed head survives: also our own edits
KEEP_ZEROS = describe_changes(("masked_fill", "mul", "where", "dropout"))


class AblationFinder(AttentionFinder):
    """Finds attention; to zero its weights, or to scale them, is no change."""

    def complete(self, call: SoftmaxCall, taken: Taken, notes: list[str]) -> None:
        """Report a softmax that is attention."""
        super().complete(call, taken, [x for x in notes if x not in KEEP_ZEROS])


class Heard:
    """What was heard in one module."""

    def __init__(self) -> None:
        self.attended = 0  # calls that are attention
        self.unsure = 0  # calls that may be, and that a watch would not number
        self.others = 0  # softmaxes that are not
        self.changes: dict[str, None] = {}  # of weights, after an edited softmax
        self.left: set[int] = set()  # heads whose output was not 0

    def attends(self, *, by_name: bool) -> bool:
        """Return whether a module attends; one that was named, also if it may."""
        return bool(self.attended or (by_name and self.unsure))

    @property
    def is_other(self) -> bool:
        """Whether none of its softmaxes is attention."""
        return bool(self.others and not (self.attended or self.unsure))


class Local(threading.local):
    """The observer of a thread."""

    def __init__(self) -> None:
        self.observer: Observer | None = None
        self.entered: list[bool] = []  # whether the observer was entered, each time
        self.numbers: dict[str, int] = {}  # softmaxes of a module since it was entered
        # heads of a module's last call that have to be separate
        self.chosen: dict[str, tuple[int, ...] | None] = {}


class Verifier:
    """Listens to an observer during an ablation."""

    def __init__(
        self, weights: set[int], here: RunningModules, *, removes: bool
    ) -> None:
        self.here, self.local = here, Local()
        self.removes = removes  # the chosen heads have to be 0
        self.weights = weights  # storages of the model's parameters
        self.heard: dict[str, Heard] = {}
        self.verdicts: Verdicts = {}
        self.is_deaf = False
        self.failures: dict[str, None] = {}

    def trust(self, known: Verdicts | None) -> None:
        """Hear nothing if a run of the same inputs was verified: it costs a third."""
        if known is not None:
            self.verdicts, self.is_deaf = known, True

    def enter(self) -> None:
        """Begin to hear a pass."""
        local = self.local
        hears = not any(local.entered) and not is_recomputing() and not is_tracing()
        hears = hears and not self.is_deaf
        if hears:
            local.observer = Observer(AblationFinder(self, self.weights))
            local.observer.__enter__()
        local.entered.append(hears)

    def leave(self) -> None:
        """End a pass."""
        local = self.local
        if local.entered.pop() and local.observer is not None:
            observer, local.observer = local.observer, None
            observer.__exit__(None, None, None)
            observer.flush()

    def visit(self, name: str) -> None:
        """Count the softmaxes of a module from 0."""
        self.local.numbers[name] = 0

    def expect(self, name: str, heads: tuple[int, ...] | None) -> None:
        """Set which heads of a module's next call have to be separate from others."""
        self.local.chosen[name] = heads

    def is_attention(self, logits: Tensor) -> bool:
        """Return whether a softmax of these logits should be attention."""
        numbers, name = self.local.numbers, self.here.name
        key = (name, numbers.get(name, 0))
        numbers[name] = key[1] + 1
        observer = self.local.observer
        if observer is None:  # the pass is computed again, for a gradient
            return self.verdicts.get(key, False)
        origin = observer.finder.trace.find(logits.detach())
        self.verdicts[key] = origin.product is not None and origin.softmax is None
        return self.verdicts[key]

    def module(self) -> str:
        """Return the innermost module that is running."""
        return self.here.name

    def at(self, module: str) -> Heard:
        """Return what was heard in a module."""
        return self.heard.setdefault(module, Heard())

    def complete(self, module: str, call: CapturedCall) -> None:
        """Take a call that is attention."""
        heard = self.at(module)
        heard.attended += 1
        heads = self.local.chosen.get(module)
        if heads is None or not call.weights_taken or self.here.held:
            return
        changes = [x for x in call.note.split("; ") if "changed after" in x]
        heard.changes.update(dict.fromkeys(changes))
        if self.removes and call.out is not None:
            n = call.out.shape[1]
            for head in heads or range(n):
                if head >= n or bool(call.out[:, head].any()):
                    heard.left.add(head)

    def take_whole(self) -> Observer | None:
        """Count a call that an adapter describes; return the observer to be muted."""
        self.at(self.here.name).attended += 1
        return self.local.observer

    def drop(self, module: str, reason: str, *, attention: bool) -> None:
        """Take a call that a watch would not keep."""
        heard = self.at(module)
        if attention:
            heard.unsure += 1
            if self.local.chosen.get(module) is not None and not self.here.held:
                heard.changes[reason] = None
        else:
            heard.others += 1

    def fail(self, error: Exception) -> None:
        """Take an error of the observer."""
        self.failures[f"{type(error).__name__}: {error}"] = None
