"""Attention flow and rollout of records, against dense graphs and products."""

from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
import torch
from test_text_rollout import roll_densely
from test_text_tint import N, draw
from transformers import T5Config, T5ForConditionalGeneration

import regard
from regard.errors import OptionError
from regard.masks.patterns import causal, window
from regard.nn.decoder import CausalTransformer
from regard.plain.config import Config
from regard.stats import attention_flow as flows
from regard.stats import maximize_flow, roll_out


def draw_layers(n, count, mask=None):
    return [draw(i, n=(n, n), mask=mask) for i in range(count)]


def solve_densely(records, token, sink):
    """Return the maximum flow, by another library and without rounding."""
    graph = nx.DiGraph()
    for number, record in enumerate(records, 1):
        mean = (record.weights().numpy().mean(0) + np.eye(record.shape[1])) / 2
        for i, j in zip(*mean.nonzero(), strict=True):
            graph.add_edge((number, i), (number - 1, j), capacity=float(mean[i, j]))
    return nx.maximum_flow_value(graph, (len(records), token), (0, sink))


@pytest.mark.parametrize("mask", [None, causal(), causal() & window(3)])
def test_a_flow_is_that_of_the_dense_graph(mask):
    records = draw_layers(9, 3, mask)
    found = maximize_flow(records, 8, edges=9)
    right = np.array([solve_densely(records, 8, sink) for sink in range(9)])
    np.testing.assert_allclose(found.low, right, atol=1e-7)
    np.testing.assert_allclose(found.high, right, atol=1e-7)
    assert (found.low <= right + 1e-12).all()
    assert (right <= found.high + 1e-12).all()
    # a flow is not less than what a rollout sends along the same edges
    assert (right >= roll_out(records, 8) - 1e-12).all()
    assert right.max() > 0.1


@pytest.mark.parametrize("edges", [1, 2, 5])
def test_with_fewer_edges_the_flow_lies_between_the_bounds(edges):
    records = draw_layers(12, 3)
    found = maximize_flow(records, 7, edges=edges)
    right = np.array([solve_densely(records, 7, sink) for sink in range(12)])
    assert (found.low <= right + 1e-12).all()
    assert (right <= found.high + 1e-12).all()
    assert (found.high - found.low).max() > 1e-3
    assert (found.high <= 1 + 1e-7).all()
    assert edges < 5 or found.low.sum() > right.sum() / 2  # the largest are kept


def test_weights_are_read_in_strips(monkeypatch):
    records = draw_layers(9, 2, causal())
    whole = maximize_flow(records, 8, edges=3)
    monkeypatch.setattr(flows, "STRIP", 6 * 9 * 2)
    strips = maximize_flow(records, 8, edges=3)
    assert np.array_equal(whole.low, strips.low)
    assert np.array_equal(whole.high, strips.high)


def test_a_rollout_is_a_row_of_the_product():
    records = [draw(i, mask=x) for i, x in enumerate((causal(), causal(), None))]
    np.testing.assert_allclose(roll_out(records, 60), roll_densely(records)[60])
    assert abs(roll_out(records, N - 1).sum() - 1) < 1e-12


def test_what_has_no_flow_is_refused():
    records = draw_layers(9, 2)
    with pytest.raises(OptionError, match="no token 9; the records have tokens 0 to 8"):
        maximize_flow(records, 9)
    with pytest.raises(OptionError, match="no product of these layers: it needs at"):
        roll_out(records[:1], 3)
    for edges in (0, 2.5, True, "8"):
        message = f"edges={edges!r}, expected a whole number, 1 or more"
        with pytest.raises(OptionError, match=message):
            maximize_flow(records, 3, edges=edges)
    assert maximize_flow(records, 3, edges=np.int64(9)).low.shape == (9,)


def name_layers(*names):
    return [
        replace(record, name=name)
        for record, name in zip(draw_layers(5, len(names)), names, strict=True)
    ]


def test_the_stacks_of_an_encoder_and_a_decoder_have_no_product():
    """Texts of equal length: all layers have the same positions."""
    config = T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=16, num_layers=2)
    config.num_heads = 4
    model = T5ForConditionalGeneration(config).eval()
    text = torch.arange(1, 7)[None]
    with torch.no_grad(), regard.watch(model) as seen:
        model(input_ids=text, decoder_input_ids=text)
    layers = seen.layer(slice(None))
    assert len(layers) == 6
    encoder = [x for x in layers if x.name.startswith("encoder")]
    assert roll_out(encoder, 5).sum() == pytest.approx(1, abs=1e-5)
    with pytest.raises(OptionError, match="are of different stacks; choose the layers"):
        roll_out([x for x in layers if "EncDec" not in x.name], 5)
    for some in (layers, [x for x in layers if x.name.startswith("decoder")]):
        with pytest.raises(OptionError, match="there is no product of these layers"):
            maximize_flow(some, 5)


@pytest.mark.parametrize(
    "names",
    [
        ("layers.0.self_attn", "layers.0.multihead_attn"),
        ("layers.0.self_attn", "layers.0.encoder_attn"),
        ("h.0.attn", "h.0.crossattention"),
        ("vision_model.encoder.layers.0", "text_model.encoder.layers.0"),
    ],
)
def test_layers_over_two_sequences_are_known_by_their_names(names):
    with pytest.raises(OptionError, match="choose the layers of one"):
        roll_out(name_layers(*names), 3)


@pytest.mark.parametrize(
    "names",
    [
        ("layers.0.multihead_attn", "layers.1.multihead_attn"),
        ("bert.encoder.layer.0", "bert.encoder.layer.1"),
        ("cross_encoder.0", "cross_encoder.1"),
        ("contextual.0", "first"),
        ("shared#1", "shared#2"),
    ],
)
def test_the_layers_of_one_stack_have_a_product_whatever_it_is_called(names):
    assert roll_out(name_layers(*names), 3).sum() == pytest.approx(1)


def test_the_records_of_two_texts_have_no_product():
    config = Config(vocabulary=40, context=16, width=16, layers=2, heads=2)
    model = CausalTransformer(config).eval()
    with torch.no_grad(), regard.watch(model) as seen:
        model(torch.arange(12).reshape(2, 6))
    with pytest.raises(OptionError, match=r"more than once.*sequence=0"):
        roll_out(seen.recording.records, 5)
    one = seen.layer(slice(None), sequence=1)
    assert roll_out(one, 5).sum() == pytest.approx(1, abs=1e-5)
