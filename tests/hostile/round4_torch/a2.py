# masks, biases, positions, normalisations
from lib import *
import math
class P(nn.Module):
    def __init__(s, f, C=8, H=2):
        super().__init__(); s.H=H; s.D=C//H; s.f=f
        s.q=nn.Linear(C,C); s.k=nn.Linear(C,C); s.v=nn.Linear(C,C); s.o=nn.Linear(C,C)
        s.rel=nn.Parameter(torch.randn(H,16,16)); s.emb=nn.Parameter(torch.randn(31,C//H)); s.u=nn.Parameter(torch.randn(H,C//H)); s.w=nn.Parameter(torch.randn(H,C//H))
        s.temp=nn.Parameter(torch.tensor([3.]*H)*torch.arange(1,H+1)); s.sink=nn.Parameter(torch.randn(H)); s.talk1=nn.Parameter(torch.randn(H,H)); s.talk2=nn.Parameter(torch.randn(H,H))
        s.gate=nn.Linear(C,C)
    def forward(s,x,y=None,**k):
        y = x if y is None else y
        B,T,_=x.shape
        s.x=x
        q=s.q(x).view(B,T,s.H,s.D).transpose(1,2); k_=s.k(y).view(B,-1,s.H,s.D).transpose(1,2); v=s.v(y).view(B,-1,s.H,s.D).transpose(1,2)
        o=s.f(s,q,k_,v,**k)
        return s.o(o.transpose(1,2).reshape(B,T,-1))
def go(name, f, B=3, T=5, C=8, H=2, Tk=None, dt=None, tol=2e-5, **kw):
    torch.manual_seed(1)
    m=P(f,C,H); x=torch.randn(B,T,C); y=None if Tk is None else torch.randn(B,Tk,C)
    if dt: m.to(dt); x=x.to(dt); y=None if y is None else y.to(dt)
    return check(name, m, lambda: m(x) if y is None else m(x,y), tol=tol, **kw)
def simple(fs, after=None):
    def f(s,q,k,v):
        a=fs(s,q,k,v); w=a.softmax(-1); log(w)
        return w@v
    return f
S=lambda s,q,k: q@k.mT*s.D**-.5
cm=lambda T,S=None: torch.ones(T,S or T).tril((S or T)-T).bool()
go("masked_fill -inf", simple(lambda s,q,k,v: S(s,q,k).masked_fill(~cm(5),-torch.inf)))
go("masked_fill_ in place finfo.min", simple(lambda s,q,k,v: S(s,q,k).masked_fill_(~cm(5),torch.finfo(torch.float32).min)))
go("masked_fill -1e4", simple(lambda s,q,k,v: S(s,q,k).masked_fill(~cm(5),-1e4)))
go("masked_fill -1e9", simple(lambda s,q,k,v: S(s,q,k).masked_fill(~cm(5),-1e9)))
go("masked_fill -10 soft", simple(lambda s,q,k,v: S(s,q,k).masked_fill(~cm(5),-10.)))
go("masked_fill 0.", simple(lambda s,q,k,v: S(s,q,k).masked_fill(~cm(5),0.)))
go("masked_fill +3.", simple(lambda s,q,k,v: S(s,q,k).masked_fill(~cm(5),3.)))
go("where", simple(lambda s,q,k,v: torch.where(cm(5),S(s,q,k),torch.tensor(-1e4))))
go("where scalar -inf arg order", simple(lambda s,q,k,v: torch.where(~cm(5),-torch.inf,S(s,q,k))))
go("GPT2 w*b - 1e4*(1-b)", simple(lambda s,q,k,v: (lambda b: S(s,q,k)*b-1e4*(1-b))(cm(5).float())))
go("mul by mask only (0 logits)", simple(lambda s,q,k,v: S(s,q,k)*cm(5).float()))
go("mask -1e4 whole first row (no key)", simple(lambda s,q,k,v: S(s,q,k)+torch.where(cm(5).tril(-1),0.,-1e4)))
go("mask -1e9 first row", simple(lambda s,q,k,v: S(s,q,k).masked_fill(~cm(5).tril(-1),-1e9)))
go("mask finfo.min first row added", simple(lambda s,q,k,v: S(s,q,k)+torch.where(cm(5).tril(-1),0.,torch.finfo(torch.float32).min)))
go("mask -inf first row NaN", simple(lambda s,q,k,v: S(s,q,k).masked_fill(~cm(5).tril(-1),-torch.inf)))
def nanfix(s,q,k,v):
    w=S(s,q,k).masked_fill(~cm(5).tril(-1),-torch.inf).softmax(-1).nan_to_num(0.); log(w); return w@v
go("nan_to_num after softmax", nanfix)
def nanfix2(s,q,k,v):
    m=~cm(5).tril(-1); w=S(s,q,k).masked_fill(m,-torch.inf).softmax(-1).masked_fill(m,0.); log(w); return w@v
go("masked_fill 0 after -inf", nanfix2)
go("two masks added -1e9 twice", simple(lambda s,q,k,v: S(s,q,k)+(~cm(5))*-1e9+(torch.arange(5)==3)*-1e9))
go("random additive bias per head", simple(lambda s,q,k,v: S(s,q,k)+s.rel[:,:5,:5]))
go("alibi", simple(lambda s,q,k,v: (S(s,q,k)-torch.tensor([.5,.25])[:,None,None]*(torch.arange(5)[:,None]-torch.arange(5)).abs()).masked_fill(~cm(5),-torch.inf)))
go("alibi bloom: only keys, baddbmm", simple(lambda s,q,k,v: torch.baddbmm((torch.tensor([.5,.25])[None,:,None,None]*torch.arange(5)).expand(3,2,1,5).reshape(6,1,5),q.reshape(6,5,4),k.reshape(6,5,4).mT,alpha=.5).view(3,2,5,5)))
go("bias per sequence and head", simple(lambda s,q,k,v: S(s,q,k)+torch.arange(6.).view(3,2,1,1)*torch.randn(3,2,5,5)))
go("bias computed from x (edge bias)", simple(lambda s,q,k,v: S(s,q,k)+torch.einsum("btc,bsc->bts",s.x,s.x)[:,None]))
go("bias learnt product first then scores", simple(lambda s,q,k,v: torch.einsum("bhid,bhjd->bhij",q,q)*.1+S(s,q,k)))
go("shaw relative keys", simple(lambda s,q,k,v: (q@k.mT+torch.einsum("bhid,ijd->bhij",q,s.emb[(torch.arange(5)[None]-torch.arange(5)[:,None])+15]))*s.D**-.5))
def shawv(s,q,k,v):
    r=s.emb[(torch.arange(5)[None]-torch.arange(5)[:,None])+15]
    w=((q@k.mT+torch.einsum("bhid,ijd->bhij",q,r))*s.D**-.5).softmax(-1); log(w)
    return w@v+torch.einsum("bhij,ijd->bhid",w,r)
go("shaw relative keys and values", shawv)
def shawv2(s,q,k,v):
    r=s.emb[(torch.arange(5)[None]-torch.arange(5)[:,None])+15]
    w=(q@k.mT*s.D**-.5).softmax(-1); log(w)
    o2=torch.matmul(w.permute(2,0,1,3).reshape(5,6,5),r).view(5,3,2,4).permute(1,2,0,3)
    return w@v+o2
go("relative values only via permuted matmul", shawv2)
def txl(s,q,k,v):
    B,H,T,D=q.shape
    r=s.emb[torch.arange(T-1,-1,-1)]
    ac=(q+s.u[:,None])@k.mT
    bd=torch.einsum("bhid,jd->bhij",q+s.w[:,None],r)
    z=torch.zeros(B,H,T,1); bd=torch.cat([z,bd],-1).view(B,H,T+1,T)[:,:,1:].reshape(B,H,T,T)
    w=((ac+bd)*D**-.5).masked_fill(~cm(T),-torch.inf).softmax(-1); log(w); return w@v
go("transformer-xl shift", txl)
def deb(s,q,k,v):
    B,H,T,D=q.shape; idx=(torch.arange(T)[:,None]-torch.arange(T))+15
    c2p=torch.gather(q@s.emb.T,-1,idx.expand(B,H,T,T)); p2c=torch.gather(k@s.emb.T,-1,idx.expand(B,H,T,T)).mT
    w=((q@k.mT+c2p+p2c)/(3*D)**.5).softmax(-1); log(w); return w@v
go("deberta disentangled", deb)
def rope(t):
    T,D=t.shape[-2:]; f=torch.arange(T)[:,None]*(10000**(-torch.arange(0,D,2)/D)); c,s_=f.cos().repeat(1,2),f.sin().repeat(1,2)
    return t*c+torch.cat([-t[...,D//2:],t[...,:D//2]],-1)*s_
go("rope half", simple(lambda s,q,k,v: S(s,rope(q),rope(k))))
def ropec(t):
    T,D=t.shape[-2:]; f=torch.polar(torch.ones(T,D//2),torch.arange(T)[:,None]*(100**(-torch.arange(0,D,2)/D)))
    return torch.view_as_real(torch.view_as_complex(t.contiguous().view(*t.shape[:-1],-1,2))*f).flatten(-2)
go("rope complex", simple(lambda s,q,k,v: S(s,ropec(q),ropec(k))))
def xpos(s,q,k,v): 
    z=1.1**torch.arange(5)[:,None]; w=S(s,q*z,k/z).masked_fill(~cm(5),-torch.inf).softmax(-1); log(w); return w@v
go("xpos", xpos)
go("softcap", simple(lambda s,q,k,v: 2*torch.tanh(S(s,q,k)/2)))
go("softcap then mask", simple(lambda s,q,k,v: (5*torch.tanh(S(s,q,k)/5)).masked_fill(~cm(5),-torch.inf)))
go("mask -1e9 then softcap (bug)", simple(lambda s,q,k,v: 5*torch.tanh(S(s,q,k).masked_fill(~cm(5),-1e9)/5)))
go("tanh without rescale", simple(lambda s,q,k,v: torch.tanh(S(s,q,k))*3))
go("tanh C*tanh(u) pointer style", simple(lambda s,q,k,v: 10.*torch.tanh(S(s,q,k))))
go("relu on logits", simple(lambda s,q,k,v: torch.relu(S(s,q,k))))
go("leaky relu on logits", simple(lambda s,q,k,v: F.leaky_relu(S(s,q,k))))
go("clamp logits", simple(lambda s,q,k,v: S(s,q,k).clamp(-.2,.2)))
go("clamp max inplace 50000", simple(lambda s,q,k,v: S(s,q,k).clamp_(min=-50000,max=50000)))
go("abs logits", simple(lambda s,q,k,v: S(s,q,k).abs()))
go("negative sq distance", simple(lambda s,q,k,v: -((q[...,:,None,:]-k[...,None,:,:])**2).sum(-1)))
go("negative cdist", simple(lambda s,q,k,v: -torch.cdist(q,k)))
go("L2 via q2+k2-2qk", simple(lambda s,q,k,v: -(q.pow(2).sum(-1,keepdim=True)+k.pow(2).sum(-1)[...,None,:]-2*q@k.mT)))
go("cosine temp per head", simple(lambda s,q,k,v: F.normalize(q,dim=-1)@F.normalize(k,dim=-1).mT*s.temp[:,None,None]))
go("cosine exp temp clamp (swinv2)", simple(lambda s,q,k,v: F.normalize(q,dim=-1)@F.normalize(k,dim=-1).mT*s.temp[:,None,None].clamp(max=4.6).exp()+16*torch.sigmoid(s.rel[:,:5,:5])))
go("cosine by dividing scores by norms", simple(lambda s,q,k,v: q@k.mT/(q.norm(dim=-1,keepdim=True)*k.norm(dim=-1)[...,None,:])*5))
go("scale per query (logn)", simple(lambda s,q,k,v: S(s,q,k)*torch.log(torch.arange(2,7.))[:,None]))
go("scale per key", simple(lambda s,q,k,v: S(s,q,k)*torch.arange(1,6.)))
go("scale per seq", simple(lambda s,q,k,v: S(s,q,k)*torch.arange(1,4.)[:,None,None,None]))
go("scale per cell (distance decay)", simple(lambda s,q,k,v: S(s,q,k)*torch.rand(5,5)))
go("negative scale", simple(lambda s,q,k,v: -S(s,q,k)))
go("scale zero", simple(lambda s,q,k,v: S(s,q,k)*0))
go("scale 1/T tensor", simple(lambda s,q,k,v: (q@k.mT)/torch.tensor(k.shape[-2])**.5))
go("divide by temperature param", simple(lambda s,q,k,v: (q@k.mT)/s.temp.view(1,2,1,1)))
go("logits minus max", simple(lambda s,q,k,v: (lambda a:a-a.amax(-1,keepdim=True))(S(s,q,k))))
go("logits minus max detach bloom/neox", simple(lambda s,q,k,v: (lambda a:a-a.max(-1,keepdim=True)[0].detach())(S(s,q,k).masked_fill(~cm(5),-1e9))))
go("logits minus global max", simple(lambda s,q,k,v: (lambda a:a-a.max())(S(s,q,k))))
go("logits minus mean", simple(lambda s,q,k,v: (lambda a:a-a.mean(-1,keepdim=True))(S(s,q,k))))
go("logits layernormed", simple(lambda s,q,k,v: F.layer_norm(S(s,q,k),(5,))))
go("logits std normalised", simple(lambda s,q,k,v: (lambda a:a/a.std(-1,keepdim=True))(S(s,q,k))))
go("talking heads pre (einsum)", simple(lambda s,q,k,v: torch.einsum("bhij,hg->bgij",S(s,q,k),s.talk1)))
def talkpost(s,q,k,v):
    w=S(s,q,k).softmax(-1); w=torch.einsum("bhij,hg->bgij",w,s.talk2); log(w); return w@v
go("talking heads post", talkpost)
def reatt(s,q,k,v):
    w=S(s,q,k).softmax(-1); log(w); w2=F.dropout(w,.5,training=True); return w2@v
go("dropout on weights training", reatt)
def renorm(s,q,k,v):
    w=S(s,q,k).softmax(-1)*cm(5); w=w/w.sum(-1,keepdim=True); log(w); return w@v
go("mask after softmax and renormalise", renorm)
def maskafter(s,q,k,v):
    w=S(s,q,k).softmax(-1)*cm(5); log(w); return w@v
go("mask after softmax, no renorm", maskafter)
def byhand(s,q,k,v):
    a=S(s,q,k); e=torch.exp(a-a.amax(-1,keepdim=True)); w=e/e.sum(-1,keepdim=True); log(w); return w@v
go("exp/sum by hand", byhand)
def byhand2(s,q,k,v):
    e=S(s,q,k).exp()*cm(5); log(e/e.sum(-1,keepdim=True)); return (e@v)/e.sum(-1,keepdim=True)
go("exp then divide output", byhand2)
def lsm(s,q,k,v):
    w=F.log_softmax(S(s,q,k),-1).exp(); log(w); return w@v
go("log_softmax exp", lsm)
def lse(s,q,k,v):
    a=S(s,q,k); w=(a-a.logsumexp(-1,keepdim=True)).exp(); log(w); return w@v
go("exp(a - lse)", lse)
def sm1(s,q,k,v):
    a=S(s,q,k); e=a.exp(); w=e/(1+e.sum(-1,keepdim=True)); log(w); return w@v
go("softmax1 by hand", sm1)
def sinkcat(s,q,k,v):
    a=torch.cat([S(s,q,k),s.sink.view(1,2,1,1).expand(3,2,5,1)],-1); w=a.softmax(-1)[...,:-1]; log(w); return w@v
go("sink logit cat last (gpt-oss)", sinkcat)
def sinkcat0(s,q,k,v):
    a=torch.cat([s.sink.view(1,2,1,1).expand(3,2,5,1),S(s,q,k)],-1); w=a.softmax(-1)[...,1:]; log(w); return w@v
go("sink logit cat first", sinkcat0)
def sinkz(s,q,k,v):
    a=F.pad(S(s,q,k),(1,0)); w=a.softmax(-1)[...,1:]; log(w); return w@v
go("softmax1 via pad 0", sinkz)
def sinkkey(s,q,k,v):
    k=torch.cat([s.u[None,:,None].expand(3,2,1,4),k],2); v=torch.cat([torch.zeros(3,2,1,4),v],2); w=S(s,q,k).softmax(-1); log(w); return w@v
go("null key/value cat", sinkkey)
def sig(s,q,k,v):
    w=torch.sigmoid(S(s,q,k)-1.6); log(w); return w@v
go("sigmoid attention", sig)
def relu2(s,q,k,v):
    w=torch.relu(S(s,q,k))**2/5; log(w); return w@v
go("relu^2 attention", relu2)
def topk(s,q,k,v):
    a=S(s,q,k); t=a.topk(2,-1)[0][...,-1:]; w=a.masked_fill(a<t,-torch.inf).softmax(-1); log(w); return w@v
go("top-k masked", topk)
def topk2(s,q,k,v):
    a=S(s,q,k); t,i=a.topk(2,-1); z=torch.full_like(a,-torch.inf).scatter(-1,i,t); w=z.softmax(-1); log(w); return w@v
go("top-k scatter", topk2)
def topk3(s,q,k,v):
    a=S(s,q,k); t,i=a.topk(2,-1); p=t.softmax(-1); vv=torch.gather(v[:,:,None].expand(-1,-1,5,-1,-1),3,i[...,None].expand(-1,-1,-1,-1,4)); log(torch.zeros_like(a).scatter(-1,i,p)); return (p[...,None,:]@vv).squeeze(-2)
go("top-k gathered values", topk3)
def topk4(s,q,k,v):
    i=k.norm(dim=-1).topk(3,-1)[1]; g=lambda t:t.gather(2,i[...,None].expand(-1,-1,-1,4)); w=S(s,q,g(k)).softmax(-1); log(w); return w@g(v)
go("keys selected by gather", topk4)
def sparsemax(s,q,k,v):
    z=S(s,q,k); zs=z.sort(-1,descending=True)[0]; c=zs.cumsum(-1)-1; r=torch.arange(1,6.); kk=(r*zs>c).sum(-1,keepdim=True); tau=c.gather(-1,kk-1)/kk; w=(z-tau).clamp(min=0); log(w); return w@v
go("sparsemax", sparsemax)
def gumbel(s,q,k,v):
    w=F.gumbel_softmax(S(s,q,k),dim=-1); log(w); return w@v
go("gumbel softmax", gumbel)
def gumbelh(s,q,k,v):
    w=F.gumbel_softmax(S(s,q,k),dim=-1,hard=True); log(w); return w@v
go("gumbel softmax hard", gumbelh)
def diff(s,q,k,v):
    w1=(q[...,:2]@k[...,:2].mT).softmax(-1); w2=(q[...,2:]@k[...,2:].mT).softmax(-1); w=w1-.3*w2; log(w); return w@v
go("differential attention", diff)
def gatedo(s,q,k,v):
    w=S(s,q,k).softmax(-1); log(w); return (w@v)*torch.sigmoid(s.gate(s.x)).view(3,5,2,4).transpose(1,2)
go("gated output", gatedo)
def forget(s,q,k,v):
    f=F.logsigmoid(s.gate(s.x)[...,:2]).transpose(1,2).cumsum(-1); w=(S(s,q,k)+f[...,:,None]-f[...,None,:]).masked_fill(~cm(5),-torch.inf).softmax(-1); log(w); return w@v
go("forgetting transformer", forget)
def doublesm(s,q,k,v):
    w=S(s,q,k).softmax(-1).softmax(-1); log(w); return w@v
go("softmax twice", doublesm)
def smboth(s,q,k,v):
    a=S(s,q,k); w=a.softmax(-1)*a.softmax(-2); log(w); return w@v
go("dual softmax (LoFTR)", smboth)
def weird(s,q,k,v):
    w=S(s,q,k).softmax(-2); log(w); return w@v
go("softmax on wrong axis (queries)", weird)
def slot(s,q,k,v):
    w=S(s,q,k).softmax(-2); w=w/w.sum(-1,keepdim=True); log(w); return w@v
go("slot attention", slot)
def hmean(s,q,k,v):
    w=S(s,q,k).softmax(-1).mean(1,keepdim=True); log(w); return w@v
go("mean of heads before values", hmean)
def pw(s,q,k,v):
    w=S(s,q,k).softmax(-1)**2; w=w/w.sum(-1,keepdim=True); log(w); return w@v
go("sharpened after softmax", pw)
def fp16sm(s,q,k,v):
    w=S(s,q,k).softmax(-1,dtype=torch.float64).float(); log(w); return w@v
go("softmax dtype=float64", fp16sm)
for dt,t in ((torch.float64,1e-9),(torch.bfloat16,1.6e-2),(torch.float16,2e-3)):
    go(f"simple {dt}", simple(lambda s,q,k,v: S(s,q,k).masked_fill(~cm(5),torch.finfo(q.dtype).min)), dt=dt, tol=t)
    def up(s,q,k,v):
        w=S(s,q.float(),k.float()).softmax(-1).to(v.dtype); log(w); return w@v
    go(f"upcast scores {dt}", up, dt=dt, tol=t)
go("huge logits", simple(lambda s,q,k,v: S(s,q,k)*1e4))
go("huge logits 1e20", simple(lambda s,q,k,v: S(s,q,k)*1e20))
go("q*1e-30 tiny", simple(lambda s,q,k,v: S(s,q*1e-30,k*1e-15)))
go("inf in bias +inf", simple(lambda s,q,k,v: S(s,q,k)+torch.where(torch.eye(5)>0,torch.inf,0.)))
def nanq(s,q,k,v):
    q=q.clone(); q[1,0,2]=torch.nan; w=S(s,q,k).softmax(-1); log(w); return w@v
go("NaN in one q", nanq)
def infk(s,q,k,v):
    k=k.clone(); k[1,0,2,0]=torch.inf; w=S(s,q,k).softmax(-1); log(w); return w@v
go("inf in one k", infk)
go("constant scores (uniform)", simple(lambda s,q,k,v: torch.zeros(3,2,5,5)))
go("synthesizer random", simple(lambda s,q,k,v: s.rel[:,:5,:5].expand(3,2,5,5)))
go("synthesizer dense MLP", simple(lambda s,q,k,v: q@s.rel[:,:4,:5]))
go("fnet-like weights param softmax no batch", simple(lambda s,q,k,v: s.rel[:,:5,:5]))
go("bilinear q W k", simple(lambda s,q,k,v: q@s.rel[:,:4,:4]@k.mT))
go("bilinear q (W k)", simple(lambda s,q,k,v: q@(s.rel[:,:4,:4]@k.mT)))
go("low-rank linformer", lambda s,q,k,v: (lambda k,v:(lambda w:(log(w),w@v)[1])(S(s,q,k).softmax(-1)))(torch.einsum("bhsd,hst->bhtd",k,s.rel[:,:5,:3]),torch.einsum("bhsd,hst->bhtd",v,s.rel[:,:5,:3])))
go("additive bahdanau", simple(lambda s,q,k,v: torch.tanh(q[...,:,None,:]+k[...,None,:,:])@s.u[0]))
go("additive bahdanau per head einsum", simple(lambda s,q,k,v: torch.einsum("bhijd,hd->bhij",torch.tanh(q[...,:,None,:]+k[...,None,:,:]),s.u)))
go("GAT a_l + a_r leaky", simple(lambda s,q,k,v: F.leaky_relu((q*s.u[:,None]).sum(-1)[...,:,None]+(k*s.w[:,None]).sum(-1)[...,None,:],.2).masked_fill(~cm(5),-9e15)))
go("gaussian kernel prior times", simple(lambda s,q,k,v: S(s,q,k)+torch.log(torch.exp(-(torch.arange(5.)[:,None]-torch.arange(5.))**2/2))))
def local(s,q,k,v):
    kk=F.pad(k,(0,0,1,1)).unfold(2,3,1); vv=F.pad(v,(0,0,1,1)).unfold(2,3,1)
    w=(torch.einsum("bhtd,bhtdw->bhtw",q,kk)*s.D**-.5).softmax(-1)
    W=torch.zeros(3,2,5,7)
    for t in range(5): W[:,:,t,t:t+3]=w[:,:,t]
    log(W[...,1:6]); return torch.einsum("bhtw,bhtdw->bhtd",w,vv)
go("local window unfold", local)
def blocks(s,q,k,v):
    b=lambda t:t.reshape(3,2,3,2,4)
    w=(b(q)@b(k).mT*s.D**-.5).softmax(-1); log(torch.stack([torch.stack([torch.block_diag(*w[i,h]) for h in range(2)]) for i in range(3)])); return (b(w@b(v)) if False else (w@b(v))).reshape(3,2,6,4)
go("block local T=6", blocks, T=6)
def online(s,q,k,v):
    B,H,T,D=q.shape; m=torch.full((B,H,T,1),-torch.inf); l=torch.zeros(B,H,T,1); o=torch.zeros_like(q)
    for j in range(0,T,2):
        a=S(s,q,k[:,:,j:j+2]); mn=torch.maximum(m,a.amax(-1,keepdim=True)); p=(a-mn).exp(); c=(m-mn).exp(); l=l*c+p.sum(-1,keepdim=True); o=o*c+p@v[:,:,j:j+2]; m=mn
    log(S(s,q,k).softmax(-1)); return o/l
go("online softmax", online)
def qchunk(s,q,k,v):
    o=[]
    for i in range(0,6,2):
        w=S(s,q[:,:,i:i+2],k).softmax(-1); log(w); o.append(w@v)
    return torch.cat(o,2)
go("query chunks", qchunk, T=6)
def kchunk_lse(s,q,k,v):
    os,ls=[],[]
    for i in range(0,6,3):
        a=S(s,q,k[:,:,i:i+3]); w=a.softmax(-1); log(w); os.append(w@v[:,:,i:i+3]); ls.append(a.logsumexp(-1))
    w=torch.stack(ls).softmax(0); return (torch.stack(os)*w[...,None]).sum(0)
go("key chunks merged by lse", kchunk_lse, T=6)
print("N",__import__("lib").N)
