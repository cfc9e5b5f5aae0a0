"""Weight times gradient, from values that a backward pass already has.

    sum_j w_ij dL/dw_ij = out_i · dL/dout_i            gradient_rows, free
    sum_i w_ij dL/dw_ij = v_j · dL/dv_j                gradient_keys, free
                        = v_j · sum_i w_ij dL/dout_i   gradient_received, one call

because dL/dw_ij = dL/dout_i · v_j. The second sums over the query heads that share a
key head; the third separates them, using the kernel with q and k exchanged.

Next: tile_walk.py
"""

from __future__ import annotations

from dataclasses import replace

from regard.arrays import Array, namespace
from regard.errors import OptionError, ShapeError
from regard.recording.record import Record
from regard.stats.columns import ask_received
from regard.stats.named_array import NamedArray
from regard.stats.plan import Ask, answer_one
from regard.stats.replay import share


def gradient_rows(out: Array, grad_out: Array) -> NamedArray:
    """Return the sum of weight times gradient for each query, (H, Nq).

    out, grad_out: (H, Nq, Dv), the output of attention and its gradient
    """
    return multiply(out, grad_out, ("head", "query"), "A: out · dL/dout")


def gradient_keys(v: Array, grad_v: Array) -> NamedArray:
    """Return the sum of weight times gradient for each key and key head, (Hk, Nk).

    v, grad_v: (Hk, Nk, Dv), the values and their gradient
    """
    return multiply(v, grad_v, ("group", "key"), "A: v · dL/dv")


def gradient_received(record: Record, grad_out: Array) -> NamedArray:
    """Return the sum of weight times gradient for each key and query head, (H, Nk).

    grad_out: (H, Nq, Dv); the record must have v
    """
    return answer_one(ask_gradient_received(record, grad_out))


def ask_gradient_received(record: Record, grad_out: Array) -> Ask:
    """Return a request for weight times gradient of each key."""
    if record.v is None:
        raise OptionError(
            f'{record.name} has no v. Write regard.watch(model, keep="qkv").'
        )
    xp, v = namespace(v=record.v), share(record.v, record.heads)
    expected = (*record.q.shape[:2], v.shape[2])
    if tuple(grad_out.shape) != expected:
        raise ShapeError(
            f"{record.name}: grad_out has the shape {tuple(grad_out.shape)}, expected "
            f"(H, Nq, Dv) = {expected}."
        )
    how = "A: v · (C: the kernel, keys look at queries, with G := dL/dout)"

    def finish(sums: Array, _: Array) -> NamedArray:
        return NamedArray(xp.sum(sums * v, axis=-1), ("head", "key"), how)

    return replace(ask_received(record, grad_out), finish=finish)


def multiply(x: Array, grad: Array, axes: tuple[str, ...], how: str) -> NamedArray:
    """Return the dot products x · grad over the last axis."""
    if x.ndim != 3 or tuple(x.shape) != tuple(grad.shape):
        raise ShapeError(
            f"shapes {tuple(x.shape)} and {tuple(grad.shape)}, expected the same three "
            "axes (heads, N, Dv)."
        )
    return NamedArray(namespace(x=x, grad=grad).sum(x * grad, axis=-1), axes, how)
