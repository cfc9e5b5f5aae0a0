import torch, regard; from torch import nn
from lib import *
# GQA by einsum in its usual form; groups-first order
class G(nn.Module):
    def __init__(s, score, out, G=2): super().__init__(); s.q = nn.Linear(8, 4*G*3); s.k = nn.Linear(8, 12); s.v = nn.Linear(8, 12); s.o = nn.Linear(4*G*3, 8); s.G, s.score, s.out_ = G, score, out
    def forward(s, x):
        B, T, _ = x.shape
        q, k, v = s.q(x).view(B, T, 3, s.G, 4), s.k(x).view(B, T, 3, 4), s.v(x).view(B, T, 3, 4)
        w = (torch.einsum(s.score, q, k) / 2).softmax(-1)
        return s.o(torch.einsum(s.out_, w, v).reshape(B, T, -1))
for score, out in (("bthgd,bshd->bhgts", "bhgts,bshd->bthgd"), ("bthgd,bshd->bghts", "bghts,bshd->bthgd"), ("bthgd,bshd->bthgs", "bthgs,bshd->bthgd")):
    torch.manual_seed(0); m = G(score, out); x = torch.randn(2, 5, 8)
    with torch.no_grad(), regard.watch(m) as seen: m(x)
    print(score, [r.shape for r in seen.records], [(c.reason, c.note) for c in seen.coverage()])
class GF(nn.Module):
    def __init__(s): super().__init__(); s.q = nn.Linear(8, 24); s.k = nn.Linear(8, 12); s.o = nn.Linear(24, 8)
    def forward(s, x):
        B, T, _ = x.shape
        q = s.q(x).view(B, T, 3, 2, 4).permute(0, 3, 2, 1, 4); k = s.k(x).view(B, T, 3, 4).transpose(1, 2)[:, None]   # (B, G, Hk, T, D)
        w = (q @ k.mT / 2).softmax(-1); s.w = w
        return s.o((w @ k).permute(0, 3, 2, 1, 4).reshape(B, T, 24))    # columns of o: kv head, then group
m = GF(); x = torch.randn(1, 5, 8)
with torch.no_grad(), regard.watch(m) as seen: m(x)
g = seen.records[0].weights(); w = m.w[0].transpose(0, 1).flatten(0, 1)
print("head of the record -> slice of o:", [[j for j in range(6) if torch.allclose(g[i], w[j], atol=1e-5)] for i in range(6)], seen.coverage()[0].note)
