"""Heads that attend only where a formula allows it, against hidden keys and weights."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch
from intervened_models import HEADS, largest, open_family, read
from layers_by_hand import Written, make

import regard
from regard import causal, window
from regard.ablate import effect, knock_out
from regard.ablate.active import ACTIVE
from regard.errors import OptionError
from regard.masks.patterns import padding, prefix

NAMES = ["gpt2", "llama", "bert", "qwen3", "mistral", "gpt-oss", "bloom", "llama-eager"]


@pytest.mark.parametrize("name", NAMES)
def test_a_window_hides_the_keys_behind_it(name):
    _, model, inputs = open_family(name)
    heads = [(0, 1), (1, 2)]
    with knock_out(model, heads, mask=window(1, None)):
        found = read(model, inputs)
    with ExitStack() as stack:
        for i in range(2, 10):
            behind = slice(0, i - 1)
            stack.enter_context(knock_out(model, heads, keys=behind, queries=[i]))
        expected = read(model, inputs)
    assert largest(found, expected) < 1e-6 * max(1, float(expected.abs().max()))
    assert largest(found, read(model, inputs)) > 1e-3
    assert not ACTIVE


def test_the_weights_that_are_left_are_shared_out_again():
    _, model, inputs = open_family("llama")
    with regard.watch(model) as plain:
        read(model, inputs)
    with regard.watch(model) as seen, knock_out(model, [(0, 2)], mask=window(2)):
        read(model, inputs)
    for sequence in (0, 1):
        before = plain.weights(0, sequence=sequence).numpy()
        after = seen.weights(0, sequence=sequence).numpy()
        allowed = before[2] * window(2).dense(10)
        expected = allowed / allowed.sum(-1, keepdims=True)
        np.testing.assert_allclose(after[2], expected, atol=1e-6)
        others = [h for h in range(HEADS) if h != 2]
        np.testing.assert_array_equal(after[others], before[others])


def test_positions_are_those_of_tokens_with_padding_and_a_cache():
    _, model, inputs = open_family("llama")
    text = inputs["input_ids"][:1]
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), text], 1)
    given = {"input_ids": padded, "attention_mask": (padded > 0).long()}
    given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    mask = prefix(2) | window(3)  # tokens 0 and 1 stay visible
    with knock_out(model, mask=mask):
        alone = read(model, {"input_ids": text})
        assert largest(read(model, given)[:, 3:], alone) < 1e-5
        how = {"do_sample": False, "max_new_tokens": 5, "disable_compile": True}
        done = model.generate(text, attention_mask=torch.ones_like(text), **how)
        full = read(model, {"input_ids": done}, use_cache=False)
    assert torch.equal(full[:, 9:-1].argmax(-1), done[:, 10:])


def test_rows_of_padding_are_as_the_model_has_them():
    _, model, inputs = open_family("llama")
    text = inputs["input_ids"]
    given = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    given["attention_mask"][:, 6:] = 0  # on the right, where rows see real keys
    before = read(model, given)
    with knock_out(model, [(1, h) for h in range(HEADS)], mask=window(0)):
        after = read(model, given)
    assert torch.equal(after[:, 6:], before[:, 6:])
    assert largest(after[:, 1:6], before[:, 1:6]) > 1e-3


def test_a_formula_can_differ_by_head_and_by_sequence():
    model, text = make(Written), torch.tensor([[1, 5, 2, 9, 4], [3, 8, 2, 1, 7]])
    documents = np.array([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
    cutting = knock_out(model, [(1, 0)], mask=regard.same(documents))
    with torch.no_grad(), regard.watch(model) as seen, cutting:
        model(text)
    for sequence, numbers in enumerate(documents):
        weights = seen.weights(1, sequence=sequence).numpy()
        apart = (numbers[:, None] != numbers) & np.tri(5, dtype=bool)
        assert not weights[0][apart].any()
        assert (weights[1][apart] > 0).all()


def test_what_it_changes_is_measured_and_what_cannot_be_is_refused():
    model, text = make(Written), torch.tensor([[1, 5, 2, 9, 4]])
    found = effect(model, lambda model: model(text), [(0, 1)], mask=window(2))
    assert found.logits > 1e-3
    same = effect(model, lambda model: model(text), [(0, 1)], mask=causal())
    assert same.logits == 0
    with pytest.raises(OptionError, match="mask is a Tensor, expected a formula"):
        knock_out(model, mask=torch.ones(5, 5)).__enter__()
    with pytest.raises(OptionError, match="keys= and mask= together"):
        knock_out(model, keys=[1], mask=window(2)).__enter__()
    documents, keys = np.array([0, 0, 1]), np.array([[True, False, True]])
    for short in (regard.same(documents), padding(keys)):
        with (
            torch.no_grad(),
            pytest.raises(OptionError, match="covers 3 keys, but there are 5"),
            knock_out(model, mask=short),
        ):
            model(text)
    assert not ACTIVE
