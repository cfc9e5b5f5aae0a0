import os, sys, copy, time, traceback, warnings, logging
os.environ.setdefault("HF_HUB_OFFLINE","1")
warnings.filterwarnings("ignore")
import torch, regard, transformers
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
import numpy as np
T0=time.time()
COUNT=[0,0,0]
def line(name,verdict):
    COUNT[0]+=1
    if verdict.startswith("DEFECT"): COUNT[1]+=1
    print(f"{name} | {verdict}",flush=True)
def done():
    print("##",sys.argv[0],COUNT,f"{time.time()-T0:.0f}s",flush=True)
def sharpen(m,std=None,seed=0):
    """random weights that make attention sharp, so that mistakes are visible"""
    g=torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for n,p in m.named_parameters():
            if p.dim()>=2 and ("norm" not in n):
                fan=p.shape[-1]
                if "embed" in n or "wte" in n or "shared" in n: s=1.0
                else: s=1.3/fan**.5
                p.copy_((torch.randn(p.shape,generator=g)*s).to(p.dtype))
            elif "bias" in n or "sink" in n:
                p.copy_((torch.randn(p.shape,generator=g)*.3).to(p.dtype))
    return m.eval()
def build(cfg,cls=None,impl="eager",dtype=torch.float32,seed=0,**k):
    from transformers import AutoModelForCausalLM
    torch.manual_seed(seed)
    cls=cls or AutoModelForCausalLM
    cfg=copy.deepcopy(cfg)
    f=getattr(cls,"from_config",None) if cls.__name__.startswith("Auto") else getattr(cls,"_from_config")
    m=f(cfg,attn_implementation=impl)
    sharpen(m,seed=seed)
    return m.to(dtype)
def ref_model(m):
    r=copy.deepcopy(m)
    try: r.set_attn_implementation("eager")
    except Exception as e: pass
    return r.float().eval()
def dense(ref,tokens,**k):
    with torch.no_grad():
        o=ref(input_ids=torch.tensor([list(tokens)]),output_attentions=True,use_cache=False,**k)
    return [a[0].float() for a in o.attentions if a is not None]
def T(x): return torch.as_tensor(np.asarray(x.detach().cpu().float()) if torch.is_tensor(x) else x).float()
def seqs(rec): 
    out=[]
    for s in rec.sequences:
        if s not in out: out.append(s)
    return out
def recs_of(rec,s): return [r for r,q in zip(rec.records,rec.sequences) if q==s]
def cmp_record(r,D,tol,sinkok=True):
    """D (H,N,N) dense weights by absolute position"""
    W=T(r.weights()); q=[int(x) for x in r.q_positions]; k=[int(x) for x in r.k_positions]
    H,N,M=D.shape
    if W.shape!=(H,len(q),len(k)): return f"shape {tuple(W.shape)} vs dense heads {H} q{len(q)} k{len(k)}"
    if max(q)>=N or max(k)>=M: return f"positions q<= {max(q)} k<= {max(k)} beyond dense {N}x{M}"
    E=D[:,q][:,:,k]
    d=(W-E).abs()
    if not torch.isfinite(d).all(): return f"non-finite {int((~torch.isfinite(d)).sum())}"
    if d.max()>tol:
        h,i,j=np.unravel_index(int(d.argmax()),d.shape)
        return f"weight of head {h} query {q[i]} key {k[j]} shown {W[h,i,j]:.4f} right {E[h,i,j]:.4f}; {int((d>tol).sum())} of {d.numel()} cells wrong"
    miss=D[:,q].sum()-E.sum()
    if abs(miss)>tol*len(q)*H+1e-3: return f"keys missing that have weight {float(miss):.3f}"
    return ""
def reported(seen):
    rs=[f"{c.name}: {c.reason}" for c in seen.coverage() if c.reason and c.attention]
    return rs
def tail(seen):
    L=[l.strip() for l in str(seen).split("\n")]
    return " / ".join(l for l in L if l.startswith("certified") or "not recorded" in l or "fail" in l)[:300]
def notes(seen): return sorted({(c.reason or c.note) for c in seen.coverage() if c.reason or c.note})
def check(name,seen,ref,expect=None,tol=2e-3,nlayers=None,densef=None,same=None,quiet=False,exact_tokens=True,allow_last=True):
    """expect: list of token lists (real tokens of each sequence that was run, without the last generated unless fed)"""
    v=verdict(seen,ref,expect,tol,nlayers,densef,same,exact_tokens,allow_last)
    line(name,v); 
    return v
def verdict(seen,ref,expect=None,tol=2e-3,nlayers=None,densef=None,same=None,exact_tokens=True,allow_last=True):
    try:
        if same is False: return "DEFECT: output changed by the watch"
        rec=seen.recording
        bad=[]
        rp=reported(seen)
        st=str(seen)
        import re
        mm=re.search(r"(\d+) failed",st)
        if mm and int(mm.group(1)): bad.append(f"certificate failed: {tail(seen)}")
        S=seqs(rec)
        toks=[tuple(int(t) for t in rec.tokens[s]) if s<len(rec.tokens) and rec.tokens[s] is not None else () for s in S]
        if expect is not None:
            left=[tuple(e) for e in expect]
            for t in toks:
                hit=[e for e in left if e==t or (allow_last and e[:-1]==t)]
                if hit: left.remove(hit[0])
                elif t==() : bad.append("no tokens shown") if not rp else None
                else: bad.append(f"unexpected sequence {t} (expected {left[:2]})"[:260])
            if left and not rp: bad.append(f"missing sequences {left}"[:200])
        n=0
        for s,t in zip(S,toks):
            if not t: 
                continue
            D=densef(s,t) if densef else dense(ref,t)
            R=recs_of(rec,s)
            nl=nlayers or len(D)
            if len(R)!=nl and not rp: bad.append(f"seq {s}: {len(R)} records, {nl} layers")
            if len(R)==len(D): pairs=list(zip(R,D))
            else:
                import re as _r
                pairs=[]
                for r in R:
                    k=[int(x) for x in _r.findall(r"\.(\d+)(?:\.|$)",r.name)]
                    if k and k[0]<len(D): pairs.append((r,D[k[0]]))
            for r,d in pairs:
                b=cmp_record(r,d,tol); n+=1
                if b: bad.append(f"seq {s} {r.name}: {b}")
        if bad: return "DEFECT: "+" ;; ".join(bad[:3])+f" [{len(bad)}] NOTES {notes(seen)}"[:300]+" "+tail(seen)
        if rp: return "reported: "+"; ".join(sorted({x.split(': ',1)[1] for x in rp}))[:250]+(f" ({n} records right)")
        if n==0: return f"DEFECT: nothing recorded and no reason; {st[:200]}"
        nt=notes(seen)
        return f"ok ({n} records, {len(S)} seqs)"+(f" notes {nt}"[:160] if nt else "")
    except Exception as e:
        tb=traceback.format_exc().strip().split("\n")
        return f"DEFECT?: harness/crash {type(e).__name__}: {str(e)[:200]} @ {tb[-3].strip()[:120]}"
def same(a,b):
    if torch.is_tensor(a): return torch.is_tensor(b) and a.shape==b.shape and a.dtype==b.dtype and torch.equal(torch.nan_to_num(a),torch.nan_to_num(b))
    return a==b
def run(name,f):
    try: f()
    except Exception as e:
        tb=[l for l in traceback.format_exc().strip().split("\n") if "File" in l]
        inreg=any("src_c/src/regard" in l for l in tb)
        line(name,("DEFECT?: " if inreg else "SETUP: ")+f"exception {type(e).__name__}: {str(e)[:160]} @ {tb[-1].strip()[-100:]}")
