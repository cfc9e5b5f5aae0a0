"""an oracle by itself: every weight that the model's attention modules return in an eager run without regard"""
from h import *
def logged(m,act):
    """softmaxes of an eager run by the innermost module"""
    import torch.nn.functional as F
    out={}; stack=[]; hs=[]
    for n,mod in m.named_modules():
        if isinstance(mod,torch.nn.Softmax): continue
        hs.append(mod.register_forward_pre_hook(lambda *a,n=n:stack.append(n)))
        hs.append(mod.register_forward_hook(lambda *a,**k:(stack.pop(),None)[1],always_call=True))
    olds=(F.softmax,torch.softmax,torch.Tensor.softmax); depth=[0]
    def mk(f):
        def g(*a,**k):
            depth[0]+=1
            try: r=f(*a,**k)
            finally: depth[0]-=1
            if depth[0]==0 and r.dim()==4: out.setdefault(stack[-1] if stack else "",[]).append(r.detach().float())
            return r
        return g
    F.softmax,torch.softmax,torch.Tensor.softmax=map(mk,olds)
    try: act(m)
    finally:
        F.softmax,torch.softmax,torch.Tensor.softmax=olds
        for h in hs: h.remove()
    return out
def compare(name,seen,log,tol=2e-3,same_=None,total=True,namef=lambda n:n,count=None):
    try:
        if same_ is False: return line(name,"DEFECT: output changed by the watch")
        rec=seen.recording; rp=reported(seen); bad=[]; n=0
        import re
        mm=re.search(r"(\d+) failed",str(seen))
        if mm and int(mm.group(1)): bad.append("certificate failed "+tail(seen))
        for r in rec.records:
            nm=namef(r.name.split("#")[0])
            L=log.get(nm)
            if not L: bad.append(f"{r.name}: no such layer in the oracle {list(log)[:3]}"); continue
            W=T(r.weights()); H=W.shape[0]
            rows=[]
            for t in L:
                if t.shape[1]!=H: continue
                for b in range(t.shape[0]):
                    for i in range(t.shape[2]): rows.append(t[b,:,i])
            if not rows: bad.append(f"{r.name}: heads {H} vs {L[0].shape}"); continue
            for i in range(W.shape[1]):
                w=W[:,i]; ok=False
                for e in rows:
                    K=max(w.shape[1],e.shape[1])
                    # the row with the same numbers in the same order, zeros taken out, in every head
                    keepw=w.abs().max(0).values>tol; keepe=e.abs().max(0).values>tol
                    a,b=w[:,keepw],e[:,keepe]
                    if a.shape==b.shape and (a.numel()==0 or (a-b).abs().max()<=tol*1.5): ok=True;break
                    # thresholds near tol
                    if w.shape==e.shape and (w-e).abs().max()<=tol*1.5: ok=True;break
                if not ok: bad.append(f"{r.name} row {i} (q {int(r.q_positions[i])}): in no call of the model: {w[0].numpy().round(3).tolist()[:14]}")
                n+=1
        if bad: line(name,"DEFECT: "+" ;; ".join(bad[:2])+f" [{len(bad)}/{n}] NOTES {notes(seen)}"[:300]+" "+tail(seen)); return
        if rp: line(name,"reported: "+"; ".join(sorted({x.split(': ',1)[1] for x in rp}))[:250]+f" ({n} rows right)"); return
        if not n: line(name,f"DEFECT: nothing recorded: {str(seen)[:200]}"); return
        N=sum(t.shape[0]*t.shape[2] for L in log.values() for t in L)
        line(name,f"ok ({n} rows of {N}) notes {notes(seen)}"[:250]+" "+tail(seen)[-120:])
    except Exception as e:
        tb=traceback.format_exc().strip().split("\n"); line(name,f"DEFECT?: harness {type(e).__name__} {str(e)[:150]} @ {tb[-3].strip()[:120]}")
def both(name,m,act,impl_ref="eager",tol=2e-3,ref=None,**k):
    r=ref or ref_model(m)
    import copy
    with torch.no_grad(): log=logged(r,act)
    torch.manual_seed(3)
    with torch.no_grad(): a=act(m)
    torch.manual_seed(3)
    with regard.watch(m,keep="qkv") as seen, torch.no_grad(): b=act(m)
    compare(name,seen,log,tol=tol,same_=same(a,b),**k)
    return seen
