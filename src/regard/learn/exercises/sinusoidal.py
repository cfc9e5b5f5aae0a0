"""Sinusoidal positions

Attention ignores order: shuffle the keys together with their values, and the output is
the same. So the position of a token must be encoded in its vector. Sinusoidal positions
add one vector per position, made of waves of high frequency in the first columns and
low frequency in the last. Columns come in pairs; pair `i` has one angle, with its sine
in the even column and its cosine in the odd one:

    angle(p, i)    = p / 10000^(2i / d)       i = 0, 1, …, d/2 - 1
    out[p, 2i]     = sin(angle(p, i))
    out[p, 2i + 1] = cos(angle(p, i))

Positions count from 0, so the first row is `[0, 1, 0, 1, …]` for every width. With
`d = 4`, row 1 is `[sin 1, cos 1, sin 0.01, cos 0.01]`, because 10000^(2/4) = 100.

Some code puts all sines in the first half and all cosines in the second. That is
another order of the same columns; a model must be used with the order it was trained
with.

Write `sinusoidal(n, d)`: positions 0 to n - 1 as an array `(n, d)`. `d` is even.

Next: rotary.py
"""

import math

import numpy as np

NAME = "sinusoidal"
MINUTES = 12
NEEDS = ("scores",)
EXTRA = ""
STUB = '''import numpy as np


def sinusoidal(n, d):
    """Return the positions 0 to n - 1 as an array (n, d); d is even."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Compute the table of angles (n, d/2) first, then fill in the sines and cosines.",
    "angles = np.arange(n)[:, None] / 10000 ** (np.arange(0, d, 2) / d)",
    "out = np.zeros((n, d)); out[:, 0::2] = np.sin(angles), and cosines in out[:, "
    "1::2].",
)
ATOL = 1e-9


def spec(n, d):
    out = np.zeros((n, d))
    for p in range(n):
        for i in range(d // 2):
            angle = p / 10000 ** (2 * i / d)
            out[p, 2 * i] = math.sin(angle)
            out[p, 2 * i + 1] = math.cos(angle)
    return out


def reference(n, d):
    angles = np.arange(n)[:, None] / 10000 ** (np.arange(0, d, 2) / d)
    out = np.zeros((n, d))
    out[:, 0::2], out[:, 1::2] = np.sin(angles), np.cos(angles)
    return out


def draw(rng):
    yield from ((1, 2), (2, 2), (1, 4), (2, 4), (3, 8))
    yield int(rng.integers(4, 40)), 2 * int(rng.integers(3, 9))
    yield from ((40, 2), (2, 40), (19, 34))


def mistake_halves(n, d):
    """All sines come first and then all cosines: here they alternate, so put the sines
    in out[:, 0::2] and the cosines in out[:, 1::2]."""
    out = reference(n, d)
    return np.concatenate([out[:, 0::2], out[:, 1::2]], axis=1)


def mistake_from_one(n, d):
    """The positions count from 1: the first row is position 0, which is 0, 1, 0, 1,
    …"""
    return reference(n + 1, d)[1:]


def mistake_cosine_first(n, d):
    """Sine and cosine are swapped: sines belong in the even columns."""
    out = reference(n, d)
    return out.reshape(n, -1, 2)[..., ::-1].reshape(n, d)


def mistake_half_exponent(n, d):
    """The frequencies decrease too slowly: the exponent of pair i is 2i / d, not
    i / d."""
    angles = np.arange(n)[:, None] / 10000 ** (np.arange(d // 2) / d)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(n, d)


def mistake_each_column(n, d):
    """Sine and cosine of a pair have different angles: the exponent belongs to the
    pair, so columns 2i and 2i + 1 share 2i / d."""
    angles = np.arange(n)[:, None] / 10000 ** (np.arange(d) / d)
    return np.where(np.arange(d) % 2, np.cos(angles), np.sin(angles))


def mistake_multiplied(n, d):
    """The frequencies increase instead of decreasing: divide the position by
    10000^(2i / d)."""
    angles = np.arange(n)[:, None] * 10000 ** (np.arange(0, d, 2) / d)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(n, d)


def mistake_only_sines(n, d):
    """There are sines in all columns: the odd columns have cosines."""
    return np.repeat(reference(n, d)[:, 0::2], 2, axis=1)


def mistake_only_cosines(n, d):
    """There are cosines in all columns: the even columns have sines."""
    return np.repeat(reference(n, d)[:, 1::2], 2, axis=1)


def mistake_last_exponent_is_one(n, d):
    """The exponents reach 1: divide 2i by d, not by d - 2."""
    angles = np.arange(n)[:, None] / 10000 ** (np.arange(0, d, 2) / max(d - 2, 1))
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(n, d)


def mistake_one_frequency(n, d):
    """All pairs have the same frequency: divide the position by 10000^(2i / d)."""
    angles = np.repeat(np.arange(n)[:, None], d // 2, axis=1)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(n, d)
