"""Assemble calls into records: one per layer and sequence, by absolute positions.

    prefill         q 0 … 9,   k 0 … 9
    decode          q 10,      k 0 … 10      ─▶   q 0 … 11,   k 0 … 11
    decode          q 11,      k 0 … 11

A call continues a run of its layer if its keys start, bit for bit, with those of the
run. Which way it continues is decided by the number of its keys:

    all keys and new ones           a step, or a chunk, of a generation; a cache of
                                    fixed size is cut behind its last token
    the same keys                   cross-attention again
    all of them again, and one      a generation without a cache: its rows are replaced
    without some of the first       a sliding window
    without some of the last        speculative decoding: what was rejected is removed
    sequences in another order      beam search: the rows follow their sequences

Padding is removed if the model was told of it and the call itself hid it.

Next: passes.py
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import regard.lens.coverage_notes as notes
from regard.lens.captured_call import CapturedCall
from regard.lens.captured_rows import (
    CapturedRows,
    cut_keys,
    extend,
    find_place,
    grows,
    has_room,
    join_rows,
    pick,
    write_rows,
)
from regard.lens.certify_run import make_claim
from regard.lens.computed_again import find_order, is_again
from regard.lens.growing import Growing
from regard.lens.mask_store import MaskStore
from regard.lens.off_heap import bring, keep
from regard.lens.witness import ROWS, Witness, keep_outputs, project
from regard.masks.algebra import Mask
from regard.masks.patterns import causal
from regard.recording.certificate import Claim
from regard.recording.evidence import LseOrigin
from regard.recording.record import Record
from regard.run.cells import hides
from regard.run.given import is_triangle

EVERY, CAUSAL = slice(None), causal()


@dataclass(frozen=True)
class Continued:
    """How a call continues a run."""

    order: Tensor | None = None  # its sequences are these of the run
    cropped: int | None = None  # tokens from this position on were rejected
    goes_on: bool = False  # the pass continues the text that the run is a part of


class LayerRun:
    """Calls of one layer that continue each other, as in prefill and decode."""

    def __init__(
        self,
        name: str,
        call: CapturedCall,
        store: MaskStore,
        *,
        keep_v: bool,
        on_host: bool = False,
        valid: Tensor | None = None,
    ) -> None:
        self.name, self.store, self.on_host = name, store, on_host
        self.scale, self.softcap, self.sink = call.scale, call.softcap, call.sink
        self.session = 0  # the group of passes that it is a part of
        self.is_before = False  # it attended before these passes: an encoder
        self.rows: list[CapturedRows] = []
        self.dropped: set[int] = set()  # sequences whose padding was removed
        self.left_out: Counter[str] = Counter()  # rows that are in no record, by reason
        self.copied = 0  # rows that a sequence shares with the one it was copied from
        self.valid = call.valid
        self.end, self.is_cross = find_place(call, valid)  # behind the last row
        self.first = 0  # position of the first key that the cache still holds
        self.room = call.k.shape[2]  # of a cache of fixed size
        call = self.cut_empty(call)
        self.forgotten: list[dict[str, Tensor]] = []  # of the keys before it
        self.seeded = np.random.default_rng(0)  # the same rows in all layers
        self.stores = {
            x: Growing(read_stored(call, x), on_host=on_host)
            for x in choose_stores(call, keep_v=keep_v)
        }
        self.add_rows(call)

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return int(bring(self.keys.held).shape[0])

    @property
    def keys(self) -> Growing:
        """The keys."""
        return self.stores["k"]

    def continue_with(self, call: CapturedCall, told: Continued) -> Continued | None:
        """Add a call if it continues this run; return how, or None.

        told: what is known from the cache, and from the first layer of the pass
        """
        if not self.is_alike(call):
            return None
        for shared, gone, add in self.list_ways(call, told):
            mine = self.known[:, gone : gone + shared]
            theirs = call.key_fingerprint[:, :shared]
            if not shared or mine.shape[1:] != theirs.shape[1:]:
                continue
            order, keys = None, slice(gone, gone + shared)
            if told.order is not None or not self.confirms(call, add, keys, None):
                order = find_order(mine, theirs, told.order)
                if order is None or self.is_cross:
                    continue
                if not self.confirms(call, add, keys, order):
                    continue
                self.reorder(order)
            cropped = add(call, shared, gone)
            self.add_rows(self.cut_empty(call))
            return Continued(order, cropped)
        return None

    def is_alike(self, call: CapturedCall) -> bool:
        """Return whether a call has the heads, the scale and the cap of the run."""
        whole, given = bring(self.keys.held).shape, call.k.shape
        scaled = math.isclose(call.scale, self.scale, rel_tol=1e-6)
        scaled = scaled and call.softcap == self.softcap
        return scaled and (whole[1], whole[3]) == (given[1], given[3])

    def confirms(
        self, call: CapturedCall, add: Any, keys: slice, order: Tensor | None
    ) -> bool:
        """Return whether a call begins with some keys of the run, or computes it again.

        Keys that others follow are compared by their fingerprints: they are certified.
        """
        if add == self.replace:
            rows = join_rows([x.q for x in self.rows])
            return is_again(call, rows, self.keys.tensor(), order)
        mine = pick(self.known[:, keys], order)
        if not torch.equal(mine, call.key_fingerprint[:, : mine.shape[1]]):
            return False
        if add == self.extend:
            return True
        mine = pick(self.keys.tensor()[:, :, keys], order)
        theirs = call.k.detach()[:, :, : mine.shape[2]]
        return bool(torch.equal(mine, theirs.to(mine.device)))

    def cut_empty(self, call: CapturedCall) -> CapturedCall:
        """Return a call without the empty places of a cache of fixed size."""
        n = self.end - self.first + call.q.shape[2]
        return call if self.is_cross else cut_keys(call, n)

    def list_ways(
        self, call: CapturedCall, told: Continued
    ) -> Iterator[tuple[int, int, Any]]:
        """Yield ways to continue: shared keys, lost ones, what is to be done."""
        n_q, n_k, before = call.q.shape[2], call.k.shape[2], self.keys.n
        old = n_k - n_q
        if self.is_cross:
            yield from self.list_cross_ways(call, told)
            return
        follows = old == before and self.first + before == self.end
        if follows or (self.first == 0 and has_room(call, before)):
            yield before, 0, self.extend
        if self.first == 0 and grows(call, before):
            yield before, 0, self.replace
        if 0 < old < before:
            yield from self.list_shorter_ways(old, before)

    def list_cross_ways(
        self, call: CapturedCall, told: Continued
    ) -> Iterator[tuple[int, int, Any]]:
        """Yield the way to continue cross-attention: the keys are the same.

        Keys that many texts share are learnt: a text asks fewer questions.
        """
        n_q, n_k = call.q.shape[2], call.k.shape[2]
        asks = told.goes_on or n_q < n_k
        if asks and n_k == self.keys.n and not call.causal:
            yield n_k, 0, self.repeat

    def list_shorter_ways(
        self, old: int, before: int
    ) -> Iterator[tuple[int, int, Any]]:
        """Yield ways to continue with fewer keys than there were before."""
        if self.first + before == self.end:
            yield old, before - old, self.slide
        # the first of some guesses follows from the text: it is not taken back. Else
        # these are two texts that begin with the same cache, or with learnt keys.
        if old > self.rows[-1].start and not self.sees_beyond(old):
            yield old, 0, self.reject

    def sees_beyond(self, end: int) -> bool:
        """Return whether a row before a position attends to keys from there on.

        Their weights would be lost with the keys.
        """
        last = self.rows[-1]
        blocks = (write_rows(last, b, self.end) for b in range(self.batch))
        return any(
            not bool(hides(x[:, : max(0, end - last.start), end:]).all())
            for x in blocks
        )

    def extend(self, call: CapturedCall, shared: int, _gone: int) -> None:
        """Add the keys that are new."""
        part = slice(shared, shared + call.q.shape[2])
        for name, mine in self.stores.items():
            mine.append(read_stored(call, name, part))

    def repeat(self, call: CapturedCall, shared: int, gone: int) -> None:
        """Add nothing: the keys are the same."""

    def replace(self, call: CapturedCall, _shared: int, _gone: int) -> int:
        """Forget all rows: the call has computed them again."""
        for name, mine in self.stores.items():
            mine.n = 0
            mine.append(read_stored(call, name))
        self.restart()
        return 0

    def slide(self, call: CapturedCall, shared: int, gone: int) -> None:
        """Keep the keys that a window dropped apart, and add the new ones."""
        lost = {name: x.drop_first(gone) for name, x in self.stores.items()}
        self.forgotten.append(lost)
        self.first += gone
        self.extend(call, shared, 0)

    def reject(self, call: CapturedCall, shared: int, _gone: int) -> int:
        """Remove rejected tokens, and add the keys that are new."""
        self.crop(shared)
        self.extend(call, shared, 0)
        return shared

    def crop(self, end: int) -> None:
        """Remove rows and keys from a position on."""
        for x in self.stores.values():
            x.crop(end - self.first)
        self.crop_rows(end)

    def crop_rows(self, end: int) -> None:
        """Remove rows from a position on."""
        self.leave_out(notes.TAKEN_BACK, self.end - max(end, self.rows[0].start))
        self.rows = [x for x in self.rows if x.start < end]
        if self.rows and self.rows[-1].start + self.rows[-1].n_q > end:
            self.rows[-1] = self.rows[-1].crop(end)
        self.end = min(self.end, end)

    def reorder(self, order: Tensor) -> None:
        """Put the sequences into another order; some may be repeated."""
        rows, going_on = sum(x.n_q for x in self.rows), len(order.unique())
        self.left_out[notes.ENDED] += (self.batch - going_on) * rows
        self.copied += (len(order) - going_on) * rows
        for x in self.stores.values():
            x.reorder(order)
        self.forgotten = [
            {name: pick(x, order) for name, x in y.items()} for y in self.forgotten
        ]
        self.rows = [x.reorder(order) for x in self.rows]

    def restart(self) -> None:
        """Forget all rows: they are computed again."""
        self.leave_out(notes.AGAIN, sum(x.n_q for x in self.rows))
        self.rows, self.end = [], 0

    def leave_out(self, why: str, rows: int) -> None:
        """Count rows of all sequences that are not in the records."""
        if rows > 0:
            self.left_out[why] += rows * self.batch

    def add_rows(self, call: CapturedCall) -> None:
        """Store the rows of a call."""
        n_q = call.q.shape[2]
        assert call.lse is not None
        if call.causal and self.end != self.first:  # it begins with the first key
            seen = torch.ones(n_q, call.k.shape[2], dtype=torch.bool)
            call = replace(call, mask=seen.tril().to(call.q.device), causal=False)
        self.rows.append(
            CapturedRows(
                q=keep(call.q, on_host=self.on_host),
                lse=keep(call.lse, on_host=self.on_host),
                mask=self.store.keep(call.mask),
                causal=call.causal,
                n_q=n_q,
                start=self.end,
                first=self.first,
                n_k=call.k.shape[2],
                blind=call.blind,
                origin=call.origin,
                witness=self.call_witness(call),
            )
        )
        self.end += n_q
        self.known = call.key_fingerprint

    def call_witness(self, call: CapturedCall) -> Witness | None:
        """Return what a call returned for a few rows, if its values are kept."""
        if not {"u", "v"} & {*self.stores}:
            return None
        n = call.q.shape[2]
        some = self.seeded.choice(n, min(n, ROWS), replace=False)
        return keep_outputs(call, torch.from_numpy(np.sort(some)))

    def records(self, valid: Tensor | None) -> Iterator[tuple[int, Claim]]:
        """Yield the record of every sequence of the batch.

        valid: (B, N), which tokens are no padding, as the model was told
        """
        q, lse = (join_rows([getattr(x, n) for x in self.rows]) for n in ("q", "lse"))
        runs = [torch.arange(x.start, x.start + x.n_q) for x in self.rows]
        at = torch.cat(runs).to(q.device)
        k, v = self.join_keys("k"), self.join_keys("v")
        origins = {x.origin for x in self.rows}
        origin = origins.pop() if len(origins) == 1 else LseOrigin.RECORD
        sink = None if self.sink is None else self.sink.detach().to(q.device)
        for b in range(q.shape[0]):
            n_k = k.shape[2]
            if not self.is_cross:  # behind it, a cache is still empty
                n_k = min(n_k, int(at.max()) + 1)
            keys = torch.arange(n_k, device=q.device)
            real = self.find_real(b, valid, at, n_k)
            kept: Any = slice(None)
            rows = at
            if real is not None:
                self.dropped.add(b)
                keys = keys[real]
                if not self.is_cross:
                    kept = real[at]
                    rows = (real.cumsum(0) - 1)[at[kept]]  # padding has no position
            columns = torch.arange(len(keys), device=q.device)
            mask, bias = self.find_mask(b, kept, keys, (rows, columns))
            whole = len(keys) == k.shape[2]
            record = Record(
                name=self.name,
                q=q[b][:, kept],
                k=k[b] if whole else k[b][:, keys],
                v=None if v is None else v[b][:, keys],
                lse=lse[b][:, kept],
                scale=self.scale,
                softcap=self.softcap,
                sink=sink,
                mask=mask,
                bias=bias,
                q_positions=rows,
                k_positions=columns,
                origin=origin,
            )
            there = np.ones(len(at), bool) if rows is at else kept.cpu().numpy()
            self.left_out[notes.PADDING] += int(there.size - there.sum())
            u = self.find_projected(v, b)
            u = u if u is None else u[:, keys]
            yield b, make_claim(record, self.rows, b, there, u)

    def find_real(
        self, b: int, valid: Tensor | None, at: Tensor, n_k: int
    ) -> Tensor | None:
        """Return which keys are no padding, None if there is none.

        The model's mask decides what is padding, but only if it has the length of this
        sequence, and if the call itself hides these keys from every other token.
        """
        if self.valid is not None:
            return self.valid[b].to(at.device)
        if valid is None or len(valid) != self.batch or self.rows[0].start:
            return None
        grows = len(self.rows) > 1 and not self.is_cross
        real, length = extend(valid[b], n_k).to(at.device), valid.shape[1]
        fits = length in (n_k, self.room) or (grows and length < n_k)
        if bool(real.all()) or not fits:
            return None
        return real if self.is_padding(b, valid, n_k, at.device) else None

    def is_padding(self, b: int, valid: Tensor, n_k: int, device: torch.device) -> bool:
        """Return whether all rows hide what a mask calls padding."""
        # a triangle may be causal, for as many sequences as tokens: the first one tells
        some = {0, b} if is_triangle(valid) else {b}
        return all(
            self.hides_all_padding(x, extend(valid[x], n_k).to(device)) for x in some
        )

    def hides_all_padding(self, b: int, real: Tensor) -> bool:
        """Return whether all rows hide the keys that are no real tokens."""
        if not bool(real.any()) and not self.is_blind(b, len(real)):
            return False
        return all(self.hides_padding(x, b, real) for x in self.rows)

    def is_blind(self, b: int, n_k: int) -> bool:
        """Return whether all rows hide all keys."""
        return all(bool(hides(write_rows(x, b, n_k)).all()) for x in self.rows)

    def hides_padding(self, rows: CapturedRows, b: int, real: Tensor) -> bool:
        """Return whether some rows hide the keys that are no real tokens.

        Rows of padding may instead see all keys of their call, or none, or average.
        """
        end = min(rows.first + rows.n_k, len(real))
        hidden = hides(write_rows(rows, b, end))[..., rows.first :]
        done = hidden[..., ~real[rows.first : end]].all(-1)
        if not self.is_cross:
            at = real[rows.start : rows.start + rows.n_q]
            odd = hidden.all(-1) | (~hidden).all(-1)
            if rows.blind is not None:
                odd = odd | rows.blind[b].to(odd.device)
            done = done | (odd & ~at)
        return bool(done.all())

    def find_projected(self, v: Tensor | None, b: int) -> Tensor | None:
        """Return the values of a sequence times the signs of the witness."""
        if v is not None:
            return project(v[b])
        u = self.join_keys("u")
        return None if u is None else u[b]

    def join_keys(self, name: str) -> Any:
        """Return what is kept of all keys, also of those that a cache dropped."""
        if name not in self.stores:
            return None
        return join_rows(
            [*(x[name] for x in self.forgotten), self.stores[name].tensor()]
        )

    def find_mask(
        self, b: int, kept: Any, keys: Tensor, positions: tuple[Tensor, Tensor]
    ) -> tuple[Mask | Tensor | None, Tensor | None]:
        """Return the mask of a sequence as a formula if it is one, and its bias."""
        first = self.rows[0]
        plain = all(x.mask is None for x in self.rows) and not self.forgotten
        if plain and (self.is_cross or (len(self.rows) == 1 and not first.causal)):
            return None, None
        if plain and all(x.causal or x.n_q == 1 for x in self.rows):
            return CAUSAL, None
        cells = self.join_cells(b)[:, kept][..., keys]  # (H or 1, Nq, Nk)
        key: Any = object()  # shared only by calls with the very same mask
        if len(self.rows) == 1 and first.mask is not None:
            number = min(b, first.mask.shape[0] - 1)
            places = tuple(tuple(x.tolist()) for x in positions)
            key = (id(first.mask), number, first.start, first.causal, hash(places))
            key = (*key, tuple(keys.tolist()))
        return self.store.explain(key, cells, *positions)

    def join_cells(self, b: int) -> Tensor:
        """Return what is added to the scores of all rows of a sequence."""
        n_k = self.first + self.keys.n
        blocks = [write_rows(x, b, n_k) for x in self.rows]
        heads = max(x.shape[0] for x in blocks)
        blocks = [x.expand(heads, -1, -1) for x in blocks]
        return torch.cat(blocks, 1) if len(blocks) > 1 else blocks[0]


def choose_stores(call: CapturedCall, *, keep_v: bool) -> str:
    """Return what is kept of the keys: k, and v if asked for.

    u is kept where nothing else certifies a row: the values times a vector of signs
    """
    if call.v is None:
        return "k"
    return "kv" if keep_v else "ku" if call.origin is LseOrigin.RECORD else "k"


def read_stored(call: CapturedCall, name: str, part: slice = EVERY) -> Tensor:
    """Return what a store keeps of some keys of a call."""
    if name == "k":
        return call.k[:, :, part]
    assert call.v is not None
    v = call.v[:, :, part]
    return v if name == "v" else project(v)
