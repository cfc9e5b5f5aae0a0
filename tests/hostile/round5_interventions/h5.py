from h import *
import transformers as T, torch.nn as nn, torch.nn.functional as Fn, threading, math
K=regard.knock_out
base=dict(vocab_size=64,hidden_size=32,intermediate_size=48,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,max_position_embeddings=64,pad_token_id=0,bos_token_id=1,eos_token_id=2)
def llama(cls=T.LlamaForCausalLM,cfg=T.LlamaConfig,dt=torch.float64,**k):
    torch.manual_seed(1); m=cls(cfg(**{**base,**k})).to(dt).eval()
    for p in m.parameters():
        if p.dim()>1: nn.init.normal_(p,std=.2)
    m.generation_config.eos_token_id=None; m.generation_config.pad_token_id=0
    return m
m=llama(); A=[l.self_attn for l in m.model.layers]; d=8
torch.manual_seed(5); ids=torch.randint(3,64,(2,7)); am=torch.ones_like(ids); am[0,:3]=0
@contextlib.contextmanager
def wz(m,l,h,d=8):
    with zero(m.model.layers[l].self_attn.o_proj,slice(h*d,(h+1)*d)): yield
def gen(m,x=ids,a=am,**k):
    with torch.no_grad(): r=m.generate(x,attention_mask=a,max_new_tokens=8,return_dict_in_generate=True,output_logits=True,**{**dict(do_sample=False),**k})
    return torch.stack(r.logits,1).double() if k.get('num_beams',1)==1 else torch.cat([r.sequences.double().flatten(),torch.stack(r.logits,1).flatten().double()])
for n,k in dict(greedy={},static=dict(cache_implementation='static'),nocache=dict(use_cache=False),beam=dict(num_beams=3),beamret=dict(num_beams=3,num_return_sequences=3),dynamic=dict(cache_implementation='dynamic'),offl=dict(cache_implementation='offloaded'),prefill=dict(prefill_chunk_size=2),sample=dict(do_sample=True),lookup=dict(prompt_lookup_num_tokens=2),).items():
    def f():
        x,a=(ids,am) if 'lookup'!=n else (ids[1:],am[1:])
        torch.manual_seed(0); b=gen(m,x,a,**k)
        with wz(m,1,2): torch.manual_seed(0); w=gen(m,x,a,**k)
        with K(m,heads=[(1,2)]): torch.manual_seed(0); g=gen(m,x,a,**k)
        torch.manual_seed(0); assert torch.equal(gen(m,x,a,**k),b)
        return g,w,b if b.shape==w.shape else w+1
    report(f'gen head {n}',f,1e-6)
    # keys : real token 1 hidden from everything (except rows <2) in layer 1
    def f2():
        x,a=(ids,am) if 'lookup'!=n else (ids[1:],am[1:])
        off=[3,0] if n!='lookup' else [0]; nb=k.get('num_beams',1)
        kk=dict(k)
        torch.manual_seed(0)
        with K(m,layers=[1],keys=[1],queries=slice(3,None)): g=gen(m,x,a,**kk)
        if 'beam' in n: return g,g
        # oracle: full forward on the generated sequences (teacher) with mask hook
        torch.manual_seed(0)
        with K(m,layers=[1],keys=[1],queries=slice(3,None)), torch.no_grad(): seqs=m.generate(x,attention_mask=a,max_new_tokens=8,**{**dict(do_sample=False),**kk})
        S=seqs.shape[1]; aa=torch.cat([a,torch.ones(len(x),S-x.shape[1],dtype=torch.long)],1)
        mm=llama(dt=torch.float64); 
        pos=(aa.cumsum(1)-1).clamp(min=0)
        al=torch.ones(S,S,dtype=torch.bool).tril()[None]&aa.bool()[:,None]; al=al|torch.eye(S,dtype=torch.bool)[None]
        m4=al[:,None]; 
        def pre(mod,ar,kw):
            q=m4.clone()
            for i,o in enumerate(off): q[i,:,o+3:,o+1]=False
            kw['attention_mask']=q; return ar,kw
        h=mm.model.layers[1].self_attn.register_forward_pre_hook(pre,with_kwargs=True)
        w=out(mm,seqs,attention_mask=m4,position_ids=pos)
        h.remove()
        return g,w[:,x.shape[1]-1:-1]
    report(f'gen keys {n}',f2,1e-6)
# queries=-1 newest in every step: head output 0 for newest token, via keys=slice(None)
def f():
    def pre(mod,a):
        x=a[0].clone(); x[:,-1,16:24]=0; return (x,)
    h=A[1].o_proj.register_forward_pre_hook(pre); w=gen(m); h.remove()
    with K(m,heads=[(1,2)],keys=slice(None),queries=[-1]): g=gen(m)
    return g,w,gen(m)
report('gen queries -1',f,1e-6)
def f():
    with regard.watch(m,keep='qkv') as s, torch.no_grad(): m(ids[1:])
    def pre(mod,a):
        x=a[0].clone()
        if x.shape[1]>1: x[:,2,16:24]=z[:,2,16:24]
        return (x,)
    src=ids[1:].flip(1); zz={}
    h=A[1].o_proj.register_forward_pre_hook(lambda mod,a:zz.update(z=a[0].clone())); out(m,src); h.remove(); z=zz['z']
    with regard.watch(m,keep='qkv') as s, torch.no_grad(): m(src)
    h=A[1].o_proj.register_forward_pre_hook(pre); w=gen(m,ids[1:],am[1:]); h.remove()
    with regard.patch_heads(m,s,[(1,2)],queries=[2]): g=gen(m,ids[1:],am[1:])
    return g,w,gen(m,ids[1:],am[1:])
report('gen patch query 2',f,1e-6)
def f():  # patch left padded batch from unpadded source
    src=ids[1:].flip(1)[:,:4]
    zz={}; h=A[1].o_proj.register_forward_pre_hook(lambda mod,a:zz.update(z=a[0].clone())); out(m,src); h.remove(); z=zz['z']
    with regard.watch(m,keep='qkv') as s, torch.no_grad(): m(src)
    def pre(mod,a):
        x=a[0].clone(); x[0,3:5,16:24]=z[0,:2,16:24]; x[1,0:2,16:24]=z[0,:2,16:24]; return (x,)
    h=A[1].o_proj.register_forward_pre_hook(pre); w=out(m,ids,attention_mask=am); h.remove()
    with regard.patch_heads(m,s,[(1,2)],queries=slice(0,2)): g=out(m,ids,attention_mask=am)
    v=am.bool(); return g[v],w[v],out(m,ids,attention_mask=am)[v]
report('patch padded batch',f,1e-6)
def f():  # source padded, target padded otherwise
    srcx=torch.randint(3,64,(2,7)); sa=torch.ones_like(srcx); sa[1,:2]=0
    zz={}; h=A[1].o_proj.register_forward_pre_hook(lambda mod,a:zz.update(z=a[0].clone())); out(m,srcx,attention_mask=sa); h.remove(); z=zz['z']
    with regard.watch(m,keep='qkv') as s, torch.no_grad(): m(srcx,attention_mask=sa)
    def pre(mod,a):
        x=a[0].clone(); x[0,3:6,16:24]=z[0,:3,16:24]; x[1,0:3,16:24]=z[1,2:5,16:24]; return (x,)
    h=A[1].o_proj.register_forward_pre_hook(pre); w=out(m,ids,attention_mask=am); h.remove()
    with regard.patch_heads(m,s,[(1,2)],queries=slice(0,3)): g=out(m,ids,attention_mask=am)
    v=am.bool(); return g[v],w[v],out(m,ids,attention_mask=am)[v]
report('patch padded source',f,1e-6)
# right padding
ar=torch.ones_like(ids); ar[0,5:]=0
def f():
    with zero(A[1].o_proj,slice(16,24),rows=None): pass
    def pre(mod,a):
        x=a[0].clone(); x[0,4,16:24]=0; x[1,6,16:24]=0; return (x,)
    h=A[1].o_proj.register_forward_pre_hook(pre); w=out(m,ids,attention_mask=ar); h.remove()
    with K(m,heads=[(1,2)],keys=slice(None),queries=[-1]): g=out(m,ids,attention_mask=ar)
    v=ar.bool(); return g[v],w[v],out(m,ids,attention_mask=ar)[v]
report('right padded queries -1',f,1e-6)
# packed by position_ids
def packed(att):
    m.set_attn_implementation(att)
    pos=torch.tensor([[0,1,2,3,0,1,2]]); x=ids[:1]
    with wz(m,1,2): w=out(m,x,position_ids=pos)
    with K(m,heads=[(1,2)]): g=out(m,x,position_ids=pos)
    return g,w,out(m,x,position_ids=pos)
for att in ('sdpa','eager','flex_attention'): report(f'packed {att}',lambda:packed(att),1e-5)
def flexkeys():
    mf=llama(dt=torch.float32); mf.set_attn_implementation('flex_attention')
    me=llama(dt=torch.float32)
    with K(mf,heads=[(1,2)],keys=[1],queries=slice(3,None)): g=out(mf,ids,attention_mask=am)
    with K(me,heads=[(1,2)],keys=[1],queries=slice(3,None)): w=out(me,ids,attention_mask=am)
    v=am.bool(); return g[v],w[v],out(me,ids,attention_mask=am)[v]
report('flex keys',flexkeys,1e-4)
m.set_attn_implementation('sdpa')
# chunked prefill by hand
def f():
    def run():
        c=T.DynamicCache(config=m.config); o=[]
        with torch.no_grad():
            for s in (slice(0,3),slice(3,4),slice(4,7)): o.append(m(ids[1:,s],past_key_values=c,use_cache=True).logits)
        return torch.cat(o,1)
    with K(m,heads=[(1,2)],keys=[1],queries=slice(3,6)): w=out(m,ids[1:])
    with K(m,heads=[(1,2)],keys=[1],queries=slice(3,6)): g=run()
    return g,w,run()
report('chunked prefill keys',f,1e-6)
def f():
    def run(k=False):
        c=T.StaticCache(config=m.config,max_cache_len=16); o=[]
        with torch.no_grad():
            for s in (slice(0,3),slice(3,4),slice(4,7)): o.append(m(ids[1:,s],past_key_values=c,use_cache=True,cache_position=torch.arange(7)[s]).logits)
        return torch.cat(o,1)
    with K(m,heads=[(1,2)],keys=[1],queries=slice(3,6)): w=out(m,ids[1:])
    with K(m,heads=[(1,2)],keys=[1],queries=slice(3,6)): g=run()
    return g,w,run()
report('chunked static keys',f,1e-6)
def f():
    def run(k):
        c=T.StaticCache(config=m.config,max_cache_len=16)
        with torch.no_grad(): m(ids[1:,:6],past_key_values=c,cache_position=torch.arange(6)); 
        with K(m,heads=[(1,2)],keys=k): return out(m,ids[1:,6:],past_key_values=c,cache_position=torch.tensor([6]))
    return run([-1]),run([6]),run([2])
report('static keys -1',f,1e-9)
def f():
    def run(k):
        c=T.DynamicCache(config=m.config)
        with torch.no_grad(): m(ids[1:,:6],past_key_values=c)
        with K(m,heads=[(1,2)],keys=k): return out(m,ids[1:,6:],past_key_values=c)
    c=T.DynamicCache(config=m.config)
    with torch.no_grad(): m(ids[1:,:6],past_key_values=c)
    def pre(mod,a,kw):
        q=torch.ones(1,4,1,7,dtype=torch.bool); q[:,2,:,2]=False; kw['attention_mask']=q; return a,kw
    h=A[1].register_forward_pre_hook(pre,with_kwargs=True); w=out(m,ids[1:,6:],past_key_values=c); h.remove()
    return run([2]),w,run([3])
report('block entered with filled cache',f,1e-9)
# sliding cache
ms=llama(T.MistralForCausalLM,T.MistralConfig,sliding_window=4)
def f():
    with K(ms,heads=[(1,2)],keys=[4],queries=slice(5,None)): g=gen(ms,ids[1:],am[1:])
    with K(ms,heads=[(1,2)],keys=[4],queries=slice(5,None)), torch.no_grad(): sq=ms.generate(ids[1:],attention_mask=am[1:],max_new_tokens=8,do_sample=False); 
    with K(ms,heads=[(1,2)],keys=[4],queries=slice(5,None)):w=out(ms,sq)
    return g,w[:,6:-1],gen(ms,ids[1:],am[1:])
report('sliding cache keys',f,1e-6)
def f():
    S=7
    al=torch.ones(S,S,dtype=torch.bool).tril()&~torch.ones(S,S,dtype=torch.bool).tril(-4); al=al[None,None].expand(1,4,S,S).clone()
    a2=al.clone(); a2[:,2,5:,4]=False
    def pre(mod,a,kw): kw['attention_mask']=a2; return a,kw
    h=ms.model.layers[1].self_attn.register_forward_pre_hook(pre,with_kwargs=True); w=out(ms,ids[1:]); h.remove()
    with K(ms,heads=[(1,2)],keys=[4],queries=slice(5,None)): g=out(ms,ids[1:])
    return g,w,out(ms,ids[1:])
report('sliding keys forward',f,1e-6)
def f():
    with wz(ms,1,2): w=gen(ms)
    with K(ms,heads=[(1,2)]): g=gen(ms)
    return g,w,gen(ms)
report('sliding gen head',f,1e-6)
# grads
def grads(mm,cm,x=ids):
    mm.zero_grad(); 
    with cm: mm(x,labels=x).loss.backward()
    return torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros_like(p).flatten() for p in mm.parameters()])
report('grads knock',lambda:(grads(m,K(m,heads=[(1,2)])),grads(m,wz(m,1,2)),grads(m,contextlib.nullcontext())),1e-8)
m.train()
def f():
    m.gradient_checkpointing_enable(dict(use_reentrant=False)); g=grads(m,K(m,heads=[(1,2)])); w=grads(m,wz(m,1,2)); b=grads(m,contextlib.nullcontext()); return g,w,b
report('grads checkpoint nonreentrant',f,1e-8)
def f():
    m.gradient_checkpointing_enable(dict(use_reentrant=True)); g=grads(m,K(m,heads=[(1,2)])); w=grads(m,wz(m,1,2)); return g,w
report('grads checkpoint reentrant',f,1e-8)
def f():
    m.gradient_checkpointing_enable(dict(use_reentrant=False)); m.zero_grad()
    with K(m,heads=[(1,2)]): lo=m(ids,labels=ids).loss
    lo.backward(); g=torch.cat([p.grad.flatten() for p in m.parameters()]); return g,grads(m,wz(m,1,2)),grads(m,contextlib.nullcontext())
report('checkpoint, backward after the block',f,1e-8)
def f():
    m.gradient_checkpointing_enable(dict(use_reentrant=False)); m.zero_grad()
    with regard.watch(m,keep='qkv') as s, torch.no_grad(): m(ids.flip(1))
    with regard.patch_heads(m,s,[(1,2)],queries=[2]): lo=m(ids,labels=ids).loss
    lo.backward(); g=torch.cat([p.grad.flatten() for p in m.parameters()])
    m.gradient_checkpointing_disable(); m.zero_grad()
    with regard.patch_heads(m,s,[(1,2)],queries=[2]): m(ids,labels=ids).loss.backward()
    return g,torch.cat([p.grad.flatten() for p in m.parameters()])
report('checkpoint patch, backward after',f,1e-8)
def f():
    m.gradient_checkpointing_enable(dict(use_reentrant=False)); m.zero_grad()
    with ab.trace_heads(m) as t: lo=m(ids[:1]).logits[0,-1,5]; lo.backward()
    a=torch.as_tensor(t.output_gradients(1))
    m.gradient_checkpointing_disable(); m.zero_grad()
    with ab.trace_heads(m) as t: lo=m(ids[:1]).logits[0,-1,5]; lo.backward()
    return a,torch.as_tensor(t.output_gradients(1))
report('trace with checkpointing',f,1e-8)
def f():
    m.gradient_checkpointing_enable(dict(use_reentrant=False))
    a=torch.as_tensor(ab.attribute_weights(m,ids[:1],lambda l:l[:,-1,5]).heads); m.gradient_checkpointing_disable()
    return a,torch.as_tensor(ab.attribute_weights(m,ids[:1],lambda l:l[:,-1,5]).heads)
report('attribute_weights with checkpointing',f,1e-8)
m.gradient_checkpointing_disable(); m.eval(); m.zero_grad()
def f():
    ab.attribute_weights(m,ids[:1],lambda l:l[:,-1,5]); assert all(p.grad is None for p in m.parameters()),'grads left'; assert all(p.requires_grad for p in m.parameters()); return 'ok'
report('attribute leaves no grads',f)
# exceptions
def f():
    b=out(m,ids)
    try:
        with K(m,heads=[(1,2)]): raise ValueError('x')
    except ValueError: pass
    try:
        with K(m,heads=[(1,2)]): m(torch.full((1,3),999))
    except IndexError: pass
    try:
        with regard.patch_heads(m,lambda z:1/0,[(1,2)]): m(ids)
    except Exception as e: n=type(e).__name__
    return 'ok '+n if torch.equal(b,out(m,ids)) else 'DEFECT left'
report('exceptions',f)
def f():
    g=K(m,heads=[(1,2)]); g.__enter__(); b=out(m,ids); g2=K(m,heads=[(0,1)]); g2.__enter__()
    g.__exit__(None,None,None); x=out(m,ids); g2.__exit__(None,None,None) 
    with wz(m,0,1): w=out(m,ids)
    return x,w,out(m,ids)
report('exit out of order',f,1e-8)
def f():
    with K(m,heads=[(1,2)]):
        r=[]; ths=[threading.Thread(target=lambda:r.append(out(m,ids))) for _ in range(3)]; [t.start() for t in ths]; [t.join() for t in ths]
    with wz(m,1,2): w=out(m,ids)
    return torch.stack(r),torch.stack([w]*3),torch.stack([out(m,ids)]*3)
report('threads',f,1e-8)
def f():
    m2=llama(); 
    with K(m,heads=[(1,2)]): g=out(m2,ids); h=out(m,ids)
    with wz(m,1,2): w=out(m,ids)
    return torch.stack([g,h]),torch.stack([out(m2,ids),w])
report('two models, one edited',f,1e-8)
def f():
    m2=llama()
    with K(m,heads=[(1,2)]), K(m2,heads=[(0,0)]): g=out(m2,ids); h=out(m,ids)
    with wz(m,1,2): w=out(m,ids)
    with wz(m2,0,0): w2=out(m2,ids)
    return torch.stack([g,h]),torch.stack([w2,w])
report('two models both edited',f,1e-8)
def f():
    with K(m.model.layers[1],heads=[(0,2)]): g=out(m,ids)
    with wz(m,1,2): w=out(m,ids)
    return g,w,out(m,ids)
report('submodule as model',f,1e-8)
def f():
    with regard.watch(m,keep='qkv') as s, K(m,heads=[(1,2)],keys=[0],queries=slice(2,None)): g=out(m,ids)
    with K(m,heads=[(1,2)],keys=[0],queries=slice(2,None)), regard.watch(m) as s: g2=out(m,ids)
    with K(m,heads=[(1,2)],keys=[0],queries=slice(2,None)): w=out(m,ids)
    return torch.stack([g,g2]),torch.stack([w,w])
report('watch beside',f,1e-12)
def f():
    cm=torch.compile(m,backend='eager'); out(cm,ids)
    with wz(m,1,2): w=out(m,ids)
    with K(cm,heads=[(1,2)]): g=out(cm,ids)
    with K(m,heads=[(1,2)]): g2=out(cm,ids)
    return torch.stack([g,g2]),torch.stack([w,w])
report('compiled before',f,1e-8)
import copy
def f():
    c=copy.deepcopy(m)
    with wz(m,1,2): w=out(m,ids)
    with K(m,heads=[(1,2)]): c2=copy.deepcopy(m); g=out(c2,ids)
    return g,out(c,ids)
report('deepcopy inside the block is unedited (or refused)',f,1e-8)
def f():
    mb=llama(dt=torch.bfloat16)
    with wz(mb,1,2): w=out(mb,ids)
    with K(mb,heads=[(1,2)]): g=out(mb,ids)
    return g,w,out(mb,ids)
report('bf16',f,1e-9)
def f():
    with torch.autocast('cpu',torch.bfloat16):
        mb=llama(dt=torch.float32)
        with wz(mb,1,2): w=out(mb,ids)
        with K(mb,heads=[(1,2)]): g=out(mb,ids)
        return g,w,out(mb,ids)
report('autocast',f,1e-9)
def f():
    g=None
    with torch.inference_mode(), K(m,heads=[(1,2)]): g=m(ids).logits.clone()
    with wz(m,1,2): w=out(m,ids)
    return g,w
report('inference mode',f,1e-9)
def f():
    dp=nn.DataParallel(m)
    with K(dp,heads=[(1,2)]): g=out(dp,ids)
    with wz(m,1,2): w=out(m,ids)
    return g,w
report('DataParallel',f,1e-9)
def f():
    from torch.func import functional_call
    sd={k:v.clone()*1.1 for k,v in m.state_dict().items()}
    with wz(m,1,2),torch.no_grad(): w=functional_call(m,sd,(ids,)).logits
    with K(m,heads=[(1,2)]),torch.no_grad(): g=functional_call(m,sd,(ids,)).logits
    return g,w
report('functional_call',f,1e-9)
