# interventions on nn.MultiheadAttention with options, encoders, decoders
from lib import *
import lib, itertools
from regard.ablate import *
class W(nn.Module):
    def __init__(s,bf,nw,**o): super().__init__(); s.a=nn.MultiheadAttention(12,3,batch_first=bf,**o); s.bf,s.nw=bf,nw; s.ed=None; s.ea=None
    def forward(s,x,y=None,mask=None,kpm=None):
        y=x if y is None else y; m=s.a
        if s.ed is None and s.ea is None:
            if not s.bf: x,y=x.transpose(0,1),y.transpose(0,1)
            o=m(x,y,y,attn_mask=mask,key_padding_mask=kpm,need_weights=s.nw)[0]; return o if s.bf else o.transpose(0,1)
        B=len(x); q,k,v=F.linear(x,m.in_proj_weight[:12],m.in_proj_bias[:12]),F.linear(y,m.in_proj_weight[12:24],m.in_proj_bias[12:24]),F.linear(y,m.in_proj_weight[24:],m.in_proj_bias[24:])
        if m.bias_k is not None: k,v=torch.cat([k,m.bias_k.expand(B,1,12)],1),torch.cat([v,m.bias_v.expand(B,1,12)],1)
        if m.add_zero_attn: k,v=F.pad(k,(0,0,0,1)),F.pad(v,(0,0,0,1))
        h=lambda t:t.view(B,-1,3,4).transpose(1,2); q,k,v=h(q),h(k),h(v); a=q@k.mT/2; S=y.shape[1]
        if mask is not None: a[...,:S]=a[...,:S].masked_fill(mask,-torch.inf)
        if kpm is not None: a[...,:S]=a[...,:S].masked_fill(kpm[:,None,None],-torch.inf)
        if s.ea: a=s.ea(a)
        z=torch.nan_to_num(a.softmax(-1))@v
        if s.ed: z=s.ed(z.clone())
        return m.out_proj(z.transpose(1,2).reshape(B,-1,12))
c=torch.ones(5,5).triu(1).bool()
for bf,nw,grad,opt,mode in itertools.product([True,False],[True,False],[False,True],[{},dict(add_bias_kv=True),dict(add_zero_attn=True)],["self","causal","kpm","cross"]):
    if (hash((bf,nw,grad,str(opt),mode))%1)!=0: continue
    torch.manual_seed(0); m=W(bf,nw,**opt).eval(); x=torch.randn(2,5,12); y=torch.randn(2,6,12) if mode=="cross" else None
    kw=dict(y=y,mask=c if mode=="causal" else None,kpm=torch.tensor([[0]*5,[0,0,0,1,1]]).bool() if mode=="kpm" else None)
    tag=f"MHA bf{bf} nw{nw} grad{grad} {opt} {mode}"
    def hand(ed=None,ea=None):
        m.ed,m.ea=ed or (lambda z:z),ea
        try:
            with torch.no_grad(): return m(x,**kw)
        finally: m.ed=m.ea=None
    bad=[]
    def one(name,cm,want):
        try:
            with torch.set_grad_enabled(grad), cm(): g=m(x,**kw)
            d=(g-want).abs(); d=d[~torch.isnan(d)].max().item()
            if d>3e-5: bad.append(f"DEFECT {name} off {d:.3g} effect {(want-hand()).abs().max():.3g}")
        except Exception as e: bad.append(f"reported {name} {short(e,90)}")
    cut=lambda h:(lambda z:z*(torch.arange(3)!=h)[None,:,None,None])
    one("base",lambda:__import__("contextlib").nullcontext(),hand())
    one("knock 1",lambda:knock_out(m,[("a",1)]),hand(cut(1)))
    one("knock num 2",lambda:knock_out(m,[(0,2)]),hand(cut(2)))
    one("hide 1",lambda:knock_out(m,keys=[1]),hand(ea=lambda a:(a.__setitem__((Ellipsis,1),-torch.inf),a)[1]))
    one("hide 0 h2",lambda:knock_out(m,[(0,2)],keys=[0]),hand(ea=lambda a:(a.__setitem__((slice(None),2,slice(None),0),-torch.inf),a)[1]))
    one("hide -1",lambda:knock_out(m,keys=[-1]),hand(ea=lambda a:(a.__setitem__((Ellipsis,a.shape[-1]-1-(1 if opt else 0)),-torch.inf),a)[1]))
    one("patch",lambda:patch_heads(m,lambda z:z*3,[(0,1)]),hand(lambda z:torch.cat([z[:,:1],z[:,1:2]*3,z[:,2:]],1)))
    say(tag,"ok" if not bad else "; ".join(bad))
print("N",lib.N)
