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
def grads(mm,cm,x=ids):
    mm.zero_grad(); 
    with cm: mm(x,labels=x).loss.backward()
    return torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros_like(p).flatten() for p in mm.parameters()])
