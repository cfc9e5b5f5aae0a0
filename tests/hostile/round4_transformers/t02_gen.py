from h import *; from m import CF
from transformers import *
def X(B=2,N=9,pad=3,seed=1):
    g=torch.Generator().manual_seed(seed)
    x=torch.randint(3,97,(B,N),generator=g); am=torch.ones_like(x)
    if pad: am[0,:pad]=0; x[0,:pad]=0
    return x,am
def strip(a,pads): return [r[p:] for r,p in zip(a.tolist(),pads)]
BASE=dict(max_new_tokens=6,min_new_tokens=6,do_sample=False,pad_token_id=0,eos_token_id=2)
def go(name,n,impl,kw,B=2,pad=3,N=9,expectf=None,drop=None,seed=0,**ck):
    kw=dict(kw); loose=kw.pop('LOOSE',0)
    m=build(CF[n](),impl=impl,seed=seed); ref=ref_model(m)
    x,am=X(B,N,pad)
    k={**BASE,**{a:(b(m) if callable(b) else b) for a,b in kw.items()}}
    k2={**BASE,**{a:(b(m) if callable(b) else b) for a,b in kw.items()}}
    torch.manual_seed(5)
    with torch.no_grad(): a=m.generate(x,attention_mask=am,**k)
    torch.manual_seed(5)
    with regard.watch(m,keep="qkv") as seen, torch.no_grad(): b=m.generate(x,attention_mask=am,**k2)
    A=a if torch.is_tensor(a) else a.sequences; Bq=b if torch.is_tensor(b) else b.sequences
    r=A.shape[0]//B
    pads=[(pad if i//r==0 else 0) for i in range(A.shape[0])]
    exp=strip(A,pads) if expectf is None else expectf(A)
    if loose: exp=None
    check(name,seen,ref,exp,same=same(A,Bq),**ck)
    return seen
MODELS=["llama","gemma3","mistral","gpt2","qwen2","llama4"]
G={
 'static':dict(cache_implementation="static"),
 'dynamic':dict(cache_implementation="dynamic"),
 'hybrid/sliding none':dict(),
 'offloaded':dict(cache_implementation="offloaded"),
 'offloaded_static':dict(cache_implementation="offloaded_static"),
 'quantized':dict(cache_implementation="quantized",cache_config={"backend":"quanto","nbits":4}),
 'no cache':dict(use_cache=False),
 'beams3':dict(LOOSE=1,num_beams=3),
 'beams3 return3':dict(LOOSE=1,num_beams=3,num_return_sequences=3),
 'beam sample':dict(LOOSE=1,num_beams=3,do_sample=True,num_return_sequences=2),
 'sample return3':dict(do_sample=True,num_return_sequences=3),
 'chunked prefill':dict(prefill_chunk_size=4),
 'prompt lookup':dict(prompt_lookup_num_tokens=3),
 'output_attentions':dict(output_attentions=True,return_dict_in_generate=True),
 'early stop eos':dict(min_new_tokens=0,do_sample=True,temperature=3.0,eos_token_id=list(range(2,40))),
 'guidance':dict(LOOSE=1,guidance_scale=1.5),
 'static beams':dict(LOOSE=1,cache_implementation="static",num_beams=2),
 'user DynamicCache':dict(past_key_values=lambda m:DynamicCache(config=m.config)),
 'user StaticCache':dict(past_key_values=lambda m:StaticCache(config=m.config,max_cache_len=40)),
}
def eosexp(pad):
    def f(A):
        out=[]
        for i,r in enumerate(A.tolist()):
            p=pad if i==0 else 0
            t=r[p:9]; 
            for c in r[9:]:
                t.append(c)
                if 2<=c<40: break
            out.append(t)
        return out
    return f
if __name__=="__main__":
  for n in MODELS:
    for g,kw in G.items():
        for impl in (("eager","sdpa") if n in("llama","gemma3") else ("sdpa",)):
            B,pad=(1,0) if g in("prompt lookup",) else (2,3)
            run(f"{n} {impl} {g}",lambda:go(f"{n} {impl} {g}",n,impl,kw,B=B,pad=pad,expectf=eosexp(pad) if 'eos' in g else None))
  done()
