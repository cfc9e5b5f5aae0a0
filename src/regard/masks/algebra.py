"""Masks as formulas instead of matrices.

A mask is a predicate over absolute positions:

    mask(b, h, q, k) = may query q of head h in batch b attend to key k?

Masks combine: (a & b), (a | b), ~a. They scale because a mask can also be asked about
whole tiles of cells at once. The answer is three-valued:

    prove(tile) = proved empty, or proved full, or unknown

    a & b   empty if either is, full if both are
    a | b   full if either is, empty if both are
    ~a      empty and full are swapped

"Unknown" only costs time, a wrong proof gives wrong results: if in doubt, unknown.
A formula over 131,072 tokens is a few numbers; its 17 billion cells are never stored.

Next: definition/blocked.py (the basic masks: masks/primitives.py)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import reduce
from typing import Any, NoReturn

import numpy as np

from regard.arguments import suggest
from regard.arrays import Array
from regard.errors import MaskError
from regard.masks.formula import Extent, Formula, Start, read_sizes, resolve_start
from regard.masks.free_axes import check_lead
from regard.masks.tiles import UNKNOWN, Edges, Numbers, Proof, Tiles, prove_tiles


class Mask(Formula):
    """A predicate with proofs. Combine masks with `&`, `|` and `~`."""

    __array_ufunc__ = None  # makes `numpy_array & mask` call Mask.__rand__

    def prove(self, edges: Edges) -> Proof:
        """Return which tiles are proved empty and which are proved full."""
        del edges
        return UNKNOWN

    @suggest
    def tiles(
        self,
        shape: int | tuple[int, ...],
        *,
        block: int | tuple[int, int] = 128,
        q_start: Start | None = None,
    ) -> Tiles:
        """Split (..., H, Nq, Nk) into tiles, each empty, full or undecided."""
        shape = read_sizes(shape, self)
        start = resolve_start(q_start, shape, self)
        check_lead(self, shape, np.empty(0))
        return prove_tiles(self, shape, block=block, q_start=start)

    def __and__(self, other: object) -> Mask:
        return And(
            flatten_operands(And, self) + flatten_operands(And, expect_mask("&", other))
        )

    def __or__(self, other: object) -> Mask:
        return Or(
            flatten_operands(Or, self) + flatten_operands(Or, expect_mask("|", other))
        )

    def __invert__(self) -> Mask:
        return Not(self)

    __rand__, __ror__ = __and__, __or__  # called only if the left side is not a mask

    def __bool__(self) -> NoReturn:
        raise MaskError(
            f"{self!r} has no truth value. Write & for and, | for or, ~ for not."
        )


def expect_mask(operator: str, other: object) -> Mask:
    """Return `other` if it is a mask, otherwise raise MaskError."""
    if isinstance(other, Mask):
        return other
    hint = "Write regard.masks.array(x) for an array, regard.where(fn) for a function."
    if isinstance(other, Formula):
        hint = "Write attention(q, k, v, mask, bias=bias): a bias is no mask."
    raise MaskError(
        f"mask {operator} {type(other).__name__}: expected a mask on both sides. {hint}"
    )


def flatten_operands(kind: type[Formula], formula: Any) -> tuple[Any, ...]:
    """Return the operands of a formula of type `kind`, else the formula itself."""
    return formula.parts if type(formula) is kind else (formula,)


@dataclass(frozen=True, repr=False)
class And(Mask):
    """Allowed if all masks allow it."""

    masks: tuple[Mask, ...]  # one flat tuple, so a long chain is not a deep tree

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The operands."""
        return self.masks

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        return reduce(operator.and_, (mask(b, h, q, k) for mask in self.masks))

    def prove(self, edges: Edges) -> Proof:
        """Return empty where any mask is empty, full where all are full."""
        empty, full = zip(*(mask.prove(edges) for mask in self.masks), strict=True)
        return Proof(reduce(operator.or_, empty), reduce(operator.and_, full))

    def __repr__(self) -> str:
        sides = (f"({s!r})" if isinstance(s, Or) else repr(s) for s in self.masks)
        return " & ".join(sides)


@dataclass(frozen=True, repr=False)
class Or(Mask):
    """Allowed if at least one mask allows it."""

    masks: tuple[Mask, ...]

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The operands."""
        return self.masks

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        return reduce(operator.or_, (mask(b, h, q, k) for mask in self.masks))

    def prove(self, edges: Edges) -> Proof:
        """Return full where any mask is full, empty where all are empty."""
        empty, full = zip(*(mask.prove(edges) for mask in self.masks), strict=True)
        return Proof(reduce(operator.and_, empty), reduce(operator.or_, full))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.masks))


@dataclass(frozen=True, repr=False)
class Not(Mask):
    """Allowed if the mask does not allow it."""

    mask: Mask

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The negated mask."""
        return (self.mask,)

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        return ~self.mask(b, h, q, k)

    def prove(self, edges: Edges) -> Proof:
        """Return the proofs with empty and full swapped."""
        proof = self.mask.prove(edges)
        return Proof(empty=proof.full, full=proof.empty)

    def __invert__(self) -> Mask:
        return self.mask

    def __repr__(self) -> str:
        compound = isinstance(self.mask, And | Or)
        return f"~({self.mask!r})" if compound else f"~{self.mask!r}"


@dataclass(frozen=True, repr=False)
class PerHead(Mask):
    """Head h uses masks[h]."""

    masks: tuple[Mask, ...]

    @property
    def parts(self) -> tuple[Mask, ...]:
        """One mask for each head."""
        return self.masks

    @property
    def extent(self) -> Extent:
        """One head per mask."""
        return Extent(heads=len(self.masks))

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        allowed = (h == 0) & self.masks[0](b, h, q, k)
        for i, mask in enumerate(self.masks[1:], start=1):
            allowed = allowed | ((h == i) & mask(b, h, q, k))
        return allowed

    def prove(self, edges: Edges) -> Proof:
        """Return the proofs of masks[i] for each head i, stacked."""
        proofs = [mask.prove(edges) for mask in self.masks]

        def stack(answers: list[Numbers]) -> Numbers:
            heads = [x[:, min(i, x.shape[1] - 1)] for i, x in enumerate(answers)]
            return np.stack(np.broadcast_arrays(*heads), axis=1)

        return Proof(stack([p.empty for p in proofs]), stack([p.full for p in proofs]))

    def __repr__(self) -> str:
        return f"per_head([{', '.join(map(repr, self.masks))}])"
