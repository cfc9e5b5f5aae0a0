"""Mask formulas on GPUs: FlexAttention, compiled for the formula, with its lse.

The compiled kernel visits the tiles that flex.py lists, and evaluates the formula only
in undecided ones. torch compiles it once for each formula and dtype, which takes
seconds. Its own backward pass is not used: tiles.py has one, with the gradient of lse.

Next: sdpa.py
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.utils._triton import has_triton

from regard.definition.contract import Call
from regard.engine.flex import block_mask
from regard.masks.algebra import Mask

DEVICES = ("cuda",)  # also the name of AMD's devices
NARROWEST = 16  # head width
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
AUX = getattr(flex, "AuxRequest", None)  # how to ask for lse; old torch has none
WITH_LSE = {"return_aux": AUX(lse=True)} if AUX else {"return_lse": True}


def can_run_flex(call: Call) -> bool:
    """Return whether a mask formula can be compiled for the device of a call."""
    widths = call.q.shape[-1], call.v.shape[-1]
    fits = call.bias is None and call.q.dtype in DTYPES and min(widths) >= NARROWEST
    return fits and call.q.device.type in DEVICES and has_triton()


def run_flex(call: Call, _strips: Any = ()) -> tuple[Tensor, Tensor]:
    """Return out (B, H, Nq, Dv) and lse (B, H, Nq) of a call with a mask formula."""
    assert isinstance(call.mask, Mask)
    q, k, v = (x.detach() for x in (call.q, call.k, call.v))
    blocks = block_mask(call.mask, call.shape, q_start=call.q_start, device=q.device)
    out, lse = compile_flex()(
        q,
        k,
        v,
        block_mask=blocks,
        scale=call.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        **WITH_LSE,
    )
    return out, lse.lse if AUX else lse


@cache
def compile_flex() -> Any:
    """Return FlexAttention, compiled at its first call."""
    return torch.compile(flex.flex_attention)
