# interventions on handwritten styles: hand-edited forward as oracle
from lib import *
import contextlib
ED=None  # dict(z=fn(layer,z(B,H,T,D)), a=fn(layer,a(B,H,T,S)))
def ez(i,z): return ED["z"](i,z) if ED and "z" in ED else z
def ea(i,a): return ED["a"](i,a) if ED and "a" in ED else a
class Attn(nn.Module):
    def __init__(s,i,style,C=12,H=3):
        super().__init__(); s.i,s.style,s.H,s.D=i,style,H,C//H
        s.qkv=nn.Linear(C,3*C); s.o=nn.Linear(C,C); s.sink=nn.Parameter(torch.randn(H)); s.g=nn.Linear(C,C)
        if style.startswith("mha"): s.m=nn.MultiheadAttention(C,H,batch_first="bf" in style,bias=True)
        s.talk=nn.Parameter(torch.randn(H,H))
    def forward(s,x):
        st=s.style; B,T,C=x.shape; H,D=s.H,s.D; causal=torch.ones(T,T).tril().bool() 
        if st.startswith("mha"):
            if ED is None:
                xx=x if "bf" in st else x.transpose(0,1)
                y=s.m(xx,xx,xx,attn_mask=~causal,need_weights="nw" in st)[0]
                return y if "bf" in st else y.transpose(0,1)
            q,k,v=F.linear(x,s.m.in_proj_weight,s.m.in_proj_bias).view(B,T,3,H,D).permute(2,0,3,1,4)
            a=(q@k.mT*D**-.5).masked_fill(~causal,-torch.inf); z=ez(s.i,torch.nan_to_num(ea(s.i,a).softmax(-1))@v)
            return s.m.out_proj(z.transpose(1,2).reshape(B,T,C))
        q,k,v=s.qkv(x).view(B,T,3,H,D).permute(2,0,3,1,4)
        if ED is not None:
            if st=="gqa": k,v=k[:,:1].expand_as(q),v[:,:1].expand_as(q)
            a=q@k.mT*D**-.5
            if st=="softcap": a=2*torch.tanh(a/2)
            if st=="bias": a=a+torch.linspace(0,1,H*T*T).view(H,T,T)
            a=ea(s.i,a.masked_fill(~causal,-torch.inf))
            if st=="sink": w=torch.cat([a,s.sink.view(1,H,1,1).expand(B,H,T,1)],-1).softmax(-1)[...,:-1]
            else: w=torch.nan_to_num(a.softmax(-1))
            z=ez(s.i,w@v)
            z=z.transpose(1,2).reshape(B,T,C)
            if st=="gate": z=z*torch.sigmoid(s.g(x))
            return s.o(z)
        if st=="sdpa": z=F.scaled_dot_product_attention(q,k,v,is_causal=True).transpose(1,2).reshape(B,T,C)
        elif st=="sdpamask": z=F.scaled_dot_product_attention(q,k,v,attn_mask=causal).transpose(1,2).reshape(B,T,C)
        elif st=="gqa": z=F.scaled_dot_product_attention(q,k[:,:1],v[:,:1],is_causal=True,enable_gqa=True).transpose(1,2).reshape(B,T,C)
        elif st=="fold":
            q,k,v=(t.reshape(B*H,T,D) for t in (q,k,v)); z=F.scaled_dot_product_attention(q,k,v,is_causal=True).view(B,H,T,D).transpose(1,2).reshape(B,T,C)
        elif st=="bmmfold":
            q,k,v=(t.reshape(B*H,T,D) for t in (q,k,v)); a=torch.bmm(q*D**-.5,k.mT).masked_fill(~causal,-torch.inf); z=torch.bmm(a.softmax(-1),v).view(B,H,T,D).transpose(1,2).reshape(B,T,C)
        elif st=="catfold":
            q,k,v=(torch.cat(list(t.unbind(1)),0) for t in (q,k,v)); a=(q@k.mT*D**-.5).masked_fill(~causal,-1e9); z=torch.cat((a.softmax(-1)@v).chunk(H,0),-1)
        elif st=="einsum":
            q,k,v=(t.permute(2,0,1,3) for t in (q,k,v)); a=torch.einsum("ibhd,jbhd->ijbh",q,k)*D**-.5; a=a.masked_fill(~causal[:,:,None,None],-torch.inf); z=torch.einsum("ijbh,jbhd->bihd",a.softmax(1),v).reshape(B,T,C)
        elif st=="outfused":
            w=(q@k.mT*D**-.5).masked_fill(~causal,-torch.inf).softmax(-1); W=s.o.weight.view(C,H,D); return torch.einsum("bhij,bhjd,chd->bic",w,v,W)+s.o.bias
        elif st=="loop":
            zs=[]
            for h in range(H):
                w=(q[:,h]@k[:,h].mT*D**-.5).masked_fill(~causal,-torch.inf).softmax(-1); zs.append(w@v[:,h])
            z=torch.cat(zs,-1)
        elif st=="loopsum":
            y=s.o.bias
            for h in range(H):
                w=(q[:,h]@k[:,h].mT*D**-.5).masked_fill(~causal,-torch.inf).softmax(-1); y=y+(w@v[:,h])@s.o.weight[:,h*D:(h+1)*D].T
            return y
        elif st=="loopbatch":
            z=torch.stack([F.scaled_dot_product_attention(q[b],k[b],v[b],is_causal=True).transpose(0,1).reshape(T,C) for b in range(B)])
        elif st=="loopbatchsm":
            z=torch.stack([((q[b]@k[b].mT*D**-.5).masked_fill(~causal,-torch.inf).softmax(-1)@v[b]).transpose(0,1).reshape(T,C) for b in range(B)])
        elif st=="loopheadsdpa":
            z=torch.cat([F.scaled_dot_product_attention(q[:,h],k[:,h],v[:,h],is_causal=True) for h in range(H)],-1)
        elif st=="qchunk":
            z=torch.cat([F.scaled_dot_product_attention(q[:,:,i:i+2],k,v,attn_mask=causal[i:i+2]) for i in range(0,T,2)],2).transpose(1,2).reshape(B,T,C)
        elif st=="qchunksm":
            z=torch.cat([(q[:,:,i:i+2]@k.mT*D**-.5).masked_fill(~causal[i:i+2],-torch.inf).softmax(-1)@v for i in range(0,T,2)],2).transpose(1,2).reshape(B,T,C)
        elif st=="packed":
            q,k,v=(t.transpose(1,2).reshape(B*T,H,D).transpose(0,1)[None] for t in (q,k,v)); bd=torch.block_diag(*[causal.float()]*B).bool(); z=F.scaled_dot_product_attention(q,k,v,attn_mask=bd)[0].transpose(0,1).reshape(B,T,C)
        elif st=="softcap": z=((2*torch.tanh(q@k.mT*D**-.5/2)).masked_fill(~causal,-torch.inf).softmax(-1)@v).transpose(1,2).reshape(B,T,C)
        elif st=="bias": z=((q@k.mT*D**-.5+torch.linspace(0,1,H*T*T).view(H,T,T)).masked_fill(~causal,-torch.inf).softmax(-1)@v).transpose(1,2).reshape(B,T,C)
        elif st=="biassdpa": z=F.scaled_dot_product_attention(q,k,v,attn_mask=torch.where(causal,torch.linspace(0,1,H*T*T).view(H,T,T),-torch.inf)).transpose(1,2).reshape(B,T,C)
        elif st=="sink": z=(torch.cat([(q@k.mT*D**-.5).masked_fill(~causal,-torch.inf),s.sink.view(1,H,1,1).expand(B,H,T,1)],-1).softmax(-1)[...,:-1]@v).transpose(1,2).reshape(B,T,C)
        elif st=="gate": z=F.scaled_dot_product_attention(q,k,v,is_causal=True).transpose(1,2).reshape(B,T,C)*torch.sigmoid(s.g(x))
        elif st=="vmap":
            z=torch.vmap(lambda q,k,v: ((q@k.mT*D**-.5).masked_fill(~causal,-torch.inf).softmax(-1)@v),in_dims=1,out_dims=1)(q,k,v).transpose(1,2).reshape(B,T,C)
        elif st=="vmapsdpa":
            z=torch.vmap(lambda q,k,v: F.scaled_dot_product_attention(q,k,v,is_causal=True))(q,k,v).transpose(1,2).reshape(B,T,C)
        elif st=="ckpt":
            from torch.utils.checkpoint import checkpoint
            z=checkpoint(lambda q,k,v:F.scaled_dot_product_attention(q,k,v,is_causal=True),q,k,v,use_reentrant=False).transpose(1,2).reshape(B,T,C)
        elif st=="exp":
            e=(q@k.mT*D**-.5).masked_fill(~causal,-torch.inf).exp(); z=((e/e.sum(-1,keepdim=True))@v).transpose(1,2).reshape(B,T,C)
        elif st=="vT": z=(v.mT@(q@k.mT*D**-.5).masked_fill(~causal,-torch.inf).softmax(-1).mT).permute(0,3,1,2).reshape(B,T,C)
        elif st=="normz": raise 0
        elif st=="inplaceout":
            z=torch.empty(B,T,H,D)
            for h in range(H): z[:,:,h]=F.scaled_dot_product_attention(q[:,h],k[:,h],v[:,h],is_causal=True)
            z=z.view(B,T,C)
        elif st=="sdpa5":
            z=F.scaled_dot_product_attention(q.unsqueeze(1),k.unsqueeze(1),v.unsqueeze(1),is_causal=True).squeeze(1).transpose(1,2).reshape(B,T,C)
        elif st=="hfirst":  # (H,B,T,D)
            q,k,v=(t.transpose(0,1) for t in (q,k,v)); z=F.scaled_dot_product_attention(q,k,v,is_causal=True).permute(1,2,0,3).reshape(B,T,C)
        else: raise KeyError(st)
        return s.o(z)
class Model(nn.Module):
    def __init__(s,style,C=12,H=3,L=2,V=11):
        super().__init__(); s.e=nn.Embedding(V,C); s.blocks=nn.ModuleList([nn.ModuleDict(dict(attn=Attn(i,style,C,H),n=nn.LayerNorm(C),f=nn.Linear(C,C))) for i in range(L)]); s.h=nn.Linear(C,V)
    def forward(s,t):
        x=s.e(t)
        for b in s.blocks:
            x=x+b["attn"](b["n"](x)); x=x+torch.tanh(b["f"](x))
        return s.h(x)
styles="sdpa sdpamask gqa fold bmmfold catfold einsum outfused loop loopsum loopbatch loopbatchsm loopheadsdpa qchunk qchunksm packed softcap bias biassdpa sink gate vmap vmapsdpa ckpt exp vT inplaceout sdpa5 hfirst mha mhabf mhanw mhabfnw".split()
def hand(m,x,**ed):
    global ED; ED=ed
    try:
        with torch.no_grad(): return m(x)
    finally: ED=None
def inter(name,m,x,cm,ed,tol=3e-5):
    want=hand(m,x,**ed)
    try:
        with torch.no_grad(), cm(): got=m(x)
        d=(got-want).abs().max().item(); plain=hand(m,x); e=(want-plain).abs().max().item()
        after=(m(x)-plain).abs().max().item()
        say(name, ("ok" if d<=tol else f"DEFECT off by {d:.3g} (effect {e:.3g})")+("" if after<1e-5 else f" STAYS CHANGED {after}"))
    except Exception as ex: say(name, f"reported: {type(ex).__name__} {short(ex,200)}")
def zero(L,h,rows=None):
    def z(i,z):
        if i==L: z=z.clone(); z[:,h]=0
        return z
    return dict(z=z)
def hide(L,h,keys,queries=None):
    def a(i,a):
        if L is None or i==L:
            a=a.clone(); q=slice(None) if queries is None else queries
            aa=a[:,h] if h is not None else a
            aa[...,q,keys]=-torch.inf
        return a
    return dict(a=a)
if __name__=="__main__":
  from regard.ablate import knock_out, patch_heads, average_outputs, trace_heads
  for st in styles:
    for H,B,T in [(3,3,6)] if st not in ("sdpa","bmmfold","catfold","fold","hfirst") else [(3,3,6),(3,1,6),(2,3,6),(6,6,6)]:
        torch.manual_seed(0); C=12
        m=Model(st,C,H).eval(); x=torch.randint(0,11,(B,T)); tag=f"{st} H{H}B{B}T{T}"
        base=hand(m,x,z=lambda i,z:z)
        with torch.no_grad(): 
            dd=(m(x)-base).abs().max().item()
        if dd>1e-5: say(tag,f"ORACLE BUG {dd}"); continue
        inter(f"{tag} knock_out (1,{H-1})",m,x,lambda:knock_out(m,[(1,H-1)]),zero(1,H-1))
        inter(f"{tag} knock_out name head0",m,x,lambda:knock_out(m,[("blocks.0.attn",0)]),zero(0,0))
        inter(f"{tag} knock_out layers[1]",m,x,lambda:knock_out(m,layers=[1]),dict(z=lambda i,z: z*0 if i==1 else z))
        inter(f"{tag} knock_out keys 2 of head",m,x,lambda:knock_out(m,[(0,1)],keys=[2]),hide(0,1,[2]))
        inter(f"{tag} knock_out keys [0] all",m,x,lambda:knock_out(m,keys=[0]),hide(None,None,[0]))
        inter(f"{tag} knock_out keys 1 queries -1",m,x,lambda:knock_out(m,keys=[1],queries=[-1]),hide(None,None,[1],slice(-1,None)))
        inter(f"{tag} knock_out mask window(1)",m,x,lambda:knock_out(m,[(1,0)],mask=regard.window(1)),dict(a=lambda i,a: torch.cat([a[:,:1].masked_fill((torch.arange(T)[:,None]-torch.arange(T)).abs()>1,-torch.inf),a[:,1:]],1) if i==1 else a))
        # patch with function
        inter(f"{tag} patch fn (0,1)",m,x,lambda:patch_heads(m,lambda z:z*2+1,[(0,1)]),dict(z=lambda i,z: torch.cat([z[:,:1],z[:,1:2]*2+1,z[:,2:]],1) if i==0 else z))
        # patch from another run
        y=torch.randint(0,11,(B,T)); store={}
        def keepz(i,z): store[i]=z.clone(); return z
        hand(m,y,z=keepz)
        try:
            with torch.no_grad(), regard.watch(m,keep="qkv") as src: m(y)
            def rep(i,z):
                if i==1: z=z.clone(); z[:,0]=store[1][:,0]
                return z
            inter(f"{tag} patch run (1,0)",m,x,lambda:patch_heads(m,src,[(1,0)]),dict(z=rep))
            def rep2(i,z):
                if i==0: z=z.clone(); z[:,1,-1]=store[0][:,1,-1]
                return z
            inter(f"{tag} patch run (0,1) q-1",m,x,lambda:patch_heads(m,src,[(0,1)],queries=[-1]),dict(z=rep2))
            mean={i:store[i].mean((0,2)) for i in store}
            def rep3(i,z):
                if i==1: z=z.clone(); z[:,1]=mean[1][1]
                return z
            inter(f"{tag} patch mean (1,1)",m,x,lambda:patch_heads(m,average_outputs(src),[(1,1)]),dict(z=rep3))
        except Exception as ex: say(f"{tag} patch run",f"reported: {type(ex).__name__} {short(ex)}")
        # trace
        zs={}
        def kz(i,z): zs[i]=z.clone(); return z
        hand(m,x,z=kz)
        try:
            with trace_heads(m) as tr: out=m(x)
            bad=[]
            for i in (0,1):
                o=tr.outputs(i)
                if o.shape!=zs[i].shape: bad.append(f"shape {tuple(o.shape)} want {tuple(zs[i].shape)}")
                elif (o-zs[i]).abs().max()>1e-5: bad.append(f"outputs off layer {i}")
                Wt=(m.blocks[i]["attn"].m.out_proj if st.startswith("mha") else m.blocks[i]["attn"].o).weight
                D=C//H
                if st!="gate":
                  for h in range(H):
                    w=tr.writes(i,h); ww=zs[i][:,h]@Wt[:,h*D:(h+1)*D].T
                    if w.shape!=ww.shape or (w-ww).abs().max()>1e-5: bad.append(f"writes off {i}.{h} {tuple(w.shape)}")
            say(f"{tag} trace", "ok" if not bad else "DEFECT "+"; ".join(bad))
        except Exception as ex: say(f"{tag} trace",f"reported: {type(ex).__name__} {short(ex)}")
  print("N",__import__("lib").N)
