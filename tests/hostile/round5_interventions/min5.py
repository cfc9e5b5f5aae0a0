import torch, torch.nn as nn, torch.nn.functional as F, regard
class R(nn.Module):
    def __init__(s,emb,chunk,tied): super().__init__(); s.e=nn.Embedding(64,32) if emb else nn.Linear(32,32); s.i=nn.Linear(32,96); s.o=nn.Linear(32,64); s.chunk=chunk; s.k=tied
    def forward(s,t):
        x=s.e(t); B,N,_=x.shape
        if s.chunk: q,k,v=[u.view(B,N,4,8).transpose(1,2) for u in s.i(x).chunk(3,-1)]
        else: q,k,v=s.i(x).view(B,N,3,4,8).permute(2,0,3,1,4)
        if s.k: sc=(q@k.transpose(-1,-2)/8**.5)
        else: sc=q@k.mT/8**.5
        z=sc.softmax(-1)@v
        return s.o(z.transpose(1,2).flatten(2))
for emb in (0,1):
  for ch in (0,1):
    for n in (6,8,9,32):
      r=R(emb,ch,0).eval(); x=torch.randint(0,64,(2,n)) if emb else torch.randn(2,n,32)
      for kw in (dict(heads=[(0,2)]),dict(layers=[0]),dict(layers=[0],keys=[1])):
        try:
            with torch.no_grad(), regard.knock_out(r,**kw): r(x); m='ok'
        except Exception as e: m=str(e)[:90]
        print('min5',emb,ch,n,list(kw),'|',m)
