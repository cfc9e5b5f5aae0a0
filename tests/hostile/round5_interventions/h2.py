from hand import *
def mk(c,L=3):
    torch.manual_seed(1); m=Model(c,L).double().eval()
    for p in m.parameters():
        if p.dim()>1: nn.init.normal_(p,std=.25)
    return m
torch.manual_seed(3); N=9; ids=torch.randint(0,32,(2,N)); one=ids[:1]; src=torch.randint(0,32,(1,N))
def zed(l0,h0,f=lambda w,v,z:z*0,b=slice(None)):
    def g(l,w,v,z):
        if l==l0: z[b,h0]=f(w,v,z)[b,h0]
        return z
    return g
def mkm(l0,h0,q,k,b=slice(None)):
    def g(l,a):
        if l==l0:
            for h in h0: 
                a2=a[b,h]; a2[:,q,k]=False
        return a
    return g
def T(n,m,cm,e,x=ids,tol=1e-9):
    def f():
        b=out(m,x)
        with edit(m,**e): want=out(m,x)
        try:
            with cm(): got=out(m,x)
        finally:
            assert torch.equal(out(m,x),b),'left patched'
        return got,want,b
    report(n,f,tol)
K=regard.knock_out
# --- logged weights
class LogBefore(Base):
    def native(s,x):
        q,k,v=s.heads(x); s.last=sm(s,q@k.mT/math.sqrt(D)).detach(); return s.outp(Fn.scaled_dot_product_attention(q,k,v,is_causal=True),x)
class LogAfter(Base):
    def native(s,x):
        q,k,v=s.heads(x); z=Fn.scaled_dot_product_attention(q,k,v,is_causal=True); s.last=sm(s,q@k.mT/math.sqrt(D)).detach(); return s.outp(z,x)
class LogEntropy(Base):
    def native(s,x):
        q,k,v=s.heads(x); z=Fn.scaled_dot_product_attention(q,k,v,is_causal=True); w=sm(s,q@k.mT/math.sqrt(D)); s.ent=-(w*(w+1e-9).log()).sum(-1).mean(); return s.outp(z,x)
if __name__!="__main__": LogL=()
for c in () if __name__!="__main__" else (LogBefore,LogAfter,LogEntropy):
    m=mk(c)
    for l in (0,1,2):
        T(f'{c.__name__} head number {l}',m,lambda:K(m,heads=[(l,2)]),dict(z=zed(l,2)))
        T(f'{c.__name__} head name {l}',m,lambda:K(m,heads=[(f"a.{l}",2)]),dict(z=zed(l,2)))
        T(f'{c.__name__} keys name {l}',m,lambda:K(m,layers=[f"a.{l}"],keys=[0],queries=slice(3,None)),dict(mask=mkm(l,range(H),slice(3,None),0)))
        T(f'{c.__name__} keys number {l}',m,lambda:K(m,layers=[l],keys=[0],queries=slice(3,None)),dict(mask=mkm(l,range(H),slice(3,None),0)))
        T(f'{c.__name__} patch fn {l}',m,lambda:regard.patch_heads(m,lambda z:z/2,[(l,2)]),dict(z=zed(l,2,lambda w,v,z:z/2)))
# sinks with negative keys
m=mk(SinkLogit)
for k,kk in () if __name__!="__main__" else (([-1],8),([0],0),(slice(-2,None),slice(7,9)),(slice(None,2),slice(0,2)),([8],8),([9],8)):
    T(f'SinkLogit keys={k}',m,lambda:K(m,heads=[(1,2)],keys=k),dict(mask=mkm(1,[2],slice(None),kk)))
T('SinkLogit layer',m,lambda:K(m,layers=[1]),dict(z=lambda l,w,v,z:z*0 if l==1 else z))
class MemKV(Base):
    def extra(s): s.mk=nn.Parameter(torch.randn(1,H,2,D)); s.mv=nn.Parameter(torch.randn(1,H,2,D))
    def canon(s,x):
        q,k,v=s.heads(x); B=len(x); k=torch.cat([s.mk.expand(B,-1,-1,-1),k],2); v=torch.cat([s.mv.expand(B,-1,-1,-1),v],2)
        sc=q@k.mT/math.sqrt(D); n=x.shape[1]; a=torch.cat([torch.ones(n,2,dtype=torch.bool),s.allowed(n)],1).expand(sc.shape); return sc,a,v
    def native(s,x): sc,a,v=s.canon(x); return s.outp(sc.masked_fill(~a,float('-inf')).softmax(-1)@v,x)
class MemKVsdpa(MemKV):
    def native(s,x):
        q,k,v=s.heads(x); B=len(x); k=torch.cat([s.mk.expand(B,-1,-1,-1),k],2); v=torch.cat([s.mv.expand(B,-1,-1,-1),v],2);n=x.shape[1]
        return s.outp(Fn.scaled_dot_product_attention(q,k,v,attn_mask=torch.cat([torch.ones(n,2,dtype=torch.bool),s.allowed(n)],1)),x)
class MemEnd(MemKV):
    def canon(s,x):
        sc,a,v=super().canon(x); r=list(range(2,sc.shape[-1]))+[0,1]; return sc[...,r],a[...,r],v[:,:,r]
class MemEndSdpa(MemEnd):
    def native(s,x):
        q,k,v=s.heads(x); B=len(x); k=torch.cat([k,s.mk.expand(B,-1,-1,-1)],2); v=torch.cat([v,s.mv.expand(B,-1,-1,-1)],2);n=x.shape[1]
        return s.outp(Fn.scaled_dot_product_attention(q,k,v,attn_mask=torch.cat([s.allowed(n),torch.ones(n,2,dtype=torch.bool)],1)),x)
for c,off in () if __name__!="__main__" else ((MemKV,2),(MemKVsdpa,2),(MemEnd,0),(MemEndSdpa,0)):
    m=mk(c)
    T(f'{c.__name__} head',m,lambda:K(m,heads=[(1,2)]),dict(z=zed(1,2)))
    T(f'{c.__name__} keys [3] token',m,lambda:K(m,heads=[(1,2)],keys=[3]),dict(mask=mkm(1,[2],slice(None),3+off)))
    T(f'{c.__name__} keys [-1] token',m,lambda:K(m,heads=[(1,2)],keys=[-1]),dict(mask=mkm(1,[2],slice(None),8+off)))
    T(f'{c.__name__} keys [3] queries[5]',m,lambda:K(m,heads=[(1,2)],keys=[3],queries=[5]),dict(mask=mkm(1,[2],5,3+off)))
    T(f'{c.__name__} mask window2',m,lambda:K(m,heads=[(1,2)],mask=regard.window(2)),dict(mask=lambda l,a:a))
    with regard.watch(m,keep='qkv') as rec, torch.no_grad(): m(src)
    T(f'{c.__name__} patch q5',m,lambda:regard.patch_heads(m,rec,[(1,2)],queries=[5]),dict(z=lambda l,w,v,z:z))
# multi-softmax by name
for c in () if __name__!="__main__" else (QueryChunksSdpa,QueryChunks,BatchLoop,HeadChunks,HeadChunksBmm,Diff):
    m=mk(c)
    T(f'{c.__name__} head by name',m,lambda:K(m,heads=[('a.1',1)]),dict(z=zed(1,1)))
    T(f'{c.__name__} layer by name',m,lambda:K(m,layers=['a.1']),dict(z=lambda l,w,v,z:z*0 if l==1 else z))
    T(f'{c.__name__} keys by name no queries',m,lambda:K(m,layers=['a.1'],keys=[0]),dict(mask=mkm(1,range(H),slice(None),0)))
    T(f'{c.__name__} keys by name',m,lambda:K(m,layers=['a.1'],keys=[0],queries=slice(5,None)),dict(mask=mkm(1,range(H),slice(5,None),0)))
    T(f'{c.__name__} keys by name -1 query',m,lambda:K(m,layers=['a.1'],keys=[0],queries=[-1]),dict(mask=mkm(1,range(H),8,0)))
    T(f'{c.__name__} mask by name',m,lambda:K(m,layers=['a.1'],mask=regard.window(2)),dict(mask=lambda l,a:a&((torch.arange(N)[:,None]-torch.arange(N))<3) if l==1 else a))
    T(f'{c.__name__} half by name',m,lambda:regard.patch_heads(m,lambda z:z/2,layers=['a.1']),dict(z=lambda l,w,v,z:z/2 if l==1 else z))
    try:
        with regard.watch(m,keep='qkv') as rec, torch.no_grad(): m(src)
    except Exception as e: print('watch',e); continue
    cap={}
    with edit(m,z=lambda l,w,v,z:cap.setdefault(l,z)): out(m,src)
    T(f'{c.__name__} patch by name (one)',m,lambda:regard.patch_heads(m,rec,layers=['a.1']),dict(z=lambda l,w,v,z:cap[1] if l==1 else z),x=one)
    T(f'{c.__name__} patch by name queries -1 (one)',m,lambda:regard.patch_heads(m,rec,layers=['a.1'],queries=[-1]),dict(z=lambda l,w,v,z:torch.cat([z[:,:,:-1],cap[1][:,:,-1:]],2) if l==1 else z),x=one)
