"""Position encodings, for token vectors or for scores.

    sinusoidal   angle[p, i] = p / base^(2i/D);  sin at even indices, cos at odd ones
    rotary       each pair of components of q and k is rotated by its angle, so that the
                 dot product of two tokens depends only on their distance
    alibi        slope[h] = 2^(-8 (h+1) / H), a penalty proportional to distance

Rotary embeddings exist in two layouts that give different results for the same weights,
so a call names its pairing: HALVES pairs i with i + D/2, NEIGHBOURS 2i with 2i + 1.

Next: steps.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from regard.arrays import Array, convert, namespace
from regard.errors import OptionError, ShapeError


@dataclass(frozen=True)
class Pairing:
    """Which two components of a vector are rotated together."""

    name: Literal["halves", "neighbours"]

    def split(self, x: Array) -> tuple[Array, Array]:
        """Return the first and the second component of every pair."""
        half = x.shape[-1] // 2
        if self.name == "halves":
            return x[..., :half], x[..., half:]
        return x[..., ::2], x[..., 1::2]

    def join(self, first: Array, second: Array) -> Array:
        """Return the vector with these pairs: the inverse of `split`."""
        xp = namespace(first=first, second=second)
        if self.name == "halves":
            return xp.concat([first, second], axis=-1)
        both = xp.stack([first, second], axis=-1)
        return xp.reshape(both, (*first.shape[:-1], 2 * first.shape[-1]))


HALVES = Pairing("halves")  # Llama, GPT-NeoX, Qwen in their transformers form
NEIGHBOURS = Pairing("neighbours")  # GPT-J, the original paper, Meta's Llama files


def sinusoidal(n: int, d: int, *, base: float = 10_000.0, start: int = 0) -> Array:
    """Return a NumPy array (n, d) of encodings of positions start … start + n - 1."""
    at = angles(np.arange(start, start + n), d, base=base)
    return NEIGHBOURS.join(np.sin(at), np.cos(at))


def angles(
    positions: Array, d: int, *, base: float = 10_000.0, stretch: Any = 1.0
) -> Array:
    """Return positions / (base^(2i/d) stretch) as (..., N, d/2), in float64."""
    if d % 2:
        raise ShapeError(f"width {d} is odd, expected an even number to form pairs.")
    waves = base ** (np.arange(0, d, 2) / d) * np.asarray(stretch)
    return np.asarray(positions)[..., None] / waves


def rotary(
    x: Array,  # (..., N, D)
    positions: Array,  # (N,), or with leading axes that broadcast to those of x
    *,
    pairing: Pairing,
    base: float = 10_000.0,
    stretch: Any = 1.0,  # a number, or one for every pair: longer waves
) -> Array:
    """Rotate every pair of components of x by the angle of its position."""
    at = angles(positions, x.shape[-1], base=base, stretch=stretch)
    return rotate(x, convert(np.cos(at), x), convert(np.sin(at), x), pairing=pairing)


def rotate(x: Array, cos: Array, sin: Array, *, pairing: Pairing) -> Array:
    """Rotate every pair of components of x, given cosines and sines (..., N, D/2)."""
    if not isinstance(pairing, Pairing):
        raise OptionError(
            f"pairing={pairing!r}, expected HALVES or NEIGHBOURS. "
            "Write pairing=HALVES for weights as transformers stores them."
        )
    xp = namespace(x=x, cos=cos, sin=sin)
    cos, sin = xp.astype(cos, x.dtype), xp.astype(sin, x.dtype)
    first, second = pairing.split(x)
    return pairing.join(first * cos - second * sin, first * sin + second * cos)


def alibi_slopes(n_heads: int) -> Array:
    """Return ALiBi's slope for each head, as defined by its authors.

    For a power of two the slopes are 2^(-8/H), 2^(-16/H), …; otherwise those of the
    next lower power of two, followed by every other slope of the next higher one.
    """
    whole = 2 ** (n_heads.bit_length() - 1)
    slopes = 2.0 ** (-8 / whole * np.arange(1, whole + 1))
    between = 2.0 ** (-4 / whole * np.arange(1, 2 * whole + 1, 2))
    return np.concatenate([slopes, between])[:n_heads]
