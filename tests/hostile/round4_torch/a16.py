from lib import *
import lib
from regard.ablate import *
from a4 import Attn
import a4
class Odd(nn.Module):
    def __init__(s,kind,C=12): super().__init__(); s.kind=kind; s.q=nn.Linear(C,C);s.k=nn.Linear(C,C);s.v=nn.Linear(C,C); s.sink=nn.Parameter(torch.randn(3)); s.ed=None
    def forward(s,x):
        B,T,C=x.shape; h=lambda t:t.view(B,-1,3,4).transpose(1,2); q,k,v=h(s.q(x)),h(s.k(x)),h(s.v(x)); a=q@k.mT*.5; kd=s.kind
        if kd=="diag inplace": a.diagonal(dim1=-2,dim2=-1).fill_(-torch.inf); z=a.softmax(-1)@v
        elif kd=="slice inplace": a[:,:,:,0]+=1.; z=a.softmax(-1)@v
        elif kd=="sink first": z=torch.cat([s.sink.view(1,3,1,1).expand(B,3,T,1),a],-1).softmax(-1)[...,1:]@v
        elif kd=="pad0": z=F.pad(a,(1,0)).softmax(-1)[...,1:]@v
        elif kd=="huge": z=(a*1e6).softmax(-1)@v
        elif kd=="float64 softmax": z=a.softmax(-1,dtype=torch.float64).float()@v
        elif kd=="transposed w": z=a.softmax(-1).mT@v
        elif kd=="empty keys": z=F.scaled_dot_product_attention(q,k[:,:,:0],v[:,:,:0])
        elif kd=="empty batch": F.scaled_dot_product_attention(q[:0],k[:0],v[:0]); z=v
        elif kd=="empty queries": F.scaled_dot_product_attention(q[:,:,:0],k,v); z=v
        elif kd=="empty softmax": z=(q@k[:,:,:0].mT).softmax(-1)@v[:,:,:0]
        elif kd=="synth": z=s.sink.view(3,1,1).expand(B,3,T,T).softmax(-1)@v
        elif kd=="numpy w": w=a.softmax(-1); w.detach().numpy()[...,1]=0; z=w@v
        return z.transpose(1,2).reshape(B,T,C)
class Mo(nn.Module):
    def __init__(s,kind,style): super().__init__(); s.e=nn.Embedding(11,12); s.odd=Odd(kind); s.a=Attn(0,style); s.b=Attn(1,style); s.h=nn.Linear(12,11)
    def forward(s,t):
        x=s.e(t); x=x+s.odd(x); x=x+s.a(x); x=x+s.b(x); return s.h(x)
cut=lambda i,h: dict(z=lambda j,z: z*(torch.arange(3)!=h)[None,:,None,None] if i==j else z)
def hand(f,**ed):
    a4.ED=ed
    try:
        with torch.no_grad(): return f()
    finally: a4.ED=None
for style in ("sdpa","bias"):
  for kind in ("diag inplace","slice inplace","sink first","pad0","huge","float64 softmax","transposed w","empty keys","empty batch","empty queries","empty softmax","synth","numpy w"):
    torch.manual_seed(0); m=Mo(kind,style).eval(); t=torch.randint(0,11,(2,5)); tag=f"{style}+{kind}"
    try:
        with torch.no_grad(), regard.watch(m,keep="qkv") as seen: m(t)
    except Exception as e: say(tag,f"CRASH {short(e)}"); continue
    base=m(t)
    for num in range(3):
        try: nm=seen.layer(num).name
        except Exception as e: nm="error: "+short(e,90)
        try:
            with torch.no_grad(), knock_out(m,[(num,1)]): got=m(t)
            w=[n for i,n in enumerate("ab") if (hand(lambda:m(t),**cut(i,1))-got).abs().max()<3e-5] or (["nothing"] if torch.equal(got,base) else ["odd (or ?)"])
        except Exception as e: w="refused: "+short(e,80)
        good=(nm in w) or (nm=="odd" and w==["odd (or ?)"]) or str(w).startswith("refused")
        say(f"{tag} number {num}", ("ok " if good else "DEFECT? ")+f"watch={nm} knock_out={w}  layers={seen.layers}")
    try:
        e=effect(m,lambda m:m(t),heads=[(0,1)]); print("    effect:",short(e,200))
    except Exception as e: print("    effect refused",short(e,100))
    if kind.startswith("empty"):
        try:
            with torch.no_grad(), regard.watch(m,layers=[0]) as s2: m(t)
            print("    watch(layers=[0]) ->",s2.layers)
            with torch.no_grad(), regard.watch(m,layers=[1]) as s2: m(t)
            print("    watch(layers=[1]) ->",s2.layers)
        except Exception as e: print("    watch layers",short(e))
print("N",lib.N)
