"""Locate each attention call by layer and positions, and edit it for an ablation.

    a module is entered   ─▶ store the shape of its input; for the outermost module also
                             the number of cached tokens and the padding mask
    a call is intercepted ─▶ `look`: the innermost module is the layer, its queries and
                             keys get their positions, the ablation becomes an edit

Positions are those of the whole sequence, in every decoding step, and count real tokens
only: padding has none. An ablation that missed something raises OptionError at the end.

Next: knock_out.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from regard.ablate.ablation import (
    EVERY_HEAD,
    Ablation,
    Tokens,
    TokensBySequence,
    make_edit,
    make_replacement,
    mark_heads,
)
from regard.ablate.certify_edit import Verdict
from regard.ablate.edited_calls import EditedCalls
from regard.ablate.replacement import CallPlace
from regard.ablate.verify import Verdicts, Verifier
from regard.errors import OptionError
from regard.masks.free_axes import find_axes
from regard.run.call_edit import NOTHING, CallEdit, PendingCall
from regard.run.chosen_layers import is_layer
from regard.run.modules import Run
from regard.run.own_work import is_recomputing
from regard.run.parts import is_cross, is_decoder
from regard.run.passes import Pass
from regard.run.positions import Positions
from regard.run.suspects import find_folded, list_silent


class AblationLocator:
    """One model and one ablation."""

    follows_backward = True  # calls are edited there, too
    mode: Any  # edits calls, in every thread (intercept.py)

    def __init__(
        self, model: nn.Module, ablation: Ablation, known: Verdicts | None
    ) -> None:
        self.model, self.ablation = model, ablation
        self.run = Run(model, self)
        self.verifier = Verifier(self.run, removes=ablation.removes, known=known)
        self.calls = EditedCalls(self.verifier)
        self.positions = Positions(self.run)
        self.order: list[str] = []  # the layers, as they first attended
        self.reached = {"keys": 0, "queries": 0}  # how many positions there were
        self.is_paged = False  # whether several requests ran as one sequence

    def make_mode(self) -> Any:
        """Return what edits the calls of a thread."""
        return self.mode

    def enter(self, name: str, args: Any, named: Mapping[str, Any]) -> bool:
        """Store what is needed of a module's inputs, before it runs."""
        given, now = (*args, *named.values()), self.run.here.now
        first = next((x for x in given if isinstance(x, Tensor)), None)
        now.sizes[name] = () if first is None else tuple(first.shape)
        now.slots[name] = named.get("slot")
        self.verifier.visit(name, first)
        return True

    def choose_hooks(self, module: nn.Module) -> None:
        """Follow every layer: what it is given certifies edits."""

    def begin(self, now: Pass) -> None:
        """Take note of a pass of many requests."""
        self.is_paged |= now.is_paged

    def end(self, out: Any) -> None:
        """Take note of nothing."""

    def fail(self, error: Exception) -> None:
        """Keep an error of ours: it is raised at the end."""
        self.calls.fail(error)

    def is_running(self) -> bool:
        """Return whether the model is running in this thread."""
        return bool(self.run.here.names)

    def look(self, call: PendingCall) -> CallEdit:
        """Return the edit that the ablation makes to a call."""
        if not self.is_running():  # another model's
            return NOTHING
        name, replacement = self.run.here.name, self.ablation.replacement
        if not call.n_q * call.n_k * call.like.shape[0]:  # no layer of a recording
            self.run.here.now.name_layer(name)
            return NOTHING
        layer = self.name_layer(name)
        chosen = self.ablation.heads_of(self.order.index(layer), layer)
        slots = self.positions.find_slots(name, layer, call)
        apart = not self.ablation.hides or chosen != EVERY_HEAD
        self.verifier.expect(name, chosen, call, apart=apart)
        if chosen is None:
            return NOTHING
        valid = self.positions.find_valid(name, call, slots[1])
        known = slots[0] is not None
        self.check_call(name, call, chosen, known=known, valid=valid)
        q_at, k_at = self.positions.find(name, call, slots, valid)
        for what, at in (("queries", q_at), ("keys", k_at)):
            self.reached[what] = max(self.reached[what], int(at.max()) + 1)
        some = mark_heads(self.ablation, chosen, call.heads, k_at.device)
        if replacement is not None or (self.ablation.mask is not None and call.heads):
            q_at, k_at = (x.expand(call.like.shape[0], -1) for x in (q_at, k_at))
        if replacement is None:
            return make_edit(self.ablation, some, q_at, k_at)
        spot = CallPlace(
            layer=layer,
            heads=some,
            q_at=q_at,
            k_at=k_at,
            q_taken=q_at >= 0,  # padding keeps what it has
            k_taken=k_at >= 0,
            scale=call.scale,
        )
        return make_replacement(self.ablation, replacement, spot)

    def name_layer(self, name: str) -> str:
        """Return the layer of a module's next call, and number it."""
        if is_recomputing():  # in the order of a backward pass
            mine = [x for x in self.order if x.partition("#")[0] == name]
            chosen = {self.ablation.heads_of(self.order.index(x), x) for x in mine}
            if len(chosen) == 1:
                return mine[0]
            raise OptionError(
                f"{name} attends several times, and is computed again for a gradient; "
                "which of its calls this is cannot be told. Turn checkpointing off."
            )
        layer = self.run.here.now.name_layer(name)
        if layer not in self.order:
            self.order.append(layer)
        return layer

    def check_call(
        self,
        name: str,
        call: PendingCall,
        chosen: tuple[int, ...],
        *,
        known: bool,
        valid: Tensor | None,
    ) -> None:
        """Raise OptionError for a call to which the ablation cannot be applied."""
        mask = self.ablation.mask
        differs = valid is not None or (
            mask is not None and bool(find_axes(mask, call.like))
        )
        check_heads(name, call, chosen, differs=differs)
        check_batch(name, call, self.ablation.batch)
        self.check_folded(name, call)
        self.check_padding(name)
        whole = is_whole(
            self.run.here.now.sizes.get(name, ()), call.n_q, call.like.shape[0]
        )
        if self.ablation.replacement is not None and call.heads is None:
            raise OptionError(
                f"{name} folds its heads into the batch, so that what they output "
                "cannot be replaced."
            )
        if not whole and (self.ablation.needs_positions or not call.sure):
            raise OptionError(
                f"{name} attends in pieces, {call.n_q} queries at a time, and which "
                "tokens they are cannot be told. Name other layers with layers=[…]."
            )
        if not known and self.ablation.needs_queries:
            raise OptionError(
                f"{name} attends from {call.n_q} queries to {call.n_k} keys, and which "
                "tokens the queries are cannot be told. Leave queries= out."
            )

    def check_folded(self, name: str, call: PendingCall) -> None:
        """Raise OptionError if heads are counted as queries: others would be cut."""
        sizes = self.run.here.now.sizes.get(name, ())
        known = call.sure and call.heads is not None and len(sizes) == 3
        if known and (folded := find_folded(self.model, name, call.like, sizes[1])):
            raise OptionError(
                f"{name} attends with {call.heads} heads and {call.n_q} queries, but "
                f"its projections have {folded} times as many heads for {sizes[1]} "
                "tokens. Heads cannot be identified. Leave this layer out."
            )

    def check_padding(self, name: str) -> None:
        """Raise OptionError if the positions in a decoder count padding."""
        inner = is_decoder(self.model, name) and not is_cross(self.model, name)
        shifted = inner and self.run.here.now.given.is_shifted
        if shifted and self.ablation.needs_positions:
            raise OptionError(
                f"{name} has padding on the left (decoder_attention_mask), so that its "
                "tokens have other positions. Put the padding on the right."
            )

    def check(self) -> None:
        """Raise OptionError if the ablation missed something, after the run."""
        if self.is_paged and self.ablation.needs_positions:
            raise OptionError(
                "tokens are positions in one sequence, but generate_batch runs several "
                "requests in one. Use generate, or name only heads (without keys=)."
            )
        for name in self.run.list_new():
            raise OptionError(
                f"{name} was added or replaced inside the block, so that nothing was "
                "cut from it. Change the model before."
            )
        for name, verdict in self.verifier.certified.items():
            if verdict is Verdict.WRONG:
                raise OptionError(
                    f"{name}: other heads than the chosen ones were edited, as the "
                    "layer that mixes them counts them. Leave this layer out."
                )
        for name, _ in self.verifier.tallies:
            self.check_separate(name)
            self.check_met(name)
        self.check_layers()
        self.check_modules()
        for what in ("keys", "queries"):
            self.check_reach(what, getattr(self.ablation, what))

    def check_layers(self) -> None:
        """Raise OptionError if a layer that was asked for did not attend."""
        layers = dict(enumerate(self.order))
        for layer in self.ablation.asked:
            if not any(is_layer(layer, *x) for x in layers.items()):
                raise OptionError(
                    f"layer {layer!r} was not seen attending, so nothing was cut from "
                    f"it. Seen were {layers or 'none'}."
                )
        if not layers:
            raise OptionError(
                f"no attention was seen in this {type(self.model).__name__}, so that "
                "nothing was cut from it. Run it inside of the with."
            )

    def check_modules(self) -> None:
        """Raise OptionError if a module that ran was not seen attending."""
        seen = {x.partition("#")[0] for x in self.order}
        for name in list_silent(self.model, self.run.ran, seen):
            if not (self.ablation.asked or self.ablation.reads):
                raise OptionError(
                    f"{name} ran, but its attention was not seen, so nothing was cut "
                    "from it. Name the others with layers=[…] to leave it out."
                )

    def check_reach(self, what: str, span: Tokens | TokensBySequence | None) -> None:
        """Raise OptionError if there were fewer positions than were asked for."""
        if span is not None and span.must_reach > self.reached[what]:
            raise OptionError(
                f"{what}={span.at} needs {span.must_reach} tokens, but the longest "
                f"input has {self.reached[what]}; they are counted from 0."
            )

    def check_met(self, name: str) -> None:
        """Raise OptionError if a module was edited wrongly, or not at all."""
        named = self.ablation.heads_of(-1, name) is not None
        if not (named or any(isinstance(x, int) for x in self.ablation.asked)):
            return
        if what := self.compare_calls(name, named=named):
            raise OptionError(
                f"{name} {what} cut or counted as a layer. Name the others with "
                "layers=[…] or heads=[(name, head)] to leave it out."
            )

    def compare_calls(self, name: str, *, named: bool) -> str:
        """Return how the calls of a module that attend are not those that were met."""
        tally = self.verifier.tallies.get((name, True))  # None: it does not attend
        is_edited = any(x.partition("#")[0] == name for x in self.order)
        attends = tally is not None and bool(tally.calls if named else tally.kept)
        more = self.verifier.taken[name] - self.verifier.edited[name]
        if attends and not (is_edited and more <= 0):
            return "attends, but was not"
        fewer = tally is None or (more < 0 and bool(self.ablation.asked))
        return "does not attend, but was" if is_edited and fewer else ""

    def check_separate(self, name: str) -> None:
        """Raise OptionError if a removed head was mixed with others."""
        tally = self.verifier.tallies.get((name, True))
        if tally is not None and tally.notes:
            raise OptionError(
                f"a head of {name or 'the model'} was not removed, because it is not "
                f"separate from the others: {'; '.join(tally.notes)}. Leave this layer "
                "out."
            )


def check_heads(
    name: str, call: PendingCall, chosen: tuple[int, ...], *, differs: bool
) -> None:
    """Raise OptionError if a call does not have the chosen heads.

    differs: whether the edit is not the same for all heads and sequences
    """
    some = chosen != EVERY_HEAD
    if call.heads is None and (some or differs):
        raise OptionError(
            f"{name} folds its heads into the batch, so that one of them, a sequence "
            f"or the padding cannot be told. Write layers=[{name!r}] for all heads, "
            "give one mask for all of them, and no padding."
        )
    if call.heads is not None and some and chosen[-1] >= call.heads:
        raise OptionError(
            f"{name} has {call.heads} heads, there is no head {chosen[-1]}; "
            "they are counted from 0."
        )


def check_batch(name: str, call: PendingCall, expected: int | None) -> None:
    """Raise OptionError if each sequence has its own keys, and there are others."""
    if expected is None:
        return
    if call.heads is None:
        raise OptionError(
            f"{name} folds its heads into the batch, so that its sequences cannot be "
            "told apart. Run one sequence at a time, with keys=slice(first, stop)."
        )
    if call.like.shape[0] != expected:
        raise OptionError(
            f"{name} was called with a batch of {call.like.shape[0]}, but keys= or "
            f"queries= is a list for {expected} sequences. Give one item for each "
            "sequence, None for a sequence that stays as it is."
        )


def is_whole(sizes: tuple[int, ...], n: int, batch: int) -> bool:
    """Return whether n queries are all tokens of a module's input."""
    if len(sizes) < 2:
        return True  # unknown
    (*_, rows, _), inner = sizes, sizes[1:-1]  # (B, N, C), (N, C), (B, Y, X, C)
    return n in (rows, math.prod(inner)) or sizes[:2] == (n, batch)  # or (N, B, C)
