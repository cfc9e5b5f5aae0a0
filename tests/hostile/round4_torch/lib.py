import sys, traceback, warnings, re
warnings.filterwarnings("ignore")
import numpy as np, torch, regard
from torch import nn
import torch.nn.functional as F
torch.set_num_threads(1)
LOG = None
def log(W, name=None):
    """W as (B,H,Nq,Nk); collected only in the oracle's run."""
    if LOG is not None:
        try: LOG.append(W.detach().to(torch.float64).clone().numpy())
        except RuntimeError: pass
N = 0
def flat(o):
    if isinstance(o, torch.Tensor): return [o]
    if isinstance(o, (list, tuple)): return [t for x in o for t in flat(x)]
    if isinstance(o, dict): return [t for x in o.values() for t in flat(x)]
    return []
def oracle(run):
    global LOG
    LOG = []
    try: out = run()
    finally: got, LOG = LOG, None
    return out, got
def say(name, what):
    global N; N += 1
    print(f"{name} | {what}", flush=True)
def same_bits(a, b):
    a, b = flat(a), flat(b)
    if len(a) != len(b): return False
    for x, y in zip(a, b):
        if x.is_nested: x, y = x.values() if x.layout==torch.jagged else torch.cat([i.flatten() for i in x.unbind()]), y.values() if y.layout==torch.jagged else torch.cat([i.flatten() for i in y.unbind()])
        if x.shape != y.shape or x.dtype != y.dtype: return False
        if not torch.equal(torch.nan_to_num(x, nan=7.5), torch.nan_to_num(y, nan=7.5)) : return False
    return True
def rows_of(seen, name, B):
    return [seen.layer(name, sequence=b) for b in range(B)]
def tol_for(W): return 2e-5
def short(s, n=260): return re.sub(r"\s+", " ", str(s))[:n]
def notes(seen):
    return "; ".join(f"[{c.name}|{c.via}|{c.calls}/{c.kept}|att={c.attention}] R:{c.reason} N:{c.note}" for c in seen.coverage())
def check(name, model, run, want=None, tol=2e-5, keep="qkv", names=None, grads=False, seed=0, verbose=False, pre=None, loose=False, expect_calls=None, watch=None, bits=True, groups=None):
    """run(): runs the model. want: list of dense (B,H,Nq,Nk) in call order, or None: what the model logs."""
    try:
        g = torch.enable_grad() if grads else torch.no_grad()
        with g:
            if pre: pre()
            torch.manual_seed(seed); out0, logged = oracle(run)
            if want is None: want = logged
            want = [np.asarray(w, dtype=np.float64) for w in want]
            if pre: pre()
            torch.manual_seed(seed)
            plain = run()
            if pre: pre()
            torch.manual_seed(seed)
            with regard.watch(watch if watch is not None else model, keep=keep) as seen:
                out1 = run()
        msgs = []
        if bits and not same_bits(plain, out1): msgs.append("OUTPUT CHANGED by the watch")
        text = str(seen)
        m = re.search(r"(\d+) failed", text)
        if m and int(m.group(1)): msgs.append("CERT FAILED: " + short(text[text.find("certified"):]))
        cov = seen.coverage()
        reasons = [f"{c.name}: {c.reason}" for c in cov if c.reason]
        nts = [f"{c.name}: {c.note}" for c in cov if c.note]
        layers = list(seen.layers)
        # all records of each layer
        recs = {}
        for r in seen.records: recs.setdefault(r.name, []).append(r)
        # match: each wanted call in order against layers in order
        if verbose:
            print(text); print(notes(seen))
            for r in seen.records: print("   rec", r.name, r.shape)
        if names is None: names_ = layers
        else: names_ = names
        bad = []
        if groups is not None:
            ww, nn_ = {}, []
            for g_, w_ in zip(groups, want): ww.setdefault(g_, []).extend(list(w_))
            want = list(ww.values()); names_ = list(ww)
        if len(names_) != len(want):
            bad.append(f"{len(want)} calls wanted, layers shown {names_}")
        # every shown layer must equal the wanted one at its place, or (if fewer) some wanted one
        wl = list(want)
        for i, nm in enumerate(names_):
            rs = recs.get(nm)
            if rs is None: bad.append(f"{nm} not shown"); continue
            cand = [wl[i]] if len(names_) == len(want) else wl
            okc = None; why = []
            for W in cand:
                d = cmp(rs, W, tol)
                if d is None: okc = True; break
                why.append(d)
            if not okc: bad.append(f"{nm}: " + "; ".join(why[:2]))
        if bad:
            lost_only = all("calls wanted" in b or "not shown" in b for b in bad)
            if lost_only and reasons: msgs.append("reported: " + short(" / ".join(reasons)))
            elif lost_only: msgs.append("DEFECT lost w/o reason: " + "; ".join(bad) + " N: " + short(" / ".join(nts)))
            else:
                msgs.append("DEFECT " + "; ".join(bad) + " || R: " + short(" / ".join(reasons)) + " || N: " + short(" / ".join(nts))+ " || " + short(text[text.find("certified"):] if "certified" in text else "no cert"))
        else:
            tail = ""
            if reasons: tail += " (reason although shown: " + short(" / ".join(reasons)) + ")"
            if nts: tail += " [note: " + short(" / ".join(nts), 160) + "]"
            msgs.append("ok" + tail)
        say(name, " ;; ".join(msgs))
        return seen
    except Exception as e:
        tb = traceback.format_exc().strip().splitlines()
        say(name, f"CRASH {type(e).__name__}: {short(e)} @ {short(tb[-3])} {short(tb[-2])}")
        return None
def cmp(rs, W, tol):
    B = len(W)
    if len(rs) != B: return f"{len(rs)} sequences (want {B}), shape {rs[0].shape} want {W[0].shape}"
    worst = 0
    for b, r in enumerate(rs):
        got = np.asarray(r.to("numpy").weights(), dtype=np.float64)
        if got.shape != W[b].shape: return f"shape {got.shape} want {W[b].shape} at seq {b}"
        ng, nw = np.isnan(got), np.isnan(W[b])
        if (ng != nw).any(): return f"NaN at {int(ng.sum())} cells, want {int(nw.sum())} (seq {b})"
        d = np.abs(np.nan_to_num(got) - np.nan_to_num(W[b])).max() if got.size else 0
        worst = max(worst, d)
    return None if worst <= tol else f"weights off by {worst:.3g}"
def sm(q, k, scale=None, mask=None, bias=None):
    q, k = q.double(), k.double()
    s = q @ k.transpose(-1, -2) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if bias is not None: s = s + bias.double()
    if mask is not None: s = s.masked_fill(~mask, -torch.inf)
    w = torch.softmax(s, -1)
    return torch.nan_to_num(w) if mask is not None else w
