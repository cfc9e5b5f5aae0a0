"""Check a call: rebuild a few rows of its output from what is kept of it.

    out_i  =  Σ_j  exp(logits_ij - lse_i) v_j

Next: assemble.py
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from regard.engine.choose import attend
from regard.lens.captured_call import CapturedCall, split_mask
from regard.recording.evidence import LseOrigin

CHECKED = 8  # rows of a call that are rebuilt from what is kept
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of a rebuilt output; else 3e-2


def find_tolerance(dtype: torch.dtype) -> float:
    """Return the largest error of a rebuilt output that counts as rounding."""
    return TOLERANCE.get(dtype, 3e-2)


def fix_empty_row_lse(call: CapturedCall) -> CapturedCall:
    """Return a call with corrected lse of rows for which the kernel writes 0.

    A row without visible keys gets -inf, a row whose query has NaN gets NaN.
    """
    lse, mask = call.lse, call.mask
    if lse is None or bool(lse.all()):  # none is 0
        return call
    lse = lse.detach()
    if mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else mask == -math.inf
        lse = lse.masked_fill(hidden.all(-1).expand(lse.shape), -math.inf)
    odd = call.q.detach().isnan().any(-1)
    return replace(call, lse=lse.masked_fill(odd, math.nan))


def check_rebuild(call: CapturedCall) -> tuple[CapturedCall, float]:
    """Return a call with its lse, and the error of the output rebuilt from it.

    The kernel's lse is checked on a few rows. Where no kernel gave one, the definition
    computes it, and all rows are checked.
    """
    with torch.no_grad():
        q, k = call.q.detach(), call.k.detach()
        v = k if call.v is None else call.v.detach()
        n_q = q.shape[2]
        allowed, bias = split_mask(call)
        if call.lse is None:
            done = attend(
                q,
                k,
                v,
                allowed,
                bias=bias,
                scale=call.scale,
                softcap=call.softcap,
                sink=call.sink,
                q_start=0,
            )
            if call.out is None:
                return replace(call, lse=done.lse, origin=LseOrigin.RECORD), 0.0
            # padding, where eager code averages
            blind = done.lse[..., None] == -math.inf
            theirs = call.out.detach().masked_fill(blind, 0)
            return replace(
                call, lse=done.lse, origin=LseOrigin.RECORD
            ), find_largest_difference(done.out, theirs)
        if call.out is None:
            return call, 0.0
        picked = pick_rows(n_q, call.q.device)
        odd = call.lse[:, :, picked, None].isnan()
        theirs = call.out.detach()[:, :, picked].masked_fill(odd, math.nan)
        return call, find_largest_difference(rebuild(call, picked), theirs)


def pick_rows(n: int, device: torch.device) -> Tensor:
    """Return a few of n rows, spread evenly."""
    return torch.linspace(0, n - 1, min(CHECKED, n)).long().unique().to(device)


def rebuild(call: CapturedCall, rows: Tensor) -> Tensor:
    """Return some rows of the output from q, k, v and lse: exp(logits - lse) v."""
    assert call.lse is not None
    assert call.v is not None
    wide = torch.promote_types(call.q.dtype, call.v.dtype)
    wide = torch.promote_types(wide, torch.float32)
    q, k, v = (x.detach().to(wide) for x in (call.q[:, :, rows], call.k, call.v))
    b, heads, r, _ = q.shape
    shared = q.reshape(b, k.shape[1], -1, q.shape[-1])  # (B, Hk, H / Hk * r, D)
    logits = (shared @ k.mT * call.scale).reshape(b, heads, r, -1)
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if call.causal:
        later = torch.arange(k.shape[2], device=rows.device) > rows[:, None]
        logits = logits.masked_fill(later, -math.inf)
    if call.mask is not None:
        mask = call.mask.detach()
        mask = mask[..., rows, :] if mask.shape[-2] > 1 else mask
        logits = (
            logits.masked_fill(~mask, -math.inf)
            if mask.dtype == torch.bool
            else (logits + mask)
        )
    lse = call.lse.detach()[:, :, rows, None]
    weights = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0)).to(wide)
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
