"""A scripted module beside attention: are layers after it still told apart?"""

import regard
import torch
from torch import nn

torch.set_num_threads(1)
N, D = 6, 12


class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Linear(D, 3 * D)

    def forward(self, x):
        q, k, v = self.p(x).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v


class Model(nn.Module):
    def __init__(self, scripted):
        super().__init__()
        self.before, self.act, self.after = Attn(), nn.GELU(), Attn()
        if scripted == "script":
            self.act = torch.jit.script(self.act)
        if scripted == "trace":
            self.act = torch.jit.trace(self.act, torch.randn(2, 3))
        if scripted == "freeze":
            self.act = torch.jit.freeze(torch.jit.script(self.act.eval()))
        if scripted == "whole attention":
            self.after = torch.jit.script(self.after)

    def forward(self, x):
        return self.after(self.act(self.before(x)))


for kind in ("nothing", "script", "trace", "freeze", "whole attention"):
    torch.manual_seed(0)
    model, x = Model(kind), torch.randn(2, N, D)
    with torch.no_grad():
        plain = model(x)
        with regard.watch(model) as seen:
            out = model(x)
    names = sorted({r.name for r in seen.records})
    bad = [] if torch.equal(plain, out) else ["outputs differ"]
    if names != ["after", "before"]:
        bad.append(f"layers {names}")
    bad += [c.reason for c in seen.coverage() if "observer failed" in c.reason]
    bad = "; ".join(bad)
    print(f"model with {kind} scripted | " + (f"DEFECT: {bad}" if bad else "ok"))
