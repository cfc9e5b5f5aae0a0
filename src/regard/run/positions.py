"""Which tokens the queries and the keys of a call are, before it runs.

    slot        place among all tokens of a sequence, padding included
    position    place among the real tokens; padding is at -1

The cache of a pass says at which slot its queries begin. What is padding is said by the
mask of the model, but only if the call itself hides these keys: another model may mean
something else by it.

Next: call_edit.py
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.run.call_edit import PendingCall
from regard.run.cells import make_four
from regard.run.modules import Run
from regard.run.parts import find_towers, is_cross, is_decoder

Slots = tuple[int | Tensor | None, int]  # of the first query (None: unknown) and key


class Positions:
    """The positions of the calls of a model."""

    def __init__(self, run: Run) -> None:
        self.run, self.model = run, run.model
        self.towers = find_towers(run.model)
        # the caches of such a model are arguments
        described = getattr(run.model, "config", None) is not None
        self.is_described = described or len(run.models) > 1
        self.lengths: dict[str, int] = {}  # keys of the last call of a layer

    def find_slots(self, name: str, layer: str, call: PendingCall) -> Slots:
        """Return where the queries and the keys of the next call of a layer begin."""
        now, n_q, n_k = self.run.here.now, call.n_q, call.n_k
        grown = self.lengths.get(layer) == n_k - n_q
        self.lengths[layer] = n_k
        slot, start = now.slots.get(name), now.given.before
        if slot is not None:
            return slot.start, slot.first
        if start and self.is_apart(name, call):
            return 0, 0
        cross = is_cross(self.model, name)
        if start is not None:  # a sliding-window cache holds its last keys
            return start, 0 if cross else max(0, start + n_q - n_k)
        if call.aligned or n_q == n_k or self.is_described or cross:
            return 0, 0
        return (n_k - n_q if grown else None), 0

    def is_apart(self, name: str, call: PendingCall) -> bool:
        """Return whether a layer has no keys in a cache that is not empty."""
        other = bool(self.towers) and name.startswith(self.towers)
        config = getattr(self.model, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            inside = is_cross(self.model, name) or is_decoder(self.model, name)
            other |= not inside
        return other or call.n_q == call.n_k > 1

    def find_valid(self, name: str, call: PendingCall, first: int) -> Tensor | None:
        """Return which tokens are not padding, None if all, or unknown."""
        now, cross = self.run.here.now, is_cross(self.model, name)
        valid = now.valid
        if valid is None or (not cross and is_decoder(self.model, name)):
            return None
        goes_on = bool(now.given.before) and not cross
        fits = valid.shape[1] in ({call.n_k} if cross else {call.n_q, call.n_k})
        if not (goes_on or fits) or bool(valid.all()):
            return None
        hidden = call.find_hidden()
        if hidden is None or not is_owned(valid, hidden, call, first, cross=cross):
            return None
        return valid

    def find(
        self, name: str, call: PendingCall, slots: Slots, valid: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the positions of the queries and the keys, (B or 1, N)."""
        (start, first), device = slots, call.like.device
        cross = is_cross(self.model, name)
        begin = torch.as_tensor(0 if start is None else start, device=device)
        q_at = begin.reshape(-1, 1) + torch.arange(call.n_q, device=device)
        k_at = first + torch.arange(call.n_k, device=device)[None]
        fixed = self.run.here.now.given.before is not None and not cross
        filled = int(q_at.max()) + 1 - first if fixed else call.n_k  # empty at its end
        q_at, k_at = number(q_at, None if cross else valid), number(k_at, valid)
        filled = min(filled, call.n_k - call.learnt)
        there = torch.arange(call.n_k, device=device) < filled
        return q_at, torch.where(there, k_at, -1)


def number(slots: Tensor, valid: Tensor | None) -> Tensor:
    """Return which tokens are in these slots (B or 1, N); -1 is padding."""
    if valid is None:
        return slots
    more = max(0, int(slots.max()) + 1 - valid.shape[1])  # generated since then
    real = pad(valid, (0, more), value=True).to(slots.device)
    at = torch.where(real, real.cumsum(1) - 1, -1)  # (B, N)
    return at.gather(1, slots.expand(at.shape[0], -1))


def is_owned(
    valid: Tensor, hidden: Tensor, call: PendingCall, first: int, *, cross: bool
) -> bool:
    """Return whether a call hides the padding (B, N) from all of its other tokens."""
    batch, n = len(valid), first + call.n_k
    valid = pad(valid, (0, max(0, n - valid.shape[1])), value=True)
    real = valid[:, None, None, first:n].to(hidden.device)  # (B, 1, 1, Nk)
    if hidden.ndim == 3 and call.heads is None and hidden.shape[0] % batch == 0:
        hidden = hidden.unflatten(0, (batch, -1))  # heads were folded into the batch
    hidden = make_four(hidden)
    if hidden.shape[0] not in (1, batch):
        return False
    done = (hidden | real).all(-1)  # (B, H, Nq)
    if not cross and call.n_q == call.n_k:
        # rows of padding may see everything, or nothing
        odd = hidden.all(-1) | (~hidden).all(-1)
        done = done | (odd & ~real[:, :, 0])
    return bool(done.all())
