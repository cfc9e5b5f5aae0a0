import torch, torch.nn as nn, torch.nn.functional as F, regard
class Attn(nn.Module):
    def __init__(s): super().__init__(); s.i, s.o = nn.Linear(32, 96), nn.Linear(32, 32)
    def forward(s, x):
        q, k, v = s.i(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        s.map = (q @ k.mT / 8**0.5).softmax(-1).detach()      # kept for a plot
        return s.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
class Model(nn.Module):
    def __init__(s): super().__init__(); s.a = nn.ModuleList(Attn() for _ in range(3))
    def forward(s, x):
        for a in s.a: x = x + a(x)
        return x
torch.manual_seed(0); m, x = Model().eval(), torch.randn(1, 6, 32)
with torch.no_grad(), regard.watch(m) as seen: base = m(x)
print(list(seen.layers))
for n in range(6):
    with torch.no_grad(), regard.knock_out(m, layers=[n]): y = m(x)
    w0 = m.a[n // 2].o.weight.data.clone()
    def cut(l):
        w = m.a[l].o.weight.data.clone(); m.a[l].o.weight.data.zero_(); z = m(x).detach(); m.a[l].o.weight.data.copy_(w); return z
    print(n, "unchanged" if torch.equal(y, base) else [l for l in range(3) if torch.allclose(y, cut(l), atol=1e-6)])
