"""From logits to the next token.

    greedy        the token with the largest logit
    temperature   exp(logits / T): below 1 bolder, above 1 more varied
    top_k         only the k likeliest
    top_p         only the likeliest that together reach p
    min_p         only those at least min_p times as likely as the likeliest
    repetition    tokens seen before are made less likely by this factor

They apply in this order, repetition first. A token is drawn with one uniform number, at
the place where the running sum of the probabilities passes it: the same seed gives the
same tokens, whichever array library made the logits. The uniform numbers of a sequence
depend on the seed, its prompt and how many equal prompts precede it in the batch:

    generator = default_rng(sha256(seed, copy, prompt))        copy = 0, 1, 2, …

Logits of -inf are never chosen. NaN, +inf and rows of -inf are refused.

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
                f"{unused[0]}= without a temperature: greedy choice needs no filter. "
                "Give temperature=1.0 too."
            )

    def pick(
        self,
        logits: Numbers,
        seen: Sequence[int],
        rng: np.random.Generator,
        *,
        name: str = "the logits",
    ) -> int:
        """Choose a token, given the logits (V,) and the tokens so far.

        name: what an error message calls the logits
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
        """Divide the logits of seen tokens, or multiply them if they are negative."""
        logits, at = logits.astype(np.float64), np.unique(np.asarray(seen, np.int64))
        old = logits[at]
        factor = self.repetition
        with np.errstate(over="ignore"):
            logits[at] = np.where(old < 0, old * factor, old / factor)
        return logits

    def filter(self, logits: Numbers) -> Numbers:
        """Return (logits - max) / T with -inf for what may not be drawn."""
        logits = logits.astype(np.float64)
        with np.errstate(over="ignore"):  # 0 stays 0, so a tiny T is the limit: greedy
            logits = (logits - logits.max()) / self.temperature
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
            least = np.log(max(self.min_p, 1e-300))
            logits = np.where(logits < least, -np.inf, logits)
        return logits


def check_logits(logits: Numbers, name: str) -> None:
    """Refuse logits that define no probabilities."""
    if not np.isfinite(logits.max()):  # NaN, +inf, or nothing but -inf
        nan = np.isnan(logits)
        wrong = nan if nan.any() else logits == np.inf
        held = "NaN" if nan.any() else "+inf"
        what = f"{held} for token {np.argmax(wrong)} ({wrong.sum()} of {wrong.size})"
        raise OptionError(
            f"{name}: {what if wrong.any() else 'all are -inf'}, expected numbers or "
            "-inf, at least one of them finite. Check the weights and the dtype of the "
            "model; write -inf for tokens that must not be drawn."
        )


def open_streams(
    seed: int, prompts: Sequence[Sequence[int]]
) -> list[np.random.Generator]:
    """Return a random generator for each prompt.

    It depends on the seed, the prompt's tokens and the number of equal prompts before
    it, and on no other prompt.

    >>> together, alone = open_streams(0, [[1, 2], [3]]), open_streams(0, [[3]])
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
