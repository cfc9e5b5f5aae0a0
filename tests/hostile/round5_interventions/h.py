import torch, traceback, sys, warnings, time, copy, contextlib
warnings.filterwarnings("ignore")
import regard
from regard import ablate as ab
torch.manual_seed(0); torch.set_num_threads(1)
REG=tuple(v for v in vars(regard.errors).values() if isinstance(v,type) and issubclass(v,BaseException)) if hasattr(regard,'errors') else ()
def report(name, fn, tol=1e-9):
    """fn returns (got, want[, base]); or a string"""
    try:
        r=fn()
    except BaseException as e:
        mod=type(e).__module__
        tb=traceback.extract_tb(e.__traceback__)[-1]
        print(f"{name} | {'reported' if 'regard' in tb.filename else 'RAW?'}: {type(e).__name__} {str(e)[:300]!r} @{tb.filename.split('/')[-1]}:{tb.lineno}",flush=True); return
    if isinstance(r,str): print(f"{name} | {r}",flush=True); return
    got,want=r[0],r[1]
    if not isinstance(got,torch.Tensor): got=torch.as_tensor(got)
    got=got.detach().double(); want=torch.as_tensor(want).detach().double()
    if got.shape!=want.shape: print(f"{name} | DEFECT shape {tuple(got.shape)} {tuple(want.shape)}",flush=True); return
    d=(got-want).abs().max().item(); s=want.abs().max().item()
    vac=''
    if len(r)>2:
        b=(r[2].double()-want).abs().max().item()
        vac=f" (edit {b:.1e})"
        if b<=10*tol*max(1,s): vac+=" VACUOUS"
    ok = d<=tol*max(1,s)
    print(f"{name} | {'ok' if ok else 'DEFECT diff %.2e of %.2e'%(d,s)}{vac}",flush=True)
def out(m,*a,**k):
    with torch.no_grad(): o=m(*a,**k)
    return getattr(o,'logits',o) if not isinstance(o,tuple) else o[0]
@contextlib.contextmanager
def zero(mod, sl, rows=None):
    def f(m,a):
        x=a[0].clone()
        if rows is None: x[...,sl]=0
        else: x[:,rows,sl]=0
        return (x,)+tuple(a[1:])
    h=mod.register_forward_pre_hook(f)
    try: yield
    finally: h.remove()
@contextlib.contextmanager
def maskhook(attn, head, H, q, k):
    """adds -inf in attention_mask kwarg of the module"""
    def f(m,a,kw):
        am=kw['attention_mask']
        n=am.shape[-2]; 
        am=am.expand(-1,H,-1,-1).clone()
        if am.dtype==torch.bool:
            sub=am[:,head]; sub[:,q,k]=False
        else:
            sub=am[:,head]; sub[:,q,k]=torch.finfo(am.dtype).min
        kw['attention_mask']=am; return a,kw
    h=attn.register_forward_pre_hook(f,with_kwargs=True)
    try: yield
    finally: h.remove()
