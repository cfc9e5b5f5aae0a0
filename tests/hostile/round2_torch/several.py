"""Models that are called several times in one watch, and axes of equal sizes."""

import math

import torch
import torch.nn.functional as F
from oracle import check, tap
from torch import nn


class Stack(nn.Module):
    """Two layers of standard attention, bidirectional or causal."""

    def __init__(self, h=3, d=12, layers=2, causal=False, gain=2.0, sdpa=False):
        super().__init__()
        w = h * d
        self.h, self.d, self.causal, self.sdpa = h, d, causal, sdpa
        self.qkv = nn.ModuleList(nn.Linear(w, 3 * w) for _ in range(layers))
        self.o = nn.ModuleList(nn.Linear(w, w) for _ in range(layers))
        for m in self.qkv:
            nn.init.normal_(m.weight, std=gain / math.sqrt(w))
        self.attn = nn.ModuleList(One(self, i) for i in range(layers))

    def forward(self, x):
        for m in self.attn:
            x = F.layer_norm(x + m(x), x.shape[-1:])
        return x


class One(nn.Module):
    def __init__(self, net, i):
        super().__init__()
        self.i, self.net = i, [net]

    def forward(self, x):
        net = self.net[0]
        b, n, _ = x.shape
        y = net.qkv[self.i](x).view(b, n, 3, net.h, net.d).permute(2, 0, 3, 1, 4)
        q, k, v = y
        s = q @ k.mT * net.d**-0.5
        if net.causal:
            hide = ~torch.ones(n, n, dtype=torch.bool).tril()
            s = s.masked_fill(hide, -math.inf)
        w = s.softmax(-1)
        tap(f"attn.{self.i}", w)
        if net.sdpa:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=net.causal)
        else:
            out = w @ v
        return net.o[self.i](out.transpose(1, 2).reshape(b, n, -1))


def calls(name, cut, edit=None, batch=1, **kw):
    def make():
        net = Stack(**kw)
        if edit:
            edit(net)
        x = torch.randn(batch, 12, net.h * net.d)

        def call():
            with torch.no_grad():
                return [net(y) for y in cut(x)]

        return net, call

    check(name, make, joined=True)


def dead_first_head(net):
    for m in net.qkv:
        with torch.no_grad():
            m.weight[net.h * net.d : net.h * net.d + net.d] = 0
            m.bias[net.h * net.d : net.h * net.d + net.d] = 0


def constant_first_features(net):
    for m in net.qkv:
        with torch.no_grad():
            m.weight[net.h * net.d : net.h * net.d + 8] = 0


for causal in (False, True):
    c = "causal" if causal else "bidirectional"
    calls(f"{c}: the same input twice", lambda x: [x, x], causal=causal)
    calls(f"{c}: two inputs", lambda x: [x, x + 1], causal=causal)
    calls(
        f"{c}: growing inputs", lambda x: [x[:, :n] for n in (4, 6, 9)], causal=causal
    )
    calls(
        f"{c}: shrinking inputs", lambda x: [x[:, :n] for n in (9, 6, 4)], causal=causal
    )
    calls(
        f"{c}: sliding inputs",
        lambda x: [x[:, i : i + 6] for i in range(4)],
        causal=causal,
    )
    calls(f"{c}: suffixes", lambda x: [x[:, i:] for i in range(3)], causal=causal)
    calls(
        f"{c}: one token changed",
        lambda x: [x, torch.cat([x[:, :-1], x[:, :1]], 1)],
        causal=causal,
    )
    calls(f"{c}: sequences exchanged", lambda x: [x, x.flip(0)], batch=3, causal=causal)
    calls(f"{c}: fewer sequences", lambda x: [x, x[1:]], batch=3, causal=causal)
    calls(
        f"{c}: first head dead, two inputs",
        lambda x: [x, x + x.flip(1)],
        edit=dead_first_head,
        causal=causal,
    )
    calls(
        f"{c}: first head dead, growing",
        lambda x: [x[:, :5], x.flip(1)],
        edit=dead_first_head,
        causal=causal,
    )
    calls(
        f"{c}: first head dead, shrinking",
        lambda x: [x, x.flip(1)[:, :5]],
        edit=dead_first_head,
        causal=causal,
    )
    calls(
        f"{c}: first head dead, batch exchanged",
        lambda x: [x, x.flip(0)],
        edit=dead_first_head,
        batch=3,
        causal=causal,
    )
    calls(
        f"{c}: first eight features constant",
        lambda x: [x, x + x.flip(1)],
        edit=constant_first_features,
        causal=causal,
    )
    calls(
        f"{c}: first eight constant, batch",
        lambda x: [x, x + x.flip(1)],
        edit=constant_first_features,
        causal=causal,
        batch=2,
    )
    calls(
        f"{c}: constant tokens",
        lambda x: [x[:, :1].expand(1, n, -1) for n in (4, 6)],
        causal=causal,
    )
    calls(
        f"{c}: a common padding token in front",
        lambda x: [torch.cat([x[:, :3], x[:, i : i + 4]], 1) for i in (4, 6)],
        causal=causal,
    )
    calls(f"{c}: zeros, then data", lambda x: [x * 0, x], causal=causal)
    calls(f"{c}: first token only, then all", lambda x: [x[:, :1], x], causal=causal)
    calls(f"{c}: all, then the last token", lambda x: [x, x[:, -1:]], causal=causal)
    calls(f"{c}: all, then the first token", lambda x: [x, x[:, :1]], causal=causal)
    calls(
        f"{c}: fused kernel, sliding",
        lambda x: [x[:, i : i + 6] for i in range(4)],
        causal=causal,
        sdpa=True,
    )
    calls(
        f"{c}: fused kernel, growing",
        lambda x: [x[:, :n] for n in (4, 6, 9)],
        causal=causal,
        sdpa=True,
    )
    calls(
        f"{c}: fused kernel, one dead head",
        lambda x: [x, x + x.flip(1)],
        causal=causal,
        sdpa=True,
        edit=dead_first_head,
    )
