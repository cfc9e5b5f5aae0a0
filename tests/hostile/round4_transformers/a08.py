from h import *; from m import CF
m=build(CF['llama'](),impl="sdpa"); x=torch.randint(3,97,(2,5)); am=torch.ones_like(x); am[0]=0
with regard.watch(m,keep="qkv") as s, torch.no_grad(): m(x,attention_mask=am)
print(s, s.recording.sequences, s.recording.tokens)
for r,q in zip(s.records,s.recording.sequences): print(q,r.name,tuple(r.weights().shape),r.certificate)
for c in s.coverage(): print(c)
