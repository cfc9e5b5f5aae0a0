"""Observe an ablated pass, and verify that the ablation edited what it should have.

Calls are edited above autograd, where the purpose of a softmax is not known. The
verifier observes the operators below, as a watch does:

    before a softmax   if its logits come from a product of two arrays that are not
                       parameters, it is taken for attention, and edited
    afterwards         faults are: what was edited and is not attention, what attends
                       and was not edited, a removed head that was mixed with others,
                       and other heads than the chosen ones (certify_edit.py)

Next: locate.py
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from regard.ablate.active import ACTIVE
from regard.ablate.certify_edit import EditedOutput, Verdict
from regard.lens import AttentionFinder, CapturedCall, Observer, Tallies, find_storages
from regard.run.call_edit import PendingCall
from regard.run.modules import Run
from regard.run.own_work import is_recomputing, is_tracing, remove_mode

Verdicts = dict[tuple[str, int], bool]  # of each softmax of a module: is it attention?
# what a removed head survives: also our own edits
KEEP_ZEROS = ("masked_fill", "mul", "where", "dropout")
MIXED = "its heads could not be told apart"
MOVED = "its call does not have sequences first and heads second"


class Local(threading.local):
    """The observer of a thread."""

    def __init__(self) -> None:
        self.observer: Observer | None = None
        self.held = False  # a function that is edited as a whole is running
        self.numbers: dict[str, int] = {}  # softmaxes of a module since it was entered
        self.written: EditedOutput | None = None  # not certified yet
        # heads of a module that have to be separate in its next complete call
        self.chosen: dict[str, tuple[int, ...]] = {}
        self.edited: dict[str, bool] = {}  # whether it was to be edited


class Verifier(Tallies):
    """Listens to an observer during an ablation.

    removes: the chosen heads have to be 0
    known: verdicts of a verified run of the same inputs. Then nothing is observed: it
        costs a third
    """

    def __init__(self, run: Run, *, removes: bool, known: Verdicts | None) -> None:
        super().__init__()
        self.here, self.local, self.removes = run.here, Local(), removes
        self.weights = find_storages(run.model)  # of parameters
        self.is_deaf = known is not None
        self.verdicts: Verdicts = {} if known is None else known
        self.certified: dict[str, Verdict] = {}  # by module, of one call of each
        self.edited: Counter[str] = Counter()  # softmaxes of a module that were edited
        self.taken: Counter[str] = Counter()  # those that turned out to be attention

    def enter(self) -> None:
        """Begin to observe a pass."""
        if not (is_recomputing() or is_tracing() or self.is_deaf):
            finder = AttentionFinder(self, self.weights, harmless=KEEP_ZEROS)
            self.local.observer = Observer(finder)
            self.local.observer.__enter__()

    def leave(self) -> None:
        """End a pass."""
        observer = self.local.observer
        if observer is not None:
            remove_mode(observer)
            self.local.observer = None
            observer.flush()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Edit nothing inside of a call that is edited as a whole."""
        before, self.local.held = self.local.held, True
        try:
            yield
        finally:
            self.local.held = before

    def visit(self, name: str, x: Tensor | None) -> None:
        """Count the softmaxes of a module from 0; its input may certify an edit."""
        self.local.numbers[name] = 0
        written = self.local.written
        if written is not None and x is not None:
            verdict = written.judge(x)
            if verdict is not Verdict.UNKNOWN:
                self.certified[written.module] = verdict
                self.local.written = None

    def expect(
        self,
        name: str,
        chosen: tuple[int, ...] | None,
        call: PendingCall,
        *,
        apart: bool,
    ) -> None:
        """Take note of a call that is to run: which of its heads are edited.

        apart: whether they have to be separate from others
        """
        if apart and chosen is not None:  # until the call is complete
            self.local.chosen[name] = chosen
        alike = call.sure and call.heads is None  # one edit for all of its batch
        self.local.edited[name] = chosen is not None and not alike
        if self.local.observer is not None:
            self.edited[name] += not call.sure

    def count_sinks(self, logits: Tensor) -> int:
        """Return how many columns of logits are of no key."""
        observer = self.local.observer
        found = (
            None if observer is None else observer.finder.trace.find(logits.detach())
        )
        return 0 if found is None or found.extra is None else found.extra.shape[-1]

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

    def complete(self, module: str, call: CapturedCall) -> None:
        """Take a call that is attention."""
        tally = self.count(module, attention=True)
        tally.kept += 1
        self.taken[module] += call.weights_taken and not self.local.held
        heads = self.local.chosen.pop(module, None)
        if call.is_moved and self.local.edited.get(module):
            tally.notes[MOVED] = None
        self.await_layer(module, call, heads)
        if heads is not None and call.weights_taken and not self.local.held:
            self.check_removed(call, heads, tally.notes)

    def check_removed(
        self, call: CapturedCall, heads: tuple[int, ...], notes: dict[str, None]
    ) -> None:
        """Note heads of a softmax of the model's own that were mixed with others."""
        changes = [x for x in call.note.split("; ") if "changed after" in x]
        notes.update(dict.fromkeys(changes))
        if self.removes and call.out is not None:
            n = call.out.shape[1]
            for head in heads or range(n):
                if head >= n or bool(call.out[:, head].any()):
                    notes[MIXED] = None

    def await_layer(
        self, module: str, call: CapturedCall, heads: tuple[int, ...] | None
    ) -> None:
        """Keep an output until a layer takes it: once for each module."""
        known, out = module in self.certified, call.out
        if heads and out is not None and len(ACTIVE) == 1 and not known:
            self.local.written = EditedOutput(module, {*heads}, out)

    def take_whole(self) -> Observer | None:
        """Count a call that an adapter describes; return the observer to be muted."""
        self.count(self.here.name, attention=True).kept += 1
        return self.local.observer

    def drop(self, module: str, reason: str, *, attention: bool) -> None:
        """Take a call that a watch would not keep; it may be attention."""
        tally = self.count(module, attention=attention)
        self.taken[module] += attention and not self.local.held
        chosen = self.local.chosen.pop(module, None)
        if attention and chosen is not None and not self.local.held:
            tally.notes[reason] = None
