from h2 import *
print('=====')
# odd trunks
class TBM(Model):  # batch second trunk
    def forward(s,t):
        x=s.e(t)
        for a,n,f in zip(s.a,s.n,s.f): x=x+a(n(x)); x=x+f(x)
        return s.h(x)
V2={}
def var(c): V2[c.__name__]=c; return c
@var
class PaddedHeads(Base):   # heads padded to 8 with zeros, cut after
    def native(s,x):
        q,k,v=[Fn.pad(t,(0,0,0,0,0,4)) for t in s.heads(x)]
        return s.outp(Fn.scaled_dot_product_attention(q,k,v,is_causal=True)[:,:H],x)
@var
class PaddedSeq(Base):   # sequence padded to a multiple of 8 on the right
    def native(s,x):
        q,k,v=s.heads(x); N=x.shape[1]; p=-N%8; q,k,v=[Fn.pad(t,(0,0,0,p)) for t in (q,k,v)]
        return s.outp(Fn.scaled_dot_product_attention(q,k,v,is_causal=True)[:,:,:N],x)
@var
class PaddedSeqLeft(Base):
    def native(s,x):
        q,k,v=s.heads(x); N=x.shape[1]; p=-N%8; q,k,v=[Fn.pad(t,(0,0,p,0)) for t in (q,k,v)]
        i=torch.arange(N+p); ok=(i[:,None]>=i)&((i>=p)|(i[:,None]<p))
        return s.outp(Fn.scaled_dot_product_attention(q,k,v,attn_mask=ok)[:,:,p:],x)
@var
class Reversed(Base):   # keys reversed in time
    def native(s,x):
        q,k,v=s.heads(x); N=x.shape[1]
        return s.outp(Fn.scaled_dot_product_attention(q,k.flip(2),v.flip(2),attn_mask=s.allowed(N).flip(1)),x)
@var
class QReversed(Base):
    def native(s,x):
        q,k,v=s.heads(x); N=x.shape[1]
        return s.outp(Fn.scaled_dot_product_attention(q.flip(2),k,v,attn_mask=s.allowed(N).flip(0)).flip(2),x)
@var
class HeadPermuted(Base):  # heads permuted before the kernel, back after it
    def native(s,x):
        p=[2,0,3,1]; inv=[1,3,0,2]
        q,k,v=[t[:,p] for t in s.heads(x)]
        return s.outp(Fn.scaled_dot_product_attention(q,k,v,is_causal=True)[:,inv],x)
@var
class BatchReversed(Base):
    def native(s,x):
        q,k,v=[t.flip(0) for t in s.heads(x)]
        return s.outp(Fn.scaled_dot_product_attention(q,k,v,is_causal=True).flip(0),x)
@var
class BatchSorted(Base): # sorted by something and back
    def native(s,x):
        i=x.sum((1,2)).argsort(); q,k,v=[t[i] for t in s.heads(x)]
        z=Fn.scaled_dot_product_attention(q,k,v,is_causal=True); z2=torch.empty_like(z); z2[i]=z; return s.outp(z2,x)
@var
class BHswap(Base):  # (H,B,N,D) with sdpa
    def native(s,x):
        q,k,v=[t.transpose(0,1) for t in s.heads(x)]
        return s.outp(Fn.scaled_dot_product_attention(q,k,v,is_causal=True).transpose(0,1),x)
@var
class BHswapOwn(Base):
    def native(s,x):
        q,k,v=[t.transpose(0,1) for t in s.heads(x)]; z=sm(s,q@k.mT/math.sqrt(D))@v; return s.outp(z.transpose(0,1),x)
@var
class ThreeD(Base):
    def native(s,x):
        q,k,v=[t.reshape(-1,x.shape[1],D) for t in s.heads(x)]
        return s.outp(Fn.scaled_dot_product_attention(q,k,v,is_causal=True).view(x.shape[0],H,-1,D),x)
@var
class FiveD(Base):
    def native(s,x):
        q,k,v=[t.unsqueeze(1) for t in s.heads(x)]
        return s.outp(Fn.scaled_dot_product_attention(q,k,v,is_causal=True).squeeze(1),x)
@var
class FiveD2(Base):
    def native(s,x):
        q,k,v=[t.unflatten(1,(2,2)) for t in s.heads(x)]
        return s.outp(Fn.scaled_dot_product_attention(q,k,v,is_causal=True).flatten(1,2),x)
@var
class FlatPacked(Base): # all sequences in one with document mask
    def native(s,x):
        B,N,_=x.shape; q,k,v=[t.transpose(0,1).reshape(1,H,B*N,D) for t in s.heads(x)]
        i=torch.arange(B*N); ok=(i[:,None]>=i)&(i[:,None]//N==i//N)
        z=Fn.scaled_dot_product_attention(q,k,v,attn_mask=ok).view(H,B,N,D).transpose(0,1); return s.outp(z,x)
@var
class DupQuery(Base): # computed twice (cfg-like): batch doubled, half thrown away
    def native(s,x):
        q,k,v=[torch.cat([t,t*0]) for t in s.heads(x)]
        return s.outp(Fn.scaled_dot_product_attention(q,k,v,is_causal=True)[:x.shape[0]],x)
@var
class DupQuery2(Base):
    def native(s,x):
        q,k,v=[torch.cat([t*0,t]) for t in s.heads(x)]
        return s.outp(Fn.scaled_dot_product_attention(q,k,v,is_causal=True)[x.shape[0]:],x)
@var
class BatchOuter(Base): # repeat_interleave
    def native(s,x):
        q,k,v=[t.repeat_interleave(2,0) for t in s.heads(x)]
        return s.outp(Fn.scaled_dot_product_attention(q,k,v,is_causal=True)[::2],x)
@var
class UnbatchedView(Base):
    def native(s,x):
        return torch.stack([s.outp(Fn.scaled_dot_product_attention(*[t[0] for t in s.heads(y[None])],is_causal=True)[None],y[None])[0] for y in x])
@var
class TailQuery(Base): # last query apart
    def native(s,x):
        q,k,v=s.heads(x); z1=Fn.scaled_dot_product_attention(q[:,:,:-1],k[:,:,:-1],v[:,:,:-1],is_causal=True); z2=Fn.scaled_dot_product_attention(q[:,:,-1:],k,v); return s.outp(torch.cat([z1,z2],2),x)
@var
class KVChunks(Base): # flash by hand: two key blocks merged by lse
    def native(s,x):
        q,k,v=s.heads(x); N=x.shape[1]; sc=(q@k.mT/math.sqrt(D)).masked_fill(~s.allowed(N),-1e30)
        parts=[]
        for sl in (slice(0,4),slice(4,N)):
            p=sc[...,sl]; parts.append((p.softmax(-1)@v[:,:,sl],p.logsumexp(-1,keepdim=True)))
        w=torch.cat([p[1] for p in parts],-1).softmax(-1); return s.outp(parts[0][0]*w[...,:1]+parts[1][0]*w[...,1:],x)
@var
class KVChunksSigmoid(Base): # two sdpa on key blocks, merged (no causality problems: each row keeps block 0)
    def native(s,x):
        q,k,v=s.heads(x); N=x.shape[1]; sc=(q@k.mT/math.sqrt(D)).masked_fill(~s.allowed(N),-1e30)
        l=[sc[...,sl].logsumexp(-1,keepdim=True) for sl in (slice(0,4),slice(4,N))]; g=torch.sigmoid(l[0]-l[1])
        z0=sc[...,:4].softmax(-1)@v[:,:,:4]; z1=sc[...,4:].softmax(-1)@v[:,:,4:]; return s.outp(z0*g+z1*(1-g),x)
@var
class VConcat(Base): # v augmented with ones, z cut
    def native(s,x):
        q,k,v=s.heads(x); v=torch.cat([v,torch.ones_like(v[...,:2])],-1); return s.outp(Fn.scaled_dot_product_attention(q,k,v,is_causal=True)[...,:D],x)
@var
class VInterHeads(Base): # one value of width H*D per head; takes its own slice
    def native(s,x):
        q,k,v=s.heads(x); vv=s.v(x)[:,None].expand(-1,H,-1,-1); z=sm(s,q@k.mT/math.sqrt(D))@vv; return s.o(torch.cat([z[:,h,:,h*D:(h+1)*D] for h in range(H)],-1))
@var
class OVFused(Base): # v already through W_O per head; sum over heads
    def native(s,x):
        q,k,v=s.heads(x); vo=torch.einsum('bhnd,ehd->bhne',v,s.o.weight.view(DIM,H,D)); return (sm(s,q@k.mT/math.sqrt(D))@vo).sum(1)+s.o.bias
@var
class OVFusedEin(Base): # one einsum sums heads and keys
    def native(s,x):
        q,k,v=s.heads(x); vo=torch.einsum('bhnd,ehd->bhne',v,s.o.weight.view(DIM,H,D)); return torch.einsum('bhnm,bhme->bne',sm(s,q@k.mT/math.sqrt(D)),vo)+s.o.bias
@var
class OVFlatMM(Base): # weights (B,N,H*M) @ vo (B,H*M,E)
    def native(s,x):
        q,k,v=s.heads(x); B,_,N,_=q.shape; vo=torch.einsum('bhnd,ehd->bhne',v,s.o.weight.view(DIM,H,D)).reshape(B,H*N,DIM); w=sm(s,q@k.mT/math.sqrt(D)); return w.transpose(1,2).reshape(B,N,H*N)@vo+s.o.bias
@var
class EinOut3(Base):
    def native(s,x):
        q,k,v=s.heads(x); return torch.einsum('bhnm,bhmd,ehd->bne',sm(s,q@k.mT/math.sqrt(D)),v,s.o.weight.view(DIM,H,D))+s.o.bias
@var
class WReused(Base): # weights used for two values (content, gate)
    def extra(s): s.v2=nn.Linear(DIM,DIM)
    def native(s,x):
        q,k,v=s.heads(x); w=sm(s,q@k.mT/math.sqrt(D)); s.w=w; return s.outp(w@v,x)+(w.mean(1)@s.v2(x))
    def forward(s,x):
        if s.E is None: return s.native(x)
        sc,a,v=s.canon(x); a=s.E.mask(s,a); w=s.weights(sc,a); z=s.E.z(s,w,v,w@v); return s.outp(z,x)+(w.mean(1)@s.v2(x))
@var
class Float32Softmax(Base):
    def native(s,x):
        q,k,v=s.heads(x); sc=(q@k.mT/math.sqrt(D)).masked_fill(~s.allowed(x.shape[1]),float('-inf')); return s.outp(torch.softmax(sc,-1,dtype=torch.float64)@v,x)
@var
class DropMask(Base): # weights multiplied by a head mask (HF head_mask)
    def native(s,x):
        q,k,v=s.heads(x); w=sm(s,q@k.mT/math.sqrt(D))*torch.ones(1,H,1,1,dtype=x.dtype); return s.outp(w@v,x)
@var
class HeadScaleW(Base):
    def extra(s): s.hs=nn.Parameter(torch.rand(H,1,1)+.5)
    def weights(s,sc,a): return super().weights(sc,a)*s.hs
    def native(s,x):
        q,k,v=s.heads(x); w=sm(s,q@k.mT/math.sqrt(D))*s.hs; return s.outp(w@v,x)
@var
class HeadScaleZ(Base):
    def extra(s): s.hs=nn.Parameter(torch.rand(H,1,1)+.5)
    def outp(s,z,x): return super().outp(z*s.hs,x)
    native=V['MHA_bmm'].native
@var
class SplitQKnope(Base): # two score products added
    def native(s,x):
        q,k,v=s.heads(x); sc=q[...,:2]@k[...,:2].mT+q[...,2:]@k[...,2:].mT; return s.outp(sm(s,sc/math.sqrt(D))@v,x)
@var
class MaskedFillAfter(Base): # masked rows zero-filled after softmax (nan_to_num)
    def native(s,x):
        q,k,v=s.heads(x); return s.outp(torch.nan_to_num(sm(s,q@k.mT/math.sqrt(D)))@v,x)
@var
class CompiledSdpa(Base):
    def native(s,x):
        q,k,v=s.heads(x); return s.outp(torch.ops.aten.scaled_dot_product_attention(q,k,v,is_causal=True),x)
@var
class NativeMH(Base):
    def native(s,x):
        q,k,v=s.heads(x); return s.outp(torch._scaled_dot_product_attention(q,k,v,is_causal=True)[0] if hasattr(torch,'_scaled_dot_product_attention') else torch.ops.aten._scaled_dot_product_attention_math(q,k,v,is_causal=True)[0],x)
for n,c in V2.items():
    m=mk(c)
    try: tests(n,m)
    except BaseException as e: print(n,'| SCRIPT',type(e).__name__,e)
