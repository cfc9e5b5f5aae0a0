"""Generating: the same tokens alone, in company, streamed, and without a cache."""

import numpy as np
import pytest
import torch
from configurations import draw_config
from test_nn import SMALL, make_model

from regard.errors import OptionError, ShapeError
from regard.nn.decoder import CausalTransformer
from regard.nn.generation import generate, stream
from regard.plain import Decoder, Sampling

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [3, 5, 8, 9, 7, 9, 3, 2]]
VARIED = Sampling(temperature=1.5, top_k=30, top_p=0.95, repetition=1.1)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("sampling", [Sampling(), VARIED], ids=["greedy", "varied"])
def test_generate_is_that_of_the_plain_decoder(seed, sampling):
    config = draw_config(seed)
    model, weights = make_model(config, seed, torch.float64)
    decoder = Decoder(config, {n: w.numpy() for n, w in weights.items()})
    prompt = PROMPTS[3]
    expected = list(decoder.generate(prompt, 12, sampling=sampling, seed=seed))
    assert generate(model, [prompt], 12, sampling=sampling, seed=seed) == [expected]


@pytest.mark.parametrize("seed", range(12))
def test_a_sequence_does_not_notice_its_company(seed):
    model, _ = make_model(draw_config(seed), seed, torch.float64)
    together = generate(model, PROMPTS, 10)
    alone = [generate(model, [prompt], 10)[0] for prompt in PROMPTS]
    assert together == alone
    varied = generate(model, PROMPTS, 10, sampling=VARIED, seed=5)
    assert varied[0] == generate(model, PROMPTS[:1], 10, sampling=VARIED, seed=5)[0]
    assert varied != generate(model, PROMPTS, 10, sampling=VARIED, seed=6)


def test_equal_prompts_become_different_texts():
    model, _ = make_model(SMALL, 2)
    texts = generate(model, [[1, 2, 3]] * 4, 12, sampling=VARIED)
    assert len(set(map(tuple, texts))) == 4


def test_tokens_stream_as_they_come_and_stop_each_on_its_own():
    model, _ = make_model(SMALL, 2, torch.float64)
    free = generate(model, PROMPTS, 10, sampling=VARIED)
    stop = {free[0][4], free[2][0]}
    halted = generate(model, PROMPTS, 10, sampling=VARIED, stop=stop)
    for whole, cut in zip(free, halted, strict=True):
        ends = [i for i, token in enumerate(whole) if token in stop]
        assert cut == whole[: ends[0] if ends else None]
    steps = list(stream(model, PROMPTS, 10, sampling=VARIED, stop=stop))
    again = [
        [t for t in column if t is not None] for column in zip(*steps, strict=True)
    ]
    assert again == halted
    assert halted[2] == []


def test_a_stream_can_be_left_and_the_model_is_as_before():
    model = CausalTransformer(SMALL).train()
    steps = stream(model, [[1, 2]], 10)
    next(steps)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    steps.close()
    assert model.training
    model(torch.tensor([[1, 2]])).sum().backward()  # no inference tensor is left behind


def test_prompts_that_cannot_be_read_are_refused():
    model = CausalTransformer(SMALL)
    with pytest.raises(OptionError, match=r"Write \[tokenizer.encode\(text\)\]"):
        generate(model, [1, 2, 3], 4)
    with pytest.raises(OptionError, match="lists of token numbers"):
        generate(model, "hello", 4)
    with pytest.raises(ShapeError, match="an empty prompt"):
        generate(model, [[1], []], 4)
    with pytest.raises(ShapeError, match=r"of 30 tokens and 4 new ones.* Ask for 2"):
        generate(model, [[1] * 30], 4)
    with pytest.raises(ShapeError, match="token 40, but the vocabulary has 0 to 39"):
        generate(model, [[40]], 4)
    with pytest.raises(ShapeError, match="token -1, but the vocabulary has 0 to 39"):
        generate(model, [[-1, 5]], 4)
    with pytest.raises(OptionError, match=r"arrays, .* Write prompts\.tolist\(\)\."):
        generate(model, torch.tensor([[1, 2]]), 4)
    with pytest.raises(OptionError, match=r"Write \[x\.tolist\(\) for x in prompts\]"):
        generate(model, [np.array([1, 2])], 4)
    with pytest.raises(OptionError, match="n_new=-1, expected at least 0"):
        generate(model, [[1]], -1)
    with pytest.raises(OptionError, match=r"Write stop=\[5\]\."):
        generate(model, [[1]], 4, stop=5)
    assert len(generate(model, [[1] * 30], 2)[0]) == 2
