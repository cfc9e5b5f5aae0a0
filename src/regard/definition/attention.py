"""The definition of attention: the reference for everything else in this library.

    scores  = scale * q kᵀ                      how well each key matches each query
    capped  = softcap * tanh(scores / softcap)  (if there is a softcap)
    logits  = capped + bias, and -inf where the mask is False
    total   = sum exp(logits) + exp(sink)       (exp(sink) only if there is a sink)
    weights = exp(logits) / total               sums to 1, less with a sink, 0 if empty
    out     = weights v                         the weighted average of the values

    lse     = log total                         so that weights = exp(logits - lse)

It is written to be read, using only functions that NumPy, PyTorch and JAX share. It
builds the whole score matrix; `block=` computes the same result without it.

Next: steps.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from regard.arguments import NotAnArray, suggest
from regard.arrays import Array, constant, namespace
from regard.definition.blocked import fold
from regard.definition.contract import ALL, Call, read_call
from regard.definition.heads import multiply_heads
from regard.errors import OptionError
from regard.masks.algebra import Mask
from regard.masks.biases import Bias
from regard.masks.formula import Start

STEPS = ("scores", "capped", "logits", "weights")

Edits = Mapping[str, Callable[[Array], Array]]
NO_EDITS: Edits = {}


@dataclass(frozen=True)
class Attended(NotAnArray):
    """The result of `attention`: out, lse, and the requested intermediate steps."""

    out: Array  # (..., H, Nq, Dv), in the dtype of q
    lse: Array  # (..., H, Nq), at least float32, natural logarithm
    scores: Array | None = None  # (..., H, Nq, Nk), as the three below
    capped: Array | None = None
    logits: Array | None = None
    weights: Array | None = None


@suggest
def attention(
    q: Array,  # (..., H, Nq, D)
    k: Array,  # (..., Hk, Nk, D)      H a multiple of Hk: head h uses h // (H / Hk)
    v: Array,  # (..., Hk, Nk, Dv)
    mask: Array | Mask | None = None,  # True = may attend
    *,
    bias: Array | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Array | None = None,
    q_start: Start | None = None,
    see: Sequence[str] = (),
    edit: Edits | None = None,
    block: int | tuple[int, int] | None = None,
) -> Attended:
    """Compute attention: for every query, the weighted average of the values.

    >>> import numpy as np, regard
    >>> x = np.eye(3)
    >>> seen = regard.attention(x, x, x, regard.causal(), see=("weights",))
    >>> seen.weights.round(2).tolist()
    [[1.0, 0.0, 0.0], [0.36, 0.64, 0.0], [0.26, 0.26, 0.47]]

    mask: a bool array (..., Nq, Nk) or a formula such as `causal() & window(255)`
    bias: added to the scores; an array or a formula such as `alibi(slopes)`
    scale: factor of the scores; default 1 / sqrt(D)
    softcap: limits the scores to ± softcap, before bias and mask
    sink: one logit per head that takes weight but has no value; +inf gives NaN
    q_start: position of the first query; needed if Nq != Nk and positions are compared
    see: the steps to return: "scores", "capped", "logits", "weights"
    edit: functions that replace steps as they are computed, {"weights": lambda w: ...}
    block: tile size, rows or (rows, keys): the same result in memory linear in N
    """
    check_steps(see, edit or {}, block)
    call = read_call(
        (q, k, v),
        mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sink=sink,
        q_start=q_start,
    ).widen()
    if block is None:
        done = define(call, see, edit or {})
    else:
        done = Attended(*fold(attend_rows, call, block))
    return replace(done, out=call.xp.astype(done.out, q.dtype, copy=False))


def define(call: Call, see: Sequence[str] = (), edit: Edits = NO_EDITS) -> Attended:
    """Compute a whole call at once, and return the requested steps."""
    done = attend_rows(call, edit=edit)
    return Attended(done.out, done.lse, **{step: getattr(done, step) for step in see})


def attend_rows(
    call: Call, rows: slice = ALL, keys: slice = ALL, *, edit: Edits = NO_EDITS
) -> Attended:
    """Compute the formulas above for some rows and keys, with every step."""
    xp = call.xp
    q, k, v = call.q[..., rows, :], call.k[..., keys, :], call.v[..., keys, :]
    allowed, bias = call.allowed(rows, keys), call.added(rows, keys)
    if allowed is not None:  # fully masked keys must not contribute, even as 0 * NaN
        k, v = hide_unseen(k, allowed), hide_unseen(v, allowed)
    scores, capped, logits = compute_logits(
        q, k, allowed, bias, scale=call.scale, softcap=call.softcap, edit=edit
    )

    top = constant(-math.inf, logits, (*logits.shape[:-1], 1))  # (..., H, Nq, 1)
    if logits.shape[-1]:  # max() is undefined over zero keys
        top = xp.max(logits, axis=-1, keepdims=True)
    if call.sink is not None:  # one more logit in every row
        top = xp.where(call.sink > top, call.sink, top)
    top = xp.where(top == -math.inf, constant(0, top), top)  # a fully masked row
    parts = xp.exp(logits - top)  # at most 1: no overflow
    total = xp.sum(parts, axis=-1, keepdims=True)
    if call.sink is not None:
        total = total + xp.exp(call.sink - top)
    empty = total == 0
    total = xp.where(empty, constant(1, total), total)
    weights = edit.get("weights", keep)(parts / total)
    lse = xp.where(empty, constant(-math.inf, top), top + xp.log(total))[..., 0]

    out = multiply_heads(weights, v)
    if lse.shape != out.shape[:-1]:  # v has more batches than q and k
        lse = xp.broadcast_to(lse, out.shape[:-1])
    return Attended(out, lse, scores, capped, logits, weights)


def compute_logits(
    q: Array,  # (..., H, rows, D)
    k: Array,  # (..., Hk, keys, D)
    allowed: Array | None,  # as many axes as the scores, or fewer; None is everything
    bias: Array | None,
    *,
    scale: float,
    softcap: float | None,
    edit: Edits = NO_EDITS,
) -> tuple[Array, Array, Array]:
    """Return the scores, capped scores and logits of some queries and keys."""
    xp = namespace(q=q, k=k)
    scores = edit.get("scores", keep)(multiply_heads(q * scale, xp.matrix_transpose(k)))
    capped = scores if softcap is None else softcap * xp.tanh(scores / softcap)
    capped = edit.get("capped", keep)(capped)
    logits = capped if bias is None else capped + bias
    if allowed is not None:
        logits = xp.where(allowed, logits, constant(-math.inf, logits))
    return scores, capped, edit.get("logits", keep)(logits)


def keep(values: Array) -> Array:
    """Return the values of a step that is not edited."""
    return values


def hide_unseen(x: Array, allowed: Array) -> Array:
    """Return k or v (..., Hk, Nk, D) with 0 at keys that no query may attend to."""
    xp = namespace(x=x)
    axes = (-3, -2) if allowed.ndim > 2 else (-2,)
    seen = xp.any(allowed, axis=axes, keepdims=True)  # (..., 1, 1, Nk)
    return xp.where(xp.matrix_transpose(seen), x, constant(0, x))


def check_steps(see: Sequence[str], edit: Edits, block: object) -> None:
    """Raise OptionError for unknown steps, or for steps of a blocked call."""
    if isinstance(see, str) or not isinstance(see, Sequence):
        step = see if see in STEPS else "weights"
        raise OptionError(f'see={see!r}, expected a tuple. Write see=("{step}",).')
    if not isinstance(edit, Mapping) or not all(map(callable, edit.values())):
        raise OptionError(
            f"edit={edit!r}, expected functions by step. "
            'Write edit={"weights": lambda weights: …}.'
        )
    for name in (*see, *edit):
        if name not in STEPS:
            steps = ", ".join(STEPS)
            raise OptionError(f'there is no step "{name}"; there are {steps}.')
    if block is not None and (see or edit):
        raise OptionError(
            "block= never holds a whole step, so it cannot be combined with see= or "
            "edit=. Omit block= to see or edit a step."
        )
