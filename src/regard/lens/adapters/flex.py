"""FlexAttention, for editing: its operator is observed. Its masks are functions.

Next: engine.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.lens.adapters.adapter import Adapter
from regard.run.call_edit import CallEdit, PendingCall, Rerun


def expect_flex(
    q: Tensor,
    k: Tensor,
    _v: Tensor,
    _bend: Any,
    block_mask: Any,
    scale: float,
    *_rest: Any,
    **_named: Any,
) -> PendingCall:
    """Return what is known of a call before it runs."""

    def find_hidden() -> Tensor:
        shape = (*q.shape[:3], k.shape[2])
        places = (
            torch.arange(n, device=q.device).reshape(
                [-1 if a == b else 1 for b in range(4)]
            )
            for a, n in enumerate(shape)
        )
        return ~block_mask[-1](*places).expand(shape)

    _, heads, n_q, _ = q.shape
    return PendingCall(
        like=q,
        heads=heads,
        n_q=n_q,
        n_k=k.shape[2],
        find_hidden=find_hidden,
        scale=scale,
    )


def run_flex(  # noqa: PLR0917 (its signature)
    original: Callable[..., Any],
    edit: CallEdit,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bend: Callable[..., Tensor],
    *rest: Any,
    **named: Any,
) -> Any:
    """Run it with an edited score function."""
    if edit.cells is not None:
        bend = bend_less(bend, edit.cells.expand(*q.shape[:2], -1, -1))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return original(q, k, v, bend, *rest, **named)[0]

    out, *more = original(q, k, v, bend, *rest, **named)
    return (edit.clear(out, Rerun(run, (q, k, v))), *more)


def bend_less(bend: Callable[..., Tensor], cells: Tensor) -> Callable[..., Tensor]:
    """Return a score function that also hides some cells (B, H, Nq, Nk)."""

    def edit(
        score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *more: Tensor
    ) -> Tensor:
        return torch.where(cells[b, h, i, j], -math.inf, bend(score, b, h, i, j, *more))

    return edit


FLEX = Adapter(
    name="flex",
    torch_functions=(torch.ops.higher_order.flex_attention,),
    expect=expect_flex,
    run=run_flex,
)
