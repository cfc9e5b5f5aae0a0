"""Fused attention operators: complete calls by themselves, most with their own lse.

    _scaled_dot_product_…            q, k, v, mask, causal, scale  ->  out, lse
    _native_multi_head_attention     torch's fast paths in eval mode: q, k and v are
    _transformer_encoder_layer_fwd   computed again from their arguments

Next: placement.py
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from regard.engine.device_operators import read_lse
from regard.lens.captured_call import CapturedCall, see_logits, unpack_rows
from regard.lens.operators import FAST_PATHS, VARLEN, read_name
from regard.lens.take_weights import AVERAGE, STORED_AS_LOGITS, average_rows
from regard.run.cells import HIDDEN, make_four

LSE_ON_REQUEST = torch.ops.aten._scaled_dot_product_efficient_attention.default  # noqa: SLF001
AT_LSE = 4  # the argument compute_log_sumexp of the memory-efficient operator
EVEN = 1e-6  # weights that differ by less are the same

UNCOMPILED = (
    "FlexAttention is not compiled while it is watched: it takes longer, and memory "
    "for all cells, and its last bits may differ from compiled code"
)


def read_fused(func: Any, args: Any, kwargs: Any, out: Any) -> CapturedCall | str:
    """Return the call of a fused operator, or why it cannot be kept."""
    defaults, name = read_defaults(func), read_name(func)
    given = defaults | dict(zip(defaults, args, strict=False)) | kwargs
    if name in VARLEN:
        return "sequences of several lengths in one array cannot be recorded yet"
    if name in FAST_PATHS:
        return read_fast_path(given)
    q, k, v = (given[name] for name in ("query", "key", "value"))
    if q.is_nested:
        return "nested tensors cannot be recorded by this operator"
    mask = given.get("attn_mask", given.get("attn_bias"))
    done, lse = out[0], out[1]
    scale = given.get("scale")
    causal = bool(given.get("is_causal"))
    if given.get("dropout_p"):
        done = None
    call = CapturedCall(
        via="sdpa",
        q=q.detach(),
        k=k.detach(),
        v=v.detach(),
        out=None if done is None else done.detach(),
        lse=read_lse(lse, q.shape[2]) if lse is not None and lse.numel() else None,
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        mask=None if mask is None else mask.detach(),
        causal=causal,
        note="dropout was applied to the weights" if done is None else "",
    )
    return average_blind_rows(unpack_rows(call))


def ask_for_lse(func: Any, args: Any) -> Any:
    """Return the arguments of an operator, with its lse asked for.

    Without gradients SDPA does not ask for it. It costs four bytes per row, and the
    memory-efficient kernel computes the same bits. cuDNN would choose another plan, and
    is left as it is.
    """
    if func is not LSE_ON_REQUEST or len(args) <= AT_LSE or args[AT_LSE]:
        return args
    return (*args[:AT_LSE], True, *args[AT_LSE + 1 :])


@cache
def read_defaults(func: Any) -> dict[str, Any]:
    """Return the arguments of an operator, in order, with their defaults."""
    return {x.name: x.default_value for x in func._schema.arguments}  # noqa: SLF001


def average_blind_rows(call: CapturedCall) -> CapturedCall:
    """Return a call whose rows that hide every key with finite numbers average.

    The lowest number plus a score is the lowest number, so such a row, of padding most
    often, gives all keys the same weight.
    """
    mask, lse = call.mask, call.lse
    if mask is None or lse is None or not mask.is_floating_point():
        return call
    blind = (lse <= HIDDEN) & (lse > -math.inf)
    if not bool(blind.any()):
        return call
    mask = make_four(mask)
    rows = blind.flatten(0, 1).any(0).nonzero().flatten()
    k = call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
    some = mask[:, :, rows] if mask.shape[2] > 1 else mask
    weights = torch.softmax(call.q[:, :, rows] @ k.mT * call.scale + some, -1)
    theirs = weights[blind[:, :, rows]]
    lowest = torch.where(theirs > 0, theirs, math.inf).amin(-1)
    if not bool((theirs.amax(-1) - lowest < EVEN).all()):
        return call  # their scores are not lost beside the number
    cells, many = None, torch.full_like(lse, k.shape[2])
    if not bool((theirs > 0).all()):
        cells = blind.new_ones(*lse.shape, k.shape[2])
        cells[:, :, rows] = weights > 0
        many = cells.sum(-1).to(lse.dtype)
    q, mask = average_rows(blind, cells, call.q, mask)
    return replace(
        call,
        q=q,
        mask=mask,
        lse=torch.where(blind, many.log(), lse),
        blind=blind.any(1),
        note="; ".join(filter(None, (call.note, AVERAGE))),
    )


def read_flex(args: Any, out: Any) -> CapturedCall:
    """Return a FlexAttention call: lse has base 2, mask and score_mod are code."""
    q, k, v, bend, block_mask, scale = (
        x.detach() if isinstance(x, Tensor) else x for x in args[:6]
    )
    b, h, i, j = (
        torch.arange(n, device=q.device).reshape(
            [-1 if axis == a else 1 for axis in range(4)]
        )
        for a, n in enumerate((*q.shape[:3], k.shape[2]))
    )
    seen = block_mask[-1](b, h, i, j).expand(*q.shape[:3], k.shape[2])
    shared = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ shared.mT * scale
    bent = bend(scores, b, h, i, j)
    if not torch.equal(scores, bent):
        return replace(
            see_logits("flex", bent.masked_fill(~seen, -math.inf)),
            note=f"{STORED_AS_LOGITS}; {UNCOMPILED}",
        )
    return CapturedCall(
        via="flex",
        q=q,
        k=k,
        v=v,
        out=out[0].detach(),
        scale=scale,
        mask=seen,
        lse=out[1].detach() * math.log(2),
        note=UNCOMPILED,
    )


def read_fast_path(given: dict[str, Any]) -> CapturedCall | str:
    """Return the attention of torch's fast paths, computed again from the arguments."""
    x: Any = given.get("src", given.get("query"))
    heads: Any = given.get("num_heads", given.get("num_head"))
    others = [given.get("key"), given.get("value")]
    lengths = None
    if x.is_nested:
        lengths = [len(row) for row in x.unbind()]
        x = x.to_padded_tensor(0.0)
        others = [None, None]
    if any(y is not None and (y.is_nested or y.shape != x.shape) for y in others):
        return "torch's fast path was given keys of another shape"
    if given.get("norm_first"):
        x = F.layer_norm(
            x, x.shape[-1:], given["norm_weight_1"], given["norm_bias_1"], given["eps"]
        )
    weight, bias = given["qkv_weight"], given["qkv_bias"]
    sources = [x, *(x if y is None else y for y in others)]
    biases = [None] * 3 if bias is None else bias.chunk(3)
    q, k, v = (
        F.linear(y, w, c).unflatten(-1, (heads, -1)).transpose(1, 2)
        for y, w, c in zip(sources, weight.chunk(3), biases, strict=True)
    )
    inside = None
    if lengths is not None:
        places = torch.arange(x.shape[1], device=x.device)
        inside = places < torch.tensor(lengths, device=x.device)[:, None]
    return CapturedCall(
        via="nn.MultiheadAttention",
        q=q,
        k=k,
        v=v,
        out=None,
        lse=None,
        scale=q.shape[-1] ** -0.5,
        mask=read_fast_mask(given.get("mask"), given.get("mask_type"), inside),
        keys_are_new=True,
        valid=inside,
    )


def read_fast_mask(
    mask: Tensor | None, kind: int | None, inside: Tensor | None
) -> Tensor | None:
    """Return which keys a fast path may see; it is told which ones it may not.

    kind: 1 if the mask is one of padding, (B, N)
    inside: (B, N), which places of a padded nested tensor are tokens
    """
    if mask is not None:
        mask = ~mask.bool()
        if kind == 1:
            mask = mask[:, None, None]
        mask = mask[(None,) * (4 - mask.ndim)]
    if inside is None:
        return mask
    return inside[:, None, None] if mask is None else mask & inside[:, None, None]
