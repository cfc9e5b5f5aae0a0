"""Sample the next token from logits.

    greedy        the token with the largest logit
    temperature   exp(logits / T): below 1 more focused, above 1 more varied
    top_k         keep only the k most likely tokens
    top_p         keep only the most likely tokens that together reach p
    min_p         keep only tokens at least min_p times as likely as the most likely
    repetition    divide the logits of earlier tokens by this factor

They apply in this order, except that repetition comes first. A token is drawn by
comparing one uniform number with the cumulative probabilities, so the same seed gives
the same tokens with every array library. The uniform numbers of a sequence depend on
the seed, its prompt, and how many equal prompts precede it in the batch:

    generator = default_rng(sha256(seed, copy, prompt))        copy = 0, 1, 2, …

Logits of -inf are never drawn. NaN, +inf and rows of only -inf raise OptionError.

Next: cost.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from regard.errors import OptionError
from regard.plain.norm import softmax

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The sampling options; greedy unless a temperature is given.

    >>> Sampling().pick(np.asarray([0.1, 2.0, 0.3]), [], np.random.default_rng(0))
    1
    """

    temperature: float = 0.0  # 0: greedy
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition: float = 1.0  # 1: no penalty; 1.1 is common

    def __post_init__(self) -> None:
        ranges = {
            "temperature": 0 <= self.temperature < float("inf"),
            "top_k": self.top_k is None
            or (isinstance(self.top_k, Integral) and self.top_k >= 1),
            "top_p": self.top_p is None or 0 < self.top_p <= 1,
            "min_p": self.min_p is None or 0 <= self.min_p <= 1,
            "repetition": 0 < self.repetition < float("inf"),
        }
        for name, fits in ranges.items():
            if not fits:
                expected = EXPECTED[name]
                raise OptionError(f"{name}={getattr(self, name)}, expected {expected}.")
        unused = [name for name in FILTERS if getattr(self, name) is not None]
        if unused and not self.temperature:
            raise OptionError(
                f"{unused[0]}= has no effect without a temperature: greedy sampling "
                "ignores it. Add temperature=1.0."
            )

    def pick(
        self,
        logits: Numbers,
        seen: Sequence[int],
        rng: np.random.Generator,
        *,
        name: str = "the logits",
    ) -> int:
        """Return the next token, given the logits (V,) and the tokens so far.

        name: the name of the logits in error messages
        """
        if self.repetition != 1:
            logits = self.discourage(logits, seen)
        check_logits(logits, f"{name} at position {len(seen)}")
        if not self.temperature:
            return int(np.argmax(logits))
        running = np.cumsum(softmax(self.filter(logits)))
        at = np.searchsorted(running, rng.random() * running[-1], side="right")
        return int(at)

    def discourage(self, logits: Numbers, seen: Sequence[int]) -> Numbers:
        """Divide the logits of earlier tokens; multiply them if they are negative."""
        logits, at = logits.astype(np.float64), np.unique(np.asarray(seen, np.int64))
        old = logits[at]
        factor = self.repetition
        with np.errstate(over="ignore"):
            logits[at] = np.where(old < 0, old * factor, old / factor)
        return logits

    def filter(self, logits: Numbers) -> Numbers:
        """Return (logits - max) / T, with -inf for tokens that are filtered out."""
        logits = logits.astype(np.float64)
        with np.errstate(over="ignore"):  # the maximum stays 0: a tiny T is greedy
            logits = (logits - logits.max()) / self.temperature
        if self.top_k is not None and self.top_k < logits.size:
            least = np.partition(logits, -self.top_k)[-self.top_k]
            logits = np.where(logits < least, -np.inf, logits)
        if self.top_p is not None and self.top_p < 1:
            order = np.argsort(-logits, kind="stable")
            before = np.cumsum(softmax(logits[order]))
            before = np.concatenate([[0.0], before[:-1]])  # mass of likelier tokens
            logits = logits.copy()
            logits[order[before >= self.top_p]] = -np.inf
        if self.min_p is not None:
            least = np.log(max(self.min_p, 1e-300))
            logits = np.where(logits < least, -np.inf, logits)
        return logits


def check_logits(logits: Numbers, name: str) -> None:
    """Raise OptionError for logits that do not define probabilities."""
    if not np.isfinite(logits.max()):  # NaN, +inf, or only -inf
        nan = np.isnan(logits)
        wrong = nan if nan.any() else logits == np.inf
        held = "NaN" if nan.any() else "+inf"
        what = f"{held} for token {np.argmax(wrong)} ({wrong.sum()} of {wrong.size})"
        raise OptionError(
            f"{name}: {what if wrong.any() else 'all are -inf'}, expected numbers or "
            "-inf, with at least one finite. Check the weights and the dtype of the "
            "model; use -inf for tokens that must not be drawn."
        )


def make_generators(
    seed: int, prompts: Sequence[Sequence[int]]
) -> list[np.random.Generator]:
    """Return a random generator for each prompt.

    It depends only on the seed, the tokens of the prompt, and the number of equal
    prompts before it.

    >>> together, alone = make_generators(0, [[1, 2], [3]]), make_generators(0, [[3]])
    >>> together[1].random() == alone[0].random()
    True
    """
    if not isinstance(seed, Integral):
        raise OptionError(f"seed={seed!r}, expected an integer. Write seed=0.")
    copies: dict[tuple[int, ...], int] = {}
    streams = []
    for prompt in prompts:
        tokens = tuple(map(int, prompt))
        copies[tokens] = copy = copies.get(tokens, -1) + 1
        key = hashlib.sha256(repr((int(seed), copy, tokens)).encode()).digest()
        streams.append(np.random.default_rng(int.from_bytes(key, "little")))
    return streams


FILTERS = ("top_k", "top_p", "min_p")
EXPECTED = {
    "temperature": "0 (greedy) or a positive number",
    "top_k": "an integer of at least 1, or None",
    "top_p": "0 < top_p <= 1, or None",
    "min_p": "0 <= min_p <= 1, or None",
    "repetition": "a positive number; 1 changes nothing",
}
GREEDY = Sampling()
