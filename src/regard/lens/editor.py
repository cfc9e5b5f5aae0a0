"""Locate each attention call by layer and positions, and turn a cut into its edit.

    a module is entered   ─▶ store the shape of its input; for the outermost module also
                             the number of cached tokens and the padding mask
    a call is intercepted ─▶ `look`: the innermost module is the layer, its queries and
                             keys get their positions, the cut becomes an edit

Positions are those of the whole sequence, in every decoding step, and count real tokens
only: padding has none. A cut that missed something raises OptionError at the end.

Next: intervene.py
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import OptionError
from regard.lens.cut import EVERY_HEAD, Cut, is_layer, make_edit
from regard.lens.edit import NOTHING, Edit, PendingCall
from regard.lens.huggingface import is_decoder
from regard.lens.ledger import CROSS
from regard.lens.watch import read_valid
from regard.lens.whereabouts import Whereabouts, is_recomputing


class Pass(threading.local):
    """The inputs of the forward pass in this thread (thread-local)."""

    def __init__(self) -> None:
        self.before: int | None = None  # tokens in the cache, None if there is none
        self.valid: Tensor | None = None  # (B, N), which tokens are no padding
        self.sizes: dict[str, tuple[int, ...]] = {}  # of a module's first array
        self.slots: dict[str, Any] = {}  # of our own caches


class Editor:
    """One model and one cut."""

    def __init__(self, model: nn.Module, cut: Cut, here: Whereabouts) -> None:
        self.model, self.cut, self.here, self.now = model, cut, here, Pass()
        self.modules = {id(module) for module in model.modules()}
        # the caches of such a model are arguments
        self.is_described = getattr(model, "config", None) is not None
        self.order: list[str] = []  # the layers, as they first attended
        self.ran: set[str] = set()
        self.lengths: dict[str, int] = {}  # keys of the last call of a layer
        self.reached = {"keys": 0, "queries": 0}  # how many positions there were

    def owns(self, module: nn.Module) -> bool:
        """Return whether a module is a part of the model."""
        return id(module) in self.modules

    def is_running(self) -> bool:
        """Return whether the model is running in this thread."""
        return bool(self.here.stack)

    def visit(self, name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Store what is needed of a module's inputs, before it runs."""
        given, now = (*args, *named.values()), self.now
        if not self.here.stack and not is_recomputing():
            caches = (x for x in given if callable(getattr(x, "get_seq_length", None)))
            now.before = count_tokens(next(caches, None))
            valid = read_padding(args, named)
            if valid is not None or not now.before:  # later steps may have no mask
                now.valid = valid
        tokens = next((x.shape for x in given if isinstance(x, Tensor)), ())
        now.sizes[name], now.slots[name] = tuple(tokens), named.get("slot")
        self.ran.add(name)

    def look(self, call: PendingCall) -> Edit:
        """Return the edit that the cut makes to a call."""
        if not self.here.stack:  # another model's
            return NOTHING
        name = self.here.name
        if name not in self.order:
            self.order.append(name)
        chosen = self.cut.heads_of(self.order.index(name), name)
        start, first = self.find_place(name, call)
        self.lengths[name] = call.n_k
        if chosen is None or not call.n_q:
            return NOTHING
        valid = self.find_valid(name, call)
        self.check_call(name, call, chosen, known=start is not None, valid=valid)
        device, cross = call.like.device, is_cross(name)
        begin = torch.as_tensor(0 if start is None else start, device=device)
        q_at = begin.reshape(-1, 1) + torch.arange(call.n_q, device=device)
        k_at = first + torch.arange(call.n_k, device=device)[None]
        fixed = self.now.before is not None and not cross  # empty at its end
        filled = int(q_at.max()) + 1 - first if fixed else call.n_k
        q_at, k_at = number(q_at, None if cross else valid), number(k_at, valid)
        for what, at in (("queries", q_at), ("keys", k_at[:, :filled])):
            self.reached[what] = max(self.reached[what], int(at.max()) + 1)
        return make_edit(self.cut, chosen, call.heads or 1, q_at, k_at)

    def find_place(
        self, name: str, call: PendingCall
    ) -> tuple[int | Tensor | None, int]:
        """Return the slots of the first query (None if unknown) and first key."""
        slot, n_q, n_k = self.now.slots.get(name), call.n_q, call.n_k
        if slot is not None:
            return slot.start, slot.first
        start = self.now.before
        if start is not None:  # a sliding-window cache holds its last keys
            return start, 0 if is_cross(name) else max(0, start + n_q - n_k)
        if call.aligned or n_q == n_k or self.is_described or is_cross(name):
            return 0, 0
        grown = self.lengths.get(name) == n_k - n_q
        return (n_k - n_q if grown else None), 0

    def find_valid(self, name: str, call: PendingCall) -> Tensor | None:
        """Return which of a call's keys are no padding, None if none is, or unknown."""
        valid, cross = self.now.valid, is_cross(name)
        if valid is None or (not cross and is_decoder(self.model, name)):
            return None
        goes_on = bool(self.now.before) and not cross
        fits = valid.shape[1] == (call.n_k if cross else call.n_q)
        return valid if (goes_on or fits) and not bool(valid.all()) else None

    def check_call(
        self,
        name: str,
        call: PendingCall,
        chosen: tuple[int, ...],
        *,
        known: bool,
        valid: Tensor | None,
    ) -> None:
        """Raise OptionError for a call to which the cut cannot be applied."""
        folded = call.heads is None
        if folded and (chosen != EVERY_HEAD or valid is not None):
            raise OptionError(
                f"{name} folds its heads into the batch, so that one of them, or the "
                f"padding, cannot be told. Write layers=[{name!r}] for all heads, and "
                "give no padding."
            )
        if call.heads is not None and chosen != EVERY_HEAD and chosen[-1] >= call.heads:
            raise OptionError(
                f"{name} has {call.heads} heads, there is no head {chosen[-1]}; "
                "they are counted from 0."
            )
        whole = is_whole(self.now.sizes.get(name, ()), call.n_q, call.like.shape[0])
        if not whole and not (call.sure and self.cut.keys is None):
            raise OptionError(
                f"{name} attends in pieces, {call.n_q} queries at a time, and which "
                "tokens they are cannot be told. Name other layers with layers=[…]."
            )
        if not known and self.cut.queries is not None:
            raise OptionError(
                f"{name} attends from {call.n_q} queries to {call.n_k} keys, and which "
                "tokens the queries are cannot be told. Leave queries= out."
            )

    def check(self) -> None:
        """Raise OptionError if the cut missed something, after the run."""
        layers = dict(enumerate(self.order))
        for layer in self.cut.asked:
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
        for name, module in () if self.cut.asked else self.model.named_modules():
            called = "attention" in type(module).__name__.lower() and name in self.ran
            pairs = [(f"{x}.", f"{name}.") for x in self.order]
            if called and not any(x.startswith(y) or y.startswith(x) for x, y in pairs):
                raise OptionError(
                    f"{name} ran, but its attention was not seen, so nothing was cut "
                    "from it. Name the others with layers=[…] to leave it out."
                )
        for name, span in (("keys", self.cut.keys), ("queries", self.cut.queries)):
            if span is not None and span.must_reach >= self.reached[name]:
                raise OptionError(
                    f"{name}={span.at} asks for position {span.must_reach}, but the "
                    f"longest input has {self.reached[name]}, counted from 0."
                )


def is_cross(name: str) -> bool:
    """Return whether a layer is cross-attention, judged by its name."""
    return CROSS.search(name) is not None


def is_whole(sizes: tuple[int, ...], n: int, batch: int) -> bool:
    """Return whether n queries are all tokens of a module's input."""
    if len(sizes) < 2:
        return True  # unknown
    (*_, rows, _), inner = sizes, sizes[1:-1]  # (B, N, C), (N, C), (B, Y, X, C)
    return n in (rows, math.prod(inner)) or sizes[:2] == (n, batch)  # or (N, B, C)


def count_tokens(cache: Any) -> int | None:
    """Return how many tokens a cache of transformers holds, None if it has no keys."""
    try:
        return None if cache is None else int(cache.get_seq_length())
    except (TypeError, ValueError):  # a state of another kind than keys and values
        return None


def read_padding(args: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor | None:
    """Return which tokens (B, N) are no padding, from what a model was given."""
    tokens = named.get("input_ids", args[0] if args else None)
    mask = named.get("attention_mask", named.get("valid"))
    return read_valid(mask, tokens if isinstance(tokens, Tensor) else None)


def number(slots: Tensor, valid: Tensor | None) -> Tensor:
    """Return which tokens are in these slots (B or 1, N); -1 is padding."""
    if valid is None:
        return slots
    more = max(0, int(slots.max()) + 1 - valid.shape[1])  # generated since then
    real = torch.nn.functional.pad(valid, (0, more), value=True).to(slots.device)
    at = torch.where(real, real.cumsum(1) - 1, -1)  # (B, N)
    return at.gather(1, slots.expand(at.shape[0], -1))
