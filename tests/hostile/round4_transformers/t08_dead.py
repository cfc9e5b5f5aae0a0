from h import *; from m import CF
import t03_cache as t, t02_gen as g2, h as H
import t05_labels as lab
def kill(m,n,how):
    with torch.no_grad():
        if n=="gpt2":
            for l in m.transformer.h: l.attn.c_attn.weight[:,32:40]=0; l.attn.c_attn.bias[32:40]=0
        elif n=="bloom":
            for l in m.transformer.h: w=l.self_attention.query_key_value; w.weight[8:16]=0; w.bias[8:16]=0
        else:
            for l in m.model.layers:
                l.self_attn.k_proj.weight[:8]=0
    return m
ob=H.build
def nb(cfg,*a,**k): return kill(ob(cfg,*a,**k),cfg.model_type,0)
t.build=nb; g2.build=nb
skip=("backward",)
for n,impl in [("llama","sdpa"),("llama","eager"),("gpt2","sdpa"),("bloom","eager")]:
    for k,(f,e,o) in t.S.items():
        if dict(o).get("densef")=="skip": continue
        def go():
            t.both("dead head 0: "+k,n,impl,f,e,**dict(o))
            if n in("bloom","llama"):
                m=nb(CF[n](),impl=impl); lab.labels(f"labels {n} {impl} dead head 0: {k}",m,f,n=="bloom")
        run(f"{n} {impl} dead head 0: {k}",go)
for n in ("llama","gpt2"):
    for k in ("beams3 return3","beam sample","sample return3","static","prompt lookup","early stop eos","static beams","no cache","chunked prefill"):
        kw=g2.G[k]; B,pad=(1,0) if k=="prompt lookup" else (2,3)
        run(f"{n} sdpa dead {k}",lambda:g2.go(f"{n} sdpa dead {k}",n,"sdpa",kw,B=B,pad=pad,expectf=g2.eosexp(pad) if 'eos' in k else None))
done()
