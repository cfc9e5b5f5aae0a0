# interventions x axis orders; every result compared with cutting the true head
from lib import *
from regard.ablate import *
import itertools
class E_(nn.Module):
    def __init__(s,sp,H,C=12,kind="einsum"):
        super().__init__(); s.sp,s.H,s.kind=sp,H,kind; s.q=nn.Linear(C,C);s.k=nn.Linear(C,C);s.v=nn.Linear(C,C);s.o=nn.Linear(C,C); s.cut=None; s.fn=None; s.hide=None
    def forward(s,x):
        B,T,C=x.shape; H=s.H; D=C//H; sp=s.sp
        q,k,v=(l(x).view(B,T,H,D) for l in (s.q,s.k,s.v))
        hand=s.cut is not None or s.fn is not None or s.hide is not None
        if hand:
            a=torch.einsum("bqhd,bkhd->bhqk",q,k)*D**-.5
            if s.hide is not None: a=a.clone(); a[:,s.hide[0],:,s.hide[1]]=-torch.inf
            z=(a.softmax(-1)@v.transpose(1,2)); z=z.clone()
            if s.cut is not None: z[:,s.cut]=0
            if s.fn is not None: z[:,s.fn[0]]=s.fn[1](z[:,s.fn[0]])
            return s.o(z.transpose(1,2).reshape(B,T,C))
        if s.kind=="einsum":
            w=(torch.einsum(f"bqhd,bkhd->{sp}",q,k)*D**-.5).softmax(sp.index("k"))
            z=torch.einsum(f"{sp},bkhd->bqhd",w,v)
        elif s.kind=="sdpa":   # sp: order of b,h (and extra axes)
            if sp=="hb": z=F.scaled_dot_product_attention(*(t.permute(2,0,1,3) for t in (q,k,v))).permute(1,2,0,3)
            if sp=="bh": z=F.scaled_dot_product_attention(*(t.permute(0,2,1,3) for t in (q,k,v))).permute(0,2,1,3)
            if sp=="b1h": z=F.scaled_dot_product_attention(*(t.permute(0,2,1,3)[:,None] for t in (q,k,v)))[:,0].permute(0,2,1,3)
            if sp=="bh1": z=F.scaled_dot_product_attention(*(t.permute(0,2,1,3)[:,:,None] for t in (q,k,v)))[:,:,0].permute(0,2,1,3)
            if sp=="1bh": z=F.scaled_dot_product_attention(*(t.permute(0,2,1,3)[None] for t in (q,k,v)))[0].permute(0,2,1,3)
            if sp=="1(bh)": z=F.scaled_dot_product_attention(*(t.permute(0,2,1,3).reshape(1,B*H,T,D) for t in (q,k,v))).view(B,H,T,D).permute(0,2,1,3)
            if sp=="(bh)1": z=F.scaled_dot_product_attention(*(t.permute(0,2,1,3).reshape(B*H,1,T,D) for t in (q,k,v))).view(B,H,T,D).permute(0,2,1,3)
            if sp=="(hb)1": z=F.scaled_dot_product_attention(*(t.permute(2,0,1,3).reshape(B*H,1,T,D) for t in (q,k,v))).view(H,B,T,D).permute(1,2,0,3)
            if sp=="1(hb)": z=F.scaled_dot_product_attention(*(t.permute(2,0,1,3).reshape(1,B*H,T,D) for t in (q,k,v))).view(H,B,T,D).permute(1,2,0,3)
            if sp=="hloop4": z=torch.stack([F.scaled_dot_product_attention(*(t[:,:,h][:,None] for t in (q,k,v)))[:,0] for h in range(H)],2)
            if sp=="bloop3": z=torch.stack([F.scaled_dot_product_attention(*(t[b].transpose(0,1) for t in (q,k,v))).transpose(0,1) for b in range(B)])
            if sp=="bloop4": z=torch.cat([F.scaled_dot_product_attention(*(t[b:b+1].transpose(1,2) for t in (q,k,v))).transpose(1,2) for b in range(B)])
            if sp=="T+": z=F.scaled_dot_product_attention(*(t.reshape(B,T,H,D).transpose(1,2) for t in (q,k,v))).transpose(1,2)
        elif s.kind=="matmul":
            P={"bh":(0,2,1,3),"hb":(2,0,1,3)}[sp]
            q,k,v=(t.permute(*P) for t in (q,k,v)); w=(q@k.mT*D**-.5).softmax(-1); z=w@v
            z=z.permute(0,2,1,3) if sp=="bh" else z.permute(1,2,0,3)
        return s.o(z.reshape(B,T,C))
def test(tag,m,x,H):
    def hand(**k):
        for a,b in k.items(): setattr(m,a,b)
        with torch.no_grad(): y=m(x)
        for a in k: setattr(m,a,None)
        return y
    def cmp_(name,cm,want,grad=False):
        try:
            with torch.set_grad_enabled(grad), cm(): got=m(x)
            base=m(x).detach()
            d=(got-want).abs().max().item(); say(f"{tag} {name}","ok" if d<2e-5 else f"DEFECT silently off by {d:.3g}; sequences changed {[(got[b]-base[b]).abs().max().item()>1e-6 for b in range(len(x))]}")
        except Exception as e: say(f"{tag} {name}",f"reported: {type(e).__name__} {short(e,110)}")
    with torch.no_grad(), regard.watch(m,keep="qkv") as seen: y0=m(x)
    rec=[r.shape for r in seen.records]
    for h in {0,H-1}:
        cmp_(f"knock_out h{h} (watch {rec[:1]}x{len(rec)})",lambda:knock_out(m,[(0,h)]),hand(cut=h))
    cmp_("knock_out h0 grad",lambda:knock_out(m,[(0,0)]),hand(cut=0),True)
    cmp_("hide key 1 of h0",lambda:knock_out(m,[(0,0)],keys=[1]),hand(hide=(0,1)))
    cmp_("hide key 1 of all",lambda:knock_out(m,keys=[1]),hand(hide=(slice(None),1)))
    cmp_("patch fn h1",lambda:patch_heads(m,lambda z:z*3,[(0,1)]),hand(fn=(1,lambda z:z*3)))
    cmp_("patch own recording h0",lambda:patch_heads(m,seen,[(0,0)]),y0)
    xx=torch.randn_like(x)
    try:
        with torch.no_grad(), regard.watch(m,keep="qkv") as src: m(xx)
        B,T,C=x.shape
        qq,kk,vv=(l(xx).view(B,T,H,C//H).transpose(1,2) for l in (m.q,m.k,m.v)); zz=((qq@kk.mT*(C//H)**-.5).softmax(-1)@vv).detach()
        cmp_("patch other recording h1",lambda:patch_heads(m,src,[(0,1)]),hand(fn=(1,lambda z:zz[:,1])))
        cmp_("patch mean h1",lambda:patch_heads(m,average_outputs(src),[(0,1)]),hand(fn=(1,lambda z:zz[:,1].mean((0,1)).expand_as(z))))
    except Exception as e: say(f"{tag} patch rec","reported "+short(e))
    try:
        with trace_heads(m) as tr: y=m(x)
        bad=[]
        for h in range(H):
            want=(y0-hand(cut=h)); w=tr.writes(0,h)
            if w.shape!=want.shape or (w-want).abs().max()>2e-5: bad.append(h)
        say(f"{tag} trace writes","ok" if not bad else f"DEFECT heads {bad} outputs {tuple(tr.outputs(0).shape)}")
    except Exception as e: say(f"{tag} trace",f"reported: {type(e).__name__} {short(e,110)}")
if __name__=="__main__":
  perms=["".join(p) for p in itertools.permutations("bhqk")]
  for sp in perms:
    torch.manual_seed(0); H=3; m=E_(sp,H); test(f"einsum {sp}",m,torch.randn(3,4,12),H)
  for sp in ["bh","hb","b1h","bh1","1bh","1(bh)","(bh)1","(hb)1","1(hb)","hloop4","bloop3","bloop4"]:
    for B in (1,3):
        torch.manual_seed(0); m=E_(sp,3,kind="sdpa"); test(f"sdpa {sp} B{B}",m,torch.randn(B,4,12),3)
  for sp in ("bh","hb"):
    for B in (1,3):
        torch.manual_seed(0); m=E_(sp,3,kind="matmul"); test(f"matmul {sp} B{B}",m,torch.randn(B,4,12),3)
  print("N",__import__("lib").N)
