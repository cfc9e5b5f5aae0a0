"""A test case: one pitfall, the smallest inputs that show it, and what to change.

    case.ask(examiner)       None if the attention is right, else the Difference

Each case should detect one pitfall and no other. Three kinds of inputs achieve that:

    q = 0         all unmasked keys get the same weight, whatever the scale
    v = I         out is the weights themselves
    scores of 80  each row attends to a single key, whatever the scale

Remaining dependencies are listed in `after`: a case runs only if those have passed.

Next: basic_cases.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from regard.judge.difference import TOLERANCE, Difference, compare_arrays
from regard.judge.inputs import (
    BITS,
    END,
    Inputs,
    NotAskedError,
    Numbers,
    compute_expected,
    expect_gradients,
)
from regard.judge.subject import Answer, Subject

Level = Literal["basic", "complete", "kernel"]
LEVELS: tuple[Level, ...] = ("basic", "complete", "kernel")
GATES = ("it_answers", "dropout_is_off")  # all other cases depend on these
FAR = 80.0  # a score that dominates a row; exp(80) still fits into float32
SMALL = 1e-6


@dataclass(frozen=True)
class Case:
    """One pitfall and the test that detects it."""

    name: str
    says: str  # what is wrong, in one sentence
    mend: str  # what to change
    level: Level
    ask: Callable[[Examiner], Difference | None]
    after: tuple[str, ...] = GATES
    storage: str = ""  # the kind of storage it is about


@dataclass(frozen=True, eq=False)
class Examiner:
    """Call a subject with random inputs and compare it with the definition."""

    subject: Subject
    rng: np.random.Generator

    @property
    def heads(self) -> int:
        """Number of heads of the inputs: that of the module, or 1."""
        where = self.subject.convention.projections
        return where.heads if where else 1

    @property
    def several(self) -> int:
        """Number of heads of a module; else 2, or 1 if the layout has no head axis."""
        return max(self.heads, 1 + ("h" in self.subject.convention.layout))

    @property
    def width(self) -> int:
        """Width of a head: that of the module, or 8."""
        form: Any = self.subject.form
        return int(form.sizes[1]) if self.subject.convention.projections else 8

    @property
    def is_causal(self) -> bool:
        """Whether the subject can be causal without a mask argument."""
        words = self.subject.convention
        return words.causal is not None or words.always_causal

    def draw(
        self, n: int, *, batch: int = 1, heads: int = 0, width: int = 0
    ) -> Numbers:
        """Return normal random numbers (B, H, n, D)."""
        shape = (batch, heads or self.heads, n, width or self.width)
        return self.rng.normal(size=shape)

    def zeros(self, n: int, *, batch: int = 1, heads: int = 0) -> Numbers:
        """Return zeros (B, H, n, D): as queries, they weigh all keys equally."""
        return np.zeros((batch, heads or self.heads, n, self.width))

    def unit(self, n: int, *, batch: int = 1, heads: int = 0) -> Numbers:
        """Return the identity (B, H, n, D): as values, they make out the weights."""
        if n > self.width:
            raise NotAskedError(f"it needs heads at least {n} wide")
        x = np.eye(n, self.width)
        return np.broadcast_to(x, (batch, heads or self.heads, *x.shape)).copy()

    def score(self, scores: Any) -> tuple[Numbers, Numbers]:
        """Return q and k with these dot products, before scaling."""
        s = np.asarray(scores, np.float64)
        k = self.unit(s.shape[1])
        q = np.zeros((1, self.heads, s.shape[0], self.width))
        q[..., : s.shape[1]] = s
        return q, k

    def room(self, atol: float = 0) -> float:
        """Return the tolerance of the best precision, at least atol."""
        return max(atol, self.tolerance(self.subject.precisions[0]))

    def settle(self, inputs: Inputs) -> Inputs:
        """Return the inputs, made causal if the subject is always causal."""
        if not self.subject.convention.always_causal:
            return inputs
        n_q, n_k = inputs.shape[2:]
        at_end = self.subject.convention.causal_from == "end"
        if at_end and n_q > n_k:
            raise NotAskedError("it is always causal, so the first rows are empty")
        if inputs.lengths is not None:
            return replace(inputs, causal=True, q_start=END if at_end else 0)
        start = n_k - n_q if at_end and inputs.q_start == 0 else inputs.q_start
        return replace(inputs, causal=True, q_start=start)

    def round(self, inputs: Inputs, precision: str | None = None) -> Inputs:
        """Return the inputs, rounded to what the subject computes in."""
        best = precision or self.subject.precisions[0]
        return inputs.round(best).round(self.subject.computes.get(best, best))

    def ask(self, inputs: Inputs, precision: str | None = None) -> Answer:
        """Call the subject."""
        return self.subject.ask(self.round(self.settle(inputs), precision), precision)

    def expect(self, inputs: Inputs, precision: str | None = None) -> Any:
        """Evaluate the definition on the inputs that the subject computes with."""
        return compute_expected(self.round(self.settle(inputs), precision))

    def compare(
        self,
        inputs: Inputs,
        *,
        what: str = "out",
        atol: float | None = None,
        precision: str | None = None,
    ) -> Difference | None:
        """Return how the subject and the definition differ in one part, or None."""
        best = precision or self.subject.precisions[0]
        yours = getattr(self.ask(inputs, best), what)
        if yours is None:
            raise NotAskedError(f"it returns no {what}")
        right = getattr(self.expect(inputs, best), what)
        if what == "weights" and yours.shape[1] != right.shape[1]:
            right = right.mean(1, keepdims=True)
        room = max(atol or 0, self.tolerance(best))
        found = compare_arrays(yours, right, atol=room, what=what)
        return None if found is None else replace(found, arguments=inputs)

    def compare_all(
        self,
        inputs: Inputs,
        *,
        parts: tuple[str, ...] = ("out", "weights", "lse"),
        atol: float = 0,
        precision: str | None = None,
    ) -> Difference | None:
        """Return how they differ in any of the parts that the subject returns."""
        best = precision or self.subject.precisions[0]
        yours = self.ask(inputs, best)
        return self.compare_answer(
            yours, inputs, parts=parts, atol=atol, precision=best
        )

    def compare_answer(
        self,
        yours: Answer,
        inputs: Inputs,
        *,
        parts: tuple[str, ...] = ("out", "weights", "lse"),
        atol: float = 0,
        precision: str,
    ) -> Difference | None:
        """Return how an answer and the definition differ in any of the parts."""
        room = max(atol, self.tolerance(precision))
        right = self.expect(inputs, precision)
        for what in parts:
            x, y = getattr(yours, what), getattr(right, what)
            if x is None:
                continue
            if what == "weights" and x.shape[1] != y.shape[1]:
                y = y.mean(1, keepdims=True)
            found = compare_arrays(x, y, atol=room, what=what)
            if found is not None:
                return replace(found, arguments=inputs)
        return None

    def tolerance(self, precision: str) -> float:
        """Return the tolerance of what the subject computes in, given a dtype."""
        return TOLERANCE[self.subject.computes.get(precision, precision)]

    def compare_gradients(
        self,
        inputs: Inputs,
        *,
        only: str = "qkv",
        atol: float = 1e-6,
        precision: str | None = None,
    ) -> Difference | None:
        """Compare the gradients of sum(out · g) for a random g."""
        best = precision or self.subject.precisions[0]
        inputs = self.round(self.settle(inputs), best)
        shape = (*inputs.q.shape[:3], inputs.v.shape[-1])
        ones = inputs.backward == "ones"
        g = np.ones(shape) if ones else self.rng.normal(size=shape)
        yours = self.subject.ask_gradients(inputs, g, best)
        right = expect_gradients(inputs, g)
        for name, x, y in zip("qkv", yours, right, strict=True):
            if name not in only or name not in inputs.only:
                continue
            small = min(1.0, max(0.03, np.abs(y).max(initial=0)))  # of many keys
            small = 1.0 if self.tolerance(best) > TOLERANCE["float32"] else small
            room = max(atol, 10 * small * self.tolerance(best))
            found = compare_arrays(x, y, atol=room, what=f"d{name}")
            if found is not None:
                return replace(found, arguments=inputs)
        return None

    @property
    def bits(self) -> int:
        """Number of significant bits that the subject computes with."""
        return BITS[self.subject.computes[self.subject.precisions[0]]]

    @property
    def coarseness(self) -> float:
        """Relative error of numbers that the subject rounds to fewer bits, or 0."""
        best = self.subject.precisions[0]
        return 0.0 if self.bits == BITS[best] else 2.0**-self.bits

    def read_weights(self, inputs: Inputs) -> Numbers:
        """Return the weights (B, H, Nq, Nk), read from out by setting v = I."""
        n = inputs.k.shape[2]
        batch, heads = inputs.k.shape[:2]
        shown = replace(inputs, v=self.unit(n, batch=batch, heads=heads))
        return self.ask(shown).out[..., :n]

    def half(self) -> str:
        """Return a supported 16-bit precision."""
        for name in ("float16", "bfloat16"):
            if name in self.subject.precisions:
                return name
        raise NotAskedError("it declares no 16-bit precision")


def find_wrong_weight(
    yours: Numbers, wrong: NDArray[np.bool_], right: Numbers, says: str, inputs: Inputs
) -> Difference | None:
    """Return a Difference at the first wrong cell of the weights, or None."""
    if not wrong.any():
        return None
    at = np.argwhere(np.broadcast_to(wrong, yours.shape))[0]
    maps = [np.broadcast_to(x, yours.shape)[tuple(at[:-2])] for x in (yours, right)]
    place = f"query {at[-2]}, key {at[-1]}"
    words = says.format(place=place, weight=f"{yours[tuple(at)]:.4g}")
    return Difference(words, maps[0], maps[1], inputs, "weights")


def inverse_sqrt(n: int) -> float:
    """Return 1 / sqrt(n)."""
    return 1 / math.sqrt(n)
