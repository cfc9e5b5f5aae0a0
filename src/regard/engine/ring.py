"""The same attention when the sequence is spread over a group of processes.

Each rank holds some positions: its rows of q, and the keys and values that stand there.
Keys and values travel in a ring, each rank attends to those that come by, and

    (out, lse)  =  merge over ranks r of  attention(my q, k of r, v of r)

is exact. The next keys are on their way while a rank works on the last ones. Backward,
the keys go round once more, followed by the sums of their gradients, which end at home.

Under a causal mask late rows cost more, so a rank takes an early and a late run:

    contiguous(16, 4)    0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3    rank 3 works 5.8 x rank 0
    zigzag(16, 4)        0 0 1 1 2 2 3 3 3 3 2 2 1 1 0 0    all work the same

Masks are formulas over absolute positions. Each pair of runs is a small call of
tiles.py: skipped where proved empty, without a mask where proved full. Nothing here is
tied to a device or a transport; the kernel in flash.py is one for CPUs.

Next: record.py
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
from regard.engine.choose import learns, spread, take_share
from regard.engine.flash import RangeError
from regard.engine.in_place import guard_functions, note_versions
from regard.engine.tiles import differentiate_strips, pick_rows, plan, run_strips
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
    """Give each rank one run of the positions 0 … n-1."""
    return tuple((chunk,) for chunk in split(n, world))


def zigzag(n: int, world: int) -> Places:
    """Give rank r the r-th chunk and the r-th from the end: the same causal work.

    >>> zigzag(16, 4)[0]
    (range(0, 2), range(14, 16))
    """
    chunks = split(n, 2 * world)
    return tuple((chunks[r], chunks[-1 - r]) for r in range(world))


def split(n: int, parts: int) -> list[range]:
    """Cut 0 … n-1 into runs whose lengths differ by at most 1."""
    ends = [n * i // parts for i in range(parts + 1)]
    return [range(i, j) for i, j in pairwise(ends)]


def list_positions(runs: Runs) -> Tensor:
    """Return the positions of a rank, so that q[..., positions, :] is its shard."""
    return torch.cat([torch.arange(r.start, r.stop) for r in (range(0), *runs)])


def attend(
    q: Tensor,  # (..., H, n, D)      n positions of this rank, of N in all
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

    Every rank makes the same call, and the same call of backward(). A rank that dies or
    stays away makes the others raise, within the timeout of the process group.

    places: the positions of each rank, from `zigzag`, `contiguous` or your own
    group: a process group of torch.distributed; all processes unless given

    The other arguments are those of `regard.attention`; masks and biases are formulas,
    and the gradient of a sink is this rank's share of it.
    """
    ring = Ring(places, group, dist.get_rank(group))
    refuse(mask, bias, softcap)
    call = read_call(
        (q, k, v), None, bias=None, scale=scale, softcap=None, sink=sink, q_start=0
    )
    check_shard(ring, call)
    if is_array(call.scale):
        raise OptionError(
            "scale is an array: the ring runs on fused kernels, and they take one "
            "number. Write scale=float(scale), or regard.engine.attend(...)."
        )
    lead, n, total = call.shape[:-2], q.shape[-2], sum(map(count, places))
    batch, heads = (1, 1, *lead)[-2:]
    mask = everything() if mask is None else mask
    for formula in (mask, bias):
        if formula is not None:
            check_extents(formula, (batch, heads, total, total), 0)
    q, k, v = (spread(x, batch) for x in (q, k, v))
    call = replace(
        call,
        mask=mask.place(q),
        bias=None if bias is None else bias.place(q),
        shape=(batch, heads, n, n),
    )
    out, lse = Ringed.apply(q, k, v, guard_functions(call), ring)
    if call.sink is not None:  # it belongs to a row, not to a rank's keys: once, here
        out, lse = take_share(out, lse, call.sink)
    return Attended(out.reshape(*lead, n, v.shape[-1]), lse.reshape(*lead, n))


def refuse(mask: Any, bias: Any, softcap: float | None) -> None:
    """Refuse what cannot be cut by position, and what no fused kernel does."""
    for name, x, kind, write in (
        ("mask", mask, Mask, "array"),
        ("bias", bias, Bias, "added"),
    ):
        if x is not None and not isinstance(x, kind):
            raise MaskError(
                f"{name} is a {type(x).__name__}, expected a formula, as each rank has "
                f"other rows and keys. Write regard.masks.{write}(x) for an array over "
                "the positions of the whole sequence."
            )
    if softcap is not None or learns(bias):
        given = f"softcap={softcap}" if softcap is not None else "a bias that learns"
        raise OptionError(
            f"{given}: the ring runs on fused kernels, and none of them does that. "
            "Write regard.engine.attend(...) in one process."
        )


def check_shard(ring: Ring, call: Call) -> None:
    """Refuse shards that are not what `places` says."""
    if len(ring.places) != ring.world:
        raise OptionError(
            f"places for {len(ring.places)} ranks, and the group has {ring.world}. "
            f"Write zigzag(n, {ring.world})."
        )
    runs = sorted((r for runs in ring.places for r in runs if r), key=lambda r: r.start)
    ends = [0, *(run.stop for run in runs)]
    if any(r.start != end or r.step != 1 for r, end in zip(runs, ends, strict=False)):
        raise OptionError(
            f"places={ring.places}, expected every position from 0 on exactly once, "
            "in ranges of step 1, as zigzag(n, world) gives them."
        )
    if call.shape[-2:] != (n := count(ring.places[ring.rank]), n):
        raise ShapeError(
            f"{call.shape[-2]} queries and {call.shape[-1]} keys on rank {ring.rank}, "
            f"and places gives it {n} positions. Write q[..., mine, :] with "
            f"mine = list_positions(places[{ring.rank}]), and k and v alike."
        )
    if len(call.shape) > 4:
        raise ShapeError(
            f"q has shape {tuple(call.q.shape)}, expected (B, H, n, D) or fewer axes. "
            "Write q.flatten(0, -4), and k and v alike."
        )
    dtypes = [x.dtype for x in (call.q, call.k, call.v)]
    if len(set(dtypes)) > 1:
        raise ArrayError(f"q, k and v have dtypes {dtypes}, expected the same.")


@dataclass(frozen=True)
class Ring:
    """Who holds what, and how it is passed on."""

    places: Places
    group: Any
    rank: int  # in the group

    @property
    def world(self) -> int:
        """The number of ranks."""
        return int(dist.get_world_size(self.group))

    def travel(self, held: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield each rank and its tensors, mine first; the next are on their way."""
        for step in range(self.world):
            owner = (self.rank - step) % self.world
            last = step == self.world - 1
            wait = None if last else self.pass_on(held, owner)
            yield owner, held
            held = held if wait is None else wait()

    def pass_on(self, sent: list[Tensor], owner: int) -> Wait:
        """Start to send an owner's tensors (B, H, n, D) to the next rank.

        Return a function that waits for those that the previous rank sends.
        """
        if self.world == 1:
            return lambda: sent
        before, after = (self.rank - 1) % self.world, (self.rank + 1) % self.world
        n = count(self.places[owner - 1])
        received = [x.new_empty((*x.shape[:2], n, x.shape[3])) for x in sent]
        messages = [
            dist.P2POp(verb, x, group=self.group, group_peer=peer)
            for verb, tensors, peer in (
                (dist.irecv, received, before),
                (dist.isend, sent, after),
            )
            for x in tensors
            if x.numel()  # both sides know if nothing comes
        ]
        with blame(messages):
            works = dist.batch_isend_irecv(messages) if messages else []

        def wait() -> list[Tensor]:
            # NCCL makes one work of all messages, so lengths may differ
            for work, message in zip(works, messages, strict=False):
                with blame([message]):
                    work.wait()  # gloo gives up after the timeout of the group
            return received

        return wait


@contextmanager
def blame(messages: list[Any]) -> Iterator[None]:
    """Say which rank did not answer."""
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        peers = " or ".join(sorted({str(message.peer) for message in messages}))
        raise RuntimeError(
            f"rank {dist.get_rank()} did not hear from rank {peers} within "
            f"{time.monotonic() - began:.1f} s. Did it die, or not make the same call? "
            f"The timeout of the process group bounds the wait. The group said: {error}"
        ) from error


class Ringed(torch.autograd.Function):  # type: ignore[misc]
    """Attention around the ring, with the gradients of out and of lse."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, *how: Any
    ) -> tuple[Tensor, Tensor]:
        """Merge what each rank's keys give to the rows of this one."""
        call, ring = how
        k, v = k.contiguous(), v.contiguous()  # as they are sent
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=accumulator(call.xp, q))
        lse = out.new_full(q.shape[:-1], -math.inf)
        begun: set[int] = set()  # the runs of rows that have seen keys
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
        ctx.versions = note_versions(call, "mask", "bias")
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        """Send the sums of dk and dv after their keys, one step behind."""
        if torch.is_grad_enabled():
            raise GradientError(
                "create_graph=True: the ring has no second derivatives. Write "
                "regard.engine.attend(...) in one process, or leave create_graph out."
            )
        ctx.versions.check()
        (q, k, v, out, lse), ring = ctx.saved_tensors, ctx.ring
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        dq = torch.zeros_like(q, dtype=lse.dtype)
        wait: Wait = list  # at home nobody has found anything yet
        for owner, held in ring.travel([k, v]):
            visit = replace(ctx.call, q=q, k=held[0], v=held[1])
            dk, dv = sums = [torch.zeros_like(x, dtype=lse.dtype) for x in held]
            for rows, keys, pair in pair_runs(visit, ring, owner):
                known = pick_rows((out, lse, grad_out, grad_lse), rows)
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
    """Yield my runs of rows with an owner's runs of keys, each pair as a small call."""
    formula: Any = call.mask
    for rows, at_q in locate(ring.places[ring.rank]):
        for keys, at_k in locate(ring.places[owner]):
            mask = LateMask(formula, at_k.start)
            pair = replace(
                call,
                q=call.q[:, :, rows],
                k=call.k[:, :, keys],
                v=call.v[:, :, keys],
                mask=mask,
                bias=None if call.bias is None else LateBias(call.bias, at_k.start),
                q_start=at_q.start,
                shape=(*call.shape[:2], len(at_q), len(at_k)),
            )
            whole = (len(at_q), len(at_k))
            tiles = prove_tiles(mask, pair.shape, block=whole, q_start=at_q.start)
            kind = tiles.for_all().item()
            if kind == FULL:
                pair = replace(pair, mask=None)
            elif at_q == at_k and formula == causal() and call.bias is None:
                pair = replace(pair, mask=causal(), q_start=0)  # the kernel knows it
            if kind != EMPTY:
                yield rows, keys, pair


def locate(runs: Runs) -> Iterator[tuple[slice, range]]:
    """Yield where each run lies among a rank's rows, and its positions."""
    start = 0
    for run in runs:
        if run:
            yield slice(start, start + len(run)), run
        start += len(run)


def count(runs: Runs) -> int:
    """Return the number of positions."""
    return sum(map(len, runs))


@dataclass(frozen=True)
class LateMask(Mask):
    """A mask whose key 0 stands at position `first`."""

    mask: Mask
    first: int

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        return self.mask(b, h, q, k + self.first)

    def prove(self, edges: Edges) -> Proof:
        """Ask about the positions of the keys."""
        first, last = edges.k_first + self.first, edges.k_last + self.first
        return self.mask.prove(edges._replace(k_first=first, k_last=last))


@dataclass(frozen=True)
class LateBias(Bias):
    """A bias whose key 0 stands at position `first`."""

    bias: Bias
    first: int

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        return self.bias(b, h, q, k + self.first)
