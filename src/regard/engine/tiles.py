"""Mask formulas on the fused kernel: no dense mask, no compiler, exact gradients.

Rows are processed in strips of a few hundred. The tiles of a strip are proved empty,
full or undecided, and the strip becomes at most two calls of the kernel:

    the full tiles, without a mask    +    the undecided tiles, with a small mask

Their (out, lse) pairs merge exactly. The backward pass visits the same parts: given the
lse of the whole row, each part's gradient is independent of the others.

Next: flash.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.arrays import accumulator, is_array, without_autocast
from regard.definition.blocked import merge
from regard.definition.contract import Call
from regard.engine.by_definition import differentiate_again
from regard.engine.flash import attend_part, differentiate_part
from regard.engine.in_place import record_versions
from regard.masks.algebra import Mask
from regard.masks.formula import Formula, evaluate
from regard.masks.patterns import causal, everything
from regard.masks.tiles import FULL, UNDECIDED, prove_tiles
from regard.threads import use_threads

ROWS, KEYS = 256, 128  # of a tile
CAUSAL = causal()
CELLS = 2**24  # maximum size of a dense mask: 64 MB in float32


@dataclass(frozen=True)
class KeyBlock:
    """Some keys for a strip of rows: one call of the kernel."""

    keys: slice | Tensor  # a contiguous run of keys, or their positions
    masked: bool = False
    diagonal: bool = False  # row i of the strip attends to keys 0 … i of the part


@dataclass(frozen=True)
class Strip:
    """Some rows, and the parts of the keys that they attend to."""

    rows: slice
    parts: tuple[KeyBlock, ...]


def plan(call: Call) -> tuple[Strip, ...]:
    """Return the strips of a call; most calls have only one."""
    n_q, n_k = call.shape[-2:]
    rows = slice(0, n_q)
    if n_q == 0 or (call.mask is None and call.bias is None):
        return (Strip(rows, (KeyBlock(slice(0, n_k)),)),)
    if fits_causal_kernel(call):
        return (Strip(rows, plan_causal(call.q_start, n_q, n_k)),)
    return tuple(plan_strips(call))


def limit_threads(q: Tensor, k: Tensor, v: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which torch has the threads that a call is worth."""
    if torch.compiler.is_compiling() or q.device.type != "cpu":
        return nullcontext()
    cells = math.prod(q.shape[:-1]) * k.shape[-2]
    return use_threads(cells * (q.shape[-1] + v.shape[-1]))


def fits_causal_kernel(call: Call) -> bool:
    """Return whether the kernel's causal mask applies, shifted by q_start >= 0."""
    plain = call.bias is None and call.mask == CAUSAL
    return plain and not is_array(call.q_start) and call.q_start >= 0


def plan_causal(start: int, n_q: int, n_k: int) -> tuple[KeyBlock, ...]:
    """Return the keys before all queries, and the block on the diagonal."""
    before, after = min(start, n_k), min(start + n_q, n_k)
    if n_q == 1:  # a single query attends to all keys up to itself: no mask
        before = after
    parts = KeyBlock(slice(0, before)), KeyBlock(slice(before, after), diagonal=True)
    return tuple(part for part in parts if count_keys(part.keys))


def plan_strips(call: Call) -> Iterator[Strip]:
    """Yield strips, with their tiles grouped into full and undecided ones."""
    n_k = call.shape[-1]
    formula = call.mask if isinstance(call.mask, Mask) else everything()
    block = max(1, min(ROWS, CELLS // max(n_k, 1))), KEYS
    tiles = prove_tiles(formula, call.shape, block=block, q_start=call.q_start)
    for rows, kinds in zip(tiles.rows, tiles.for_all(), strict=True):
        if call.bias is not None or is_array(call.mask):  # every tile needs it
            kinds[kinds == FULL] = UNDECIDED
        parts = [
            KeyBlock(join_runs(chosen, call.q.device), masked=kind == UNDECIDED)
            for kind in (FULL, UNDECIDED)
            if (chosen := [tiles.keys[j] for j in np.flatnonzero(kinds == kind)])
        ]
        yield Strip(rows, tuple(parts))


def join_runs(runs: list[slice], device: torch.device) -> slice | Tensor:
    """Return one slice if the runs are adjacent, else all their positions."""
    if sum(map(count_keys, runs)) == runs[-1].stop - runs[0].start:
        return slice(runs[0].start, runs[-1].stop)
    return torch.cat([torch.arange(r.start, r.stop, device=device) for r in runs])


def count_keys(keys: slice | Tensor) -> int:
    """Return the number of keys."""
    return int(keys.stop - keys.start if isinstance(keys, slice) else keys.shape[0])


def take_keys(x: Tensor, keys: slice | Tensor) -> Tensor:
    """Return these rows of x (B, H, N, D): a view for a slice, otherwise a copy."""
    if not isinstance(keys, slice):
        return x.index_select(2, keys)
    return x if count_keys(keys) == x.shape[2] else x[:, :, keys]


def take_rows(arrays: tuple[Any, ...], rows: slice) -> tuple[Any, ...]:
    """Return these rows of every array (B, H, N, ...); None stays None."""
    return tuple(None if x is None else take_keys(x, rows) for x in arrays)


def write_bias(call: Call, rows: slice, part: KeyBlock) -> Tensor | None:
    """Return the bias of a part, with -inf where the mask is False."""
    if not part.masked:
        return None
    allowed, bias = (write_cells(x, call, rows, part) for x in (call.mask, call.bias))
    wide = accumulator(call.xp, call.q)  # the kernel's bias dtype, also for float16
    bias = call.q.new_zeros((), dtype=wide) if bias is None else bias.to(wide)
    if allowed is not None:
        bias = torch.where(allowed, bias, -math.inf)
    lead = (1,) * (4 - bias.ndim) + bias.shape[:-2]
    return bias.expand(*lead, count_keys(rows), count_keys(part.keys))


def write_cells(x: Any, call: Call, rows: slice, part: KeyBlock) -> Tensor | None:
    """Evaluate a formula on the cells of a part, or slice them from an array."""
    if x is None:
        return None
    if not isinstance(x, Formula):
        x = x[..., rows, :] if x.shape[-2] > 1 else x
        return x[..., part.keys] if x.shape[-1] > 1 else x
    keys, device = part.keys, call.q.device
    if isinstance(keys, slice):
        keys = torch.arange(keys.start, keys.stop, device=device)
    shape = (*call.shape[:-2], count_keys(rows), count_keys(keys))
    start = call.q_start + rows.start
    cells: Tensor = evaluate(x, shape, q_start=start, keys=keys, like=call.q)
    return cells


def run_strips(call: Call, strips: tuple[Strip, ...]) -> tuple[Tensor, Tensor]:
    """Return out (B, H, Nq, Dv) and lse (B, H, Nq)."""
    done = []
    for strip in strips:
        q = take_keys(call.q, strip.rows)
        parts = [
            attend_part(
                q,
                take_keys(call.k, part.keys),
                take_keys(call.v, part.keys),
                write_bias(call, strip.rows, part),
                causal=part.diagonal,
                scale=call.scale,
            )
            for part in strip.parts or (KeyBlock(slice(0, 0)),)
        ]
        done.append(merge(*parts) if len(parts) > 1 else parts[0])
    if len(done) == 1:
        return done[0]
    outs, lses = zip(*done, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


class FusedAttention(torch.autograd.Function):  # type: ignore[misc]
    """Attention by strips as an autograd function, with gradients of out and lse."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, *how: Any
    ) -> tuple[Tensor, Tensor]:
        """Run the parts of each strip and merge them; `run` does, or another kernel."""
        call, strips, run = how
        out, lse = run(replace(call, q=q, k=k, v=v), strips)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call, ctx.strips = call, strips
        ctx.versions = record_versions(call, "mask", "bias")
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        """Sum the gradients of all parts."""
        ctx.versions.check()
        q, k, v, out, lse = ctx.saved_tensors
        call, strips = replace(ctx.call, q=q, k=k, v=v), ctx.strips
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # create_graph=True: the kernel's backward pass is not differentiable
            return *differentiate_again(call, grad_out, grad_lse), *[None] * 3
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        known = out, lse, grad_out, grad_lse
        with without_autocast(q), limit_threads(q, k, v):
            if is_one_part(call, strips):  # no sum needed
                (strip,) = strips
                found = differentiate_rows(call, strip.rows, strip.parts[0], known)
                return *found, None, None, None
            sums = [torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v)]
            differentiate_strips(call, strips, known, sums)
        return *(x.to(q.dtype) for x in sums), None, None, None


def is_one_part(call: Call, strips: tuple[Strip, ...]) -> bool:
    """Return whether one call of the kernel covers all rows and keys."""
    if len(strips) != 1 or len(strips[0].parts) != 1:
        return False
    keys = strips[0].parts[0].keys
    return isinstance(keys, slice) and count_keys(keys) == call.k.shape[2]


def differentiate_strips(
    call: Call,
    strips: tuple[Strip, ...],
    known: tuple[Any, ...],  # out and lse over all keys, their gradients
    sums: Sequence[Tensor],  # the gradients of q, k and v, updated in place
) -> None:
    """Add the contribution of each part to the gradients."""
    for places, found in differentiate_parts(call, strips, known):
        for total, more, at in zip(sums, found, places, strict=True):
            add(total, more, at)


def differentiate_parts(
    call: Call, strips: tuple[Strip, ...], known: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], tuple[Tensor, ...]]]:
    """Yield the rows and keys of each part, and its contribution to the gradients."""
    for strip in strips:
        for part in strip.parts:
            found = differentiate_rows(call, strip.rows, part, known)
            yield (strip.rows, part.keys, part.keys), found


def differentiate_rows(
    call: Call, rows: slice, part: KeyBlock, known: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the contribution of one part to the gradients."""
    out, lse, grad_out, grad_lse = take_rows(known, rows)
    return differentiate_part(
        grad_out,
        grad_lse,
        (
            take_keys(call.q, rows),
            take_keys(call.k, part.keys),
            take_keys(call.v, part.keys),
        ),
        (out, lse),
        write_bias(call, rows, part),
        causal=part.diagonal,
        scale=call.scale,
    )


def add(total: Tensor, more: Tensor, at: slice | Tensor) -> None:
    """Add a contribution to some rows or keys, in place."""
    if isinstance(at, slice):
        total[:, :, at] += more
    else:
        total.index_add_(2, at, more.to(total.dtype))
