"""Generation loops written by hand, with caches of many kinds.

The oracle is one causal pass over the final text, in float64.
"""

import math
import sys
import warnings

import regard
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
H, D, V, MAX = 3, 12, 30, 24
E = H * D


class Attn(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.qkv, self.o = nn.Linear(E, 3 * E), nn.Linear(E, E)
        nn.init.normal_(self.qkv.weight, std=2 / math.sqrt(E))

    def split(self, x):
        return self.qkv(x).view(*x.shape[:2], 3, H, D).permute(2, 0, 3, 1, 4)

    def forward(self, x, cache, start):
        q, k, v = self.split(x)
        b, _, n, _ = q.shape
        kind = self.kind
        if "static" in kind:
            if "k" not in cache:
                cache["k"] = torch.zeros(b, H, MAX, D)
                cache["v"] = torch.zeros(b, H, MAX, D)
            where = torch.arange(start, start + n)
            if "scatter" in kind:
                i = where[None, None, :, None].expand(b, H, n, D)
                cache["k"].scatter_(2, i, k), cache["v"].scatter_(2, i, v)
            elif "copy" in kind:
                cache["k"].index_copy_(2, where, k)
                cache["v"].index_copy_(2, where, v)
            else:
                cache["k"][:, :, start : start + n] = k
                cache["v"][:, :, start : start + n] = v
            k, v = cache["k"], cache["v"]
            if "sliced" in kind:
                k, v = k[:, :, : start + n], v[:, :, : start + n]
        elif "functional" in kind:
            if "k" in cache:
                k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
            cache["k"], cache["v"] = k, v
        elif "list" in kind:
            cache.setdefault("k", []).extend(k.unbind(2))
            cache.setdefault("v", []).extend(v.unbind(2))
            k, v = torch.stack(cache["k"], 2), torch.stack(cache["v"], 2)
        elif "newest first" in kind:
            k, v = k.flip(2), v.flip(2)
            if "k" in cache:
                k, v = torch.cat([k, cache["k"]], 2), torch.cat([v, cache["v"]], 2)
            cache["k"], cache["v"] = k, v
        elif "ring" in kind:
            if "k" not in cache:
                cache["k"] = torch.zeros(b, H, 8, D)
                cache["v"] = torch.zeros(b, H, 8, D)
                cache["pos"] = torch.full((8,), -1)
            for i in range(n):
                s = (start + i) % 8
                cache["k"][:, :, s], cache["v"][:, :, s] = k[:, :, i], v[:, :, i]
                cache["pos"][s] = start + i
            k, v = cache["k"], cache["v"]
            keep = cache["pos"] >= 0
            hide = ~(keep & (cache["pos"] <= start + torch.arange(n)[:, None]))
        if "ring" not in kind:
            pos = torch.arange(k.shape[2])
            if "newest first" in kind:
                pos = pos.flip(0)
            hide = pos > (start + torch.arange(n))[:, None]
        if "sdpa" in kind:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=~hide)
        elif "hint" in kind:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=n > 1)
        else:
            w = (q @ k.mT * D**-0.5).masked_fill(hide, -math.inf).softmax(-1)
            out = w @ v
        return self.o(out.transpose(1, 2).reshape(b, n, E))


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.emb = nn.Embedding(V, E)
        self.pos = nn.Embedding(MAX, E)
        self.layers = nn.ModuleList(Attn(kind) for _ in range(2))
        self.head = nn.Linear(E, V)

    def forward(self, tokens, caches, start):
        x = self.emb(tokens) + self.pos(torch.arange(start, start + tokens.shape[1]))
        for m, c in zip(self.layers, caches):
            x = F.layer_norm(x + m(x, c, start), (E,))
        return self.head(x)

    def truth(self, tokens):
        net = self.double()
        x = net.emb(tokens) + net.pos(torch.arange(tokens.shape[1]))
        ws = []
        for m in net.layers:
            q, k, v = m.split(x)
            n = q.shape[2]
            hide = torch.ones(n, n, dtype=torch.bool).triu(1)
            w = (q @ k.mT * D**-0.5).masked_fill(hide, -math.inf).softmax(-1)
            ws.append(w)
            out = (w @ v).transpose(1, 2).reshape(*tokens.shape, E)
            x = F.layer_norm(x + m.o(out), (E,))
        self.float()
        return ws


def plain(net, batch=2):
    """Prefill of 5, then tokens one by one."""
    t = torch.randint(0, V, (batch, 5))
    caches, start = [{}, {}], 0
    new, logits = t, []
    for _ in range(7):
        y = net(new, caches, start)
        logits.append(y)
        start += new.shape[1]
        new = y[:, -1:].argmax(-1)
        t = torch.cat([t, new], 1)
    return [t[:, :-1]], logits


def chunks(net):
    t = torch.randint(0, V, (2, 12))
    caches, logits = [{}, {}], []
    for a, b in ((0, 3), (3, 4), (4, 9), (9, 12)):
        logits.append(net(t[:, a:b], caches, a))
    return [t], logits


def twice(net):
    a, x = plain(net)
    b, y = plain(net)
    return a + b, x + y


def interleaved(net):
    """Two conversations take turns."""
    ts = [torch.randint(0, V, (1, 9)) for _ in range(2)]
    caches, logits = [[{}, {}], [{}, {}]], []
    for a, b in ((0, 4), (4, 5), (5, 6), (6, 9)):
        for t, c in zip(ts, caches):
            logits.append(net(t[:, a:b], c, a))
    return ts, logits


def shared_prefix(net):
    """Two continuations of one prefix, from copies of its cache."""
    t = torch.randint(0, V, (1, 9))
    u = torch.cat([t[:, :5], torch.randint(0, V, (1, 4))], 1)
    c = [{}, {}]
    logits = [net(t[:, :5], c, 0)]
    import copy

    d = copy.deepcopy(c)
    for i in range(5, 9):
        logits.append(net(t[:, i : i + 1], c, i))
    for i in range(5, 9):
        logits.append(net(u[:, i : i + 1], d, i))
    return [t, u], logits


def same_start(net):
    """Conversations with the same first token."""
    ts = [torch.randint(0, V, (1, 8)) for _ in range(2)]
    ts[1][:, 0] = ts[0][:, 0]
    caches, logits = [[{}, {}], [{}, {}]], []
    for a, b in ((0, 1), (1, 2), (2, 8)):
        for t, c in zip(ts, caches):
            logits.append(net(t[:, a:b], c, a))
    return ts, logits


def repeated(net):
    """One token again and again."""
    t = torch.full((2, 8), 3)
    caches, logits = [{}, {}], []
    for i in range(8):
        logits.append(net(t[:, i : i + 1], caches, i))
    return [t], logits


def check(name, kind, loop, edit=None):
    if len(sys.argv) > 1 and not any(a in name for a in sys.argv[1:]):
        return
    bad = []
    try:
        torch.manual_seed(0)
        net = Net(kind)
        if edit:
            edit(net)
        with torch.no_grad():
            torch.manual_seed(1)
            texts, logits = loop(net)
            torch.manual_seed(1)
            with regard.watch(net) as seen:
                _, watched = loop(net)
            if not all(torch.equal(a, b) for a, b in zip(logits, watched, strict=True)):
                bad.append("outputs differ")
            truth = [net.truth(t) for t in texts]
        said = {c.name: (c.reason, c.note, dict(c.left_out)) for c in seen.coverage()}
        for i in range(2):
            want = [w for t in truth for w in t[i]]
            name_i = f"layers.{i}"
            got = [r for r in seen.records if r.name == name_i]
            if len(got) != len(want):
                text = f"{len(got)} records for {len(want)}: {said.get(name_i)}"
                bad.append(text if got else "none: " + text)
                continue
            for r, w in zip(got, want):
                full = torch.full_like(w, torch.nan)
                qp, kp = (torch.as_tensor(x) for x in (r.q_positions, r.k_positions))
                rows = torch.zeros(len(w), len(qp), w.shape[-1], dtype=torch.float64)
                if kp.max() >= w.shape[-1] or qp.max() >= w.shape[1]:
                    bad.append(f"{name_i}: positions {qp.tolist()} {kp.tolist()}")
                    break
                rows[:, :, kp] = r.weights().double()
                full[:, qp] = rows
                missing = full.isnan().any(-1).any(0).sum().item()
                if missing:
                    bad.append(f"{name_i}: {missing} rows are missing {said[name_i]}")
                    break
                err = (full - w).abs().max()
                if err > 1e-4:
                    bad.append(f"{name_i}: off by {err:.3g}; {said[name_i]}")
                    break
    except Exception as error:  # noqa: BLE001
        bad.append(f"CRASH {type(error).__name__}: {str(error)[:200]}")
    print(f"{name} | " + ("DEFECT: " + "; ".join(bad) if bad else "ok"), flush=True)


def dead(net):
    for m in net.layers:
        with torch.no_grad():
            m.qkv.weight[E : E + D] = 0
            m.qkv.bias[E : E + D] = 0


def no_positions(net):
    with torch.no_grad():
        net.pos.weight.zero_()


KINDS = (
    "functional",
    "functional, sdpa",
    "list",
    "static",
    "static, sdpa",
    "static sliced",
    "static sliced, sdpa",
    "static, scatter",
    "static, copy, sdpa",
    "newest first",
    "newest first, sdpa",
)
LOOPS = (plain, chunks, twice, interleaved, shared_prefix, same_start, repeated)
if __name__ == "__main__":
    for kind in KINDS:
        for loop in LOOPS:
            check(f"cache {kind}; {loop.__name__}", kind, loop)
    for kind in ("functional", "static", "static sliced, sdpa"):
        for loop in LOOPS:
            check(f"cache {kind}; {loop.__name__}; first head dead", kind, loop, dead)
            check(
                f"cache {kind}; {loop.__name__}; no positions", kind, loop, no_positions
            )
    check("cache functional, hint; plain", "functional, hint", plain)
