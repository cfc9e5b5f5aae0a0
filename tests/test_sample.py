"""Choosing the next token: filters against transformers, draws against probabilities."""

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

from regard.errors import OptionError
from regard.plain.norm import softmax
from regard.plain.sample import GREEDY, Sampling

FILTERS = {
    "top_k": (Sampling(temperature=1, top_k=7), theirs.TopKLogitsWarper(7)),
    "top_p": (Sampling(temperature=1, top_p=0.6), theirs.TopPLogitsWarper(0.6)),
    "min_p": (Sampling(temperature=1, min_p=0.1), theirs.MinPLogitsWarper(0.1)),
    "temperature": (Sampling(temperature=0.7), theirs.TemperatureLogitsWarper(0.7)),
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("seed", range(20))
def test_filters_are_those_of_transformers(name, seed):
    mine, other = FILTERS[name]
    logits = np.random.default_rng(seed).normal(size=50) * 2
    expected = other(None, torch.from_numpy(logits)[None])[0].numpy()
    np.testing.assert_allclose(mine.filter(logits), expected, atol=1e-12)


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
        np.testing.assert_allclose(mine.filter(logits), expected[0], atol=1e-12)


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
        ({"temperature": 1, "top_k": 0}, "top_k=0, expected at least 1"),
        ({"temperature": 1, "top_p": 0}, "top_p=0, expected 0 < top_p <= 1"),
        ({"temperature": 1, "min_p": 2}, "min_p=2, expected 0 <= min_p <= 1"),
        ({"repetition": 0}, "repetition=0, expected a positive number"),
        ({"top_p": 0.9}, "top_p= without a temperature: greedy choice needs no"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        Sampling(**options)
