from h import *
import torch.nn as nn, torch.nn.functional as Fn, math
DIM,H,D=24,4,6
class Base(nn.Module):
    G=4; causal=True
    def __init__(s):
        super().__init__()
        s.q=nn.Linear(DIM,H*D); s.k=nn.Linear(DIM,s.G*D); s.v=nn.Linear(DIM,s.G*D); s.o=nn.Linear(H*D,DIM)
        s.E=None; s.extra()
    def extra(s): pass
    def allowed(s,n,m=None): return torch.ones(n,m or n,dtype=torch.bool).tril() if s.causal else torch.ones(n,m or n,dtype=torch.bool)
    def heads(s,x):
        B,N,_=x.shape
        q=s.q(x).view(B,N,H,D).transpose(1,2); k=s.k(x).view(B,N,s.G,D).transpose(1,2); v=s.v(x).view(B,N,s.G,D).transpose(1,2)
        return q,k,v
    def kvmap(s,t): return t.repeat_interleave(H//s.G,1)
    def canon(s,x):
        q,k,v=s.heads(x); k,v=s.kvmap(k),s.kvmap(v)
        sc=q@k.mT/math.sqrt(D)
        a=s.allowed(x.shape[1]).expand(sc.shape)
        return sc,a,v
    def weights(s,sc,a): return torch.softmax(sc.masked_fill(~a,-1e30),-1)*a.any(-1,keepdim=True)
    def outp(s,z,x): B,_,N,_=z.shape; return s.o(z.transpose(1,2).reshape(B,N,-1))
    def forward(s,x):
        if s.E is None: return s.native(x)
        sc,a,v=s.canon(x)
        a=s.E.mask(s,a); w=s.weights(sc,a); z=s.E.z(s,w,v,w@v)
        return s.outp(z,x)
V={}
def var(c): V[c.__name__]=c; return c
def sm(s,sc): n,m=sc.shape[-2:]; return sc.masked_fill(~s.allowed(n,m),float('-inf')).softmax(-1)
@var
class MHA_bmm(Base):
    def native(s,x):
        q,k,v=s.heads(x); z=sm(s,q@k.mT/math.sqrt(D))@v; return s.outp(z,x)
@var
class GQA_interleave(MHA_bmm):
    G=2
    def native(s,x):
        q,k,v=s.heads(x); k,v=s.kvmap(k),s.kvmap(v); return s.outp(sm(s,q@k.mT/math.sqrt(D))@v,x)
@var
class GQA_einsum5(Base):
    G=2
    def native(s,x):
        q,k,v=s.heads(x); B,_,N,_=q.shape; q=q.view(B,2,2,N,D)
        w=sm(s,torch.einsum('bgrnd,bgmd->bgrnm',q,k)/math.sqrt(D)); z=torch.einsum('bgrnm,bgmd->bngrd',w,v); return s.o(z.reshape(B,N,-1))
@var
class GQA_matmul5(Base):
    G=2
    def native(s,x):
        q,k,v=s.heads(x); B,_,N,_=q.shape; q=q.view(B,2,2,N,D)
        w=sm(s,q@k.unsqueeze(2).mT/math.sqrt(D)); z=(w@v.unsqueeze(2)).view(B,H,N,D); return s.outp(z,x)
@var
class GQA_tiled(Base):
    G=2
    def kvmap(s,t): return t.repeat(1,H//s.G,1,1)
    def native(s,x):
        q,k,v=s.heads(x); k,v=s.kvmap(k),s.kvmap(v); return s.outp(sm(s,q@k.mT/math.sqrt(D))@v,x)
@var
class GQA_tiled5(Base):
    G=2
    def kvmap(s,t): return t.repeat(1,H//s.G,1,1)
    def native(s,x):
        q,k,v=s.heads(x); B,_,N,_=q.shape; q=q.view(B,2,2,N,D)  # r,g
        w=sm(s,torch.einsum('brgnd,bgmd->brgnm',q,k)/math.sqrt(D)); z=torch.einsum('brgnm,bgmd->bnrgd',w,v); return s.o(z.reshape(B,N,-1))
@var
class GQA_sdpa(Base):
    G=2
    def native(s,x):
        q,k,v=s.heads(x); return s.outp(Fn.scaled_dot_product_attention(q,k,v,is_causal=True,enable_gqa=True),x)
@var
class GQA_groups_merged(Base):
    G=2
    def native(s,x):  # q of a group folded in rows: (B,G,R*N,D)
        q,k,v=s.heads(x); B,_,N,_=q.shape; q=q.reshape(B,2,2*N,D)
        sc=(q@k.mT/math.sqrt(D)).view(B,2,2,N,N); w=sm(s,sc).view(B,2,2*N,N); z=(w@v).view(B,H,N,D); return s.outp(z,x)
@var
class MQA_fold(Base):
    G=1
    def native(s,x):
        B,N,_=x.shape; q=s.q(x).view(B,N*H,D); k=s.k(x); v=s.v(x)
        sc=(q@k.mT/math.sqrt(D)).view(B,N,H,N).masked_fill(~s.allowed(N)[:,None],float('-inf')); w=sc.softmax(-1).view(B,N*H,N); return s.o((w@v).view(B,N,H*D))
@var
class MQA_fold2(Base):
    G=1
    def native(s,x):
        B,N,_=x.shape; q=s.q(x).view(B,N,H,D).transpose(1,2).reshape(B,H*N,D); k=s.k(x); v=s.v(x)
        sc=(q@k.mT/math.sqrt(D)).view(B,H,N,N); w=sm(s,sc).view(B,H*N,N); return s.outp((w@v).view(B,H,N,D),x)
@var
class MQA_sdpa_expand(Base):
    G=1
    def native(s,x):
        q,k,v=s.heads(x); return s.outp(Fn.scaled_dot_product_attention(q,k.expand(-1,H,-1,-1),v.expand(-1,H,-1,-1),is_causal=True),x)
@var
class ListCat(Base):
    def native(s,x):
        q,k,v=s.heads(x); zs=[sm(s,q[:,h]@k[:,h].mT/math.sqrt(D))@v[:,h] for h in range(H)]; return s.o(torch.cat(zs,-1))
@var
class ListStack(Base):
    def native(s,x):
        q,k,v=s.heads(x); zs=[Fn.scaled_dot_product_attention(q[:,h],k[:,h],v[:,h],is_causal=True) for h in range(H)]; return s.outp(torch.stack(zs,1),x)
@var
class PerHeadOut(Base):
    def native(s,x):
        q,k,v=s.heads(x); z=sm(s,q@k.mT/math.sqrt(D))@v
        return sum(z[:,h]@s.o.weight[:,h*D:(h+1)*D].T for h in range(H))+s.o.bias
@var
class EinsumOut(Base):
    def native(s,x):
        q,k,v=s.heads(x); z=sm(s,q@k.mT/math.sqrt(D))@v
        return torch.einsum('bhnd,ehd->bne',z,s.o.weight.view(DIM,H,D))+s.o.bias
@var
class ConvOut(Base):
    def native(s,x):
        q,k,v=s.heads(x); z=sm(s,q@k.mT/math.sqrt(D))@v; B,_,N,_=z.shape
        return Fn.conv1d(z.permute(0,1,3,2).reshape(B,H*D,N),s.o.weight[...,None],s.o.bias).mT
@var
class NormPerHead(Base):
    def extra(s): s.nw=nn.Parameter(torch.randn(D))
    def outp(s,z,x):
        z=z*torch.rsqrt(z.pow(2).mean(-1,keepdim=True)+1e-6)*s.nw; return super().outp(z,x)
    native=MHA_bmm.native
@var
class GateAfter(Base):
    def extra(s): s.g=nn.Linear(DIM,H*D)
    def outp(s,z,x):
        B,_,N,_=z.shape; return s.o(z.transpose(1,2).reshape(B,N,-1)*torch.sigmoid(s.g(x)))
    native=MHA_bmm.native
@var
class GatePerHead(Base):
    def extra(s): s.g=nn.Linear(DIM,H)
    def outp(s,z,x): return super().outp(z*torch.sigmoid(s.g(x)).transpose(1,2)[...,None],x)
    def native(s,x):
        q,k,v=s.heads(x); return s.outp(Fn.scaled_dot_product_attention(q,k,v,is_causal=True),x)
@var
class Interleaved(Base):
    def heads(s,x):
        B,N,_=x.shape; f=lambda t:t.view(B,N,D,H).permute(0,3,1,2); return f(s.q(x)),f(s.k(x)),f(s.v(x))
    def outp(s,z,x): B,_,N,_=z.shape; return s.o(z.permute(0,2,3,1).reshape(B,N,-1))
    native=MHA_bmm.native
@var
class SeqFirst(Base):
    def native(s,x):
        t=x.transpose(0,1); N,B,_=t.shape
        f=lambda l:l(t).view(N,B*H,D).transpose(0,1)
        q,k,v=f(s.q),f(s.k),f(s.v); w=sm(s,torch.bmm(q,k.mT)/math.sqrt(D)); z=torch.bmm(w,v).transpose(0,1).reshape(N,B,H*D); return s.o(z).transpose(0,1)
@var
class HB_fold(Base):
    def native(s,x):  # heads outer: (H*B,N,D)
        q,k,v=s.heads(x); B,_,N,_=q.shape; f=lambda t:t.transpose(0,1).reshape(H*B,N,D)
        q,k,v=f(q),f(k),f(v); z=sm(s,q@k.mT/math.sqrt(D))@v; return s.outp(z.view(H,B,N,D).transpose(0,1),x)
@var
class HB_split_cat(Base):
    def native(s,x):  # annotated-transformer/kyubyong style
        f=lambda t:torch.cat(t.split(D,-1),0)
        q,k,v=f(s.q(x)),f(s.k(x)),f(s.v(x)); z=sm(s,q@k.mT/math.sqrt(D))@v; return s.o(torch.cat(z.split(x.shape[0],0),-1))
@var
class HeadsLast(Base):
    def native(s,x):
        B,N,_=x.shape; f=lambda l:l(x).view(B,N,H,D); q,k,v=f(s.q),f(s.k),f(s.v)
        sc=torch.einsum('bnhd,bmhd->bnmh',q,k)/math.sqrt(D); sc=sc.masked_fill(~s.allowed(N)[...,None],float('-inf')); w=sc.softmax(2); return s.o(torch.einsum('bnmh,bmhd->bnhd',w,v).reshape(B,N,-1))
@var
class KeysFirst(Base):
    def native(s,x):
        q,k,v=s.heads(x); N=x.shape[1]; sc=(k@q.mT/math.sqrt(D)).masked_fill(~s.allowed(N).T,float('-inf')); w=sc.softmax(-2); return s.outp((v.mT@w).mT,x)
@var
class ExpSum(Base):
    def native(s,x):
        q,k,v=s.heads(x); N=x.shape[1]; sc=(q@k.mT/math.sqrt(D)).masked_fill(~s.allowed(N),float('-inf')); e=(sc-sc.amax(-1,keepdim=True)).exp(); return s.outp(e/e.sum(-1,keepdim=True)@v,x)
@var
class ExpSumLate(Base):
    def native(s,x):
        q,k,v=s.heads(x); N=x.shape[1]; sc=(q@k.mT/math.sqrt(D)).masked_fill(~s.allowed(N),float('-inf')); e=(sc-sc.amax(-1,keepdim=True)).exp(); return s.outp((e@v)/e.sum(-1,keepdim=True),x)
@var
class LSE(Base):
    def native(s,x):
        q,k,v=s.heads(x); N=x.shape[1]; sc=(q@k.mT/math.sqrt(D)).masked_fill(~s.allowed(N),float('-inf')); return s.outp((sc-sc.logsumexp(-1,keepdim=True)).exp()@v,x)
@var
class LogSoftmaxExp(Base):
    def native(s,x):
        q,k,v=s.heads(x); N=x.shape[1]; sc=(q@k.mT/math.sqrt(D)).masked_fill(~s.allowed(N),float('-inf')); return s.outp(sc.log_softmax(-1).exp()@v,x)
@var
class SoftmaxMaskAfter(Base):
    def native(s,x):  # softmax, then mask, then renormalise
        q,k,v=s.heads(x); N=x.shape[1]; w=(q@k.mT/math.sqrt(D)).softmax(-1)*s.allowed(N); return s.outp(w/w.sum(-1,keepdim=True)@v,x)
@var
class QueryChunks(Base):
    def native(s,x):
        q,k,v=s.heads(x); N=x.shape[1]; zs=[]
        for i in range(0,N,4): zs.append((q[:,:,i:i+4]@k.mT/math.sqrt(D)).masked_fill(~s.allowed(N)[i:i+4],float('-inf')).softmax(-1)@v)
        return s.outp(torch.cat(zs,2),x)
@var
class QueryChunksSdpa(Base):
    def native(s,x):
        q,k,v=s.heads(x); N=x.shape[1]; zs=[]
        for i in range(0,N,4): zs.append(Fn.scaled_dot_product_attention(q[:,:,i:i+4],k,v,attn_mask=s.allowed(N)[i:i+4]))
        return s.outp(torch.cat(zs,2),x)
@var
class BatchLoop(Base):
    def native(s,x):
        return torch.stack([s.outp(sm(s,(t:=s.heads(y[None]))[0]@t[1].mT/math.sqrt(D))@t[2],x)[0] for y in x])
@var
class HeadChunks(Base):
    def native(s,x):  # two calls with two heads each
        q,k,v=s.heads(x); zs=[Fn.scaled_dot_product_attention(q[:,i:i+2],k[:,i:i+2],v[:,i:i+2],is_causal=True) for i in (0,2)]; return s.outp(torch.cat(zs,1),x)
@var
class HeadChunksBmm(Base):
    def native(s,x):
        q,k,v=s.heads(x); zs=[sm(s,q[:,i:i+2]@k[:,i:i+2].mT/math.sqrt(D))@v[:,i:i+2] for i in (0,2)]; return s.outp(torch.cat(zs,1),x)
@var
class SinkLogit(Base):
    def extra(s): s.sink=nn.Parameter(torch.randn(H))
    def weights(s,sc,a):
        sc=torch.cat([sc.masked_fill(~a,float('-inf')),s.sink.view(1,H,1,1).expand(*sc.shape[:3],1)],-1); return sc.softmax(-1)[...,:-1]
    def native(s,x):
        q,k,v=s.heads(x); sc=q@k.mT/math.sqrt(D); return s.outp(s.weights(sc,s.allowed(x.shape[1]).expand(sc.shape))@v,x)
@var
class SinkFirst(Base):
    def extra(s): s.sink=nn.Parameter(torch.randn(H))
    def weights(s,sc,a):
        sc=torch.cat([s.sink.view(1,H,1,1).expand(*sc.shape[:3],1),sc.masked_fill(~a,float('-inf'))],-1); return sc.softmax(-1)[...,1:]
    native=SinkLogit.native
@var
class Softmax1(Base):
    def weights(s,sc,a):
        e=sc.masked_fill(~a,float('-inf')).exp(); return e/(1+e.sum(-1,keepdim=True))
    native=SinkLogit.native
@var
class SigmoidAttn(Base):
    def weights(s,sc,a): return torch.sigmoid(sc)*a
    native=SinkLogit.native
@var
class Softcap(Base):
    def weights(s,sc,a): return super().weights(5*torch.tanh(sc/5),a)
    native=SinkLogit.native
@var
class ALiBi(Base):
    def weights(s,sc,a):
        n=sc.shape[-1]; return super().weights(sc+(torch.arange(n)[None,None,None]*torch.tensor([.5,.25,.125,.06]).view(1,4,1,1)).to(sc),a)
    native=SinkLogit.native
@var
class Parallel(Base):
    def extra(s): s.m1=nn.Linear(DIM,20); s.m2=nn.Linear(H*D+20,DIM)
    def outp(s,z,x): B,_,N,_=z.shape; return s.m2(torch.cat([z.transpose(1,2).reshape(B,N,-1),Fn.gelu(s.m1(x))],-1))
    native=MHA_bmm.native
@var
class ParallelSdpaFirstMlp(Base):
    def extra(s): s.m1=nn.Linear(DIM,20); s.m2=nn.Linear(H*D+20,DIM)
    def outp(s,z,x): B,_,N,_=z.shape; return s.m2(torch.cat([Fn.gelu(s.m1(x)),z.transpose(1,2).reshape(B,N,-1)],-1))
    native=GatePerHead.native
@var
class TalkAfter(Base):
    def extra(s): s.t=nn.Parameter(torch.randn(H,H))
    def weights(s,sc,a): return torch.einsum('gh,bhnm->bgnm',s.t,super().weights(sc,a))
    native=SinkLogit.native
@var
class TalkBefore(Base):
    def extra(s): s.t=nn.Parameter(torch.randn(H,H))
    def weights(s,sc,a): return super().weights(torch.einsum('gh,bhnm->bgnm',s.t,sc),a)
    native=SinkLogit.native
@var
class ZMix(Base):
    def extra(s): s.t=nn.Parameter(torch.randn(H,H))
    def outp(s,z,x): return super().outp(torch.einsum('gh,bhnd->bgnd',s.t,z),x)
    native=MHA_bmm.native
@var
class Window(Base):
    def allowed(s,n,m=None): i=torch.arange(n); return (i[:,None]>=i)&(i[:,None]-i<4)
    native=MHA_bmm.native
@var
class WindowBand(Base):
    W=4
    def allowed(s,n,m=None): i=torch.arange(n); return (i[:,None]>=i)&(i[:,None]-i<4)
    def native(s,x): # unfold keys: (B,H,N,W)
        q,k,v=s.heads(x); N=x.shape[1]
        ku=Fn.pad(k,(0,0,3,0)).unfold(2,4,1); vu=Fn.pad(v,(0,0,3,0)).unfold(2,4,1)  # B,H,N,D,W
        sc=torch.einsum('bhnd,bhndw->bhnw',q,ku)/math.sqrt(D)
        ok=(torch.arange(N)[:,None]-3+torch.arange(4))>=0
        w=sc.masked_fill(~ok,float('-inf')).softmax(-1); return s.outp(torch.einsum('bhnw,bhndw->bhnd',w,vu),x)
@var
class Diff(Base):
    def extra(s): s.lam=.4
    def canonw(s,sc): pass
    def native(s,x):
        q,k,v=s.heads(x); f=lambda a,b: sm(s,a@b.mT/math.sqrt(3)); h=D//2
        return s.outp((f(q[...,:h],k[...,:h])-.4*f(q[...,h:],k[...,h:]))@v,x)
    def canon(s,x):
        q,k,v=s.heads(x); h=D//2; sc=torch.stack([q[...,:h]@k[...,:h].mT,q[...,h:]@k[...,h:].mT])/math.sqrt(3); return sc,s.allowed(x.shape[1]).expand(sc.shape[1:]),v
    def weights(s,sc,a): return Base.weights(s,sc[0],a)-.4*Base.weights(s,sc[1],a)
@var
class MhaModule(Base):
    def extra(s): s.m=nn.MultiheadAttention(DIM,H,batch_first=True)
    def heads(s,x):
        B,N,_=x.shape; return [t.view(B,N,H,D).transpose(1,2) for t in Fn.linear(x,s.m.in_proj_weight,s.m.in_proj_bias).chunk(3,-1)]
    def outp(s,z,x): B,_,N,_=z.shape; return s.m.out_proj(z.transpose(1,2).reshape(B,N,-1))
    def native(s,x): return s.m(x,x,x,need_weights=False,attn_mask=~s.allowed(x.shape[1]))[0]
@var
class MhaModuleW(MhaModule):
    def native(s,x): return s.m(x,x,x,need_weights=True,attn_mask=~s.allowed(x.shape[1]))[0]
@var
class Dropout0(Base):
    def native(s,x):
        q,k,v=s.heads(x); z=Fn.dropout(sm(s,q@k.mT/math.sqrt(D)),.1,s.training)@v; return s.outp(z,x)
@var
class Baddbmm(Base):
    def native(s,x):
        q,k,v=s.heads(x); B,_,N,_=q.shape; f=lambda t:t.reshape(B*H,N,D)
        bias=torch.zeros(B*H,N,N,dtype=x.dtype).masked_fill(~s.allowed(N),float('-inf')); w=torch.baddbmm(bias,f(q),f(k).mT,alpha=1/math.sqrt(D)).softmax(-1); return s.outp(torch.bmm(w,f(v)).view(B,H,N,D),x)
@var
class QScaledInplace(Base):
    def native(s,x):
        q,k,v=s.heads(x); q=q/math.sqrt(D); sc=q@k.mT; N=x.shape[1]
        sc.masked_fill_(~s.allowed(N),-1e9); torch.softmax(sc,-1,out=None); w=Fn.softmax(sc,-1); z=torch.empty_like(q); torch.matmul(w,v,out=z) if not torch.is_grad_enabled() else z.copy_(w@v); return s.outp(z,x)
@var
class MulSum(Base):
    def native(s,x):
        q,k,v=s.heads(x); sc=(q[:,:,:,None]*k[:,:,None]).sum(-1)/math.sqrt(D); w=sm(s,sc); return s.outp((w[...,None]*v[:,:,None]).sum(3),x)
@var
class VHeadDouble(Base):
    # values are shared in pairs of the channel: V with G=1, K with 4
    def extra(s): s.v1=nn.Linear(DIM,D)
    def canon(s,x): sc,a,_=super().canon(x); return sc,a,s.v1(x)[:,None].expand(-1,H,-1,-1)
    def native(s,x):
        q,k,_=s.heads(x); return s.outp(sm(s,q@k.mT/math.sqrt(D))@s.v1(x)[:,None],x)
@var
class Tensordot(Base):
    def native(s,x):
        q,k,v=s.heads(x); z=sm(s,q@k.mT/math.sqrt(D))@v
        return torch.tensordot(z.transpose(1,2),s.o.weight.view(DIM,H,D),dims=([2,3],[1,2]))+s.o.bias
@var
class ResidualInAttn(Base):
    def outp(s,z,x): return super().outp(z,x)*.5+.1*x
    native=MHA_bmm.native
@var
class VPlusZ(Base):  # output has v added (lepe)
    def outp(s,z,x): return super().outp(z+s.heads(x)[2],x)
    native=MHA_bmm.native
class Edit:
    def __init__(s,layers,mask=None,z=None): s.l,s.m,s.zf=layers,mask,z
    def mask(s,blk,a): s.m and 0; return s.m(s.l.index(blk),a.clone()) if s.m else a
    def z(s,blk,w,v,z): return s.zf(s.l.index(blk),w,v,z.clone()) if s.zf else z
class Model(nn.Module):
    def __init__(s,c,L=3):
        super().__init__(); s.e=nn.Embedding(32,DIM); s.a=nn.ModuleList(c() for _ in range(L)); s.n=nn.ModuleList(nn.LayerNorm(DIM) for _ in range(L)); s.f=nn.ModuleList(nn.Sequential(nn.Linear(DIM,30),nn.GELU(),nn.Linear(30,DIM)) for _ in range(L)); s.h=nn.Linear(DIM,32)
        s.trunk()
    def trunk(s): pass
    def forward(s,t):
        x=s.e(t)
        for a,n,f in zip(s.a,s.n,s.f): x=x+a(n(x)); x=x+f(x)
        return s.h(x)
@contextlib.contextmanager
def edit(m,**k):
    for b in m.a: b.E=Edit(list(m.a),**k)
    try: yield
    finally:
        for b in m.a: b.E=None
def tests(name,m,B=2,N=9):
    torch.manual_seed(3); ids=torch.randint(0,32,(B,N)); src=torch.randint(0,32,(1,N)); one=ids[:1]
    base=out(m,ids)
    with edit(m): c=out(m,ids)
    if (base-c).abs().max()>1e-9: print(name,'| ORACLE BAD',(base-c).abs().max().item()); return
    def zed(l0,h0,f):
        def g(l,w,v,z):
            if l==l0: z[:,h0]=f(w,v,z)[:,h0]
            return z
        return g
    def T(n,cm,e,x=ids):
        def f():
            b=out(m,x)
            with edit(m,**e): want=out(m,x)
            with cm(): got=out(m,x)
            if not torch.equal(out(m,x),b): return 'DEFECT left patched'
            return got,want,b
        report(f"{name} {n}",f)
    T('head',lambda:regard.knock_out(m,heads=[(1,2)]),dict(z=zed(1,2,lambda w,v,z:z*0)))
    def mk(l,a):
        if l==1: a[:,3,4:,2]=False; a[:,3,4:,0]=False
        return a
    T('keys',lambda:regard.knock_out(m,heads=[(1,3)],keys=[0,2],queries=slice(4,None)),dict(mask=mk))
    def mk2(l,a):
        if l==2: a[1,:,5:,3]=False; a[0,:,5:,1]=False
        return a
    T('keys per seq',lambda:regard.knock_out(m,layers=[2],keys=[slice(1,2),slice(3,4)],queries=slice(5,None)),dict(mask=mk2))
    def mk3(l,a):
        if l==0: i=torch.arange(N); a[:,1]&=(i[:,None]-i<3)&(i[:,None]-i>=0)
        return a
    T('mask',lambda:regard.knock_out(m,heads=[(0,1)],mask=regard.window(2)),dict(mask=mk3))
    def qz(l,w,v,z):
        if l==1: z[:,0,[1,N-1]]=0
        return z
    def mkq(l,a):
        if l==1: a[:,0,[1,N-1]]=False
        return a
    T('queries',lambda:regard.knock_out(m,heads=[(1,0)],queries=[1,-1]),dict(z=qz))
    T('half',lambda:regard.patch_heads(m,lambda z:z/2,[(1,2)]),dict(z=zed(1,2,lambda w,v,z:z/2)))
    cap={}
    def grab(l,w,v,z): cap[l]=(w,v,z); return z
    with edit(m,z=grab): out(m,src)
    try:
        with regard.watch(m,keep='qkv') as rec, torch.no_grad(): m(src)
    except BaseException as e: print(name,'| watch failed',e); return
    def pz(l,w,v,z):
        if l==1: z[:,2,3:6]=cap[1][2][:,2,3:6]
        return z
    T('patch z',lambda:regard.patch_heads(m,rec,[(1,2)],queries=slice(3,6)),dict(z=pz))
    def pv(l,w,v,z):
        if l==1: v=v.clone(); v[:,2,1:3]=cap[1][1][:,2,1:3]; z[:,2]=w[:,2]@v[:,2]
        return z
    T('patch v',lambda:regard.patch_heads(m,rec,[(1,2)],parts='v',keys=[1,2]),dict(z=pv))
    def pp(l,w,v,z):
        if l==1: z[:,2]=cap[1][0][:,2]@v[:,2]
        return z
    T('pattern',lambda:regard.patch_heads(m,rec,[(1,2)],parts='pattern'),dict(z=pp))
    # search + trace
    meas=lambda lo: lo[:,-1,5]
    def want_search():
        b=out(m,one)[0,-1,5]; r=torch.zeros(3,H,dtype=torch.double)
        for l in range(3):
            for h in range(H):
                with edit(m,z=zed(l,h,lambda w,v,z:cap[l][2].expand_as(z))): r[l,h]=out(m,one)[0,-1,5]-b
        return r
    def fs():
        s=ab.search_heads(m,one,rec,meas); return torch.as_tensor(s.values)-s.before,want_search(),torch.zeros(3,H)
    report(f"{name} search",fs,1e-7)
    def ft():
        zs={}; 
        def g(l,w,v,z): zs[l]=z; return z
        with edit(m,z=g): out(m,one)
        with ab.trace_heads(m) as t: m(one)[0,-1,5].backward()
        m.zero_grad()
        return torch.as_tensor(t.outputs(1)),zs[1],zs[1]*0
    report(f"{name} trace outputs",ft,1e-7)
    def fw():
        # write of head h = J of attn-block output wrt z_h times z_h : difference for linear outp
        with ab.trace_heads(m) as t: m(one)[0,-1,5].backward()
        m.zero_grad()
        zs={}; xs={}
        h0=m.a[1].register_forward_pre_hook(lambda mod,a:xs.update(x=a[0]))
        def g(l,w,v,z): zs[l]=z; return z
        with edit(m,z=g): out(m,one)
        h0.remove()
        z=zs[1]; z2=z.clone(); z2[:,3]=0
        with torch.no_grad(): want=m.a[1].outp(z,xs['x'])-m.a[1].outp(z2,xs['x'])
        return torch.as_tensor(t.writes(1,3)),want,want*0
    report(f"{name} trace writes",fw,1e-7)
    def fa():
        import torch
        ws={}
        def g(l,w,v,z):
            d=torch.zeros_like(w,requires_grad=True); ws[l]=(w,d); return z+d@v
        with edit(m,z=g): lo=m(one)[0,-1,5]; gr=torch.autograd.grad(lo,[ws[l][1] for l in range(3)])
        want=torch.stack([(ws[l][0]*gr[l]).sum((0,2,3)) for l in range(3)])
        a=ab.attribute_weights(m,one,meas)
        c=torch.as_tensor(a.cells(1,2)); wc=(ws[1][0]*gr[1])[0,2]
        if (c-wc).abs().max()>1e-7: return f'DEFECT cells {(c-wc).abs().max()}'
        return torch.as_tensor(a.heads),want,want*0
    report(f"{name} attribute_weights",fa,1e-7)
    def fh():
        zz={}
        def g(l,w,v,z): zz[l]=z.requires_grad_() if not z.requires_grad else z; zz[l].retain_grad(); return zz[l]
        class C:  pass
        def g2(l,w,v,z):
            d=torch.zeros_like(z,requires_grad=True); zz[l]=(z,d); return z+d
        with edit(m,z=g2): lo=m(one)[0,-1,5]; gr=torch.autograd.grad(lo,[zz[l][1] for l in range(3)])
        want=torch.stack([((cap[l][2]-zz[l][0])*gr[l]).sum((0,2,3)) for l in range(3)])
        a=ab.attribute_heads(m,one,rec,meas)
        return torch.as_tensor(a.changes),want,want*0
    report(f"{name} attribute_heads",fh,1e-7)
    def fv():
        w=regard.value_weights.weigh_values(m,one)
        zs={};xs={}
        h0=m.a[1].register_forward_pre_hook(lambda mod,a:xs.update(x=a[0]))
        def g(l,w,v,z): zs[l]=(w,v); return z
        with edit(m,z=g): out(m,one)
        h0.remove()
        W,vv=zs[1]; N=W.shape[-1]
        ns=[]
        for j in range(N):
            with torch.no_grad():
                z=torch.zeros_like(vv); z0=m.a[1].outp(z,xs['x']); z[:,2]=vv[:,2,j:j+1]; ns.append((m.a[1].outp(z,xs['x'])-z0)[0,0].norm())
        want=W[0,2]*torch.stack(ns)
        return torch.as_tensor(w.cells(1,2)),want,want*0
    report(f"{name} weigh_values",fv,1e-6)
if __name__=='__main__':
    sel=sys.argv[1].split(',') if len(sys.argv)>1 else list(V)
    for n in sel:
        torch.manual_seed(1); m=Model(V[n]).double().eval()
        for p in m.parameters():
            if p.dim()>1: nn.init.normal_(p,std=.25)
        try: tests(n,m)
        except BaseException as e: print(n,'| SCRIPT',type(e).__name__,e); traceback.print_exc(limit=3)
