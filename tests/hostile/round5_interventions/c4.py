from h5x import *
from hand import V, Base, Model, edit, DIM, H, D, sm
print('=====')
ids1=torch.randint(3,64,(1,8))
# Olmo / Nemotron with right oracle
for n in ('Olmo','Nemotron'):
    mm=llama(getattr(T,n+'ForCausalLM'),getattr(T,n+'Config')); nx={};zs={}
    hs=[l.self_attn.o_proj.register_forward_pre_hook(lambda mod,x,i=i:zs.__setitem__(i,x[0].clone())) for i,l in enumerate(mm.model.layers)]+[mm.model.norm.register_forward_pre_hook(lambda mod,x:nx.update(x=x[0]))]
    out(mm,ids1); [h.remove() for h in hs]
    x=nx['x'][0,-1]; sd=(x.var(unbiased=False)+1e-5).sqrt(); w=mm.model.norm.weight+1 if n=='Nemotron' else 1.
    dirn=mm.lm_head.weight[5]-mm.lm_head.weight[9]
    r=torch.stack([torch.stack([(((c:=zs[i][0,-1,h*8:h*8+8]@mm.model.layers[i].self_attn.o_proj.weight[:,h*8:h*8+8].T)-c.mean())/sd*w)@dirn for h in range(4)]) for i in range(3)])
    report(f'attribute_logits {n} right oracle',lambda:(torch.as_tensor(regard.direct_logits.attribute_logits(mm,ids1,5,versus=9).heads),r),1e-4)
torch.manual_seed(1)
def mk(c):
    torch.manual_seed(1); m=Model(c,3).double().eval()
    for p in m.parameters():
        if p.dim()>1: nn.init.normal_(p,std=.25)
    return m
t=torch.randint(0,32,(3,9)); lens=[4,9,6]
class SortLen(Base):  # sorts the batch by a key, attends, restores
    def native(s,x):
        i=x.pow(2).sum((1,2)).argsort(); q,k,v=[y[i] for y in s.heads(x)]
        z=Fn.scaled_dot_product_attention(q,k,v,is_causal=True); return s.outp(z[i.argsort()],x)
m1=mk(SortLen); b=out(m1,t)
with K(m1,layers=[1],keys=[slice(0,1),None,None],queries=slice(2,None)): g=out(m1,t)
print('SortLen: asked sequence 0; changed sequences',[(g[i]-b[i]).abs().max().item() for i in range(3)])
class Flip(Base):
    def native(s,x):
        q,k,v=[y.flip(0) for y in s.heads(x)]; return s.outp(Fn.scaled_dot_product_attention(q,k,v,is_causal=True).flip(0),x)
m1=mk(Flip)
with regard.watch(m1,keep='qkv') as rec, torch.no_grad(): m1(t[1:2])
me=lambda lo:lo[:,-1,5]
s=torch.as_tensor(ab.search_heads(m1,t[:1],rec,me).values); w=torch.zeros(3,4).double()
for l in range(3):
    for h in range(4):
        with regard.patch_heads(m1,rec,[(l,h)]): w[l,h]=me(out(m1,t[:1]))
print('Flip search',s,w)
class CFG(Base): # batch doubled inside: [unconditional, conditional]
    def native(s,x):
        q,k,v=[torch.cat([y*0,y]) for y in s.heads(x)]; return s.outp(Fn.scaled_dot_product_attention(q,k,v,is_causal=True)[len(x):],x)
m1=mk(CFG); m2=mk(V['GQA_sdpa' if False else 'GatePerHead'])
aw=ab.attribute_weights(m1,t[:1],me); print('CFG cells sum vs heads',torch.as_tensor(aw.cells(1,2)).sum().item(),torch.as_tensor(aw.heads)[1,2].item(), torch.as_tensor(aw.cells(1,2)).shape)
wv=regard.value_weights.weigh_values(m1,t[:1]); print('weigh cells',torch.as_tensor(wv.cells(1,2)).shape,torch.as_tensor(wv.cells(1,2)).abs().max().item())
# Swin-like windows: cells
class Win(Base):
    causal=False
    def native(s,x):
        B,N,_=x.shape; q,k,v=[y.view(B,H,3,3,D).transpose(1,2).reshape(B*3,H,3,D) for y in s.heads(x)]
        z=Fn.scaled_dot_product_attention(q,k,v).view(B,3,H,3,D).transpose(1,2).reshape(B,H,N,D); return s.outp(z,x)
m1=mk(Win)
for nme,f in dict(aw=lambda:(lambda a:(torch.as_tensor(a.cells(1,2)).shape,torch.as_tensor(a.cells(1,2)).sum().item(),torch.as_tensor(a.heads)[1,2].item()))(ab.attribute_weights(m1,t[:1],me)),wv=lambda:torch.as_tensor(regard.value_weights.weigh_values(m1,t[:1]).cells(1,2)).shape,search=lambda:'-').items():
    try: print('Win',nme,f())
    except Exception as e: print('Win',nme,type(e).__name__,e)
b=out(m1,t)
with K(m1,layers=[1],keys=[0]): g=out(m1,t); print('Win keys=[0] rows changed in layer 1..', ((g-b).abs().amax(-1)>1e-9)[0].tolist())
try:
    with K(m1,layers=[1],keys=[slice(0,1),None,None]): g=out(m1,t); print('Win per seq',((g-b).abs().amax(-1)>1e-9).any(1).tolist())
except Exception as e: print('Win per seq',e)
# weights used downstream
class MW(nn.Module):
    def __init__(s,own): super().__init__(); s.e=nn.Embedding(64,32); s.a=nn.MultiheadAttention(32,4,batch_first=True); s.h=nn.Linear(32,64); s.g=nn.Linear(32,32); s.own=own
    def forward(s,t):
        x=s.e(t)
        if not s.own: y,w=s.a(x,x,x,need_weights=True,average_attn_weights=False)
        else:
            q,k,v=[u.view(*t.shape,4,8).transpose(1,2) for u in Fn.linear(x,s.a.in_proj_weight,s.a.in_proj_bias).chunk(3,-1)]
            w=(q@k.mT/8**.5).softmax(-1); y=s.a.out_proj((w@v).transpose(1,2).flatten(2))
        return s.h(x+y)+w.mean(1)@s.h(s.g(x))   # pointer / copy term
for own in (False,True):
    torch.manual_seed(4); mm=MW(own).double().eval(); b=out(mm,t)
    o=mm.a.out_proj.weight.data; w0=o.clone(); o[:,16:24]=0; want=out(mm,t); o.copy_(w0)
    with K(mm,heads=[(0,2)]): g=out(mm,t)
    print('weights used downstream, own =',own,'knock_out vs zeroed slice',(g-want).abs().max().item(),'edit',(b-want).abs().max().item())
# NaN padded: message
mb=rnd=T.BloomForCausalLM(T.BloomConfig(vocab_size=64,hidden_size=32,n_layer=3,n_head=4)).double().eval()
print('bloom f64 left padded has NaN:',torch.isnan(out(mb,ids,attention_mask=am)).any().item())
