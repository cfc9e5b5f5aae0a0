from h import *; from o import logged,compare; from m import CF
import sys
def tok(*s,seed=1):
    g=torch.Generator().manual_seed(seed); return torch.randint(3,97,s,generator=g)
x=tok(1,12)
KW=dict(max_new_tokens=12,min_new_tokens=12,do_sample=False,pad_token_id=0)
for impl in ("sdpa","eager"):
    m=build(CF["mistral"](),impl=impl); d=build(CF["mistral"](),impl=impl)
    with torch.no_grad(): torch.manual_seed(1); [p.add_(.02*torch.randn(p.shape)) for p in d.parameters()]
    calls=[]
    h=d.model.register_forward_pre_hook(lambda mod,a,k:calls.append((k.get("input_ids").tolist(),None if k.get("attention_mask") is None else tuple(k["attention_mask"].shape) if torch.is_tensor(k["attention_mask"]) else type(k["attention_mask"]), k.get("position_ids"))),with_kwargs=True)
    with regard.watch(m,keep="qkv") as a, regard.watch(d,keep="qkv") as b, torch.no_grad(): o=m.generate(x,assistant_model=d,**KW)
    print(o.tolist()); print(b); print(b.recording.tokens,b.recording.notes)
    for c in calls: print(c)
    r=b.layer(0); print(r.q_positions.tolist(),r.k_positions.tolist(), r.mask); print(T(r.weights())[1].numpy().round(2))
    # truth: log softmaxes in draft
    m2=build(CF["mistral"](),impl="eager"); d2=ref_model(d)
    with torch.no_grad(): log=logged(d2,lambda dd:m2.generate(x,assistant_model=dd,**KW))
    L=log["model.layers.0.self_attn"]; print([tuple(t.shape) for t in L])
    for t in L[:14]: print(t[0,1,-1].numpy().round(2))
    compare("assisted draft mistral by softmaxes",b,log)
