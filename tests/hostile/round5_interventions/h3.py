from h2 import *
print('=====')
# shared layer
class Shared(Model):
    def forward(s,t):
        x=s.e(t)
        for i in range(3): s.step=i; x=x+s.a[0](s.n[0](x)); x=x+s.f[0](x)
        return s.h(x)
class SEdit:
    def __init__(s,m,mask=None,z=None): s.mm,s.m,s.zf=m,mask,z
    def mask(s,b,a): return s.m(s.mm.step,a.clone()) if s.m else a
    def z(s,b,w,v,z): return s.zf(s.mm.step,w,v,z.clone()) if s.zf else z
@contextlib.contextmanager
def sedit(m,**k):
    m.a[0].E=SEdit(m,**k)
    try: yield
    finally: m.a[0].E=None
def TS(n,m,cm,e,x=ids):
    def f():
        b=out(m,x)
        with sedit(m,**e): want=out(m,x)
        with cm(): got=out(m,x)
        assert torch.equal(out(m,x),b)
        return got,want,b
    report(n,f)
for c in (MHA_bmm if False else V['MHA_bmm'],V['GQA_sdpa'],V['MhaModule']):
    torch.manual_seed(1); m=Shared(c).double().eval()
    for p in m.parameters():
        if p.dim()>1: nn.init.normal_(p,std=.25)
    nm=c.__name__; base='a.0.m' if nm=='MhaModule' else 'a.0'
    TS(f'shared {nm} 1',m,lambda:K(m,heads=[(1,2)]),dict(z=zed(1,2)))
    TS(f'shared {nm} #3',m,lambda:K(m,heads=[(base+'#3',2)]),dict(z=zed(2,2)))
    TS(f'shared {nm} all',m,lambda:K(m,heads=[(base,2)]),dict(z=lambda l,w,v,z:zed(l,2)(l,w,v,z)))
    TS(f'shared {nm} parent',m,lambda:K(m,layers=['a']),dict(z=lambda l,w,v,z:z*0))
    TS(f'shared {nm} keys 0',m,lambda:K(m,heads=[(0,1)],keys=[1],queries=slice(2,None)),dict(mask=mkm(0,[1],slice(2,None),1)))
    def two():
        b=out(m,ids)
        with sedit(m,z=zed(1,2)): w=out(m,ids),out(m,one)
        with K(m,heads=[(1,2)]): g=out(m,ids),out(m,one)
        return torch.cat([t.flatten() for t in g]),torch.cat([t.flatten() for t in w])
    report(f'shared {nm} two passes in block',two)
    with regard.watch(m,keep='qkv') as rec, torch.no_grad(): m(src)
    cap={}
    with sedit(m,z=lambda l,w,v,z:cap.setdefault(l,z)): out(m,src)
    TS(f'shared {nm} patch',m,lambda:regard.patch_heads(m,rec,[(1,2)]),dict(z=zed(1,2,lambda w,v,z:cap[1].expand_as(z))))
    def sr():
        s=ab.search_heads(m,one,rec,lambda lo:lo[:,-1,5]); w=torch.zeros(3,4).double(); b=out(m,one)[0,-1,5]
        for l in range(3):
            for h in range(4):
                with sedit(m,z=zed(l,h,lambda w,v,z:cap[l])): w[l,h]=out(m,one)[0,-1,5]-b
        return torch.as_tensor(s.values)-s.before,w
    report(f'shared {nm} search',sr)
    def at():
        d={}
        def g(l,w,v,z): d[l]=torch.zeros_like(w,requires_grad=True); d[l,'w']=w; return z+d[l]@v
        with sedit(m,z=g): lo=m(one)[0,-1,5]; gr=torch.autograd.grad(lo,[d[i] for i in range(3)])
        return torch.as_tensor(ab.attribute_weights(m,one,lambda lo:lo[:,-1,5]).heads),torch.stack([(d[i,'w']*gr[i]).sum((0,2,3)) for i in range(3)])
    report(f'shared {nm} attribute_weights',at,)
# prenorm residual with two passes: a pass partially: model called twice in block
for c in ('GQA_sdpa','MHA_bmm'):
    m=mk(V[c])
    def two():
        with edit(m,z=zed(1,2)): w=[out(m,x) for x in (ids,one,src)]
        with K(m,heads=[(1,2)]): g=[out(m,x) for x in (ids,one,src)]
        return torch.cat([t.flatten() for t in g]),torch.cat([t.flatten() for t in w])
    report(f'{c} three passes',two)
    def nest():
        with edit(m,z=lambda l,w,v,z: zed(2,0)(l,w,v,zed(1,2,lambda w,v,z:(z/2)*3+1)(l,w,v,z))): w=out(m,ids)
        with regard.patch_heads(m,lambda z:z/2,[(1,2)]), K(m,heads=[(2,0)]), regard.patch_heads(m,lambda z:z*3+1,[(1,2)]): g=out(m,ids)
        return g,w
    report(f'{c} nested fn order',nest)
    def nest2():
        with edit(m,z=zed(1,2)): w=out(m,ids)
        with K(m,heads=[(1,2)]), regard.patch_heads(m,lambda z:z*3+1,[(1,2)]): g=out(m,ids)
        with regard.patch_heads(m,lambda z:z*3+1,[(1,2)]),K(m,heads=[(1,2)]): g2=out(m,ids)
        return torch.cat([g,g2]),torch.cat([w,w])
    report(f'{c} nested knock+patch = 0',nest2)
    def nestkeys():
        with edit(m,mask=lambda l,a: mkm(1,[2],slice(4,None),1)(l,mkm(1,[2,3],slice(3,None),0)(l,a))): w=out(m,ids)
        with K(m,heads=[(1,2),(1,3)],keys=[0],queries=slice(3,None)), K(m,heads=[(1,2)],keys=[1],queries=slice(4,None)): g=out(m,ids)
        return g,w
    report(f'{c} nested keys',nestkeys)
    def inpl():
        with edit(m,z=zed(1,2,lambda w,v,z:z*2)): w=out(m,ids)
        with regard.patch_heads(m,lambda z:z.mul_(2),[(1,2)]): g=out(m,ids)
        return g,w
    report(f'{c} fn in place',inpl)
    for nme,fn in dict(none=lambda z:None,shape=lambda z:z[:,:1],float32=lambda z:z.float(),numpy=lambda z:z.numpy(),scalar=lambda z:0.,bcast=lambda z:z.mean(2,keepdim=True),nan=lambda z:z*float('nan'),perm=lambda z:z.flip(1)).items():
        def f():
            with edit(m,z=zed(1,2,lambda w,v,z:torch.as_tensor(fn(z)).double().expand_as(z))): w=out(m,ids)
            try:
                with regard.patch_heads(m,fn,[(1,2)]): g=out(m,ids)
            finally:
                with torch.no_grad(): assert torch.isfinite(m(ids)).all()
            return g,w
        report(f'{c} fn returns {nme}',f)
    for nme,hh in dict(neg=[(1,-2)],np=[(__import__('numpy').int64(1),__import__('numpy').int64(2))],tens=[(torch.tensor(1),torch.tensor(2))],dup=[(1,2),(1,2)],boolh=[(True,2)],lists=[[1,2]],fl=[(1.0,2)],gen=((l,2) for l in [1]),neglayer=[(-2,2)],arr=torch.tensor([[1,2]]),sets={(1,2)}).items():
        T(f'{c} heads form {nme}',m,lambda:K(m,heads=hh),dict(z=zed(1,2)))
    for nme,kk,want in [('range',range(1,3),slice(1,3)),('np',__import__('numpy').array([1,2]),slice(1,3)),('tensor',torch.tensor([1,2]),slice(1,3)),('neg',[-8,-7],slice(1,3)),('slice step',slice(0,5,2),slice(0,5,2)),('neg slice',slice(-3,-1),slice(6,8)),('int',2,2),('boolmask',[False,True,True]+[False]*6,slice(1,3)),('tuple',(1,2),slice(1,3)),('none slices',[slice(1,3),None],None),('mixed',[slice(1,3),[4]],None),('oob',slice(1,30),slice(1,9)),('oob list',[1,30],None),('empty',[],None),('emptyslice',slice(3,3),None),('rangestep',range(0,6,3),slice(0,6,3)),('dup',[1,1],1),('boolt',torch.tensor([False,True,True]+[False]*6),slice(1,3)),('setk',{1,2},slice(1,3)),('reversed',slice(3,1,-1),slice(2,4))]:
        def mm(l,a):
            if want is not None: return mkm(1,[2],slice(3,None),want)(l,a)
            if nme=='none slices': return mkm(1,[2],slice(3,None),slice(1,3),0)(l,a) if False else (a.__setitem__((0,2,slice(3,None),slice(1,3)),False) or a if l==1 else a)
            return a
        T(f'{c} keys form {nme}',m,lambda:K(m,heads=[(1,2)],keys=kk,queries=slice(3,None)),dict(mask=mm))
