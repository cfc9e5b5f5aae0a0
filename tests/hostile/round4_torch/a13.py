# numbering: layers that cannot be recorded / edited before others; routers; mixed styles
from lib import *
import lib
from regard.ablate import *
from a4 import Attn
import a4
class Odd(nn.Module):
    """not an attention that can be followed, of several kinds; x -> x-like"""
    def __init__(s,kind,C=12,H=3): super().__init__(); s.kind=kind; s.q=nn.Linear(C,C); s.k=nn.Linear(C,C); s.v=nn.Linear(C,C); s.g=nn.Linear(C,4); s.ex=nn.ModuleList([nn.Linear(C,C) for _ in range(4)]); s.pool=nn.Linear(C,1); s.seed=nn.Parameter(torch.randn(1,2,C)); s.talk=nn.Parameter(torch.randn(3,3))
    def forward(s,x):
        k_=s.kind; B,T,C=x.shape
        h=lambda t:t.view(B,-1,3,4).transpose(1,2)
        if k_=="slot": w=(s.q(x)@s.k(x).mT).softmax(1); return (w/w.sum(-1,keepdim=True))@s.v(x)
        if k_=="sigmoid": return torch.sigmoid(s.q(x)@s.k(x).mT)@s.v(x)
        if k_=="exp": e=(s.q(x)@s.k(x).mT*.3).exp(); return e@s.v(x)/e.sum(-1,keepdim=True)
        if k_=="router": g=s.g(x).softmax(-1); return sum(g[...,i:i+1]*s.ex[i](x) for i in range(4))
        if k_=="router bmm": g=s.g(x).softmax(-1); return (g[...,None,:]@torch.stack([e(x) for e in s.ex],2)).squeeze(2)
        if k_=="pool": w=s.pool(torch.tanh(s.q(x))).softmax(1); return (w*x).sum(1,keepdim=True).expand_as(x)
        if k_=="pool bmm": w=s.pool(torch.tanh(s.q(x))).softmax(1); return (w.mT@x).expand_as(x)
        if k_=="einsum4": w=torch.einsum("bhqd,bhkd->bqkh",h(s.q(x)),h(s.k(x))).softmax(2); return torch.einsum("bqkh,bhkd->bqhd",w,h(s.v(x))).reshape(B,T,C)
        if k_=="efficient": return s.q(x).softmax(-1)@(s.k(x).softmax(1).mT@s.v(x))
        if k_=="talking": w=torch.einsum("bhij,hg->bgij",(h(s.q(x))@h(s.k(x)).mT).softmax(-1),s.talk); return (w@h(s.v(x))).transpose(1,2).reshape(B,T,C)
        if k_=="softmax feature": return x.softmax(-1)
        if k_=="log_softmax": return F.log_softmax(x,-1)*.1
        if k_=="4D softmax gate": g=s.q(x).view(B,T,3,4).softmax(-1); return (g*s.v(x).view(B,T,3,4)).reshape(B,T,C)
        if k_=="heads gate": g=s.g(x)[...,:3].softmax(-1); return (g[...,None]*s.v(x).view(B,T,3,4)).reshape(B,T,C)
        if k_=="empty": F.scaled_dot_product_attention(*[h(x)[:,:,:0]]*3); return x*0
class Mo(nn.Module):
    def __init__(s,kind,style): super().__init__(); s.e=nn.Embedding(11,12); s.odd=Odd(kind); s.a=Attn(0,style); s.odd2=Odd(kind); s.b=Attn(1,style); s.h=nn.Linear(12,11)
    def forward(s,t):
        x=s.e(t); x=x+s.odd(x); x=x+s.a(x); x=x+s.odd2(x); x=x+s.b(x); return s.h(x)
def hand(m,t,**ed):
    a4.ED=ed
    try:
        with torch.no_grad(): return m(t)
    finally: a4.ED=None
def cut(i,h): return dict(z=lambda j,z: z*(torch.arange(3)!=h)[None,:,None,None] if i==j else z)
for style in ("sdpa","mhabf","vT","bias"):
  for kind in ("slot","sigmoid","exp","router","router bmm","pool","pool bmm","einsum4","efficient","talking","softmax feature","log_softmax","4D softmax gate","heads gate","empty"):
    torch.manual_seed(0); m=Mo(kind,style).eval(); t=torch.randint(0,11,(2,5)); u=torch.randint(0,11,(2,5)); tag=f"{style}+{kind}"
    with torch.no_grad(), regard.watch(m,keep="qkv") as seen: m(u)
    names=list(seen.layers)
    for num in range(min(4,len(names)+1)):
        try: nm=seen.layer(num).name
        except Exception as e: nm=None
        # what does knock_out((num,1)) edit?
        try:
            with torch.no_grad(), knock_out(m,[(num,1)]): got=m(t)
            base=m(t); which=[n for i,n in enumerate(("a","b")) if (hand(m,t,**cut(i,1))-got).abs().max()<3e-5]
            if (base-got).abs().max()<1e-6: which.append("NOTHING")
            which=which or ["?"]
            ok= nm is not None and nm.split(".")[0] in which or (nm in("a.m",) and "a" in which)
            say(f"{tag} number {num}", "ok" if ok else f"DEFECT? watch says {nm}, knock_out edits {which}; layers {names}")
        except Exception as e: say(f"{tag} number {num} (watch {nm})",f"reported: {short(e,120)}")
        try:
            if nm in ("a","b","a.m","b.m"):
                i="ab".index(nm[0]); st={}
                hand(m,u,z=lambda j,z:(st.__setitem__(j,z.clone()),z)[1])
                with torch.no_grad(), patch_heads(m,seen,[(num,1)]): got=m(t)
                want=hand(m,t,z=lambda j,z: torch.cat([z[:,:1],st[j][:,1:2],z[:,2:]],1) if j==i else z)
                say(f"{tag} patch number {num}","ok" if (got-want).abs().max()<3e-5 else f"DEFECT off {(got-want).abs().max():.3g}; names {names}")
        except Exception as e: say(f"{tag} patch {num}",f"reported: {short(e,120)}")
    for nm in ("a","b"):
        try:
            with torch.no_grad(), knock_out(m,[(nm,2)]): got=m(t)
            say(f"{tag} name {nm}","ok" if (got-hand(m,t,**cut("ab".index(nm),2))).abs().max()<3e-5 else "DEFECT")
        except Exception as e: say(f"{tag} name {nm}",f"reported: {short(e,120)}")
    try:
        with torch.no_grad(), knock_out(m,keys=[1]): got=m(t)
        want=hand(m,t,a=lambda i,a:(a.__setitem__((Ellipsis,1),-torch.inf),a)[1])
        d=(got-want).abs().max().item(); say(f"{tag} hide key 1 everywhere", "ok" if d<3e-5 else f"differs {d:.3g} from hiding in a,b only (the odd layer was edited too?) layers {names}")
    except Exception as e: say(f"{tag} hide",f"reported: {short(e,120)}")
print("N",lib.N)
