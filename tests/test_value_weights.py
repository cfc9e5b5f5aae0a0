"""Value-weighted attention against eager weights and output projections by hand."""

import pytest
import torch
from intervened_models import find_projection, largest, open_family
from test_trace_heads import write_by_hand
from torch import nn

import regard
from regard.ablate import knock_out, patch_heads
from regard.ablate.active import ACTIVE
from regard.ablate.value_weights import weigh_values
from regard.errors import OptionError
from regard.recording.head_outputs import expect_values

ONE_INPUT = ("gpt2", "llama", "qwen3", "llama-eager", "gpt2-eager", "bert")


@pytest.mark.parametrize("name", ONE_INPUT)
def test_cells_are_weights_times_the_size_of_what_a_value_writes(name):
    family, model, inputs = open_family(name)
    inputs = {"input_ids": inputs["input_ids"][:1]}
    found = weigh_values(model, inputs)
    assert list(found.norms) == list(family.layers)
    with regard.watch(model, keep="qkv") as seen, torch.no_grad():
        model(**inputs)
    model.set_attn_implementation("eager")
    weights = model(**inputs, output_attentions=True).attentions
    for number, layer in enumerate(family.layers):
        v = torch.as_tensor(seen.layer(layer).v)  # (Hk, N, Dv)
        heads = weights[number].shape[1]
        v = v.repeat_interleave(heads // len(v), 0)
        module = find_projection(model, layer, family.out)
        for head in range(heads):
            x = torch.zeros(1, v.shape[1], heads, v.shape[2])
            x[0, :, head] = v[head]
            write = write_by_hand(module, x.flatten(2), head, heads)[0]  # (N, width)
            expected = (weights[number][0, head] * write.norm(dim=-1)).detach()
            assert float(expected.max()) > 1e-3
            assert largest(found.cells(number, head), expected) < 1e-5
            part = found.cells(number, head, rows=slice(4, 7), keys=slice(1, 5))
            assert largest(part, expected[4:7, 1:5]) < 1e-5
            assert largest(found.received(number)[head], expected.sum(0)) < 1e-4
    assert not ACTIVE


def test_a_table_compares_attention_with_what_values_write():
    _, model, inputs = open_family("gpt2")
    found = weigh_values(model, inputs["input_ids"][:1])
    lines = str(found).splitlines()
    assert lines[1] == "layer  head   key   attention   value-weighted"
    assert len(lines) == 2 + 8
    for line in lines[2:]:
        layer, head, key, *shares = line.split()
        record = found.recording.layer(int(layer))
        weights = torch.as_tensor(record.weights(slice(None), int(head))).sum(0)
        cells = found.cells(int(layer), int(head)).sum(0)
        assert int(weights.argmax()) == int(key)
        expected = [float(x[int(key)] / x.sum()) for x in (weights, cells)]
        assert shares == [f"{x:.1%}" for x in expected]


class GatedLayer(nn.Module):
    """Attention whose outputs are multiplied by a gate of each token."""

    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Linear(8, 32), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v, gate = self.mix(x).chunk(4, -1)
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (q, k, v))
        z = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(z.transpose(1, 2).flatten(2) * gate.sigmoid())


def test_a_gate_is_refused_because_each_token_has_another_projection():
    torch.manual_seed(0)
    model, x = GatedLayer().eval(), torch.randn(1, 6, 8)
    with pytest.raises(OptionError, match="not the product with one matrix"):
        weigh_values(model, x)
    with pytest.raises(OptionError, match="expected one sequence"):
        weigh_values(model, x.repeat(2, 1, 1))
    with pytest.raises(OptionError, match="in training mode"):
        weigh_values(model.train(), x)
    assert torch.is_grad_enabled()


def test_what_another_intervention_replaces_is_not_written():
    _, model, inputs = open_family("llama")
    one = inputs["input_ids"][:1]
    plain = weigh_values(model, one)
    with regard.watch(model, keep="qkv") as source, torch.no_grad():
        model(one.flip(1))
    for change, size in (
        (patch_heads(model, lambda z: 3 * z, [(1, 1)]), 3),
        (patch_heads(model, source, [(1, 1)]), 0),
        (knock_out(model, [(1, 1)]), 0),
    ):
        with change:
            found = weigh_values(model, one)
        for head in range(4):
            expected = plain.cells(1, head) * (size if head == 1 else 1)
            assert largest(found.cells(1, head), expected) < 1e-5
    with (
        pytest.raises(OptionError, match="heads with new q, k or v are not recorded"),
        patch_heads(model, source, [(1, 1)], parts="v"),
    ):
        weigh_values(model, one)


def test_a_softmax_in_float32_within_float64_has_values():
    """GPT-J multiplies q and k in float32, whatever the rest of the model is in."""
    family, model, inputs = open_family("gptj")
    one = inputs["input_ids"][:1]
    expected = weigh_values(model, one)
    found = weigh_values(model.double(), one)
    for number in range(len(family.layers)):
        for head in range(4):
            cells = found.cells(number, head)
            assert largest(cells, expected.cells(number, head).double()) < 1e-5
            assert float(cells.max()) > 1e-3
    model.set_attn_implementation("eager")
    weights = model(one, output_attentions=True).attentions
    record = found.recording.layer(family.layers[1])
    assert largest(torch.as_tensor(record.weights()), weights[1][0].detach()) < 1e-6


def test_a_record_without_values_is_told():
    family, model, inputs = open_family("gptj")
    with regard.watch(model, keep="qk") as seen, torch.no_grad():
        model(inputs["input_ids"][:1])
    with pytest.raises(OptionError, match=r"recorded without values.*keep=.qkv"):
        expect_values(seen.layer(family.layers[0]))
