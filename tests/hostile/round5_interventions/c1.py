from hand import *
torch.manual_seed(1); m=Model(V['GQA_sdpa']).double().eval()
ids=torch.randint(0,32,(1,9)); src=torch.randint(0,32,(1,9))
with regard.watch(m,keep='qkv') as rec, torch.no_grad(): m(src)
meas=lambda lo: lo[:,-1,5]
s=ab.search_heads(m,ids,rec,meas)
b=out(m,ids)[0,-1,5]
w=torch.zeros(3,4).double()
for l in range(3):
    for h in range(4):
        with regard.patch_heads(m,rec,[(l,h)]): w[l,h]=out(m,ids)[0,-1,5]-b
print(s.values); print(w,b); print(s)
a=ab.attribute_heads(m,ids,rec,meas); print([x for x in dir(a) if x[0]!='_'])
