from lib import *
import lib
from regard.ablate import *
class P(nn.Module):
    def __init__(s,f,C=12,H=3): super().__init__(); s.f,s.H,s.D=f,H,C//H; s.q=nn.Linear(C,C);s.k=nn.Linear(C,C);s.v=nn.Linear(C,C);s.o=nn.Linear(C,C); s.lam=nn.Parameter(torch.tensor(.4)); s.talk=nn.Parameter(torch.randn(H,H)); s.ed=None
    def forward(s,x): 
        B,T,C=x.shape; h=lambda t:t.view(B,T,s.H,s.D).transpose(1,2)
        return s.o(s.f(s,h(s.q(x)),h(s.k(x)),h(s.v(x)),(lambda z:s.ed(z)) if s.ed else (lambda z:z)).transpose(1,2).reshape(B,T,C))
S=lambda s,q,k:q@k.mT*s.D**-.5
sd=F.scaled_dot_product_attention
c=torch.ones(4,4).tril().bool()
fs={
 "plain":lambda s,q,k,v,e:e(S(s,q,k).softmax(-1)@v),
 "differential":lambda s,q,k,v,e:e(((q[...,:2]@k[...,:2].mT).softmax(-1)-s.lam*(q[...,2:]@k[...,2:].mT).softmax(-1))@v),
 "differential two sdpa":lambda s,q,k,v,e:e(sd(q[...,:2],k[...,:2],v)-s.lam*sd(q[...,2:],k[...,2:],v)),
 "talking post":lambda s,q,k,v,e:e(torch.einsum("bhij,hg->bgij",S(s,q,k).softmax(-1),s.talk)@v),
 "talking pre":lambda s,q,k,v,e:e(torch.einsum("bhij,hg->bgij",S(s,q,k),s.talk).softmax(-1)@v),
 "renorm":lambda s,q,k,v,e:e((lambda w:w/w.sum(-1,keepdim=True))(S(s,q,k).softmax(-1)*c)@v),
 "mask after":lambda s,q,k,v,e:e((S(s,q,k).softmax(-1)*c)@v),
 "nan_to_num":lambda s,q,k,v,e:e(S(s,q,k).masked_fill(~c,-torch.inf).softmax(-1).nan_to_num(0)@v),
 "memory second sdpa":lambda s,q,k,v,e:e(sd(q,k,v)+sd(q,k[:,:,:0],v[:,:,:0])),
 "empty memory first sdpa":lambda s,q,k,v,e:e(sd(q,k[:,:,:0],v[:,:,:0])+sd(q,k,v)),
 "z normalised after":lambda s,q,k,v,e:F.layer_norm(e(sd(q,k,v)),(4,)),
 "heads summed w/ residual q":lambda s,q,k,v,e:e(sd(q,k,v))+q,
 "head mixing after z":lambda s,q,k,v,e:torch.einsum("bhid,hg->bgid",e(sd(q,k,v)),s.talk),
 "z reversed heads":lambda s,q,k,v,e:e(sd(q,k,v)).flip(1),
 "heads reversed before (flip q,k,v)":lambda s,q,k,v,e:e(sd(q.flip(1),k.flip(1),v.flip(1)).flip(1)),
 "heads permuted by index":lambda s,q,k,v,e:e(sd(q[:,[2,0,1]],k[:,[2,0,1]],v[:,[2,0,1]])[:,[1,2,0]]),
 "heads flipped own softmax":lambda s,q,k,v,e:e((S(s,q.flip(1),k.flip(1)).softmax(-1)@v.flip(1)).flip(1)),
 "tokens flipped":lambda s,q,k,v,e:e(sd(q.flip(2),k.flip(2),v.flip(2)).flip(2)),
 "batch flipped":lambda s,q,k,v,e:e(sd(q.flip(0),k.flip(0),v.flip(0)).flip(0)),
 "v cat 1 (normaliser)":lambda s,q,k,v,e:e((S(s,q,k).softmax(-1)@torch.cat([v,torch.ones_like(v[...,:1])],-1))[...,:4]),
 "w@ (v) via einsum diff layout":lambda s,q,k,v,e:e(torch.einsum("bhij,bhjd->bhid",S(s,q,k).softmax(-1),v)),
 "w@v via bmm flatten":lambda s,q,k,v,e:e(torch.bmm(S(s,q,k).softmax(-1).flatten(0,1),v.flatten(0,1)).view_as(v)),
 "scores via bmm, softmax 4D":lambda s,q,k,v,e:e(torch.bmm(q.flatten(0,1),k.flatten(0,1).mT).view(*q.shape[:2],4,4).softmax(-1)@v),
 "softmax 3D folded, @v 4D":lambda s,q,k,v,e:e(S(s,q,k).flatten(0,1).softmax(-1).view(*q.shape[:2],4,4)@v),
 "w used for two values":lambda s,q,k,v,e:(lambda w:e(w@v+w@v.tanh()))(S(s,q,k).softmax(-1)),
 "w applied twice":lambda s,q,k,v,e:(lambda w:e(w@(w@v)))(S(s,q,k).softmax(-1)),
 "(q softmaxed over batch,head swap) hb w/ own softmax":lambda s,q,k,v,e:e(((q.transpose(0,1)@k.transpose(0,1).mT*s.D**-.5).softmax(-1)@v.transpose(0,1)).transpose(0,1)),
 "log_softmax exp":lambda s,q,k,v,e:e(F.log_softmax(S(s,q,k),-1).exp()@v),
 "gumbel":None,
 "softmax float32 dtype":lambda s,q,k,v,e:e(S(s,q,k).softmax(-1,dtype=torch.float32)@v),
 "functional softmax":lambda s,q,k,v,e:e(torch.special.softmax(S(s,q,k),-1)@v),
 "nn.Softmax":lambda s,q,k,v,e:e(nn.Softmax(dim=-1)(S(s,q,k))@v),
 "aten._softmax":lambda s,q,k,v,e:e(torch._softmax(S(s,q,k),-1,False)@v),
 "softmax out=":lambda s,q,k,v,e:e(torch.softmax(S(s,q,k),-1,out=torch.empty(q.shape[0],3,4,4))@v),
 "loop heads stack 4D":lambda s,q,k,v,e:e(torch.cat([S(s,q[:,h:h+1],k[:,h:h+1]).softmax(-1)@v[:,h:h+1] for h in range(3)],1)),
 "v expanded across heads shared":lambda s,q,k,v,e:e(S(s,q,k).softmax(-1)@v[:,:1].expand_as(v)),
 "q heads shared":lambda s,q,k,v,e:e(S(s,q[:,:1],k).softmax(-1)@v),
 "weights shared by heads":lambda s,q,k,v,e:e(S(s,q[:,:1],k[:,:1]).softmax(-1)@v),
 "weights shared by heads sdpa":lambda s,q,k,v,e:e(sd(q[:,:1].expand_as(q),k[:,:1].expand_as(k),v)),
}
for n,f in fs.items():
    if f is None: continue
    for B in (1,2):
        torch.manual_seed(0); m=P(f); x=torch.randn(B,4,12); tag=f"{n} B{B}"
        def hand(fn):
            m.ed=fn
            try:
                with torch.no_grad(): return m(x)
            finally: m.ed=None
        base=hand(lambda z:z)
        with torch.no_grad(), regard.watch(m,keep="qkv") as seen: m(x)
        L=seen.layers
        def one(name,cm,want):
            try:
                with torch.no_grad(), cm(): g=m(x)
                d=(g-want).abs().max().item(); eff=(g-base).abs().max().item()
                say(f"{tag} {name}","ok" if d<3e-5 else f"DEFECT off {d:.3g}, edit changed {eff:.3g}; watch layers {L} {[r.shape for r in seen.records][:2]}")
            except Exception as e: say(f"{tag} {name}",f"reported: {type(e).__name__} {short(e,120)}")
        ones=torch.ones(3)
        cutf=lambda h:(lambda z:z*(torch.arange(3)!=h)[None,:,None,None])
        one("knock h1",lambda:knock_out(m,[(0,1)]),hand(cutf(1)))
        one("knock h2 by ''",lambda:knock_out(m,[("",2)]),hand(cutf(2)))
        one("knock layers=['']",lambda:knock_out(m,layers=[""]),hand(lambda z:z*0))
        one("patch fn h1",lambda:patch_heads(m,lambda z:z*2,[("",1)]),hand(lambda z:torch.cat([z[:,:1],z[:,1:2]*2,z[:,2:]],1)))
        one("patch own rec h1",lambda:patch_heads(m,seen,[(0,1)]),base)
        try:
            with trace_heads(m) as tr: m(x)
            z0=[]; hand(lambda z:(z0.append(z.clone()),z)[1]); o=tr.outputs(0)
            say(f"{tag} trace outputs","ok" if o.shape==z0[0].shape and (o-z0[0]).abs().max()<3e-5 else f"DEFECT outputs {tuple(o.shape)} {(o-z0[0]).abs().max().item() if o.shape==z0[0].shape else ''}")
            w=tr.writes(0,1); y0=hand(lambda z:z); y1=hand(cutf(1)); say(f"{tag} trace writes", "ok" if (w-(y0-y1)).abs().max()<3e-5 else f"DEFECT writes off {(w-(y0-y1)).abs().max():.3g}")
        except Exception as e: say(f"{tag} trace",f"reported: {type(e).__name__} {short(e,120)}")
print("N",lib.N)
