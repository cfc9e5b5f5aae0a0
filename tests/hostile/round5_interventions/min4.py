import torch, torch.nn as nn, torch.nn.functional as F, regard
class Pool(nn.Module):  # pointer/copy: weights used for z and again afterwards
    def __init__(s): super().__init__(); s.i, s.o, s.g = nn.Linear(32,96), nn.Linear(32,32), nn.Linear(32,32)
    def forward(s, x):
        q, k, v = s.i(x).view(*x.shape[:2],3,4,8).permute(2,0,3,1,4)
        w = (q @ k.mT / 8**.5).softmax(-1)
        return s.o((w @ v).transpose(1,2).flatten(2)) + w.mean(1) @ s.g(x)
torch.manual_seed(0); m = nn.Sequential(Pool()).eval(); x = torch.randn(1,6,32)
with torch.no_grad(), regard.knock_out(m, heads=[(0,2)]): y = m(x)
m[0].o.weight.data[:,16:24] = 0
print((y - m(x)).abs().max())
