import torch, torch.nn as nn, torch.nn.functional as F, regard, transformers as T
from regard import ablate as ab
torch.manual_seed(0)
m=T.SwinForImageClassification(T.SwinConfig(image_size=16,patch_size=2,embed_dim=32,depths=[2],num_heads=[4],window_size=4,num_labels=5)).double().eval()
for p in m.parameters():
    if p.dim()>1: nn.init.normal_(p,std=.2)
x=torch.randn(1,3,16,16).double(); me=lambda lo: lo[:,3]
zs={}
at=[n for n,_ in m.named_modules() if n.endswith('attention.o_proj')]
mods=dict(m.named_modules())
hs=[mods[n].register_forward_pre_hook(lambda mod,a,n=n:(a[0].retain_grad(),zs.__setitem__(n,a[0]))[1]) for n in at]
m(pixel_values=x).logits[0,3].backward(); [h.remove() for h in hs]
want=torch.stack([(zs[n]*zs[n].grad).reshape(-1,4,8).sum((0,2)) for n in at])
one=torch.stack([(zs[n]*zs[n].grad).reshape(4,-1,4,8)[0].sum((0,2)) for n in at])
try:
    a=ab.attribute_weights(m,{'pixel_values':x},me); print('Swin attribute_weights',a.heads,'\nwant',want,'\nonly window 0',one, a.cells(0,0).shape)
except Exception as e: print('Swin aw',type(e).__name__,e)
with regard.watch(m,keep='qkv') as rec, torch.no_grad(): m(pixel_values=torch.randn(1,3,16,16).double())
try:
    s=ab.search_heads(m,{'pixel_values':x},rec,me)
    w=torch.zeros(2,4).double()
    for l in range(2):
        for h in range(4):
            with regard.patch_heads(m,rec,[(l,h)]), torch.no_grad(): w[l,h]=me(m(pixel_values=x).logits)
    print('Swin search',(torch.as_tensor(s.values)-w).abs().max())
except Exception as e: print('Swin search',type(e).__name__,e)
try: print('Swin attribute_heads',ab.attribute_heads(m,{'pixel_values':x},rec,me).changes)
except Exception as e: print('Swin attribute_heads',type(e).__name__,e)
# minimal handwritten: windows of 3 tokens, 4 heads
class Attn(nn.Module):
    def __init__(s): super().__init__(); s.i, s.o = nn.Linear(32, 96), nn.Linear(32, 32)
    def forward(s, x):
        b, n, _ = x.shape
        q, k, v = s.i(x).view(b * n // 3, 3, 3, 4, 8).permute(2, 0, 3, 1, 4)
        s.z = F.scaled_dot_product_attention(q, k, v)
        return s.o(s.z.transpose(1, 2).reshape(b, n, 32))
torch.manual_seed(0); a = Attn().eval(); x2 = torch.randn(1, 9, 32)
got = ab.attribute_weights(a, x2, lambda y: y.pow(2).sum((1, 2)))
y = a(x2); g, = torch.autograd.grad(y.pow(2).sum(), a.z)
print('handwritten got',got.heads, 'want',(a.z * g).sum((0, 2, 3)).tolist(),'window 0', (a.z * g)[0].sum((1, 2)).tolist()); print(got)
# root module softmax message
class R(nn.Module):
    def __init__(s,B=False): super().__init__(); s.e=nn.Embedding(64,32); s.i=nn.Linear(32,96); s.o=nn.Linear(32,64)
    def forward(s,t):
        q,k,v=[u.view(*t.shape,4,8).transpose(1,2) for u in s.i(s.e(t)).chunk(3,-1)]
        return s.o(((q@k.mT/8**.5).softmax(-1)@v).transpose(1,2).flatten(2))
r=R().eval()
for sh in ((1,9),(3,9),(2,9)):
    for nm,mm in (('root',r),('child',nn.Sequential(r))):
        try:
            with torch.no_grad(), regard.knock_out(mm,heads=[(0,2)]): mm(torch.randint(0,64,sh)); print(sh,nm,'ok')
        except Exception as e: print(sh,nm,e)
# effect right padded
