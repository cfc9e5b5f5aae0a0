from lib import *
from regard.ablate import *
class A(nn.Module):
    def __init__(s,kind,H=3): super().__init__(); s.kind=kind; s.H=H; s.q=nn.Linear(12,12);s.k=nn.Linear(12,12);s.v=nn.Linear(12,12); s.o=nn.Linear(12,12)
    def forward(s,x,cut=None,keys=None):
        B,T,C=x.shape; H=s.H; D=C//H; k_=s.kind
        q,k,v=(l(x).view(B,T,H,D) for l in (s.q,s.k,s.v))
        if k_.startswith("h"): p=(2,0,1,3)   # H B T D
        elif k_.startswith("b"): p=(0,2,1,3)
        elif k_.startswith("f"): p=None
        if p: q,k,v=(t.permute(*p) for t in (q,k,v))
        else: q,k,v=(t.permute(0,2,1,3).reshape(B*H,T,D) for t in (q,k,v))
        if "T" in k_: pass
        c=torch.ones(T,T).tril().bool()
        if "sdpaf" in k_: z=F.scaled_dot_product_attention(q,k,v,attn_mask=torch.where(c,0.,torch.finfo(torch.float32).min))
        elif "sdpa9" in k_: z=F.scaled_dot_product_attention(q,k,v,attn_mask=torch.where(c,0.,-1e9))
        elif "sdpa4" in k_: z=F.scaled_dot_product_attention(q,k,v,attn_mask=torch.where(c,0.,-1e4))
        elif "sdpa" in k_: z=F.scaled_dot_product_attention(q,k,v)
        else:
            a=q@k.mT*D**-.5
            if "9" in k_: a=a.masked_fill(~c,-1e9)
            if "m" in k_: a=a.masked_fill(~c,torch.finfo(a.dtype).min)
            if "4" in k_: a=a+(~c)*-1e4
            if keys is not None: a[...,keys]=-torch.inf; a=a.masked_fill(~c,-torch.inf)
            w=a.softmax(-1).nan_to_num(0) if keys is not None else a.softmax(-1)
            z=w@v
        if k_[0]=="h": z=z.permute(1,2,0,3).contiguous()
        elif k_[0]=="b": z=z.permute(0,2,1,3).contiguous()
        else: z=z.view(B,H,T,D).permute(0,2,1,3).contiguous()
        if cut is not None: z[:,:,cut]=0
        return s.o(z.reshape(B,T,C))
torch.manual_seed(0)
for kind in ("h sdpa","h","b sdpa","f sdpa"):
  for B in (1,2,3,4):
    for grad in (0,1):
        m=A(kind); x=torch.randn(B,5,12)
        with torch.set_grad_enabled(bool(grad)):
            if grad: x.requires_grad_()
            with regard.watch(m) as seen: m(x)
            print(kind,"B",B,"grad",grad,"watch:",[r.shape for r in seen.records], [c.note for c in seen.coverage()])
            for h in range(2):
                want=m(x,cut=h)
                try:
                    with knock_out(m,[(0,h)]): got=m(x)
                    print("   knock_out head",h,"ok" if torch.allclose(got,want,atol=1e-5) else f"WRONG; edited rows of batch: {[(got[b]-m(x)[b]).abs().max().item()>1e-6 for b in range(B)]}")
                except Exception as e: print("   ",short(e,120))
print("--- keys=[0] under a finite mask")
for kind in ("b9","bm","b4","b sdpa9","b sdpaf","b sdpa4"):
    m=A(kind); x=torch.randn(2,5,12)
    r=A("b9"); r.load_state_dict(m.state_dict()); want=r(x,keys=[0])
    try:
        with torch.no_grad(),knock_out(m,keys=[0]): got=m(x)
        print(kind, "off by row", (got-want).abs().amax((0,2)))
        with torch.no_grad(),knock_out(m,[(0,1)],keys=[0]), regard.watch(m) as seen: got=m(x)
        print("   watch row 0:", seen.records[0].weights(0), [c.note for c in seen.coverage()])
    except Exception as e: print("   ",short(e,150))
print("--- trace with 3D sdpa")
m=A("f sdpa"); x=torch.randn(2,5,12)
with trace_heads(m) as tr: y=m(x)
z=tr.outputs(0); print(z.shape, tr)
for h in range(3):
    w=tr.writes(0,h); want=m(x)-m(x,cut=h); print("writes",h,w.shape,(w-want).abs().max())
for h in range(3,6):
    try: print("writes",h,tr.writes(0,h).shape)
    except Exception as e: print(short(e))
