from lib import *
import lib, tempfile, os
from regard import stats
from regard.stats import *
class M(nn.Module):
    def __init__(s,f): super().__init__(); s.f=f
    def forward(s,q,k,v): return s.f(q,k,v)
torch.manual_seed(0)
q,k,v=torch.randn(2,3,7,4),torch.randn(2,3,7,4),torch.randn(2,3,7,4); c=torch.ones(7,7).tril().bool()
kx=torch.randn(2,3,9,4); vx=torch.randn(2,3,9,4); kg=torch.randn(2,1,7,4)
bias=torch.randn(3,7,7); sink=torch.randn(3); rm=torch.rand(2,1,7,7)<.5; rm[:,:,3]=False
def hw(s): 
    def f(q,k,v): return s(q,k).softmax(-1)@v
    return f
S=lambda q,k:q@k.mT*.5
cases={
 "plain":(hw(S),q,k,v),
 "causal":(hw(lambda q,k:S(q,k).masked_fill(~c,-torch.inf)),q,k,v),
 "sdpa causal":(lambda q,k,v:F.scaled_dot_product_attention(q,k,v,is_causal=True),q,k,v),
 "bias":(hw(lambda q,k:S(q,k)+bias),q,k,v),
 "cross":(hw(S),q,kx,vx),
 "softcap":(hw(lambda q,k:2*torch.tanh(S(q,k)/2)),q,k,v),
 "sink":(lambda q,k,v:torch.cat([S(q,k).masked_fill(~c,-torch.inf),sink.view(1,3,1,1).expand(2,3,7,1)],-1).softmax(-1)[...,:-1]@v,q,k,v),
 "random mask with empty row sdpa":(lambda q,k,v:F.scaled_dot_product_attention(q,k,v,attn_mask=rm),q,k,v),
 "nan rows":(hw(lambda q,k:S(q,k).masked_fill(~rm,-torch.inf)),q,k,v),
 "-1e9 rows":(hw(lambda q,k:S(q,k).masked_fill(~rm,-1e9)),q,k,v),
 "mqa":(lambda q,k,v:F.scaled_dot_product_attention(q,k[:,:1],v[:,:1]),q,k,v),
 "as logits":(hw(lambda q,k:S(q,k)**2),q,k,v),
 "causal rel bias strip":(hw(lambda q,k:(S(q,k)-(torch.arange(7)[:,None]-torch.arange(7))*torch.tensor([.1,.5,2.])[:,None,None]).masked_fill(~c,-torch.inf)),q,k,v),
 "bf16 sdpa":(lambda q,k,v:F.scaled_dot_product_attention(q,k,v,is_causal=True),q.bfloat16(),k.bfloat16(),v.bfloat16()),
 "f64":(hw(S),q.double(),k.double(),v.double()),
 "huge":(hw(lambda q,k:S(q,k)*30),q,k,v),
 "window":(lambda q,k,v:F.scaled_dot_product_attention(q,k,v,attn_mask=c&(torch.ones(7,7).triu(-2).bool())),q,k,v),
}
def near(a,b,t=2e-4):
    a=np.asarray(a,dtype=float);b=np.asarray(b,dtype=float)
    return a.shape==b.shape and (np.isnan(a)==np.isnan(b)).all() and (a.size==0 or np.abs(np.nan_to_num(a)-np.nan_to_num(b)).max()<t)
for n,(f,*args) in cases.items():
    m=M(f)
    with torch.no_grad(), regard.watch(m,keep="qkv") as seen: m(*args)
    if not seen.records: say("stats "+n,"reported: "+notes(seen)[:200]); continue
    bad=[]
    with tempfile.TemporaryDirectory() as d:
        p=os.path.join(d,"x.regard"); seen.save(p); back=regard.open(p)
        if str(back)!=str(seen) : bad.append("text differs after load")
        for a,b in zip(seen.records,back.records):
            if not near(a.weights(),b.weights(),1e-7): bad.append("weights differ after load")
            if a.name!=b.name or a.shape!=b.shape: bad.append("names")
            if str(a.certificate)!=str(b.certificate): bad.append("certificate after load")
    tab=seen.table(); tn={c_:np.asarray(tab[c_]) for c_ in ("entropy","sink","previous","self","local","distance")}
    acc={x:[] for x in tn}
    for b,r in enumerate(seen.records):
        W=np.asarray(r.to("numpy").weights(),dtype=float); H,T,K=W.shape; qp=np.asarray(r.q_positions); kp=np.asarray(r.k_positions)
        with np.errstate(all="ignore"):
            ent=-np.where(W>0,W*np.log(np.where(W>0,W,1)),np.where(np.isnan(W),np.nan,0)).sum(-1)
        L=np.asarray(r.to("numpy").logits(),dtype=float)
        try:
            e=np.asarray(entropy(r)); 
            if not near(e,ent,5e-4): bad.append(f"entropy seq{b} max {np.nanmax(np.abs(e-ent)):.3g} nan {np.isnan(e).sum()} {np.isnan(ent).sum()}")
        except Exception as ex: bad.append("entropy "+short(ex))
        try:
            rc=np.asarray(received(r)); 
            if not near(rc,W.sum(1)): bad.append(f"received {np.isnan(rc).sum()} {np.isnan(W.sum(1)).sum()} {np.nanmax(np.abs(rc-W.sum(1))):.3g}")
        except Exception as ex: bad.append("received "+short(ex))
        try:
            rs,cm_,top,lg,cs=walk(r,RowSums(),ColumnMax(),TopK(3),LargestLogit(),ColumnSums())
            if not near(rs,W.sum(-1)): bad.append("RowSums")
            if not near(cs,W.sum(1)): bad.append("ColumnSums")
            if not near(cm_,W.max(1)): bad.append(f"ColumnMax {np.asarray(cm_).shape}")
        except Exception as ex: bad.append("walk "+short(ex))
        try:
            md=np.asarray(mean_distance(r)); wd=(W*(qp[:,None]-kp)).sum(-1)
            tot=W.sum(-1)
            if not near(md,wd,1e-3) and not near(md,wd/tot,1e-3): bad.append(f"mean_distance {np.nanmax(np.abs(md-wd)):.3g}")
        except Exception as ex: bad.append("mean_distance "+short(ex))
        try:
            of=np.asarray(offset(r,1)); 
            wo=np.stack([[W[h,i,list(kp).index(qp[i]-1)] if qp[i]-1 in kp else np.nan for i in range(T)] for h in range(H)])
            if not near(np.nan_to_num(of),np.nan_to_num(wo)): bad.append(f"offset1")
        except Exception as ex: bad.append("offset "+short(ex))
        try:
            tv=np.asarray(top[0] if isinstance(top,(tuple,list)) else getattr(top,"values",top)); 
        except Exception as ex: pass
        try:
            w3=np.asarray(r.weights([0,-1],heads=[2,0],keys=[1,3])); 
            if not near(w3,W[[2,0]][:,[0,-1]][:,:,[1,3]],1e-6): bad.append("weights part")
            lw=np.exp(L-np.asarray(r.lse,dtype=float)[...,None])
            if not near(lw,W,1e-5): bad.append("exp(logits-lse)!=weights")
        except Exception as ex: bad.append("part "+short(ex))
        with np.errstate(all="ignore"):
            sk=W[:,:,0]
            acc["entropy"].append(ent/np.log(2)); acc["sink"].append(sk)
    try:
        E=np.concatenate([a for a in acc["entropy"]],1) if len(acc["entropy"])==2 else None
        if E is not None and not near(tn["entropy"],E.mean(1),2e-3): bad.append(f"table entropy {tn['entropy']} want {E.mean(1)}")
    except Exception as ex: bad.append("table "+short(ex))
    try:
        g=seen.attentions[0]; W=np.stack([np.asarray(r.weights(),dtype=float) for r in seen.records])
        if not near(g,W,1e-6): bad.append("attentions")
    except Exception as ex: bad.append("attentions "+short(ex))
    say("stats "+n,"ok" if not bad else "DEFECT? "+"; ".join(bad[:5]))
