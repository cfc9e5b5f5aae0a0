"""Assemble calls into records: one per layer and sequence, by absolute positions.

    prefill         q 0 … 9,   k 0 … 9
    decode          q 10,      k 0 … 10      ─▶   q 0 … 11,   k 0 … 11
    decode          q 11,      k 0 … 11

A call continues a group if its keys start, bit for bit, with the previous call's keys;
otherwise it begins a new group. Only the keys of the last call are kept, which include
all earlier ones except those that a sliding-window cache dropped; these are kept
separately. Padding is removed according to the model's attention mask, so row i of a
record is token q_positions[i] of its sequence.

Next: watch.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.engine.choose import attend
from regard.lens.pages import Pages, bring, keep
from regard.lens.sight import Sight, make_four, may_see, split_mask
from regard.masks.algebra import Mask
from regard.masks.patterns import causal, window
from regard.recording.record import Record

CROSS = re.compile(r"cross|encoder_attn|EncDec|multihead_attn", re.IGNORECASE)
CHECKED = 8  # rows of a call that are rebuilt from what is kept


@dataclass(frozen=True)
class Kept:
    """What is kept of a call: its rows, lse and mask."""

    q: Tensor | Pages  # (B, H, Nq, D)
    lse: Tensor | Pages  # (B, H, Nq)
    mask: Tensor | None
    causal: bool
    n_q: int
    start: int  # position of the first row
    first: int  # position of the first key
    n_k: int  # keys of the call


class Group:
    """Calls of one layer that continue each other, as in prefill and decode."""

    def __init__(self, name: str, sight: Sight, *, keep_v: bool) -> None:
        self.name, self.keep_v = name, keep_v
        self.scale, self.softcap, self.sink = sight.scale, sight.softcap, sight.sink
        self.rows: list[Kept] = []
        self.turn = 0  # of which group of passes it is
        self.k: Tensor | Pages = sight.k[:, :, :0].clone()  # of the last call
        self.v: Tensor | Pages | None = None
        self.end, self.is_cross = find_place(name, sight)  # behind the last row
        self.first = 0  # position of the first key that the cache still holds
        self.forgotten: list[list[Tensor]] = []  # k, and v if kept, of those before it
        self.edge: list[Tensor] = []  # first key, its value: copies
        self.add(sight)

    def goes_on(self, sight: Sight) -> bool:
        """Return whether a call continues this group."""
        theirs, mine = self.overlap(sight)
        return bool(mine.numel()) and bool(torch.equal(theirs, mine))

    def is_reordered(self, sight: Sight) -> bool:
        """Return whether a call with reordered sequences would continue this group."""
        theirs, mine = self.overlap(sight)
        known = (any(torch.equal(x, y) for y in mine) for x in theirs)
        return bool(mine.numel()) and all(known)

    def overlap(self, sight: Sight) -> tuple[Tensor, Tensor]:
        """Return key fingerprints, its and ours, that are equal if a call continues."""
        n, gone = self.count_shared(sight)
        return sight.marks[:, :n], self.known[:, gone : gone + n]

    def count_shared(self, sight: Sight) -> tuple[int, int]:
        """Return how many keys a call shares with the last one; 0 if it is another.

        Also return how many of the first keys a sliding window has dropped.
        """
        (*lead, before, width), (*given, n_k, size) = self.k.shape, sight.k.shape
        n_q, old = sight.q.shape[2], n_k - sight.q.shape[2]
        if lead != given or width != size:
            return 0, 0
        if old == before:
            return before, 0
        again = n_k == before and not sight.causal and old > 0
        if again and self.is_cross:
            return n_k, 0
        if again and self.rows[0].n_q < self.rows[0].n_k and self.end + n_q <= n_k:
            return self.end, 0  # behind it, a cache of fixed size is empty
        slid = not self.is_cross and self.first + before == self.end
        return (old, before - old) if slid and 0 < old < before else (0, 0)

    def add(self, sight: Sight) -> None:
        """Store the rows of a call; its keys replace those of the last call."""
        n_q, n_k = sight.q.shape[2], sight.k.shape[2]
        if self.rows and (gone := self.count_shared(sight)[1]):
            kept = [bring(x) for x in (self.k, self.v) if x is not None]
            front = self.edge if self.edge and gone == 1 else kept
            self.forgotten.append([x[:, :, :gone].clone() for x in front])
            self.first += gone
        assert sight.lse is not None
        self.rows.append(
            Kept(
                q=keep(sight.q),
                lse=keep(sight.lse),
                mask=sight.mask,
                causal=sight.causal,
                n_q=n_q,
                start=self.end,
                first=self.first,
                n_k=n_k,
            )
        )
        self.end += n_q
        fixed = n_q > 1 or n_k <= self.k.shape[2]
        # the next step brings all keys again
        self.k = keep(sight.k) if n_q > 1 else sight.k.detach()
        self.v = keep(sight.v) if self.keep_v and sight.v is not None else None
        self.known, self.edge = sight.marks, []
        if fixed and not self.is_cross:  # perhaps a cache that is written in place
            kept = [bring(x) for x in (self.k, self.v) if x is not None]
            self.edge = [x[:, :, :1].clone() for x in kept]

    def records(self, valid: Tensor | None) -> Iterator[tuple[int, Record]]:
        """Yield the record of every sequence of the batch."""
        q, lse = (
            join_rows([x.q for x in self.rows]),
            join_rows([x.lse for x in self.rows]),
        )
        at = torch.cat([torch.arange(x.start, x.start + x.n_q) for x in self.rows])
        k, v = self.join_keys()
        n_k = k.shape[2]
        for b in range(q.shape[0]):
            keys = torch.arange(n_k)
            real = None if valid is None else valid[b]
            if not self.is_cross:
                keys = keys[: int(at.max()) + 1]  # behind it, a cache is still empty
            kept: Any = slice(None)
            if real is not None and self.is_cross and len(real) != len(keys):
                real = None  # of the queries' sequence, or of a third one
            if real is not None:
                real = extend(real, len(keys))
                keys = keys[real]
                kept = kept if self.is_cross else real[at]
            rows, columns = at[kept], torch.arange(len(keys))
            if real is not None and not self.is_cross:
                rows = real.cumsum(0)[rows] - 1  # padding has no position
            mask, bias = self.find_mask(b, kept, keys, (rows, columns))
            yield (
                b,
                Record(
                    name=self.name,
                    q=q[b][:, kept],
                    k=k[b] if len(keys) == n_k else k[b][:, keys],
                    v=None if v is None else v[b][:, keys],
                    lse=lse[b][:, kept],
                    scale=self.scale,
                    softcap=self.softcap,
                    sink=None if self.sink is None else self.sink.detach(),
                    mask=mask,
                    bias=bias,
                    q_positions=rows,
                    k_positions=columns,
                ),
            )

    def join_keys(self) -> tuple[Tensor, Tensor | None]:
        """Return all keys, and values if kept, including those that a cache dropped."""
        k = join_rows([*(x[0] for x in self.forgotten), self.k])
        if self.v is None:
            return k, None
        return k, join_rows([*(x[1] for x in self.forgotten), self.v])

    def find_mask(
        self, b: int, kept: Any, keys: Tensor, positions: tuple[Tensor, Tensor]
    ) -> tuple[Mask | Tensor | None, Tensor | None]:
        """Return the mask of a sequence as a formula if it is one, and its bias."""
        first = self.rows[0]
        if all(x.mask is None for x in self.rows) and not self.forgotten:
            square = first.causal or len(self.rows) > 1
            return (causal() if square and not self.is_cross else None), None
        n_k = self.first + self.k.shape[2]
        blocks = [write_rows(x, b, n_k) for x in self.rows]
        cells = torch.cat(blocks, 1)[:, kept][..., keys]  # (H or 1, Nq, Nk)
        allowed = may_see(cells)
        bias = torch.where(allowed, cells, 0)
        return recognise(allowed, *positions), (bias if bool(bias.any()) else None)


def find_place(name: str, sight: Sight) -> tuple[int, bool]:
    """Return where the rows of a first call start, and whether it is cross-attention.

    With fewer queries than keys, the rows follow a cache, or are in a cache of fixed
    size, or attend to another sequence. In the first two cases each row of the mask
    ends one key later than the row before.
    """
    n_q, n_k = sight.q.shape[2], sight.k.shape[2]
    other = CROSS.search(name) is not None
    if n_q == n_k or sight.causal:
        return 0, other
    if sight.door == "nn.MultiheadAttention" or other:
        return 0, True
    if sight.mask is None:
        return (n_k - 1, False) if n_q == 1 else (0, True)
    kept = Kept(sight.q, sight.q, sight.mask, sight.causal, n_q, 0, 0, n_k)
    rows = write_rows(kept, 0, n_k)
    seen = may_see(rows[0]).int()
    ends = torch.where(seen.any(-1), n_k - 1 - seen.flip(-1).argmax(-1), -1)
    real = ends[ends >= 0]
    if len(real) and bool((real.diff() == 1).all()):
        return int(ends[-1]) - n_q + 1, False
    return 0, True


def write_rows(kept: Kept, b: int, n_k: int) -> Tensor:
    """Return what is added to the scores of some rows, -inf where a key is missing."""
    n_q, mask = kept.n_q, kept.mask
    if mask is None:
        cells = torch.zeros(1, n_q, kept.n_k)
        if kept.causal or n_q > 1:
            rows = torch.arange(kept.start, kept.start + n_q)[:, None]
            later = torch.arange(kept.first, kept.first + kept.n_k) > rows
            cells = cells.masked_fill(later, -math.inf)
    else:
        cells = make_four(mask.detach())
        cells = cells[min(b, cells.shape[0] - 1)]
        if cells.dtype == torch.bool:
            cells = torch.zeros(cells.shape).masked_fill(~cells, -math.inf)
        cells = cells.expand(-1, n_q, kept.n_k)
    behind = n_k - kept.first - kept.n_k
    return torch.nn.functional.pad(cells, (kept.first, behind), value=-math.inf)


def recognise(allowed: Tensor, rows: Tensor, keys: Tensor) -> Mask | Tensor | None:
    """Return the formula that gives these cells, None for all, or the cells."""
    if bool(allowed.all()):
        return None
    one = allowed[:1]
    if not bool((allowed == one).all()):
        return allowed
    distance = rows[:, None] - keys
    seen = distance >= 0
    if bool((one[0] == seen).all()):
        return causal()
    reach = int(distance[one[0]].max()) if bool(one.any()) else 0
    if bool((one[0] == (seen & (distance <= reach))).all()):
        return causal() & window(reach)
    return one


def extend(valid: Tensor, n: int) -> Tensor:
    """Return which of n tokens are real; those after the prompt's mask are new."""
    return torch.cat([valid, valid.new_ones(max(0, n - len(valid)))])[:n]


def mend_lse(sight: Sight) -> Sight:
    """Return a call with corrected lse of rows for which the kernel writes 0.

    A row without visible keys gets -inf, a row whose query has NaN gets NaN.
    """
    lse, mask = sight.lse, sight.mask
    if lse is None or bool(lse.all()):  # none is 0
        return sight
    lse = lse.detach()
    if mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else mask == -math.inf
        lse = lse.masked_fill(hidden.all(-1).expand(lse.shape), -math.inf)
    odd = sight.q.detach().isnan().any(-1)
    return replace(sight, lse=lse.masked_fill(odd, math.nan))


def settle(sight: Sight) -> tuple[Sight, float]:
    """Return a call with its lse, and the error of the output rebuilt from it.

    The kernel's lse is checked on a few rows. Where no kernel gave one, the definition
    computes it, and all rows are checked.
    """
    with torch.no_grad():
        q, k = sight.q.detach(), sight.k.detach()
        v = k if sight.v is None else sight.v.detach()
        n_q = q.shape[2]
        allowed, bias = split_mask(sight)
        if sight.lse is None:
            done = attend(
                q,
                k,
                v,
                allowed,
                bias=bias,
                scale=sight.scale,
                softcap=sight.softcap,
                sink=sight.sink,
                q_start=0,
            )
            if sight.out is None:
                return replace(sight, lse=done.lse), 0.0
            # padding, where eager code averages
            blind = done.lse[..., None] == -math.inf
            theirs = sight.out.detach().masked_fill(blind, 0)
            return replace(sight, lse=done.lse), find_largest_difference(
                done.out, theirs
            )
        if sight.out is None:
            return sight, 0.0
        picked = torch.linspace(0, n_q - 1, min(CHECKED, n_q)).long().unique()
        odd = sight.lse[:, :, picked, None].isnan()
        theirs = sight.out.detach()[:, :, picked].masked_fill(odd, math.nan)
        return sight, find_largest_difference(rebuild(sight, picked), theirs)


def rebuild(sight: Sight, rows: Tensor) -> Tensor:
    """Return some rows of the output from q, k, v and lse: exp(logits - lse) v."""
    assert sight.lse is not None
    assert sight.v is not None
    wide = torch.promote_types(sight.q.dtype, torch.float32)
    q, k, v = (x.detach().to(wide) for x in (sight.q[:, :, rows], sight.k, sight.v))
    b, heads, r, _ = q.shape
    shared = q.reshape(b, k.shape[1], -1, q.shape[-1])  # (B, Hk, H / Hk * r, D)
    logits = (shared @ k.mT * sight.scale).reshape(b, heads, r, -1)
    if sight.causal:
        logits = logits.masked_fill(torch.arange(k.shape[2]) > rows[:, None], -math.inf)
    if sight.mask is not None:
        mask = sight.mask.detach()
        mask = mask[..., rows, :] if mask.shape[-2] > 1 else mask
        logits = (
            logits.masked_fill(~mask, -math.inf)
            if mask.dtype == torch.bool
            else (logits + mask)
        )
    lse = sight.lse.detach()[:, :, rows, None]
    weights = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0))
    out = weights.reshape(b, k.shape[1], -1, weights.shape[-1]) @ v
    return out.reshape(b, heads, r, -1)


def find_largest_difference(mine: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative to the largest number; NaN is NaN."""
    wide = torch.promote_types(theirs.dtype, torch.float32)
    mine, theirs = mine.to(wide), theirs.detach().to(wide)
    both = mine.isnan() & theirs.isnan()  # NaN in both counts as equal
    mine, theirs = mine.masked_fill(both, 0), theirs.masked_fill(both, 0)
    size = float(theirs.abs().max()) or 1.0
    return float((mine - theirs).abs().max()) / size


def join_rows(pieces: Sequence[Tensor | Pages]) -> Tensor:
    """Return the rows of all calls, without a copy if there is only one."""
    if len(pieces) == 1:
        return bring(pieces[0])
    return torch.cat([bring(x) for x in pieces], 2)
