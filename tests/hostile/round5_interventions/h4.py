from h2 import *
print('=====')
X={}
def ex(f): X[f.__name__]=f; return f
class Ex(Base):
    after=False; native_kind='sdpa'
    def extra(s): s.code=nn.Parameter(torch.randn(7,DIM)); s.code2=nn.Parameter(torch.randn(7,DIM)); s.r=nn.Linear(DIM,5); s.pq=nn.Parameter(torch.randn(1,1,DIM)); s.w=nn.Parameter(torch.randn(5,DIM,DIM)*.1)
    def core(s,x):
        q,k,v=s.heads(x)
        z=Fn.scaled_dot_product_attention(q,k,v,is_causal=True) if s.native_kind=='sdpa' else sm(s,q@k.mT/math.sqrt(D))@v
        return s.outp(z,x)
    def native(s,x): return s.core(x)
    def forward(s,x):
        if s.after: y=super().forward(x); return y+s.fn(s,y)
        return super().forward(x+s.fn(s,x))
@ex
def codebook(s,x): return (x@s.code.T).softmax(-1)@s.code2
@ex
def codebook_same(s,x): return (x@s.code.T).softmax(-1)@s.code
@ex
def router(s,x): w=s.r(x).softmax(-1); return torch.einsum('bne,edf,bnd->bnf',w,s.w,x)
@ex
def router_top(s,x):
    w,i=s.r(x).softmax(-1).topk(2,-1); return sum(w[...,j:j+1]*torch.einsum('bnd,bndf->bnf',x,s.w[i[...,j]]) for j in range(2))
@ex
def pool(s,x): return ((s.pq@x.mT).softmax(-1)@x)
@ex
def effattn(s,x): return x.softmax(-1)@(x.softmax(1).mT@x)*.1
@ex
def channel_attn(s,x): return ((x.mT@x).softmax(-1)@x.mT).mT*.1
@ex
def simlog(s,x): s.sim=(x@x.mT).softmax(-1).detach(); return x*0
@ex
def simlog_code(s,x): s.sim=(x@s.code.T).softmax(-1).detach(); return x*0
@ex
def simgate(s,x): return x*(x@x.mT).softmax(-1).amax(-1,keepdim=True)
@ex
def simloss(s,x): lp=(x@x.mT).log_softmax(-1); s.loss=-lp.diagonal(dim1=1,dim2=2).mean(); return x*0
@ex
def selfattn_dist(s,x): return (-torch.cdist(x,x)).softmax(-1)@x*.3
@ex
def dynconv(s,x):
    w=s.r(x).softmax(-1); xu=Fn.pad(x,(0,0,4,0)).unfold(1,5,1); return torch.einsum('bnk,bndk->bnd',w,xu)
@ex
def bilinear(s,x): return (x@s.w[0]@x.mT).softmax(-1)@x
@ex
def gumbel(s,x): return Fn.gumbel_softmax((x@s.code.T),tau=1e-3,hard=False)*0@s.code
@ex
def ctc(s,x): s.c=Fn.cross_entropy((x@s.code.T).flatten(0,1),torch.zeros(x.shape[0]*x.shape[1],dtype=torch.long)); return x*0
for after in (False,True):
  for kind in ('sdpa','own'):
    for n,f in X.items():
        class C(Ex): pass
        C.after=after; C.native_kind=kind; C.fn=staticmethod(f)
        m=mk(C); tag=f"{n} {'after' if after else 'before'} {kind}"
        try:
            with regard.watch(m,keep='qkv') as rec, torch.no_grad(): m(src)
            ls=list(rec.layers)
        except BaseException as e: print(tag,'| watch',type(e).__name__,e); continue
        # which numbers does watch give a.1's real attention (4 heads)
        num=[i for i,(l) in enumerate(ls) if l.split('#')[0]=='a.1']
        real=None
        for i in num:
            lay=rec.layer(i)
            try: hh=torch.as_tensor(lay.weights()).shape[-3]
            except Exception as e: hh=0
            if hh==4: real=i
        if real is None: print(tag,'| reported: not recorded',ls); continue
        T(f'{tag} {ls} K {real}',m,lambda:K(m,heads=[(real,2)]),dict(z=zed(1,2)))
        T(f'{tag} K name {ls[real]}',m,lambda:K(m,heads=[(ls[real],2)]),dict(z=zed(1,2)))
        T(f'{tag} half',m,lambda:regard.patch_heads(m,lambda z:z/2,[(real,2)]),dict(z=zed(1,2,lambda w,v,z:z/2)))
        CAP={}
        with edit(m,z=lambda l,w,v,z:CAP.setdefault(l,z)): out(m,src)
        T(f'{tag} patch rec',m,lambda:regard.patch_heads(m,rec,[(real,2)]),dict(z=zed(1,2,lambda w,v,z:CAP[1].expand_as(z))))
