"""Choose the kernel of a call (`choose`), and run it (`attend`).

`attend` has the signature of `regard.attention` and computes the same result at the
speed of the kernel, always with lse and gradients:

    flash        one or two calls of the fused kernel, without a dense mask
    flex         FlexAttention, compiled for the formula of the mask (CUDA, ROCm)
    tiles        the fused kernel strip by strip, with a formula, an array or a bias
    definition   the definition itself, tile by tile: if no kernel supports the call

The fused kernel is the CPU's, or the one that SDPA would take on another device
(device_operators.py).

    print(regard.engine.choose(q, k, v, causal() & window(1023)))

Next: tiles.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor

from regard.arguments import suggest
from regard.arrays import is_array, namespace, without_autocast
from regard.definition.attention import Attended, Edits, check_steps, define
from regard.definition.contract import Call, read_call
from regard.engine.by_definition import BLOCK, run_definition
from regard.engine.compiled_flex import can_run_flex, run_flex
from regard.engine.device_operators import Operator, find_operator
from regard.engine.flash import CPU, RangeError, attend_part
from regard.engine.in_place import guard_functions, list_tensors
from regard.engine.tiles import (
    CAUSAL,
    FusedAttention,
    Strip,
    fits_causal_kernel,
    limit_threads,
    plan,
    run_strips,
)
from regard.errors import ArrayError
from regard.masks.algebra import Mask
from regard.masks.biases import Bias
from regard.masks.formula import Start
from regard.masks.tiles import FULL, prove_tiles

# Dynamo of torch 2.6 cannot trace a plan
CAN_TRACE = "reason" in signature(torch.compiler.disable).parameters
namespace(q=torch.empty(0))  # fill the cache here, where torch.compile does not trace


@dataclass(frozen=True)
class Choice:
    """A kernel, and the reason for it."""

    kernel: Literal["flash", "flex", "tiles", "definition"]
    why: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.why}"


Rule = tuple[Callable[[Call], bool], Choice]

RULES: tuple[Rule, ...] = (  # the first rule that applies decides
    (
        lambda call: call.softcap is not None,
        Choice("definition", "no fused kernel caps scores"),
    ),
    (
        lambda call: len(call.shape) > 4,
        Choice("definition", "more axes than (B, H, N, D)"),
    ),
    (
        lambda call: len({x.dtype for x in (call.q, call.k, call.v)}) > 1,
        Choice("definition", "q, k and v differ in dtype"),
    ),
    (
        lambda call: requires_gradient(call.bias) or is_array(call.scale),
        Choice("definition", "a trainable bias or scale needs its own gradient"),
    ),
    (
        lambda call: find_kernel(call) is None,
        Choice("definition", "no fused kernel of this device takes this dtype"),
    ),
    (
        lambda call: call.mask is None and call.bias is None,
        Choice("flash", "nothing is masked"),
    ),
    (
        fits_causal_kernel,
        Choice("flash", "causal: the keys before all queries, and the diagonal"),
    ),
    (
        lambda call: isinstance(call.mask, Mask) and can_run_flex(call),
        Choice("flex", "a formula: FlexAttention, compiled for it, visits its tiles"),
    ),
    (
        lambda call: isinstance(call.mask, Mask),
        Choice("tiles", "a formula: empty tiles are skipped, full ones need no mask"),
    ),
    (
        lambda call: is_array(call.mask) or call.bias is not None,
        Choice("tiles", "an array, or only a bias: a strip of it at a time"),
    ),
)


@suggest
def choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | Mask | None = None,
    *,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    q_start: Start | None = None,
) -> Choice:
    """Return the kernel that `attend` would run, and why."""
    call = read_call(
        (q, k, v),
        mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sink=sink,
        q_start=q_start,
    )
    call = simplify(call)
    choice = choose_kernel(call)
    device = call.q.device.type
    if device == "cpu" or choice.kernel == "definition":
        return choice
    operator = find_kernel(call)
    if choice.kernel == "flex" or operator is None:
        return replace(choice, why=f"{choice.why}, on {device}")
    return replace(choice, why=f"{choice.why}; {operator.name}, on {device}")


def choose_kernel(call: Call) -> Choice:
    """Return the choice of the first rule that applies."""
    return next(choice for applies, choice in RULES if applies(call))


def find_kernel(call: Call) -> Operator | None:
    """Return the fused operator of a call without or with a mask, None if none fits."""
    if call.q.device.type == "cpu":
        return CPU
    q, k, v = (
        x.reshape(1, math.prod(x.shape[:-2]), *x.shape[-2:])
        for x in (call.q, call.k, call.v)
    )
    causal = fits_causal_kernel(call)
    bias = None
    if not causal and (call.mask is not None or call.bias is not None):
        n_q, n_k = call.shape[-2:]
        bias = q.new_zeros(1, 1, 1, n_k).expand(*q.shape[:2], n_q, n_k)
    return find_operator(q, k, v, bias)


def simplify(call: Call) -> Call:
    """Drop a mask that is proved to allow everything."""
    if not isinstance(call.mask, Mask) or fits_causal_kernel(call):
        return call
    whole = (max(1, call.shape[-2]), max(1, call.shape[-1]))
    tiles = prove_tiles(call.mask, call.shape, block=whole, q_start=call.q_start)
    return replace(call, mask=None) if (tiles.kinds == FULL).all() else call


def requires_gradient(bias: Any) -> bool:
    """Return whether a bias, or any tensor in its formula, requires a gradient."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in list_tensors(bias))


@suggest
def attend(
    q: Tensor,  # (..., H, Nq, D)
    k: Tensor,  # (..., Hk, Nk, D)
    v: Tensor,  # (..., Hk, Nk, Dv)
    mask: Tensor | Mask | None = None,
    *,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    q_start: Start | None = None,
    see: Sequence[str] = (),
    edit: Edits | None = None,
    block: int | tuple[int, int] | None = None,
) -> Attended:
    """Compute `regard.attention` on PyTorch's fused kernels.

    >>> import torch, regard
    >>> from regard.engine import attend
    >>> q, k, v = torch.randn(3, 1, 8, 64, 32)
    >>> fast = attend(q, k, v, regard.causal())
    >>> slow = regard.attention(q, k, v, regard.causal())
    >>> torch.testing.assert_close(fast.out, slow.out)

    The arguments are those of `regard.attention`. `see` computes the steps separately
    and does not change `out`; `edit` and `block` use the definition instead.
    """
    special = (mask, bias, softcap, sink, edit, block)
    bare = all(x is None for x in special) and not see and is_number(scale)
    if bare and can_skip_planning(q, k, v):
        factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        with suppress(RangeError), limit_threads(q, k, v):
            return Attended(*attend_part(q, k, v, scale=factor))
    options: Any = {"bias": bias, "scale": scale, "softcap": softcap, "sink": sink}
    plain = all(x is None for x in (bias, softcap, block)) and not is_array(scale)
    if torch.compiler.is_compiling() and not (plain and is_traceable(q, k, v, mask)):
        from regard.engine.outside_graph import call_outside_graph  # noqa: PLC0415

        steps: Any = {"see": see, "edit": edit, "block": block}
        done: Attended = call_outside_graph(
            attend, q, k, v, mask, **options, **steps, q_start=q_start
        )
        return done
    call = read_call((q, k, v), mask, **options, q_start=q_start)
    if not isinstance(q, Tensor):
        raise ArrayError(
            f"q is a {type(q).__module__} array, expected a torch tensor. Write "
            "torch.as_tensor(q), or regard.attention(q, k, v) for other libraries."
        )
    if see or edit or block is not None:
        check_steps(see, edit or {}, block)
    if edit:
        seen = define(call.widen(), see, edit)
        return replace(seen, out=seen.out.to(q.dtype))
    out, lse = run_choice(simplify(call), block)
    if not see:
        return Attended(out, lse)
    return replace(define(call.widen(), see), out=out, lse=lse)


def is_number(scale: Any) -> bool:
    """Return whether a scale is a Python number or None."""
    return scale is None or type(scale) in (int, float)


def can_skip_planning(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernel can be called directly, without planning.

    A fast path for generation: planning is slow, and a token makes dozens of calls.
    """
    if torch.is_grad_enabled() or not all(isinstance(x, Tensor) for x in (q, k, v)):
        return False
    alike = q.dtype == k.dtype == v.dtype and q.ndim == k.ndim == v.ndim == 4
    if not alike or not q.dtype.is_floating_point or q.device.type != "cpu":
        return False
    (b, h, _, d), (_, shared, n, _) = q.shape, k.shape
    fits = k.shape == v.shape == (b, shared, n, d)
    return bool(fits and min(h, shared, d) > 0 and h % shared == 0)


def is_traceable(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> bool:
    """Return whether torch.compile can trace the call: its plan needs no values."""
    same = q.dtype == k.dtype == v.dtype and max(q.ndim, k.ndim, v.ndim) <= 4
    known = mask is None or (isinstance(mask, Mask) and mask == CAUSAL)
    return bool(CAN_TRACE and same and q.device.type == "cpu" and known)


def run_choice(
    call: Call, block: int | tuple[int, int] | None
) -> tuple[Tensor, Tensor]:
    """Run the chosen kernel; fall back to the definition if it raises RangeError."""
    with limit_threads(call.q, call.k, call.v):
        kernel = "definition" if block is not None else choose_kernel(call).kernel
        if kernel != "definition":
            run = run_flex if kernel == "flex" else run_strips
            with suppress(RangeError), without_autocast(call.q):
                return run_fused(call, run)
        return run_definition(call, BLOCK if block is None else block)


def run_fused(
    call: Call, run: Callable[[Call, tuple[Strip, ...]], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Run a fused kernel on (B, H, N, D), and apply the sinks.

    The backward pass goes strip by strip, whatever the forward pass did.
    """
    lead, four = call.shape[:-2], call
    batch, heads = (1, 1, *lead)[-2:]
    if any(x.ndim != 4 or x.shape[0] != batch for x in (call.q, call.k, call.v)):
        q, k, v = (view_as_batch(x, batch) for x in (call.q, call.k, call.v))
        four = replace(call, q=q, k=k, v=v, shape=(batch, heads, *call.shape[-2:]))
    strips, arrays = plan(four), (four.q, four.k, four.v)
    if torch.is_grad_enabled() and any(x.requires_grad for x in arrays):
        out, lse = FusedAttention.apply(*arrays, guard_functions(four), strips, run)
    else:
        out, lse = run(four, strips)
    if call.sink is not None:
        out, lse = apply_sink(out, lse, call.sink)
    if len(lead) == 2:
        return out, lse
    return out.reshape(*lead, *out.shape[-2:]), lse.reshape(*lead, lse.shape[-1])


def apply_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Apply sinks of shape () or (H, 1, 1) to out and lse."""
    beside = sink[..., 0].to(lse.dtype) if sink.ndim else sink.to(lse.dtype)
    beside = beside.masked_fill(beside == math.inf, math.nan)  # as in the definition
    seen = lse != -math.inf
    lse = lse.masked_fill(~seen, 0)  # -inf - (-inf) is NaN, also in the gradients
    out = (out * torch.sigmoid(lse - beside)[..., None]).to(out.dtype)
    # logaddexp(lse, beside), which lacks a second derivative if one of them is small
    total = lse - torch.nn.functional.logsigmoid(lse - beside)
    return out, torch.where(seen, total, beside)


def view_as_batch(x: Tensor, batch: int) -> Tensor:
    """Return x as (B, H, N, D), without copying."""
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    return x.expand(batch, -1, -1, -1)
