from h import *; from m import CF
for n in ("falcon","falcon_alibi","diffllama"):
    m=build(CF[n](),impl="sdpa"); ref=build(CF[n](),impl="eager")
    ref.load_state_dict(m.state_dict())
    x=torch.randint(3,97,(1,9))
    with regard.watch(m,keep="qkv") as s, torch.no_grad(): m(x)
    print(s); print([r.name for r in s.records],[tuple(r.q.shape) for r in s.records],[tuple(r.v.shape) for r in s.records])
    check(n+" sdpa vs eager built",s,ref,[x[0].tolist()],allow_last=False)
n="deepseek_v3"; m=build(CF[n](),impl="eager"); 
x=torch.randint(3,97,(1,9))
with regard.watch(m,keep="qkv") as s, torch.no_grad(): m(x)
print(s)
with regard.watch(m,keep="qkv") as s, torch.no_grad(): m(x,use_cache=False)
print(s)
