"""Replace what heads output where a model computes attention with its own softmax.

    weights = softmax(scores)      kept, with the edit of the call
    z       = weights @ v          the product with them: its result is edited

Which product it is, is told by its numbers: one side has to be the weights, as the
softmax returned them. If there is no such product, or a second one, the intervention
raises OptionError at its end.

Next: intercept.py
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.ablate.replacement import FunctionError
from regard.errors import OptionError
from regard.run.call_edit import ALTERING, CallEdit
from regard.run.own_work import compute

PRODUCTS = (
    torch.matmul,
    torch.bmm,
    torch.einsum,
    Tensor.matmul,
    Tensor.bmm,
    Tensor.__matmul__,
)
IN_ORDER = (0, 1, 2, 3)


@dataclass(eq=False)
class AwaitedProduct:
    """Weights whose product with the values is to be edited."""

    thread: int
    module: str
    weights: Tensor  # (B, H, Nq, Nk), as the softmax returned them
    edit: CallEdit
    found: int = 0  # products


class EditedProducts:
    """The products that one intervention waits for."""

    def __init__(self) -> None:
        self.awaited: list[AwaitedProduct] = []
        self.missed: dict[str, str] = {}  # why, by module

    def expect(self, module: str, weights: Tensor, edit: CallEdit) -> None:
        """Edit the next product of this thread that has these weights."""
        self.give_up()
        thread = threading.get_ident()
        edit = replace(edit, cells=None)  # they are hidden already
        self.awaited.append(AwaitedProduct(thread, module, weights, edit))

    def run(self, func: Any, args: Any, named: Any) -> Any:
        """Run a product, and edit its result if it was waited for."""
        thread = threading.get_ident()
        mine = [x for x in self.awaited if x.thread == thread]
        ALTERING.outputs = not all(x.found for x in mine)
        try:
            out = func(*args, **named)
        finally:
            ALTERING.outputs = False
        for awaited in mine:
            with compute():
                order = find_axes(func, args, awaited.weights)
            if order is not None:
                awaited.found += 1
                try:
                    return edit_product(out, awaited, order)
                except FunctionError:
                    raise
                except Exception as error:  # noqa: BLE001 (none reaches the model)
                    self.missed[awaited.module] = str(error)
        return out

    def give_up(self) -> None:
        """Forget what this thread waited for, and keep what was not met once."""
        thread = threading.get_ident()
        for awaited in [x for x in self.awaited if x.thread == thread]:
            self.awaited.remove(awaited)
            if awaited.found != 1:
                self.missed[awaited.module] = (
                    f"its weights were seen in {awaited.found} products, expected one"
                )

    def check(self) -> None:
        """Raise OptionError if outputs were not replaced."""
        self.give_up()
        missed = self.missed | {x.module: "it did not end" for x in self.awaited}
        for module, why in missed.items():
            raise OptionError(
                f"{module} computes attention with a softmax of its own, and what its "
                f"heads output could not be replaced: {why}. regard.knock_out can "
                "remove them."
            )


def edit_product(out: Tensor, awaited: AwaitedProduct, order: Sequence[int]) -> Tensor:
    """Return the result of a product, with the heads edited.

    order: where batch, head, query and feature are; without an axis of heads, they are
        in the batch
    """
    ordered = out.permute(*order) if out.ndim == 4 else out
    z = ordered.reshape(*awaited.weights.shape[:3], ordered.shape[-1])
    z = awaited.edit.clear(z).reshape(ordered.shape)
    return z.permute(*(order.index(i) for i in range(4))) if out.ndim == 4 else z


def find_axes(
    func: Any, args: Sequence[Any], weights: Tensor
) -> tuple[int, ...] | None:
    """Return where batch, head, query and feature are in a product with weights.

    None: the weights are no side of it
    """
    if func is not torch.einsum:
        same = holds_weights(args[0], weights)
        return IN_ORDER if same and args[0].shape[-2:] == weights.shape[-2:] else None
    equation, *sides = args
    if not isinstance(equation, str):
        return None
    sides = sides[0] if len(sides) == 1 else sides
    inputs, _, result = equation.replace(" ", "").partition("->")
    for axes, side in zip(inputs.split(","), sides, strict=False):
        kept = set(axes[:3]) <= set(result) and axes[-1] not in result
        if len(axes) == len(result) == 4 and kept and holds_weights(side, weights):
            (feature,) = set(result) - set(axes)
            return tuple(result.index(x) for x in (*axes[:3], feature))
    return None


def holds_weights(x: Any, weights: Tensor) -> bool:
    """Return whether x holds the weights, in their order."""
    if not isinstance(x, Tensor) or x.numel() != weights.numel():
        return False
    found, kept = x.detach().reshape(weights.shape), weights.detach().to(x.dtype)
    return bool(torch.equal(found, kept))
