"""A real trained model, SmolLM2-135M: the tokens of transformers, from our sources."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from regard.nn.generation import generate
from regard.nn.weights import load, read_weights
from regard.plain import Decoder

TEXT = (Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def ours(smollm):
    return load(smollm)


@pytest.fixture(scope="module")
def theirs(smollm):
    return AutoModelForCausalLM.from_pretrained(
        smollm.parent, gguf_file=smollm.name, dtype=torch.float32
    ).eval()


def continue_with(theirs, prompt, n):
    """Return n greedy tokens of transformers."""
    tokens = torch.tensor([prompt])
    found = theirs.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=n,
        min_new_tokens=n,
        pad_token_id=0,
    )
    return found[0, len(prompt) :].tolist()


def test_512_logits_are_those_of_transformers(ours, theirs):
    model, tokenizer = ours
    tokens = torch.tensor([tokenizer.encode(TEXT)[:512]])
    assert tokens.shape == (1, 512)
    with torch.no_grad():
        mine, expected = model(tokens), theirs(tokens).logits
    assert (mine - expected).abs().max() < 2e-4
    loss = torch.nn.functional.cross_entropy(expected[0, :-1], tokens[0, 1:])
    assert loss < 3  # the text is real, and the model knows such


def test_128_greedy_tokens_are_those_of_transformers(ours, theirs):
    model, tokenizer = ours
    prompt = tokenizer.encode(TEXT)[:40]
    assert generate(model, [prompt], 128) == [continue_with(theirs, prompt, 128)]


def test_numpy_says_the_same(ours, smollm):
    model, tokenizer = ours
    question = tokenizer.chat([{"role": "user", "content": "Why is the sky blue?"}])
    prompt = tokenizer.encode(question, whole=False)
    decoder = Decoder(*read_weights(smollm))
    assert isinstance(decoder.weights["embed.weight"], np.ndarray)
    new = list(decoder.generate(prompt, 16))
    assert generate(model, [prompt], 16) == [new]
    assert "sky" in tokenizer.decode(new) or "answer" in tokenizer.decode(new)


def test_a_batch_of_different_lengths_is_each_alone(ours):
    model, tokenizer = ours
    texts = ["The capital of France is", "Once upon a time, in a small", "2 + 2 ="]
    prompts = [tokenizer.encode(text) for text in texts]
    together = generate(model, prompts, 10)
    assert together == [generate(model, [prompt], 10)[0] for prompt in prompts]
    assert "Paris" in tokenizer.decode(together[0])


def test_left_padding_changes_no_logit(ours):
    model, tokenizer = ours
    tokens = torch.tensor(tokenizer.encode(TEXT)[:60])
    with torch.no_grad():
        alone = model(tokens[None])[0]
        for extra in (1, 17, 200):
            padded = torch.cat([torch.full((extra,), 2), tokens])
            valid = torch.arange(len(padded)) >= extra
            logits = model(padded[None], valid=valid[None])[0, extra:]
            assert (logits - alone).abs().max() < 1e-5 * alone.abs().max()
