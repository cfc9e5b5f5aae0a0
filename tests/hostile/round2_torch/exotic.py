"""Attention of other fields: sets, slots, graphs, pointers, windows, recurrent nets."""

import math

import torch
import torch.nn.functional as F
from oracle import check, tap
from torch import nn

B, H, N, D = 2, 3, 8, 8
E = H * D


def sharp(*modules, gain=2.0):
    for m in modules:
        nn.init.normal_(m.weight, std=gain / math.sqrt(m.weight.shape[-1]))


def situation(name, joined=False, grads=False, tol=3e-5, inputs=None):
    def wrap(cls):
        def make():
            net = cls()
            x = inputs() if inputs else torch.randn(B, N, E)

            def call():
                with torch.set_grad_enabled(grads):
                    xs = x if isinstance(x, tuple) else (x,)
                    out = net.steps(*xs) if hasattr(net, "steps") else net(*xs)
                    if grads:
                        out.square().mean().backward()
                    return out

            return net, call

        check(name, make, joined=joined, grads=grads, tol=tol)
        return cls

    return wrap


class MAB(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
        self.q, self.k, self.v = (nn.Linear(E, E) for _ in range(3))
        self.o = nn.Linear(E, E)
        sharp(self.q, self.k)

    def forward(self, x, y):
        q, k, v = self.q(x), self.k(y), self.v(y)
        q_, k_, v_ = (torch.cat(t.split(D, 2), 0) for t in (q, k, v))
        a = torch.softmax(q_.bmm(k_.transpose(1, 2)) / math.sqrt(E), 2)
        tap(self.name, lambda: a.view(H, -1, *a.shape[1:]).transpose(0, 1))
        o = torch.cat((q_ + a.bmm(v_)).split(q.size(0), 0), 2)
        return o + F.relu(self.o(o))


@situation("set transformer: ISAB and PMA (official code)")
class Sets(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (MAB(n) for n in "abc")
        self.points = nn.Parameter(torch.randn(1, 4, E))
        self.seed = nn.Parameter(torch.randn(1, 1, E))

    def forward(self, x):
        h = self.a(self.points.repeat(len(x), 1, 1), x)
        x = self.b(x, h)
        return self.c(self.seed.repeat(len(x), 1, 1), x)


@situation("slot attention")
class Slots(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(E, E) for _ in range(3))
        self.gru, self.slots = nn.GRUCell(E, E), nn.Parameter(torch.randn(1, 4, E))
        sharp(self.q, self.k)

    def forward(self, x):
        k, v = self.k(x), self.v(x)
        slots = self.slots.expand(len(x), -1, -1)
        for _ in range(3):
            dots = torch.einsum("bid,bjd->bij", self.q(slots), k) * E**-0.5
            attn = dots.softmax(1) + 1e-8
            attn = attn / attn.sum(-1, keepdim=True)
            new = torch.einsum("bjd,bij->bid", v, attn)
            slots = self.gru(new.reshape(-1, E), slots.reshape(-1, E)).view_as(slots)
        return slots


@situation("additive attention of Bahdanau, in a loop of GRU steps")
class Bahdanau(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.GRU(E, E, batch_first=True)
        self.w, self.u, self.s = nn.Linear(E, E), nn.Linear(E, E), nn.Linear(E, 1)
        self.cell = nn.GRUCell(E, E)
        sharp(self.w, self.u, self.s)

    def forward(self, x):
        keys, h = self.enc(x)
        h = h[0]
        for _ in range(3):
            s = self.s(torch.tanh(self.w(h)[:, None] + self.u(keys)))
            w = s.transpose(1, 2).softmax(-1)
            tap("", w[:, None])
            h = self.cell(torch.bmm(w, keys)[:, 0], h)
        return h


@situation("Luong attention, in a loop of LSTM steps")
class Luong(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.LSTM(E, E, batch_first=True)
        self.w, self.cell = nn.Linear(E, E), nn.LSTMCell(E, E)
        sharp(self.w, gain=6)

    def forward(self, x):
        keys, (h, c) = self.enc(x)
        h, c = h[0], c[0]
        for _ in range(3):
            s = torch.bmm(keys, self.w(h).unsqueeze(2)).squeeze(2)
            w = F.softmax(s, dim=1)
            tap("", w[:, None, None])
            h, c = self.cell(torch.bmm(w.unsqueeze(1), keys).squeeze(1), (h, c))
        return h


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.cell = nn.Linear(E, E), nn.GRUCell(E, E)
        sharp(self.w, gain=4)

    def forward(self, h, keys):
        w = (self.w(h)[:, None] @ keys.mT).softmax(-1)
        tap("decoder", w[:, None])
        return self.cell((w @ keys)[:, 0], h)


@situation("a decoder module called step by step in one forward")
class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.decoder = nn.GRU(E, E, batch_first=True), Step()

    def forward(self, x):
        keys, h = self.enc(x)
        h = h[0]
        for _ in range(4):
            h = self.decoder(h, keys)
        return h


@situation("pointer network (weights are the output)")
class Pointer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(E, E), nn.Linear(E, E)
        sharp(self.q, self.k)

    def forward(self, x):
        return F.log_softmax(self.q(x) @ self.k(x).mT, -1)


@situation("mixture of experts: the gate is no attention")
class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(E, 4), nn.Parameter(torch.randn(4, E, E))

    def forward(self, x):
        g = self.gate(x).softmax(-1)
        y = torch.einsum("bnd,kde->bnke", x, self.experts)
        return torch.einsum("bnk,bnke->bne", g, y)


@situation("squeeze and excite, and a softmax over channels")
class Excite(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(E, E)

    def forward(self, x):
        return x * self.a(x.mean(1)).softmax(-1)[:, None]


@situation("gated pooling of instances (Ilse)")
class Ilse(nn.Module):
    def __init__(self):
        super().__init__()
        self.v, self.u, self.w = nn.Linear(E, 9), nn.Linear(E, 9), nn.Linear(9, 1)
        sharp(self.v, self.u, self.w)

    def forward(self, x):
        s = self.w(torch.tanh(self.v(x)) * torch.sigmoid(self.u(x)))
        w = s.transpose(1, 2).softmax(-1)
        tap("", w[:, None])
        return torch.bmm(w, x)


@situation("dense graph attention with an adjacency")
class Gat(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(E, E)
        self.a, self.b = nn.Parameter(torch.randn(2, H, D) * 2)
        self.register_buffer("adj", torch.rand(N, N) < 0.5)
        self.adj.fill_diagonal_(True)
        sharp(self.w)

    def __setattr__(self, name, value):
        if name in ("a", "b") and not isinstance(value, nn.Parameter):
            value = nn.Parameter(value.detach().clone())
        super().__setattr__(name, value)

    def forward(self, x):
        h = self.w(x).view(*x.shape[:2], H, D)
        s = (h * self.a).sum(-1)[:, :, None] + (h * self.b).sum(-1)[:, None]
        s = F.leaky_relu(s, 0.2).masked_fill(~self.adj[..., None], -9e15)
        w = s.softmax(2)
        tap("", w.permute(0, 3, 1, 2))
        return torch.einsum("bijh,bjhd->bihd", w, h).flatten(2)


@situation("graph attention over edges by scatter")
class Edges(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(E, E), nn.Linear(E, E)
        self.register_buffer("e", torch.randint(0, N, (2, 30)))

    def forward(self, x):
        x = x[0]
        i, j = self.e
        s = (self.q(x)[i] * self.k(x)[j]).sum(-1).exp()
        z = torch.zeros(N).index_add(0, i, s)
        return torch.zeros(N, E).index_add(0, i, (s / z[i])[:, None] * x[j])


class Swin(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.qkv, self.shift = nn.Linear(E, 3 * E), shift
        self.table = nn.Parameter(torch.randn(H, 4, 4))
        sharp(self.qkv)

    def part(self, x):
        b, h, w, c = x.shape
        x = x.view(b, h // 2, 2, w // 2, 2, c)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)

    def forward(self, x):
        b, h, w, c = x.shape
        mask = torch.zeros(1, h, w, 1)
        if self.shift:
            x = torch.roll(x, (-1, -1), (1, 2))
            for n, i in enumerate((slice(-1), slice(-1, None))):
                for m, j in enumerate((slice(-1), slice(-1, None))):
                    mask[:, i, j] = 2 * n + m
        y = self.part(x)
        ids = self.part(mask)[..., 0]
        hide = (ids[:, None] != ids[:, :, None]) * -100.0
        q, k, v = self.qkv(y).view(-1, 4, 3, H, D).permute(2, 0, 3, 1, 4)
        s = (q * D**-0.5) @ k.transpose(-2, -1) + self.table
        n = len(hide)
        s = s.view(-1, n, H, 4, 4) + hide[:, None]
        a = s.view(-1, H, 4, 4).softmax(-1)
        tap("blocks.1" if self.shift else "blocks.0", a)
        y = (a @ v).transpose(1, 2).reshape(b, h // 2, w // 2, 2, 2, c)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return torch.roll(y, (1, 1), (1, 2)) if self.shift else y


@situation(
    "Swin windows, shifted, mask of -100", inputs=lambda: torch.randn(B, 4, 6, E)
)
class Windows(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Swin(False), Swin(True)])

    def forward(self, x):
        for m in self.blocks:
            x = F.layer_norm(x + m(x), (E,))
        return x


@situation("axial: rows, then columns, 5 axes", inputs=lambda: torch.randn(B, 4, 5, E))
class Axial(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.ModuleList(nn.Linear(E, 3 * E) for _ in range(2))
        sharp(*self.p)

    def forward(self, x):
        q, k, v = self.p[0](x).unflatten(-1, (3, H, D)).unbind(-3)
        w = torch.einsum("bxyhd,bxzhd->bxhyz", q, k).mul(0.5).softmax(-1)
        tap("", w.flatten(0, 1))
        x = x + torch.einsum("bxhyz,bxzhd->bxyhd", w, v).flatten(-2)
        q, k, v = self.p[1](x).unflatten(-1, (3, H, D)).unbind(-3)
        w = torch.einsum("bxyhd,bzyhd->byhxz", q, k).mul(0.5).softmax(-1)
        tap("", w.flatten(0, 1))
        return x + torch.einsum("byhxz,bzyhd->bxyhd", w, v).flatten(-2)


@situation("local windows by unfold (keys gathered)")
class Local(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)
        sharp(self.qkv)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        k, v = (F.pad(t, (0, 0, 1, 1)).unfold(2, 3, 1) for t in (k, v))
        s = torch.einsum("bhnd,bhndw->bhnw", q, k) * 0.5
        w = s.softmax(-1)

        tap("", w.transpose(1, 2).flatten(0, 1)[:, :, None])
        return torch.einsum("bhnw,bhndw->bhnd", w, v).transpose(1, 2).flatten(2)


@situation("blocks of queries with their own halo of keys")
class Halo(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)
        sharp(self.qkv)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        q = q.unflatten(2, (4, 2))
        k, v = (F.pad(t, (0, 0, 1, 1)).unfold(2, 4, 2).mT for t in (k, v))
        w = (q @ k.mT * 0.5).softmax(-1)
        tap("", w.transpose(1, 2).flatten(0, 1))
        return (w @ v).flatten(2, 3).transpose(1, 2).flatten(2)


@situation("channel attention (XCA), a token softmax over channels")
class Channels(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)
        sharp(self.qkv)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 4, 1)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        w = (q @ k.mT * 5).softmax(-1)
        tap("", w)
        return (w @ v).permute(0, 3, 1, 2).flatten(2)


@situation(
    "non-local block of images (2-d positions folded)",
    inputs=lambda: torch.randn(B, E, 3, 4),
)
class NonLocal(nn.Module):
    def __init__(self):
        super().__init__()
        self.t, self.p, self.g = (nn.Conv2d(E, 6, 1) for _ in range(3))
        self.o = nn.Conv2d(6, E, 1)

    def forward(self, x):
        t, p, g = (m(x).flatten(2) for m in (self.t, self.p, self.g))
        w = (t.transpose(1, 2) @ p * 3).softmax(-1)
        tap("", w[:, None])
        return x + self.o((w @ g.mT).mT.reshape(len(x), 6, *x.shape[2:]))


@situation(
    "SAGAN: energy transposed before the product",
    inputs=lambda: torch.randn(B, E, 3, 4),
)
class Sagan(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Conv2d(E, 6, 1) for _ in range(3))

    def forward(self, x):
        q, k, v = (m(x).flatten(2) for m in (self.q, self.k, self.v))
        w = torch.softmax(torch.bmm(q.permute(0, 2, 1), k) * 3, -1)
        tap("", w[:, None])
        return torch.bmm(v, w.permute(0, 2, 1)).view(len(x), 6, *x.shape[2:])


@situation(
    "co-attention: one score matrix, softmax over both axes",
    inputs=lambda: (torch.randn(B, N, E), torch.randn(B, 5, E)),
)
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(E, E)
        sharp(self.w)

    def forward(self, x, y):
        s = self.w(x) @ y.mT
        a, b = s.softmax(2), s.softmax(1)
        tap("", a[:, None])
        tap("", b.mT[:, None])
        return torch.cat([a @ y, b.mT @ x], 1)


@situation(
    "BiDAF: one question by the maximum",
    inputs=lambda: (torch.randn(B, N, E), torch.randn(B, 5, E)),
)
class Bidaf(nn.Module):
    def forward(self, x, y):
        s = x @ y.mT
        a = s.softmax(2)
        tap("", a[:, None])
        b = s.amax(2).softmax(-1)
        tap("", b[:, None, None])
        return (a @ y) * torch.bmm(b[:, None], x)


@situation("Hopfield: three iterations on the same memory")
class Hopfield(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = nn.Parameter(torch.randn(10, E))

    def forward(self, x):
        for _ in range(3):
            w = (x @ self.memory.T * 0.7).softmax(-1)
            tap("", w[:, None])
            x = w @ self.memory
        return x


@situation(
    "memory of prototypes, two batches of other sizes",
    joined=True,
    inputs=lambda: torch.randn(3, N, E),
)
class Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = nn.Parameter(torch.randn(20, E))

    def forward(self, x):
        w = (x @ self.memory.T * 0.5).softmax(-1)
        tap("", w[:, None])
        return w @ self.memory

    def steps(self, x):
        return [self(x), self(x[:2] + 1)]


@situation("Perceiver: learnt queries over two inputs", joined=True)
class Perceiver(nn.Module):
    def __init__(self):
        super().__init__()
        self.z = nn.Parameter(torch.randn(5, E))
        self.k, self.v = nn.Linear(E, E), nn.Linear(E, E)
        sharp(self.k)

    def forward(self, x):
        w = (self.z @ self.k(x).mT * 0.3).softmax(-1)
        tap("", w[:, None])
        return w @ self.v(x)

    def steps(self, x):
        return [self(x), self(x + 1), self(x[:, 1:])]


@situation("pooling with one question, several inputs", joined=True)
class Pooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(E, E), nn.Linear(E, E)
        sharp(self.q, self.k)

    def forward(self, x):
        w = (self.q(x.mean(1, keepdim=True)) @ self.k(x).mT).softmax(-1)
        tap("", w[:, None])
        return w @ x

    def steps(self, x):
        return [self(x), self(x + 1), self(x[:, :5]), self(x[:1])]


@situation("pooling over windows of a stream", joined=True)
class Stream(Pooling):
    def steps(self, x):
        return [self(x[:, i : i + 5]) for i in range(4)]


@situation("pooling over growing parts of a text", joined=True)
class Growing(Pooling):
    def steps(self, x):
        return [self(x[:, : i + 3]) for i in range(4)]


@situation("memory updated by its own attention (NTM)")
class Ntm(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.e = nn.Linear(E, E), nn.Linear(E, E)
        sharp(self.q)

    def forward(self, x):
        memory = x.clone()
        for i in range(3):
            q = self.q(x[:, i : i + 1])
            s = F.cosine_similarity(q[:, :, None], memory[:, None], -1) * 6
            w = s.softmax(-1)
            tap("", w[:, None])
            r = w @ memory
            memory = memory * (1 - w.mT * self.e(r).sigmoid()) + w.mT @ r
        return memory


@situation(
    "early exit: the second layer has fewer sequences",
    inputs=lambda: torch.randn(4, N, E),
)
class Early(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = MAB("a"), MAB("b")

    def forward(self, x):
        x = self.a(x, x)
        return self.b(x[[1, 3]], x[[1, 3]])


@situation("MLA: keys absorbed into the question")
class Absorbed(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.c = nn.Linear(E, E), nn.Linear(E, 10)
        self.up, self.down = nn.Parameter(torch.randn(2, H, D, 10) / 2).unbind(0)
        sharp(self.q)

    def __setattr__(self, name, value):
        if name in ("up", "down"):
            value = nn.Parameter(value.detach().clone())
        super().__setattr__(name, value)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (H, D))
        c = self.c(x)
        q = torch.einsum("bnhd,hdc->bnhc", q, self.up)
        w = (torch.einsum("bnhc,bmc->bhnm", q, c) * 0.4).softmax(-1)
        tap("", w)
        z = torch.einsum("bhnm,bmc->bnhc", w, c)
        return torch.einsum("bnhc,hdc->bnhd", z, self.down).flatten(2)


@situation("the output projection in the same einsum as the weights")
class Joint(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)
        self.o = nn.Parameter(torch.randn(H, D, E))
        sharp(self.qkv)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).unbind(2)
        w = torch.einsum("bihd,bjhd->bhij", q, k).mul(0.3).softmax(-1)
        tap("", w)
        return torch.einsum("bhij,bjhd,hde->bie", w, v, self.o)


@situation("tied q, k and v without projections", inputs=lambda: torch.randn(N, E))
class Tied(nn.Module):
    def forward(self, x):
        w = torch.softmax(x @ x.T / 3, 1)
        tap("", w[None, None])
        return w @ x


@situation(
    "triangle attention (AlphaFold), bias from pairs",
    inputs=lambda: torch.randn(1, 5, 5, E),
)
class Triangle(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.b = nn.Linear(E, 3 * E), nn.Linear(E, H)
        sharp(self.qkv, self.b)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).unbind(-3)
        s = torch.einsum("brihd,brjhd->brhij", q, k) * 0.3
        w = (s + self.b(x).permute(0, 3, 1, 2)[:, None]).softmax(-1)
        tap("", w.flatten(0, 1))
        return torch.einsum("brhij,brjhd->brihd", w, v).flatten(-2)


@situation("outer-product pair softmax over both axes at once")
class Pairs(nn.Module):
    def forward(self, x):
        s = x @ x.mT
        w = s.flatten(1).softmax(-1).view_as(s)
        return w @ x


@situation("deformable: sampled values, weights from a linear layer")
class Deformable(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.at = nn.Linear(E, H * 3), nn.Linear(E, H * 3)

    def forward(self, x):
        v = x.unflatten(-1, (H, D))
        w = self.w(x).unflatten(-1, (H, 3)).softmax(-1)
        at = (self.at(x).sigmoid() * (N - 1)).long().unflatten(-1, (H, 3))
        i = at.flatten(1, 1)
        s = torch.stack(
            [
                v[:, :, h]
                .gather(1, i[:, :, h].flatten(1)[..., None].expand(-1, -1, D))
                .view(len(x), N, 3, D)
                for h in range(H)
            ],
            2,
        )
        return torch.einsum("bnhp,bnhpd->bnhd", w, s).flatten(2)


@situation("synthesizer: weights from each token, no keys")
class Synthesizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.v = nn.Linear(E, E), nn.Linear(E, N), nn.Linear(E, E)
        sharp(self.a, self.b)

    def forward(self, x):
        w = self.b(F.relu(self.a(x))).softmax(-1)
        tap("", w[:, None])
        return w @ self.v(x)


@situation("dynamic convolution: softmax of kernel weights")
class Dynamic(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(E, 3)

    def forward(self, x):
        w = self.w(x).softmax(-1)
        windows = F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1)
        return torch.einsum("bnw,bndw->bnd", w, windows)
