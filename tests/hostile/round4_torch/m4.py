# R6: trace_heads, 3-D sdpa
import torch, regard; from torch import nn; import torch.nn.functional as F
class A(nn.Module):
    def __init__(s): super().__init__(); s.p = nn.Linear(12, 36); s.o = nn.Linear(12, 12)
    def forward(s, x, cut=None):
        B, T, _ = x.shape
        q, k, v = (t.reshape(B * 3, T, 4) for t in s.p(x).view(B, T, 3, 3, 4).permute(2, 0, 3, 1, 4))
        z = F.scaled_dot_product_attention(q, k, v).view(B, 3, T, 4)
        if cut is not None: z = z * (torch.arange(3) != cut)[:, None, None]
        return s.o(z.transpose(1, 2).flatten(2))
torch.manual_seed(0); m = A().eval(); x = torch.randn(2, 5, 12)
with regard.ablate.trace_heads(m) as tr: y = m(x)
print(tuple(tr.outputs(0).shape))
for h in range(3): print(h, tuple(tr.writes(0, h).shape), "off by", float((tr.writes(0, h) - (m(x) - m(x, cut=h))).abs().max().detach()))
print("writes(0, 4) of 3 heads:", tuple(tr.writes(0, 4).shape))
h=0; w=tr.writes(0,0); z=tr.outputs(0); print("equals what TOKEN 0 writes?", )
for name, f in dict(attribute_weights=lambda: regard.ablate.attribute_weights(m, {"x": x[:1]}, lambda l: l[:, -1, 0]), weigh_values=lambda: regard.value_weights.weigh_values(m, {"x": x[:1]})).items():
    try: print(name, f())
    except Exception as e: print(name, type(e).__name__, str(e)[:150])
