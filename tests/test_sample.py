"""Choosing the next token: filters against transformers, draws against probabilities."""

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

from regard.errors import OptionError
from regard.plain.norm import softmax
from regard.plain.sample import GREEDY, Sampling, make_generators

FILTERS = {
    "top_k": (Sampling(temperature=1, top_k=7), theirs.TopKLogitsWarper(7)),
    "top_p": (Sampling(temperature=1, top_p=0.6), theirs.TopPLogitsWarper(0.6)),
    "min_p": (Sampling(temperature=1, min_p=0.1), theirs.MinPLogitsWarper(0.1)),
    "temperature": (Sampling(temperature=0.7), theirs.TemperatureLogitsWarper(0.7)),
}


def compare_filters(mine, logits, expected):
    """Compare filtered logits; ours are shifted, so that the largest is 0."""
    found = mine.filter(logits)
    assert found.max() == 0
    np.testing.assert_allclose(found, expected - expected.max(), atol=1e-12)


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("seed", range(20))
def test_filters_are_those_of_transformers(name, seed):
    mine, other = FILTERS[name]
    logits = np.random.default_rng(seed).normal(size=50) * 2
    expected = other(None, torch.from_numpy(logits)[None])[0].numpy()
    compare_filters(mine, logits, expected)


def test_filters_together_are_those_of_transformers():
    mine = Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05)
    chain = [
        theirs.TemperatureLogitsWarper(0.8),
        theirs.TopKLogitsWarper(20),
        theirs.TopPLogitsWarper(0.9),
        theirs.MinPLogitsWarper(0.05),
    ]
    for seed in range(50):
        logits = np.random.default_rng(seed).normal(size=80) * 3
        expected = torch.from_numpy(logits)[None]
        for step in chain:
            expected = step(None, expected)
        compare_filters(mine, logits, expected[0].numpy())


def test_repetition_is_that_of_transformers(rng):
    logits, seen = rng.normal(size=30) * 3, [3, 3, *range(0, 30, 2)]
    other = theirs.RepetitionPenaltyLogitsProcessor(1.3)
    expected = other(torch.tensor([seen]), torch.from_numpy(logits)[None].clone())[0]
    mine = Sampling(repetition=1.3)
    np.testing.assert_allclose(mine.discourage(logits, seen), expected, atol=1e-12)
    assert mine.discourage(logits, []).tolist() == logits.tolist()


def test_tokens_are_drawn_as_often_as_their_probability_says(rng):
    logits, n = rng.normal(size=12), 20_000
    sampling = Sampling(temperature=1.3)
    drawn = [sampling.pick(logits, [], rng) for _ in range(n)]
    share, p = np.bincount(drawn, minlength=12) / n, softmax(logits / 1.3)
    assert (np.abs(share - p) < 5 * np.sqrt(p * (1 - p) / n)).all()


def test_what_is_filtered_is_never_drawn(rng):
    logits = rng.normal(size=40)
    allowed = set(np.argsort(-logits)[:3].tolist())
    sampling = Sampling(temperature=5, top_k=3)
    assert {sampling.pick(logits, [], rng) for _ in range(300)} == allowed


def test_greedy_takes_the_first_of_the_largest(rng):
    assert GREEDY.pick(np.asarray([1.0, 3.0, 3.0]), [], rng) == 1
    least = Sampling(temperature=1, top_p=1e-9)  # at least one token is always left
    assert least.pick(np.asarray([1.0, 4.0, 3.0]), [], rng) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, r"temperature=-1, expected 0 \(greedy\)"),
        ({"temperature": 1, "top_k": 0}, "top_k=0, expected an integer of at least 1"),
        ({"temperature": 1, "top_k": 2.5}, "top_k=2.5, expected an integer"),
        ({"temperature": np.nan}, "temperature=nan, expected 0"),
        ({"temperature": np.inf}, "temperature=inf, expected 0"),
        ({"temperature": 1, "top_p": np.nan}, "top_p=nan, expected 0 < top_p <= 1"),
        ({"repetition": np.inf}, "repetition=inf, expected a positive number"),
        ({"temperature": 1, "top_p": 0}, "top_p=0, expected 0 < top_p <= 1"),
        ({"temperature": 1, "min_p": 2}, "min_p=2, expected 0 <= min_p <= 1"),
        ({"repetition": 0}, "repetition=0, expected a positive number"),
        ({"top_p": 0.9}, "top_p= has no effect without a temperature: greedy"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        Sampling(**options)


WAYS = {
    "greedy": GREEDY,
    "warm": Sampling(temperature=1),
    "hot": Sampling(temperature=1e308),
    "cold": Sampling(temperature=1e-308),
    "coldest": Sampling(temperature=5e-324),
    "filtered": Sampling(temperature=0.7, top_k=3, top_p=0.8, min_p=0.01),
    "tiny_p": Sampling(temperature=1, top_p=1e-300, min_p=1e-300),
    "repeated": Sampling(temperature=1, repetition=1.3),
    "much_repeated": Sampling(repetition=1e308),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([0, np.nan, 1, 2, np.nan, 0, 0], r"NaN for token 1 \(2 of 7\)"),
        ([np.nan] * 7, r"NaN for token 0 \(7 of 7\)"),
        ([0, np.inf, 1, np.nan, 0, 0, 0], r"NaN for token 3 \(1 of 7\)"),
        ([0, -np.inf, np.inf, np.inf, 0, 0, 0], r"\+inf for token 2 \(2 of 7\)"),
        ([-np.inf] * 7, "all are -inf"),
    ],
)
def test_logits_without_probabilities_are_refused(given, said, dtype, way, rng):
    message = rf"the logits of prompt 3 at position 2: {said}, expected numbers or -inf"
    with pytest.raises(OptionError, match=message):
        WAYS[way].pick(
            np.asarray(given, dtype), [1, 4], rng, name="the logits of prompt 3"
        )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_token_is_always_one_of_the_vocabulary_that_may_be_drawn(way, dtype, rng):
    most = float(np.finfo(dtype).max)
    rows = [
        [-np.inf, -np.inf, 3, -np.inf],
        [-np.inf, -np.inf, -most, -np.inf],
        [most, -most, 0, -np.inf],
        [most, most, -most, -most],
        [-most, -most, -most, -np.inf],
        [0, -0.0, 0, 0],
        rng.normal(size=4) * 10,
        rng.normal(size=4) * 1e-7,
    ]
    with np.errstate(all="raise", under="ignore"):
        for row in np.asarray(rows, dtype):
            drawn = {WAYS[way].pick(row, [0, 3], rng) for _ in range(20)}
            assert drawn <= set(np.flatnonzero(row > -np.inf).tolist())


@pytest.mark.parametrize("temperature", [1e-30, 1e-308, 5e-324, -0.0])
def test_a_tiny_temperature_is_greedy(temperature, rng):
    sampling = Sampling(temperature=temperature)
    for _ in range(20):
        logits = rng.normal(size=50) * 10.0 ** rng.integers(-6, 300)
        assert sampling.pick(logits, [], rng) == np.argmax(logits)


def test_a_tiny_temperature_draws_among_equals(rng):
    sampling, logits = Sampling(temperature=1e-308), np.asarray([1.0, 3.0, 3.0])
    assert {sampling.pick(logits, [], rng) for _ in range(50)} == {1, 2}


def test_what_a_penalty_makes_infinite_is_refused(rng):
    with pytest.raises(OptionError, match=r"\+inf for token 1 \(1 of 2\)"):
        Sampling(repetition=1e-10).pick(np.asarray([1.0, 1e300]), [1], rng)


def draw_numbers(seed, prompts):
    return [stream.random(4).tolist() for stream in make_generators(seed, prompts)]


def test_a_stream_depends_on_seed_prompt_and_copy_alone():
    prompts = [[1], [1, 0], [0, 1], [1], [2**31], [11], [1, 1], [1]]
    (first,) = draw_numbers(3, [[1]])
    drawn = draw_numbers(3, prompts)
    assert drawn[0] == first
    assert len(set(map(tuple, drawn))) == len(prompts)
    assert draw_numbers(3, prompts[::-1])[-1] != first  # now the third of three copies
    assert draw_numbers(3, [[1]] * 3) == [drawn[i] for i in (0, 3, 7)]
    assert draw_numbers(4, [[1]]) != [first]
    assert draw_numbers(np.int64(3), [np.asarray([1])]) == [first]
    with pytest.raises(OptionError, match=r"seed=0\.5, expected an integer"):
        make_generators(0.5, [[1]])


def test_streams_are_independent():
    prompts = [[a, b] for a in range(30) for b in range(30)]
    drawn = np.asarray(draw_numbers(0, prompts))  # (900, 4)
    assert abs(drawn.mean() - 0.5) < 5 / np.sqrt(12 * drawn.size)
    assert np.abs(np.corrcoef(drawn[1:].T, drawn[:-1].T) - np.eye(8)).max() < 0.15
