"""What a matrix product tells: its operands, the kinds of its axes, what it added.

    mm, bmm, mv, addmm, baddbmm:  beta input + alpha left @ right

Next: find_attention.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from regard.lens.operators import PRODUCTS, has_nested
from regard.lens.origin import FEATURE, ROW, Origin, Step, View


def read_operands(
    name: str, args: Any, out: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return left (B, n, d), right (B, d, m) and their product, None if empty."""
    first = PRODUCTS[name]
    left, right = args[first : first + 2]
    if has_nested((left, right)) or not (left.numel() and right.numel()):
        return None
    if name == "mv":
        right, out = right[:, None], out[:, None]
    return (
        (left[None], right[None], out[None]) if left.ndim == 2 else (left, right, out)
    )


def name_kinds(ndim: int, fixed: Sequence[bool], views: tuple[View, View]) -> list[str]:
    """Return the kinds of the axes of a product with weights, (batch, rows, columns).

    The side of the weights gives features, the other one rows. If both sides are
    parameters, the left one is a learnt query.
    """
    if ndim == 1:
        return [FEATURE]
    weights_first = fixed[0] and not fixed[1]
    kinds = [FEATURE, ROW] if weights_first else [ROW, FEATURE]
    weight = views[0 if weights_first else 1]
    return kinds if ndim == 2 else [FEATURE if weight.strides[0] else ROW, *kinds]


def read_terms(name: str, args: Any, kwargs: Any, origin: Origin) -> tuple[Step, ...]:
    """Return what a product did besides: beta input + alpha left @ right."""
    if not PRODUCTS[name]:
        return ()
    alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
    steps = [] if alpha == 1 else [Step("scale", float(alpha))]
    if beta:
        where = View(origin, origin.shape, origin.strides)
        steps.append(Step("add", float(beta), args[0].detach(), where))
    return tuple(steps)
