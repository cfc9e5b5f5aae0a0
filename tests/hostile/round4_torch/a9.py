# analysis functions on layouts; caches & positions; cross; MHA options
from lib import *
import lib
from regard.ablate import *
import a4
from a4 import Model, hand, zero, hide
# 1. search_heads, attribute_heads, attribute_weights, weigh_values, effect on layouts
def analysis(st):
    torch.manual_seed(0); H,C,T=3,12,6; m=Model(st,C,H).eval(); x=torch.randint(0,11,(1,T)); y=torch.randint(0,11,(1,T)); D=C//H
    meas=lambda l: l[:,-1,3]
    store={}; hand(m,y,z=lambda i,z:(store.__setitem__(i,z.clone()),z)[1])
    base=meas(hand(m,x,z=lambda i,z:z))
    def one(i0,h,rows=slice(None)):
        def z(i,z):
            if i==i0: z=z.clone(); z[:,h,rows]=store[i][:,h,rows]
            return z
        return (meas(hand(m,x,z=z))-base).item()
    want=np.array([[one(i,h) for h in range(H)] for i in range(2)])
    def tryit(name,f):
        try: r=f(); say(f"{st} {name}",r)
        except Exception as e: say(f"{st} {name}",f"reported: {type(e).__name__} {short(e,130)}")
    try:
        with torch.no_grad(), regard.watch(m,keep="qkv") as src: m(y)
    except Exception as e: return say(st+" watch",short(e))
    def sh():
        f=search_heads(m,x,src,meas); v=np.asarray(f.values); v=v
        base0=base.item()
        return "ok" if v.shape==want.shape and (np.abs(v-want).max()<1e-4 or np.abs(v-want-base0).max()<1e-4) else f"DEFECT {v.round(3).tolist()} want {want.round(3).tolist()}"
    tryit("search_heads",sh)
    # gradient: attribution = sum (z_src - z)·dL/dz
    zs={}
    def grab(i,z):
        z=z.detach().clone().requires_grad_() if False else z
        z.retain_grad() if z.requires_grad else None; zs[i]=z; return z
    a4.ED=dict(z=grab)
    l=meas(m(x)).sum(); a4.ED=None; l.backward()
    wa=np.array([[((store[i]-zs[i])*zs[i].grad)[:,h].sum().item() for h in range(H)] for i in range(2)]); 
    m.zero_grad()
    def ah():
        e=attribute_heads(m,x,src,meas); v=np.asarray(e.values if hasattr(e,"values") else e.heads)
        return "ok" if v.shape==wa.shape and np.abs(v-wa).max()<1e-4 else f"DEFECT {v.round(3).tolist()} want {wa.round(3).tolist()}"
    tryit("attribute_heads",ah)
    # attention*gradient
    ws={}
    def ga(i,a): return a
    def aw():
        p=attribute_weights(m,x,meas); bad=[]
        for i in range(2):
            # recompute: dL/dw = dL/dz v^T
            at=m.blocks[i]["attn"]
            for h in range(H):
                c=np.asarray(p.cells(i,h).detach() if hasattr(p.cells(i,h),"detach") else p.cells(i,h)); w=WV[i][0][0,h]; g=(zs[i].grad[0,h]@WV[i][1][0,h].T); wc=(w*g).detach().numpy()
                if c.shape!=wc.shape or np.abs(c-wc).max()>1e-4: bad.append((i,h,c.shape))
        return "ok" if not bad else f"DEFECT {bad}"
    # w and v from a run
    WV={}
    xx=None
    def cap():
        def za(i,a): WVa[i]=a.softmax(-1); return a
        WVa={}; hand(m,x,a=za)
        for i in range(2): WV[i]=[torch.nan_to_num(WVa[i]),None]
    cap()
    vin={}
    hs=[m.blocks[i]["attn"].register_forward_pre_hook(lambda mod,inp,i=i: vin.__setitem__(i,inp[0].detach())) for i in range(2)]
    hand(m,x); [h_.remove() for h_ in hs]
    for i in range(2):
        at=m.blocks[i]["attn"]
        if st.startswith("mha"): v=F.linear(vin[i],at.m.in_proj_weight,at.m.in_proj_bias).view(1,T,3,H,D)[:,:,2].transpose(1,2)
        else:
            v=at.qkv(vin[i]).view(1,T,3,H,D)[:,:,2].transpose(1,2)
            if st=="gqa": v=v[:,:1].expand(-1,H,-1,-1)
        WV[i][1]=v.detach()
    tryit("attribute_weights",aw)
    def wvv():
        p=regard.value_weights.weigh_values(m,x) ; bad=[]
        for i in range(2):
            at=m.blocks[i]["attn"]; W=(at.m.out_proj if st.startswith("mha") else at.o).weight
            for h in range(H):
                n=(WV[i][1][0,h]@W[:,h*D:(h+1)*D].T).norm(dim=-1); wc=(WV[i][0][0,h]*n).detach().numpy(); c=p.cells(i,h); c=c.detach().numpy()
                if c.shape!=wc.shape or np.abs(c-wc).max()>1e-4: bad.append((i,h,c.shape))
        return "ok" if not bad else f"DEFECT {bad}"
    tryit("weigh_values",wvv)
    def dl():
        d=regard.direct_logits.attribute_logits(m,x,3); v=np.asarray(d.heads.detach() if hasattr(d.heads,"detach") else d.heads); bad=[]
        hW=m.h.weight[3]; wd=np.zeros((2,H))
        zz={}; hand(m,x,z=lambda i,z:(zz.__setitem__(i,z.clone()),z)[1])
        for i in range(2):
            at=m.blocks[i]["attn"]; W=(at.m.out_proj if st.startswith("mha") else at.o).weight
            for h in range(H): wd[i,h]=(zz[i][0,h,-1]@W[:,h*D:(h+1)*D].T@hW).item()
        return "ok" if v.shape==wd.shape and np.abs(v-wd).max()<1e-4 else f"DEFECT {v.round(3).tolist()} want {wd.round(3).tolist()}"
    tryit("direct_logits",dl)
    def circ():
        c=regard.circuits.read_circuit(m,1,1); at=m.blocks[1]["attn"]
        Wv=(at.m.in_proj_weight if st.startswith("mha") else at.qkv.weight)[2*C:][D:2*D]; Wo=(at.m.out_proj if st.startswith("mha") else at.o).weight[:,D:2*D]
        ov=(Wo@Wv)*m.blocks[1]["n"].weight; ov=ov-ov.mean(1,keepdim=True)
        e=torch.linalg.eigvals(ov.detach()); e=e[e.abs().argsort(descending=True)][:D]; g=torch.as_tensor(np.asarray(c.ov_eigenvalues)); g=g[g.abs().argsort(descending=True)][:D]
        return "ok" if (e.abs().float()-g.abs().float()).abs().max()<1e-3 else f"DEFECT? ov {g} want {e}"
    tryit("circuit",circ)
    def rp():
        p=record_path(m,x,src,[(0,1)]); 
        got=None
        with torch.no_grad(), patch_heads(m,p,[(1,2)],parts="q"): got=m(x)
        return "ran"
    tryit("record_path",rp)
    def eff():
        e=effect(m,lambda mm:mm(x),heads=[(1,1)]); w=hand(m,x,**zero(1,1)); b=hand(m,x,z=lambda i,z:z)
        return "ok" if abs(e.largest-(w-b).abs().max().item())<1e-4 else "DEFECT "+str(e) if hasattr(e,"largest") else "ran "+short(e,150)
    tryit("effect",eff)
for st in "sdpa hfirst fold sdpa5 gqa packed mha mhabf bias sink gate vT loopbatch einsum loop outfused bmmfold".split(): analysis(st)
print("N",lib.N)
