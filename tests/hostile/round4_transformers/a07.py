from h import *; from m import CF
def tok(*s,seed=1):
    g=torch.Generator().manual_seed(seed); return torch.randint(3,97,s,generator=g)
# what exactly makes DeepSeek eager unreadable
m=build(CF['deepseek_v3'](),impl="eager"); x=tok(2,9)
for nm,am in {"ones":torch.ones(2,9).long(),"right pad":torch.tensor([[1]*6+[0]*3,[1]*9]),"left pad":torch.tensor([[0]*3+[1]*6,[1]*9]),"hole":torch.tensor([[1,1,0]+[1]*6,[1]*9])}.items():
    with regard.watch(m,keep="qkv") as s, torch.no_grad(): m(x,attention_mask=am)
    print(nm,str(s).replace("\n"," / ")[:330])
b=torch.ones(9,9).bool().tril(); b[0]=False
with regard.watch(m,keep="qkv") as s, torch.no_grad(): m(tok(1,9),attention_mask=torch.where(b,0.,torch.finfo(torch.float32).min)[None,None])
print("4D one row of all hidden",str(s).replace("\n"," / ")[:330])
for fam in ("glm4_moe_lite","deepseek_v2","kimi_k2","minicpm3","longcat_flash","youtu"):
    try:
        base=dict(vocab_size=97,hidden_size=32,intermediate_size=40,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=4,max_position_embeddings=256,q_lora_rank=16,kv_lora_rank=16,qk_rope_head_dim=4,qk_nope_head_dim=8,v_head_dim=12,n_routed_experts=4,moe_intermediate_size=16,num_experts_per_tok=2,n_group=2,topk_group=1)
        m=build(transformers.AutoConfig.for_model(fam,**base),impl="eager")
        with regard.watch(m,keep="qkv") as s, torch.no_grad(): m(x,attention_mask=torch.tensor([[0]*3+[1]*6,[1]*9]))
        print(fam,str(s).replace("\n"," / ")[:330])
    except Exception as e: print(fam,type(e).__name__,str(e)[:80])
# knock_out / row sums / stats on padded
m=build(CF['gemma3'](),impl="sdpa"); r=ref_model(m)
with regard.watch(m,keep="qkv") as s, torch.no_grad(): m.generate(x,attention_mask=torch.tensor([[0]*3+[1]*6,[1]*9]),max_new_tokens=5,do_sample=False,pad_token_id=0)
import inspect
print([n for n in dir(regard.stats) if not n.startswith('_')])
print(inspect.signature(s.table)); t=s.table(); print(str(t)[:300])
for which in range(4):
  for q in (0,1):
    rec=s.layer(which,sequence=q); W=T(rec.weights()); e=-(W.clamp(min=1e-30).log()*W).sum(-1).mean(1)
    print(which,q,float((W.sum(-1)-1).abs().max()), e.tolist())
