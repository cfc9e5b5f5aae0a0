"""From logits to the next token.

    greedy        the token with the largest logit
    temperature   exp(logits / T): below 1 bolder, above 1 more varied
    top_k         only the k likeliest
    top_p         only the likeliest that together reach p
    min_p         only those at least min_p times as likely as the likeliest
    repetition    tokens seen before are made less likely by this factor

They apply in this order, repetition first. A token is drawn with one uniform number, at
the place where the running sum of the probabilities passes it: the same seed gives the
same tokens, whichever array library made the logits.

Next: cost.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.errors import OptionError
from regard.plain.norm import softmax

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen; greedy unless a temperature is given.

    >>> Sampling().pick(np.asarray([0.1, 2.0, 0.3]), [], np.random.default_rng(0))
    1
    """

    temperature: float = 0.0  # 0: greedy
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition: float = 1.0  # 1: none; 1.1 is usual

    def __post_init__(self) -> None:
        ranges = {
            "temperature": 0 <= self.temperature < float("inf"),
            "top_k": self.top_k is None or self.top_k >= 1,
            "top_p": self.top_p is None or 0 < self.top_p <= 1,
            "min_p": self.min_p is None or 0 <= self.min_p <= 1,
            "repetition": self.repetition > 0,
        }
        for name, fits in ranges.items():
            if not fits:
                expected = EXPECTED[name]
                raise OptionError(f"{name}={getattr(self, name)}, expected {expected}.")
        unused = [name for name in FILTERS if getattr(self, name) is not None]
        if unused and not self.temperature:
            raise OptionError(
                f"{unused[0]}= without a temperature: greedy choice needs no filter. "
                "Give temperature=1.0 too."
            )

    def pick(
        self, logits: Numbers, seen: Sequence[int], rng: np.random.Generator
    ) -> int:
        """Choose a token, given the logits (V,) and the tokens so far."""
        if self.repetition != 1:
            logits = self.discourage(logits, seen)
        if not self.temperature:
            return int(np.argmax(logits))
        running = np.cumsum(softmax(self.filter(logits)))
        at = np.searchsorted(running, rng.random() * running[-1], side="right")
        return int(at)

    def discourage(self, logits: Numbers, seen: Sequence[int]) -> Numbers:
        """Divide the logits of seen tokens, or multiply them if they are negative."""
        logits, at = logits.copy(), np.unique(np.asarray(seen, dtype=np.int64))
        old = logits[at]
        factor = self.repetition
        logits[at] = np.where(old < 0, old * factor, old / factor)
        return logits

    def filter(self, logits: Numbers) -> Numbers:
        """Return logits / T with -inf for what may not be drawn."""
        logits = logits.astype(np.float64) / self.temperature
        if self.top_k is not None and self.top_k < logits.size:
            least = np.partition(logits, -self.top_k)[-self.top_k]
            logits = np.where(logits < least, -np.inf, logits)
        if self.top_p is not None and self.top_p < 1:
            order = np.argsort(-logits, kind="stable")
            before = np.cumsum(softmax(logits[order]))
            before = np.concatenate([[0.0], before[:-1]])  # mass of the likelier ones
            logits = logits.copy()
            logits[order[before >= self.top_p]] = -np.inf
        if self.min_p is not None:
            least = logits.max() + np.log(max(self.min_p, 1e-300))
            logits = np.where(logits < least, -np.inf, logits)
        return logits


FILTERS = ("top_k", "top_p", "min_p")
EXPECTED = {
    "temperature": "0 (greedy) or a positive number",
    "top_k": "at least 1, or None",
    "top_p": "0 < top_p <= 1, or None",
    "min_p": "0 <= min_p <= 1, or None",
    "repetition": "a positive number; 1 changes nothing",
}
GREEDY = Sampling()
