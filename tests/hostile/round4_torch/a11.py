# interventions with caches, padding, cross-attention, MHA options, several calls, threads, training
from lib import *
import lib
from regard.ablate import *
ED=None
class At(nn.Module):
    """oracle: ED is {name: fn(a, q0) -> a} for logits and {('z',name): fn(z,q0)}"""
    def __init__(s,name,C=12,H=3,mode="sdpa",mask="inf",causal=True): super().__init__(); s.name,s.H,s.mode,s.mask,s.causal=name,H,mode,mask,causal; s.q=nn.Linear(C,C);s.k=nn.Linear(C,C);s.v=nn.Linear(C,C);s.o=nn.Linear(C,C)
    def hd(s,t): return t.view(*t.shape[:2],s.H,-1).transpose(1,2)
    def forward(s,x,y=None,cache=None,kpm=None):
        yy=x if y is None else y
        q,k,v=s.hd(s.q(x)),s.hd(s.k(yy)),s.hd(s.v(yy)); q0=0
        if cache is not None:
            if s.name in cache: k=torch.cat([cache[s.name][0],k],2); v=torch.cat([cache[s.name][1],v],2)
            cache[s.name]=(k,v); q0=k.shape[2]-q.shape[2]
        T,S=q.shape[2],k.shape[2]
        m=torch.ones(T,S).tril(S-T).bool() if s.causal and y is None else torch.ones(T,S).bool()
        if kpm is not None: m=m&kpm[:,None,None]
        if ED is not None:
            a=(q@k.mT*q.shape[-1]**-.5).masked_fill(~m,-torch.inf)
            if s.name in ED: a=ED[s.name](a.clone(),q0)
            z=a.softmax(-1).nan_to_num(0)@v
            if ("z",s.name) in ED: z=ED["z",s.name](z.clone(),q0)
        elif s.mode=="sdpa": z=F.scaled_dot_product_attention(q,k,v,attn_mask=m if s.mask=="inf" else torch.where(m,0.,torch.finfo(torch.float32).min))
        elif s.mode=="causalflag": z=F.scaled_dot_product_attention(q,k,v,is_causal=T>1 and s.causal and y is None)
        else: z=(q@k.mT*q.shape[-1]**-.5).masked_fill(~m,-torch.inf if s.mask=="inf" else torch.finfo(torch.float32).min).softmax(-1)@v
        return s.o(z.transpose(1,2).flatten(2))
class LM(nn.Module):
    def __init__(s,L=2,**kw): super().__init__(); s.e=nn.Embedding(11,12); s.l=nn.ModuleList([At(f"l.{i}",**kw) for i in range(L)]); s.h=nn.Linear(12,11)
    def forward(s,t,cache=None,attention_mask=None):
        x=s.e(t)
        for l in s.l: x=x+l(x,cache=cache,kpm=None if attention_mask is None else attention_mask.bool())
        return s.h(x)
class ED_(nn.Module):
    def __init__(s,**kw): super().__init__(); s.e=nn.Embedding(11,12); s.enc=At("enc",causal=False,**kw); s.sa=At("sa",**kw); s.ca=At("ca",**kw); s.h=nn.Linear(12,11)
    def forward(s,src,tgt): m=s.e(src); m=m+s.enc(m); x=s.e(tgt); x=x+s.sa(x); x=x+s.ca(x,m); return s.h(x)
def hand(f,ed):
    global ED; ED=ed
    try:
        with torch.no_grad(): return f()
    finally: ED=None
def inter(name,f,cm,ed,tol=3e-5):
    want=hand(f,ed); base=hand(f,{})
    try:
        with torch.no_grad(), cm(): got=f()
        with torch.no_grad(): after=f()
        d=(torch.cat([x.flatten() for x in flat(got)])-torch.cat([x.flatten() for x in flat(want)])).abs().max().item(); e=(torch.cat([x.flatten() for x in flat(base)])-torch.cat([x.flatten() for x in flat(want)])).abs().max().item()
        bb=(torch.cat([x.flatten() for x in flat(base)])-torch.cat([x.flatten() for x in flat(after)])).abs().max().item()
        say(name,("ok" if d<tol else f"DEFECT off {d:.3g} (effect {e:.3g})")+("" if bb<1e-5 else " LEFT BEHIND"))
    except Exception as ex: say(name,f"reported: {type(ex).__name__} {short(ex,150)}")
NI=-torch.inf
for mode in ("sdpa","causalflag","softmax"):
  for mask in ("inf","min"):
    if mode=="causalflag" and mask=="min": continue
    torch.manual_seed(0); m=LM(mode=mode,mask=mask); t=torch.randint(0,11,(2,6)); tag=f"{mode}/{mask}"
    def gen():
        c={}; o=[m(t[:,:3],cache=c)]
        for i in range(3,6): o.append(m(t[:,i:i+1],cache=c))
        return o
    def full(): return m(t)
    for nm,f in (("full",full),("cache",gen)):
        inter(f"{tag} {nm} knock (1,2)",f,lambda:knock_out(m,[(1,2)]),{("z","l.1"):lambda z,q0:z*(torch.arange(3)!=2)[None,:,None,None]})
        def hk(keys,qs=None,h=None):
            def g(a,q0):
                T=a.shape[2]; rows=[i for i in range(T) if qs is None or q0+i in qs]
                ks=[j for j in keys if j<a.shape[3]]
                for i in rows:
                    for j in ks:
                        if h is None: a[:,:,i,j]=NI
                        else: a[:,h,i,j]=NI
                return a
            return g
        inter(f"{tag} {nm} hide key 1 all layers",f,lambda:knock_out(m,keys=[1]),{"l.0":hk([1]),"l.1":hk([1])})
        inter(f"{tag} {nm} hide key 0 all layers",f,lambda:knock_out(m,keys=[0]),{"l.0":hk([0]),"l.1":hk([0])})
        inter(f"{tag} {nm} hide keys slice(1,3) q slice(3,5) head",f,lambda:knock_out(m,[(0,1)],keys=slice(1,3),queries=slice(3,5)),{"l.0":hk([1,2],[3,4],1)})
        def lastkey(a,q0):
            # -1 is last token so far
            S_=a.shape[3]; a[...,S_-1]=NI; return a
        inter(f"{tag} {nm} hide key -1",f,lambda:knock_out(m,[(0,0)],keys=[-1]),{"l.0":lambda a,q0:(a.__setitem__((slice(None),0,slice(None),a.shape[3]-1),NI),a)[1]})
        inter(f"{tag} {nm} queries -1 keys 0",f,lambda:knock_out(m,layers=[1],keys=[0],queries=[-1]),{"l.1":lambda a,q0:(a.__setitem__((slice(None),slice(None),-1,0),NI),a)[1]})
        inter(f"{tag} {nm} mask window(1)",f,lambda:knock_out(m,[(0,2)],mask=regard.window(1)),{"l.0":lambda a,q0:torch.cat([a[:,:2],a[:,2:].masked_fill(((q0+torch.arange(a.shape[2]))[:,None]-torch.arange(a.shape[3])).abs()>1,NI)],1)})
        inter(f"{tag} {nm} per-seq keys",f,lambda:knock_out(m,[(0,1)],keys=[slice(0,1),slice(1,3)]),{"l.0":lambda a,q0:(a.__setitem__((0,1,slice(None),slice(0,1)),NI),a.__setitem__((1,1,slice(None),slice(1,3)),NI),a)[2]})
        inter(f"{tag} {nm} patch fn q=[4]",f,lambda:patch_heads(m,lambda z:z*0+7,[(1,1)],queries=[4]),{("z","l.1"):lambda z,q0:torch.stack([torch.where(((q0+torch.arange(z.shape[2]))==4)[None,:,None]&torch.tensor(h==1),torch.tensor(7.),z[:,h]) for h in range(3)],1)})
        # from recording
        u=torch.randint(0,11,(2,6)); st={}
        hand(lambda:m(u),{("z",n):(lambda z,q0,n=n:(st.__setitem__(n,z.clone()),z)[1]) for n in ("l.0","l.1")})
        with torch.no_grad(), regard.watch(m,keep="qkv") as src: m(u)
        inter(f"{tag} {nm} patch rec (1,0)",f,lambda:patch_heads(m,src,[(1,0)]),{("z","l.1"):lambda z,q0:torch.cat([st["l.1"][:,:1,q0:q0+z.shape[2]],z[:,1:]],1)})
        inter(f"{tag} {nm} patch rec q[2,4]",f,lambda:patch_heads(m,src,[(0,2)],queries=[2,4]),{("z","l.0"):lambda z,q0:torch.cat([z[:,:2],torch.stack([st["l.0"][:,2,q0+i] if q0+i in (2,4) else z[:,2,i] for i in range(z.shape[2])],1)[:,None]],1)})
        inter(f"{tag} {nm} patch+knock nested",f,lambda:__import__("contextlib").ExitStack() if 0 else knock_out(m,[(0,0)]),{("z","l.0"):lambda z,q0:z*(torch.arange(3)!=0)[None,:,None,None]})
    # padding
    am=torch.tensor([[0,0,1,1,1,1],[1]*6])
    def pad(): return m(t,attention_mask=am)
    # positions count real tokens: key 1 is column 3 in row 0, column 1 in row 1
    def hp(a,q0): a[0,:,:,3]=NI; a[1,:,:,1]=NI; return a
    def only_real(f_): return lambda: (lambda o: torch.cat([o[0,2:],o[1]]))(f_())
    inter(f"{tag} leftpad hide key 1",only_real(pad),lambda:knock_out(m,keys=[1]),{"l.0":hp,"l.1":hp})
    inter(f"{tag} leftpad knock (0,1) q=[0]... fn",only_real(pad),lambda:patch_heads(m,lambda z:z*0+3,[(0,1)],queries=[0]),{("z","l.0"):lambda z,q0:(z.__setitem__((0,1,2),3.),z.__setitem__((1,1,0),3.),z)[2]})
  # enc-dec
  torch.manual_seed(0); ed=ED_(mode=mode); s_,t_=torch.randint(0,11,(2,5)),torch.randint(0,11,(2,4)); f=lambda:ed(s_,t_)
  inter(f"{mode} encdec knock ca head1 by name",f,lambda:knock_out(ed,[("ca",1)]),{("z","ca"):lambda z,q0:z*(torch.arange(3)!=1)[None,:,None,None]})
  inter(f"{mode} encdec knock layer 2 (ca)",f,lambda:knock_out(ed,layers=[2]),{("z","ca"):lambda z,q0:z*0})
  inter(f"{mode} encdec ca keys [4] queries [1]",f,lambda:knock_out(ed,[("ca",0)],keys=[4],queries=[1]),{"ca":lambda a,q0:(a.__setitem__((slice(None),0,1,4),NI),a)[1]})
  inter(f"{mode} encdec ca keys [-1]",f,lambda:knock_out(ed,layers=["ca"],keys=[-1]),{"ca":lambda a,q0:(a.__setitem__((Ellipsis,-1),NI),a)[1]})
  inter(f"{mode} encdec ca queries [-1] keys[0]",f,lambda:knock_out(ed,layers=["ca"],keys=[0],queries=[-1]),{"ca":lambda a,q0:(a.__setitem__((slice(None),slice(None),-1,0),NI),a)[1]})
# several modules with one name prefix, calls twice
class Tw(nn.Module):
    def __init__(s,mode): super().__init__(); s.e=nn.Embedding(11,12); s.a=At("a",mode=mode); s.n=0
    def forward(s,t):
        x=s.e(t)
        for i in range(3): s.a.name=f"a#{i+1}"; x=x+s.a(x)
        return x
for mode in ("sdpa","softmax"):
    torch.manual_seed(0); m=Tw(mode); t=torch.randint(0,11,(2,5)); f=lambda:m(t); z2=lambda h:(lambda z,q0:z*(torch.arange(3)!=h)[None,:,None,None])
    inter(f"{mode} tied knock a#2 head 1",f,lambda:knock_out(m,[("a#2",1)]),{("z","a#2"):z2(1)})
    inter(f"{mode} tied knock layer number 2",f,lambda:knock_out(m,[(2,1)]),{("z","a#3"):z2(1)})
    inter(f"{mode} tied knock name a = all",f,lambda:knock_out(m,[("a",1)]),{("z",f"a#{i}"):z2(1) for i in (1,2,3)})
    inter(f"{mode} tied knock a#1 only",f,lambda:knock_out(m,[("a#1",1)]),{("z","a#1"):z2(1)})
    inter(f"{mode} tied twice in block",lambda:[m(t),m(t)],lambda:knock_out(m,[("a#2",1)]),{("z","a#2"):z2(1)})
    inter(f"{mode} tied layer 1, two passes",lambda:[m(t),m(t)],lambda:knock_out(m,[(1,1)]),{("z","a#2"):z2(1)})
print("N",lib.N)
