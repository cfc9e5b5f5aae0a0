"""Rotary positions, in the half pairing

Instead of adding a position to a token, rotate its query and its key by an angle that
grows with the position. Rotating both by the same additional angle does not change
their dot product: only the distance between two positions matters.

A vector of width `D` consists of `D/2` pairs, and each pair is rotated in its plane:

    angle = position / 10000^(2i / D)            of pair i = 0 … D/2 - 1
    a, b  ->  a cos(angle) - b sin(angle),  a sin(angle) + b cos(angle)

Which two numbers form a pair? Two conventions are in use, and they give different
numbers for the same weights. In the half pairing, which Llama uses in transformers,
pair `i` is the indices `i` and `i + D/2`. (The other convention pairs neighbours, `2i`
and `2i + 1`.) Use the half pairing.

For `x = [1, 0]` at position 1: one pair, angle 1, result `[cos 1, sin 1]`.

Write `rotary(x, positions)`: the rows of `x` `(N, D)` rotated; row `n` is at position
`positions[n]`, which need not be `n`.

Next: layer_norm.py
"""

import math

import numpy as np

NAME = "rotary"
MINUTES = 15
NEEDS = ("sinusoidal",)
EXTRA = ""
STUB = '''import numpy as np


def rotary(x, positions):
    """Return x (N, D) with every pair (i, i + D/2) rotated by its angle."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "The angles (N, D/2) are those of sinusoidal positions; split x into two halves.",
    "a, b = x[:, :D//2], x[:, D//2:] are the first and second numbers of all pairs.",
    "np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=1)",
)


def spec(x, positions):
    N, D = x.shape
    out = np.zeros((N, D))
    for n in range(N):
        for i in range(D // 2):
            angle = positions[n] / 10000 ** (2 * i / D)
            a, b = x[n, i], x[n, i + D // 2]
            out[n, i] = a * math.cos(angle) - b * math.sin(angle)
            out[n, i + D // 2] = a * math.sin(angle) + b * math.cos(angle)
    return out


def reference(x, positions):
    D = x.shape[1]
    angles = positions[:, None] / 10000 ** (np.arange(0, D, 2) / D)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[:, : D // 2], x[:, D // 2 :]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=1)


def draw(rng):
    yield np.array([[1.0, 0.0]]), np.array([1])
    yield rng.normal(size=(2, 2)), np.array([0, 1])
    yield rng.normal(size=(2, 4)), np.array([0, 1])
    yield rng.normal(size=(3, 8)), np.array([5, 6, 7])
    N, D = int(rng.integers(2, 6)), 2 * int(rng.integers(3, 7))
    yield rng.normal(size=(N, D)), rng.permutation(100)[:N]
    yield rng.normal(size=(2, 6)), np.array([3, 100_000])
    for N, D in ((18, 2), (2, 36), (2, 36)):
        yield rng.normal(size=(N, D)) * 1e-3, rng.integers(1000, size=N)
        yield rng.normal(size=(N, D)) * 1e5, rng.integers(1000, size=N)


def mistake_neighbours(x, positions):
    """This pairs neighbours, 2i and 2i + 1: in the half pairing, pair i with
    i + D/2."""
    halves = np.concatenate([x[:, 0::2], x[:, 1::2]], axis=1)
    turned = reference(halves, positions)
    return turned.reshape(len(x), 2, -1).swapaxes(1, 2).reshape(x.shape)


def mistake_turned_back(x, positions):
    """The pairs are rotated in the wrong direction: the minus belongs to the first
    number, a cos - b sin, and the plus to the second."""
    return reference(x, -positions)


def mistake_rows_counted(x, positions):
    """The rows are counted from 0 and the argument positions is not used: row n is at
    positions[n]."""
    return reference(x, np.arange(len(x)))


def mistake_one_speed(x, positions):
    """All pairs are rotated by the same angle: pair i has the angle
    position / 10000^(2i / D)."""
    a, b = np.split(x, 2, axis=1)
    cos, sin = np.cos(positions)[:, None], np.sin(positions)[:, None]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=1)


def mistake_half_exponent(x, positions):
    """The angles of later pairs are too large: the exponent of pair i is 2i / D, not
    i / D."""
    half = x.shape[1] // 2
    angles = positions[:, None] / 10000 ** (np.arange(half) / x.shape[1])
    a, b, cos, sin = x[:, :half], x[:, half:], np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=1)


def mistake_added(x, positions):
    """Sines of the position are added to x: rotary positions rotate the pairs of x, and
    add nothing."""
    D = x.shape[1]
    sines = np.sin(positions[:, None] / 10000 ** (np.arange(0, D, 2) / D))
    return x + np.concatenate([sines, sines], axis=1)


def mistake_two_plus_signs(x, positions):
    """Both numbers of a pair have a plus sign, which is no rotation: the first is
    a cos - b sin."""
    cos, sin = turn(x, positions)
    a, b = np.split(x, 2, axis=1)
    return np.concatenate([a * cos + b * sin, a * sin + b * cos], axis=1)


def turn(x, positions):  # cosines and sines of each pair, for the mistakes
    angles = positions[:, None] / 10000 ** (np.arange(0, x.shape[1], 2) / x.shape[1])
    return np.cos(angles), np.sin(angles)


def mistake_sine_and_cosine_swapped(x, positions):
    """Sine and cosine are swapped: position 0 must leave x as it is, so cos belongs to
    the number itself."""
    cos, sin = turn(x, positions)
    a, b = np.split(x, 2, axis=1)
    return np.concatenate([a * sin - b * cos, a * cos + b * sin], axis=1)


def mistake_second_half_left(x, positions):
    """Only the first half is rotated: the second half is a sin + b cos."""
    half = x.shape[1] // 2
    return np.concatenate([reference(x, positions)[:, :half], x[:, half:]], axis=1)
