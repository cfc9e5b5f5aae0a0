from h import *; from m import CF
import t03_cache, t04_odd, sys
def table(m):
    with regard.watch(m,keep="qkv") as s, torch.no_grad(): m(torch.arange(97)[:,None])
    V={};Q={}
    R=[r for r in s.records if ".0." in r.name]
    assert len(R)==97,len(R)
    return torch.stack([T(r.v)[:,0] for r in R]),torch.stack([T(r.q)[:,0] for r in R])
def labels(name,m,act,qtoo):
    try:
        VT,QT=table(m)
        with regard.watch(m,keep="qkv") as s, torch.no_grad(): act(m)
        rec=s.recording; bad=[]; n=0; unk=0
        for r,q in zip(rec.records,rec.sequences):
            if ".0." not in r.name: continue
            t=rec.tokens[q] if q<len(rec.tokens) else ()
            t=list(t) if t is not None else []
            v=T(r.v); kp=[int(i) for i in r.k_positions]
            d=(v[:,:,None]-VT.permute(1,0,2)[:,None]).abs().amax((0,-1))  # (N,97)
            near=d.argmin(-1); ok=d.min(-1).values<1e-2
            lab=[t[p] if p<len(t) else None for p in kp]
            for j,(l,a,o) in enumerate(zip(lab,near.tolist(),ok.tolist())):
                if l is None or int(l)<0: unk+=1; continue
                n+=1
                if not o or int(l)!=a: bad.append(f"seq {q} key {j} at {kp[j]} is labelled {l}, is {a if o else 'no token'}; tokens {t}")
            if qtoo:
                w=T(r.q); qp=[int(i) for i in r.q_positions]
                d=(w[:,:,None]-QT.permute(1,0,2)[:,None]).abs().amax((0,-1)); near=d.argmin(-1); ok=d.min(-1).values<1e-2
                for j,p in enumerate(qp):
                    l=t[p] if p<len(t) else None
                    if l is None or int(l)<0: unk+=1; continue
                    n+=1
                    if not ok[j] or int(l)!=int(near[j]): bad.append(f"seq {q} query {j} at {p} is labelled {l}, is {int(near[j]) if ok[j] else 'no token'}; tokens {t}")
        if bad: line(name,f"DEFECT: labels: {bad[0]} [{len(bad)} of {n}] NOTES {notes(s)} {rec.notes.get('valid','')} {tail(s)}"); return
        line(name,f"ok labels {n}, without label {unk}, seqs {len(set(rec.sequences))} {'' if not reported(s) else reported(s)[0][:100]}")
    except Exception as e:
        line(name,f"DEFECT?: {type(e).__name__} {str(e)[:200]} {traceback.format_exc().splitlines()[-4]}")
if __name__=="__main__":
    for n,impl in [("bloom","eager"),("llama","sdpa"),("gemma3","sdpa")]:
        for src in (t03_cache.S,t04_odd.S):
            for k,f in src.items():
                f=f[0] if isinstance(f,tuple) else f
                if "value" in k or "learned kv" in k or "soft prompt" in k or "replaces" in k or "weights changed" in k: continue
                def go():
                    m=build(CF[n](),impl=impl); labels(f"labels {n} {impl} {k}",m,f,n=="bloom")
                run(f"labels {n} {impl} {k}",go)
    done()
