"""Read what an operator did to scores: the step from its name and arguments.

Next: scores.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from regard.lens.origin import Step, View
from regard.run.cells import HIDDEN

UNKNOWN = Step("unknown")
COPIES = {"clone", "_to_copy", "copy", "contiguous"}


def read_step(name: str, args: Sequence[Any], lead: int, view: View) -> Step:
    """Return the step of an operator whose argument number `lead` is the scores."""
    if name in COPIES:
        return Step("copy")
    if name == "tanh":
        return Step("tanh")
    if name == "neg":
        return Step("scale", -1.0)
    reader = READERS.get(name)
    return UNKNOWN if reader is None else reader(args, lead, view)


def read_mul(args: Sequence[Any], lead: int, view: View) -> Step:
    """Read a multiplication by a number, or by one number for each row."""
    other = args[1 - lead]
    number = read_number(other)
    if number is not None:
        return Step("scale", number)
    return Step("scale_rows", 1.0, other.detach(), view)


def read_div(args: Sequence[Any], lead: int, view: View) -> Step:
    """Read a division of the scores."""
    number = read_number(args[1])
    if lead or len(args) > 2:
        return UNKNOWN
    if number is not None:
        return Step("scale", 1 / number) if number else UNKNOWN
    return Step("scale_rows", -1.0, args[1].detach(), view)


def read_add(args: Sequence[Any], lead: int, view: View) -> Step:
    """Read an addition to the scores."""
    other = args[1 - lead]
    if not isinstance(other, Tensor) or len(args) > 2:
        return (
            Step("copy") if isinstance(other, int | float) and other == 0 else UNKNOWN
        )
    if other.shape and other.ndim > len(view.shape):
        return UNKNOWN
    return Step("add", 1.0, other.detach(), view)


def read_sub(args: Sequence[Any], lead: int, view: View) -> Step:
    """Read a subtraction from the scores."""
    if lead or len(args) > 2 or not isinstance(args[1], Tensor):
        return UNKNOWN
    return Step("add", -1.0, args[1].detach(), view)


def read_fill(args: Sequence[Any], lead: int, view: View) -> Step:
    """Read masked_fill(scores, mask, value)."""
    value = read_number(args[2])
    if lead or value is None or value > HIDDEN:
        return UNKNOWN
    return Step("hide", 1.0, args[1].detach(), view)


def read_where(args: Sequence[Any], lead: int, view: View) -> Step:
    """Read where(condition, scores, value), or the other way round."""
    value = read_number(args[3 - lead]) if lead else None
    if value is None or value > HIDDEN:
        return UNKNOWN
    condition = args[0].detach()
    return Step("hide", 1.0, ~condition if lead == 1 else condition, view)


def read_floor(args: Sequence[Any], lead: int, _view: View) -> Step:
    """Read maximum(scores, value) or clamp(scores, min=value): no score is as low."""
    value = read_number(args[1 - lead]) if len(args) > 1 else None
    if value is None or value > HIDDEN or len(args) > 2:
        return UNKNOWN
    return Step("copy")


def read_number(x: Any) -> float | None:
    """Return a number, or the only number of a tensor."""
    if isinstance(x, Tensor):
        return float(x) if x.numel() == 1 and not x.is_complex() else None
    return float(x) if isinstance(x, int | float) else None


READERS = {
    "mul": read_mul,
    "div": read_div,
    "add": read_add,
    "sub": read_sub,
    "masked_fill": read_fill,
    "where": read_where,
    "maximum": read_floor,
    "clamp": read_floor,
    "clamp_min": read_floor,
}
