"""Run our engine on what a layer was given, to check its output or to compute its lse.

    out, lse = attention(q, k, v) with the mask, scale, softcap and sink of the layer

Next: vllm_layers.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.engine.choose import attend
from regard.serving.request_rows import LayerFacts


def attend_layer(
    q: Tensor, k: Tensor, v: Tensor, facts: LayerFacts, q_start: int
) -> Any:
    """Run the engine on what a layer was given, (H, N, D)."""
    return attend(
        q[None],
        k[None],
        v[None],
        facts.mask,
        scale=facts.scale,
        softcap=facts.softcap,
        sink=None if facts.sink is None else facts.sink.to(q.dtype),
        q_start=q_start,
    )


def compute_lse(q: Tensor, k: Tensor, facts: LayerFacts, q_start: int) -> Tensor:
    """Return log-sum-exp of each row, (H, Nq)."""
    with torch.no_grad():
        lse: Tensor = attend_layer(q, k, k, facts, q_start).lse[0]
        return lse
