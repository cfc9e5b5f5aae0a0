from h import *; from m import CF
from transformers import *
def tok(*s,seed=1):
    g=torch.Generator().manual_seed(seed); return torch.randint(3,97,s,generator=g)
x=tok(1,12); x2=tok(2,9); y=tok(1,6,seed=2)
def B_(n="llama",impl="sdpa",**k): m=build(CF[n](),impl=impl,**k); return m,ref_model(m)
S={}
def sit(f): S[f.__name__]=f; return f
@sit
def forward_directly():
    m,r=B_()
    with regard.watch(m,keep="qkv") as a, torch.no_grad(): m.forward(x)
    check("m.forward directly",a,r,None)
@sit
def functional_call():
    m,r=B_(); sd={k:v*1.1 if v.dim()>1 else v for k,v in m.state_dict().items()}; r2=copy.deepcopy(r); r2.load_state_dict(sd)
    with regard.watch(m,keep="qkv") as a, torch.no_grad(): torch.func.functional_call(m,sd,(x,)); m(y)
    check("functional_call other weights",a,None,[x[0].tolist(),y[0].tolist()],densef=lambda s,t:dense(r2 if len(t)==12 else r,t),allow_last=False)
@sit
def inference_mode():
    m,r=B_()
    with regard.watch(m,keep="qkv") as a, torch.inference_mode(): o=m.generate(x2,attention_mask=torch.ones_like(x2),max_new_tokens=5,min_new_tokens=5,do_sample=False,pad_token_id=0)
    check("inference_mode generate",a,r,o.tolist())
@sit
def offload_accelerate():
    from accelerate import cpu_offload
    m,r=B_(); m2=copy.deepcopy(m); cpu_offload(m2,execution_device="cpu")
    with regard.watch(m2,keep="qkv") as a, torch.no_grad(): m2(x)
    check("accelerate cpu_offload",a,r,[x[0].tolist()],allow_last=False)
@sit
def deepcopied_in_watch():
    m,r=B_()
    with regard.watch(m,keep="qkv") as a, torch.no_grad(): m(x); c=copy.deepcopy(m); c(y); m(tok(1,4,seed=8))
    check("deepcopy of the model in the watch",a,r,None); print(a.recording.tokens)
    with torch.no_grad(): c(y)
@sit
def attentions_tuple():
    for n in ("llama","gemma3","gpt2","gpt_oss","mistral"):
        m,r=B_(n,"eager"); am=torch.ones_like(x2); am[0,:3]=0
        with torch.no_grad(): w=r(x2,attention_mask=am,output_attentions=True).attentions
        with regard.watch(m,keep="qkv") as a, torch.no_grad(): m(x2,attention_mask=am)
        A=[T(q) for q in a.attentions]; d=0; 
        for p,q in zip(A,w):
            if p.shape!=q.shape: line(f"attentions tuple {n}",f"note shape {tuple(p.shape)} vs {tuple(q.shape)}"); break
            d=max(d,float((p-q)[1].abs().max()),float((p-q)[0,:,3:].abs().max()))
        else: line(f"attentions tuple {n}","ok" if d<2e-3 else f"DEFECT: differ by {d}")
@sit
def knock_heads():
    for n,mod in (("llama",lambda m:m.model.layers[0].self_attn.o_proj),("mistral",lambda m:m.model.layers[0].self_attn.o_proj),("gpt2",lambda m:m.transformer.h[0].attn.c_proj),("gpt_oss",lambda m:m.model.layers[0].self_attn.o_proj)):
        for impl in ("sdpa","eager"):
            if n=="gpt_oss" and impl=="sdpa": continue
            m,_=B_(n,impl); am=torch.ones_like(x2); am[0,:3]=0; kw=dict(attention_mask=am,max_new_tokens=5,min_new_tokens=5,do_sample=False,pad_token_id=0,return_dict_in_generate=True,output_logits=True)
            h=mod(m).register_forward_pre_hook(lambda q,i:(torch.cat([i[0][...,:8],i[0][...,8:16]*0,i[0][...,16:]],-1),))
            with torch.no_grad(): o=m.generate(x2,**kw); h.remove()
            with regard.knock_out(m,heads=[(0,1)]), torch.no_grad(): p=m.generate(x2,**kw)
            d=max(float((i-j).abs().max()) for i,j in zip(o.logits,p.logits)); line(f"knock_out head {n} {impl} padded generate","ok" if d<1e-4 else f"DEFECT: {d}")
@sit
def knock_keys():
    for n in ("llama","gpt2","mistral","gpt_oss","gemma3"):
        for impl in ("sdpa","eager"):
            if n=="gpt_oss" and impl=="sdpa": continue
            def go():
                m,r=B_(n,impl); am=torch.ones_like(x2); am[0,:3]=0
                with regard.knock_out(m,keys=[2]), regard.watch(m,keep="qkv") as a, torch.no_grad(): o=m(x2,attention_mask=am,position_ids=(am.cumsum(-1)-1).clamp(min=0)).logits
                # oracle: eager, the mask column of the key set to min in each layer, by hooks on the softmax
                import torch.nn.functional as F
                old=F.softmax
                def sm(z,*k,**q):
                    if z.dim()==4:
                        z=z.clone(); z[0,:,:,5]=-1e30; z[1,:,:,2]=-1e30
                    return old(z,*k,**q)
                F.softmax=sm; 
                try:
                    with torch.no_grad(): e=r(x2,attention_mask=am,position_ids=(am.cumsum(-1)-1).clamp(min=0)).logits
                finally: F.softmax=old
                d=max(float((o-e)[1].abs().max()),float((o-e)[0,3:].abs().max())); W=[T(q.weights()) for q in a.records]; bad=max(float(q[:,:,2].abs().max()) for q in W)
                line(f"knock_out key {n} {impl}","ok" if d<2e-3 and bad<1e-6 else f"DEFECT: logits differ by {d}, shown weight on the key {bad}")
            run(f"knock_out key {n} {impl}",go)
@sit
def save_open():
    m,r=B_("gemma3")
    with regard.watch(m,keep="qkv") as a, torch.no_grad(): o=m.generate(x2,attention_mask=torch.ones_like(x2),max_new_tokens=5,min_new_tokens=5,do_sample=False,pad_token_id=0)
    p="z.regard"; a.save(p); b=regard.open(p); check("saved and opened",b,r,o.tolist()); os.remove(p)
@sit
def row_sums_and_received():
    m,r=B_("gpt_oss","eager")
    with regard.watch(m,keep="qkv") as a, torch.no_grad(): m(x2)
    for i in range(2):
        W=T(a.layer(i,sequence=1).weights()); D=dense(r,x2[1].tolist())[i]
        line(f"sink row sums layer {i}","ok" if (W.sum(-1)-D.sum(-1)).abs().max()<1e-3 and (W.sum(-1)<.9999).any() else "DEFECT")
@sit
def keep_variants():
    for keep in ("qk","qkv",None):
        m,r=B_()
        try:
            with (regard.watch(m,keep=keep) if keep else regard.watch(m)) as a, torch.no_grad(): m(x2)
            check(f"keep {keep}",a,r,x2.tolist(),allow_last=False)
        except Exception as e: line(f"keep {keep}",f"reported {e}"[:150])
@sit
def long_context():
    m,r=B_("gemma3"); t=tok(1,600)
    with regard.watch(m,keep="qkv") as a, torch.no_grad(): m(t)
    check("600 tokens (over max positions)",a,r,[t[0].tolist()],allow_last=False)
@sit
def chunk_with_padding():
    for n in ("gemma3","llama","gpt_oss"):
        m,r=B_(n,"eager"); am=torch.ones_like(x2); am[0,:3]=0; c=DynamicCache(config=m.config); pid=(am.cumsum(-1)-1).clamp(min=0)
        with regard.watch(m,keep="qkv") as a, torch.no_grad():
            for i in range(0,9,2): m(x2[:,i:i+2],attention_mask=am[:,:i+2],position_ids=pid[:,i:i+2],past_key_values=c)
        check(f"chunks of 2 with left padding by hand {n}",a,r,[x2[0,3:].tolist(),x2[1].tolist()],allow_last=False)
@sit
def one_token_at_a_time_padded():
    for n in ("llama","mistral","gpt_oss"):
        m,r=B_(n,"eager"); am=torch.ones_like(x2); am[0,:3]=0; c=DynamicCache(config=m.config); pid=(am.cumsum(-1)-1).clamp(min=0)
        with regard.watch(m,keep="qkv") as a, torch.no_grad():
            for i in range(9): m(x2[:,i:i+1],attention_mask=am[:,:i+1],position_ids=pid[:,i:i+1],past_key_values=c)
        check(f"token by token, left padded {n}",a,r,[x2[0,3:].tolist(),x2[1].tolist()],allow_last=False)
for n,f in S.items(): run(n,f)
done()
