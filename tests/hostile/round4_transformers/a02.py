from h import *; from m import CF
m=build(CF['falcon_alibi'](),impl="sdpa"); ref=build(CF['falcon_alibi'](),impl="eager"); ref.load_state_dict(m.state_dict())
x=torch.randint(3,97,(1,9))
with torch.no_grad(): print((m(x).logits-ref(x).logits).abs().max())
# deepseek reported?
for n in ("deepseek_v3","deepseek_v2"):
  m=build(CF[n](),impl="eager")
  x=torch.randint(3,97,(2,9)); am=torch.ones_like(x); am[0,:3]=0
  for nm,f in {"batch2":lambda:m(x),"pad":lambda:m(x,attention_mask=am),"gen nopad":lambda:m.generate(x,max_new_tokens=3,do_sample=False,pad_token_id=0)}.items():
    with regard.watch(m,keep="qkv") as s, torch.no_grad(): f()
    print(n,nm,s)
