"""What heads output and write, with gradients, against output projections by hand."""

from functools import partial

import pytest
import torch
from intervened_models import (
    FAMILIES,
    GROUPED,
    WIDTH,
    Family,
    find_projection,
    largest,
    open_family,
    stir,
    tokens,
)
from test_circuits import SIZES
from test_patch_heads import catch as catch_inputs
from test_patch_heads import change_inputs, record
from torch import nn
from transformers.pytorch_utils import Conv1D

from regard.ablate import (
    attribute_heads,
    attribute_weights,
    knock_out,
    patch_heads,
    search_heads,
    trace_heads,
)
from regard.ablate.active import ACTIVE
from regard.errors import OptionError
from regard.nn.decoder import CausalTransformer
from regard.plain.config import Config
from regard.seen import watch

TEXT = torch.tensor([[3, 14, 15, 9, 2, 6]])


def catch(model, projections):
    """Keep what goes into and comes out of some modules, with gradients."""
    caught = {}

    def keep(name, _module, args, out):
        caught[name] = args[0], out
        args[0].retain_grad()
        out.retain_grad()

    for name, module in projections.items():
        module.register_forward_hook(lambda *x, name=name: keep(name, *x))
    return caught


def write_by_hand(module, x, head, heads):
    """Return the product of the columns of one head, (B, N, width)."""
    weight = module.weight if isinstance(module, Conv1D) else module.weight.T
    columns = slice(head * len(weight) // heads, (head + 1) * len(weight) // heads)
    return x[..., columns] @ weight[columns]


def merge(z):
    return z.transpose(1, 2).flatten(2)  # (B, N, H Dv)


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_writes_and_gradients_are_those_of_hooks(name):
    family, model, inputs = open_family(name)
    plain = model(**inputs).logits
    with trace_heads(model) as traced:
        logits = model(**inputs).logits
        logits.square().mean().backward()
    assert torch.equal(logits, plain)
    assert set(traced.layers) == set(family.layers)
    found = {
        layer: find_projection(model, layer, family.out) for layer in traced.layers
    }
    caught = catch(model, found)
    model.zero_grad()
    model(**inputs).logits.square().mean().backward()
    for layer, module in found.items():
        x, out = caught[layer]
        z = traced.outputs(layer)
        assert largest(merge(z), x.detach()) < 1e-6
        size = float(x.grad.abs().max())
        assert size > 0
        assert largest(merge(traced.output_gradients(layer)), x.grad) < 1e-5 * size
        if name == "gemma2":  # a norm before the sum
            with pytest.raises(OptionError, match="such as a norm"):
                traced.writes(layer, 0)
            with pytest.raises(OptionError, match="such as a norm"):
                traced.write_gradients(layer)
            continue
        size = float(out.grad.abs().max())
        assert largest(traced.write_gradients(layer), out.grad) < 1e-5 * size
        for head in range(z.shape[1]):
            expected = write_by_hand(module, x, head, z.shape[1]).detach()
            assert largest(traced.writes(layer, head), expected) < 1e-5
    assert not ACTIVE


class ScaledLayer(nn.Module):
    """Adds to its input what attention writes, times a scale, in one of four ways."""

    def __init__(self, way):
        super().__init__()
        self.way, self.mix, self.out = way, nn.Linear(8, 24), nn.Linear(8, 8)
        self.scale, self.bias = (nn.Parameter(torch.randn(8)) for _ in range(2))

    def forward(self, x):
        q, k, v = self.mix(x).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (q, k, v))
        z = nn.functional.scaled_dot_product_attention(q, k, v)
        write = self.out(z.transpose(1, 2).flatten(2))
        if self.way == "sum":
            return x + write * self.scale
        if self.way == "addcmul":
            return torch.addcmul(x, write, self.scale)
        if self.way == "bias":
            return (write + self.bias) * self.scale + x
        if self.way == "norm":
            write = write + self.bias
            write = write - write.mean(-1, keepdim=True)
            return x + write / write.square().mean(-1, keepdim=True).sqrt() + self.bias
        return write * 1  # "none": there is no residual stream


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", ["sum", "addcmul", "bias", "none", "norm"])
def test_writes_are_what_is_added_to_the_residual_stream(way, frozen):
    torch.manual_seed(0)
    model, x = ScaledLayer(way).double(), torch.randn(1, 5, 8, dtype=torch.float64)
    if frozen:
        model.requires_grad_(requires_grad=False)
    else:
        x.requires_grad_()
    with trace_heads(model) as traced:
        out = model(x)
        for _ in range(2):  # gradients add up
            out.square().sum().backward(retain_graph=True)
    if way == "norm":
        with pytest.raises(OptionError, match="such as a norm"):
            traced.writes(0, 1)
        return
    scale = 1 if way == "none" else model.scale.detach()
    for head in range(2):
        z = torch.zeros_like(traced.outputs(0))
        z[:, head] = traced.outputs(0)[:, head]
        expected = merge(z) @ model.out.weight.detach().T * scale
        assert largest(traced.writes(0, head), expected) < 1e-12
    assert largest(traced.write_gradients(0), 4 * out.detach()) < 1e-12


def test_the_modules_of_torch_are_traced():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 16, batch_first=True, norm_first=True)
    model, x = layer.double().eval(), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    plain = model(x)
    with trace_heads(model) as traced:
        out = model(x)
        out.square().sum().backward()
    assert torch.equal(out, plain)
    assert traced.layers == ("self_attn",)
    z, width = traced.outputs(0), WIDTH // 4
    weight = model.self_attn.out_proj.weight.detach()
    for head in range(4):
        columns = slice(head * width, (head + 1) * width)
        expected = z[:, head] @ weight[:, columns].T
        assert largest(traced.writes("self_attn", head), expected) < 1e-12
    # the gradient by z is that by the write, times the projection
    expected = traced.write_gradients(0) @ weight
    assert largest(merge(traced.output_gradients(0)), expected) < 1e-12


def test_gradients_are_finite_differences():
    model, text = stir(CausalTransformer(Config(**SIZES))).double(), TEXT
    with trace_heads(model) as traced:
        model(text)[0, -1, 7].backward()
    for layer, head in ((0, 1), (1, 3)):
        step = 1e-5 * torch.randn_like(traced.outputs(layer)[:, head])

        def move(z, sign, head=head, step=step):
            z = z.clone()
            z[:, head] += sign * step
            return z

        ends = []
        for sign in (1, -1):
            with (
                torch.no_grad(),
                patch_heads(model, partial(move, sign=sign), [(layer, head)]),
            ):
                ends.append(float(model(text)[0, -1, 7]))
        expected = (ends[0] - ends[1]) / 2
        slope = traced.output_gradients(layer)[:, head]
        assert abs(float((slope * step).sum()) - expected) < 1e-5 * abs(expected)
        # an output moves the measure as far as its write does
        assert abs(expected) > 1e-9


def test_what_was_not_traced_is_said():
    model, text = stir(CausalTransformer(Config(**SIZES))), TEXT
    with trace_heads(model) as traced:
        model(text)
    with pytest.raises(OptionError, match=r"no gradient: call \.backward\(\)"):
        traced.output_gradients(0)
    with pytest.raises(OptionError, match=r"no gradient: call \.backward\(\)"):
        traced.write_gradients(0)
    with pytest.raises(OptionError, match="no layer 9; traced were"):
        traced.outputs(9)
    with pytest.raises(OptionError, match="has 4 heads, there is no head 4"):
        traced.writes(1, 4)
    with torch.no_grad(), trace_heads(model) as traced:
        model(text)
    assert traced.outputs(0).shape == (1, 4, 6, 6)
    with pytest.raises(OptionError, match=r"with gradients, not under torch\.no_grad"):
        traced.writes(0, 1)
    with trace_heads(model) as traced:
        model(text)
        model(text)
    with pytest.raises(OptionError, match="in several forward passes"):
        traced.outputs(0)
    assert not ACTIVE
    assert not any(x._forward_hooks for x in model.modules())


@pytest.mark.parametrize("name", ["llama", "llama-eager", "bloom"])
def test_outputs_are_those_that_the_model_goes_on_with_in_any_nesting(name):
    family, model, inputs = open_family(name)
    source, layer = record(model, change_inputs(inputs)), family.layers[1]
    changes = [
        partial(patch_heads, model, source, [(1, 1)]),
        partial(knock_out, model, [(1, 1)]),
    ]
    if name != "bloom":
        changes.append(partial(patch_heads, model, source, [(1, 1)], parts="v"))
    with torch.no_grad(), trace_heads(model) as plain:
        model(**inputs)
    caught, undo = catch_inputs(model, layer, family.out)
    for change in changes:
        for outside in (True, False):
            trace = trace_heads(model)
            order = (trace, change()) if outside else (change(), trace)
            with order[0] as one, order[1] as other:
                model(**inputs)
            traced = one if outside else other
            z = traced.outputs(1)  # (B, H, N, D)
            entered = caught[-1].detach()
            assert torch.equal(z.transpose(1, 2).flatten(2), entered)
            assert largest(z[:, 1], plain.outputs(1)[:, 1]) > 1e-3
            writes = sum(traced.writes(1, head) for head in range(4))
            weight = find_projection(model, layer, family.out).weight.detach()
            assert largest(writes, entered @ weight.T) < 1e-4
    undo()


def test_layers_of_linear_attention_are_left_out_of_traces():
    """They have no weights; an ablation of all heads names them instead."""
    sizes = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    sizes |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    kinds = ["linear_attention", "full_attention"]
    options = {**GROUPED, **sizes, "layer_types": kinds}
    model = Family("Qwen3NextForCausalLM", options, (), "").build()
    text, other = tokens(8)[:, None]
    with torch.no_grad(), watch(model, keep="qkv") as source:
        model(other)
    with trace_heads(model) as traced:
        model(text)
    assert traced.layers == ("model.layers.1.self_attn",)

    def measure(logits):
        return logits[:, -1, 5]

    found = attribute_heads(model, text, source, measure)
    searched = search_heads(model, text, source, measure)
    assert found.layers == searched.layers == traced.layers
    assert attribute_weights(model, text, measure).heads.shape == (1, 4)
    with (
        torch.no_grad(),
        pytest.raises(OptionError, match="linear_attn ran, but its attention was not"),
        knock_out(model),
    ):
        model(text)
