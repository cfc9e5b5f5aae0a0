import torch, regard; from torch import nn; import torch.nn.functional as F
import numpy as np
from regard.stats import received, walk, RowSums, ColumnSums, entropy, mass
# R7 differential
class D(nn.Module):
    def __init__(s): super().__init__(); s.p = nn.Linear(12, 36); s.o = nn.Linear(12, 12)
    def forward(s, x, cut=None):
        q, k, v = s.p(x).view(*x.shape[:2], 3, 3, 4).permute(2, 0, 3, 1, 4)
        w = (q[..., :2] @ k[..., :2].mT).softmax(-1) - 0.4 * (q[..., 2:] @ k[..., 2:].mT).softmax(-1)
        z = w @ v
        if cut is not None: z = z * (torch.arange(3) != cut)[:, None, None]
        return s.o(z.transpose(1, 2).flatten(2))
torch.manual_seed(0); m = D(); x = torch.randn(1, 5, 12)
with torch.no_grad(), regard.watch(m) as seen: m(x)
print(seen)
for key in (0, ""):
    if key == "": continue
    with torch.no_grad(), regard.ablate.knock_out(m, [(key, 1)]): got = m(x)
    print("knock_out", repr(key), "head 1 off by", float((got - m(x, cut=1)).abs().max().detach()))
# R9 stats on NaN rows, +inf
class N(nn.Module):
    def forward(s, q, k, v): return (q @ k.mT / 2).masked_fill(torch.ones(4, 4).triu(0).bool(), -torch.inf).softmax(-1) @ v
q = torch.randn(3, 1, 2, 4, 4)
with regard.watch(N(), keep="qkv") as seen: N()(*q)
with regard.watch(n := N(), keep="qkv") as seen: n(*q)
r = seen.records[0]
print("weights of row 0", r.weights(0, 0), "\nsum over rows of weights", r.weights(heads=0).sum(0), "\nreceived", np.asarray(received(r))[0], "\nRowSums", np.asarray(walk(r, RowSums())[0])[0] if isinstance(walk(r, RowSums()), tuple) else np.asarray(walk(r, RowSums()))[0], "\nColumnSums", np.asarray(walk(r, ColumnSums())).reshape(2,-1)[0], "\nentropy", np.asarray(entropy(r))[0])
class I(nn.Module):
    def forward(s, q, k, v): s.w = (q @ k.mT / 2 + torch.where(torch.eye(4) > 0, torch.inf, 0.)).softmax(-1); return s.w @ v
with regard.watch(i := I(), keep="qkv") as seen: i(*q)
print("model's weights row 0", i.w[0, 0, 0], "shown", seen.records[0].weights(0, 0), str(seen).splitlines()[-1])
# R12 w@w
class W(nn.Module):
    def forward(s, q, k, v): w = (q @ k.mT / 2).softmax(-1); return (w @ w) @ v
with regard.watch(w := W(), keep="qkv") as seen: w(*q)
print(seen)
# R8 crashes
class E(nn.Module):
    def forward(s, q, k, v): return F.scaled_dot_product_attention(q, k[:, :, :0], v[:, :, :0]) + F.scaled_dot_product_attention(q, k, v)
try:
    with torch.no_grad(), regard.ablate.knock_out(e := E(), [("", 1)]): e(*q)
except Exception as ex: print("empty keys:", type(ex).__name__, ex)
class V(nn.Module):
    def forward(s, q, k, v): return torch.vmap(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)(q, k, v)
try:
    with torch.no_grad(), regard.ablate.knock_out(e := V(), [("", 1)]): e(*q)
except Exception as ex: print("vmap:", type(ex).__name__, ex)
