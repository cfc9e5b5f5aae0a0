from h import *; from m import CF
names=sys.argv[1].split(',') if len(sys.argv)>1 else list(CF)
def go(n,impl):
    m=build(CF[n](),impl=impl)
    ref=ref_model(m)
    g=torch.Generator().manual_seed(1)
    x=torch.randint(3,97,(2,9),generator=g); am=torch.ones_like(x); am[0,:3]=0; x[0,:3]=0
    kw=dict(attention_mask=am,max_new_tokens=6,min_new_tokens=6,do_sample=False,pad_token_id=0,eos_token_id=2)
    with torch.no_grad(): a=m.generate(x,**kw)
    with regard.watch(m,keep="qkv") as seen, torch.no_grad(): b=m.generate(x,**kw)
    exp=[a[i].tolist()[(3 if i==0 else 0):] for i in range(2)]
    check(f"{n} {impl} generate left-padded",seen,ref,exp,same=same(a,b))
for n in names:
    for impl in ("eager","sdpa"):
        run(f"{n} {impl} generate left-padded",lambda:go(n,impl))
done()
