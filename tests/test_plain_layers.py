"""Layers that cannot attend are not observed, and what they return is still traced."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations

import regard
from regard.lens.observer import Observer
from regard.lens.plain_layers import cannot_attend


class Norm(nn.Module):
    """RMSNorm as models write it."""

    def __init__(self, width=8):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        kind = x.dtype
        x = x.to(torch.float32)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))).to(kind)


class Softmax(nn.Module):
    def forward(self, x):
        return x.softmax(-1)


class Product(nn.Module):
    weight = torch.eye(8)

    def forward(self, x):
        return x @ self.weight


class Reversed(nn.Module):
    def forward(self, x):
        return torch.add(x[..., ::-1], 0)


class Given(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = F.softmax

    def forward(self, x):
        return self.act(x, -1)


class Own(nn.Linear):
    pass


def patch(module):
    module.forward = module.forward
    return module


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(8, 8), True),
        (nn.LayerNorm(8), True),
        (nn.SiLU(), True),
        (Norm(), True),
        (nn.Softmax(-1), False),
        (nn.MultiheadAttention(8, 2), False),
        (nn.Sequential(nn.Linear(8, 8)), False),
        (parametrizations.weight_norm(nn.Linear(8, 8)), False),
        (patch(nn.Linear(8, 8)), False),
        *((kind(), False) for kind in (Softmax, Product, Reversed, Given)),
        (Own(8, 8), False),
    ],
)
def test_it_is_known_which_layers_cannot_attend(module, expected):
    assert cannot_attend(module) is expected


class Attention(nn.Module):
    """Four heads whose queries and keys are normed."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.norm = Norm()

    def split(self, x):
        return self.norm(x.unflatten(-1, (4, 8))).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        self.weights = (q @ k.mT / 8**0.5).softmax(-1)
        return self.out((self.weights @ v).transpose(1, 2).flatten(2))


def count_operators(monkeypatch):
    seen, before = [], Observer.__torch_dispatch__

    def dispatch(observer, func, *rest):
        seen.append(str(func))
        return before(observer, func, *rest)

    monkeypatch.setattr(Observer, "__torch_dispatch__", dispatch)
    return seen


def watch_twice(model, x):
    with torch.no_grad():
        plain = model(x)
        with regard.watch(model) as seen:
            assert torch.equal(model(x), plain)
    return seen


def test_what_they_return_is_traced_and_they_are_not_observed(monkeypatch):
    operators, model = count_operators(monkeypatch), Attention()
    seen = watch_twice(model, torch.randn(2, 5, 32))
    (record, other) = seen.records
    assert record.weights().shape == (4, 5, 5)
    for i, x in enumerate((record, other)):
        torch.testing.assert_close(x.weights(), model.weights[i])
    assert "aten._softmax.default" in operators
    assert not [x for x in operators if "addmm" in x or "rsqrt" in x]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_in_such_a_layer_ends_its_rest(kind):
    class Failing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_):
            raise kind

    model, x = Attention(), torch.randn(1, 5, 32)
    right = model.norm._buffers["weight"] = model.norm._parameters.pop(
        "weight"
    ).detach()
    with torch.no_grad(), regard.watch(model) as seen:
        model.norm.weight = right.as_subclass(Failing)
        with pytest.raises(kind):
            model(x)
        model.norm.weight = right
        model(x)
    torch.testing.assert_close(seen.records[0].weights(), model.weights[0])


def test_weights_that_a_linear_layer_mixes_are_observed():
    class Talking(Attention):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            q, k, v = (self.split(y(x)) for y in (self.q, self.k, self.v))
            weights = (q @ k.mT / 8**0.5).softmax(-1)
            mixed = self.mix(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            return self.out((mixed @ v).transpose(1, 2).flatten(2))

    seen = watch_twice(Talking(), torch.randn(1, 5, 32))
    assert seen.coverage()[0].note or seen.coverage()[0].reason
