# continuation logic: collisions, repeated tokens, ring/paged caches, interleaved streams, cross-caches
from lib import *
import lib
class D_(nn.Module):
    """layers with explicit cache dicts; key kind"""
    def __init__(s,kind="plain",mode="sdpa",H=2,D=16,causal=True):
        super().__init__(); s.kind,s.mode,s.H,s.D,s.causal=kind,mode,H,D,causal; C=H*D; s.e=nn.Embedding(50,C); s.q=nn.Linear(C,C);s.k=nn.Linear(C,C);s.v=nn.Linear(C,C);s.o=nn.Linear(C,C); s.pos=nn.Parameter(torch.randn(64,C))
    def kv(s,t,p0):
        x=s.e(t); B,T,C=x.shape
        if s.kind=="pos": x=x+s.pos[p0:p0+T]
        q,k,v=(l(x).view(B,T,s.H,s.D).transpose(1,2) for l in (s.q,s.k,s.v))
        P=s.pos[p0:p0+T].view(T,s.H,s.D).transpose(0,1)
        if s.kind=="head0pos": k=torch.cat([P[None,:1].expand(B,-1,-1,-1),k[:,1:]],1)
        if s.kind=="dims8pos": k=torch.cat([P[None,...,:8].expand(B,-1,-1,-1),k[...,8:]],-1)
        if s.kind=="head0zero": k=torch.cat([k[:,:1]*0,k[:,1:]],1)
        if s.kind=="dims8zero": k=torch.cat([k[...,:8]*0,k[...,8:]],-1)
        if s.kind=="allpos": k=P[None].expand(B,-1,-1,-1)*1.
        if s.kind=="sametok": k=k[:,:,:1].expand(-1,-1,T,-1)
        return x,q,k,v
    def forward(s,t,cache=None):
        p0=0 if cache is None or "k" not in cache else cache["n"]
        x,q,k,v=s.kv(t,p0)
        if cache is not None:
            if "k" in cache: k,v=torch.cat([cache["k"],k],2),torch.cat([cache["v"],v],2)
            cache.update(k=k,v=v,n=p0+t.shape[1]); 
            if "win" in cache: cache["k"],cache["v"]=k[:,:,-cache["win"]:],v[:,:,-cache["win"]:]
        T,S=q.shape[2],k.shape[2]; m=torch.ones(T,S).tril(S-T).bool() if s.causal else None
        if lib.LOG is not None: log(sm(q,k,mask=m))
        if s.mode=="sdpa": z=F.scaled_dot_product_attention(q,k,v,attn_mask=m)
        else:
            a=q@k.mT*s.D**-.5
            if m is not None: a=a.masked_fill(~m,-torch.inf)
            z=a.softmax(-1)@v
        return s.o(z.transpose(1,2).flatten(2))
def W(m,t):
    with torch.no_grad(): return oracle(lambda:m(t))[1][0]
def compare(name,m,run,wants):
    """wants: list of (H,T,S) each must be among the records exactly once with its T rows, or its absence must be reported"""
    try:
        with torch.no_grad():
            p=run()
            with regard.watch(m,keep="qkv") as seen: o=run()
    except Exception as e: return say(name,f"CRASH {type(e).__name__} {short(e)}")
    msgs=[]
    if not same_bits(p,o): msgs.append("BITS")
    recs=[np.asarray(r.to("numpy").weights(),dtype=float) for r in seen.records]
    left=list(range(len(recs))); miss=[]; 
    for i,w in enumerate(wants):
        hit=[j for j in left if recs[j].shape==w.shape and np.abs(recs[j]-w).max()<3e-5]
        if hit: left.remove(hit[0])
        else: miss.append(i)
    text=str(seen); cert=text[text.find("certified"):] if "certified" in text else ""
    rs="; ".join(c.reason for c in seen.coverage() if c.reason); ns="; ".join(c.note for c in seen.coverage() if c.note)
    mm=re.search(r"(\d+) failed",text)
    if mm and int(mm.group(1)): msgs.append("CERT FAILED")
    if miss or left: msgs.append(f"DEFECT? missing {miss} (of {len(wants)}), extra shapes {[recs[j].shape for j in left]} | R {rs} | N {short(ns,150)} | {short(cert,200)}")
    else: msgs.append("ok"+(f" (R {rs})" if rs else ""))
    say(name," ;; ".join(msgs)); return seen
torch.manual_seed(0)
A=torch.randint(0,50,(1,5)); Bt=torch.randint(0,50,(1,7)); R=torch.full((1,5),3)
for mode in ("sdpa","softmax"):
  for kind in ("plain","pos","head0pos","dims8pos","head0zero","dims8zero","allpos","sametok"):
    for causal in (True,False):
        torch.manual_seed(1); m=D_(kind,mode,causal=causal); tag=f"{mode} {kind} causal{causal}"
        compare(f"{tag}: A then longer B",m,lambda:[m(A),m(Bt)],[W(m,A)[0],W(m,Bt)[0]])
        compare(f"{tag}: longer B then A",m,lambda:[m(Bt),m(A)],[W(m,Bt)[0],W(m,A)[0]])
        compare(f"{tag}: A then other same length",m,lambda:[m(A),m(Bt[:,:5])],[W(m,A)[0],W(m,Bt[:,:5])[0]])
        compare(f"{tag}: batch of both",m,lambda:[m(torch.cat([A,Bt[:,:5]]))],[W(m,A)[0],W(m,Bt[:,:5])[0]])
        if causal and kind!="sametok":
            def two():
                c1,c2={}, {}; o=[]
                for i in range(5): o.append(m(A[:,i:i+1],c1)); o.append(m(Bt[:,i:i+1],c2))
                return o
            compare(f"{tag}: two interleaved streams",m,two,[W(m,A)[0],W(m,Bt[:,:5])[0]])
            def two2():
                o=[]
                for X_ in (A,Bt): 
                    c={}; o.append(m(X_[:,:3],c)); 
                    for i in range(3,X_.shape[1]): o.append(m(X_[:,i:i+1],c))
                return o
            compare(f"{tag}: two generations after each other",m,two2,[W(m,A)[0],W(m,Bt)[0]])
            def fork():
                c={}; o=[m(A[:,:3],c)]; c1,c2=dict(c),dict(c); o.append(m(A[:,3:4],c1)); o.append(m(Bt[:,3:4],c2)); o.append(m(A[:,4:5],c1)); o.append(m(Bt[:,4:5],c2)); return o
            F2=torch.cat([A[:,:3],Bt[:,3:5]],1)
            compare(f"{tag}: forked cache alternately",m,fork,[W(m,A)[0],W(m,F2)[0]])
            def rep():
                c={}; o=[m(R[:,:2],c)]
                for i in range(3): o.append(m(R[:,i:i+1],c))
                return o
            compare(f"{tag}: one token repeated",m,rep,[W(m,R)[0]])
            def rep2():
                o=[]
                for n in (3,5):
                    c={}; o.append(m(R[:,:2],c))
                    for i in range(n-2): o.append(m(R[:,:1],c))
                return o
            compare(f"{tag}: repeated token, two generations 3 and 5",m,rep2,[W(m,R[:,:3])[0],W(m,R)[0]])
            def nocache(): return [m(A[:,:i]) for i in range(2,6)]
            compare(f"{tag}: generation without cache",m,nocache,[W(m,A)[0]])
            def win():
                c={"win":2}; return [m(A[:,i:i+1],c) for i in range(5)]
            s=compare(f"{tag}: sliding window cache 2",m,win,[np.asarray(sm(*m.kv(A,0)[1:3],mask=torch.ones(5,5).tril().bool()&torch.ones(5,5).triu(-2).bool())[0].detach())])
def anyof(): pass
print("N",lib.N)
