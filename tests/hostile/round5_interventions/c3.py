from h2 import *
print('=====')
class Two(Base):  # distance attention with 4 heads, then sdpa with 4 heads, in one module
    def extra(s): s.p=nn.Linear(DIM,H*D); s.po=nn.Linear(H*D,DIM)
    def d(s,x):
        t=s.p(x).view(*x.shape[:2],H,D).transpose(1,2); z=(-torch.cdist(t,t)).softmax(-1)@t
        return s.po(z.transpose(1,2).reshape(*x.shape[:2],-1))
    def forward(s,x): return super().forward(x+s.d(x))
    def native(s,x):
        q,k,v=s.heads(x); return s.outp(Fn.scaled_dot_product_attention(q,k,v,is_causal=True),x)
m=mk(Two)
with regard.watch(m,keep='qkv') as rec, torch.no_grad(): m(src)
print(rec)
CAP={}
with edit(m,z=lambda l,w,v,z:CAP.setdefault(l,z)): out(m,src)
for h in [(1,2),('a.1',2),('a.1#2',2),(3,2),(2,2)]:
    for l in (0,1,2):
        T(f'patch rec {h} vs a.{l}',m,lambda:regard.patch_heads(m,rec,[h]),dict(z=zed(l,2,lambda w,v,z:CAP[l].expand_as(z))))
try:
    s=ab.search_heads(m,one,rec,lambda lo:lo[:,-1,5]); print(s.layers if hasattr(s,'layers') else '', torch.as_tensor(s.values)-s.before)
    b=out(m,one)[0,-1,5]
    for l in range(3):
        r=[]
        for h in range(4):
            with edit(m,z=zed(l,h,lambda w,v,z:CAP[l])): r.append((out(m,one)[0,-1,5]-b).item())
        print(r)
except Exception as e: print(type(e),e)
try:
  a=ab.attribute_heads(m,one,rec,lambda lo:lo[:,-1,5]); print(a.layers,a.changes)
except Exception as e: print(type(e),e)
try:
  a=ab.attribute_weights(m,one,lambda lo:lo[:,-1,5]); print(a.layers,a.heads)
except Exception as e: print(type(e),e)
# simlog: number
class Sim(Base):
    def native(s,x):
        s.sim=(x@x.mT).softmax(-1); q,k,v=s.heads(x); return s.outp(Fn.scaled_dot_product_attention(q,k,v,is_causal=True),x)
m=mk(Sim)
with K(m,layers=[0]): print('Sim layer 0 nothing:',torch.equal(out(m,one),out(mk(Sim),one)))
