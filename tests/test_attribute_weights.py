"""Attention × gradient against the gradients of weights that eager models return."""

from functools import partial

import pytest
import torch
from intervened_models import largest, open_family
from test_patch_heads import record
from transformers import BartConfig, BartForConditionalGeneration

from regard.ablate import attribute_heads, attribute_weights, knock_out, patch_heads
from regard.ablate.active import ACTIVE
from regard.errors import OptionError


def measure(logits):
    return logits[:, -1, 7] - logits[:, -1, 9]


def test_layers_with_fewer_heads_end_with_nan():
    options = {"vocab_size": 40, "d_model": 16, "encoder_layers": 1}
    options |= {"decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    config = BartConfig(**options, encoder_attention_heads=2, decoder_attention_heads=4)
    model = BartForConditionalGeneration(config).eval()
    text = torch.arange(4, 10)[None]
    inputs = {"input_ids": text, "decoder_input_ids": text, "use_cache": False}
    found = attribute_weights(model, inputs, measure)
    assert found.heads.shape == (3, 4)
    assert found.heads.isnan().sum(1).tolist() == [2, 0, 0]
    for layer, heads in enumerate((2, 4, 4)):
        assert torch.equal(found.heads[layer, :heads], found.rows(layer).sum(1))
    assert len(str(found).splitlines()) == 2 + 10


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "qwen3", "llama-eager", "gpt2-eager"]
)
def test_cells_are_weights_times_their_gradient(name):
    _, model, inputs = open_family(name)
    inputs = {"input_ids": inputs["input_ids"][:1]}
    found = attribute_weights(model, inputs, measure)
    model.set_attn_implementation("eager")
    done = model(**inputs, output_attentions=True)
    for weights in done.attentions:
        weights.retain_grad()
    value = measure(done.logits)
    value.sum().backward()
    assert abs(found.value - float(value.detach())) < 1e-5
    for layer, weights in enumerate(done.attentions):
        expected = (weights * weights.grad)[0].detach()  # (H, N, N)
        size = float(expected.abs().max())
        assert size > 1e-3
        for head, cells in enumerate(expected):
            assert largest(found.cells(layer, head), cells) < 1e-4 * size
            part = found.cells(layer, head, rows=slice(4, 7), keys=slice(1, 5))
            assert largest(part, cells[4:7, 1:5]) < 1e-4 * size
        assert largest(found.rows(layer), expected.sum(-1)) < 1e-4 * size
        assert largest(found.heads[layer], expected.sum((1, 2))) < 1e-3 * size
    assert not ACTIVE


@pytest.mark.parametrize("left", [True, False])
def test_padding_is_no_token(left):
    _, model, inputs = open_family("llama")
    text, other = inputs["input_ids"][:, None]
    n, at = text.shape[1], -1 if left else text.shape[1] - 1
    pad, ones = torch.zeros_like(text)[:, :3], torch.ones_like(text)
    order = slice(None, None, -1) if left else slice(None)
    padded = {
        "input_ids": torch.cat((text, pad)[order], 1),
        "attention_mask": torch.cat((ones, pad)[order], 1),
    }
    source = record(model, {"input_ids": other})
    for whole, part in zip(
        (
            attribute_weights(model, text, lambda x: x[:, -1, 5]),
            attribute_heads(model, text, source, lambda x: x[:, -1, 5]).tokens[1],
        ),
        (
            attribute_weights(model, padded, lambda x: x[:, at, 5]),
            attribute_heads(model, padded, source, lambda x: x[:, at, 5]).tokens[1],
        ),
        strict=True,
    ):
        if isinstance(whole, torch.Tensor):
            assert whole.shape == part.shape == (4, n)
            assert largest(whole, part) < 1e-5 < whole.abs().max()
        else:
            assert largest(whole.heads, part.heads) < 1e-5 < whole.heads.abs().max()
            assert largest(whole.cells(1, 1), part.cells(1, 1)) < 1e-5


def test_it_is_printed_and_refuses_what_it_cannot_do():
    _, model, inputs = open_family("llama")
    one = inputs["input_ids"][:1]
    lines = str(attribute_weights(model, one, measure)).splitlines()
    assert lines[1] == "layer  head   attention × gradient"
    assert len(lines) == 2 + 8
    with pytest.raises(OptionError, match="expected one sequence"):
        attribute_weights(model, inputs, measure)
    for flat in (lambda x: x.argmax(-1)[:, -1], lambda x: x[:, -1, 5].detach()):
        with pytest.raises(OptionError, match="the measure has no gradient"):
            attribute_weights(model, one, flat)
    with pytest.raises(OptionError, match="in training mode"):
        attribute_weights(model.train(), one, measure)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", ["gpt2", "gpt2-eager"])  # all in float64
def test_patched_and_removed_heads_have_the_gradient_of_their_own_weights(name):
    """Weights that eager attention returns are those before an output is replaced."""
    _, model, inputs = open_family(name)
    model, one = model.double(), {"input_ids": inputs["input_ids"][:1]}
    source = record(model, {"input_ids": inputs["input_ids"][1:]})
    for change in (
        partial(patch_heads, model, lambda z: 3 * z, [(1, 1)]),
        partial(patch_heads, model, source, [(1, 1)]),
        partial(patch_heads, model, source, [(1, 1), (0, 2)], queries=[3, 9]),
        partial(knock_out, model, [(1, 1)]),
    ):
        model.set_attn_implementation(name.partition("gpt2-")[2] or "sdpa")
        with change():
            found = attribute_weights(model, one, measure)
        model.set_attn_implementation("eager")
        with change():
            done = model(**one, output_attentions=True)
        grads = torch.autograd.grad(measure(done.logits).sum(), done.attentions)
        for layer, (weights, slope) in enumerate(
            zip(done.attentions, grads, strict=True)
        ):
            expected = (weights * slope)[0].detach()
            for head in range(4):
                assert largest(found.cells(layer, head), expected[head]) < 1e-9
            assert largest(found.heads[layer], expected.sum((1, 2))) < 1e-9
            assert float(expected.abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["gpt2", "gpt2-eager"])
def test_keys_that_are_hidden_have_no_part(name):
    """Against finite differences: all weights of a query are scaled."""
    _, model, inputs = open_family(name)
    model, one = model.double(), inputs["input_ids"][:1]

    def scale(size, head, query):
        with (
            torch.no_grad(),
            patch_heads(model, lambda z: size * z, [head], queries=[query]),
        ):
            return float(measure(model(one).logits)[0])

    for heads, keys in (([(1, 1)], [0]), (None, slice(2, 5)), ([(0, 3), (1, 0)], [1])):
        with knock_out(model, heads, keys=keys):
            found = attribute_weights(model, one, measure)
            for layer, head, query in ((0, 3, 4), (0, 3, 0), (1, 1, 9), (1, 0, 9)):
                more, less = (scale(1 + x, (layer, head), query) for x in (1e-5, -1e-5))
                slope = (more - less) / 2e-5
                row = float(found.rows(layer)[head, query])
                assert row == pytest.approx(slope, rel=1e-5, abs=1e-8)
                cells = found.cells(layer, head)
                assert float(cells[query].sum()) == pytest.approx(row, abs=1e-9)
        for layer, head in heads or [(1, 2)]:
            assert not found.cells(layer, head)[:, keys].any()


def test_weights_of_heads_with_new_inputs_are_refused():
    _, model, inputs = open_family("llama")
    source = record(model, {"input_ids": inputs["input_ids"][:1]})
    with (
        pytest.raises(OptionError, match="heads with new q, k or v are not recorded"),
        patch_heads(model, source, [(1, 1)], parts="v"),
    ):
        attribute_weights(model, inputs["input_ids"][:1], measure)
