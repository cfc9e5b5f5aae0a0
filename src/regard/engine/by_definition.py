"""The definition on torch, tile by tile, for calls that no fused kernel supports.

    run_definition          out and lse in memory linear in N; tiles are recomputed in
                            the backward pass
    differentiate_again     gradients that can be differentiated again

Next: ring.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.definition.attention import Attended
from regard.definition.attention import attend_rows as define_tile
from regard.definition.blocked import fold
from regard.definition.contract import Call
from regard.engine.in_place import guard_functions, record_versions

BLOCK = 512  # rows and keys of a tile
READ_AGAIN = ("q", "k", "v", "mask", "bias", "scale", "softcap")


def run_definition(
    call: Call, block: int | tuple[int, int] = BLOCK
) -> tuple[Tensor, Tensor]:
    """Return out and lse, computed by the definition."""
    wide = call.widen()
    if torch.is_grad_enabled():
        out, lse = fold(make_tile(wide), guard_functions(wide), block)
    else:
        out, lse = fold(define_tile, wide, block)
    return out.to(call.q.dtype), lse


def make_tile(call: Call) -> Any:
    """Return a function that computes a tile with gradient checkpointing."""
    before = record_versions(call, *READ_AGAIN)

    def compute(call: Call, rows: slice, keys: slice) -> Attended:
        before.check()
        return define_tile(call, rows, keys)

    return lambda *tile: checkpoint(compute, *tile, use_reentrant=False)


def differentiate_again(
    call: Call, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v as functions of q, k, v and both gradients."""
    # views: if q, k and v are the same tensor, each needs its own gradient
    q, k, v = inputs = [x.view_as(x) for x in (call.q, call.k, call.v)]
    results = run_definition(replace(call, q=q, k=k, v=v, sink=None))
    given = zip(results, (grad_out, grad_lse), strict=True)
    asked = [(y, grad) for y, grad in given if grad is not None]
    found: tuple[Tensor, ...] = torch.autograd.grad(
        [y for y, _ in asked],
        [x for x in inputs if x.requires_grad],
        [grad for _, grad in asked],
        create_graph=True,
        materialize_grads=True,  # lse does not depend on v
    )
    left = iter(found)
    return tuple(next(left) if x.requires_grad else None for x in inputs)
