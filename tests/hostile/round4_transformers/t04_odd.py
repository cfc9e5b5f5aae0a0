from h import *; from o import both,logged,compare; from m import CF
from transformers import *
import copy as cp
def tok(*s,seed=1):
    g=torch.Generator().manual_seed(seed); return torch.randint(3,97,s,generator=g)
x=tok(1,12); y=tok(1,6,seed=2); D=DynamicCache
S={}
def sit(name):
    def d(f): S[name]=f; return f
    return d
def m4(b,dtype=torch.float32): return torch.where(b,0.,torch.finfo(dtype).min).to(dtype)
@sit("packed by position_ids")
def _(m): return m(tok(1,12),position_ids=torch.tensor([[0,1,2,3,4,0,1,2,0,1,2,3]])).logits
@sit("packed batch 2")
def _(m): return m(tok(2,12),position_ids=torch.tensor([[0,1,2,3,4,0,1,2,0,1,2,3],[0,1,0,1,2,3,4,5,6,7,8,9]])).logits
@sit("packed, no cache")
def _(m): return m(tok(1,12),position_ids=torch.tensor([[0,1,2,3,4,0,1,2,0,1,2,3]]),use_cache=False).logits
@sit("position ids with gap")
def _(m): return m(x,position_ids=torch.arange(12)[None]*3).logits
@sit("position ids reversed")
def _(m): return m(x,position_ids=torch.arange(11,-1,-1)[None]).logits
@sit("4D bool mask random")
def _(m):
    g=torch.Generator().manual_seed(0); b=(torch.rand(2,1,9,9,generator=g)>.4)|torch.eye(9).bool()
    return m(tok(2,9),attention_mask=m4(b,m.dtype)).logits
@sit("4D bidirectional")
def _(m): return m(tok(2,9),attention_mask=m4(torch.ones(2,1,9,9).bool(),m.dtype)).logits
@sit("4D per head float bias")
def _(m):
    g=torch.Generator().manual_seed(0); return m(tok(2,9),attention_mask=torch.randn(2,4,9,9,generator=g).to(m.dtype)).logits
@sit("4D row masked fully")
def _(m):
    b=torch.ones(1,1,9,9).bool().tril(); b[:,:,4]=False; return m(tok(1,9),attention_mask=m4(b,m.dtype)).logits
@sit("4D tree attention with cache")
def _(m):
    c=D(config=m.config); m(x,past_key_values=c)
    t=torch.tensor([[1,0,0,0],[1,1,0,0],[1,0,1,0],[1,1,0,1]]).bool(); b=torch.cat([torch.ones(4,12).bool(),t],1)[None,None]
    return m(tok(1,4,seed=5),attention_mask=m4(b,m.dtype),past_key_values=c,position_ids=torch.tensor([[12,13,13,14]])).logits
@sit("4D tree then accept a branch")
def _(m):
    c=D(config=m.config); m(x,past_key_values=c)
    t=torch.tensor([[1,0,0,0],[1,1,0,0],[1,0,1,0],[1,1,0,1]]).bool(); b=torch.cat([torch.ones(4,12).bool(),t],1)[None,None]
    m(tok(1,4,seed=5),attention_mask=m4(b,m.dtype),past_key_values=c,position_ids=torch.tensor([[12,13,13,14]]))
    keep=list(range(13))+[14]
    for l in c.layers: l.keys=l.keys[:,:,keep]; l.values=l.values[:,:,keep]
    return m(y,past_key_values=c,position_ids=torch.arange(14,20)[None]).logits
@sit("mask hides middle token")
def _(m):
    am=torch.ones(2,9).long(); am[0,4]=0; am[1,2:5]=0; return m(tok(2,9),attention_mask=am).logits
@sit("mask all zero sequence")
def _(m):
    am=torch.ones(2,9).long(); am[0]=0; return m(tok(2,9),attention_mask=am).logits
@sit("float mask 2D")
def _(m):
    am=torch.ones(2,9); am[0,:3]=0; return m(tok(2,9),attention_mask=am).logits
@sit("bool mask 2D right pad")
def _(m):
    am=torch.ones(2,9).bool(); am[0,6:]=False; return m(tok(2,9),attention_mask=am).logits
@sit("right padded then decode")
def _(m):
    xx=tok(2,9); am=torch.ones_like(xx); am[0,6:]=0; c=D(config=m.config); m(xx,attention_mask=am,past_key_values=c)
    am=torch.cat([am,torch.ones(2,1).long()],1); return m(tok(2,1,seed=4),attention_mask=am,past_key_values=c,position_ids=torch.tensor([[6],[9]])).logits
@sit("inputs_embeds")
def _(m): return m(inputs_embeds=m.get_input_embeddings()(x)).logits
@sit("generate from embeds")
def _(m): return m.generate(inputs_embeds=m.get_input_embeddings()(x),attention_mask=torch.ones_like(x),max_new_tokens=4,min_new_tokens=4,do_sample=False,pad_token_id=0)
@sit("edit a key in cache")
def _(m):
    c=D(config=m.config); m(x,past_key_values=c)
    for l in c.layers: l.keys[:,:,-2]=0
    return m(y,past_key_values=c).logits
@sit("edit values in cache")
def _(m):
    c=D(config=m.config); m(x,past_key_values=c)
    for l in c.layers: l.values.mul_(-1)
    return m(y,past_key_values=c).logits
@sit("evict middle tokens (H2O)")
def _(m):
    c=D(config=m.config); m(x,past_key_values=c); keep=[0,1,5,8,9,10,11]
    for l in c.layers:
        if l.keys.shape[2]==12: l.keys=l.keys[:,:,keep]; l.values=l.values[:,:,keep]
        else: return m(y).logits
    return m(y,past_key_values=c,position_ids=torch.arange(12,18)[None]).logits
@sit("evict per head")
def _(m):
    c=D(config=m.config); m(x,past_key_values=c)
    for l in c.layers:
        if l.keys.shape[2]!=12: return m(y).logits
        idx=torch.stack([torch.randperm(12,generator=torch.Generator().manual_seed(h))[:7].sort().values for h in range(l.keys.shape[1])])[None,:,:,None]
        l.keys=l.keys.gather(2,idx.expand(1,-1,-1,l.keys.shape[3])); l.values=l.values.gather(2,idx.expand(1,-1,-1,l.values.shape[3]))
    return m(y,past_key_values=c,position_ids=torch.arange(12,18)[None]).logits
@sit("prefix tuning learned kv")
def _(m):
    g=torch.Generator().manual_seed(2); c0=D(config=m.config); m(tok(2,3),past_key_values=c0)
    c=D()
    for i,l in enumerate(c0.layers): c.update(torch.randn(l.keys.shape,generator=g).to(m.dtype),torch.randn(l.values.shape,generator=g).to(m.dtype),i)
    return m(tok(2,6,seed=3),attention_mask=torch.ones(2,9).long(),past_key_values=c).logits
@sit("soft prompt embeds + tokens")
def _(m):
    e=torch.cat([torch.randn(1,3,32,generator=torch.Generator().manual_seed(1)).to(m.dtype),m.get_input_embeddings()(x)],1); return m(inputs_embeds=e).logits
@sit("user hook replaces hidden state")
def _(m):
    lay=[q for n,q in m.named_modules() if n.endswith("0.mlp")or n.endswith(".0.mlp")]
    h=lay[0].register_forward_hook(lambda a,b,o:(o[0]*2,)+tuple(o[1:]) if isinstance(o,tuple) else o*2)
    try: return m(x).logits
    finally: h.remove()
@sit("exception in the middle, caught, then again")
def _(m):
    class Stop(Exception): pass
    lay=[q for n,q in m.named_modules() if n.endswith("1.self_attn") or n.endswith("h.1.attn") or n.endswith("1.self_attention")][0]
    def st(*a): raise Stop
    h=lay.register_forward_pre_hook(st)
    try: m(y)
    except Stop: pass
    h.remove(); return m(x).logits
@sit("exception in layer 0 output, generation resumes")
def _(m):
    class Stop(Exception): pass
    lay=[q for n,q in m.named_modules() if n.endswith("1.self_attn") or n.endswith("h.1.attn") or n.endswith("1.self_attention")][0]
    c=D(config=m.config); m(x,past_key_values=c); c2=cp.deepcopy(c)
    def st(*a): raise Stop
    h=lay.register_forward_pre_hook(st)
    try: m(y,past_key_values=c2)
    except Stop: pass
    h.remove(); return m(y,past_key_values=c).logits
@sit("half pass then retry on the SAME cache")
def _(m):
    class Stop(Exception): pass
    lay=[q for n,q in m.named_modules() if n.endswith("1.self_attn") or n.endswith("h.1.attn") or n.endswith("1.self_attention")][0]
    c=D(config=m.config); m(x,past_key_values=c)
    def st(*a): raise Stop
    h=lay.register_forward_pre_hook(st)
    try: m(y,past_key_values=c)
    except Stop: pass
    h.remove(); return m(tok(1,1,seed=4),past_key_values=c,attention_mask=None,position_ids=torch.tensor([[12]])).logits if False else x
@sit("layers called by hand twice (looped)")
def _(m):
    for _ in range(2): o=m(x).logits
    return o
@sit("output_hidden_states and attentions")
def _(m): return m(x,output_hidden_states=True,output_attentions=True).logits
@sit("base model only")
def _(m): return m.base_model(x)[0]
@sit("one layer skipped by hook")
def _(m): return m(x).logits
@sit("scaling attribute changed mid-watch")
def _(m):
    a=m(x).logits
    at=[q for q in m.modules() if hasattr(q,"scaling")]
    for q in at: q.scaling=q.scaling*2
    b=m(y).logits
    for q in at: q.scaling=q.scaling/2
    return torch.cat([a[:,-1],b[:,-1]])
@sit("weights changed mid-watch (train step)")
def _(m):
    a=m(x).logits; sd=cp.deepcopy(m.state_dict())
    with torch.no_grad(): [p.add_(.05*torch.sign(p)) for p in m.parameters() if p.dim()>1]
    b=m(x).logits; m.load_state_dict(sd); return torch.cat([a,b])
@sit("weights changed between cache steps")
def _(m):
    c=D(config=m.config); a=m(x,past_key_values=c).logits; sd=cp.deepcopy(m.state_dict())
    with torch.no_grad(): [p.add_(.05*torch.sign(p)) for p in m.parameters() if p.dim()>1]
    b=m(y,past_key_values=c).logits; m.load_state_dict(sd); return b
@sit("static cache passes of two batches")
def _(m):
    c=StaticCache(config=m.config,max_cache_len=30); a=m(tok(2,7),past_key_values=c).logits; b=m(tok(2,3,seed=4),past_key_values=c).logits; return b
@sit("static cache with padding")
def _(m):
    c=StaticCache(config=m.config,max_cache_len=30); am=torch.ones(2,7).long(); am[0,:2]=0
    m(tok(2,7),attention_mask=am,past_key_values=c); return m(tok(2,3,seed=4),attention_mask=torch.cat([am,torch.ones(2,3).long()],1),past_key_values=c).logits
@sit("beam group by hand: reorder across duplicates w/ pad")
def _(m):
    c=D(config=m.config); xx=tok(4,7); am=torch.ones(4,7).long(); am[0,:2]=0; am[1,:2]=0
    xx[1]=xx[0]; xx[3]=xx[2]
    m(xx,attention_mask=am,past_key_values=c)
    for i,ix in enumerate([[1,0,3,2],[0,0,2,2],[1,0,2,3]]):
        am=torch.cat([am,torch.ones(4,1).long()],1); m(tok(4,1,seed=30+i),attention_mask=am,past_key_values=c); c.reorder_cache(torch.tensor(ix))
    am=torch.cat([am,torch.ones(4,1).long()],1); return m(tok(4,1,seed=40),attention_mask=am,past_key_values=c).logits
def main(models,dtype=torch.float32,only=None,tol=2e-3):
    for n,impl in models:
        for k,f in S.items():
            if only and k not in only: continue
            def go():
                m=build(CF[n](),impl=impl,dtype=dtype)
                ref=build(CF[n](),impl="eager"); ref.load_state_dict({a:b.float() for a,b in m.state_dict().items()}); 
                both(f"{n} {impl} {str(dtype)[6:]} {k}",m,f,ref=ref,tol=tol)
            run(f"{n} {impl} {k}",go)
if __name__=="__main__":
    main([("llama","sdpa"),("llama","eager"),("gemma3","sdpa"),("gpt_oss","eager"),("gpt2","sdpa"),("deepseek_v3","eager"),("mistral","eager")])
    done()
