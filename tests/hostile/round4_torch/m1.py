# R1: heads first (H, B, T, D) / folded heads in batch of 4-D sdpa
import torch, regard; from torch import nn; import torch.nn.functional as F
class A(nn.Module):
    def __init__(s, kind): super().__init__(); s.p = nn.Linear(12, 36); s.o = nn.Linear(12, 12); s.kind = kind
    def forward(s, x, cut=None):
        B, T, _ = x.shape
        q, k, v = s.p(x).view(B, T, 3, 3, 4).permute(2, 3, 0, 1, 4)          # each (H, B, T, D)
        if s.kind == "(H,B,T,D)": z = F.scaled_dot_product_attention(q, k, v)
        if s.kind == "(HB,1,T,D)": z = F.scaled_dot_product_attention(*(t.reshape(3*B, 1, T, 4) for t in (q, k, v))).view(3, B, T, 4)
        if s.kind == "(1,HB,T,D)": z = F.scaled_dot_product_attention(*(t.reshape(1, 3*B, T, 4) for t in (q, k, v))).view(3, B, T, 4)
        if s.kind == "own softmax": z = (q @ k.mT / 2).softmax(-1) @ v
        z = z.permute(1, 2, 0, 3).reshape(B, T, 3, 4)
        if cut is not None: z = z * (torch.arange(3) != cut)[:, None]
        return s.o(z.flatten(2))
for B in (1, 3):
  for kind in ("(H,B,T,D)", "(HB,1,T,D)", "(1,HB,T,D)", "own softmax"):
    torch.manual_seed(0); m = A(kind); x = torch.randn(B, 5, 12)
    with torch.no_grad():
        with regard.watch(m, keep="qkv") as seen: m(x)
        print(B, kind, "watch:", len(seen.records), "sequences of", seen.records[0].shape, [c.note for c in seen.coverage()])
        for name, cm in (("knock_out", lambda: regard.ablate.knock_out(m, [(0, 0)])), ("patch 0*z", lambda: regard.patch_heads(m, lambda z: z * 0, [(0, 0)])), ("hide key 2", lambda: regard.ablate.knock_out(m, [(0, 0)], keys=[2]))):
            try:
                with cm(): got = m(x)
                print("   ", name, "sequences that changed:", [bool((got[b] - m(x)[b]).abs().max() > 1e-6) for b in range(B)], "right:", bool(torch.allclose(got, m(x, cut=0), atol=1e-6)) if "hide" not in name else "-")
            except Exception as e: print("   ", name, type(e).__name__, str(e)[:100])
    with regard.ablate.trace_heads(m) as tr: y = m(x)
    try: print("    trace:", tuple(tr.outputs(0).shape), "writes(0,0) off by", float((tr.writes(0, 0) - (m(x) - m(x, cut=0))).abs().max().detach()))
    except Exception as e: print("    trace:", str(e)[:90])
