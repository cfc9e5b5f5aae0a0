"""Modules that look like attention, though no softmax is heard in them."""

import pytest
import torch
from torch import nn

from regard.run.suspects import looks_like_attention
from regard.seen import watch


class LinearAttention(nn.Module):
    """Attends without a softmax."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(8, 8))
        self.names = names

    def forward(self, x):
        for name in self.names:
            x = getattr(self, name)(x).relu()
        return x


class Mixer(LinearAttention):
    """The same, and its name does not tell."""


class AttentionOutput(Mixer):
    """The last layer of an attention, not one by itself."""


class Edges(nn.Module):
    """A layer of a graph."""

    def __init__(self):
        super().__init__()
        self.att_src = nn.Parameter(torch.ones(8))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (LinearAttention(["a"]), True),
        (AttentionOutput(["dense"]), False),
        (Mixer(["qkv", "out"]), True),
        (Mixer(["to_qkv"]), True),
        (Mixer(["in_proj_qkvz"]), True),
        (Mixer(["q_proj", "k_proj", "v_proj"]), True),
        (Mixer(["lin_query", "lin_key"]), True),
        (Mixer(["to_q", "to_kv"]), True),
        (Mixer(["q_proj"]), False),
        (Mixer(["key", "value", "dense"]), False),
        (Edges(), True),
        (nn.Linear(8, 8), False),
    ],
)
def test_attention_is_known_by_its_class_its_projections_or_its_parameters(
    module, expected
):
    assert looks_like_attention(module) == expected


def test_the_outermost_module_is_reported_once():
    inner = Mixer(["qkv"])
    model = nn.Sequential(nn.Linear(8, 8), LinearAttention(["a"]), nn.ReLU())
    model[1].inner = inner
    model[1].names.append("inner")
    with watch(model) as seen:
        model(torch.ones(2, 8))
    assert [x.name for x in seen.recording.coverage] == ["1"]
    assert seen.recording.coverage[0].reason == "it ran, but no softmax was heard in it"


def test_a_module_that_did_not_run_is_not_reported():
    model = nn.Sequential(nn.Linear(8, 8))
    model.spare = LinearAttention(["a"])
    with watch(model) as seen:
        model[0](torch.ones(2, 8))
    assert seen.recording.coverage == ()


class Selects(nn.Module):
    """Does something to its weights before a product takes them."""

    def __init__(self, change):
        super().__init__()
        self.qkv, self.change = nn.Linear(8, 24), change
        self.mix = nn.Conv2d(2, 2, 1)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / 2).softmax(-1)
        return self.change(self, weights, v)


class JoinHeads(nn.Module):
    """Puts the features of all heads side by side."""

    def forward(self, x):
        return x.transpose(1, 2).flatten(2)


def gather(_model, weights, v):
    rows = torch.tensor([3, 1]).expand(*weights.shape[:2], 2)
    return weights.gather(2, rows[..., None].expand(-1, -1, -1, 5)) @ v


def join(_model, weights, v):
    return torch.cat([weights[:, :, :2], weights.flip(2)], 2) @ v


def convolve(model, weights, v):
    return model.mix(weights) @ v


def sum_over_queries(_model, weights, v):
    return (weights / weights.sum(-2, keepdim=True)).mT @ v


def assign(_model, weights, v):
    hard = torch.zeros_like(weights).scatter_(2, weights.argmax(2, keepdim=True), 1.0)
    weights = hard - weights.detach() + weights  # as in GroupViT
    return (weights / weights.sum(-2, keepdim=True)).mT @ v


@pytest.mark.parametrize("change", [assign, gather, join, convolve, sum_over_queries])
def test_weights_that_are_moved_before_they_are_taken_are_told(change):
    torch.manual_seed(0)
    model = Selects(change)
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(3, 5, 8))
    (entry,) = seen.recording.coverage
    assert entry.attention
    assert entry.reason or "changed after the softmax" in entry.note


def test_what_two_modules_in_a_row_assign_is_told():
    """What the first gives is no weights, though a product made it from weights."""
    torch.manual_seed(0)
    model = nn.Sequential(Selects(assign), JoinHeads(), Selects(assign))
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(3, 5, 8))
    assert [x.name for x in seen.recording.coverage] == ["0", "2"]
    assert all(x.attention and x.reason for x in seen.recording.coverage)
