# interventions: 5D GQA, windows, cross, enc-dec, caches, padding, parts
from lib import *
import lib
from regard.ablate import *
from a5 import test
class G(nn.Module):
    """true heads: H; kind gives the layout"""
    def __init__(s,kind,H=6,Hk=3,C=24):
        super().__init__(); s.kind,s.H,s.Hk,s.D=kind,H,Hk,C//H; s.q=nn.Linear(C,C);s.k=nn.Linear(C,Hk*s.D);s.v=nn.Linear(C,Hk*s.D);s.o=nn.Linear(C,C); s.cut=s.fn=s.hide=None
    def forward(s,x):
        B,T,C=x.shape; H,Hk,D=s.H,s.Hk,s.D; g=H//Hk
        q,k,v=s.q(x).view(B,T,H,D).transpose(1,2),s.k(x).view(B,T,Hk,D).transpose(1,2),s.v(x).view(B,T,Hk,D).transpose(1,2)
        if s.cut is not None or s.fn is not None or s.hide is not None:
            k,v=k.repeat_interleave(g,1),v.repeat_interleave(g,1); a=q@k.mT*D**-.5
            if s.hide is not None: a=a.clone(); a[:,s.hide[0],:,s.hide[1]]=-torch.inf
            z=(a.softmax(-1)@v).clone()
            if s.cut is not None: z[:,s.cut]=0
            if s.fn is not None: z[:,s.fn[0]]=s.fn[1](z[:,s.fn[0]])
            return s.o(z.transpose(1,2).reshape(B,T,C))
        q5,k5,v5=q.view(B,Hk,g,T,D),k[:,:,None],v[:,:,None]
        kd=s.kind
        if kd=="sdpa5 broadcast": z=F.scaled_dot_product_attention(q5,k5,v5).flatten(1,2)
        elif kd=="sdpa5 expanded": z=F.scaled_dot_product_attention(q5,k5.expand_as(q5),v5.expand_as(q5)).flatten(1,2)
        elif kd=="sdpa gqa": z=F.scaled_dot_product_attention(q,k,v,enable_gqa=True)
        elif kd=="sdpa interleave": z=F.scaled_dot_product_attention(q,k.repeat_interleave(g,1),v.repeat_interleave(g,1))
        elif kd=="matmul5": z=((q5@k5.mT*D**-.5).softmax(-1)@v5).flatten(1,2)
        elif kd=="einsum5": z=torch.einsum("bhgts,bhsd->bhgtd",(torch.einsum("bhgtd,bhsd->bhgts",q5,k)*D**-.5).softmax(-1),v).flatten(1,2)
        elif kd=="rows": z=(((q5.reshape(B,Hk,g*T,D))@k.mT*D**-.5).softmax(-1)@v).view(B,Hk,g,T,D).flatten(1,2)
        elif kd=="sdpa rows": z=F.scaled_dot_product_attention(q5.reshape(B,Hk,g*T,D),k,v).view(B,Hk,g,T,D).flatten(1,2)
        elif kd=="sdpa foldkv": z=F.scaled_dot_product_attention(q5.flatten(0,1),k5.flatten(0,1).expand(-1,g,-1,-1),v5.flatten(0,1).expand(-1,g,-1,-1)).view(B,H,T,D)
        elif kd=="sdpa groups first": z=F.scaled_dot_product_attention(q5.transpose(1,2),k5.transpose(1,2),v5.transpose(1,2)).transpose(1,2).flatten(1,2)
        elif kd=="matmul groups first": z=((q5.transpose(1,2)@k5.transpose(1,2).mT*D**-.5).softmax(-1)@v5.transpose(1,2)).transpose(1,2).flatten(1,2)
        elif kd=="loop groups": z=torch.cat([F.scaled_dot_product_attention(q5[:,i],k5[:,i].expand(-1,g,-1,-1),v5[:,i].expand(-1,g,-1,-1)) for i in range(Hk)],1)
        elif kd=="two halves": z=torch.cat([F.scaled_dot_product_attention(q[:,:3],k.repeat_interleave(g,1)[:,:3],v.repeat_interleave(g,1)[:,:3]),F.scaled_dot_product_attention(q[:,3:],k.repeat_interleave(g,1)[:,3:],v.repeat_interleave(g,1)[:,3:])],1)
        return s.o(z.transpose(1,2).reshape(B,T,C))
import a5
def t2(tag,m,x,H):
    # recording first
    with torch.no_grad():
        q=m.q(x).view(*x.shape[:2],m.H,m.D).transpose(1,2); k=m.k(x).view(*x.shape[:2],m.Hk,m.D).transpose(1,2).repeat_interleave(m.H//m.Hk,1)
        check(tag+" record",m,lambda:m(x),want=[sm(q,k).numpy()])
    # interventions (h with fn on 1)
    def hand(**kk):
        for a,b in kk.items(): setattr(m,a,b)
        with torch.no_grad(): y=m(x)
        for a in kk: setattr(m,a,None)
        return y
    def cmp_(name,cm,want):
        try:
            with torch.no_grad(), cm(): got=m(x)
            d=(got-want).abs().max().item(); say(f"{tag} {name}","ok" if d<2e-5 else f"DEFECT silently off by {d:.3g}")
        except Exception as e: say(f"{tag} {name}",f"reported: {type(e).__name__} {short(e,110)}")
    for h in (0,1,H-1): cmp_(f"knock_out h{h}",lambda:knock_out(m,[(0,h)]),hand(cut=h))
    cmp_("hide key 1 of h1",lambda:knock_out(m,[(0,1)],keys=[1]),hand(hide=(1,1)))
    cmp_("patch fn h1",lambda:patch_heads(m,lambda z:z*3,[(0,1)]),hand(fn=(1,lambda z:z*3)))
    xx=torch.randn_like(x)
    with torch.no_grad():
        with regard.watch(m,keep="qkv") as src: m(xx)
        q,k,v=(t.view(*x.shape[:2],-1,m.D).transpose(1,2) for t in (m.q(xx),m.k(xx),m.v(xx))); gg=m.H//m.Hk; k,v=k.repeat_interleave(gg,1),v.repeat_interleave(gg,1); zz=(q@k.mT*m.D**-.5).softmax(-1)@v
    cmp_("patch rec h1",lambda:patch_heads(m,src,[(0,1)]),hand(fn=(1,lambda z:zz[:,1])))
    cmp_("patch mean h1",lambda:patch_heads(m,average_outputs(src),[(0,1)]),hand(fn=(1,lambda z:zz[:,1].mean((0,1)).expand_as(z))))
    try:
        with trace_heads(m) as tr: y=m(x)
        y0=hand(hide=(0,slice(0,0))); bad=[]
        for h in range(H):
            want=(m(x)-hand(cut=h)); w=tr.writes(0,h)
            if w.shape!=want.shape or (w-want).abs().max()>2e-5: bad.append(h)
        say(f"{tag} trace writes","ok" if not bad else f"DEFECT heads {bad} outputs {tuple(tr.outputs(0).shape)}")
    except Exception as e: say(f"{tag} trace",f"reported: {type(e).__name__} {short(e,110)}")
for kd in ("sdpa5 broadcast","sdpa5 expanded","sdpa gqa","sdpa interleave","matmul5","einsum5","rows","sdpa rows","sdpa foldkv","sdpa groups first","matmul groups first","loop groups","two halves"):
    for B in (1,2):
        torch.manual_seed(0); m=G(kd); t2(f"GQA {kd} B{B}",m,torch.randn(B,5,24),6)
print("N",lib.N)
