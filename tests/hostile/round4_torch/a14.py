from lib import *
import lib, threading
from regard.ablate import *
from a4 import Attn
import a4
class Br(nn.Module):
    def __init__(s,style="sdpa"): super().__init__(); s.e=nn.Embedding(11,12); s.a=Attn(0,style); s.b=Attn(1,style); s.c=Attn(2,style); s.h=nn.Linear(12,11)
    def forward(s,t,skip=(),order="abc"):
        x=s.e(t)
        for n in order:
            if n not in skip: x=x+getattr(s,n)(x)
        return s.h(x)
def hand(f,**ed):
    a4.ED=ed
    try:
        with torch.no_grad(): return f()
    finally: a4.ED=None
cut=lambda i,h: dict(z=lambda j,z: z*(torch.arange(3)!=h)[None,:,None,None] if i==j else z)
D=lambda a,b:(a-b).abs().max().item()
def which(m,t,got,**kw):
    base=hand(lambda:m(t,**kw),z=lambda i,z:z)
    if D(base,got)<1e-6: return "NOTHING"
    return [n for i,n in enumerate("abc") if D(hand(lambda:m(t,**kw),**cut(i,1)),got)<3e-5] or "?"
for style in ("softcap","mhabf"):
    torch.manual_seed(0); m=Br(style).eval(); t=torch.randint(0,11,(2,5)); u=torch.randint(0,11,(2,5))
    # branch: pass1 skips b, pass2 all
    for seq in ([dict(skip="b"),{}],[{},dict(skip="b")],[dict(skip="a"),{}],[dict(order="cba"),{}]):
        with torch.no_grad(), regard.watch(m,keep="qkv") as seen: [m(t,**k) for k in seq]
        for num in range(3):
            try:
                with torch.no_grad(), knock_out(m,[(num,1)]): outs=[m(t,**k) for k in seq]
                w=[which(m,t,o,**k) for o,k in zip(outs,seq)]; nm=seen.layer(num).name
                good=all(x==[nm[0]] or (x=="NOTHING" and nm[0] in k.get("skip","")) for x,k in zip(w,seq))
                say(f"{style} {seq} number {num}", "ok" if good else f"DEFECT? watch number {num} = {nm}; knock_out edits per pass {w}; watch layers {seen.layers}")
            except Exception as e: say(f"{style} {seq} number {num} (watch {seen.layers})",f"reported {short(e,120)}")
    # recording with one branch, patching with another, by number
    with torch.no_grad(), regard.watch(m,keep="qkv") as src: m(u,skip="b")
    st={}; hand(lambda:m(u,skip="b"),z=lambda i,z:(st.__setitem__(i,z.clone()),z)[1])
    for num,nm in ((1,"c"),("c","c"),(0,"a"),(2,"c")):
        try:
            with torch.no_grad(), patch_heads(m,src,[(num,1)]): got=m(t)
            res=[n for i,n in enumerate("abc") for j in st if D(hand(lambda:m(t),z=lambda q,z: torch.cat([z[:,:1],st[j][:,1:2],z[:,2:]],1) if q==i else z),got)<3e-5]
            say(f"{style} patch number {num} rec w/o b, run with b",f"{'ok' if res==[nm] else 'DEFECT?'} edited {res}; source layers {src.layers}")
        except Exception as e: say(f"{style} patch number {num}",f"reported {short(e,150)}")
    # interventions across threads, exceptions, nested, training backward, generator order
    def th():
        out=[None]
        def r():
            with torch.no_grad(): out[0]=m(t)
        x=threading.Thread(target=r); x.start(); x.join(); return out[0]
    with knock_out(m,[("a",1)]): g=th()
    say(f"{style} thread",["ok","DEFECT"][which(m,t,g)!=["a"]])
    with torch.no_grad():
        with knock_out(m,[("a",1)]):
            with knock_out(m,[("b",1)]): g=m(t)
    two=hand(lambda:m(t),z=lambda j,z: z*(torch.arange(3)!=1)[None,:,None,None] if j in (0,1) else z)
    say(f"{style} nested knock_outs","ok" if D(g,two)<3e-5 else "DEFECT")
    with torch.no_grad(), knock_out(m,[("a",1),("b",1)]): g=m(t)
    say(f"{style} two heads","ok" if D(g,two)<3e-5 else "DEFECT")
    try:
        with torch.no_grad(), knock_out(m,[("a",1)]): raise KeyError
    except KeyError: pass
    except Exception as e: say(f"{style} exception in block masks user's",short(e))
    say(f"{style} after exception","ok" if D(m(t),hand(lambda:m(t),z=lambda i,z:z))<1e-5 else "DEFECT")
    m.zero_grad(); 
    with knock_out(m,[("b",1)]): m(t).sum().backward()
    gr={n:p.grad.clone() for n,p in m.named_parameters() if p.grad is not None}; m.zero_grad(); a4.ED=cut(1,1); m(t).sum().backward(); a4.ED=None
    bad=[n for n,p in m.named_parameters() if p.grad is not None and (n not in gr or D(gr[n],p.grad)>1e-4)]
    say(f"{style} gradients under knock_out","ok" if not bad else f"DEFECT {bad}")
    for dt in (torch.float64,torch.bfloat16):
        m2=Br(style).to(dt).eval(); 
        with torch.no_grad(), knock_out(m2,[("b",1)]): g=m2(t)
        try: say(f"{style} {dt} knock",["DEFECT","ok"][D(g,hand(lambda:m2(t),**cut(1,1)))<(1e-9 if dt==torch.float64 else 5e-2)])
        except Exception as e: say(f"{style} {dt}",short(e))
    def ac(f):
        with torch.autocast("cpu",dtype=torch.bfloat16), torch.no_grad(): return f()
    with knock_out(m,[("b",1)]): g=ac(lambda:m(t))
    say(f"{style} autocast knock", "ok" if D(g,hand(lambda:ac(lambda:m(t)),**cut(1,1)))<6e-2 else f"DEFECT {D(g,hand(lambda:ac(lambda:m(t)),**cut(1,1)))}")
    # watch inside knock_out and outside
    with torch.no_grad():
        with knock_out(m,[("a",1)]), regard.watch(m,keep="qkv") as s1: g1=m(t)
        with regard.watch(m,keep="qkv") as s2, knock_out(m,[("a",1)]): g2=m(t)
        say(f"{style} watch order",["DEFECT","ok"][D(g1,g2)<1e-6 and which(m,t,g1)==["a"] and all(np.allclose(a.weights(),b.weights(),atol=1e-6) for a,b in zip(s1.records,s2.records))]+" "+short([c.note for c in s1.coverage()],160))
    # compile
    try:
        cm_=torch.compile(m,backend="eager")
        with torch.no_grad(), knock_out(cm_,[(1,1)]): g=cm_(t)
        say(f"{style} compiled knock",["DEFECT","ok"][which(m,t,g)==["b"]])
        with torch.no_grad(): cm_(t)
        with torch.no_grad(), knock_out(m,[(1,1)]): g=cm_(t)
        say(f"{style} compiled beforehand, knock on the inner",["DEFECT","ok"][which(m,t,g)==["b"]])
    except Exception as e: say(f"{style} compiled",f"reported {short(e,150)}")
    try:
        tr=torch.jit.trace(m,t)
        with torch.no_grad(), knock_out(tr,[(1,1)]): g=tr(t)
        say(f"{style} traced knock",f"{'ok' if which(m,t,g)==['b'] else 'DEFECT'} {which(m,t,g)}")
    except Exception as e: say(f"{style} traced",f"reported {short(e,150)}")
    class H2(nn.Module):
        def __init__(s): super().__init__(); s.m=m
        def forward(s,t): return s.m(t)
    try:
        with torch.no_grad(), knock_out(m,[(1,1)]): g=H2()(t)
        say(f"{style} parent model called",["DEFECT","ok"][which(m,t,g)==["b"]])
        with torch.no_grad(), knock_out(m.b,[(0,1)]): g=m(t)
        say(f"{style} submodule given",f"{'ok' if which(m,t,g)==['b'] else 'DEFECT '+str(which(m,t,g))}")
        other=Br(style).eval()
        with torch.no_grad(), knock_out(m,[("a",1)]): g=other(t); m(t)
        say(f"{style} other model unaffected",["DEFECT","ok"][which(other,t,g)=="NOTHING"])
    except Exception as e: say(f"{style} parents",f"reported {short(e,150)}")
    import copy
    from torch.func import functional_call
    p2={k:v.detach()*1.3 for k,v in m.named_parameters()}; mm=copy.deepcopy(m); mm.load_state_dict({**m.state_dict(),**p2})
    with torch.no_grad(), knock_out(m,[(1,1)]): g=functional_call(m,p2,(t,))
    say(f"{style} functional_call knock",["DEFECT","ok"][which(mm,t,g)==["b"]])
print("N",lib.N)
