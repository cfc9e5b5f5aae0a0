"""Ring attention: the sequence is sharded over a group of processes.

Each rank holds a shard: the rows of q, k and v at its positions. Keys and values are
sent around the ring, and each rank attends to every shard of them:

    (out, lse)  =  merge over ranks r of  attention(my q, k of r, v of r)

This is exact. Communication overlaps with computation. In the backward pass the keys go
round again, followed by the sums of their gradients, which return to their owner.

Under a causal mask late rows cost more, so each rank takes an early and a late run:

    contiguous(16, 4)    0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3    rank 3: 5.8 x work of rank 0
    zigzag(16, 4)        0 0 1 1 2 2 3 3 3 3 2 2 1 1 0 0    equal work

Masks are formulas over absolute positions. Each pair of runs is a small call of
tiles.py: skipped if proved empty, without a mask if proved full. Nothing here depends
on a device or a transport; the kernel in flash.py is for CPUs.

Next: recording/record.py
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regard.arrays import Array, accumulator, is_array, without_autocast
from regard.definition.attention import Attended
from regard.definition.blocked import merge
from regard.definition.contract import Call, read_call
from regard.engine.by_definition import run_definition
from regard.engine.choose import apply_sink, requires_gradient, view_as_batch
from regard.engine.flash import RangeError
from regard.engine.in_place import guard_functions, record_versions
from regard.engine.tiles import differentiate_strips, plan, run_strips, take_rows
from regard.errors import (
    ArrayError,
    GradientError,
    MaskError,
    OptionError,
    ShapeError,
)
from regard.masks.algebra import Mask
from regard.masks.biases import Bias
from regard.masks.formula import check_extents
from regard.masks.patterns import causal, everything
from regard.masks.tiles import EMPTY, FULL, Edges, Proof, prove_tiles

Runs = tuple[range, ...]  # the positions of one rank, in the order of its rows
Places = tuple[Runs, ...]  # those of every rank
Wait = Callable[[], list[Tensor]]


def contiguous(n: int, world: int) -> Places:
    """Assign each rank one run of the positions 0 … n-1."""
    return tuple((chunk,) for chunk in split_evenly(n, world))


def zigzag(n: int, world: int) -> Places:
    """Assign rank r the r-th chunk and the r-th from the end: balanced causal work.

    >>> zigzag(16, 4)[0]
    (range(0, 2), range(14, 16))
    """
    chunks = split_evenly(n, 2 * world)
    return tuple((chunks[r], chunks[-1 - r]) for r in range(world))


def split_evenly(n: int, parts: int) -> list[range]:
    """Split 0 … n-1 into runs whose lengths differ by at most 1."""
    ends = [n * i // parts for i in range(parts + 1)]
    return [range(i, j) for i, j in pairwise(ends)]


def list_positions(runs: Runs) -> Tensor:
    """Return the positions of a rank, so that q[..., positions, :] is its shard."""
    return torch.cat([torch.arange(r.start, r.stop) for r in (range(0), *runs)])


def attend(
    q: Tensor,  # (..., H, n, D)      this rank's n positions, of N in total
    k: Tensor,  # (..., Hk, n, D)
    v: Tensor,  # (..., Hk, n, Dv)
    mask: Mask | None = None,
    *,
    places: Places,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    group: Any = None,
) -> Attended:
    """Compute `regard.attention` over all ranks, and return the rows of this one.

        places = zigzag(n, dist.get_world_size())
        mine = list_positions(places[dist.get_rank()])
        q, k, v = (x[..., mine, :] for x in (q, k, v))
        done = attend(q, k, v, causal(), places=places)

    Every rank must make the same call, and the same call of backward(). If a rank dies
    or does not call, the others raise within the timeout of the process group.

    places: the positions of each rank, from `zigzag`, `contiguous` or custom
    group: a process group of torch.distributed; default: all processes

    The other arguments are those of `regard.attention`. Masks and biases are formulas;
    the gradient of a sink is this rank's contribution only.
    """
    ring = Ring(places, group, dist.get_rank(group))
    refuse_unsupported(mask, bias, softcap)
    call = read_call(
        (q, k, v), None, bias=None, scale=scale, softcap=None, sink=sink, q_start=0
    )
    check_shard(ring, call)
    if is_array(call.scale):
        raise OptionError(
            "scale is an array, but the fused kernels of the ring take one number. "
            "Write scale=float(scale), or regard.engine.attend(...)."
        )
    lead, n, total = call.shape[:-2], q.shape[-2], sum(map(count_positions, places))
    batch, heads = (1, 1, *lead)[-2:]
    mask = everything() if mask is None else mask
    for formula in (mask, bias):
        if formula is not None:
            check_extents(formula, (batch, heads, total, total), 0)
    q, k, v = (view_as_batch(x, batch) for x in (q, k, v))
    call = replace(
        call,
        mask=mask.place(q),
        bias=None if bias is None else bias.place(q),
        shape=(batch, heads, n, n),
    )
    out, lse = RingAttention.apply(q, k, v, guard_functions(call), ring)
    if call.sink is not None:  # applied once per row, not once per rank
        out, lse = apply_sink(out, lse, call.sink)
    return Attended(out.reshape(*lead, n, v.shape[-1]), lse.reshape(*lead, n))


def refuse_unsupported(mask: Any, bias: Any, softcap: float | None) -> None:
    """Raise for masks that are not formulas, and for options without a fused kernel."""
    for name, x, kind, write in (
        ("mask", mask, Mask, "array"),
        ("bias", bias, Bias, "added"),
    ):
        if x is not None and not isinstance(x, kind):
            raise MaskError(
                f"{name} is a {type(x).__name__}, expected a formula, because each "
                "rank holds different rows and keys. Write "
                f"regard.masks.{write}(x) for an array over the positions of the whole "
                "sequence."
            )
    if softcap is not None or requires_gradient(bias):
        given = f"softcap={softcap}" if softcap is not None else "a trainable bias"
        raise OptionError(
            f"{given}: the fused kernels of the ring do not support it. "
            "Write regard.engine.attend(...) in one process."
        )


def check_shard(ring: Ring, call: Call) -> None:
    """Raise an error if the shards do not match `places`."""
    if len(ring.places) != ring.world:
        raise OptionError(
            f"places for {len(ring.places)} ranks, but the group has {ring.world}. "
            f"Write zigzag(n, {ring.world})."
        )
    runs = sorted((r for runs in ring.places for r in runs if r), key=lambda r: r.start)
    ends = [0, *(run.stop for run in runs)]
    if any(r.start != end or r.step != 1 for r, end in zip(runs, ends, strict=False)):
        raise OptionError(
            f"places={ring.places}, expected every position from 0 on exactly once, "
            "in ranges of step 1, as zigzag(n, world) returns them."
        )
    if call.shape[-2:] != (n := count_positions(ring.places[ring.rank]), n):
        raise ShapeError(
            f"{call.shape[-2]} queries and {call.shape[-1]} keys on rank {ring.rank}, "
            f"but places assigns it {n} positions. Write q[..., mine, :] with "
            f"mine = list_positions(places[{ring.rank}]), and likewise for k and v."
        )
    if len(call.shape) > 4:
        raise ShapeError(
            f"q has shape {tuple(call.q.shape)}, expected (B, H, n, D) or fewer axes. "
            "Write q.flatten(0, -4), and likewise for k and v."
        )
    dtypes = [x.dtype for x in (call.q, call.k, call.v)]
    if len(set(dtypes)) > 1:
        raise ArrayError(f"q, k and v have dtypes {dtypes}, expected the same.")


@dataclass(frozen=True)
class Ring:
    """The positions of each rank, and the communication between them."""

    places: Places
    group: Any
    rank: int  # in the group

    @property
    def world(self) -> int:
        """The number of ranks."""
        return int(dist.get_world_size(self.group))

    def travel(self, held: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield each rank and its tensors, own first, while receiving the next."""
        for step in range(self.world):
            owner = (self.rank - step) % self.world
            last = step == self.world - 1
            wait = None if last else self.pass_on(held, owner)
            yield owner, held
            held = held if wait is None else wait()

    def pass_on(self, sent: list[Tensor], owner: int) -> Wait:
        """Start sending an owner's tensors (B, H, n, D) to the next rank.

        Return a function that waits for the tensors of the previous rank.
        """
        if self.world == 1:
            return lambda: sent
        before, after = (self.rank - 1) % self.world, (self.rank + 1) % self.world
        n = count_positions(self.places[owner - 1])
        received = [x.new_empty((*x.shape[:2], n, x.shape[3])) for x in sent]
        messages = [
            dist.P2POp(verb, x, group=self.group, group_peer=peer)
            for verb, tensors, peer in (
                (dist.irecv, received, before),
                (dist.isend, sent, after),
            )
            for x in tensors
            if x.numel()  # both sides skip empty tensors
        ]
        with name_silent_rank(messages):
            works = dist.batch_isend_irecv(messages) if messages else []

        def wait() -> list[Tensor]:
            # NCCL returns one work object for all messages, so lengths may differ
            for work, message in zip(works, messages, strict=False):
                with name_silent_rank([message]):
                    work.wait()  # gloo raises after the timeout of the group
            return received

        return wait


@contextmanager
def name_silent_rank(messages: list[Any]) -> Iterator[None]:
    """Re-raise communication errors with the rank that did not answer."""
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        peers = " or ".join(sorted({str(message.peer) for message in messages}))
        raise RuntimeError(
            f"rank {dist.get_rank()} got no response from rank {peers} within "
            f"{time.monotonic() - began:.1f} s. Did it die, or not make the same call? "
            f"The wait is limited by the timeout of the process group. Cause: {error}"
        ) from error


class RingAttention(torch.autograd.Function):  # type: ignore[misc]
    """Ring attention as an autograd function, with gradients of out and lse."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, *how: Any
    ) -> tuple[Tensor, Tensor]:
        """Merge the results over the keys of each rank."""
        call, ring = how
        k, v = k.contiguous(), v.contiguous()  # required for sending
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=accumulator(call.xp, q))
        lse = out.new_full(q.shape[:-1], -math.inf)
        begun: set[int] = set()  # runs of rows with results so far
        for owner, held in ring.travel([k, v]):
            visit = replace(call, q=q, k=held[0], v=held[1])
            for rows, _, pair in pair_runs(visit, ring, owner):
                seen = run_pair(pair)
                if rows.start in begun:
                    seen = merge((out[:, :, rows], lse[:, :, rows]), seen)
                out[:, :, rows], lse[:, :, rows] = seen
                begun.add(rows.start)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call, ctx.ring = call, ring
        ctx.versions = record_versions(call, "mask", "bias")
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        """Send the sums of dk and dv around the ring, one step behind their keys."""
        if torch.is_grad_enabled():
            raise GradientError(
                "create_graph=True: the ring has no second derivatives. Write "
                "regard.engine.attend(...) in one process, or omit create_graph."
            )
        ctx.versions.check()
        (q, k, v, out, lse), ring = ctx.saved_tensors, ctx.ring
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        dq = torch.zeros_like(q, dtype=lse.dtype)
        wait: Wait = list  # in the first step there are no gradients to receive
        for owner, held in ring.travel([k, v]):
            visit = replace(ctx.call, q=q, k=held[0], v=held[1])
            dk, dv = sums = [torch.zeros_like(x, dtype=lse.dtype) for x in held]
            for rows, keys, pair in pair_runs(visit, ring, owner):
                known = take_rows((out, lse, grad_out, grad_lse), rows)
                totals = dq[:, :, rows], dk[:, :, keys], dv[:, :, keys]
                with without_autocast(q):
                    differentiate_strips(pair, plan(pair), known, totals)
            for total, found_before in zip(sums, wait(), strict=False):
                total.add_(found_before)
            wait = ring.pass_on(sums, owner)
        return *(x.to(q.dtype) for x in (dq, *wait())), None, None


def run_pair(call: Call) -> tuple[Tensor, Tensor]:
    """Return out and lse of a run of rows over a run of keys."""
    with suppress(RangeError), without_autocast(call.q):
        return run_strips(call, plan(call))
    return run_definition(replace(call, sink=None))


def pair_runs(
    call: Call, ring: Ring, owner: int
) -> Iterator[tuple[slice, slice, Call]]:
    """Yield each pair of own rows and an owner's keys as a small call."""
    formula: Any = call.mask
    for rows, at_q in locate_runs(ring.places[ring.rank]):
        for keys, at_k in locate_runs(ring.places[owner]):
            mask = ShiftedMask(formula, at_k.start)
            pair = replace(
                call,
                q=call.q[:, :, rows],
                k=call.k[:, :, keys],
                v=call.v[:, :, keys],
                mask=mask,
                bias=None if call.bias is None else ShiftedBias(call.bias, at_k.start),
                q_start=at_q.start,
                shape=(*call.shape[:2], len(at_q), len(at_k)),
            )
            whole = (len(at_q), len(at_k))
            tiles = prove_tiles(mask, pair.shape, block=whole, q_start=at_q.start)
            kind = tiles.for_all().item()
            if kind == FULL:
                pair = replace(pair, mask=None)
            elif at_q == at_k and formula == causal() and call.bias is None:
                pair = replace(pair, mask=causal(), q_start=0)  # use the causal kernel
            if kind != EMPTY:
                yield rows, keys, pair


def locate_runs(runs: Runs) -> Iterator[tuple[slice, range]]:
    """Yield the row indices of each run within the shard, and its positions."""
    start = 0
    for run in runs:
        if run:
            yield slice(start, start + len(run)), run
        start += len(run)


def count_positions(runs: Runs) -> int:
    """Return the number of positions."""
    return sum(map(len, runs))


@dataclass(frozen=True)
class ShiftedMask(Mask):
    """A mask whose key 0 is at position `first`."""

    mask: Mask
    first: int

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        return self.mask(b, h, q, k + self.first)

    def prove(self, edges: Edges) -> Proof:
        """Return the proofs for the shifted key positions."""
        first, last = edges.k_first + self.first, edges.k_last + self.first
        return self.mask.prove(edges._replace(k_first=first, k_last=last))


@dataclass(frozen=True)
class ShiftedBias(Bias):
    """A bias whose key 0 is at position `first`."""

    bias: Bias
    first: int

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        return self.bias(b, h, q, k + self.first)
