# contexts: checkpoint, vmap, jit, compile, training, functional_call, threads, caches, reuse, aliasing...
from lib import *
import copy, threading, pickle, contextlib
from torch.utils.checkpoint import checkpoint
class At(nn.Module):
    def __init__(s,C=8,H=2,mode="sdpa",causal=False): super().__init__(); s.H=H;s.mode=mode;s.c=causal; s.q=nn.Linear(C,C);s.k=nn.Linear(C,C);s.v=nn.Linear(C,C);s.o=nn.Linear(C,C)
    def heads(s,t): return t.view(*t.shape[:-1],s.H,t.shape[-1]//s.H).transpose(-2,-3)
    def forward(s,x,y=None,cache=None):
        y=x if y is None else y
        q,k,v=s.heads(s.q(x)),s.heads(s.k(y)),s.heads(s.v(y))
        if cache is not None: k,v=cache(k,v)
        T,S=q.shape[-2],k.shape[-2]; m=torch.ones(T,S).tril(S-T).bool() if s.c else None
        if LOGON(): w=sm(q,k,mask=m); log_(w)
        if s.mode=="sdpa": z=F.scaled_dot_product_attention(q,k,v,attn_mask=m)
        else:
            a=q@k.mT*q.shape[-1]**-.5
            if m is not None: a=a.masked_fill(~m,-torch.inf)
            z=a.softmax(-1)@v
        return s.o(z.transpose(-2,-3).flatten(-2))
import lib
def LOGON(): return lib.LOG is not None
def log_(w): log(w if w.dim()==4 else w.flatten(0,-4) if w.dim()>4 else w[None])
MODES=("sdpa","softmax")
for mode in MODES:
    def A(**k): torch.manual_seed(3); return At(mode=mode,**k)
    X=torch.randn(3,5,8,generator=torch.Generator().manual_seed(1))
    m=A(); check(f"{mode} plain",m,lambda:m(X))
    check(f"{mode} grads backward inside",m,lambda:(lambda y:(y.sum().backward(),m.zero_grad(),y)[2])(m(X)),grads=True)
    for re in (True,False):
        def run():
            x=X.clone().requires_grad_(); y=checkpoint(m,x,use_reentrant=re); return y
        check(f"{mode} checkpoint reentrant={re} fwd only",m,run,grads=True)
        def run2():
            x=X.clone().requires_grad_(); y=checkpoint(m,x,use_reentrant=re); y.sum().backward(); m.zero_grad(); return [y,x.grad]
        with torch.enable_grad(): _,lg=oracle(run)
        check(f"{mode} checkpoint reentrant={re} backward",m,run2,want=lg[:1],grads=True)
        class Two(nn.Module):
            def __init__(s): super().__init__(); s.a=A(); s.b=A()
            def forward(s,x): 
                x=checkpoint(s.a,x,use_reentrant=re); return checkpoint(s.b,x+1,use_reentrant=re)
        t=Two()
        def run3():
            x=X.clone().requires_grad_(); y=t(x); y.sum().backward(); t.zero_grad(); return [y,x.grad]
        def run3f(): return t(X.clone().requires_grad_())
        with torch.enable_grad(): _,lg=oracle(run3f)
        check(f"{mode} two checkpoints reentrant={re} backward",t,run3,want=lg,grads=True)
        def run4():
            outs=[]
            for i in range(2):
                x=(X+i).clone().requires_grad_(); y=t(x); y.sum().backward(); t.zero_grad(); outs+=[y,x.grad]
            return outs
        s=check(f"{mode} two steps of training w/ checkpoint reentrant={re} (compare by hand)",t,run4,want=lg+[oracle(lambda:t(X+1))[1][0],oracle(lambda:t(X+1))[1][1]],groups=["a","b","a","b"],grads=True)
    # vmap over batch / ensembles
    check(f"{mode} vmap batch",m,lambda:torch.vmap(lambda x:m(x))(X),want=[oracle(lambda:m(X))[1][0]])
    check(f"{mode} vmap batch in_dims=1",m,lambda:torch.vmap(lambda x:m(x),in_dims=1,out_dims=1)(X.transpose(0,1)),want=[oracle(lambda:m(X))[1][0]])
    from torch.func import functional_call, stack_module_state, grad, jvp, vjp, jacrev
    p2={k:v.detach()*1.7 for k,v in m.named_parameters()}
    m2=A(); m2.load_state_dict(p2)
    check(f"{mode} functional_call",m,lambda:functional_call(m,p2,(X,)),want=[oracle(lambda:m2(X))[1][0]])
    ms=[A() for _ in range(2)]
    ms[1].load_state_dict(p2)
    params,bufs=stack_module_state(ms); base=copy.deepcopy(ms[0])
    want=np.stack([oracle(lambda:mm(X))[1][0] for mm in ms])
    check(f"{mode} ensemble vmap",base,lambda:torch.vmap(lambda p,b,x:functional_call(base,(p,b),(x,)),in_dims=(0,0,None))(params,bufs,X),want=[want.reshape(6,2,5,5)])
    check(f"{mode} func.grad",m,lambda:grad(lambda x:m(x).sum())(X),want=[oracle(lambda:m(X))[1][0]])
    check(f"{mode} func.vjp",m,lambda:vjp(m,X)[0],want=[oracle(lambda:m(X))[1][0]])
    if mode=="softmax": check(f"{mode} func.jvp",m,lambda:jvp(lambda x:m(x),(X,),(torch.ones_like(X),)),want=[oracle(lambda:m(X))[1][0]])
    check(f"{mode} per-sample grads",m,lambda:torch.vmap(grad(lambda x:m(x[None]).sum()))(X),want=[oracle(lambda:m(X))[1][0]])
    check(f"{mode} jacrev",m,lambda:jacrev(lambda x:m(x).sum((0,1)))(X),want=[oracle(lambda:m(X))[1][0]])
    def inf():
        with torch.inference_mode(): return m(X)
    check(f"{mode} inference_mode",m,inf)
    def ac():
        with torch.autocast("cpu",dtype=torch.bfloat16): return m(X)
    check(f"{mode} autocast",m,ac,tol=3e-2)
    # twice in one watch
    check(f"{mode} called twice same input",m,lambda:[m(X),m(X)],groups=["",""])
    check(f"{mode} called twice other input",m,lambda:[m(X),m(X+1)],groups=["",""])
    check(f"{mode} called twice, shorter then longer",m,lambda:[m(X[:,:3]),m(X)],groups=["",""])
    check(f"{mode} called twice, longer then shorter",m,lambda:[m(X),m(X[:,:3])],groups=["",""])
    check(f"{mode} weights changed between",m,lambda:(lambda a,b,c:[a,c])(m(X),m.k.weight.data.mul_(-1),m(X)) ,groups=["",""], pre=lambda: m.load_state_dict(p2))
    m=A()
    # shared module in a model
    class Shared(nn.Module):
        def __init__(s,n=3): super().__init__(); s.a=A(); s.n=n
        def forward(s,x):
            for _ in range(s.n): x=x+s.a(x)
            return x
    sh=Shared(); check(f"{mode} weight tied recursion",sh,lambda:sh(X))
    class Siam(nn.Module):
        def __init__(s): super().__init__(); s.a=A()
        def forward(s,x,y): return s.a(x),s.a(y)
    si=Siam(); check(f"{mode} siamese different lengths",si,lambda:si(X,X[:,:3]+1)); check(f"{mode} siamese prefix (y = x[:3])",si,lambda:si(X[:,:3],X)); check(f"{mode} siamese same",si,lambda:si(X,X)); check(f"{mode} siamese batch differs",si,lambda:si(X,X[:1]+.5))
    class EE(nn.Module):
        def __init__(s): super().__init__(); s.l=nn.ModuleList([A() for _ in range(3)])
        def forward(s,x,n):
            for l in s.l[:n]: x=x+l(x)
            return x
    ee=EE(); check(f"{mode} early exit 2",ee,lambda:ee(X,2))
    check(f"{mode} stochastic depth two calls",ee,lambda:[ee(X,1),ee(X+1,3)],groups=["l.0","l.0","l.1","l.2"])
    # data dependent subset of batch
    class Sub(nn.Module):
        def __init__(s): super().__init__(); s.a=A(); s.b=A()
        def forward(s,x):
            x=s.a(x); i=torch.tensor([0,2]); y=x.clone(); y[i]=s.b(x[i]); return y
    sb=Sub(); check(f"{mode} subset of batch in layer 2",sb,lambda:sb(X), names=None)
    class Perm(nn.Module):
        def __init__(s): super().__init__(); s.a=A(); s.b=A()
        def forward(s,x): x=s.a(x); return s.b(x.flip(0))
    pm=Perm(); check(f"{mode} batch flipped in layer 2",pm,lambda:pm(X))
    # axial
    class Ax(nn.Module):
        def __init__(s): super().__init__(); s.r=A(); s.c=A()
        def forward(s,x):
            B,Hh,Ww,C=x.shape; x=s.r(x.reshape(B*Hh,Ww,C)).view(B,Hh,Ww,C); return s.c(x.transpose(1,2).reshape(B*Ww,Hh,C)).view(B,Ww,Hh,C)
    ax=Ax(); xi=torch.randn(2,3,4,8); check(f"{mode} axial",ax,lambda:ax(xi))
    a5=A(); check(f"{mode} 5D batch dims",a5,lambda:a5(xi)); x3=torch.randn(4,8); check(f"{mode} no batch",a5,lambda:a5(x3)); xx=torch.randn(1,1,8); check(f"{mode} one token",a5,lambda:a5(xx))
    check(f"{mode} cross",a5,lambda:a5(X,X[:,:2]+1)); x0=torch.randn(0,4,8); check(f"{mode} empty batch",a5,lambda:a5(x0),want=[]); xt=torch.randn(2,0,8); check(f"{mode} zero tokens",a5,lambda:a5(xt),want=[])
    # threads
    def thr():
        out=[None]*2; 
        def f(i):
            with torch.no_grad(): out[i]=a5(X+i)
        ts=[threading.Thread(target=f,args=(i,)) for i in range(2)]
        for t in ts: t.start(); t.join()
        return out
    check(f"{mode} two threads in turn",a5,thr,groups=["",""])
    def thr2():
        out=[None]
        def f(): 
            with torch.no_grad(): out[0]=a5(X)
        t=threading.Thread(target=f); t.start(); t.join(); return out
    check(f"{mode} one thread",a5,thr2)
    def genr():
        def g():
            for i in range(2): yield a5(X+i)
        return list(g())
    check(f"{mode} generator",a5,genr,groups=["",""])
    def exc():
        try: 
            y=a5(X); raise ValueError
        except ValueError: pass
        return y
    check(f"{mode} exception after",a5,exc)
    class Boom(nn.Module):
        def __init__(s): super().__init__(); s.a=A(); s.b=A()
        def forward(s,x,boom=False):
            x=s.a(x)
            if boom: raise RuntimeError("x")
            return s.b(x)
    bo=Boom()
    def bx():
        try: bo(X,True)
        except RuntimeError: pass
        return bo(X+1)
    check(f"{mode} exception mid-forward then again",bo,bx,groups=["a","a","b"])
    # deepcopy in block, module replaced
    def dc():
        c=copy.deepcopy(bo); return c(X)
    with torch.no_grad(): ref,lg=oracle(lambda:bo(X))
    check(f"{mode} deepcopy run in the block (not watched model)",bo,dc,want=lg)
    class Hold(nn.Module):
        def __init__(s): super().__init__(); s.a=A()
        def forward(s,x): return s.a(x)
    ho=Hold(); other=A(causal=True)
    def repl():
        old=ho.a; ho.a=other; y=ho(X); ho.a=old; return y
    check(f"{mode} module replaced within block",ho,repl)
    def pk():
        c=pickle.loads(pickle.dumps(ho.state_dict())); ho.load_state_dict(c); return ho(X)
    check(f"{mode} state pickled in block",ho,pk)
    def hk():
        h=ho.a.q.register_forward_hook(lambda m,i,o:o*2); y=ho(X); h.remove(); return y
    check(f"{mode} user hook",ho,hk)
    def nest():
        with regard.watch(ho) as s2: y=ho(X)
        return y
    check(f"{mode} nested watch",ho,nest)
    import torch.nn.utils.parametrizations as PZ
    hp=A(); PZ.weight_norm(hp.q); PZ.spectral_norm(hp.k); hp.eval(); check(f"{mode} parametrizations",hp,lambda:hp(X))
    try:
        tr=torch.jit.trace(A(),X); a_=A(); wj=oracle(lambda:a_(X))[1]
        check(f"{mode} jit.trace",tr,lambda:tr(X),want=wj)
        class HoldJ(nn.Module):
            def __init__(s): super().__init__(); s.a=tr
            def forward(s,x): return s.a(x)
        hj=HoldJ(); check(f"{mode} jit.trace inside a module",hj,lambda:hj(X),want=wj)
    except Exception as e: print("jit",short(e))
    cp=torch.compile(A(),backend="eager"); check(f"{mode} compile eager",cp,lambda:cp(X),want=wj)
    def comp_in():
        c=torch.compile(ho,backend="eager"); return c(X)
    check(f"{mode} compile in block",ho,comp_in,want=oracle(lambda:ho(X))[1])
    # KV caches
    class Dec(nn.Module):
        def __init__(s): super().__init__(); s.a=At(mode=mode,causal=True)
    def full(x,a): return oracle(lambda:a(x))[1]
    dec=A(causal=True)
    def cat_cache():
        st=[None,None]; o=[]
        def c(k,v):
            if st[0] is not None: k=torch.cat([st[0],k],-2); v=torch.cat([st[1],v],-2)
            st[:]=k,v; return k,v
        o.append(dec(X[:,:2],cache=c))
        for t in range(2,5): o.append(dec(X[:,t:t+1],cache=c))
        return o
    with torch.no_grad(): lgf=full(X,dec)
    check(f"{mode} cat cache",dec,cat_cache,want=lgf)
    def pre_cache():
        K=torch.zeros(3,2,8,4);V=torch.zeros(3,2,8,4);n=[0]; o=[]
        def c(k,v):
            K[:,:,n[0]:n[0]+k.shape[2]]=k; V[:,:,n[0]:n[0]+k.shape[2]]=v; n[0]+=k.shape[2]; return K[:,:,:n[0]],V[:,:,:n[0]]
        o.append(dec(X[:,:2],cache=c))
        for t in range(2,5): o.append(dec(X[:,t:t+1],cache=c))
        return o
    check(f"{mode} preallocated cache",dec,pre_cache,want=lgf)
    def pre_cache2():
        K=torch.zeros(3,2,8,4);V=torch.zeros(3,2,8,4); o=[]
        for r in range(2):
            n=[0]
            def c(k,v):
                K[:,:,n[0]:n[0]+k.shape[2]]=k; V[:,:,n[0]:n[0]+k.shape[2]]=v; n[0]+=k.shape[2]; return K[:,:,:n[0]],V[:,:,:n[0]]
            for t in range(5): o.append(dec((X+r)[:,t:t+1],cache=c))
        return o
    with torch.no_grad(): l2=full(X+1,dec)
    s=check(f"{mode} preallocated cache reused for 2nd text (6 seqs)",dec,pre_cache2,want=[np.concatenate([lgf[0],l2[0]])])
    def beam():
        st=[None,None]; o=[]
        def c(k,v):
            if st[0] is not None: k=torch.cat([st[0],k],-2); v=torch.cat([st[1],v],-2)
            st[:]=k,v; return k,v
        o.append(dec(X[:,:3],cache=c)); idx=torch.tensor([2,2,0]); st[0]=st[0][idx]; st[1]=st[1][idx]
        o.append(dec(X[:,3:4],cache=c)); return o
    Xb=torch.cat([X[[2,2,0],:3],X[:,3:4]],1)
    with torch.no_grad(): lb=full(Xb,dec)
    check(f"{mode} beam reorder",dec,beam,want=lb)
    def spec():
        st=[None,None]; o=[]
        def c(k,v):
            if st[0] is not None: k=torch.cat([st[0],k],-2); v=torch.cat([st[1],v],-2)
            st[:]=k,v; return k,v
        o.append(dec(X[:,:3],cache=c)); o.append(dec(X[:,3:5]+9,cache=c)); st[0]=st[0][:,:,:3]; st[1]=st[1][:,:,:3]
        o.append(dec(X[:,3:5],cache=c)); return o
    check(f"{mode} speculative rejected",dec,spec,want=lgf)
print("N",lib.N)
