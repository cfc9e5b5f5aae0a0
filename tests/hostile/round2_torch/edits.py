"""Ablation and patching of hand-written attention, compared with plain hooks."""

import math
import sys
import warnings

import regard
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
B, H, N, D = 2, 3, 7, 8
E = H * D
S = D**-0.5
HIDE = torch.ones(N, N, dtype=torch.bool).triu(1)


class Layer(nn.Module):
    def __init__(self, style):
        super().__init__()
        self.style = style
        self.qkv, self.o = nn.Linear(E, 3 * E), nn.Linear(E, E)
        nn.init.normal_(self.qkv.weight, std=2 / math.sqrt(E))

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, H, D).permute(2, 0, 3, 1, 4)
        return self.o(self.style(q, k, v).reshape(*x.shape[:2], E))


class Net(nn.Module):
    def __init__(self, style):
        super().__init__()
        self.layers = nn.ModuleList(Layer(style) for _ in range(2))

    def forward(self, x):
        for m in self.layers:
            x = F.layer_norm(x + m(x), (E,))
        return x


def back(out):
    return out.transpose(1, 2)


def eager(q, k, v):
    return back((q @ k.mT * S).softmax(-1) @ v)


def causal(q, k, v):
    return back((q @ k.mT * S).masked_fill(HIDE, -1e9).softmax(-1) @ v)


def sdpa(q, k, v):
    return back(F.scaled_dot_product_attention(q, k, v))


def sdpa_causal(q, k, v):
    return back(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def einsum(q, k, v):
    w = torch.einsum("bhid,bhjd->bhij", q * S, k).softmax(-1)
    return torch.einsum("bhij,bhjd->bihd", w, v)


def heads_last(q, k, v):
    w = torch.einsum("bhid,bhjd->bijh", q * S, k).softmax(2)
    return torch.einsum("bijh,bhjd->bihd", w, v)


def folded(q, k, v):
    q, k, v = (x.reshape(-1, x.shape[-2], D) for x in (q, k, v))
    out = torch.bmm((q @ k.mT * S).softmax(-1), v)
    return back(out.view(-1, H, *out.shape[1:]))


def folded_heads_first(q, k, v):
    q, k, v = (torch.cat(x.unbind(1)) for x in (q, k, v))
    out = (q @ k.mT * S).softmax(-1) @ v
    return torch.stack(out.chunk(H), 2)


def by_head(q, k, v):
    outs = []
    for h in range(H):
        outs.append((q[:, h] @ k[:, h].mT * S).softmax(-1) @ v[:, h])
    return torch.stack(outs, 2)


def transposed(q, k, v):
    return ((v.mT @ (k @ q.mT * S).softmax(-2)).mT).transpose(1, 2)


def log_exp(q, k, v):
    return back(F.log_softmax(q @ k.mT * S, -1).exp() @ v)


def dropout(q, k, v):
    return back(F.dropout((q @ k.mT * S).softmax(-1), 0.2, True) @ v)


def by_sum(q, k, v):
    w = (q @ k.mT * S).softmax(-1)
    return back((w[..., None] * v[:, :, None]).sum(3))


def by_exp(q, k, v):
    e = (q @ k.mT * S).exp()
    return back(e / e.sum(-1, keepdim=True) @ v)


def sink(q, k, v):
    s = q @ k.mT * S
    w = torch.cat([s, torch.ones_like(s[..., :1])], -1).softmax(-1)[..., :-1]
    return back(w @ v)


def baddbmm(q, k, v):
    q, k, v = (x.reshape(-1, x.shape[-2], D) for x in (q, k, v))
    s = torch.baddbmm(torch.zeros(1, N, N), q, k.mT, alpha=S)
    out = torch.baddbmm(torch.zeros(1, 1, D), s.softmax(-1), v)
    return back(out.view(-1, H, *out.shape[1:]))


def zeroed(net, x, which, queries=slice(None)):
    hooks = []
    for layer, head in which:

        def edit(m, a, head=head):
            y = a[0].clone().view(*a[0].shape[:2], H, D)
            y[:, queries, head] = 0
            return (y.view_as(a[0]),)

        hooks.append(net.layers[layer].o.register_forward_pre_hook(edit))
    out = net(x)
    for h in hooks:
        h.remove()
    return out


def patched(net, x, source, which, queries=slice(None)):
    hooks, kept = [], {}
    for layer in {a for a, _ in which}:
        hooks.append(
            net.layers[layer].o.register_forward_pre_hook(
                lambda m, a, layer=layer: kept.__setitem__(layer, a[0].clone())
            )
        )
    net(source)
    [h.remove() for h in hooks]
    hooks = []
    for layer, head in which:

        def edit(m, a, layer=layer, head=head):
            y = a[0].clone().view(*a[0].shape[:2], H, D)
            z = kept[layer].view(*a[0].shape[:2], H, D)
            y[:, queries, head] = z[:, queries, head]
            return (y.view_as(a[0]),)

        hooks.append(net.layers[layer].o.register_forward_pre_hook(edit))
    out = net(x)
    [h.remove() for h in hooks]
    return out


def report(name, f):
    if len(sys.argv) > 1 and not any(a in name for a in sys.argv[1:]):
        return
    try:
        bad = f()
    except regard.errors.OptionError as error:
        bad = None
        name += f" (refused: {str(error)[:90]})"
    except Exception as error:  # noqa: BLE001
        bad = f"CRASH {type(error).__name__}: {str(error)[:150]}"
    print(f"{name} | " + (f"DEFECT: {bad}" if bad else "ok"), flush=True)


def near(a, b, tol=1e-5):
    err = (a - b).abs().max().item()
    return None if err <= tol else f"off by {err:.3g}"


def trial(style, batch=B):
    torch.manual_seed(0)
    net = Net(style)
    x, y = torch.randn(batch, N, E), torch.randn(batch, N, E)
    n = f"{style.__name__}, batch {batch}"

    def knock(which, **kw):
        def f():
            with torch.no_grad():
                torch.manual_seed(1)
                want = zeroed(net, x, which, **kw)
                plain_seed = torch.manual_seed(1)  # noqa: F841
                with regard.knock_out(net, heads=which, **kw):
                    got = net(x)
                return near(got, want)

        return f

    report(f"knock_out {n}, one head", knock([(0, 1)]))
    report(f"knock_out {n}, heads of two layers", knock([(0, 2), (1, 0)]))

    def keys():
        with torch.no_grad():
            q = {}

            def hide(q_, k, v):
                return None

            with regard.watch(net) as seen:
                with regard.knock_out(net, keys=[2]):
                    got = net(x)
            del q, hide
            w = seen.layer(0).weights()
            if w[..., 2].abs().max() > 0:
                return f"key 2 has weight {w[..., 2].max():.3g}"
            with regard.watch(net) as plain:
                net(x)
            p = plain.layer(0).weights().clone()
            p[..., 2] = 0
            p = p / p.sum(-1, keepdim=True)
            p = p.nan_to_num(0)
            bad = near(w, p)
            return bad or (None if not torch.equal(got, net(x)) else "nothing changed")

    report(f"knock_out {n}, a key", keys)

    def patch(queries=None):
        def f():
            with torch.no_grad():
                torch.manual_seed(1)
                where = slice(None) if queries is None else queries
                want = patched(net, x, y, [(0, 1), (1, 2)], where)
                torch.manual_seed(1)
                with regard.watch(net, keep="qkv") as source:
                    net(y)
                more = {} if queries is None else {"queries": queries}
                with regard.patch_heads(net, source, [(0, 1), (1, 2)], **more):
                    got = net(x)
                return near(got, want)

        return f

    report(f"patch_heads {n}", patch())
    report(f"patch_heads {n}, last query", patch([-1]))

    def values():
        with torch.no_grad(), regard.watch(net, keep="qkv") as seen:
            net(x)
        for i, m in enumerate(net.layers):
            x_in = x if i == 0 else None
            if x_in is None:
                continue
            v = m.qkv(x).view(*x.shape[:2], 3, H, D).permute(2, 0, 3, 1, 4)[2]
            for s in range(batch):
                bad = near(seen.layer(i, sequence=s).v, v[s])
                if bad:
                    return "v " + bad

    report(f"values {n}", values)


if __name__ == "__main__":
    for style in (
        eager,
        causal,
        sdpa,
        sdpa_causal,
        einsum,
        heads_last,
        folded,
        folded_heads_first,
        by_head,
        transposed,
        log_exp,
        by_sum,
        by_exp,
        sink,
        baddbmm,
    ):
        for batch in (1, B):
            trial(style, batch)
