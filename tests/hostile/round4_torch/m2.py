# R4: numbers of layers differ between seen.layer / table and knock_out / effect
import torch, regard; from torch import nn; import torch.nn.functional as F
class A(nn.Module):
    def __init__(s, kind=""): super().__init__(); s.p = nn.Linear(12, 36); s.o = nn.Linear(12, 12); s.kind = kind
    def forward(s, x):
        q, k, v = s.p(x).view(*x.shape[:2], 3, 3, 4).permute(2, 0, 3, 1, 4)
        if s.kind == "softmax in float64": z = (q @ k.mT / 2).softmax(-1, dtype=torch.float64).float() @ v
        elif s.kind == "sharp": z = (q @ k.mT * 1e6).softmax(-1) @ v
        elif s.kind == "empty": z = v; F.scaled_dot_product_attention(q[:, :, :0], k, v)   # e.g. no queries this time
        else: z = F.scaled_dot_product_attention(q, k, v)
        return s.o(z.transpose(1, 2).flatten(2))
for kind in ("empty", "softmax in float64", "sharp"):
    torch.manual_seed(0); m = nn.ModuleDict(dict(first=A(kind), a=A(), b=A())); m.forward = lambda x: [x := x + l(x) for l in m.values()][-1]
    x = torch.randn(2, 5, 12); m.eval()
    with torch.no_grad(), regard.watch(m, keep="qkv") as seen: m(x)
    print(kind, "|", seen.layers, "| seen.layer(0) is", seen.layer(0).name, "|", [(c.name, c.reason or c.note) for c in seen.coverage() if c.reason or c.note])
    for number in (0, 1):
        with torch.no_grad(), regard.ablate.knock_out(m, [(number, 1)]): got = m(x)
        for name in m:
            try:
                with torch.no_grad(), regard.ablate.knock_out(m, [(name, 1)]): same = torch.equal(m(x), got)
                if same: print("   knock_out layer", number, "= knock_out", repr(name), "; equal to no ablation:", torch.equal(got, m(x)))
            except Exception as e: print("   ", name, str(e)[:80])
    print("   effect (0,1):", str(regard.ablate.effect(m, lambda m: m(x), heads=[(0, 1)])).splitlines()[0])
    with torch.no_grad(), regard.watch(m, layers=[0]) as s0: m(x)
    print("   watch(layers=[0]):", s0.layers)
