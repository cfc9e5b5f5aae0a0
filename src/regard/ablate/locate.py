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

import torch
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
from regard.ablate.current_pass import CurrentPass, is_owned, number
from regard.ablate.replacement import CallPlace
from regard.ablate.running_modules import RunningModules
from regard.ablate.verify import Heard, Verifier
from regard.errors import OptionError
from regard.lens.call_edit import NOTHING, CallEdit, PendingCall
from regard.lens.chosen_layers import is_layer
from regard.lens.module_stack import (
    find_models,
    find_module,
    find_towers,
    is_cross,
    is_decoder,
    is_recomputing,
)
from regard.lens.padding import is_paged, name_arguments
from regard.lens.suspects import find_folded, list_silent
from regard.lens.tally import is_inside


class AblationLocator:
    """One model and one ablation."""

    def __init__(
        self,
        model: nn.Module,
        ablation: Ablation,
        here: RunningModules,
        verifier: Verifier,
    ) -> None:
        self.model, self.ablation, self.here = model, ablation, here
        self.verifier, self.now = verifier, CurrentPass()
        self.models, self.towers = find_models(model), find_towers(model)
        # the caches of such a model are arguments
        described = getattr(model, "config", None) is not None
        self.is_described = described or len(self.models) > 1
        self.order: list[str] = []  # the layers, as they first attended
        self.ran: set[str] = set()
        self.lengths: dict[str, int] = {}  # keys of the last call of a layer
        self.reached = {"keys": 0, "queries": 0}  # how many positions there were
        self.is_paged = False  # whether several requests ran as one sequence

    def is_running(self) -> bool:
        """Return whether the model is running in this thread."""
        return bool(self.here.stack)

    def visit(self, name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Store what is needed of a module's inputs, before it runs."""
        given, now = (*args, *named.values()), self.now
        self.is_paged |= is_paged(named)
        first = not self.here.stack
        if not is_recomputing() and (first or name in self.models):
            told = name_arguments(find_module(self.model, name), args, named)
            last = not any(x != name and is_inside(x, name) for x in self.models)
            now.begin(given, told, is_first=first, is_last=last)
        tokens = next((x.shape for x in given if isinstance(x, Tensor)), ())
        now.sizes[name], now.slots[name] = tuple(tokens), named.get("slot")
        self.ran.add(name)
        self.verifier.visit(name)

    def look(self, call: PendingCall) -> CallEdit:
        """Return the edit that the ablation makes to a call."""
        if not self.here.stack:  # another model's
            return NOTHING
        name, replacement = self.here.name, self.ablation.replacement
        layer = self.name_layer(name)
        chosen = self.ablation.heads_of(self.order.index(layer), layer)
        start, first = self.find_place(name, layer, call)
        self.lengths[layer] = call.n_k
        apart = not self.ablation.hides or chosen != EVERY_HEAD
        self.verifier.expect(name, chosen if apart else None)
        if chosen is None or not call.n_q:
            return NOTHING
        valid = self.find_valid(name, call, first)
        self.check_call(name, call, chosen, known=start is not None, valid=valid)
        place = (0 if start is None else start, first)
        q_at, k_at = self.find_positions(name, call, place, valid)
        some = mark_heads(self.ablation, chosen, call.heads or 1, k_at.device)
        if replacement is not None or self.ablation.mask is not None:
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

    def find_positions(
        self,
        name: str,
        call: PendingCall,
        place: tuple[int | Tensor, int],  # slots of the first query and key
        valid: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the positions of a call's queries and keys, (B or 1, N)."""
        (start, first), device, cross = place, call.like.device, self.is_cross(name)
        begin = torch.as_tensor(start, device=device)
        q_at = begin.reshape(-1, 1) + torch.arange(call.n_q, device=device)
        k_at = first + torch.arange(call.n_k, device=device)[None]
        fixed = self.now.before is not None and not cross  # empty at its end
        filled = int(q_at.max()) + 1 - first if fixed else call.n_k
        q_at, k_at = number(q_at, None if cross else valid), number(k_at, valid)
        there = torch.arange(call.n_k, device=device) < filled
        k_at = torch.where(there, k_at, -1)
        for what, at in (("queries", q_at), ("keys", k_at)):
            self.reached[what] = max(self.reached[what], int(at.max()) + 1)
        return q_at, k_at

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
        number = self.now.numbers[name] = self.now.numbers.get(name, 0) + 1
        layer = name if number == 1 else f"{name}#{number}"
        if layer not in self.order:
            self.order.append(layer)
        return layer

    def find_place(
        self, name: str, layer: str, call: PendingCall
    ) -> tuple[int | Tensor | None, int]:
        """Return the slots of the first query (None if unknown) and first key."""
        slot, n_q, n_k = self.now.slots.get(name), call.n_q, call.n_k
        if slot is not None:
            return slot.start, slot.first
        start = self.now.before
        if start and self.is_apart(name, call):
            return 0, 0
        if start is not None:  # a sliding-window cache holds its last keys
            return start, 0 if self.is_cross(name) else max(0, start + n_q - n_k)
        if call.aligned or n_q == n_k or self.is_described or self.is_cross(name):
            return 0, 0
        grown = self.lengths.get(layer) == n_k - n_q
        return (n_k - n_q if grown else None), 0

    def is_cross(self, name: str) -> bool:
        """Return whether a layer is cross-attention."""
        return is_cross(self.model, name)

    def is_apart(self, name: str, call: PendingCall) -> bool:
        """Return whether a layer has no keys in a cache that is not empty."""
        other = bool(self.towers) and name.startswith(self.towers)
        config = getattr(self.model, "config", None)
        if getattr(config, "is_encoder_decoder", False) and not self.is_cross(name):
            other |= not is_decoder(self.model, name)
        return other or call.n_q == call.n_k > 1

    def find_valid(self, name: str, call: PendingCall, first: int) -> Tensor | None:
        """Return which tokens are no padding, None if all, or unknown.

        The model's mask tells what is padding, but only if the call itself hides these
        keys: another model may mean something else by it.
        """
        valid, cross = self.now.valid, self.is_cross(name)
        if valid is None or (not cross and is_decoder(self.model, name)):
            return None
        goes_on = bool(self.now.before) and not cross
        fits = valid.shape[1] == (call.n_k if cross else call.n_q)
        if not (goes_on or fits) or bool(valid.all()):
            return None
        hidden = call.find_hidden()
        if hidden is None or not is_owned(valid, hidden, call, first, cross=cross):
            return None
        return valid

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
        check_heads(name, call, chosen, has_padding=valid is not None)
        check_batch(name, call, self.ablation.batch)
        self.check_folded(name, call)
        self.check_padding(name)
        whole = is_whole(self.now.sizes.get(name, ()), call.n_q, call.like.shape[0])
        folds = call.heads is None and not call.sure
        if self.ablation.replacement is not None and folds:
            raise OptionError(
                f"{name} computes attention with a softmax of its own, with heads in "
                "the batch, so that what they output cannot be replaced."
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
        sizes = self.now.sizes.get(name, ())
        known = call.sure and call.heads is not None and len(sizes) == 3
        if known and (folded := find_folded(self.model, name, call.like, sizes[1])):
            raise OptionError(
                f"{name} attends with {call.heads} heads and {call.n_q} queries, but "
                f"its projections have {folded} times as many heads for {sizes[1]} "
                "tokens. Heads cannot be identified. Leave this layer out."
            )

    def check_padding(self, name: str) -> None:
        """Raise OptionError if the positions in a decoder count padding."""
        inner = is_decoder(self.model, name) and not self.is_cross(name)
        if self.now.is_shifted and inner and self.ablation.needs_positions:
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
        for name, heard in self.verifier.heard.items():
            self.check_met(name, heard)
            check_separate(name, heard)
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
        for name in list_silent(self.model, self.ran, seen):
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

    def check_met(self, name: str, heard: Heard) -> None:
        """Raise OptionError if a module was edited wrongly, or not at all."""
        is_edited = any(x.partition("#")[0] == name for x in self.order)
        named = self.ablation.heads_of(-1, name) is not None
        asked = named or any(isinstance(x, int) for x in self.ablation.asked)
        missed = heard.attends(by_name=named) and not is_edited
        if asked and (missed or (heard.is_other and is_edited)):
            what = "attends, but was not" if missed else "does not attend, but was"
            raise OptionError(
                f"{name} {what} cut or counted as a layer. Name the others with "
                "layers=[…] or heads=[(name, head)] to leave it out."
            )


def check_separate(name: str, heard: Heard) -> None:
    """Raise OptionError if a removed head was mixed with others."""
    if heard.changes or heard.left:
        why = "; ".join(heard.changes) or "its heads could not be told apart"
        raise OptionError(
            f"a head of {name} was not removed, because it is not separate "
            f"from the others: {why}. Leave this layer out."
        )


def check_heads(
    name: str, call: PendingCall, chosen: tuple[int, ...], *, has_padding: bool
) -> None:
    """Raise OptionError if a call does not have the chosen heads."""
    some = chosen != EVERY_HEAD
    if call.heads is None and (some or has_padding):
        raise OptionError(
            f"{name} folds its heads into the batch, so that one of them, or the "
            f"padding, cannot be told. Write layers=[{name!r}] for all heads, and "
            "give no padding."
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
