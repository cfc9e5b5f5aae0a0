"""Keys whose first eight numbers do not tell tokens apart.

A head that was pruned (zero), or keys that begin with their position. One model reads
two contexts of the same length that differ in one token.
"""

import math
import sys

import regard
import torch
from torch import nn

torch.set_num_threads(1)
H, D, NQ, NK = 2, 24, 64, 40
E = H * D


class Cross(nn.Module):
    """Attention to a context; keys are (position, content) if first is positions."""

    def __init__(self, first):
        super().__init__()
        self.q, self.k = nn.Linear(E, E), nn.Linear(E, E)
        self.v, self.o = nn.Linear(E, E), nn.Linear(E, E)
        for m in (self.q, self.k):
            nn.init.normal_(m.weight, std=2 / math.sqrt(E))
        self.first = first
        self.pos = nn.Parameter(torch.randn(300, 8))
        if first == "pruned":
            with torch.no_grad():
                self.k.weight[:D] = 0
                self.k.bias[:D] = 0

    def keys(self, c, start=0):
        k = self.k(c).view(len(c), -1, H, D)
        if self.first == "positions":
            p = self.pos[start : start + c.shape[1], None].expand(len(c), -1, H, 8)
            k = torch.cat([p, k[..., 8:]], -1)
        return k.transpose(1, 2), self.v(c).view(len(c), -1, H, D).transpose(1, 2)

    def queries(self, x):
        return self.q(x).view(len(x), -1, H, D).transpose(1, 2)

    def forward(self, x, c, causal=False):
        q, (k, v) = self.queries(x), self.keys(c)
        return self.o(self.attend(q, k, v, causal).transpose(1, 2).flatten(2))

    def attend(self, q, k, v, causal):
        s = q @ k.mT * D**-0.5
        if causal:
            n, m = s.shape[-2:]
            hide = torch.ones(n, m, dtype=torch.bool).triu(1 + m - n)
            s = s.masked_fill(hide, -math.inf)
        return s.softmax(-1) @ v

    def truth(self, x, c, causal=False):
        q, (k, _) = self.queries(x).double(), self.keys(c)
        s = q @ k.double().mT * D**-0.5
        if causal:
            n, m = s.shape[-2:]
            hide = torch.ones(n, m, dtype=torch.bool).triu(1 + m - n)
            s = s.masked_fill(hide, -math.inf)
        return s.softmax(-1)


def judge(name, seen, truths):
    """truths: (1, H, Nq, Nk) by call; every row shown must be one of the truth."""
    (c,) = seen.coverage()
    said = f"reason {c.reason!r} note {c.note!r} left out {dict(c.left_out)}"
    certified = [x for x in str(seen).splitlines() if "certified" in x]
    rows = (
        torch.cat([r.weights().double() for r in seen.records], 1)
        if (seen.records and len({r.shape[2] for r in seen.records}) == 1)
        else None
    )
    want = torch.cat([t[0] for t in truths], 1)
    if not seen.records:
        bad = f"no record: {said}"
    elif rows is None or rows.shape != want.shape:
        bad = f"{[r.shape for r in seen.records]} for {tuple(want.shape)}: {said}"
    else:
        err = (rows - want).abs().amax((0, 2))
        bad = ""
        if err.isnan().any():
            bad = f"{err.isnan().sum()} rows are NaN; {said}; " + "; ".join(certified)
        elif err.max() > 1e-3:
            bad = f"off by {err.max():.3g} in {(err > 1e-3).sum()} of {len(err)} rows; "
            bad += said + "; " + "; ".join(certified)
    print(f"{name} | " + (f"DEFECT: {bad}" if bad else "ok"), flush=True)


def cross(first, change, seed=0, rows=NQ, keys=NK, gain=1.0):
    torch.manual_seed(seed)
    net = Cross(first)
    x, c = torch.randn(1, rows, E) * gain, torch.randn(1, keys, E)
    d = change(c.clone())
    with torch.no_grad(), regard.watch(net) as seen:
        net(x, c)
        net(x, d)
    return seen, [net.truth(x, c).detach(), net.truth(x, d).detach()]


def one_token(c):
    c[:, 7] = torch.randn(E)
    return c


def slightly(c):
    c[:, 7] += 0.3 * torch.randn(E)
    return c


def permuted(c):
    return c[:, torch.randperm(c.shape[1])]


def all_tokens(c):
    return torch.randn_like(c)


if __name__ == "__main__":
    for first in ("content", "pruned", "positions"):
        for change in (one_token, slightly, all_tokens, permuted):
            for rows in (4, 64):
                name = f"cross, {first} first, {change.__name__}, {rows} rows"
                if len(sys.argv) > 1 and not any(a in name for a in sys.argv[1:]):
                    continue
                judge(name, *cross(first, change, rows=rows))
    for first in ("pruned", "positions"):
        for seed in range(8):
            name = f"cross, {first} first, one token of 256, sharp, seed {seed}"
            if len(sys.argv) > 1 and not any(a in name for a in sys.argv[1:]):
                continue
            judge(name, *cross(first, one_token, seed, rows=200, keys=256, gain=5.0))
