"""From a matrix product to the logits of a softmax: scale, softcap, mask and bias.

    logits = cap tanh(scale left @ right / cap) + added,  -inf where hidden

The steps that operators took between product and softmax are read in order. A formula
that cannot be read, or whose numbers do not agree with the logits, is given up, and the
logits themselves are kept instead.

Next: softmax_call.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.lens.layout import Axis, arrange
from regard.lens.origin import Step, View

HIDDEN = -1000.0  # a number that is filled in below this hides a cell


@dataclass(frozen=True)
class Term:
    """An array that was added to scores, or is True where it hid them."""

    tensor: Tensor
    where: View  # the scores to whose shape it was broadcast
    number: float = 1.0  # added this many times
    hides: bool = False

    def place(self, wanted: Sequence[Axis]) -> Tensor | None:
        """Return the array with the wanted axes; None if it cannot be placed."""
        axes = self.where.axes()
        if axes is None:
            return None
        x, extra = self.tensor.detach(), len(self.where.shape) - self.tensor.ndim
        if extra < 0 or any(
            n not in (1, size)
            for n, size in zip(x.shape, self.where.shape[extra:], strict=True)
        ):
            return None
        own = [
            axis if n > 1 else () for n, axis in zip(x.shape, axes[extra:], strict=True)
        ]
        return arrange(x, own, wanted, repeat=False)


@dataclass(frozen=True)
class Formula:
    """How logits follow from a product."""

    scale: float = 1.0
    softcap: float | None = None
    factors: tuple[Term, ...] = ()  # multiplied with the scores, row by row
    added: tuple[Term, ...] = ()
    divided: float | None = None  # by what the scores were divided before a tanh
    bent: bool = False  # a tanh waits for its factor

    def take(self, step: Step) -> Formula | None:
        """Return the formula after one more step, None if it has no place for it."""
        match step.kind:
            case "copy":
                return self
            case "scale":
                return self.multiply(step.number)
            case "scale_rows" if not self.added and self.softcap is None:
                return replace(self, factors=(*self.factors, make_term(step)))
            case "add" | "hide" if not self.bent:
                return replace(self, added=(*self.added, make_term(step)))
            case "tanh" if not self.added and self.softcap is None and not self.bent:
                return replace(self, bent=True)
        return None

    def multiply(self, number: float) -> Formula | None:
        """Return the formula after a multiplication."""
        if self.bent:  # tanh(scale s) number = cap tanh(scale cap s / cap)
            scale = self.scale * number
            return replace(self, scale=scale, softcap=number, bent=False)
        if self.softcap is not None:
            return None
        terms = tuple(
            term if term.hides else replace(term, number=term.number * number)
            for term in self.added
        )
        return replace(self, scale=self.scale * number, added=terms)


def make_term(step: Step) -> Term:
    """Return what a step added."""
    assert step.tensor is not None
    assert step.where is not None
    return Term(step.tensor, step.where, step.number, step.kind == "hide")


def read_steps(steps: Sequence[Step]) -> Formula | None:
    """Return the formula of some steps, None if it has none."""
    formula: Formula | None = Formula()
    for step in steps:
        formula = formula.take(step) if formula is not None else None
    return None if formula is None or formula.bent else formula


def add_terms(terms: Sequence[Term], wanted: Sequence[Axis]) -> Tensor | None:
    """Return the sum of all terms with the wanted axes, -inf where hidden.

    A bool array, True where visible, if they only hide. Raises ValueError for a term
    that cannot be placed.
    """
    total: Tensor | None = None
    for term in terms:
        x = term.place(wanted)
        if x is None:
            raise ValueError("an array that was added to the scores cannot be placed")
        if term.hides:
            visible = ~x.bool()
            if total is None:
                total = visible
            elif total.dtype == torch.bool:
                total = total & visible
            else:
                total = torch.where(visible, total, -math.inf)
            continue
        if x.dtype == torch.bool:
            raise ValueError("a bool array was added to the scores")
        x = x * term.number if term.number != 1 else x
        if total is not None and total.dtype == torch.bool:
            total = torch.where(total, x, -math.inf)
        else:
            total = x if total is None else total + x
    return total


def apply_formula(scores: Tensor, formula: Formula, added: Tensor | None) -> Tensor:
    """Return logits from scores that include the factors of the rows."""
    logits = scores * formula.scale
    if formula.softcap is not None:
        logits = formula.softcap * torch.tanh(logits / formula.softcap)
    if added is None:
        return logits
    if added.dtype == torch.bool:
        return torch.where(added, logits, -math.inf)
    return logits + added
