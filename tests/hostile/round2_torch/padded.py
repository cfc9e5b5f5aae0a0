"""Hand-written models that are told of padding, and what a mask means in them."""

import math
import sys

import regard
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
B, H, N, D = 3, 2, 7, 12
E = H * D


class Layer(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.q, self.k = nn.Linear(E, E), nn.Linear(E, E)
        self.v, self.o, self.fused = nn.Linear(E, E), nn.Linear(E, E), fused
        for m in (self.q, self.k):
            nn.init.normal_(m.weight, std=2 / math.sqrt(E))
        self.true = None

    def forward(self, x, c, hide=None):
        q, k, v = (
            m(y).view(len(y), -1, H, D).transpose(1, 2)
            for m, y in ((self.q, x), (self.k, c), (self.v, c))
        )
        s = q @ k.mT * D**-0.5
        if hide is not None:
            s = s.masked_fill(hide, -1e9)
        w = s.softmax(-1)
        self.true = w.detach().double()
        if self.fused and hide is not None:  # a blind row of the kernel is 0
            self.true = self.true.masked_fill(hide.all(-1, keepdim=True), 0)
        if self.fused:
            ok = None if hide is None else ~hide
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=ok)
        else:
            out = w @ v
        return self.o(out.transpose(1, 2).flatten(2))


class Net(nn.Module):
    """mode: which attention is masked by what."""

    def __init__(self, mode, fused=False):
        super().__init__()
        self.mode, self.a, self.b = mode, Layer(fused), Layer(fused)

    def forward(self, x, context=None, attention_mask=None):
        m = attention_mask
        if self.mode == "self":
            hide = (m == 0)[:, None, None] if m.dim() == 2 else m == 0
            x = F.layer_norm(x + self.a(x, x, hide), (E,))
            return self.b(x, x, hide)
        if self.mode == "inverted":
            hide = (m != 0)[:, None, None]
            x = F.layer_norm(x + self.a(x, x, hide), (E,))
            return self.b(x, x, hide)
        if self.mode == "rows and columns":
            ok = (m != 0)[:, None, None] & (m != 0)[:, None, :, None]
            x = F.layer_norm(x + self.a(x, x, ~ok), (E,))
            return self.b(x, x, ~ok)
        if self.mode == "context":  # the mask is of the context
            x = F.layer_norm(x + self.a(x, x), (E,))
            return self.b(x, context, (m == 0)[:, None, None])
        if self.mode == "queries":  # the mask is of x, the context has none
            x = F.layer_norm(x + self.a(x, x, (m == 0)[:, None, None]), (E,))
            return self.b(x, context)
        if self.mode == "ignored":
            x = F.layer_norm(x + self.a(x, x), (E,))
            return self.b(x, x)
        if self.mode == "diagonal":  # no token looks at itself
            eye = torch.eye(x.shape[1], dtype=torch.bool)
            hide = (m == 0)[:, None, None] | eye
            x = F.layer_norm(x + self.a(x, x, hide), (E,))
            return self.b(x, x, eye)


def situation(name, mode, mask, fused=False, long=N):
    """Every row of a true matrix is shown, or is of a token that is hidden and told."""
    name = f"{name}, {'sdpa' if fused else 'eager'}"
    if len(sys.argv) > 1 and not any(a in name for a in sys.argv[1:]):
        return
    bad = []
    try:
        torch.manual_seed(0)
        net, x = Net(mode, fused), torch.randn(B, N, E)
        c = torch.randn(B, long, E)
        with torch.no_grad():
            plain = net(x, context=c, attention_mask=mask)
            with regard.watch(net) as seen:
                out = net(x, context=c, attention_mask=mask)
        if not torch.equal(plain, out):
            bad.append("outputs differ")
        for layer in ("a", "b"):
            true = getattr(net, layer).true
            covers = [
                z
                for z in seen.coverage()
                if z.name == layer
                and z.attention
                and z.via != ""
                and (z.kept or z.reason)
            ]
            covers = [z for z in covers if z.kept] or covers
            records = [r for r in seen.records if r.name == layer]
            (cover,) = covers[:1]
            if len(records) != B:
                bad.append(f"{layer}: {len(records)} records, {cover.reason}")
                continue
            for s, (r, w) in enumerate(zip(records, true)):
                got = r.weights().double()
                h, nq, nk = got.shape
                # find the tokens that were removed: subsets in order
                real = (torch.ones(N) if mask.dim() > 2 else mask[s] != 0).bool()
                full_k = torch.ones(w.shape[2], dtype=torch.bool)
                choices = [(torch.ones(N).bool(), full_k), (real, full_k)]
                if len(real) == w.shape[2]:
                    choices += [(torch.ones(N).bool(), real), (real, real)]
                fits = [
                    (a, b)
                    for a, b in choices
                    if (a.sum(), b.sum()) == (nq, nk)
                    and torch.allclose(w[:, a][:, :, b], got, atol=1e-4)
                ]
                if not fits:
                    bad.append(
                        f"{layer}[{s}]: {tuple(got.shape)} for {tuple(w.shape)}"
                        f" fits no removal; {cover.note}; {cover.left_out}"
                    )
                    break
                rows, keys = max(fits, key=lambda f: f[0].sum() + f[1].sum())
                gone = w[:, rows][:, :, ~keys]
                lost = gone.abs().max() if gone.numel() else 0
                if lost > 1e-6:
                    bad.append(f"{layer}[{s}]: keys of weight {lost:.2g} were removed")
                    break
                own = layer == "a" or mode in (
                    "self",
                    "ignored",
                    "diagonal",
                    "rows and columns",
                )
                own = own and mode not in ("ignored",)
                if (~rows).any() and (
                    mode in ("context", "ignored")
                    or (layer == "b" and mode == "queries")
                    or not own
                ):
                    bad.append(
                        f"{layer}[{s}]: {(~rows).sum()} rows were removed that "
                        f"are no padding; {dict(cover.left_out)}"
                    )
                    break
    except Exception as error:  # noqa: BLE001
        bad.append(f"CRASH {type(error).__name__}: {str(error)[:200]}")
    print(f"{name} | " + ("DEFECT: " + "; ".join(bad) if bad else "ok"), flush=True)


lengths = torch.tensor([N, N - 2, N - 4])
RIGHT = (torch.arange(N) < lengths[:, None]).long()
LEFT = RIGHT.flip(1)
HOLES = RIGHT.clone()
HOLES[1, 2] = HOLES[2, 0] = 0
if __name__ == "__main__":
    for fused in (False, True):
        for side, mask in (("right", RIGHT), ("left", LEFT), ("holes", HOLES)):
            for mode in (
                "self",
                "rows and columns",
                "context",
                "queries",
                "ignored",
                "diagonal",
                "inverted",
            ):
                situation(f"padding {side}, {mode}", mode, mask, fused)
        situation("padding bool", "self", RIGHT.bool(), fused)
        situation("padding float", "self", RIGHT.float(), fused)
        situation("padding of 4 axes", "self", RIGHT[:, None, None], fused)
        situation(
            "context of another length", "context", torch.ones(B, 5).long(), fused, 5
        )
        none = RIGHT.clone()
        none[1] = 0
        situation("a sequence without tokens", "self", none, fused)
