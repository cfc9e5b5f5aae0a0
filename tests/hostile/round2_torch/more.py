"""More: detours of scores, reduced keys, beams by hand, near repetitions."""

import math

import regard
import torch
import torch.nn.functional as F
from oracle import check, tap
from torch import nn

B, H, N, D = 2, 3, 8, 8
E = H * D
S = D**-0.5


class Net(nn.Module):
    def __init__(self, style):
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(E, 3 * E) for _ in range(2))
        self.inner, self.style = nn.ModuleList([Part(style), Part(style)]), style
        for m in self.qkv:
            nn.init.normal_(m.weight, std=2 / math.sqrt(E))

    def forward(self, x):
        for i, m in enumerate(self.qkv):
            q, k, v = m(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
            y = self.inner[i](q, k, v, f"inner.{i}")
            x = F.layer_norm(x + y.transpose(1, 2).flatten(2), (E,))
        return x


class Part(nn.Module):
    def __init__(self, style):
        super().__init__()
        self.style = style

    def forward(self, *args):
        return self.style(*args)


def situation(name, **kw):
    def wrap(style):
        def make():
            net, x = Net(style), torch.randn(B, N, E)
            return net, lambda: torch.no_grad()(net)(x)

        check(name, make, **kw)

    return wrap


@situation("scores through numpy and back")
def _(q, k, v, name):
    s = (q @ k.mT * S).numpy() * 1.5
    w = torch.from_numpy(s).softmax(-1)
    tap(name, w)
    return w @ v


@situation("scores through a list and back, the first freed")
def _(q, k, v, name):
    s = q @ k.mT
    values = [[y.flip(-1).tolist() for y in x] for x in s]
    del s
    w = (torch.tensor(values) * S).softmax(-1)
    tap(name, w)
    return w @ v


@situation("weights through numpy and back")
def _(q, k, v, name):
    w = (q @ k.mT * S).softmax(-1)
    tap(name, w)
    w = torch.from_numpy(w.numpy()[:, :, ::-1].copy())
    return w @ v


@situation("heads reordered through numpy before the product")
def _(q, k, v, name):
    s = torch.from_numpy((q @ k.mT * S).numpy()[:, ::-1].copy())
    w = s.softmax(-1)
    tap(name, w)
    return w @ v


@situation("sequences and heads exchanged by a copy (H, B)")
def _(q, k, v, name):
    q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
    w = (q @ k.mT * S).softmax(-1)
    tap(name, w.transpose(0, 1))
    return (w @ v).transpose(0, 1)


@situation("heads in the last axis by a copy")
def _(q, k, v, name):
    q, k = (x.permute(0, 2, 3, 1).contiguous() for x in (q, k))
    s = (q[:, :, None] * k[:, None]).sum(3) * S
    w = s.softmax(2)
    tap(name, w.permute(0, 3, 1, 2))
    return torch.einsum("bijh,bhjd->bhid", w, v)


@situation("scores of both layers in one tensor")
def _(q, k, v, name):
    big = torch.zeros(2, *q.shape[:2], N, N)
    big[0] = q @ k.mT * S
    big[1] = q.flip(1) @ k.mT * S
    w = big.softmax(-1)
    tap(name, w[0])
    tap(name, w[1])
    return w[0] @ v + w[1] @ v


@situation("two queries stacked: one softmax, two products")
def _(q, k, v, name):
    w = (torch.cat([q, q + 1], 2) @ k.mT * S).softmax(-1)
    tap(name, w)
    out = w @ v
    return out[:, :, :N] + out[:, :, N:]


@situation("weights split by rows and used apart")
def _(q, k, v, name):
    w = (q @ k.mT * S).softmax(-1)
    tap(name, w)
    a, b = w.chunk(2, 2)
    return torch.cat([a @ v, b @ v], 2)


@situation("weights split by heads and used apart")
def _(q, k, v, name):
    w = (q @ k.mT * S).softmax(-1)
    tap(name, w)
    return torch.cat([w[:, i : i + 1] @ v[:, i : i + 1] for i in range(H)], 1)


@situation("weights split by keys and used apart")
def _(q, k, v, name):
    w = (q @ k.mT * S).softmax(-1)
    tap(name, w)
    return w[..., :3] @ v[:, :, :3] + w[..., 3:] @ v[:, :, 3:]


@situation("only some rows of the weights are used")
def _(q, k, v, name):
    w = (q @ k.mT * S).softmax(-1)
    tap(name, w)
    return F.pad(w[:, :, :3] @ v, (0, 0, 0, N - 3))


@situation("only some heads of the weights are used")
def _(q, k, v, name):
    w = (q @ k.mT * S).softmax(-1)
    tap(name, w)
    return torch.cat([w[:, :2] @ v[:, :2], v[:, 2:]], 1)


@situation("heads rolled after the softmax")
def _(q, k, v, name):
    w = (q @ k.mT * S).softmax(-1)
    tap(name, w)
    return w.roll(1, 1) @ v


@situation("sequences flipped after the softmax")
def _(q, k, v, name):
    w = (q @ k.mT * S).softmax(-1)
    tap(name, w)
    return w.flip(0) @ v


@situation("mean of the heads takes the values")
def _(q, k, v, name):
    w = (q @ k.mT * S).softmax(-1)
    tap(name, w)
    return w.mean(1, keepdim=True) @ v


@situation("attention rollout: a product of weights")
def _(q, k, v, name):
    w = (q @ k.mT * S).softmax(-1)
    tap(name, w)
    return (w @ w) @ v


@situation("power iteration: weights applied twice")
def _(q, k, v, name):
    w = (q @ k.mT * S).softmax(-1)
    tap(name, w)
    return w @ (w @ v)


@situation("float64 softmax of float32 scores")
def _(q, k, v, name):
    w = (q @ k.mT * S).double().softmax(-1).float()
    tap(name, w)
    return w @ v


@situation("keys in half, queries in float")
def _(q, k, v, name):
    k = k.half().float()
    w = (q @ k.mT * S).softmax(-1)
    tap(name, w)
    return w @ v


class Reduced(nn.Module):
    """One narrow head with pooled keys: 4 queries for each key."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(48, 12), nn.Linear(48, 12)
        self.v = nn.Linear(48, 48)
        nn.init.normal_(self.q.weight, std=0.5)

    def forward(self, x):
        y = x.unflatten(1, (4, 4)).mean(2)
        w = (self.q(x) @ self.k(y).mT).softmax(-1)
        tap("", w[:, None])
        return w @ self.v(y)


def no_false_alarm(model, seen, taps):
    notes = [c.note for c in seen.coverage() if "counted as queries" in c.note]
    return [f"false alarm: {notes}"] if notes else []


def reduced():
    net, x = Reduced(), torch.randn(B, 16, 48)
    return net, lambda: torch.no_grad()(net)(x)


check("pooled keys and one narrow head", reduced, after=no_false_alarm)
del regard
