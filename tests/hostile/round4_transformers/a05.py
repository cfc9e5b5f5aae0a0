from h import *; from m import CF
# gpt-oss from a single BOS token
for impl in ("eager","flex_attention"):
  try:
    m=build(CF['gpt_oss'](),impl=impl)
    with regard.watch(m,keep="qkv") as s, torch.no_grad(): o=m.generate(torch.tensor([[1]]),max_new_tokens=6,min_new_tokens=6,do_sample=False,pad_token_id=0)
    print(impl,"BOS generate",s,s.records)
    with regard.watch(m,keep="qkv") as s, torch.no_grad(): o=m.generate(torch.tensor([[1,5]]),max_new_tokens=6,min_new_tokens=6,do_sample=False,pad_token_id=0)
    print(impl,"2 tokens",s)
  except Exception as e: print(impl,type(e),str(e)[:200])
# sinks: is this because of the single key? in bf16
m=build(CF['gpt_oss'](),impl="eager",dtype=torch.bfloat16)
with regard.watch(m,keep="qkv") as s, torch.no_grad(): m(torch.tensor([[1]]))
print("bf16",s)
# bloom all hidden
m=build(CF['bloom'](),impl="eager"); x=torch.randint(3,97,(2,5)); am=torch.ones_like(x); am[0]=0
with regard.watch(m,keep="qkv") as s, torch.no_grad(): w=m(x,attention_mask=am,output_attentions=True).attentions
print(s); print(T(s.layer(0).weights()-w[0][0]).abs().max(), s.layer(0).q[0,:2,:4], s.layer(0))
# llama all hidden
m=build(CF['llama'](),impl="eager")
with regard.watch(m,keep="qkv") as s, torch.no_grad(): w=m(x,attention_mask=am,output_attentions=True).attentions
print(s, s.recording.sequences, s.recording.tokens)
