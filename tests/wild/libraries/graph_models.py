"""PyTorch Geometric: a softmax over the edges that end in a node is no ATen softmax."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from wild.case import Case
from wild.libraries.recipe import Recipe, feed, list_recipes, load
from wild.stir import Run


def graph(n: int = 10, edges: int = 40) -> tuple:
    """Draw nodes (n, 16) and edges (2, E)."""
    return torch.randn(n, 16), torch.randint(0, n, (2, edges))


def make_global() -> tuple[nn.Module, Run]:
    """Make a GPS layer: message passing and attention over all nodes of a graph."""
    conv = load("torch_geometric.nn:GATConv")(16, 16)
    model = load("torch_geometric.nn:GPSConv")(16, conv, heads=4)
    batch = torch.tensor([0] * 4 + [1] * 6)
    return model, feed((*graph(), batch))


def make_pool(name: str, options: dict[str, Any]) -> tuple[nn.Module, Run]:
    """Make an aggregation of the nodes of two graphs that attends."""
    model = load(f"torch_geometric.nn:{name}")(**options)
    nodes, index = torch.randn(10, 16), torch.tensor([0] * 4 + [1] * 6)
    return model, lambda model: model(nodes, index)


def conv(name: str, **options: Any) -> Recipe:
    """Return the recipe of one convolution over a graph."""
    path = f"torch_geometric.nn:{name}"
    return Recipe(path, {"in_channels": 16, "out_channels": 8} | options, graph)


MODELS: dict[str, Any] = {
    "gat": conv("GATConv", heads=4),
    "gatv2": conv("GATv2Conv", heads=4),
    "transformer": conv("TransformerConv", heads=4),
    "super-gat": conv("SuperGATConv", heads=4),
    "agnn": Recipe("torch_geometric.nn:AGNNConv", {}, graph),
    "feast": conv("FeaStConv", heads=4),
    "gat-net": Recipe(
        "torch_geometric.nn:GAT",
        {"in_channels": 16, "hidden_channels": 16, "num_layers": 2, "heads": 4},
        graph,
    ),
    "gps": make_global,
    "set-transformer": partial(
        make_pool, "SetTransformerAggregation", {"channels": 16, "heads": 4}
    ),
    "set2set": partial(
        make_pool, "Set2Set", {"in_channels": 16, "processing_steps": 2}
    ),
    "graph-multiset": partial(
        make_pool, "GraphMultisetTransformer", {"channels": 16, "k": 4, "heads": 4}
    ),
    "softmax-aggregation": partial(make_pool, "SoftmaxAggregation", {"learn": True}),
}


def list_cases() -> Iterable[Case]:
    """Yield every model of the table."""
    return list_recipes("torch-geometric", MODELS, needs=("torch_geometric",))
