from h import *; from m import CF
from transformers import *
import copy as cp, threading, contextlib
D=DynamicCache
def tok(*s,seed=1):
    g=torch.Generator().manual_seed(seed); return torch.randint(3,97,s,generator=g)
def both(name,n,impl,act,expect,**ck):
    m=build(CF[n](),impl=impl); ref=ref_model(m)
    with torch.no_grad(): a=act(m)
    with regard.watch(m,keep="qkv") as seen, torch.no_grad(): b=act(m)
    e=expect(a) if callable(expect) else expect
    check(f"{n} {impl} {name}",seen,ref,e,same=same(a,b),**ck)
    return seen
x=tok(1,12); L=x[0].tolist(); y=tok(1,6,seed=2); Y=y[0].tolist(); z=tok(1,5,seed=3); Z=z[0].tolist()
S={}
def sit(name,expect,**k):
    def d(f): S[name]=(f,expect,k); return f
    return d
@sit("crop then other continuation",None)
def _(m):
    c=D(config=m.config); m(x,past_key_values=c); c.crop(-4); return m(y,past_key_values=c).logits
@sit("crop negative, new tokens",None)
def _(m):
    c=D(config=m.config); m(x,past_key_values=c); c.crop(-3) ; return m(y,past_key_values=c).logits
@sit("crop and same tokens again",None)
def _(m):
    c=D(config=m.config); m(x,past_key_values=c); c.crop(-4); return m(x[:,8:],past_key_values=c).logits
@sit("deepcopy cache, two branches",None)
def _(m):
    c=D(config=m.config); m(x,past_key_values=c); c2=cp.deepcopy(c); a=m(y,past_key_values=c).logits; b=m(z,past_key_values=c2).logits; return torch.cat([a[:,-1],b[:,-1]])
@sit("deepcopy cache, branches interleaved",None)
def _(m):
    c=D(config=m.config); m(x,past_key_values=c); c2=cp.deepcopy(c); out=[]
    for i in range(5):
        out.append(m(y[:,i:i+1],past_key_values=c).logits); out.append(m(z[:,i:i+1],past_key_values=c2).logits)
    return torch.cat(out)
@sit("prefix cache computed, then 3 texts from deepcopies",None)
def _(m):
    c=D(config=m.config); m(x,past_key_values=c); o=[]
    for i in range(3): o.append(m(tok(1,4,seed=10+i),past_key_values=cp.deepcopy(c)).logits)
    return torch.cat(o)
@sit("batch_repeat_interleave",None)
def _(m):
    c=D(config=m.config); m(x,past_key_values=c); c.batch_repeat_interleave(3); return m(tok(3,4,seed=4),past_key_values=c).logits
@sit("batch_select_indices",None)
def _(m):
    c=D(config=m.config); m(tok(3,8),past_key_values=c); c.batch_select_indices(torch.tensor([2,0])); return m(tok(2,4,seed=4),past_key_values=c).logits
@sit("reorder_cache permutation",None)
def _(m):
    c=D(config=m.config); m(tok(3,8),past_key_values=c); c.reorder_cache(torch.tensor([2,0,1])); return m(tok(3,4,seed=4),past_key_values=c).logits
@sit("reorder_cache duplicates",None)
def _(m):
    c=D(config=m.config); m(tok(3,8),past_key_values=c); c.reorder_cache(torch.tensor([1,1,0])); return m(tok(3,4,seed=4),past_key_values=c).logits
@sit("reorder each step",None)
def _(m):
    c=D(config=m.config); m(tok(3,8),past_key_values=c)
    for i in range(4): o=m(tok(3,1,seed=4+i),past_key_values=c); c.reorder_cache(torch.tensor([[1,1,0],[2,0,0],[0,1,2],[1,0,2]][i]))
    return m(tok(3,1,seed=9),past_key_values=c).logits
@sit("same text twice in batch, diverge",None)
def _(m):
    c=D(config=m.config); xx=x.expand(2,-1); m(xx,past_key_values=c); return m(torch.cat([y,tok(1,6,seed=7)]),past_key_values=c).logits
@sit("same text twice in batch, swap at reorder",None)
def _(m):
    c=D(config=m.config); xx=x.expand(2,-1); m(xx,past_key_values=c); c.reorder_cache(torch.tensor([1,0])); return m(torch.cat([y,tok(1,6,seed=7)]),past_key_values=c).logits
@sit("cache reset static and other text",None)
def _(m):
    c=StaticCache(config=m.config,max_cache_len=40); m(x,past_key_values=c); c.reset(); return m(y,past_key_values=c).logits
@sit("cache reset, same text twice",None)
def _(m):
    c=StaticCache(config=m.config,max_cache_len=40); m(x,past_key_values=c); c.reset(); return m(x,past_key_values=c).logits
@sit("two chats interleaved same prefix",None)
def _(m):
    c=D(config=m.config); d=D(config=m.config); m(x,past_key_values=c); m(x,past_key_values=d); o=[]
    for i in range(3): o+= [m(y[:,i:i+1],past_key_values=c).logits, m(z[:,i:i+1],past_key_values=d).logits]
    return torch.cat(o)
@sit("two chats same tokens same prefix",None)
def _(m):
    c=D(config=m.config); d=D(config=m.config); m(x,past_key_values=c); m(x,past_key_values=d); o=[]
    for i in range(3): o+= [m(y[:,i:i+1],past_key_values=c).logits, m(y[:,i:i+1],past_key_values=d).logits]
    return torch.cat(o)
@sit("chat: generate, extend, generate with cache",None)
def _(m):
    c=D(config=m.config); a=m.generate(x,past_key_values=c,max_new_tokens=4,min_new_tokens=4,do_sample=False,pad_token_id=0)
    return m.generate(torch.cat([a,y],1),past_key_values=c,max_new_tokens=4,min_new_tokens=4,do_sample=False,pad_token_id=0)
@sit("chat in static cache",None)
def _(m):
    c=StaticCache(config=m.config,max_cache_len=64); a=m.generate(x,past_key_values=c,max_new_tokens=4,min_new_tokens=4,do_sample=False,pad_token_id=0)
    return m.generate(torch.cat([a,y],1),past_key_values=c,max_new_tokens=4,min_new_tokens=4,do_sample=False,pad_token_id=0)
@sit("single token prompts many",None)
def _(m): return torch.cat([m(tok(1,1,seed=i)).logits for i in range(5)])
@sit("repeated token text",None)
def _(m):
    c=D(config=m.config); r=torch.full((1,6),7); m(r,past_key_values=c); return m(torch.full((1,3),7),past_key_values=c).logits
@sit("identical rows in batch cont",None)
def _(m):
    c=D(config=m.config); r=x.expand(3,-1); m(r,past_key_values=c); return m(y.expand(3,-1),past_key_values=c).logits
@sit("batch shrinks",None)
def _(m):
    c=D(config=m.config); m(tok(3,8),past_key_values=c); m(tok(3,2,seed=3),past_key_values=c); c.batch_select_indices(torch.tensor([0,2])); m(tok(2,2,seed=5),past_key_values=c); c.batch_select_indices(torch.tensor([1])); return m(tok(1,2,seed=6),past_key_values=c).logits
@sit("in-place swap of cache rows",None)
def _(m):
    c=D(config=m.config); m(tok(2,8),past_key_values=c)
    for l in c.layers: l.keys=l.keys.flip(0); l.values=l.values.flip(0)
    return m(tok(2,3,seed=5),past_key_values=c).logits
@sit("in-place zero of keys (edit)",None,densef="skip")
def _(m):
    c=D(config=m.config); m(x,past_key_values=c)
    for l in c.layers: l.keys[:,:,3]=0
    return m(y,past_key_values=c).logits
@sit("logits_to_keep",[L])
def _(m): return m(x,logits_to_keep=1).logits
@sit("inputs_embeds",None,densef="skip")
def _(m): return m(inputs_embeds=m.get_input_embeddings()(x)).logits
@sit("generate from inputs_embeds",None,densef="skip")
def _(m): return m.generate(inputs_embeds=m.get_input_embeddings()(x),attention_mask=torch.ones_like(x),max_new_tokens=4,min_new_tokens=4,do_sample=False,pad_token_id=0)
@sit("no_grad off + backward",None)
def _(m):
    with torch.enable_grad(): o=m(x,labels=x); o.loss.backward(); g=m.get_input_embeddings().weight.grad.clone(); m.zero_grad(); return g
@sit("right padded batch",None)
def _(m):
    xx=tok(2,9); am=torch.ones_like(xx); am[0,6:]=0; return m(xx,attention_mask=am).logits
@sit("right padded then decode",None,densef="skip")
def _(m):
    xx=tok(2,9); am=torch.ones_like(xx); am[0,6:]=0; c=D(config=m.config); m(xx,attention_mask=am,past_key_values=c)
    am=torch.cat([am,torch.ones(2,1).long()],1); pid=torch.tensor([[6],[9]]); return m(tok(2,1,seed=4),attention_mask=am,past_key_values=c,position_ids=pid).logits
@sit("left padded w/o position ids",None)
def _(m):
    xx=tok(2,9); am=torch.ones_like(xx); am[0,:3]=0; pid=(am.cumsum(-1)-1).clamp(min=0); return m(xx,attention_mask=am,position_ids=pid).logits
@sit("all-ones then longer mask",None)
def _(m):
    c=D(config=m.config); m(x,attention_mask=torch.ones_like(x),past_key_values=c); return m(y,attention_mask=torch.ones(1,18).long(),past_key_values=c).logits
@sit("crop to 0 and other text",None)
def _(m):
    c=D(config=m.config); m(x,past_key_values=c); c.crop(0) if False else [setattr(l,'keys',l.keys[:,:,:0]) or setattr(l,'values',l.values[:,:,:0]) for l in c.layers]; return m(y,past_key_values=c).logits
@sit("speculative by hand: draft 4 crop 2, 3 rounds",None)
def _(m):
    c=D(config=m.config); m(x,past_key_values=c); n=12
    for i in range(3): m(tok(1,4,seed=20+i),past_key_values=c); c.crop(-2)
    return m(y,past_key_values=c).logits
@sit("crop to the same draft tokens",None)
def _(m):
    c=D(config=m.config); m(x,past_key_values=c)
    for i in range(3): m(y[:,:3],past_key_values=c); c.crop(-3)
    return m(y,past_key_values=c).logits
@sit("batch of 2 crop",None)
def _(m):
    c=D(config=m.config); m(tok(2,8),past_key_values=c); m(tok(2,4,seed=3),past_key_values=c); c.crop(-3); return m(tok(2,4,seed=4),past_key_values=c).logits
@sit("legacy tuple round trip",None)
def _(m):
    c=D(config=m.config); m(x,past_key_values=c); d=D(); [d.update(l.keys.clone(),l.values.clone(),i) for i,l in enumerate(c.layers)]; return m(y,past_key_values=d).logits
@sit("two prefixes merged to a batch",None)
def _(m):
    c=D(config=m.config); e=D(config=m.config); m(x,past_key_values=c); m(tok(1,12,seed=9),past_key_values=e)
    d=D(); [d.update(torch.cat([l.keys,k.keys]),torch.cat([l.values,k.values]),i) for i,(l,k) in enumerate(zip(c.layers,e.layers))]; return m(tok(2,3,seed=12),past_key_values=d).logits
@sit("batch split into two caches",None)
def _(m):
    c=D(config=m.config); m(tok(2,8),past_key_values=c); o=[]
    for b in range(2):
        d=D(); [d.update(l.keys[b:b+1].clone(),l.values[b:b+1].clone(),i) for i,l in enumerate(c.layers)]; o.append(m(tok(1,3,seed=12+b),past_key_values=d).logits)
    return torch.cat(o)
@sit("prefix cache made BEFORE... watch, user given",None,densef="skip")
def _(m): return m(y,past_key_values=None).logits
@sit("cfg: same cache prompt, uncond batch of 2",None)
def _(m):
    c=D(config=m.config); m(torch.cat([x,x]),past_key_values=c); o=[m(torch.full((2,1),5+i),past_key_values=c).logits for i in range(3)]; return torch.cat(o)
def main(models):
    for n,impl in models:
        for k,(f,e,o) in S.items():
            o=dict(o)
            if o.get("densef")=="skip": continue
            run(f"{n} {impl} {k}",lambda:both(k,n,impl,f,e,**o))
if __name__=="__main__":
    main([("llama","sdpa"),("llama","eager"),("mistral","sdpa"),("gemma3","sdpa"),("bloom","eager"),("gpt2","sdpa"),("gpt_oss","eager"),("qwen3","sdpa"),("deepseek_v3","sdpa")]); done()
