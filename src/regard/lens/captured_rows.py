"""The rows of one call: what is kept of it, and where it stands in its sequence.

    q, lse, mask    of the rows
    start           the position of the first row; that of the first key is `first`

Next: assemble.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.lens.captured_call import CapturedCall
from regard.lens.off_heap import Kept, bring
from regard.lens.witness import Witness
from regard.recording.evidence import LseOrigin
from regard.run.cells import hides, make_four, may_see


@dataclass(frozen=True)
class CapturedRows:
    """What is kept of a call: its rows, lse and mask."""

    q: Kept  # (B, H, Nq, D)
    lse: Kept  # (B, H, Nq)
    mask: Tensor | None
    causal: bool
    n_q: int
    start: int  # position of the first row
    first: int  # position of the first key
    n_k: int  # keys of the call
    blind: Tensor | None = None  # (B, Nq), rows that average
    origin: LseOrigin = LseOrigin.KERNEL  # of lse
    witness: Witness | None = None

    def reorder(self, order: Tensor) -> CapturedRows:
        """Return the rows with the sequences in another order."""
        q, lse = (pick(bring(x), order) for x in (self.q, self.lse))
        mask = self.mask
        if mask is not None and mask.ndim == 4 and mask.shape[0] > 1:
            mask = pick(mask, order)
        blind = None if self.blind is None else pick(self.blind, order)
        witness = None if self.witness is None else self.witness.reorder(order)
        return replace(self, q=q, lse=lse, mask=mask, blind=blind, witness=witness)

    def crop(self, end: int) -> CapturedRows:
        """Return the rows before a position."""
        n_q = end - self.start
        q, lse = (bring(x)[:, :, :n_q] for x in (self.q, self.lse))
        mask = self.mask
        if mask is not None and mask.shape[-2] > 1:
            mask = mask[..., :n_q, :]
        blind = None if self.blind is None else self.blind[:, :n_q]
        seen = None if self.witness is None else self.witness.crop(n_q)
        return replace(
            self, q=q, lse=lse, mask=mask, n_q=n_q, blind=blind, witness=seen
        )


def pick(x: Tensor, order: Tensor | None) -> Tensor:
    """Return some sequences of x, in their order; all if there is none."""
    return x if order is None else x.index_select(0, order.to(x.device))


def write_rows(kept: CapturedRows, b: int, n_k: int) -> Tensor:
    """Return what is added to the scores of some rows, -inf where a key is missing."""
    n_q, mask, device = kept.n_q, kept.mask, kept.q.device
    if mask is None:
        cells = torch.zeros(1, n_q, kept.n_k, device=device)
        if kept.causal:
            rows, keys = (torch.arange(n, device=device) for n in (n_q, kept.n_k))
            later = keys + kept.first > rows[:, None] + kept.start
            cells = cells.masked_fill(later, -math.inf)
    else:
        cells = make_four(mask.detach())
        cells = cells[min(b, cells.shape[0] - 1)].to(device)
        if cells.dtype == torch.bool:
            cells = torch.zeros(cells.shape, device=device).masked_fill(
                ~cells, -math.inf
            )
        cells = cells.expand(-1, n_q, kept.n_k)
    behind = n_k - kept.first - kept.n_k
    if behind < 0:  # keys that were rejected later
        cells, behind = cells[..., :behind], 0
    return torch.nn.functional.pad(cells, (kept.first, behind), value=-math.inf)


def join_rows(pieces: Sequence[Kept]) -> Tensor:
    """Return the rows of all calls, without a copy if there is only one."""
    if len(pieces) == 1:
        return bring(pieces[0])
    return torch.cat([bring(x) for x in pieces], 2)


def extend(valid: Tensor, n: int) -> Tensor:
    """Return which of n tokens are real; those after the prompt's mask are new."""
    return torch.cat([valid, valid.new_ones(max(0, n - len(valid)))])[:n]


def cut_keys(call: CapturedCall, n: int) -> CapturedCall:
    """Return a call with its first n keys."""
    if n >= call.k.shape[2]:
        return call
    mask = call.mask
    if mask is not None and mask.shape[-1] > 1:
        mask = mask[..., :n]
    v = None if call.v is None else call.v[:, :, :n]
    return replace(call, k=call.k[:, :, :n], v=v, mask=mask)


def has_room(call: CapturedCall, before: int) -> bool:
    """Return whether rows follow `before` keys in a cache of fixed size.

    The last of them sees its own key; the keys behind it are empty and hidden.
    """
    n_q, n_k = call.q.shape[2], call.k.shape[2]
    if n_k - n_q <= before or call.mask is None or call.mask.shape[-1] == 1:
        return False
    hidden = hides(call.mask[..., before + n_q - 1 :])
    return bool(hidden[..., 1:].all()) and not bool(hidden[..., 0].all())


def grows(call: CapturedCall, before: int) -> bool:
    """Return whether a call has `before` tokens and a new one, which they hide.

    Rows of padding may instead see all keys.
    """
    n = call.q.shape[2]
    if not n == call.k.shape[2] == before + 1:
        return False
    if call.causal or call.mask is None or call.mask.shape[-2] == 1:
        return call.causal
    hidden = hides(call.mask[..., :-1, :])
    late = hidden[..., -1]
    return bool((late | ~hidden.any(-1)).all()) and bool(late.any())


def is_other_sequence(call: CapturedCall) -> bool:
    """Return whether a call attends to another sequence: its keys are in no cache."""
    return call.keys_are_new or call.is_cross


def find_place(call: CapturedCall, valid: Tensor | None) -> tuple[int, bool]:
    """Return where the rows of a first call start, and whether it is cross-attention.

    valid: (B, N), which tokens of its pass are not padding, if they are known

    With fewer queries than keys, the rows follow a cache, or are in a cache of fixed
    size, or attend to another sequence. In the first two cases each row of the mask
    ends one key later than the row before, except rows of padding.
    """
    n_q, n_k = call.q.shape[2], call.k.shape[2]
    if n_q == n_k or call.causal:
        return 0, call.is_cross and not call.causal
    if is_other_sequence(call):
        return 0, True
    if call.mask is None:
        return (n_k - 1, False) if n_q == 1 else (0, True)
    kept = CapturedRows(call.q, call.q, call.mask, call.causal, n_q, 0, 0, n_k)
    padding = find_blind_padding(call, valid)
    starts = {x for b in range(len(call.q)) for x in list_starts(kept, padding, b)}
    # one row alone cannot contradict itself, whatever other sequences may see
    start = max(starts, default=-1) if n_q == 1 or len(starts) == 1 else -1
    return (0, True) if start < 0 else (start, False)


def find_blind_padding(call: CapturedCall, valid: Tensor | None) -> Tensor | None:
    """Return which rows of padding average over all keys."""
    if call.blind is None or valid is None or valid.shape != call.blind.shape:
        return None
    return call.blind & ~valid.to(call.blind.device)


def list_starts(rows: CapturedRows, padding: Tensor | None, b: int) -> list[int]:
    """Return where the first row of a sequence stands, as each of its rows says."""
    seen = may_see(write_rows(rows, b, rows.n_k)[0])
    if padding is not None:
        seen = seen & ~padding[b, :, None]
    real = seen.any(-1).nonzero().flatten()
    ends = rows.n_k - 1 - seen[real].int().flip(-1).argmax(-1)
    found: list[int] = (ends - real).unique().tolist()
    return found
