"""Interventions in attention that is written by hand, with its own softmax."""

import pytest
import torch
from layers_by_hand import (
    HEADS,
    WIDTH,
    ByEinsum,
    ByFoldedProduct,
    ByKernel,
    ProbedDecoder,
    Scaled,
    Twice,
    WithAdapter,
    WithNorm,
    Written,
    make,
)

from regard.ablate import knock_out, patch_heads, trace_heads
from regard.ablate.active import ACTIVE
from regard.ablate.direct_logits import attribute_logits
from regard.errors import OptionError
from regard.seen import watch

TEXT, OTHER = torch.tensor([[1, 5, 2, 9, 4]]), torch.tensor([[3, 8, 2, 1, 7]])
WRITTEN = [Written, ByEinsum, ByFoldedProduct, ByKernel, WithAdapter]
D = WIDTH // HEADS


def catch(model):
    """Keep what each layer gives to `project`: a list of z, (B, N, H D)."""
    kept = []
    for layer in model.layers:
        original = layer.project

        def keep(z, x, original=original):
            kept.append(z)
            return original(z, x)

        layer.project = keep
    return kept


def put(model, at, head, values):
    """Replace one head of one layer by hand."""
    layer = model.layers[at]
    original = layer.project

    def change(z, x):
        z = z.clone()
        z[..., head * D : (head + 1) * D] = values[..., head * D : (head + 1) * D]
        return original(z, x)

    layer.project = change


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_head_is_replaced(kind):
    model = make(kind)
    with torch.no_grad():
        with watch(model, keep="qkv") as source:
            model(OTHER)
        with patch_heads(model, source, [(1, 2)]):
            found = model(TEXT)
        with patch_heads(model, lambda z: z + 1, [(0, 1)]), knock_out(model, [(0, 1)]):
            gone = model(TEXT)
        hand = make(kind)
        kept = catch(hand)
        hand(OTHER)
        hand = make(kind)
        put(hand, 1, 2, kept[1])
        assert (found - hand(TEXT)).abs().max() < 1e-12
        assert (found - model(TEXT)).abs().max() > 1e-2
        hand = make(kind)
        put(hand, 0, 1, torch.zeros_like(kept[0]))
        assert (gone - hand(TEXT)).abs().max() < 1e-12
    assert not ACTIVE


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_a_head_writes_is_what_its_layer_loses_without_it(kind):
    model = make(kind)
    with trace_heads(model) as traced:
        logits = model(TEXT)
    assert torch.equal(logits, model(TEXT))
    logits.square().sum().backward()  # the graph may be gone
    for at, layer in enumerate(traced.layers):
        for head in range(HEADS):
            lost = []
            model.layers[at].register_forward_hook(
                lambda _module, _args, out, lost=lost: lost.append(out.detach())
            )
            with torch.no_grad():
                model(TEXT)
                with knock_out(model, [(at, head)]):
                    model(TEXT)
            expected = lost[0] - lost[1]
            assert (traced.writes(layer, head) - expected).abs().max() < 1e-12
            assert expected.abs().max() > 1e-2


def test_a_probe_is_not_the_projection():
    torch.manual_seed(0)
    model = ProbedDecoder().eval()
    with trace_heads(model) as traced:
        model(TEXT)
    for at, out in enumerate(model.outs):
        z = traced.outputs(at).transpose(1, 2).flatten(2)
        part = slice(D, 2 * D)
        expected = (z[..., part] @ out.weight[:, part].T).detach()
        assert (traced.writes(at, 1) - expected).abs().max() < 1e-6


@pytest.mark.parametrize("kind", WRITTEN)
def test_direct_logits_are_those_of_the_frozen_last_norm(kind):
    model = make(kind)
    found = attribute_logits(model, TEXT, 7, versus=3)
    with trace_heads(model) as traced:
        logits = model(TEXT)[0, -1]
    kept = []
    model.norms[2].register_forward_pre_hook(lambda _, x: kept.append(x[0][0, -1]))
    with torch.no_grad():
        model(TEXT)
    x, norm = kept[0], model.norms[2]
    size = (x.var(correction=0) + norm.eps).sqrt()
    unembed = (model.embed.weight[7] - model.embed.weight[3]).detach()
    for at, layer in enumerate(traced.layers):
        for head in range(HEADS):
            write = traced.writes(layer, head)[0, -1]
            expected = ((write - write.mean()) / size * norm.weight.detach()) @ unembed
            assert abs(float(found.heads[at, head]) - float(expected)) < 1e-12
    assert abs(found.logit - float((logits[7] - logits[3]).detach())) < 1e-12
    assert abs(float(found.heads.sum()) + found.rest - found.logit) < 1e-12


def test_what_cannot_be_told_is_refused():
    for kind, why in ((Twice, "in 2 products"), (Scaled, "in 0 products")):
        model = make(kind)
        with (
            torch.no_grad(),
            pytest.raises(
                OptionError, match=f"softmax of its own.*{why}, expected one"
            ),
            patch_heads(model, lambda z: z / 2, [(0, 1)]),
        ):
            model(TEXT)
    model = make(WithNorm)
    with trace_heads(model) as traced:
        model(TEXT)
    assert traced.outputs(0).shape == (1, HEADS, 5, D)
    with pytest.raises(OptionError, match="more than a linear map, such as a norm"):
        traced.writes(0, 1)
    with pytest.raises(OptionError, match="not a linear function of what"):
        attribute_logits(model, TEXT, 7)
    assert not ACTIVE
