"""Record a running model; it keeps its kernels and computes the same bits.

    with capture(model) as watcher:       regard.watch (seen.py) wraps this
        model(...)                        or model.generate(...), or a training step
    watcher.recording

Every attention call that the observer finds (observer.py) is kept as q, k and lse, and
a few rows of its output are rebuilt from them; a layer that cannot be rebuilt is
reported with its error instead of being shown. A module that looks like attention, and
in which none was heard, is reported too.

Next: show/map_source.py
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

import regard.lens.coverage_notes as notes
from regard.errors import OptionError
from regard.lens.about_model import describe_model, list_untested
from regard.lens.assemble import LayerRun
from regard.lens.call_edit import ALTERING
from regard.lens.captured_call import CapturedCall, join_samples
from regard.lens.captured_rows import is_other_sequence
from regard.lens.check_rebuild import check_rebuild, find_tolerance, fix_empty_row_lse
from regard.lens.chosen_layers import Layers, is_chosen, read_layers
from regard.lens.find_attention import UNSTABLE, AttentionFinder, describe_error
from regard.lens.module_stack import (
    Hooks,
    ModuleStack,
    find_towers,
    is_cross,
    is_decoder,
)
from regard.lens.observer import Observer
from regard.lens.padding import read_given
from regard.lens.passes import Passes, Told
from regard.lens.patches import Samples, patch_all
from regard.lens.placement import Placement
from regard.lens.suspects import find_folded, list_silent
from regard.lens.tally import Tally, find_compiled, is_inside
from regard.lens.trace import find_storages
from regard.recording.record import Covered, Record, Recording

CHECKED, OFTEN = 2, 64  # calls of a layer that are checked: the first, every …th


class Watcher:
    """Records the attention calls that the observer finds, layer by layer."""

    recording: Recording  # once the `with` is left

    def __init__(
        self, model: nn.Module, layers: Layers, keep: str, store: str = "device"
    ) -> None:
        self.model, self.keep_v = model, keep == "qkv"
        self.on_host = store == "host"
        self.towers = find_towers(model)
        self.layers = read_layers(layers, [name for name, _ in model.named_modules()])
        self.placements: dict[str, Placement] = {}
        self.weights = find_storages(model)
        self.stack = ModuleStack(self.make_observer)
        self.hooks = Hooks(model, self.stack, self.fail)
        self.passes: dict[int, Passes] = {}  # by thread
        self.samples = Samples()
        self.tallies: dict[tuple[str, bool], Tally] = {}  # by layer, attention or not
        self.failures: dict[str, None] = {}

    def make_observer(self) -> Observer:
        """Return the observer of a thread."""
        return Observer(AttentionFinder(self, self.weights, self.placements))

    @property
    def mine(self) -> Passes:
        """The passes of this thread."""
        thread = threading.get_ident()
        if thread not in self.passes:
            self.passes[thread] = Passes(on_host=self.on_host)
        return self.passes[thread]

    def begin(self, module: nn.Module, args: Any, named: Any) -> None:
        """Store the tokens and the padding of a pass."""
        self.mine.begin(read_given(module, args, named))

    def end(self, out: Any) -> None:
        """End a pass; `out` is what it returned."""
        self.mine.end(getattr(out, "past_key_values", None))

    def module(self) -> str:
        """Return the innermost module that is running in this thread."""
        return self.stack.name

    def fail(self, error: Exception) -> None:
        """Keep an error of ours for the coverage."""
        where = traceback.extract_tb(error.__traceback__)[-1:]
        at = "".join(f" ({x.name}, line {x.lineno})" for x in where)
        self.failures[f"{type(error).__name__}: {error}{at}"] = None

    def count_empty(self, module: str) -> None:
        """Count a call without queries or keys, for which torch runs no operator."""
        name = self.mine.name_layer(module)
        tally = self.tallies.setdefault((name, True), Tally("sdpa", attention=True))
        tally.calls += 1
        tally.notes[notes.EMPTY] = None

    def is_wanted(self, name: str) -> bool:
        """Return whether a layer is to be recorded; it has been counted."""
        known = [layer for layer, attention in self.tallies if attention]
        return is_chosen(self.layers, known.index(name), name)

    def drop(
        self, module: str, reason: str, *, attention: bool, via: str = "softmax"
    ) -> None:
        """Count a call that is not kept."""
        self.hooks.note(module, only_sdpa=False)
        name = self.mine.name_layer(module) if attention else module
        tally = self.tallies.setdefault(
            (name, attention), Tally(via, attention=attention)
        )
        tally.calls += 1
        tally.reasons[reason] = None

    def complete_samples(self, module: str, calls: list[CapturedCall]) -> None:
        """Record the calls that vmap made for its samples, as one call."""
        joined = join_samples(calls)
        if joined is not None:
            self.complete(module, joined)
            return
        for _ in calls:
            self.drop(module, notes.SAMPLES, attention=True)

    def complete(self, module: str, call: CapturedCall) -> None:
        """Record one attention call."""
        if self.samples.calls is not None:
            self.samples.calls.append(call)
            return
        # the heads of torch's math path, a softmax, are told by what ran before it
        stable = self.placements.get(module) is not UNSTABLE and not call.weights_taken
        self.hooks.note(module, only_sdpa=bool(self.stack.in_sdpa) and stable)
        name = self.mine.name_layer(module)
        tally = self.tallies.setdefault((name, True), Tally(call.via, attention=True))
        tally.calls += 1
        if call.note:
            tally.notes[call.note] = None
        if self.mine.is_paged or not self.is_wanted(name):
            reason = notes.PAGED if self.is_wanted(name) else "not asked for"
            tally.reasons[reason] = None
            return
        if not call.q.numel() or not call.k.numel():
            tally.notes[notes.EMPTY] = None
            return
        try:
            self.keep(name, call, tally)
        except Exception as error:
            tally.reasons[describe_error(error)] = None
            raise

    def keep(self, name: str, call: CapturedCall, tally: Tally) -> None:
        """Check a call, and add it to the run of its layer."""
        call = fix_empty_row_lse(call)
        if call.lse is None or tally.calls <= CHECKED or tally.calls % OFTEN == 0:
            call, error = check_rebuild(call)
            error = max(error, call.error)
            tally.add_error(error)
            kinds = {x.dtype for x in (call.q, call.k, call.v) if x is not None}
            if not error <= max(map(find_tolerance, kinds)):
                tally.reasons["its output could not be rebuilt"] = None
        tower = bool(self.towers) and name.startswith(self.towers)
        call = replace(call, is_cross=is_cross(self.model, name))
        run = self.mine.add(name, call, keep_v=self.keep_v, tower=tower)
        tally.kept += 1
        tally.notes |= dict.fromkeys(self.note_places(name, call, run))

    def note_places(self, name: str, call: CapturedCall, run: LayerRun) -> list[str]:
        """Return what a reader must know of a call, and of where it stands."""
        runs = self.mine.runs[name]
        found = [notes.ALTERED] if ALTERING.outputs else []
        found += [notes.PACKED] if self.mine.given.is_packed else []
        if self.mine.given.tokens is not None:
            n = self.mine.given.tokens.shape[1]
            folded = find_folded(self.model, name.partition("#")[0], call.q, n)
            found += [notes.FOLDED.format(folded)] if folded else []
        if run.rows[0].start:
            found.append(notes.PIECES if len(runs) > 1 else notes.EARLIER)
        attends_to_itself = any(not x.is_cross for x in runs)
        if run.is_cross and (attends_to_itself or not is_other_sequence(call)):
            found.append(notes.PLACE)
        return found

    def finish_safely(self) -> Recording:
        """Return everything that was kept; an error of ours becomes a reason."""
        try:
            return self.finish()
        except Exception as error:  # noqa: BLE001
            self.fail(error)
            return Recording(
                model=type(self.model).__name__, coverage=tuple(self.cover())
            )

    def finish(self) -> Recording:
        """Return everything that was kept, as records."""
        found: list[tuple[int, int, Record]] = []
        tokens: list[Told] = []
        for passes in self.passes.values():
            layers = list(passes.runs)
            for number, size, runs in passes.group_runs():
                for first, run in runs:
                    for b, record in self.make_records(passes, run.name, run):
                        place = len(tokens) + first + b
                        found.append((place, layers.index(run.name), record))
                told = passes.list_told(number)
                tokens += [told.get(b, ((), [], [])) for b in range(size)]
        found.sort(key=lambda x: x[:2])
        return Recording(
            model=type(self.model).__name__,
            records=tuple(record for *_, record in found),
            sequences=tuple(number for number, *_ in found),
            tokens=tuple(x for x, _, _ in tokens),
            coverage=tuple(self.cover()),
            notes={
                **describe_model(self.model),
                "valid": [x for _, _, x in tokens],  # of padded sequences, 0 or 1
                "hidden": [x for _, x, _ in tokens],  # padding that was taken out
                "decoders": [
                    n
                    for n, is_attention in self.tallies
                    if is_attention and is_decoder(self.model, n)
                ],
            },
        )

    def make_records(
        self, passes: Passes, name: str, run: LayerRun
    ) -> list[tuple[int, Record]]:
        """Return the records of a run; an error of ours becomes a reason."""
        tally = self.tallies[name, True]
        if tally.reasons:
            return []
        try:
            return list(run.records(passes.find_valid(run.session)))
        except Exception as error:  # noqa: BLE001
            tally.reasons[describe_error(error)] = None
            tally.kept = 0
            return []

    def cover(self) -> Iterator[Covered]:
        """Yield the coverage of each layer, and of modules that look like attention."""
        compiled = find_compiled(self.model)
        for (name, _), tally in self.tallies.items():
            if any(is_inside(name, other) for other in compiled):
                tally.notes[notes.COMPILED] = None
            yield tally.cover(name)
        for failure in self.failures:
            says = f"the observer failed: {failure}"
            yield Covered(name="", via="", reason=says, attention=False)
        heard = {name.partition("#")[0] for name, _ in self.tallies}
        heard |= self.hooks.heard.keys()
        for name in list_silent(self.model, self.hooks.ran, heard):
            yield Covered(name=name, via="", reason=notes.SILENT)
        yield from list_untested()


@contextmanager
def capture(
    model: nn.Module, *, layers: Layers = None, keep: str = "qk", store: str = "device"
) -> Iterator[Watcher]:
    """Record a model while the `with` lasts; `watcher.recording` is set after it."""
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"a {type(model).__name__} cannot be watched, expected a torch.nn.Module. "
            "Write model, tokenizer = regard.load(path) to load one."
        )
    watcher = Watcher(model, layers, keep, store)
    try:
        with ExitStack() as stack:
            stack.enter_context(patch_all(model, watcher))
            stack.callback(watcher.hooks.detach)
            watcher.hooks.attach(watcher.begin, watcher.end)
            yield watcher
    finally:
        watcher.recording = watcher.finish_safely()
        # hooks refer to it in a cycle; memory is freed now, also that of the model
        watcher.passes.clear()
        watcher.model = watcher.hooks.model = nn.Module()
