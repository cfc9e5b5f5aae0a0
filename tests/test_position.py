"""Positions: sinusoidal, rotary in both pairings, ALiBi slopes."""

import math

import numpy as np
import pytest

import regard
from regard.definition.heads import join_heads, split_heads
from regard.definition.position import (
    HALVES,
    NEIGHBOURS,
    alibi_slopes,
    rotary,
    sinusoidal,
)
from regard.errors import ShapeError


def test_sinusoidal_is_its_formula():
    table = sinusoidal(7, 6, start=3)
    for p in range(7):
        for i in range(3):
            angle = (p + 3) / 10_000 ** (2 * i / 6)
            assert table[p, 2 * i] == pytest.approx(math.sin(angle), abs=1e-15)
            assert table[p, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-15)
    with pytest.raises(ShapeError, match="width 5 is odd, expected an even"):
        sinusoidal(2, 5)


@pytest.mark.parametrize("pairing", [HALVES, NEIGHBOURS], ids=lambda p: p.name)
def test_rotary_turns_pairs_as_complex_numbers(library, rng, pairing):
    x = rng.normal(size=(2, 5, 8))
    at = np.asarray([0, 3, 4, 9, 1000])
    turned = np.asarray(rotary(library.make(x), at, pairing=pairing))
    first, second = (x[..., :4], x[..., 4:])
    if pairing is NEIGHBOURS:
        first, second = x[..., ::2], x[..., 1::2]
    angle = at[:, None] / 10_000 ** (np.arange(0, 8, 2) / 8)
    z = (first + 1j * second) * np.exp(1j * angle)
    expected = np.concatenate([z.real, z.imag], -1)
    if pairing is NEIGHBOURS:
        expected = np.stack([z.real, z.imag], -1).reshape(x.shape)
    np.testing.assert_allclose(turned, expected, atol=1e-13)


@pytest.mark.parametrize("pairing", [HALVES, NEIGHBOURS], ids=lambda p: p.name)
def test_rotary_scores_depend_on_distance_only(rng, pairing):
    q, k, v = rng.normal(size=(3, 5, 8))

    def weights(start):
        at = np.arange(start, start + 5)
        turned = (rotary(x, at, pairing=pairing) for x in (q, k))
        return regard.attention(*turned, v, see=("weights",)).weights

    np.testing.assert_allclose(weights(0), weights(1234), atol=1e-11)


def test_rotary_keeps_the_dtype_and_takes_positions_by_batch(library, rng):
    x = rng.normal(size=(2, 3, 5, 4))
    at = np.asarray([np.arange(5), np.arange(5) + 7])
    for dtype in library.dtypes:
        together = rotary(library.make(x, dtype), at[:, None], pairing=HALVES)
        alone = rotary(library.make(x[1], dtype), at[1], pairing=HALVES)
        assert together.dtype == dtype
        assert bool(np.asarray(together[1, ...] == alone).all())


def test_alibi_slopes_are_those_of_its_authors():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(1).tolist() == [2.0**-8]
    between = [2.0 ** -(i / 2) for i in (1, 3, 5, 7)]
    assert alibi_slopes(12).tolist() == pytest.approx(
        [2.0**-i for i in range(1, 9)] + between
    )


def test_split_and_join_are_inverse(library, rng):
    x = rng.normal(size=(2, 5, 12))
    heads = split_heads(library.make(x), 3)
    assert tuple(heads.shape) == (2, 3, 5, 4)
    assert np.asarray(heads)[1, 2, 3].tolist() == x[1, 3, 8:].tolist()
    assert np.asarray(join_heads(heads)).tolist() == x.tolist()
    with pytest.raises(ShapeError, match="a width of 12 cannot be split into 5 heads"):
        split_heads(library.make(x), 5)
