"""Generating: the same tokens alone, in company, streamed, and without a cache."""

import numpy as np
import pytest
import torch
from configurations import draw_config
from test_nn import SMALL, make_model

from regard.errors import OptionError, ShapeError
from regard.nn.decoder import CausalTransformer
from regard.nn.generation import generate, read_next, stream
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
    assert varied != generate(model, PROMPTS, 10, sampling=VARIED, seed=6)


WAYS = [
    Sampling(temperature=0.5),
    Sampling(temperature=2),
    Sampling(temperature=1, top_k=5),
    Sampling(temperature=1, top_p=0.8),
    Sampling(temperature=1, min_p=0.2, repetition=1.3),
    VARIED,
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(12))
def test_a_sampled_sequence_does_not_notice_its_company(seed, dtype):
    model, weights = make_model(draw_config(seed), seed, dtype)
    sampling = WAYS[seed % len(WAYS)]
    decoder = Decoder(model.config, {n: w.numpy() for n, w in weights.items()})

    def run(prompts):
        return generate(model, prompts, 10, sampling=sampling, seed=seed)

    alone = [run([prompt])[0] for prompt in PROMPTS]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3], [2, 0, 3]):
        assert run([PROMPTS[i] for i in order]) == [alone[i] for i in order]
    for prompt, expected in zip(PROMPTS, alone, strict=True):
        plain = decoder.generate(prompt, 10, sampling=sampling, seed=seed)
        assert list(plain) == expected
    steps = list(stream(model, PROMPTS, 10, sampling=sampling, seed=seed))
    assert [list(column) for column in zip(*steps, strict=True)] == alone


def test_copies_of_a_prompt_are_samples_that_do_not_notice_their_company():
    model, _ = make_model(SMALL, 2, torch.float64)
    prompt, other = [1, 2, 3], [3, 1, 4, 1]
    copies = generate(model, [prompt] * 3, 12, sampling=VARIED)
    mixed = generate(model, [other, prompt, other, prompt], 12, sampling=VARIED)
    assert mixed[1::2] == copies[:2]
    assert mixed[::2] == generate(model, [other] * 2, 12, sampling=VARIED)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("sampling", [Sampling(), VARIED], ids=["greedy", "varied"])
def test_a_model_whose_logits_are_no_numbers_is_refused(value, sampling):
    model, weights = make_model(SMALL, 2)
    poisoned = weights | {"norm.weight": weights["norm.weight"] * value}
    model.load_state_dict(poisoned)
    decoder = Decoder(SMALL, {n: w.numpy() for n, w in poisoned.items()})
    with pytest.raises(OptionError, match=r"logits of prompt 0 at position 5: NaN"):
        generate(model, PROMPTS, 4, sampling=sampling)
    with pytest.raises(OptionError, match=r"logits at position 5: NaN for token 0"):
        next(decoder.generate(PROMPTS[0], 4, sampling=sampling))


def test_what_becomes_of_a_stopped_sequence_disturbs_nobody(monkeypatch):
    model, _ = make_model(SMALL, 2, torch.float64)
    free = generate(model, PROMPTS, 6, sampling=VARIED)
    stop = {free[0][0]}
    expected = generate(model, PROMPTS, 6, sampling=VARIED, stop=stop)

    def poison(model, tokens, cache):
        logits = read_next(model, tokens, cache)
        logits[0] = np.nan  # of the sequence that has stopped
        return logits

    monkeypatch.setattr("regard.nn.generation.read_next", poison)
    assert generate(model, PROMPTS, 6, sampling=VARIED, stop=stop) == expected
    assert expected[0] == []


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
    with pytest.raises(ShapeError, match="a prompt is empty"):
        generate(model, [[1], []], 4)
    with pytest.raises(ShapeError, match=r"of 30 tokens and 4 new ones.* Ask for 2"):
        generate(model, [[1] * 30], 4)
    with pytest.raises(ShapeError, match="token 40, but the vocabulary has 0 to 39"):
        generate(model, [[40]], 4)
    with pytest.raises(ShapeError, match="token -1, but the vocabulary has 0 to 39"):
        generate(model, [[-1, 5]], 4)
    with pytest.raises(OptionError, match=r"token 1\.5, expected integers"):
        generate(model, [[1, 1.5]], 4)
    with pytest.raises(OptionError, match=r"arrays, .* Write prompts\.tolist\(\)\."):
        generate(model, torch.tensor([[1, 2]]), 4)
    with pytest.raises(OptionError, match=r"Write \[x\.tolist\(\) for x in prompts\]"):
        generate(model, [np.array([1, 2])], 4)
    with pytest.raises(OptionError, match="n_new=-1, expected at least 0"):
        generate(model, [[1]], -1)
    with pytest.raises(OptionError, match=r"Write stop=\[5\]\."):
        generate(model, [[1]], 4, stop=5)
    assert len(generate(model, [[1] * 30], 2)[0]) == 2
