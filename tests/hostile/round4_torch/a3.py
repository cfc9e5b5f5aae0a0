# nn.MultiheadAttention, TransformerEncoder, SDPA, flex
from lib import *
import itertools
def mha_oracle(m, q, k, v, attn_mask=None, kpm=None):
    if not m.batch_first: q,k,v=(t.transpose(0,1) if t.dim()==3 else t for t in (q,k,v))
    if q.dim()==2: q,k,v=q[None],k[None],v[None]
    E,H=m.embed_dim,m.num_heads; D=E//H
    b=m.in_proj_bias if m.in_proj_bias is not None else torch.zeros(3*E,dtype=q.dtype)
    if m._qkv_same_embed_dim: wq,wk,_=m.in_proj_weight.chunk(3)
    else: wq,wk=m.q_proj_weight,m.k_proj_weight
    Q=F.linear(q,wq,b[:E]).double(); K=F.linear(k,wk,b[E:2*E]).double(); B=Q.shape[0]
    if m.bias_k is not None: K=torch.cat([K,m.bias_k.double().expand(B,1,E)],1)
    if m.add_zero_attn: K=torch.cat([K,torch.zeros(B,1,E)],1)
    Q=Q.view(B,-1,H,D).transpose(1,2); K=K.view(B,-1,H,D).transpose(1,2)
    s=Q@K.mT/D**.5
    ex=K.shape[2]-k.shape[1]
    if attn_mask is not None:
        a=attn_mask
        if a.dim()==3: a=a.view(B,H,*a.shape[1:])
        a=torch.zeros(a.shape).double().masked_fill(a,-torch.inf) if a.dtype==torch.bool else a.double()
        s=s+F.pad(a,(0,ex))
    if kpm is not None:
        a=torch.zeros(kpm.shape).double().masked_fill(kpm,-torch.inf) if kpm.dtype==torch.bool else kpm.double()
        s=s+F.pad(a,(0,ex))[:,None,None]
    return s.softmax(-1).detach().numpy()
class W(nn.Module):
    def __init__(s,m,**kw): super().__init__(); s.attn=m; s.kw=kw
    def forward(s,q,k,v): return s.attn(q,k,v,**s.kw)
torch.manual_seed(0)
i=0
for bf,nw,avg,train in itertools.product([0,1],[0,1],[0,1],[0,1]):
    for opt in [{}, dict(add_bias_kv=True), dict(add_zero_attn=True), dict(kdim=6,vdim=10), dict(bias=False), dict(add_bias_kv=True,add_zero_attn=True)]:
        i+=1
        if i%5: continue
        m=nn.MultiheadAttention(8,2,batch_first=bool(bf),**opt).train(bool(train))
        B,T,S_=3,5,7
        q,k,v=torch.randn(B,T,8),torch.randn(B,S_,opt.get("kdim",8)),torch.randn(B,S_,opt.get("vdim",8))
        mk=[None,torch.rand(T,S_)<.3,torch.randn(T,S_),torch.rand(B*2,T,S_)<.3,torch.randn(6,T,S_)][i//5%5]
        kp=[None,torch.tensor([[0]*7,[0]*5+[1]*2,[0]*3+[1]*4]).bool()][i//7%2]
        if mk is not None and mk.dtype==torch.bool: mk[...,0]=False
        if kp is not None and mk is not None and mk.dtype!=torch.bool: kp=torch.zeros(3,7).masked_fill(kp,-torch.inf)
        if not bf: q,k,v=(t.transpose(0,1) for t in (q,k,v))
        w=W(m,need_weights=bool(nw),average_attn_weights=bool(avg),attn_mask=mk,key_padding_mask=kp)
        check(f"MHA bf{bf} nw{nw} avg{avg} train{train} {opt} mask={None if mk is None else (mk.dtype,tuple(mk.shape))} kpm={None if kp is None else kp.dtype}",w,lambda:w(q,k,v),want=[mha_oracle(m,q,k,v,mk,kp)])
# self attention fast paths
for T,B in [(5,3),(1,1),(3,3)]:
    m=nn.MultiheadAttention(8,2,batch_first=True).eval(); x=torch.randn(B,T,8)
    check(f"MHA fastpath self T{T} B{B}",m,lambda:m(x,x,x,need_weights=False),want=[mha_oracle(m,x,x,x)])
    check(f"MHA fastpath self need_weights T{T} B{B}",m,lambda:m(x,x,x),want=[mha_oracle(m,x,x,x)])
    x2=x[0]; check(f"MHA unbatched T{T}",m,lambda:m(x2,x2,x2),want=[mha_oracle(m,x2,x2,x2)])
    kp=torch.zeros(B,T).bool(); kp[-1,1:]=True
    check(f"MHA fastpath kpm T{T} B{B}",m,lambda:m(x,x,x,key_padding_mask=kp,need_weights=False),want=[mha_oracle(m,x,x,x,None,kp)])
    c=nn.Transformer.generate_square_subsequent_mask(T)
    check(f"MHA is_causal T{T} B{B}",m,lambda:m(x,x,x,attn_mask=c,is_causal=True,need_weights=False),want=[mha_oracle(m,x,x,x,c)])
    check(f"MHA is_causal bool grad T{T} B{B}",m,lambda:m(x,x,x,attn_mask=c<0,is_causal=True,need_weights=False),want=[mha_oracle(m,x,x,x,c)],grads=True)
def enc_oracle(enc,x,mask=None,kpm=None):
    ws=[]
    for l in enc.layers:
        a=l.self_attn; xs=l.norm1(x) if l.norm_first else x
        ws.append(mha_oracle(a,xs,xs,xs,mask,kpm))
        kw=dict(attn_mask=mask,key_padding_mask=kpm,need_weights=False)
        with torch.enable_grad():
            o=a(xs,xs,xs,**kw)[0]
            x=(x+o) if l.norm_first else l.norm1(x+o)
            y=l.norm2(x) if l.norm_first else x
            f=l.linear2(l.activation(l.linear1(y)))
            x=x+f if l.norm_first else l.norm2(x+f)
    return ws
for nf,act,nest,grad in itertools.product([0,1],["relu","gelu"],[0,1],[0,1]):
    l=nn.TransformerEncoderLayer(8,2,16,batch_first=True,norm_first=bool(nf),activation=act,dropout=0.)
    enc=nn.TransformerEncoder(l,2,enable_nested_tensor=bool(nest)).eval(); x=torch.randn(3,5,8)
    check(f"Encoder nf{nf} {act} nest{nest} grad{grad}",enc,lambda:enc(x),want=enc_oracle(enc,x),grads=bool(grad))
    kp=torch.tensor([[0]*5,[0]*3+[1]*2,[0]*4+[1]]).bool()
    want=enc_oracle(enc,x,None,kp)
    torch.set_grad_enabled(bool(grad))
    with torch.set_grad_enabled(bool(grad)):
        with regard.watch(enc) as seen: out=enc(x,src_key_padding_mask=kp)
        with torch.set_grad_enabled(bool(grad)): p=enc(x,src_key_padding_mask=kp)
    torch.set_grad_enabled(True)
    bad=[]
    for li,wn in enumerate(want):
        for b in range(3):
            try: r=seen.layer(li,sequence=b)
            except Exception as e: bad.append(f"{li}.{b} {short(e)}"); continue
            g=r.weights().numpy(); n=int((~kp[b]).sum())
            qp=np.asarray(r.q_positions); kpn=np.asarray(r.k_positions)
            W_=wn[b][:,:g.shape[1],:g.shape[2]]
            d=np.abs(g[:,:n,:n]-W_[:,:n,:n]).max()
            if d>2e-5 or g.shape[1]<n: bad.append(f"{li}.{b} off {d} {g.shape}")
    bits=torch.equal(out,p)
    say(f"Encoder padded nf{nf} {act} nest{nest} grad{grad}", "ok" if not bad and bits else f"DEFECT bits {bits} {bad[:3]} {notes(seen)[:300]}")
# decoder & Transformer
tr=nn.Transformer(8,2,1,1,16,batch_first=True,dropout=0.).eval(); s_,t_=torch.randn(2,6,8),torch.randn(2,4,8)
tm=nn.Transformer.generate_square_subsequent_mask(4)
def trw():
    e=tr.encoder; mem=e(s_); d=tr.decoder.layers[0]; ws=[mha_oracle(e.layers[0].self_attn,s_,s_,s_)]
    ws.append(mha_oracle(d.self_attn,t_,t_,t_,tm)); y=d.norm1(t_+d.self_attn(t_,t_,t_,attn_mask=tm)[0]); ws.append(mha_oracle(d.multihead_attn,y,mem,mem)); return ws
for ic in (None,True):
  check(f"nn.Transformer tgt_mask is_causal={ic}",tr,lambda:tr(s_,t_,tgt_mask=tm,tgt_is_causal=ic),want=trw())
  tr.train(); check(f"nn.Transformer train tgt_is_causal={ic}",tr,lambda:tr(s_,t_,tgt_mask=tm,tgt_is_causal=ic),want=trw(),grads=True); tr.eval()
# sdpa
class SD(nn.Module):
    def __init__(s,**kw): super().__init__(); s.kw=kw
    def forward(s,q,k,v): return F.scaled_dot_product_attention(q,k,v,**s.kw)
def sd(name,q,k,v,want,tol=2e-5,grads=False,**kw):
    m=SD(**kw); return check("sdpa "+name,m,lambda:m(q,k,v),want=[want],tol=tol,grads=grads)
q,k,v=torch.randn(3,2,5,4),torch.randn(3,2,7,4),torch.randn(3,2,7,6)
N_=lambda w:w.numpy()
sd("plain",q,k,v,N_(sm(q,k)))
sd("scale",q,k,v,N_(sm(q,k,.9)),scale=.9)
sd("scale 0",q,k,v,N_(sm(q,k,0.)),scale=0.)
sd("scale neg",q,k,v,N_(sm(q,k,-.7)),scale=-.7)
sd("causal Tq<Tk",q,k,v,N_(sm(q,k,mask=torch.ones(5,7).tril().bool())),is_causal=True)
sd("causal Tq>Tk",torch.randn(3,2,9,4),k,v,None,is_causal=True) if 0 else None
q9=torch.randn(3,2,9,4); sd("causal Tq>Tk",q9,k,v,N_(sm(q9,k,mask=torch.ones(9,7).tril().bool())),is_causal=True)
for sh in [(5,7),(7,),(1,7),(5,1),(3,1,5,7),(1,2,5,7),(3,2,5,7),(3,1,1,7),(2,1,7),(2,5,7),(1,1,1,1)]:
    mb=torch.rand(*sh)<.7; mb[...,0]=True
    sd(f"bool mask {sh}",q,k,v,N_(sm(q,k,mask=mb.expand(3,2,5,7))),attn_mask=mb)
    mf=torch.randn(*sh); sd(f"float mask {sh}",q,k,v,N_(sm(q,k,bias=mf)),attn_mask=mf)
    sd(f"float mask grad {sh}",q.clone().requires_grad_(),k,v,N_(sm(q,k,bias=mf)),attn_mask=mf.clone().requires_grad_(),grads=True)
mb=torch.rand(3,1,5,7)<.5; mb[1,0,2]=False
sd("bool mask empty row",q,k,v,N_(sm(q,k,mask=mb.expand(3,2,5,7))),attn_mask=mb)
mf=torch.where(mb,0.,-torch.inf); sd("float -inf empty row",q,k,v,N_(sm(q,k,mask=mb.expand(3,2,5,7))),attn_mask=mf)
mf=torch.where(mb,0.,torch.finfo(torch.float32).min); sd("float finfo.min empty row",q,k,v,N_(sm(q,k,bias=mf)),attn_mask=mf)
q3,k3=torch.randn(6,5,4),torch.randn(6,7,4); sd("3D",q3,k3,k3,N_(sm(q3,k3)[None]))
sd("3D as B",q3,k3,k3,N_(sm(q3,k3)[:,None]))
q2,k2=torch.randn(5,4),torch.randn(7,4); sd("2D",q2,k2,k2,N_(sm(q2,k2)[None,None]))
q5,k5=torch.randn(2,3,2,5,4),torch.randn(2,3,2,7,4); sd("5D",q5,k5,k5,N_(sm(q5,k5).flatten(0,1)))
qg,kg=torch.randn(3,6,5,4),torch.randn(3,2,7,4); sd("gqa",qg,kg,kg,N_(sm(qg,kg.repeat_interleave(3,1))),enable_gqa=True)
sd("gqa causal",qg,kg,kg,N_(sm(qg,kg.repeat_interleave(3,1),mask=torch.ones(5,7).tril().bool())),enable_gqa=True,is_causal=True)
sd("mqa by broadcast heads 1",q,k[:,:1],v[:,:1],N_(sm(q,k[:,:1])))
sd("broadcast batch",q,k[:1],v[:1],N_(sm(q,k[:1])))
sd("broadcast q batch",q[:1],k,v,N_(sm(q[:1],k)))
sd("Tq 1 causal",q[:,:,:1],k,v,N_(sm(q[:,:,:1],k,mask=torch.ones(1,7).tril().bool())),is_causal=True)
sd("zero queries",q[:,:,:0],k,v,N_(sm(q[:,:,:0],k)))
sd("dim 1",q[...,:1],k[...,:1],v[...,:1],N_(sm(q[...,:1],k[...,:1])))
sd("noncontig",q.transpose(1,2).contiguous().transpose(1,2),k.transpose(2,3).contiguous().transpose(2,3),v,N_(sm(q,k)))
sd("dim 0",q[...,:0],k[...,:0],v,N_(torch.full((3,2,5,7),1/7.).double()))
sd("expanded key strides 0",q,k[:,:,:1].expand(3,2,7,4),v,N_(sm(q,k[:,:,:1].expand(3,2,7,4))))
sd("dropout",q,k,v,N_(sm(q,k)),dropout_p=.3)
sd("dropout grad",q.clone().requires_grad_(),k,v,N_(sm(q,k)),dropout_p=.3,grads=True)
for dt,t in ((torch.float64,1e-9),(torch.bfloat16,2e-2),(torch.float16,3e-3)):
    sd(f"{dt}",q.to(dt),k.to(dt),v.to(dt),N_(sm(q.to(dt),k.to(dt))),tol=t)
    mf=torch.randn(5,7,dtype=dt); sd(f"{dt} bias",q.to(dt),k.to(dt),v.to(dt),N_(sm(q.to(dt),k.to(dt),bias=mf)),tol=t,attn_mask=mf)
from torch.nn.attention import sdpa_kernel, SDPBackend
for b in (SDPBackend.MATH,SDPBackend.FLASH_ATTENTION):
    for g in (0,1):
        with sdpa_kernel(b):
            vv=v[...,:4]; sd(f"{b} grad{g} causal",q.clone().requires_grad_(bool(g)),k,vv,N_(sm(q,k,mask=torch.ones(5,7).tril().bool())),is_causal=True,grads=bool(g))
# aten direct
class AT(nn.Module):
    def forward(s,q,k,v): return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q,k,v,0.,True)[0]
m=AT(); vv=v[...,:4]; check("aten flash direct",m,lambda:m(q,k,vv),want=[N_(sm(q,k,mask=torch.ones(5,7).tril().bool()))])
class AT2(nn.Module):
    def forward(s,q,k,v): return torch.ops.aten._scaled_dot_product_attention_math(q,k,v,None,0.,True)[0]
m2=AT2(); check("aten math direct",m2,lambda:m2(q,k,vv),want=[N_(sm(q,k,mask=torch.ones(5,7).tril().bool()))])
# jagged
from torch.nested import nested_tensor
ls=[4,2,6]; xs=[torch.randn(l,2,4) for l in ls]
nt=nested_tensor(xs,layout=torch.jagged).transpose(1,2)
m=SD()
for c in (False,True):
    m=SD(is_causal=c); 
    try:
        with regard.watch(m) as seen, torch.no_grad(): m(nt,nt,nt)
        bad=[]
        for b,x in enumerate(xs):
            t=x.transpose(0,1); w=sm(t,t,mask=torch.ones(ls[b],ls[b]).tril().bool() if c else None).numpy(); g=seen.layer(0,sequence=b).weights().numpy()
            if g.shape!=w.shape or np.abs(g-w).max()>2e-5: bad.append((b,g.shape))
        say(f"jagged causal{c}","ok" if not bad else f"DEFECT {bad}")
    except Exception as e: say(f"jagged causal{c}",f"CRASH/reported {short(e)}; {notes(seen)[:200]}")
print("N",__import__("lib").N)
