"""Attention as people write it by hand: a softmax, products, and what comes after."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

WIDTH, HEADS = 24, 3


class Written(nn.Module):
    """A layer with its own softmax; `join` says how weights and values are multiplied."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.project(self.join(weights, v), x)

    def join(self, weights, v):
        return (weights @ v).transpose(1, 2).flatten(2)  # (B, N, width)

    def project(self, z, _x):
        return self.out(z)


class ByEinsum(Written):
    def join(self, weights, v):
        return torch.einsum("bhqk,bhkd->bqhd", weights, v).flatten(2)


class ByFoldedProduct(Written):
    def join(self, weights, v):
        z = torch.bmm(weights.flatten(0, 1), v.flatten(0, 1))
        return z.unflatten(0, weights.shape[:2]).transpose(1, 2).flatten(2)


class ByKernel(Written):
    """With the kernel of torch, and a gate before the projection."""

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(z.transpose(1, 2).flatten(2), x)

    def project(self, z, x):
        return self.out(z * torch.sigmoid(x))


class WithAdapter(Written):
    """As with LoRA: a second product of the same outputs is added."""

    def __init__(self):
        super().__init__()
        self.out = Adapted()


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH)

    def forward(self, x):
        return self.base(x) + 2 * self.up(self.down(x))


class WithNorm(Written):
    """A norm between the heads and their projection."""

    def project(self, z, _x):
        return self.out(F.layer_norm(z, z.shape[-1:]))


class Twice(Written):
    """The weights are used twice."""

    def join(self, weights, v):
        return (weights @ v + weights @ v.square()).transpose(1, 2).flatten(2)


class Scaled(Written):
    """The weights are changed after the softmax."""

    def join(self, weights, v):
        return super().join(2 * weights, v)


class Decoder(nn.Module):
    """Two layers of one kind, with norms before them."""

    def __init__(self, kind):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, layer in zip(self.norms[:2], self.layers, strict=True):
            x = x + layer(norm(x))
        return self.norms[2](x) @ self.embed.weight.T


class OutputsOnly(Written):
    """The projection is somewhere else."""

    def project(self, z, _x):
        return z


class ProbedDecoder(Decoder):
    """A probe reads the outputs of heads after their projection, and changes nothing."""

    def __init__(self):
        super().__init__(OutputsOnly)
        self.outs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.probe = nn.Linear(WIDTH, 2)

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, layer, out in zip(
            self.norms[:2], self.layers, self.outs, strict=True
        ):
            z = layer(norm(x))
            x = x + out(z)
            self.probe(z)
        return self.norms[2](x) @ self.embed.weight.T


def make(kind, seed=0):
    torch.manual_seed(seed)
    return Decoder(kind).double().eval()
