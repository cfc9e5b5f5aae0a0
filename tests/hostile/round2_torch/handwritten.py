"""Hand-written attention in many styles, compared with what the model says itself."""

import math
import os

import torch
import torch.nn.functional as F
from oracle import check, tap
from torch import nn

# SIZES=4,4,4,4 makes all axes alike
B, H, N, D = map(int, os.environ.get("SIZES", "2,3,7,8").split(","))


class Attn(nn.Module):
    """Projections around a style: style(q, k, v, self) with (B, H, N, D)."""

    def __init__(self, style, kv=H, d=D, gain=2.0):
        super().__init__()
        w = H * d
        self.q, self.k = nn.Linear(w, w), nn.Linear(w, kv * d)
        self.v, self.o = nn.Linear(w, kv * d), nn.Linear(w, w)
        for m in (self.q, self.k):
            nn.init.normal_(m.weight, std=gain / math.sqrt(w))
        self.style, self.kv, self.d = style, kv, d
        self.bias = nn.Parameter(torch.randn(H, N, N))
        self.mix = nn.Parameter(torch.randn(H, H))
        self.temp = nn.Parameter(torch.rand(H, 1, 1) + 0.5)
        self.rel = nn.Parameter(torch.randn(2 * N - 1, d))
        self.mem = nn.Parameter(torch.randn(2, 1, H, 2, d))

    def split(self, x, h):
        return x.view(*x.shape[:2], h, self.d).transpose(1, 2)

    def forward(self, x):
        q = self.split(self.q(x), H)
        k, v = self.split(self.k(x), self.kv), self.split(self.v(x), self.kv)
        out = self.style(q, k, v, self)
        return self.o(out.transpose(1, 2).reshape(*x.shape[:2], H * self.d))


class Net(nn.Module):
    def __init__(self, style, layers=2, **kw):
        super().__init__()
        self.layers = nn.ModuleList(Attn(style, **kw) for _ in range(layers))
        for i, m in enumerate(self.layers):
            m.name = f"layers.{i}"

    def forward(self, x):
        for m in self.layers:
            x = F.layer_norm(x + m(x), x.shape[-1:])
        return x


def situation(name, batch=B, n=N, dtype=torch.float32, tol=3e-5, grads=False, **kw):
    """Check a style in a net of two layers."""

    def wrap(style):
        def make():
            net = Net(style, **kw).to(dtype)
            x = torch.randn(batch, n, H * kw.get("d", D)).to(dtype)

            def call():
                if grads:
                    out = net(x)
                    out.square().mean().backward()
                    return out
                with torch.no_grad():
                    return net(x)

            return net, call

        check(name, make, tol=tol, grads=grads)
        return style

    return wrap


TRI = torch.ones(N, N, dtype=torch.bool).tril()
S = D**-0.5


@situation("einsum with strange letters, heads first")
def _(q, k, v, m):
    w = torch.einsum("XhqD,XhkD->hXqk", q, k).mul(S).softmax(-1)
    tap(m.name, w.transpose(0, 1))
    return torch.einsum("hXqk,XhkD->XhqD", w, v)


@situation("einsum, queries last")
def _(q, k, v, m):
    w = torch.einsum("bhid,bhjd->jhbi", q, k).mul(S).softmax(0)
    tap(m.name, w.permute(2, 1, 3, 0))
    return torch.einsum("jhbi,bhjd->bhid", w, v)


@situation("einsum by sublists")
def _(q, k, v, m):
    w = torch.einsum(q * S, [0, 1, 2, 9], k, [0, 1, 3, 9], [0, 1, 2, 3]).softmax(-1)
    tap(m.name, w)
    return torch.einsum(w, [0, 1, 2, 3], v, [0, 1, 3, 4], [0, 1, 2, 4])


@situation("baddbmm with a causal bias, alpha and beta")
def _(q, k, v, m):
    b, h, n, d = q.shape
    bias = torch.zeros(n, n).masked_fill(~TRI, -1e4).expand(b * h, n, n)
    s = torch.baddbmm(
        bias, q.reshape(-1, n, d), k.reshape(-1, n, d).mT, beta=0.5, alpha=S
    )
    w = s.softmax(-1)
    tap(m.name, w.view(b, h, n, n))
    return torch.bmm(w, v.reshape(-1, n, d)).view(b, h, n, d)


@situation("baddbmm with beta 0 and an uninitialised input")
def _(q, k, v, m):
    b, h, n, d = q.shape
    empty = torch.full((b * h, n, n), torch.nan)
    s = torch.baddbmm(
        empty, q.reshape(-1, n, d), k.reshape(-1, n, d).mT, beta=0, alpha=S
    )
    w = (s.view(b, h, n, n) + m.bias).softmax(-1)
    tap(m.name, w)
    return torch.bmm(w.view(-1, n, n), v.reshape(-1, n, d)).view(b, h, n, d)


@situation("addmm in a loop over sequences and heads")
def _(q, k, v, m):
    out, ws = torch.empty_like(q), []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            s = torch.addmm(m.bias[h], q[b, h], k[b, h].T, alpha=S)
            w = s.softmax(-1)
            ws.append(w)
            out[b, h] = w @ v[b, h]
    for w in ws:
        tap(m.name, w[None, None])
    return out


@situation("a loop over heads")
def _(q, k, v, m):
    outs = []
    for h in range(H):
        w = (q[:, h] @ k[:, h].mT * S).softmax(-1)
        tap(m.name, w[:, None])
        outs.append(w @ v[:, h])
    return torch.stack(outs, 1)


@situation("addbmm of one matrix", batch=1)
def _(q, k, v, m):
    outs = []
    for h in range(H):
        s = torch.addbmm(m.bias[h], q[:, h], k[:, h].mT, alpha=S)
        w = s.softmax(-1)
        tap(m.name, w[None, None])
        outs.append(w @ v[0, h])
    return torch.stack(outs)[None]


@situation("tensordot over one sequence", batch=1)
def _(q, k, v, m):
    outs = []
    for h in range(H):
        w = torch.tensordot(q[0, h] * S, k[0, h], dims=([1], [1])).softmax(-1)
        tap(m.name, w[None, None])
        outs.append(torch.tensordot(w, v[0, h], dims=1))
    return torch.stack(outs)[None]


@situation("products by broadcasting and sum")
def _(q, k, v, m):
    s = (q[:, :, :, None] * k[:, :, None]).sum(-1) * S
    w = s.softmax(-1)
    tap(m.name, w)
    return (w[..., None] * v[:, :, None]).sum(3)


@situation("log_softmax then exp")
def _(q, k, v, m):
    w = F.log_softmax(q @ k.mT * S, -1).exp()
    tap(m.name, w)
    return w @ v


@situation("keys by queries, softmax over the first of both")
def _(q, k, v, m):
    w = (k @ q.mT * S).softmax(-2)
    tap(m.name, w.mT)
    return w.mT @ v


@situation("keys by queries, product from the left")
def _(q, k, v, m):
    w = F.softmax(k @ q.mT * S, dim=2)
    tap(m.name, w.mT)
    return (v.mT @ w).mT


for value in (-math.inf, -1e9, -1e4, -100.0, torch.finfo(torch.float32).min, -20.0):

    @situation(f"masked_fill with {value}")
    def _(q, k, v, m, value=value):
        w = (q @ k.mT * S).masked_fill(~TRI, value).softmax(-1)
        tap(m.name, w)
        return w @ v


@situation("mask with a whole row hidden by -1e9 (uniform weights)")
def _(q, k, v, m):
    hide = ~TRI.clone()
    hide[3] = True
    w = (q @ k.mT * S).masked_fill(hide, -1e9).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("mask with a whole row hidden by finfo.min added")
def _(q, k, v, m):
    hide = torch.zeros(N, N)
    hide[3] = torch.finfo(torch.float32).min
    w = (q @ k.mT * S + hide).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("mask with a whole row hidden, nan_to_num after")
def _(q, k, v, m):
    hide = torch.zeros(N, N, dtype=torch.bool)
    hide[3] = True
    w = (q @ k.mT * S).masked_fill(hide, -math.inf).softmax(-1)
    tap(m.name, w)
    return torch.nan_to_num(w) @ v


@situation("scores multiplied by the mask, hidden ones at 0")
def _(q, k, v, m):
    w = (q @ k.mT * S * TRI).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("torch.where with a mask by sequence")
def _(q, k, v, m):
    ok = torch.arange(N) < (N - 3 * torch.arange(len(q)) % N)[:, None, None, None]
    w = torch.where(ok, q @ k.mT * S, torch.tensor(-math.inf)).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("scaled after the mask of -1000")
def _(q, k, v, m):
    s = (q @ k.mT).masked_fill(~TRI, -1000.0)
    w = (s / math.sqrt(D)).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("softcap after an additive mask of -30")
def _(q, k, v, m):
    s = q @ k.mT * S + torch.zeros(N, N).masked_fill(~TRI, -30.0)
    w = (5 * torch.tanh(s / 5)).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("softcap, then bias, then another softcap")
def _(q, k, v, m):
    s = 4 * torch.tanh(q @ k.mT * S / 4) + m.bias
    w = (6 * torch.tanh(s / 6)).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("bias by head, subtracted")
def _(q, k, v, m):
    w = (q @ k.mT * S - m.bias).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("bias minus scores (rsub)")
def _(q, k, v, m):
    w = (m.bias - q @ k.mT * S).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("bias added and all multiplied by a negative number")
def _(q, k, v, m):
    w = ((q @ k.mT + m.bias) * -S).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("torch.add and sub with alpha")
def _(q, k, v, m):
    s = torch.add(q @ k.mT * S, m.bias, alpha=0.3)
    s = torch.sub(s, m.bias.flip(0), alpha=0.2)
    w = s.softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("addcmul of a bias")
def _(q, k, v, m):
    s = torch.addcmul(q @ k.mT * S, m.bias, m.bias.flip(0), value=0.5)
    w = s.softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("torch.lerp between scores and bias")
def _(q, k, v, m):
    w = torch.lerp(q @ k.mT * S, m.bias.expand(B, H, N, N), 0.25).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("scores clamped")
def _(q, k, v, m):
    w = (q @ k.mT * S).clamp(-1.0, 2.0).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("scores clamped in place before a mask")
def _(q, k, v, m):
    s = q @ k.mT
    s.mul_(S).clamp_(max=1.5).masked_fill_(~TRI, -math.inf)
    w = s.softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("scores minus their maximum first")
def _(q, k, v, m):
    s = q @ k.mT * S
    s = s - s.amax(-1, keepdim=True)
    w = s.softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("scores standardised over the keys")
def _(q, k, v, m):
    s = q @ k.mT
    s = (s - s.mean(-1, keepdim=True)) / s.std(-1, keepdim=True) * 2
    w = s.softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("scores divided by a norm of each query and each key")
def _(q, k, v, m):
    s = q @ k.mT
    s = s / (q.norm(dim=-1)[..., None] * k.norm(dim=-1)[:, :, None]) * 5
    w = s.softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("temperature by head and by query")
def _(q, k, v, m):
    t = q.square().mean(-1, keepdim=True) + 0.3
    w = (q @ k.mT * S / m.temp / t).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("temperature by key")
def _(q, k, v, m):
    t = k.square().mean(-1)[:, :, None] + 0.3
    w = (q @ k.mT * S * t).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("cosine attention")
def _(q, k, v, m):
    s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
    w = (s * m.temp.exp() * 3).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("negative squared distance by cdist")
def _(q, k, v, m):
    w = (-torch.cdist(q, k).square() * 0.2).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("squared distance from a product")
def _(q, k, v, m):
    s = 2 * q @ k.mT - q.square().sum(-1)[..., None] - k.square().sum(-1)[:, :, None]
    w = (s * 0.2).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("power of the scores")
def _(q, k, v, m):
    w = (q @ k.mT * S).pow(3).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("relu of the scores")
def _(q, k, v, m):
    w = F.relu(q @ k.mT * S).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("absolute scores")
def _(q, k, v, m):
    w = (q @ k.mT * S).abs().softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("relative keys (Shaw)")
def _(q, k, v, m):
    i = torch.arange(N)
    rel = m.rel[i[:, None] - i + N - 1]
    s = (q @ k.mT + torch.einsum("bhid,ijd->bhij", q, rel)) * S
    w = s.softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("relative keys and relative values (Shaw)")
def _(q, k, v, m):
    i = torch.arange(N)
    rel = m.rel[i[:, None] - i + N - 1]
    s = (q @ k.mT + torch.einsum("bhid,ijd->bhij", q, rel)) * S
    w = s.softmax(-1)
    tap(m.name, w)
    return w @ v + torch.einsum("bhij,ijd->bhid", w, rel)


@situation("relative shift (Transformer-XL)")
def _(q, k, v, m):
    b, h, n, d = q.shape
    s = torch.einsum("bhid,rd->bhir", q, m.rel)
    s = F.pad(s, (1, 0)).view(b, h, 2 * n, n)[:, :, 1:].reshape(b, h, n, 2 * n - 1)
    w = ((q @ k.mT + s[..., :n]) * S).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("talking heads before the softmax")
def _(q, k, v, m):
    s = torch.einsum("bhij,hg->bgij", q @ k.mT * S, m.mix)
    w = s.softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("query and key of ALiBi with scores in place")
def _(q, k, v, m):
    s = torch.matmul(q, k.mT)
    s *= S
    slope = 2.0 ** -torch.arange(1, H + 1)
    s += slope[:, None, None] * -(torch.arange(N)[:, None] - torch.arange(N)).abs()
    w = s.softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("multi-query by einsum", kv=1)
def _(q, k, v, m):
    w = torch.einsum("bhid,bjd->bhij", q * S, k[:, 0]).softmax(-1)
    tap(m.name, w)
    return torch.einsum("bhij,bjd->bhid", w, v[:, 0])


@situation("multi-query by folding heads into queries", kv=1)
def _(q, k, v, m):
    b, h, n, d = q.shape
    w = (q.reshape(b, h * n, d) @ k[:, 0].mT * S).softmax(-1)
    tap(m.name, w.view(b, h, n, n))
    return (w @ v[:, 0]).view(b, h, n, d)


@situation("multi-query by folding heads into queries, heads innermost", kv=1)
def _(q, k, v, m):
    b, h, n, d = q.shape
    w = (q.transpose(1, 2).reshape(b, n * h, d) @ k[:, 0].mT * S).softmax(-1)
    tap(m.name, w.view(b, n, h, n).transpose(1, 2))
    return (w @ v[:, 0]).view(b, n, h, d).transpose(1, 2)


@situation("heads folded before sequences (split and cat)")
def _(q, k, v, m):
    q, k, v = (torch.cat(x.unbind(1), 0) for x in (q, k, v))
    w = (q @ k.mT * S).softmax(-1)
    tap(m.name, w.view(H, -1, *w.shape[1:]).transpose(0, 1))
    return torch.stack((w @ v).chunk(H, 0), 1)


@situation("batch of one, heads as the only batch", batch=1)
def _(q, k, v, m):
    w = (q[0] @ k[0].mT * S).softmax(-1)
    tap(m.name, w[None])
    return (w @ v[0])[None]


@situation("two softmaxes multiplied")
def _(q, k, v, m):
    a, b = (q @ k.mT * S).softmax(-1), m.bias.softmax(-1)
    w = a * b
    tap(m.name, a)
    return w @ v


@situation("two softmaxes multiplied and renormalised")
def _(q, k, v, m):
    a, b = (q @ k.mT * S).softmax(-1), m.bias.softmax(-1)
    w = a * b
    w = w / w.sum(-1, keepdim=True)
    tap(m.name, a)
    return w @ v


@situation("weights masked after the softmax")
def _(q, k, v, m):
    w = (q @ k.mT * S).softmax(-1)
    tap(m.name, w)
    return (w * TRI) @ v


@situation("differential attention")
def _(q, k, v, m):
    a = (q @ k.mT * S).softmax(-1)
    b = (q.flip(-1) @ k.mT * S).softmax(-1)
    tap(m.name, a)
    tap(m.name, b)
    return (a - 0.4 * b) @ v


@situation("efficient attention (softmax of q and of k)")
def _(q, k, v, m):
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


@situation("linear attention (elu + 1)")
def _(q, k, v, m):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.mT @ v) / (q @ k.sum(-2)[..., None])


@situation("sigmoid attention")
def _(q, k, v, m):
    return (q @ k.mT * S).sigmoid() @ v / N


@situation("top-k by scatter of -inf")
def _(q, k, v, m):
    s = q @ k.mT * S
    top, where = s.topk(3, -1)
    w = torch.full_like(s, -math.inf).scatter(-1, where, top).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("top-k by a threshold")
def _(q, k, v, m):
    s = q @ k.mT * S
    w = s.masked_fill(s < s.topk(3, -1).values[..., -1:], -math.inf).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("top-k of gathered keys")
def _(q, k, v, m):
    s = q @ k.mT * S
    top, where = s.topk(3, -1)
    w = top.softmax(-1)
    tap(m.name, w.transpose(1, 2).flatten(0, 1)[:, :, None])
    picked = (
        v[:, :, None]
        .expand(-1, -1, N, -1, -1)
        .gather(3, where[..., None].expand(*where.shape, D))
    )
    return torch.einsum("bhik,bhikd->bhid", w, picked)


@situation("sorted keys")
def _(q, k, v, m):
    order = k.norm(dim=-1).argsort(-1)[..., None].expand_as(k)
    k2, v2 = k.gather(2, order), v.gather(2, order)
    w = (q @ k2.mT * S).softmax(-1)
    tap(m.name, w)
    return w @ v2


@situation("a sink logit that is dropped")
def _(q, k, v, m):
    s = q @ k.mT * S
    sink = m.temp[None].expand(s.shape[0], H, N, 1) * 2
    w = torch.cat([s, sink], -1).softmax(-1)[..., :-1]
    tap(m.name, w)
    return w @ v


@situation("a sink logit in front that is dropped")
def _(q, k, v, m):
    s = q @ k.mT * S
    sink = m.temp[None].expand(s.shape[0], H, N, 1) * 2
    w = torch.cat([sink, s], -1).softmax(-1)[..., 1:]
    tap(m.name, w)
    return w @ v


@situation("a zero logit by F.pad (softmax plus one)")
def _(q, k, v, m):
    w = F.pad(q @ k.mT * S, (1, 0)).softmax(-1)[..., 1:]
    tap(m.name, w)
    return w @ v


@situation("persistent memory keys")
def _(q, k, v, m):
    mk, mv = (x.expand(q.shape[0], -1, -1, -1) for x in m.mem)
    k, v = torch.cat([mk, k], 2), torch.cat([mv, v], 2)
    w = (q @ k.mT * S).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("scores of memory and of keys joined, values split")
def _(q, k, v, m):
    mk, mv = (x.expand(q.shape[0], -1, -1, -1) for x in m.mem)
    w = torch.cat([q @ mk.mT * S, q @ k.mT * S], -1).softmax(-1)
    tap(m.name, w)
    return w[..., :2] @ mv + w[..., 2:] @ v


@situation("softmax(dtype=float32) in bfloat16", dtype=torch.bfloat16, tol=5e-3)
def _(q, k, v, m):
    w = F.softmax(q.float() @ k.float().mT * S, -1, dtype=torch.float32)
    tap(m.name, w)
    return w.to(q.dtype) @ v


@situation("all in bfloat16", dtype=torch.bfloat16, tol=5e-2)
def _(q, k, v, m):
    w = (q @ k.mT * S).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("all in float16 with a mask of -65504", dtype=torch.float16, tol=1e-2)
def _(q, k, v, m):
    w = (q @ k.mT * S).masked_fill(~TRI, -65504.0).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("all in float64", dtype=torch.float64, tol=1e-9)
def _(q, k, v, m):
    w = (q @ k.mT * S + m.bias).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("complex q and k, real part of the product")
def _(q, k, v, m):
    qc = torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2))
    kc = torch.view_as_complex(k.reshape(*k.shape[:-1], -1, 2))
    w = ((qc @ kc.conj().mT).real * S).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("complex, absolute value of the product")
def _(q, k, v, m):
    qc = torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2))
    kc = torch.view_as_complex(k.reshape(*k.shape[:-1], -1, 2))
    w = ((qc @ kc.mH).abs() * S).softmax(-1)
    tap(m.name, w)
    return w @ v


BUFFER = torch.empty(B * H, N, N)


@situation("bmm and softmax with out=, one buffer for all layers")
def _(q, k, v, m):
    b, h, n, d = q.shape
    torch.bmm(q.reshape(-1, n, d) * S, k.reshape(-1, n, d).mT, out=BUFFER)
    w = torch.softmax(BUFFER, -1, out=BUFFER) if False else BUFFER.softmax(-1)
    tap(m.name, w.view(b, h, n, n))
    return torch.bmm(w, v.reshape(-1, n, d)).view(b, h, n, d)


@situation("softmax(out=) into the buffer of the scores of another")
def _(q, k, v, m):
    b, h, n, d = q.shape
    s = torch.bmm(q.reshape(-1, n, d) * S, k.reshape(-1, n, d).mT)
    torch.softmax(s, -1, out=BUFFER)
    tap(m.name, BUFFER.view(b, h, n, n))
    return torch.bmm(BUFFER, v.reshape(-1, n, d)).view(b, h, n, d)


@situation("softmax(out=) into the scores themselves")
def _(q, k, v, m):
    b, h, n, d = q.shape
    s = torch.bmm(q.reshape(-1, n, d) * S, k.reshape(-1, n, d).mT)
    torch.softmax(s, -1, out=s)
    tap(m.name, s.view(b, h, n, n))
    return torch.bmm(s, v.reshape(-1, n, d)).view(b, h, n, d)


@situation("q overwritten before the softmax")
def _(q, k, v, m):
    q = q.clone()
    s = q @ k.mT * S
    q.zero_()
    w = s.softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("k overwritten through .data before the softmax")
def _(q, k, v, m):
    k = k.clone()
    s = q @ k.mT * S
    k.data.mul_(2)
    w = s.softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("k overwritten through numpy before the softmax")
def _(q, k, v, m):
    k = k.clone()
    s = q @ k.mT * S
    k.numpy()[...] *= 2
    w = s.softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("scores overwritten through numpy before the softmax")
def _(q, k, v, m):
    s = q @ k.mT * S
    s.numpy()[..., 0] += 3
    w = s.softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("scores changed at an index before the softmax")
def _(q, k, v, m):
    s = q @ k.mT * S
    s[:, :, 2, 1] = 3.0
    s[:, 0, :, 0] += 1.0
    w = s.softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("weights changed in place after the softmax")
def _(q, k, v, m):
    w = (q @ k.mT * S).softmax(-1)
    tap(m.name, w)
    w[:, :, :, 0] = 0
    return w @ v


@situation("output changed in place after the product")
def _(q, k, v, m):
    w = (q @ k.mT * S).softmax(-1)
    tap(m.name, w)
    out = w @ v
    out.mul_(3).add_(1)
    return out


@situation("two products added (nope and rope)")
def _(q, k, v, m):
    w = (
        (
            q[..., : D // 2] @ k[..., : D // 2].mT
            + q[..., D // 2 :] @ k[..., D // 2 :].mT
        )
        * S
    ).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("two products with other scales (DeBERTa)")
def _(q, k, v, m):
    a = q[..., : D // 2] @ k[..., : D // 2].mT / 2
    b = q[..., D // 2 :] @ k[..., D // 2 :].mT / 5
    w = (a + b).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("product minus product")
def _(q, k, v, m):
    w = ((q @ k.mT - q.flip(-1) @ k.mT) * S).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("product times product")
def _(q, k, v, m):
    w = ((q @ k.mT) * (q.flip(-1) @ k.mT) * 0.1).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("bilinear einsum of three operands")
def _(q, k, v, m):
    g = m.rel[:D] * S
    w = torch.einsum("bhid,de,bhje->bhij", q, g, k).softmax(-1)
    tap(m.name, w)
    return torch.einsum("bhij,bhjd->bhid", w, v)


@situation("training: dropout on weights, backward", grads=True)
def _(q, k, v, m):
    w = (q @ k.mT * S).softmax(-1)
    tap(m.name, w)
    return F.dropout(w, 0.3, True) @ v


@situation("training: backward", grads=True)
def _(q, k, v, m):
    w = (q @ k.mT * S).masked_fill(~TRI, -1e9).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("gumbel softmax")
def _(q, k, v, m):
    w = F.gumbel_softmax(q @ k.mT * S, tau=0.7)
    tap(m.name, w)
    return w @ v


@situation("hard gumbel softmax")
def _(q, k, v, m):
    return F.gumbel_softmax(q @ k.mT * S, tau=0.7, hard=True) @ v


@situation("softmax by exp and sum")
def _(q, k, v, m):
    s = q @ k.mT * S
    e = (s - s.amax(-1, keepdim=True)).exp()
    w = e / e.sum(-1, keepdim=True)
    tap(m.name, w)
    return w @ v


@situation("exp of scores minus logsumexp")
def _(q, k, v, m):
    s = q @ k.mT * S
    w = (s - s.logsumexp(-1, keepdim=True)).exp()
    tap(m.name, w)
    return w @ v


@situation("softmax over the queries (a bug of a user)")
def _(q, k, v, m):
    w = (q @ k.mT * S).softmax(-2)
    tap(m.name, w)
    return w @ v


@situation("softmax over the heads (a bug of a user)")
def _(q, k, v, m):
    return (q @ k.mT * S).softmax(1) @ v


@situation("weights detached, straight through", grads=True)
def _(q, k, v, m):
    w = (q @ k.mT * S).softmax(-1)
    tap(m.name, w)
    return w.detach() @ v


@situation("one token", n=1)
def _(q, k, v, m):
    w = (q @ k.mT * S).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("no token", n=0)
def _(q, k, v, m):
    w = (q @ k.mT * S).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("batch of none", batch=0)
def _(q, k, v, m):
    w = (q @ k.mT * S).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("300 tokens with logits above 100", n=300, gain=9.0, tol=1e-3)
def _(q, k, v, m):
    w = (q @ k.mT * S).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("k is expanded over the batch")
def _(q, k, v, m):
    k, v = k[:1].expand_as(k), v[:1].expand_as(v)
    w = (q @ k.mT * S).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("all sequences ask the question of the first")
def _(q, k, v, m):
    w = (q[:1] @ k.mT * S).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("the same weights for all sequences, values differ")
def _(q, k, v, m):
    w = (q[:1] @ k[:1].mT * S).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("one weight matrix for all heads")
def _(q, k, v, m):
    w = (q[:, :1] @ k[:, :1].mT * S).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("queries reversed, output reversed back")
def _(q, k, v, m):
    w = (q.flip(2) @ k.mT * S).softmax(-1)
    tap(m.name, w)
    return (w @ v).flip(2)


@situation("weights flipped back before the product")
def _(q, k, v, m):
    w = (q.flip(2) @ k.mT * S).softmax(-1)
    tap(m.name, w)
    return w.flip(2) @ v


@situation("keys rolled, weights rolled back")
def _(q, k, v, m):
    w = (q @ k.roll(2, 2).mT * S).softmax(-1)
    tap(m.name, w)
    return w.roll(-2, -1) @ v


@situation("scores of half the heads reordered")
def _(q, k, v, m):
    s = (q @ k.mT * S)[:, [2, 0, 1]]
    w = s.softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("two softmaxes in a row (a bug of a user)")
def _(q, k, v, m):
    w = (q @ k.mT * S * 4).softmax(-1).softmax(-1)
    tap(m.name, w)
    return w @ v


@situation("averaged with the identity after the softmax")
def _(q, k, v, m):
    w = (q @ k.mT * S).softmax(-1)
    tap(m.name, w)
    return (w + torch.eye(N)) / 2 @ v


@situation("residual scores of the layer before (RealFormer)")
def _(q, k, v, m):
    s = q @ k.mT * S
    if m.name == "layers.1":
        s = s + _.before
    _.before = s
    w = s.softmax(-1)
    tap(m.name, w)
    return w @ v
