"""Record a running model; it keeps its kernels and computes the same bits.

    with capture(model) as watcher:       regard.watch (seen.py) wraps this
        model(...)                        or model.generate(...), or a training step
    watcher.recording

Every intercepted attention call (intercept.py) is kept as q, k and lse, and a few rows
of its output are rebuilt from them; a layer that cannot be rebuilt is reported with its
error instead of being shown. A module that is named attention but made no intercepted
call is reported too.

Next: show/map_source.py
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import OptionError
from regard.lens.huggingface import is_decoder, open_doors
from regard.lens.intercept import Mode, open_modules
from regard.lens.ledger import Group, extend, mend_lse, settle
from regard.lens.sight import Sight, may_see
from regard.lens.whereabouts import Hooks, Whereabouts, is_recomputing
from regard.recording.record import Covered, Record, Recording

KEEP = ("qk", "qkv")
CHECKED, OFTEN = 2, 64  # calls of a layer that are checked: the first, every …th
MIXED = (
    "its sequences changed places between steps, as in a beam search: watch one pass "
    "over the final ones instead"
)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of a rebuilt output; else 3e-2


class Notes:
    """What one thread ran: calls by layer, and the tokens of their passes."""

    def __init__(self) -> None:
        self.groups: dict[str, list[Group]] = {}
        self.tokens: list[list[Tensor]] = []  # of each group of passes
        self.valid: list[Tensor | None] = []
        self.sizes: list[int] = []  # sequences of each group
        self.now: tuple[Tensor | None, Tensor | None] = (None, None)
        self.fresh = False  # a pass began, and no layer has attended yet
        self.inside = False  # the pass is not over
        self.anew = False  # it does not continue an earlier one
        self.mixed = False  # sequences changed places between calls

    def add(self, name: str, sight: Sight, *, keep_v: bool) -> None:
        """Add a call to the last group of its layer, or begin a new one."""
        groups = self.groups.setdefault(name, [])
        last, fresh = groups[-1] if groups else None, self.fresh
        if last is not None and last.is_cross and self.anew and not fresh:
            last = None  # the same keys, other queries
        if last is not None and last.goes_on(sight):
            last.add(sight)
        else:
            self.mixed |= last is not None and last.is_reordered(sight)
            last = None
            groups.append(Group(name, sight, keep_v=keep_v))
        if last is None:  # an encoder may run before its pass
            groups[-1].turn = len(self.valid) - (self.inside and not fresh)
        if not fresh:
            return
        self.fresh, self.anew = False, last is None  # the first layer decides
        if self.anew:
            self.tokens.append([])
            self.valid.append(None)
            self.sizes.append(sight.q.shape[0])
        tokens, valid = self.now
        whole = groups[-1].rows[0].start == 0  # else the tokens before are unknown
        if self.tokens and tokens is not None and whole:
            self.tokens[-1].append(tokens)
        if self.valid and valid is not None:
            self.valid[-1] = valid

    def list_tokens(self) -> Iterator[tuple[tuple[int, int], tuple[Any, int]]]:
        """Yield turn and number of each sequence, its tokens, how much was padding."""
        for turn, pieces in enumerate(self.tokens):
            valid, size = self.valid[turn], self.sizes[turn]
            if {x.shape[0] for x in pieces} != {size}:  # unknown, or another batch
                continue
            for b, row in enumerate(torch.cat(pieces, 1)):
                whole = torch.ones(len(row), dtype=torch.bool, device=row.device)
                real = whole if valid is None else extend(valid[b], len(row))
                yield (turn, b), (tuple(row[real].tolist()), int((~real).sum()))


class Watcher:
    """Records the intercepted calls, layer by layer."""

    recording: Recording  # once the `with` is left

    def __init__(
        self, model: nn.Module, layers: Collection[str] | None, keep: str
    ) -> None:
        self.model, self.layers, self.keep_v = model, layers, keep == "qkv"
        self.here = Whereabouts()
        self.mode = Mode(self.note, self.here)
        self.hooks = Hooks(model, self.mode, self.here)
        self.notes: dict[int, Notes] = {}  # by thread
        self.doors: dict[str, str] = {}
        self.calls: dict[str, int] = {}
        self.errors: dict[str, float] = {}
        self.wrong: dict[str, str] = {}

    @property
    def mine(self) -> Notes:
        """The notes of this thread."""
        return self.notes.setdefault(threading.get_ident(), Notes())

    def begin(self, _module: nn.Module, args: Any, named: Any) -> None:
        """Store the tokens and the padding of a pass."""
        if is_recomputing():
            return
        tokens = named.get("input_ids", args[0] if args else None)
        mask = named.get("attention_mask")
        whole = isinstance(tokens, Tensor) and tokens.ndim == 2
        tokens = tokens.detach() if whole and not tokens.is_floating_point() else None
        notes = self.mine
        notes.now, notes.fresh = (tokens, read_valid(mask, tokens)), True
        notes.inside = True

    def end(self) -> None:
        """Note that a pass is over."""
        self.mine.inside = False

    def note(self, sight: Sight) -> None:
        """Record one call."""
        name = self.here.name
        self.hooks.spoke[name] = sight.door
        self.calls[name] = self.calls.get(name, 0) + 1
        self.doors[name] = sight.door
        asked = self.layers is None or name in self.layers
        if not asked or not sight.q.numel():  # not asked for, or empty
            return
        count, sight = self.calls[name], mend_lse(sight)
        if sight.lse is None or count <= CHECKED or count % OFTEN == 0:
            sight, error = settle(sight)
            worst = self.errors.get(name, 0.0)
            if not (error <= worst or math.isnan(worst)):  # NaN is the worst
                self.errors[name] = worst = error
            kinds = {x.dtype for x in (sight.q, sight.k, sight.v) if x is not None}
            if not error <= max(TOLERANCE.get(kind, 3e-2) for kind in kinds):
                self.wrong[name] = f"its output could not be rebuilt: {worst:.1e} off"
        self.mine.add(name, sight, keep_v=self.keep_v)

    def finish(self) -> Recording:
        """Return everything that was kept, as records."""
        found: list[tuple[int, int, Record]] = []
        tokens: list[tuple[tuple[int, ...], int]] = []
        start = 0
        for notes in self.notes.values():
            end = start
            told = dict(notes.list_tokens())
            turns: dict[int, set[tuple[int, int]]] = defaultdict(set)  # by sequence
            for name, groups in notes.groups.items() if notes.mixed else ():
                if any(len(group.rows) > 1 for group in groups):
                    self.wrong.setdefault(name, MIXED)
            for order, (name, groups) in enumerate(notes.groups.items()):
                first = start
                for group in groups:
                    if name not in self.wrong:
                        valid = self.find_valid(notes, name, group.turn)
                        for b, record in group.records(valid):
                            found.append((first + b, order, record))
                    for b in range(group.k.shape[0]):
                        turns[first + b].add((group.turn, b))
                    first += group.k.shape[0]
                end = max(end, first)
            for number in range(start, end):
                one, *more = turns[number]  # layers that differ leave it unknown
                tokens.append(((), 0) if more else told.get(one, ((), 0)))
            start = end
        found.sort(key=lambda x: x[:2])
        return Recording(
            model=type(self.model).__name__,
            records=tuple(record for *_, record in found),
            sequences=tuple(number for number, *_ in found),
            tokens=tuple(x for x, _ in tokens),
            coverage=tuple(self.cover()),
            notes={
                "padding": [n for _, n in tokens],  # tokens taken out
                "decoders": [n for n in self.calls if is_decoder(self.model, n)],
            },
        )

    def find_valid(self, notes: Notes, name: str, turn: int) -> Tensor | None:
        """Return which keys are no padding, if the model was given a mask."""
        if turn >= len(notes.valid) or is_decoder(self.model, name):
            return None
        return notes.valid[turn]

    def cover(self) -> Iterator[Covered]:
        """Yield the coverage of each module that attended, or is named attention."""
        for name, door in self.doors.items():
            reason = self.wrong.get(name, "")
            if self.layers is not None and name not in self.layers:
                reason = "not asked for"
            yield Covered(
                name=name,
                via=door,
                calls=self.calls[name],
                error=self.errors.get(name, 0.0),
                reason=reason,
            )
        for name, module in self.model.named_modules():
            silent = not any(
                spoke == name
                or spoke.startswith(f"{name}.")
                or name.startswith(f"{spoke}.")
                for spoke in self.doors
            )
            if silent and "attention" in type(module).__name__.lower():
                yield Covered(name=name, via="", reason="it was never heard")


def read_valid(mask: Any, tokens: Tensor | None) -> Tensor | None:
    """Return which tokens (B, N) are no padding, from what a model was given."""
    if isinstance(mask, Mapping):  # a mask for each kind of layer
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask.bool()
    square = isinstance(mask, Tensor) and mask.ndim == 4
    if square and tokens is not None and tokens.shape[1] > 1:
        seen = may_see(mask)[:, 0]
        return seen.any(-2)[:, : tokens.shape[1]]  # no query attends to padding
    return None


@contextmanager
def capture(
    model: nn.Module, *, layers: Collection[str] | None = None, keep: str = "qk"
) -> Iterator[Watcher]:
    """Record a model while the `with` lasts; `watcher.recording` is set after it."""
    if keep not in KEEP:
        raise OptionError(f'keep="{keep}", expected "qk" or "qkv".')
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"a {type(model).__name__} cannot be watched, expected a torch.nn.Module."
        )
    watcher = Watcher(model, layers, keep)
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(open_doors(model, watcher.mode, watcher.here))
        stack.enter_context(open_modules(model, watcher.mode, watcher.here))
        stack.callback(watcher.hooks.detach)
        watcher.hooks.attach(watcher.begin, watcher.end)
        yield watcher
    watcher.recording = watcher.finish()
