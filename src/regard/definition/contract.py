"""Check the arguments of `attention`.

    q (..., H, Nq, D)    k (..., Hk, Nk, D)    v (..., Hk, Nk, Dv)    H a multiple of Hk

The arguments are checked once, here, and stored in an unambiguous `Call`: one array
library, a known position of the first query, masks with one possible meaning. Error
messages state what was given, what was expected, and what to write instead.

Next: attention.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np

from regard.arrays import (
    Array,
    accumulator,
    convert,
    count_from,
    holds,
    is_array,
    is_floating,
    is_torch,
    namespace,
    to_numpy,
)
from regard.errors import ArrayError, MaskError, OptionError, ShapeError
from regard.masks.algebra import Mask
from regard.masks.biases import Bias
from regard.masks.formula import NUMPY, Formula, Start, evaluate, resolve_start

ALL = slice(None)


@dataclass(frozen=True, kw_only=True)
class Call:
    """The checked arguments of one call."""

    xp: Any  # the array library
    q: Array  # (..., H, Nq, D)
    k: Array  # (..., Hk, Nk, D)
    v: Array  # (..., Hk, Nk, Dv)
    mask: Array | Mask | None
    bias: Array | Bias | None
    scale: float
    softcap: float | None
    sink: Array | None  # () or (H, 1, 1)
    q_start: Start
    shape: tuple[int, ...]  # (..., H, Nq, Nk)

    def widen(self) -> Call:
        """Return the call in the dtype used for computation, at least float32."""
        xp, dtype = self.xp, accumulator(self.xp, self.q, self.k, self.v)
        q, k, v = (xp.astype(x, dtype, copy=False) for x in (self.q, self.k, self.v))
        sink = None if self.sink is None else xp.astype(self.sink, dtype)
        return replace(self, q=q, k=k, v=v, sink=sink)

    def allowed(self, rows: slice = ALL, keys: slice = ALL) -> Array | None:
        """Return which of these cells are allowed; None means all of them."""
        return self.lower(self.mask, rows, keys)

    def added(self, rows: slice = ALL, keys: slice = ALL) -> Array | None:
        """Return the bias of these cells; None means no bias."""
        bias = self.lower(self.bias, rows, keys)
        return None if bias is None else self.xp.astype(bias, self.q.dtype)

    def lower(self, x: Any, rows: slice, keys: slice) -> Array | None:
        """Evaluate a formula on these cells, or slice them from an array."""
        *lead, n_q, n_k = self.shape
        if isinstance(x, Formula):
            first_q, stop_q, _ = rows.indices(n_q)
            first_k, stop_k, _ = keys.indices(n_k)
            shape = (*lead, stop_q - first_q, stop_k - first_k)
            at = count_from(first_k, shape[-1], self.q)
            return evaluate(
                x, shape, q_start=self.q_start + first_q, keys=at, like=self.q
            )
        if x is None:
            return None
        rows, keys = (
            s if n > 1 else ALL for s, n in zip((rows, keys), x.shape[-2:], strict=True)
        )
        return x[..., rows, keys]


def read_call(
    qkv: tuple[Array, Array, Array],
    mask: Array | Mask | None,
    *,
    bias: Array | Bias | None,
    scale: float | None,
    softcap: float | None,
    sink: Array | None,
    q_start: Start | None,
) -> Call:
    """Check the arguments of `attention`, and fill in the defaults."""
    q, k, v = qkv
    xp = namespace(q=q, k=k, v=v)
    mask, bias = (read_cells(x, q) for x in (mask, bias))
    formulas = [x for x in (mask, bias) if isinstance(x, Formula)]
    shape = find_score_shape(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if (name == "q" or x.dtype != q.dtype) and not is_floating(x):
            raise ArrayError(
                f"{name} has dtype {x.dtype}, expected floating point. Convert it, as "
                f"in {name}.{'float()' if is_torch(x) else 'astype(float)'}."
            )
    check_mask(xp, mask, shape)
    check_bias(bias, shape)
    check_number("scale", scale, -math.inf, "a finite number, or None")
    check_number("softcap", softcap, 0, "a number above 0, or None")
    start = resolve_start(q_start, shape, *formulas)
    return Call(
        xp=xp,
        q=q,
        k=k,
        v=v,
        mask=mask.place(q) if isinstance(mask, Mask) else mask,
        bias=bias.place(q) if isinstance(bias, Bias) else bias,
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else read_number(scale, q),
        softcap=None if softcap is None else read_number(softcap, q),
        sink=None if sink is None else read_sink(sink, q, shape),
        q_start=start,
        shape=shape,
    )


def find_score_shape(q: Array, k: Array, v: Array) -> tuple[int, ...]:
    """Return the shape (..., H, Nq, Nk) of the scores, or raise ShapeError."""
    if min(q.ndim, k.ndim, v.ndim) < 2:
        raise ShapeError(
            f"{name_shapes(q, k, v)}: expected at least (N, D) each. "
            "Write q[None, :] for one query vector."
        )
    if q.shape[-1] != k.shape[-1]:
        raise ShapeError(
            f"{name_shapes(q, k, v)}: q has width {q.shape[-1]} and k has width "
            f"{k.shape[-1]}, expected the same: a score is the dot product of the two."
        )
    if k.shape[-2] != v.shape[-2]:
        raise ShapeError(
            f"{name_shapes(q, k, v)}: there are {k.shape[-2]} keys and {v.shape[-2]} "
            "values, expected one value for each key."
        )
    n_heads, n_keys, n_values = (x.shape[-3] if x.ndim > 2 else 1 for x in (q, k, v))
    if min(n_heads, n_keys, q.shape[-1]) == 0:
        raise ShapeError(
            f"{name_shapes(q, k, v)}: no heads, or heads of width 0, expected at least "
            "1 of each. Skip the call if there are none."
        )
    if n_keys != n_values or n_heads % n_keys:
        raise ShapeError(
            f"{name_shapes(q, k, v)}: {n_heads} heads of q, {n_keys} of k and "
            f"{n_values} of v, expected the same number for k and v, and a multiple of "
            "it for q. Axes are (..., H, N, D): write q.swapaxes(-3, -2) if yours are "
            "(..., N, H, D)."
        )
    try:
        lead = broadcast(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except ValueError:
        raise ShapeError(
            f"{name_shapes(q, k, v)}: the axes before the heads do not broadcast, "
            "expected equal sizes or 1."
        ) from None
    heads = (n_heads,) if max(q.ndim, k.ndim, v.ndim) > 2 else ()
    return (*lead, *heads, q.shape[-2], k.shape[-2])


def name_shapes(q: Array, k: Array, v: Array) -> str:
    """Format the shapes for an error message."""
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that these shapes broadcast to."""
    if all(shape == shapes[0] for shape in shapes[1:]):
        return tuple(shapes[0])
    width = max(map(len, shapes))
    columns = zip(*((1,) * (width - len(s)) + tuple(s) for s in shapes), strict=True)
    sizes = [set(column) - {1} for column in columns]
    if any(len(size) > 1 for size in sizes):
        raise ValueError(shapes)
    return tuple(size.pop() if size else 1 for size in sizes)


def read_cells(x: Any, q: Array) -> Any:
    """Return a mask or bias that is a list or another library's array as one of q's."""
    if x is None or isinstance(x, Formula):
        return x
    if isinstance(x, list) and not any(isinstance(y, Formula) for y in x):
        x = np.asarray(x)
    other = is_array(x) and namespace(x=x) is not namespace(q=q)
    return convert(x, q) if other else x


def check_mask(xp: Any, mask: Any, shape: tuple[int, ...]) -> None:
    """Raise MaskError for masks that are invalid or ambiguous."""
    if mask is None or isinstance(mask, Mask):
        return
    if isinstance(mask, Bias):
        raise MaskError(f"mask={mask!r} is a bias. Write bias=… instead.")
    if not is_array(mask):
        raise MaskError(
            f"mask is a {type(mask).__name__}, expected a bool array or a mask such as "
            f"regard.causal(). {suggest_mask(mask)}"
        )
    if not xp.isdtype(mask.dtype, "bool"):
        yes = "mask != 0" if xp.isdtype(mask.dtype, "integral") else "mask > 0"
        raise MaskError(
            f"mask has dtype {mask.dtype}, expected bool: True = may attend. Write "
            f"{yes} for a mask of zeros and ones, bias=mask to add it to the scores."
        )
    check_axes("mask", mask, shape)


def suggest_mask(mask: Any) -> str:
    """Return what to write instead of something that is neither mask nor array."""
    if getattr(mask, "__module__", "") == "regard.masks.patterns":
        return f"Write {mask.__name__}(): it is a function that returns a mask."
    if callable(getattr(mask, "mask_mod", None)):  # FlexAttention's BlockMask
        return "Write regard.where(mask.mask_mod)."
    if isinstance(mask, tuple | list):
        return "Write a & b for both, a | b for either, masks.per_head([a, b]) by head."
    if callable(mask):
        return "Write regard.where(fn) for a function."
    return "Write mask=regard.causal(), or mask=None for none."


def check_bias(bias: Any, shape: tuple[int, ...]) -> None:
    """Raise MaskError for biases that are not numbers, or ambiguous in shape."""
    if bias is None or isinstance(bias, Bias):
        return
    if isinstance(bias, Mask):
        raise MaskError(f"bias={bias!r} is a mask. Write mask=… instead.")
    if not is_array(bias) or not is_floating(bias):
        kind = bias.dtype if is_array(bias) else type(bias).__name__
        raise MaskError(
            f"bias is of type {kind}, expected a floating point array, or a bias such "
            "as regard.masks.alibi(slopes). Write mask=… for a bool array."
        )
    check_axes("bias", bias, shape)


def check_axes(name: str, x: Array, shape: tuple[int, ...]) -> None:
    """Raise MaskError if an array does not fit the scores, or fits ambiguously."""
    axes = ("B", "H", "Nq", "Nk")[-min(len(shape), 4) :]
    expected = f"({', '.join(axes)}) = {tuple(shape)}"
    try:
        fits = x.ndim >= 2 and broadcast(tuple(x.shape), shape) == tuple(shape)
    except ValueError:
        fits = False
    batch = shape[0] if len(shape) == 4 else 1
    by_batch = x.ndim in (2, 3) and batch > 1 and x.shape[0] == batch
    if fits and not by_batch:
        return
    known = f"{name} has shape {tuple(x.shape)}, expected one that fits {expected}"
    if not by_batch:
        raise MaskError(f"{known}; axes of size 1 broadcast.")
    if x.ndim == 2:
        rows = "padding(mask)" if name == "mask" else "bias[:, None, None, :]"
        hint = f"{rows} if it has a row of keys for each batch"
    else:
        hint = f"{name}[:, None] if its first axis is the batch"
    also = f", {name}[None] if its first axis is {axes[-x.ndim]}" if fits else ""
    raise MaskError(f"{known}. Write {hint}{also}.")


def check_number(name: str, x: Any, above: float, expected: str) -> None:
    """Raise OptionError unless x is finite and above a limit, if its value is known."""
    if x is None:
        return
    try:
        values = to_numpy(x) if is_array(x) else x
    except ArrayError:  # a JAX tracer has no values
        return
    known = isinstance(x, Real) and not isinstance(x, bool)
    known = known or (is_array(x) and is_per_head(x))
    if not known or not np.all((values > above) & (values < math.inf)):
        raise OptionError(f"{name}={x!r}, expected {expected}.")


def is_per_head(x: Array) -> bool:
    """Return whether an array is one number, or broadcasts to one per head."""
    return math.prod(x.shape) == 1 or tuple(x.shape[-2:]) == (1, 1)


def expect_numbers(name: str, x: Any) -> Array:
    """Return x as an array of numbers, or raise OptionError."""
    found = x if is_array(x) else np.asarray(x)
    if found.dtype == object or not holds(found, "numeric"):
        raise OptionError(f"{name}={x!r}, expected a number, or one per head.")
    return found


def read_number(x: Any, like: Array) -> Any:
    """Return a NumPy scalar as float, so that it promotes no dtype; convert arrays."""
    if isinstance(x, NUMPY) and x.ndim == 0:
        return float(x)
    return convert(x, like) if is_array(x) else x


def read_sink(sink: Any, like: Array, shape: tuple[int, ...]) -> Array:
    """Return the sink logits with shape () or (H, 1, 1), which broadcasts."""
    xp = namespace(q=like)
    sink = convert(expect_numbers("sink", sink), like)
    n_heads = shape[-3] if len(shape) > 2 else 1
    if sink.ndim > 1 or (sink.ndim == 1 and sink.shape[0] != n_heads):
        raise ShapeError(
            f"sink has shape {tuple(sink.shape)}, expected a number, or one per head: "
            f"({n_heads},)."
        )
    return xp.reshape(sink, (-1, 1, 1)) if sink.ndim else sink
