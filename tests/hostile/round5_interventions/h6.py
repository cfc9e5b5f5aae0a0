from h5x import *
print('=====')
# numbers: attribute_logits on families
def fam(name,**k):
    return llama(getattr(T,name+'ForCausalLM'),getattr(T,name+'Config'),**k)
ids1=torch.randint(3,64,(1,8))
def dl(mm,attn,oname='o_proj',norm=None,head='lm_head',scale=1.,post=None):
    # oracle: contribution = head.weight[ans]-other applied to J of final norm frozen
    zs={}; hs=[]
    for i,a in enumerate(attn):
        hs.append(getattr(a,oname).register_forward_pre_hook(lambda mod,x,i=i:zs.__setitem__(i,x[0].clone())))
    nx={}
    hs.append(norm.register_forward_pre_hook(lambda mod,x:nx.update(x=x[0].clone())))
    out(mm,ids1); [h.remove() for h in hs]
    x=nx['x'][0,-1]
    with torch.no_grad():
        y=norm(nx['x'])[0,-1]
        if 'LayerNorm' in type(norm).__name__ and norm.bias is not None if hasattr(norm,'bias') else False:
            sd=(x.var(unbiased=False)+norm.eps).sqrt(); f=lambda c:(c-c.mean(-1,keepdim=True))/sd*norm.weight
        else:
            g=y/x; f=lambda c:c*g
        W=mm.get_output_embeddings().weight; dirn=W[5]-W[9]
        r=torch.zeros(len(attn),4,dtype=torch.float64)
        for i,a in enumerate(attn):
            o=getattr(a,oname); w=o.weight if type(o).__name__!='Conv1D' else o.weight.T; d=w.shape[1]//4
            for h in range(4): r[i,h]=(f(zs[i][0,-1,h*d:(h+1)*d]@w[:,h*d:(h+1)*d].T)@dirn)*scale
    got=regard.direct_logits.attribute_logits(mm,ids1,5,versus=9)
    return torch.as_tensor(got.heads),r
for n in 'Llama Qwen2 Mistral Phi3 Starcoder2 StableLm Olmo Arcee Nemotron'.split():
    mm=fam(n)
    report(f'attribute_logits {n}',lambda:dl(mm,[l.self_attn for l in mm.model.layers],norm=mm.model.norm),1e-6)
mm=fam('Granite',residual_multiplier=.3,logits_scaling=2.)
report('attribute_logits Granite',lambda:dl(mm,[l.self_attn for l in mm.model.layers],norm=mm.model.norm,scale=.3/2.),1e-6)
torch.manual_seed(1); g2=T.GPT2LMHeadModel(T.GPT2Config(vocab_size=64,n_embd=32,n_layer=3,n_head=4,n_positions=64)).double().eval()
for p in g2.parameters(): nn.init.normal_(p,std=.2)
report('attribute_logits GPT2',lambda:dl(g2,[l.attn for l in g2.transformer.h],'c_proj',g2.transformer.ln_f),1e-6)
gx=T.GPTNeoXForCausalLM(T.GPTNeoXConfig(vocab_size=64,hidden_size=32,intermediate_size=48,num_hidden_layers=3,num_attention_heads=4,max_position_embeddings=64)).double().eval()
for p in gx.parameters(): nn.init.normal_(p,std=.2)
report('attribute_logits NeoX',lambda:dl(gx,[l.attention for l in gx.gpt_neox.layers],'dense',gx.gpt_neox.final_layer_norm),1e-6)
for n in ('Gemma2','Gemma3','Olmo2','Glm4','Cohere','GptOss'):
    def f():
        mm=fam(n,**(dict(head_dim=8) if n!='Cohere' and n!='Olmo2' else {}),**(dict(dt=torch.float32,num_local_experts=2,num_experts_per_tok=1) if n=='GptOss' else {})) if n!='Gemma3' else llama(T.Gemma3ForCausalLM,T.Gemma3TextConfig,head_dim=8)
        r=regard.direct_logits.attribute_logits(mm,ids1,5,versus=9)
        # oracle by linear response: freeze everything except final-norm: scale z of head at last position in a frozen-later-layers model is difficult; compare last-layer heads in pre-final norm model with frozen norm via finite diff
        L=len(mm.model.layers)-1; a=mm.model.layers[L].self_attn
        # freeze mlp of last layer & post norms: capture outputs
        return f'ok (returned, {torch.as_tensor(r.heads).abs().max():.3f})'
    report(f'attribute_logits {n}',f)
# effect
def f():
    r=ab.effect(m,lambda mm:mm(ids,labels=ids),heads=[(1,2)])
    b=m(ids,labels=ids)
    with wz(m,1,2): w=m(ids,labels=ids)
    print(r.__dict__ if hasattr(r,'__dict__') else [x for x in dir(r) if x[0]!='_'])
    kl=(b.logits[:,-1].log_softmax(-1).exp()*(b.logits[:,-1].log_softmax(-1)-w.logits[:,-1].log_softmax(-1))).sum(-1)
    print('want',(b.logits-w.logits).abs().max().item(),kl.tolist(),b.logits[:,-1].argmax(-1).tolist(),w.logits[:,-1].argmax(-1).tolist(),b.loss.item(),w.loss.item())
    return 'ok?'
report('effect',f)
def f():
    ar=torch.ones_like(ids); ar[0,5:]=0
    r=ab.effect(m,lambda mm:mm(ids,attention_mask=ar),heads=[(1,2)]); print(r)
    b=out(m,ids,attention_mask=ar)
    with wz(m,1,2): w=out(m,ids,attention_mask=ar)
    for i,p in ((0,4),(0,6),(1,6)): print('want',i,p,b[i,p].argmax().item(),w[i,p].argmax().item(),(b[i,p].log_softmax(-1).exp()*(b[i,p].log_softmax(-1)-w[i,p].log_softmax(-1))).sum().item())
    print((b-w).abs()[ar.bool()].max().item(),(b-w).abs().max().item())
    return 'ok?'
report('effect right padded',f)
# average_outputs
def f():
    zs=[]
    h=A[1].o_proj.register_forward_pre_hook(lambda mod,a:zs.append(a[0].clone()))
    x1=torch.randint(3,64,(2,6)); a1=torch.ones_like(x1); a1[0,:2]=0; x2=torch.randint(3,64,(1,9))
    with regard.watch(m,keep='qkv') as s1, torch.no_grad(): m(x1,attention_mask=a1)
    with regard.watch(m,keep='qkv') as s2, torch.no_grad(): m(x2)
    h.remove(); rows=torch.cat([zs[0][a1.bool()],zs[1][0]]).mean(0)
    mean=ab.average_outputs(s1,s2)
    def pre(mod,a): x=a[0].clone(); x[...,16:24]=rows[16:24]; return (x,)
    h=A[1].o_proj.register_forward_pre_hook(pre); w=out(m,ids,attention_mask=am); h.remove()
    with regard.patch_heads(m,mean,[(1,2)]): g=out(m,ids,attention_mask=am)
    v=am.bool(); return g[v],w[v],out(m,ids,attention_mask=am)[v]
report('average_outputs padded',f,1e-6)
# record_path
def f():
    src=ids1.flip(1); 
    with regard.watch(m,keep='qkv') as s, torch.no_grad(): m(src)
    path=ab.record_path(m,ids1,s,[(0,1)])
    with regard.patch_heads(m,path,[(2,3)],parts='q'): g=out(m,ids1)
    # oracle
    zc={};zs={}
    hs=[a.o_proj.register_forward_pre_hook(lambda mod,x,i=i:zc.__setitem__(i,x[0].clone())) for i,a in enumerate(A)]; b=out(m,ids1); [h.remove() for h in hs]
    hs=[a.o_proj.register_forward_pre_hook(lambda mod,x,i=i:zs.__setitem__(i,x[0].clone())) for i,a in enumerate(A)]; out(m,src); [h.remove() for h in hs]
    def pre(i):
        def f(mod,x):
            z=zc[i].clone()
            if i==0: z[...,8:16]=zs[0][...,8:16]
            return (z,)
        return f
    q={}
    hs=[a.o_proj.register_forward_pre_hook(pre(i)) for i,a in enumerate(A)]+[A[2].q_proj.register_forward_hook(lambda mod,x,o:q.update(q=o.clone()))]; out(m,ids1); [h.remove() for h in hs]
    def post(mod,x,o): o=o.clone(); o[...,24:32]=q['q'][...,24:32]; return o
    h=A[2].q_proj.register_forward_hook(post); w=out(m,ids1); h.remove()
    return g,w,b
report('record_path',f,1e-6)
# search variants
with regard.watch(m,keep='qkv') as S, torch.no_grad(): m(ids1.flip(1))
def sw(q=None):
    zs={}
    hs=[a.o_proj.register_forward_pre_hook(lambda mod,x,i=i:zs.__setitem__(i,x[0].clone())) for i,a in enumerate(A)]; out(m,ids1.flip(1)); [h.remove() for h in hs]
    r=torch.zeros(3,4).double(); b=out(m,ids1)[0,-1,5]
    for l in range(3):
        for hd in range(4):
            def pre(mod,a):
                x=a[0].clone(); qq=q if q is not None else slice(None); x[:,qq,hd*8:hd*8+8]=zs[l][:,qq,hd*8:hd*8+8]; return (x,)
            h=A[l].o_proj.register_forward_pre_hook(pre); r[l,hd]=out(m,ids1)[0,-1,5]; h.remove()
    return r
me=lambda lo:lo[:,-1,5]
for n,k in dict(b1=dict(batch=1),b3=dict(batch=3),b100=dict(batch=100),kw=dict(),q=dict(queries=[2,-1])).items():
    report(f'search {n}',lambda:(torch.as_tensor(ab.search_heads(m,{'input_ids':ids1,'logits_to_keep':1} if n=='kw' else ids1,S,me,**k).values),sw([2,-1] if n=='q' else None)),1e-6)
def f():
    r=ab.search_heads(m,ids1,S,me,layers=[1],queries=[slice(i,i+1) for i in range(8)]); v=torch.as_tensor(r.values)
    return v[1],torch.stack([sw([i])[1] for i in range(8)],-1)
report('search places',f,1e-6)
def f():
    ep=torch.tensor([[0,0,0,1,1,1,1,1]])
    with regard.watch(m,keep='qkv') as s, torch.no_grad(): m(ids1.flip(1),attention_mask=ep)
    r=torch.as_tensor(ab.search_heads(m,dict(input_ids=ids1,attention_mask=ep),s,me,queries=[1]).values); w=torch.zeros(3,4).double()
    for l in range(3):
        for h in range(4):
            with regard.patch_heads(m,s,[(l,h)],queries=[1]): w[l,h]=out(m,ids1,attention_mask=ep)[0,-1,5]
    return r,w
report('search padded',f,1e-6)
def f():
    bad=lambda lo: lo[:,-1,5].mean()
    return str(ab.search_heads(m,ids1,S,bad).values)[:80]
report('search measure one number',f)
def f():
    bad=lambda lo: lo[0,-1,5]
    return 'DEFECT? '+str(ab.search_heads(m,ids1,S,bad).values)[:80]
report('search measure lo[0]',f)
def f():
    bad=lambda lo: lo[:,-1,5]-lo[:,-1,5].mean()
    return (torch.as_tensor(ab.search_heads(m,ids1,S,bad).values),torch.zeros(3,4))
report('search measure uses the batch (mean over B)',f)
class Stateful:
    n=0
    def __call__(s,lo): s.n+=1; return lo[:,-1,5]+s.n
class BM(nn.Module):  # model with batch coupling
    def __init__(s): super().__init__(); s.m=m
    def forward(s,t):
        lo=s.m(t).logits; return lo-lo.mean(0,keepdim=True)+lo[:1]*0
report('search batch coupled model',lambda:(torch.as_tensor(ab.search_heads(BM(),ids1,S,me).values),torch.zeros(3,4).double()),1e-6)
class BM2(nn.Module):
    def __init__(s): super().__init__(); s.inner=m
    def forward(s,t): return s.inner(t.T.contiguous().T).logits.transpose(0,1)
report('search output seq-first',lambda:(torch.as_tensor(ab.search_heads(BM2(),ids1,S,lambda lo:lo[:,-1,5]).values),sw()),1e-6)
# reentrant checkpoint, backward after block
m.train(); m.gradient_checkpointing_enable(dict(use_reentrant=True))
def f():
    m.zero_grad(); m.enable_input_require_grads()
    with K(m,heads=[(1,2)]): lo=m(ids,labels=ids,use_cache=False).loss
    lo.backward(); g=torch.cat([p.grad.flatten() for p in m.parameters()]); return g,grads(m,wz(m,1,2)),grads(m,contextlib.nullcontext())
report('reentrant checkpoint, backward after block',f,1e-8)
