# layouts: einsum/matmul/bmm/loops in every axis order
from lib import *
import itertools
class P(nn.Module):
    """projections + a function of (self, q, k, v, x) where q,k,v are (B,T,C)"""
    def __init__(s, f, C=8, H=2, Ck=None, out=True):
        super().__init__(); s.H=H; s.D=C//H; s.f=f
        s.q=nn.Linear(C,C); s.k=nn.Linear(C,C); s.v=nn.Linear(C,C); s.o=nn.Linear(C,C)
    def forward(s,x,y=None):
        y = x if y is None else y
        return s.f(s, s.q(x), s.k(y), s.v(y))
def go(name, f, B=3, T=5, C=8, H=2, Tk=None, **kw):
    torch.manual_seed(1)
    m=P(f,C,H); x=torch.randn(B,T,C); y=None if Tk is None else torch.randn(B,Tk,C)
    return check(name, m, lambda: m(x) if y is None else m(x,y), **kw)
# einsum in every order of axes
def make_einsum(qp, kp, vp, sp, op):
    def f(s,q,k,v):
        B,T,_=q.shape; S=k.shape[1]
        def lay(t, pat, n):  # from b t h d
            t=t.view(B,-1,s.H,s.D)
            return t.permute(*["bthd".index(c.replace("q","t").replace("k","t")) for c in pat])
        q_,k_,v_=lay(q,qp,T),lay(k,kp,S),lay(v,vp,S)
        a=torch.einsum(f"{qp},{kp}->{sp}", q_,k_)*s.D**-.5
        ax=sp.index("k")
        w=a.softmax(ax)
        log(w.permute(*[sp.index(c) for c in "bhqk"]))
        o=torch.einsum(f"{sp},{vp}->{op}", w, v_)
        o=o.permute(*[op.index(c) for c in "bqhd"]).reshape(B,T,-1)
        return s.o(o)
    return f
import random
random.seed(5)
perms=["".join(p) for p in itertools.permutations("bhqk")]
for sp in perms:
    qp="".join(random.sample("bqhd",4)); kp="".join(random.sample("bkhd",4)); vp="".join(random.sample("bkhd",4)); op="".join(random.sample("bqhd",4))
    go(f"einsum {qp},{kp}->{sp}; v {vp} ->{op}", make_einsum(qp,kp,vp,sp,op))
for sp in random.sample(perms,8):
    qp="".join(random.sample("bqhd",4)); kp="".join(random.sample("bkhd",4)); vp="".join(random.sample("bkhd",4)); op="".join(random.sample("bqhd",4))
    go(f"cube einsum {qp},{kp}->{sp}; v {vp} ->{op} (B=H=T=4,D=4)", make_einsum(qp,kp,vp,sp,op),B=4,T=4,C=16,H=4)
for sp in random.sample(perms,6):
    qp="".join(random.sample("bqhd",4)); kp="".join(random.sample("bkhd",4)); vp="".join(random.sample("bkhd",4)); op="".join(random.sample("bqhd",4))
    go(f"cross einsum {qp},{kp}->{sp} Tk=7", make_einsum(qp,kp,vp,sp,op),B=2,T=5,C=8,H=2,Tk=7)
for B,H,T,D in [(1,1,1,1),(1,2,1,1),(2,1,1,3),(2,2,2,2),(1,3,3,3),(3,3,1,3),(1,1,4,1),(2,8,4,1),(1,1,5,8),(5,1,5,1),(2,3,2,3)]:
    def f(s,q,k,v):
        B,T,_=q.shape
        q,k,v=(t.view(B,T,s.H,s.D).transpose(1,2) for t in (q,k,v))
        w=(q@k.mT*s.D**-.5).softmax(-1); log(w)
        return s.o((w@v).transpose(1,2).reshape(B,T,-1))
    go(f"std B{B} H{H} T{T} D{D}", f, B=B,T=T,C=H*D,H=H)
    def f2(s,q,k,v):  # heads folded into batch (fairseq) seq-first
        B,T,_=q.shape
        q,k,v=(t.transpose(0,1).reshape(T,B*s.H,s.D).transpose(0,1) for t in (q,k,v))
        w=torch.bmm(q*s.D**-.5,k.transpose(1,2)).softmax(-1); log(w.view(B,s.H,T,T))
        return s.o(torch.bmm(w,v).transpose(0,1).reshape(T,B,-1).transpose(0,1))
    go(f"fairseq B{B} H{H} T{T} D{D}", f2, B=B,T=T,C=H*D,H=H)
    def f3(s,q,k,v):  # heads first by cat(split) as in tf transformer (Kyubyong): cat over batch
        B,T,_=q.shape
        q,k,v=(torch.cat(t.split(s.D,-1),0) for t in (q,k,v))
        w=(torch.baddbmm(torch.zeros(B*s.H,T,T),q,k.transpose(1,2),alpha=s.D**-.5)).softmax(-1); log(w.view(s.H,B,T,T).transpose(0,1))
        return s.o(torch.cat((w@v).chunk(s.H,0),-1))
    go(f"kyubyong cat heads in batch B{B} H{H} T{T} D{D}", f3, B=B,T=T,C=H*D,H=H)
def loop_heads(s,q,k,v):
    B,T,_=q.shape; outs=[]; ws=[]
    for h in range(s.H):
        sl=slice(h*s.D,(h+1)*s.D)
        w=(q[...,sl]@k[...,sl].mT/s.D**.5).softmax(-1); log(w[:,None]); outs.append(w@v[...,sl])
    return s.o(torch.cat(outs,-1))
go("loop over heads", loop_heads)
go("loop over heads H4 B1", loop_heads,B=1,C=8,H=4)
def loop_batch(s,q,k,v):
    outs=[]
    for b in range(q.shape[0]):
        qq,kk,vv=(t[b].view(-1,s.H,s.D).transpose(0,1) for t in (q,k,v))
        w=(qq@kk.mT/s.D**.5).softmax(-1); log(w[None]); outs.append((w@vv).transpose(0,1).reshape(q.shape[1],-1))
    return s.o(torch.stack(outs))
go("loop over batch", loop_batch)
def loop_both(s,q,k,v):
    o=torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(s.H):
            sl=slice(h*s.D,(h+1)*s.D)
            w=F.softmax(q[b,:,sl]@k[b,:,sl].T/s.D**.5,dim=1); log(w[None,None]); o[b,:,sl]=w@v[b,:,sl]
    return s.o(o)
go("loop over batch and heads", loop_both)
def loop_query(s,q,k,v):
    o=torch.zeros_like(q)
    for t in range(q.shape[1]):
        qq=q[:,t].view(-1,s.H,1,s.D); kk,vv=(z[:,:t+1].view(q.shape[0],-1,s.H,s.D).transpose(1,2) for z in (k,v))
        w=(qq@kk.mT/s.D**.5).softmax(-1); log(w); o[:,t]=(w@vv).reshape(q.shape[0],-1)
    return s.o(o)
go("loop over causal queries", loop_query)
def mul_sum(s,q,k,v):
    B,T,_=q.shape
    q,k,v=(t.view(B,T,s.H,s.D) for t in (q,k,v))
    a=(q[:,:,None]*k[:,None]).sum(-1)/s.D**.5  # B,Tq,Tk,H
    w=a.softmax(2); log(w.permute(0,3,1,2))
    return s.o((w[...,None]*v[:,None]).sum(2).reshape(B,T,-1))
go("mul-sum instead of matmul", mul_sum)
def kT_stored(s,q,k,v):
    B,T,_=q.shape
    k=k.view(B,T,s.H,s.D).permute(0,2,3,1).contiguous(); q,v=(t.view(B,T,s.H,s.D).permute(0,2,1,3).contiguous() for t in (q,v))
    a=torch.matmul(q,k).div_(s.D**.5); w=F.softmax(a.float(),-1).type_as(q); log(w)
    return s.o(torch.matmul(w,v).permute(0,2,1,3).contiguous().view(B,T,-1))
go("GPT-1 key transposed", kT_stored)
def score_T(s,q,k,v):
    B,T,_=q.shape
    q,k,v=(t.view(B,T,s.H,s.D).permute(0,2,3,1) for t in (q,k,v)) # b h d t : conv style
    a=torch.einsum("bhdi,bhdj->bhij",k,q)/s.D**.5   # i keys, j queries
    w=a.softmax(-2); log(w.mT)
    o=torch.einsum("bhdi,bhij->bhdj",v,w)
    return s.o(o.reshape(B,-1,T).transpose(1,2))
go("conv: keys on rows, softmax dim -2", score_T)
def score_T2(s,q,k,v):
    B,T,_=q.shape
    q,k,v=(t.view(B,T,s.H,s.D).permute(0,2,3,1).reshape(B*s.H,s.D,T) for t in (q,k,v))
    w=torch.bmm(q.transpose(1,2),k).softmax(-1); log(w.view(B,s.H,T,T))
    return s.o(torch.bmm(v,w.permute(0,2,1)).view(B,-1,T).transpose(1,2))
go("SAGAN nonlocal bmm(v, w.T)", score_T2)
def unfl(s,q,k,v):
    q,k,v=(t.unflatten(-1,(s.H,s.D)).movedim(2,0) for t in (q,k,v)) # h b t d
    w=torch.softmax(q@k.mT*s.D**-.5,-1); log(w.transpose(0,1))
    return s.o(torch.cat(list((w@v).unbind(0)),-1))
go("unflatten movedim heads first", unfl)
def inter(s,q,k,v): # interleaved heads: channel = d*H+h
    B,T,_=q.shape
    q,k,v=(t.view(B,T,s.D,s.H).permute(0,3,1,2) for t in (q,k,v))
    w=torch.softmax(q@k.mT*s.D**-.5,-1); log(w)
    return s.o((w@v).permute(0,2,3,1).reshape(B,T,-1))
go("interleaved heads (d h)", inter)
def seqfold(s,q,k,v): # sequences folded into rows with block diagonal mask
    B,T,C=q.shape
    q,k,v=(t.reshape(B*T,s.H,s.D).transpose(0,1) for t in (q,k,v))
    blk=torch.block_diag(*[torch.ones(T,T)]*B).bool()
    w=(q@k.mT*s.D**-.5).masked_fill(~blk,-torch.inf).softmax(-1); log(w[None])
    return s.o((w@v).transpose(0,1).reshape(B,T,C))
go("sequences packed in rows, block-diagonal", seqfold)
def headfold_rows(s,q,k,v): # MQA with heads folded into query rows
    B,T,C=q.shape
    kk,vv=k[...,:s.D],v[...,:s.D]
    qq=q.view(B,T*s.H,s.D)
    w=(qq@kk.mT*s.D**-.5).softmax(-1); log(w.view(B,T,s.H,T).transpose(1,2))
    return s.o((w@vv).reshape(B,T,C))
go("MQA heads folded into rows (bigcode)", headfold_rows)
def headfold_rows2(s,q,k,v):
    B,T,C=q.shape
    kk,vv=k[...,:s.D],v[...,:s.D]
    qq=q.view(B,T,s.H,s.D).transpose(1,2).reshape(B,s.H*T,s.D)
    w=(qq@kk.mT*s.D**-.5).softmax(-1); log(w.view(B,s.H,T,T))
    return s.o((w@vv).view(B,s.H,T,s.D).transpose(1,2).reshape(B,T,C))
go("MQA heads-major folded into rows", headfold_rows2)
def gqa5(s,q,k,v):
    B,T,C=q.shape; G=s.H//2
    q=q.view(B,T,2,G,s.D); k=k[...,:2*s.D].view(B,T,2,s.D); v=v[...,:2*s.D].view(B,T,2,s.D)
    w=torch.einsum("btghd,bsgd->bghts",q,k).mul(s.D**-.5).softmax(-1); log(w.flatten(1,2))
    return s.o(torch.einsum("bghts,bsgd->btghd",w,v).reshape(B,T,C))
go("GQA einsum 5d", gqa5,C=16,H=4)
def gqa5b(s,q,k,v): # group index minor: head h uses kv h%2
    B,T,C=q.shape; G=s.H//2
    q=q.view(B,T,G,2,s.D); k=k[...,:2*s.D].view(B,T,2,s.D); v=v[...,:2*s.D].view(B,T,2,s.D)
    w=torch.einsum("bthgd,bsgd->bhgts",q,k).mul(s.D**-.5).softmax(-1); log(w.flatten(1,2))
    return s.o(torch.einsum("bhgts,bsgd->bthgd",w,v).reshape(B,T,C))
go("GQA minor groups", gqa5b,C=24,H=6)
go("GQA minor groups repeat()", lambda s,q,k,v: (lambda B,T,C: (lambda q,k,v:(lambda w:(log(w),s.o((w@v).transpose(1,2).reshape(B,T,C)))[1])((q@k.mT*s.D**-.5).softmax(-1)))(q.view(B,T,s.H,s.D).transpose(1,2), k[...,:2*s.D].view(B,T,2,s.D).transpose(1,2).repeat(1,s.H//2,1,1), v[...,:2*s.D].view(B,T,2,s.D).transpose(1,2).repeat(1,s.H//2,1,1)))(*q.shape),C=24,H=6)
def addbias(s,q,k,v):
    B,T,C=q.shape
    q,k,v=(t.view(B,T,s.H,s.D).transpose(1,2).reshape(B*s.H,T,s.D) for t in (q,k,v))
    al=torch.randn(B*s.H,1,T)
    w=al.baddbmm(q,k.mT,beta=.5,alpha=s.D**-.5).softmax(-1); log(w.view(B,s.H,T,T))
    return s.o(torch.baddbmm(torch.ones(1),w,v,beta=0.).view(B,s.H,T,s.D).transpose(1,2).reshape(B,T,C))
go("baddbmm bias beta .5, out baddbmm", addbias)
print("N",N if False else __import__("lib").N)
