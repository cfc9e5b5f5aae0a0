# aliasing, in-place, out=, lookalikes, memory nets, pointer, flex, autograd functions, odd tensors
from lib import *
import lib
class M(nn.Module):
    def __init__(s,f,C=8,H=2): super().__init__(); s.f=f;s.H=H;s.D=C//H; s.q=nn.Linear(C,C);s.k=nn.Linear(C,C);s.v=nn.Linear(C,C);s.o=nn.Linear(C,C); s.mem=nn.Parameter(torch.randn(7,C)); s.mem2=nn.Parameter(torch.randn(7,C)); s.g=nn.Linear(C,3); s.ex=nn.ModuleList([nn.Linear(C,C) for _ in range(3)]); s.seed=nn.Parameter(torch.randn(1,4,C)); s.w=nn.Linear(C,1)
    def h(s,t): return t.view(t.shape[0],-1,s.H,s.D).transpose(1,2)
    def j(s,z): return s.o(z.transpose(1,2).flatten(2))
    def forward(s,x): return s.f(s,x)
X=torch.randn(3,5,8,generator=torch.Generator().manual_seed(1))
def go(name,f,want=None,x=X,C=8,H=2,**kw):
    torch.manual_seed(2); m=M(f,C,H); return check(name,m,lambda:m(x),want=want,**kw)
c5=torch.ones(5,5).tril().bool()
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); a=torch.empty(3,2,5,5); torch.matmul(q,k.mT,out=a); a.mul_(s.D**-.5); torch.softmax(a,-1,out=a) if False else a.copy_(a.softmax(-1)); log(a); return s.j(torch.matmul(a,v))
go("matmul out=, softmax copied back",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); a=torch.empty(6,5,5); torch.bmm(q.reshape(6,5,4),k.reshape(6,5,4).mT,out=a); a/=2; w=torch.empty_like(a); torch.softmax(a,-1,out=w); log(w.view(3,2,5,5)); o=torch.empty(6,5,4); torch.bmm(w,v.reshape(6,5,4),out=o); return s.j(o.view(3,2,5,4))
go("bmm out= everywhere, softmax out=",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); w=(q@k.mT*s.D**-.5).softmax(-1); log(w); o=w@v; w.zero_(); return s.j(o)
go("weights zeroed after use",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)).clone(),s.h(s.v(x)); a=(q@k.mT*s.D**-.5); k.mul_(3); q.mul_(2); w=a.softmax(-1); log(w); return s.j(w@v)
go("q,k modified between scores and softmax",f)
def f(s,x):
    q,k,v=s.h(s.q(x)).clone(),s.h(s.k(x)).clone(),s.h(s.v(x)).clone(); a=(q@k.mT*s.D**-.5); w=a.softmax(-1); log(w); k.zero_();q.zero_(); o=w@v; v.zero_(); return s.j(o)
go("q,k zeroed before w@v",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); w=(q@k.mT*s.D**-.5).softmax(-1); w[:,:,0]=torch.tensor([1.,0,0,0,0]); log(w); return s.j(w@v)
go("first row of weights overwritten in place",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); a=(q@k.mT*s.D**-.5); a[:,:,:,0]+=2.; a[:,1]*=3; a[:,:,2,3]=-torch.inf; w=a.softmax(-1); log(w); return s.j(w@v)
go("scores edited by slices in place",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); a=(q@k.mT*s.D**-.5); a.diagonal(dim1=-2,dim2=-1).fill_(-torch.inf); w=a.softmax(-1); log(w); return s.j(w@v)
go("diagonal filled -inf through a view",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); a=(q@k.mT*s.D**-.5); b=a.view(-1); b[::7]=.5; w=a.softmax(-1); log(w); return s.j(w@v)
go("scores edited through flat alias",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); a=(q@k.mT*s.D**-.5); a.numpy()[:,:,:,1]=.25; w=a.softmax(-1); log(w); return s.j(w@v)
go("scores edited through numpy (no version bump)",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); a=(q@k.mT*s.D**-.5); w=a.softmax(-1); w.numpy()[:,:,:,1]=0; log(w); return s.j(w@v)
go("weights edited through numpy",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); k2=k.clone(); k2.numpy()[:]*=2; w=(q@k2.mT*s.D**-.5).softmax(-1); log(w); return s.j(w@v)
go("keys scaled through numpy before product",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); m=torch.zeros(5,5); m.numpy()[~c5.numpy()]=-np.inf; w=F.scaled_dot_product_attention; log(sm(q,k,mask=c5)); z=w(q,k,v,attn_mask=m); m.zero_(); return s.j(z)
go("mask buffer zeroed after the call",f)
buf=torch.zeros(5,5)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); zs=0
    for i in range(3):
        buf.data.fill_(0); buf.data[:,i]=-5.; log(sm(q,k,bias=buf)); zs=zs+F.scaled_dot_product_attention(q,k,v,attn_mask=buf)
    return s.j(zs)
go("one mask buffer refilled via .data for 3 calls",f)
buf2=torch.zeros(5,5)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); zs=0
    for i in range(3):
        buf2.numpy()[:]=0; buf2.numpy()[:,i]=-5.; log(sm(q,k,bias=buf2)); zs=zs+F.scaled_dot_product_attention(q,k,v,attn_mask=buf2)
    return s.j(zs)
go("one mask buffer refilled via numpy for 3 calls",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); zs=0
    for i in range(3):
        buf2.numpy()[:]=0; buf2.numpy()[:,i]=-5.; a=q@k.mT*s.D**-.5+buf2; w=a.softmax(-1); log(w); zs=zs+w@v
    return s.j(zs)
go("one mask buffer refilled via numpy, softmax",f)
def f(s,x):
    z=0; kb=torch.empty(3,2,5,4)
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x))
    for i in range(3):
        kb.copy_(k*(i+1)); w=(q@kb.mT*s.D**-.5).softmax(-1); log(w); z=z+w@v
    return s.j(z)
go("key buffer reused for three calls",f)
def f(s,x):
    z=0; kb=np.empty((3,2,5,4),np.float32); kt=torch.from_numpy(kb)
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x))
    for i in range(3):
        kb[:]=(k*(i+1)).numpy(); log(sm(q,kt)); z=z+F.scaled_dot_product_attention(q,kt,v)
    return s.j(z)
go("numpy key buffer reused for three sdpa calls",f)
def f(s,x):
    z=0; kb=np.empty((3,2,5,4),np.float32); kt=torch.from_numpy(kb)
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); 
    kb[:]=k.numpy(); a=q@kt.mT*s.D**-.5; kb[:]=0; w=a.softmax(-1); log(w); return s.j(w@v)
go("numpy key buffer zeroed between product and softmax",f)
# lookalikes: nothing is attention
go("MoE soft router (einsum over experts)",lambda s,x:(lambda g:torch.einsum("bte,betc->btc",g,torch.stack([e(x) for e in s.ex],1)))(s.g(x).softmax(-1)),want=[])
def f(s,x):
    g=s.g(x).softmax(-1); t,i=g.topk(2,-1); o=torch.zeros_like(x)
    for e in range(3): o=o+((t*(i==e)).sum(-1,keepdim=True))*s.ex[e](x)
    return o
go("MoE top-2",f,want=[])
def f(s,x):
    g=s.g(x); d=g.softmax(1).transpose(1,2)@x; c=g.softmax(-1); return c@d  # soft MoE
go("soft MoE dispatch/combine",f,want=[])
go("mixture of softmaxes x embedding (class embedding)",lambda s,x:(s.g(x).softmax(-1))@s.mem[:3],want=[])
go("contrastive logits CLIP loss",lambda s,x:F.cross_entropy(F.normalize(x[:,0],dim=-1)@F.normalize(x[:,1],dim=-1).T*10,torch.arange(3)),want=[])
go("lm head softmax then expected embedding",lambda s,x:(x@s.mem.T).softmax(-1)@s.mem)
go("codebook VQ soft",lambda s,x:(-(torch.cdist(x,s.mem))).softmax(-1)@s.mem)
def f(s,x):
    w=(x@s.mem.T).softmax(-1); log(w[:,None]); return w@s.mem2
go("memory network learnt k,v",f)
def f(s,x):
    w=(x@s.mem.T/8**.5).softmax(1); log(w.mT[:,None]); return w.mT@x
go("pooling by learnt seeds, scores (B,T,S) softmax over T",f)
def f(s,x):
    q=s.seed.expand(3,-1,-1); w=(q@s.k(x).mT/8**.5).softmax(-1); log(w[:,None]); return w@s.v(x)
go("PMA seeds",f)
def f(s,x):
    w=s.w(torch.tanh(s.q(x))).softmax(1); log(w.transpose(1,2)[:,None]); return (w*x).sum(1)
go("attention pooling additive mul-sum",f)
def f(s,x):
    w=s.w(torch.tanh(s.q(x))).squeeze(-1).softmax(-1); log(w[:,None,None]); return torch.bmm(w.unsqueeze(1),x).squeeze(1)
go("attention pooling additive bmm",f)
def f(s,x):
    w=(x[:,-1:]@s.k(x).mT).softmax(-1); log(w[:,None]); return (w@x).squeeze(1)
go("last-token query Luong",f)
def f(s,x):
    w=torch.einsum("bc,btc->bt",x[:,-1],s.k(x)).softmax(-1); log(w[:,None,None]); return torch.einsum("bt,btc->bc",w,x)
go("Luong einsum bc,btc->bt",f)
def f(s,x):
    h=torch.zeros(3,8); o=[]
    for t in range(5):
        w=torch.bmm(x,s.q(h).unsqueeze(2)).squeeze(2).softmax(1); log(w[:,None,None]); c=torch.bmm(w.unsqueeze(1),x).squeeze(1); h=torch.tanh(s.o(c)+h+x[:,t]); o.append(h)
    return torch.stack(o,1)
go("RNN decoder with Luong per step",f,want=None,groups=None)
def f(s,x):
    return torch.log_softmax(s.q(x)@s.k(x).mT,-1)
go("pointer network output only",f,want=[])
def f(s,x):
    p=(s.q(x)@s.k(x).mT*8**-.5).softmax(-1); log(p[:,None]); return s.o(p@x)
go("pointer mix",f)
def f(s,x): # NTM
    M_=s.mem[None].expand(3,-1,-1).clone(); r=0
    for t in range(3):
        w=(F.cosine_similarity(s.k(x[:,t])[:,None],M_,dim=-1)*4).softmax(-1); log(w[:,None,None]); r=r+torch.einsum("bn,bnc->bc",w,M_); M_=M_+w[...,None]*s.v(x[:,t])[:,None]
    return r
go("NTM content addressing",f)
def f(s,x): # linear attention
    q,k=s.q(x).softmax(-1),s.k(x).softmax(1); return q@(k.mT@s.v(x))
go("efficient attention (softmax q, softmax k)",f,want=[])
def f(s,x): q,k=F.elu(s.q(x))+1,F.elu(s.k(x))+1; return (q@(k.mT@s.v(x)))/(q@k.sum(1,keepdim=True).mT)
go("linear attention elu",f,want=[])
def f(s,x): # xcit channel attention
    q,k,v=(F.normalize(s.h(l(x)),dim=2) for l in (s.q,s.k,s.v)); w=(q.mT@k).softmax(-1); log(w); return s.j((w@v.mT).mT)
go("XCiT channel attention",f)
def f(s,x): # nystrom
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); ql,kl=q[:,:,::2],k[:,:,::2]; a=(q@kl.mT).softmax(-1); b=(ql@kl.mT).softmax(-1); c=(ql@k.mT).softmax(-1); return s.j(a@torch.linalg.pinv(b)@(c@v))
go("nystromformer",f,want=[])
def f(s,x): # ISAB, chained
    i=s.seed.expand(3,-1,-1); w1=(i@s.k(x).mT).softmax(-1); log(w1[:,None]); h=w1@s.v(x); w2=(s.q(x)@h.mT).softmax(-1); log(w2[:,None]); return w2@h
go("ISAB two attentions in one module",f)
def f(s,x): # co-attention: one score, both softmaxes
    y=s.o(x)[:,:4]; a=s.q(x)@s.k(y).mT; w1=a.softmax(-1); w2=a.softmax(-2).mT; log(w1[:,None]); log(w2[:,None]); return torch.cat([w1@y,w2@x],1)
go("co-attention both ways (BiDAF)",f)
def f(s,x):
    a=s.q(x)@s.k(x).mT; w=a.softmax(-1); log(w[:,None]); log(w[:,None]); return w@s.v(x)+w@s.o(x)
go("same weights used twice with two values",f)
def f(s,x):
    q,k=s.q(x),s.k(x); w=(q@k.mT).softmax(-1); log(w[:,None]); return s.o(w@(w@s.v(x)))
go("weights applied twice (W W v)",f)
def f(s,x):
    w=(s.q(x)@s.k(x).mT).softmax(-1); w2=w@w; log(w2[:,None]); return s.o(w2@s.v(x))
go("weights squared as a matrix",f)
def f(s,x):
    w=(s.q(x)@s.k(x).mT).softmax(-1); w2=(w+w.mT)/2; log(w2[:,None]); return s.o(w2@s.v(x))
go("weights symmetrised",f)
def f(s,x):
    w=(s.q(x)@s.k(x).mT).softmax(-1); w2=.9*w+.1/5; log(w2[:,None]); return s.o(w2@s.v(x))
go("weights mixed with uniform",f)
def f(s,x):
    w=(s.q(x)@s.k(x).mT).softmax(-1); log(w.mT[:,None]); return s.o(w.mT@s.v(x))
go("weights transposed before values",f)
def f(s,x):
    w=(s.q(x)@s.k(x).mT).softmax(-1); log(w[:,None]); return s.o(w[:,[4,3,2,1,0]]@s.v(x))
go("rows permuted by index before values",f)
def f(s,x):
    w=(s.q(x)@s.k(x).mT).softmax(-1); w=w[:,:,[4,3,2,1,0]]; log(w[:,None]); return s.o(w@s.v(x))
go("keys permuted by index before values",f)
def f(s,x):
    w=(s.q(x)@s.k(x).mT).softmax(-1); w=w.flip(-1); log(w[:,None]); return s.o(w@s.v(x))
go("weights flipped before values",f)
def f(s,x):
    w=(s.q(x)@s.k(x).mT).softmax(-1); w=w.roll(1,0); log(w[:,None]); return s.o(w@s.v(x))
go("weights rolled over batch",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); w=(q@k.mT*s.D**-.5).softmax(-1); w=w.flip(1); log(w); return s.j(w@v)
go("heads flipped between softmax and values",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); a=(q@k.mT*s.D**-.5); w=a.flip(1).softmax(-1); log(w); return s.j(w@v)
go("heads flipped before softmax",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); a=(q@k.mT*s.D**-.5); w=a[:,:,:,[1,0,2,4,3]].softmax(-1); log(w); return s.j(w@v)
go("keys permuted before softmax",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); a=(q@k.mT*s.D**-.5); w=a.roll(1,-1).softmax(-1); log(w); return s.j(w@v)
go("keys rolled before softmax",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); a=(q@k.mT*s.D**-.5); w=a.mT.softmax(-1); log(w); return s.j(w@v)
go("scores transposed before softmax (square)",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); a=(q@k.mT*s.D**-.5).tril(); w=a.softmax(-1); log(w); return s.j(w@v)
go("tril without -inf (classic bug)",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); a=(q@k.mT*s.D**-.5)+torch.triu(torch.full((5,5),-torch.inf),1); w=a.softmax(-1); log(w); return s.j(w@v)
go("triu -inf added",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); w=(q@k.mT*s.D**-.5).softmax(-1).round(decimals=2); log(w); return s.j(w@v)
go("weights rounded",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); w=(q@k.mT*s.D**-.5).softmax(-1).to_sparse().to_dense(); log(w); return s.j(w@v)
go("weights through sparse",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); w=torch.tensor((q@k.mT*s.D**-.5).softmax(-1).tolist()); log(w); return s.j(w@v)
go("weights through python list",f)
def f(s,x):
    q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); a=torch.from_numpy((q@k.mT*s.D**-.5).numpy()*2); w=a.softmax(-1); log(w); return s.j(w@v)
go("scores through numpy",f)
class Fn(torch.autograd.Function):
    @staticmethod
    def forward(ctx,q,k,v): w=(q@k.mT*.5).softmax(-1); ctx.save_for_backward(q,k,v,w); log(w); return w@v
    @staticmethod
    def backward(ctx,g): q,k,v,w=ctx.saved_tensors; return g,g,w.mT@g
go("custom autograd Function",lambda s,x:s.j(Fn.apply(s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)))),grads=True)
class Sm(torch.autograd.Function):
    @staticmethod
    def forward(ctx,a): w=a.softmax(-1); ctx.save_for_backward(w); return w
    @staticmethod
    def backward(ctx,g): return g
def f(s,x): w=Sm.apply(s.h(s.q(x))@s.h(s.k(x)).mT); log(w); return s.j(w@s.h(s.v(x)))
go("custom softmax Function",f,grads=True)
# flex
from torch.nn.attention.flex_attention import flex_attention, create_block_mask
def fl(name,want,H=2,**kw):
    def f(s,x): q,k,v=s.h(s.q(x)),s.h(s.k(x)),s.h(s.v(x)); w=want(q,k,s); log(w); return s.j(flex_attention(q,k,v,**kw(s) if callable(kw) else kw))
    go("flex "+name,f)
S=lambda q,k:q.double()@k.double().mT*.5
ix=torch.arange(5)
fl("plain",lambda q,k,s:S(q,k).softmax(-1))
fl("scale",lambda q,k,s:(S(q,k)*2*.3).softmax(-1),scale=.3)
fl("causal score_mod",lambda q,k,s:S(q,k).masked_fill(~c5,-torch.inf).softmax(-1),score_mod=lambda a,b,h,i,j:torch.where(i>=j,a,-torch.inf))
fl("alibi score_mod",lambda q,k,s:(S(q,k)+(torch.arange(2)+1)[:,None,None]*(ix-ix[:,None])).softmax(-1),score_mod=lambda a,b,h,i,j:a+(h+1)*(j-i))
fl("softcap",lambda q,k,s:(2*torch.tanh(S(q,k)/2)).softmax(-1),score_mod=lambda a,b,h,i,j:2*torch.tanh(a/2))
fl("batch dependent bias",lambda q,k,s:(S(q,k)+torch.arange(3)[:,None,None,None]*(ix==1)).softmax(-1),score_mod=lambda a,b,h,i,j:a+b*(j==1))
fl("multiplicative",lambda q,k,s:(S(q,k)*(ix+1)).softmax(-1),score_mod=lambda a,b,h,i,j:a*(j+1))
fl("square",lambda q,k,s:(S(q,k)**2).softmax(-1),score_mod=lambda a,b,h,i,j:a*a)
bm=create_block_mask(lambda b,h,i,j:i>=j,None,None,5,5,device="cpu")
fl("block mask causal",lambda q,k,s:S(q,k).masked_fill(~c5,-torch.inf).softmax(-1),block_mask=bm)
bm2=create_block_mask(lambda b,h,i,j:(i-j+b)%2==0,3,None,5,5,device="cpu")
fl("block mask per batch",lambda q,k,s:S(q,k).masked_fill(~((ix[:,None]-ix+torch.arange(3)[:,None,None,None])%2==0),-torch.inf).softmax(-1),block_mask=bm2)
bm3=create_block_mask(lambda b,h,i,j:j>i,None,None,5,5,device="cpu")
fl("block mask with empty row",lambda q,k,s:S(q,k).masked_fill(~(ix[None]>ix[:,None]),-torch.inf).softmax(-1).nan_to_num(0),block_mask=bm3)
fl("block mask + score mod",lambda q,k,s:(S(q,k)+(ix-ix[:,None])).masked_fill(~c5,-torch.inf).softmax(-1),block_mask=bm,score_mod=lambda a,b,h,i,j:a+(j-i))
fl("return_lse",lambda q,k,s:S(q,k).softmax(-1)) 
print("N",lib.N)
