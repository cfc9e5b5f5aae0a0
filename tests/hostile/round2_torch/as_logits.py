"""Layers that are stored as logits, and two inputs in one watch: k is the identity."""

import math
import sys

import regard
import torch
from torch import nn

torch.set_num_threads(1)
D = 12


class Perceiver(nn.Module):
    """Learnt questions, (M, D), to the keys of each input, (B, N, D)."""

    def __init__(self):
        super().__init__()
        self.z = nn.Parameter(torch.randn(5, D))
        self.k = nn.Linear(D, D)
        nn.init.normal_(self.k.weight, std=2 / math.sqrt(D))

    def forward(self, x):
        self.true = (self.z @ self.k(x).mT * 0.5).softmax(-1)
        return self.true @ x


class Gated(nn.Module):
    """Gated pooling with several heads (Ilse); scores of a linear layer."""

    def __init__(self, heads):
        super().__init__()
        self.v, self.u, self.w = nn.Linear(D, 9), nn.Linear(D, 9), nn.Linear(9, heads)
        nn.init.normal_(self.w.weight, std=3.0)

    def forward(self, x):
        s = self.w(torch.tanh(self.v(x)) * torch.sigmoid(self.u(x)))
        self.true = s.mT.softmax(-1)
        return self.true @ x


class Additive(nn.Module):
    """Additive attention of some questions to all tokens."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.s = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 1)
        nn.init.normal_(self.s.weight, std=3.0)

    def forward(self, x):
        s = self.s(torch.tanh(self.a(x[:, :3, None]) + self.b(x)[:, None]))[..., 0]
        self.true = s.softmax(-1)
        return self.true @ x


class Capped(nn.Module):
    """Clamped scores of the last tokens to all of them."""

    def forward(self, x):
        s = (x[:, -4:] @ x.mT).clamp(-3, 3)
        self.true = s.softmax(-1)
        return self.true @ x


def situation(name, model, batch, n, change):
    if len(sys.argv) > 1 and not any(a in name for a in sys.argv[1:]):
        return
    torch.manual_seed(0)
    x = torch.randn(batch, n, D)
    truths = []
    with torch.no_grad(), regard.watch(model) as seen:
        for y in (x, change(x)):
            model(y)
            truths += list(model.true)
    got = [r.weights()[0] for r in seen.records]
    (c,) = [z for z in seen.coverage()]
    said = f"{c.reason!r} {c.note!r} {dict(c.left_out)}"
    if [g.shape for g in got] == [t.shape for t in truths]:
        err = max((g - t).abs().max() for g, t in zip(got, truths))
        bad = f"off by {err:.3g} {said}" if err > 1e-4 else ""
    elif not got:
        bad = f"no record {said}"
    else:
        rows = seen.records[0].q_positions.tolist()
        bad = f"{len(got)} records of {tuple(got[0].shape)} for {len(truths)} of "
        bad += f"{tuple(truths[0].shape)}; rows of sequence 0 at {rows}; {said}"
        both = torch.cat([truths[0], truths[batch]])
        if got[0].shape == both.shape and (got[0] - both).abs().max() < 1e-4:
            bad = "two inputs are one sequence: " + bad
    print(f"{name} | " + (f"DEFECT: {bad}" if bad else "ok"), flush=True)


def other(x):
    return torch.randn_like(x)


torch.manual_seed(1)
for batch in (1, 2):
    for n in (6, 20):
        for make in (Perceiver, lambda: Gated(1), lambda: Gated(4), Additive, Capped):
            model = make()
            kind = type(model).__name__
            heads = getattr(getattr(model, "w", None), "out_features", "")
            situation(
                f"{kind} {heads}, batch {batch}, {n} keys", model, batch, n, other
            )
