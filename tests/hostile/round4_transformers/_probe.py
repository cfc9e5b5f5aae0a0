import torch, regard, transformers
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
c=LlamaConfig(vocab_size=97,hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,max_position_embeddings=128)
m=LlamaForCausalLM(c).eval()
m.set_attn_implementation("eager")
x=torch.randint(3,97,(2,9)); am=torch.ones_like(x); am[0,:3]=0
with regard.watch(m,keep="qkv") as seen, torch.no_grad():
    o=m.generate(x,attention_mask=am,max_new_tokens=4,do_sample=False)
print(seen)
r=seen.recording
print(type(r)); print(r)
print([ (n) for n in dir(r) if not n.startswith('_')])
print([ (n) for n in dir(seen) if not n.startswith('_')])
print([ (n) for n in dir(seen.records[0]) if not n.startswith('_')])
print(r.sequences if hasattr(r,'sequences') else '')
rec=seen.layer(0,sequence=0)
print(rec); print(rec.weights().shape)
help(type(seen).layer); help(type(rec).weights)
for rec in seen.records: print(rec.layer if hasattr(rec,'layer') else '', rec.weights().shape)
print(seen.coverage())
