from t06_more import *
from o import logged
cfg,cls,acts,_=M['paligemma']
m=build(cfg(),cls=cls,impl="sdpa"); ref=build(cfg(),cls=cls,impl="eager"); ref.load_state_dict(m.state_dict())
f=lambda m:m.generate(input_ids=ids,pixel_values=img,attention_mask=torch.ones_like(ids),max_new_tokens=1,do_sample=False,return_dict_in_generate=True,output_logits=True).logits[0]
with torch.no_grad(): print("hf eager vs sdpa",(f(m)-f(ref)).abs().max())
import torch.nn.functional as F
old=F.scaled_dot_product_attention
calls=[]
def sd(q,k,v,attn_mask=None,dropout_p=0.,is_causal=False,scale=None,enable_gqa=False,**kk):
    calls.append((tuple(q.shape),tuple(k.shape),None if attn_mask is None else (attn_mask.dtype,attn_mask.shape,attn_mask[0,0,0,:6].tolist(),attn_mask[0,0,-1,:].float().mean().item()),is_causal,q.detach().clone(),k.detach().clone(),scale))
    return old(q,k,v,attn_mask=attn_mask,dropout_p=dropout_p,is_causal=is_causal,scale=scale,enable_gqa=enable_gqa)
F.scaled_dot_product_attention=sd
with torch.no_grad(): f(m)
F.scaled_dot_product_attention=old
for c in calls: print(c[:4],c[6])
with torch.no_grad(): log=logged(ref,f)
with regard.watch(m,keep="qkv") as s, torch.no_grad(): f(m)
print(s)
r=[q for q in s.records if "language_model.layers.0" in q.name][0]
print(r.mask, T(r.weights())[0,0].numpy().round(3)); print(log["model.language_model.layers.0.self_attn"][0][0,0,0].numpy().round(3))
c=[c for c in calls if c[0][2]==23][0]
q,k=c[4],c[5].repeat_interleave(c[4].shape[1]//c[5].shape[1],1); w=(q@k.mT*(c[6] or q.shape[-1]**-.5))
if c[3]: w=w.masked_fill(~torch.ones(23,23).bool().tril(),-1e30)
w=w.softmax(-1); print("own sdpa row 0",w[0,0,0].numpy().round(3), "max diff to shown", (w[0]-T(r.weights())).abs().max())
