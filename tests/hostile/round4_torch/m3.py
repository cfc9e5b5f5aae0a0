# R5: hidden key and a finite mask
import torch, regard; from torch import nn; import torch.nn.functional as F
class A(nn.Module):
    def __init__(s, fill, own): super().__init__(); s.p = nn.Linear(12, 36); s.fill, s.own = fill, own
    def forward(s, x):
        q, k, v = s.p(x).view(*x.shape[:2], 3, 3, 4).permute(2, 0, 3, 1, 4); c = torch.ones(5, 5).tril().bool()
        if s.own: return (q @ k.mT / 2).masked_fill(~c, s.fill).softmax(-1) @ v
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(5, 5).masked_fill(~c, s.fill))
for own in (True, False):
  for fill in (-torch.inf, torch.finfo(torch.float32).min, -1e30, -1e9, -1e4):
    torch.manual_seed(0); m = A(fill, own); x = torch.randn(1, 5, 12)
    with torch.no_grad(), regard.ablate.knock_out(m, keys=[0]): got = m(x)
    y = x.clone(); y[:, 4] += 1      # the future of row 0
    with torch.no_grad(), regard.ablate.knock_out(m, keys=[0]): g2 = m(y)
    print("own softmax" if own else "sdpa", fill, "| output of row 0 under knock_out(keys=[0]):", got[0, 0, 0].tolist()[:2], "| depends on token 4:", bool((got - g2)[0, :, 0].abs().max() > 1e-6))
