"""Attention flow and rollout of records, against dense graphs and products."""

import networkx as nx
import numpy as np
import pytest
from test_text_rollout import roll_densely
from test_text_tint import N, draw

from regard.errors import OptionError
from regard.masks.patterns import causal, window
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
    with pytest.raises(OptionError, match="edges=0, expected 1 or more"):
        maximize_flow(records, 3, edges=0)
