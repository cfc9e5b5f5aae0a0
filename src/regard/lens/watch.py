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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

import regard.lens.coverage_notes as notes
from regard.errors import OptionError
from regard.lens.about_model import describe_model, list_untested
from regard.lens.assemble import LayerRun
from regard.lens.captured_call import CapturedCall, join_samples
from regard.lens.captured_rows import is_other_sequence
from regard.lens.certify_run import certify_made
from regard.lens.check_rebuild import check_rebuild, find_tolerance, fix_empty_row_lse
from regard.lens.find_attention import UNSTABLE, AttentionFinder, describe_error
from regard.lens.observer import Observer, list_rests
from regard.lens.passes import Passes, Told
from regard.lens.patches import Samples, patch_all
from regard.lens.placement import Placement
from regard.lens.tally import Tallies, Tally, find_compiled
from regard.lens.trace import find_storages
from regard.lens.wide_passes import WidePasses
from regard.recording.certificate import Claim
from regard.recording.evidence import Covered
from regard.recording.record import Recording
from regard.run.call_edit import ALTERING
from regard.run.chosen_layers import Layers, is_chosen, read_layers
from regard.run.modules import Act, Run, RunningModules, follow
from regard.run.parts import find_towers, is_cross, is_decoder, is_inside
from regard.run.passes import Pass
from regard.run.suspects import find_folded, list_silent

CHECKED, OFTEN = 2, 64  # calls of a layer that are checked: the first, every …th


class Watcher(Tallies):
    """Records the attention calls that the observer finds, layer by layer."""

    recording: Recording  # once the block is left
    follows_backward = False  # the calls of a forward pass are known already

    def __init__(
        self, model: nn.Module, layers: Layers, keep: str, store: str = "device"
    ) -> None:
        super().__init__()
        self.model, self.keep_v = model, keep == "qkv"
        self.on_host = store == "host"
        self.towers = find_towers(model)
        self.layers = read_layers(layers, [name for name, _ in model.named_modules()])
        self.placements: dict[str, Placement] = {}
        self.weights = find_storages(model)
        self.wide = WidePasses()
        self.passes: dict[int, Passes] = {}  # by thread
        self.samples = Samples()
        self.run = Run(model, self)
        self.observers: list[Observer] = []  # of all threads
        self.missed = 0  # calls that were not observed

    def make_mode(self) -> Observer:
        """Return the observer of a thread."""
        finder = AttentionFinder(self, self.weights, self.placements)
        self.observers.append(Observer(finder))
        return self.observers[-1]

    @property
    def here(self) -> RunningModules:
        """The modules that are running in this thread; `mode` is its observer."""
        return self.run.here

    @property
    def mine(self) -> Passes:
        """The passes of this thread."""
        thread = threading.get_ident()
        if thread not in self.passes:
            self.passes[thread] = Passes(self.here.now, on_host=self.on_host)
        mine = self.passes[thread]
        mine.now = self.here.now  # of a new thread with the number of an old one
        return mine

    def enter(self, name: str, _args: Any, _named: Any) -> bool:
        """Return whether the observer has to be active in a module."""
        return self.wide.needs_observer(self.run, name)

    def choose_hooks(self, module: nn.Module) -> tuple[Act, Act] | None:
        """Return how the observer rests while a layer runs that cannot attend."""
        return list_rests(self.here, module)

    def begin(self, now: Pass) -> None:
        """Begin a pass, or a model inside of one."""
        self.mine.begin()
        if now.depth == 1:
            self.wide.begin()

    def end(self, out: Any) -> None:
        """End a pass; `out` is what it returned."""
        self.mine.end(getattr(out, "past_key_values", None))
        if self.here.now.depth:  # a pass in another one
            return
        missed = self.here.mode.count_missed()
        self.missed += missed
        self.wide.end(self.run, finished=out is not None and not missed)

    def module(self) -> str:
        """Return the innermost module that is running in this thread."""
        return self.here.name

    def count_empty(self, module: str) -> None:
        """Count a call without queries or keys, for which torch runs no operator."""
        name = self.here.now.name_layer(module)
        self.count(name, "sdpa", attention=True).notes[notes.EMPTY] = None

    def is_wanted(self, name: str) -> bool:
        """Return whether a layer is to be recorded; it has been counted."""
        known = [layer for layer, attention in self.tallies if attention]
        return is_chosen(self.layers, known.index(name), name)

    def drop(
        self, module: str, reason: str, *, attention: bool, via: str = "softmax"
    ) -> None:
        """Count a call that is not kept."""
        self.wide.note(module, only_sdpa=False)
        name = self.here.now.name_layer(module) if attention else module
        self.count(name, via, attention=attention).reasons[reason] = None

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
        only_sdpa = bool(self.here.mode.in_sdpa) and stable
        self.wide.note(module, only_sdpa=only_sdpa, from_outside=call.from_outside)
        name = self.here.now.name_layer(module)
        tally = self.count(name, call.via, attention=True)
        if call.note:
            tally.notes[call.note] = None
        if self.here.now.is_paged or not self.is_wanted(name):
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
            known = (call.q, call.k, call.v, call.lse)
            kinds = {x.dtype for x in known if x is not None}
            if not error <= max(call.rounding, *map(find_tolerance, kinds)):
                tally.reasons["its output could not be rebuilt"] = None
        tower = bool(self.towers) and name.startswith(self.towers)
        call = replace(call, is_cross=is_cross(self.model, name))
        run = self.mine.add(name, call, keep_v=self.keep_v, tower=tower)
        tally.kept += 1
        tally.rows += len(call.q) * call.q.shape[2]
        tally.notes |= dict.fromkeys(self.note_places(name, call, run))

    def note_places(self, name: str, call: CapturedCall, run: LayerRun) -> list[str]:
        """Return what a reader must know of a call, and of where it stands."""
        runs, given = self.mine.runs[name], self.here.now.given
        found = [notes.ALTERED] if ALTERING.outputs else []
        found += [notes.PACKED] if given.is_packed else []
        n = call.k.shape[2] if given.tokens is None else given.tokens.shape[1]
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
        made: list[tuple[int, int, Claim]] = []
        tokens: list[Told] = []
        for passes in self.passes.values():
            layers = list(passes.runs)
            for number, size, runs in passes.group_runs():
                for places, run in runs:
                    valid = passes.find_valid(run.session, places)
                    for b, claim in self.make_records(run, valid):
                        place = len(tokens) + places[b]
                        made.append((place, layers.index(run.name), claim))
                told = passes.list_told(number)
                tokens += [told.get(b, ((), [], [])) for b in range(size)]
        self.missed += sum(x.count_missed() for x in self.observers)
        found = certify_made(made, self.tallies)
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
        self, run: LayerRun, valid: Tensor | None
    ) -> list[tuple[int, Claim]]:
        """Return the records of a run; an error of ours becomes a reason."""
        tally = self.tallies[run.name, True]
        if tally.reasons:
            return []
        try:
            made = list(run.records(valid)) if run.rows else []
        except Exception as error:  # noqa: BLE001
            tally.reasons[describe_error(error)] = None
            tally.kept = 0
            return []
        tally.in_records += sum(x.record.shape[1] for _, x in made)
        tally.left_out.update(run.left_out)
        tally.rows += run.copied
        return made

    def cover(self) -> Iterator[Covered]:
        """Yield the coverage of each layer, and of modules that look like attention."""
        compiled: list[str] = []
        with self.run.contain():
            compiled = find_compiled(self.model)
        for (name, _), tally in self.tallies.items():
            if any(is_inside(name, other) for other in compiled):
                tally.notes[notes.COMPILED] = None
            if unseen := self.wide.unseen[name.partition("#")[0]]:
                tally.notes[notes.UNSEEN.format(unseen)] = None
            yield tally.cover(name)
        for failure in self.failures:
            says = f"the observer failed: {failure}"
            yield Covered(name="", via="", reason=says, attention=False)
        if self.missed:
            reason = notes.MISSED.format(self.missed)
            yield Covered(name="", via="", reason=reason, attention=False)
        heard = {name.partition("#")[0] for name, _ in self.tallies}
        heard |= self.wide.heard.keys()
        for name in list_silent(self.model, self.run.ran, heard):
            yield Covered(name=name, via="", reason=notes.SILENT)
        for name in self.run.list_new():
            yield Covered(name=name, via="", reason=notes.NEW, attention=False)
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
            stack.enter_context(follow(watcher.run))
            stack.enter_context(patch_all(model, watcher))
            yield watcher
    finally:
        watcher.recording = watcher.finish_safely()
        # hooks refer to it in a cycle; memory is freed now, also that of the model
        watcher.passes.clear()
        watcher.model = watcher.run.model = nn.Module()
        watcher.run.parts.clear()
