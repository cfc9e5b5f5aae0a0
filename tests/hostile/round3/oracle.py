"""A dense oracle: toy models whose true weights are tapped in a run without a watch.

A situation is a function that returns (model, call). It is built from one seed three
times: tapped, plain and watched. Rows of records are searched among the true rows.
"""

import contextlib
import math
import re
import threading
import time
import traceback
import warnings

import torch
from torch import nn

import regard

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
# rolls: keys leave the cache, so positions shift; follow: texts keep their places
STATE = {"tap": None, "ids": None, "rolls": False, "follow": True}
COUNT = {"ok": 0, "bad": 0}


def tap(name, ideal, actual, qpos=None, keep=None, ids=None):
    """Keep the true weights (B, H, Nq, Nk) of one call."""
    if STATE["tap"] is None:
        return
    B, _, Nq, Nk = ideal.shape
    ids = ids or STATE["ids"] or list(range(B))
    STATE["tap"].append(
        {
            "name": name,
            "ideal": ideal.detach().double().clone(),
            "actual": actual.detach().double().clone(),
            "q": list(range(Nk - Nq, Nk)) if qpos is None else qpos,
            "keep": keep,
            "ids": list(ids),
        }
    )


class Core:
    """softmax attention with a kernel of one's own; subclass to change it."""

    kernel = "eager"
    scale = None

    def logits(self, m, q, k, mask):
        s = q @ k.transpose(-1, -2) * (self.scale or q.shape[-1] ** -0.5)
        return s if mask is None else s + mask.to(s.dtype)

    def softmax(self, s):
        return s.softmax(-1)

    def weights(self, m, q, k, mask):
        return self.softmax(self.logits(m, q, k, mask))

    def after(self, m, w):
        return w

    def __call__(self, m, q, k, v, mask):
        if STATE["tap"] is not None:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                ideal = self.weights(m, q.double(), k.double(), mask)
            with torch.no_grad():
                actual = self.weights(m, q, k, mask)
            tap(m.name, ideal, actual, m.qpos)
        if self.kernel == "sdpa":
            f = nn.functional.scaled_dot_product_attention
            mask = None if mask is None else mask.to(q.dtype)
            return f(q, k, v, attn_mask=mask, scale=self.scale)
        w = self.after(m, self.weights(m, q, k, mask))
        return w.to(v.dtype) @ v


class Attn(nn.Module):
    def __init__(self, E, H, Hk, core, spread=2.0, name=""):
        super().__init__()
        self.H, self.Hk, self.core, self.name = H, Hk, core, name
        D = E // H
        self.q = nn.Linear(E, H * D, bias=False)
        self.k = nn.Linear(E, Hk * D, bias=False)
        self.v = nn.Linear(E, Hk * D, bias=False)
        self.o = nn.Linear(H * D, E, bias=False)
        for p, s in ((self.q, spread), (self.k, spread), (self.v, 1), (self.o, 1)):
            nn.init.normal_(p.weight, std=s / math.sqrt(E))
        self.qpos, self.knocked = None, None

    def forward(self, x, mask=None, cache=None, context=None):
        c = x if context is None else context
        f = lambda t, h: t.unflatten(-1, (h, -1)).transpose(1, 2)  # noqa: E731
        q, k, v = f(self.q(x), self.H), f(self.k(c), self.Hk), f(self.v(c), self.Hk)
        if cache is not None:
            if self.name in cache:
                k = torch.cat([cache[self.name][0], k], 2)
                v = torch.cat([cache[self.name][1], v], 2)
            cache[self.name] = (k, v)
        r = self.H // self.Hk
        if r > 1:
            k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
        self.qpos = None if context is None else list(range(x.shape[1]))
        o = self.core(self, q, k, v, mask)
        if self.knocked is not None:
            o = o.clone()
            o[:, self.knocked] = 0
        return self.o(o.transpose(1, 2).flatten(2))


class Net(nn.Module):
    """Tokens to logits, some layers of attention, with a cache of (k, v)."""

    def __init__(self, core, E=32, H=4, Hk=2, layers=2, vocab=50, spread=2.0, low=None):
        super().__init__()
        self.emb = nn.Embedding(vocab, E)
        self.pos = nn.Embedding(64, E)
        core = core if isinstance(core, list) else [core] * layers
        self.attn = nn.ModuleList(
            Attn(E, H, Hk, c, spread, f"attn.{i}") for i, c in enumerate(core)
        )
        self.out = nn.Linear(E, vocab)
        self.low = -1e9 if low is None else low
        self.causal = True

    def forward(self, t, cache=None, mask=None, context=None):
        past = 0
        if cache and context is None:
            past = next(iter(cache.values()))[0].shape[2]
        at = torch.arange(past, past + t.shape[1])
        x = self.emb(t) + self.pos(at)
        if mask is None and self.causal and context is None:
            hide = torch.arange(past + t.shape[1]) > at[:, None]
            low = torch.finfo(x.dtype).min if self.low == "min" else self.low
            mask = torch.zeros(hide.shape).to(x.dtype).masked_fill(hide, low)
        for a in self.attn:
            n = nn.functional.layer_norm(x, x.shape[-1:])
            x = x + a(n, mask, cache, context)
        return self.out(x)


def tokens(B=2, N=9, seed=1):
    return torch.randint(50, (B, N), generator=torch.manual_seed(seed))


def flat(x):
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        return [t for v in x.values() for t in flat(v)]
    if isinstance(x, list | tuple):
        return [t for v in x for t in flat(v)]
    return []


def same(a, b):
    a, b = flat(a), flat(b)
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.equal(x.nan_to_num(7e7), y.nan_to_num(7e7))
        for x, y in pairs
    )


def rows_of(taps):
    """All true rows: (layer, id, call, q, W (H, Nk), A (H, Nk))."""
    out = []
    for call, t in enumerate(taps):
        for b, i in enumerate(t["ids"]):
            w, a = t["ideal"][b], t["actual"][b]
            q, kept = t["q"], None
            if t["keep"] is not None:
                kept = t["keep"][b]
                w, a = w[..., kept], a[..., kept]
            for n in range(w.shape[1]):
                at = q[n]
                if kept is not None and at is not None:
                    at = at - int((~kept[: q[n]]).sum())
                if kept is not None and len(kept) > q[n] and not kept[q[n]]:
                    continue
                out.append((t["name"], i, call, at, w[:, n], a[:, n]))
    return out


def pad(x, n):
    return torch.nn.functional.pad(x, (0, n - x.shape[-1]))


def differ(row, t, size, shift):
    """How far a row is outside of what rounding may make of the true one."""
    size += shift
    a, b = (
        torch.nn.functional.pad(x, (shift, size - shift - x.shape[-1]))
        for x in (t[4], t[5])
    )
    row = pad(row, size)
    e = torch.maximum(torch.minimum(a, b) - row, row - torch.maximum(a, b)).max()
    return 9.0 if e.isnan() else e.item()


def compare(seen, taps, tol):
    """Compare records with true rows; return a list of problems and lost rows."""
    truth, problems = rows_of(taps), []
    used = set()
    worst = 0.0
    for r in seen.records:
        base = re.sub(r"#\d+$", "", r.name)
        mine = [(n, t) for n, t in enumerate(truth) if t[0] == base]
        W = torch.as_tensor(r.weights()).double()
        kp = [int(x) for x in r.k_positions]
        qp = [int(x) for x in r.q_positions]
        if kp != list(range(len(kp))):
            problems.append(f"{r.name}: k_positions {kp}")
        owners = None
        for i, q in enumerate(qp):
            best, hits = (9.0, None), []
            for n, t in mine:
                size = max(t[4].shape[1], W.shape[2])
                if t[4].shape[0] != W.shape[0]:
                    continue
                e = min(
                    differ(W[:, i], t, size, shift)
                    for shift in {0, max(0, q - t[3]) if t[3] is not None else 0}
                )
                best = min(best, (e, n), key=lambda x: x[0])
                if e <= tol:
                    hits.append(n)
            worst = max(worst, best[0])
            if not hits:
                t = truth[best[1]] if best[1] is not None else None
                near = t and (t[1], t[2], t[3])
                problems.append(
                    f"WRONG {r.name} row {i} q{q}: off {best[0]:.3g}, nearest {near}"
                )
                continue
            used.update(hits)
            if not any(truth[n][3] in (q, None) for n in hits) and not STATE["rolls"]:
                at = sorted({truth[n][3] for n in hits})
                problems.append(f"POSITION {r.name} row {i} is q{q}, truly {at}")
            ids = {truth[n][1] for n in hits} if STATE["follow"] else {0}
            owners = ids if owners is None else owners & ids
        if owners is not None and not owners:
            problems.append(f"CHIMERA {r.name}: rows of several sequences")
    lost = [t for n, t in enumerate(truth) if n not in used]
    return problems, lost, worst


def message(seen):
    """What the report says is missing."""
    out = [c.reason for c in seen.coverage() if c.reason]
    out += [c.note for c in seen.coverage() if c.note]
    return out


def hooks_left(model):
    left = []
    for n, m in model.named_modules():
        if "forward" in vars(m):
            left.append(n + ".forward")
        for k, v in vars(m).items():
            if k.endswith("hooks") and v:
                left.append(f"{n}.{k}")
    return left


def situation(name, build, tol=None, half=False, extra=None, verbose=False, keep="qk"):
    """Build, tap, watch, compare; print one line."""
    tol = tol if tol is not None else (2e-2 if half else 2e-4)
    problems, start = [], time.time()
    try:
        with contextlib.ExitStack() as stack:
            if not torch.is_grad_enabled():
                stack.enter_context(torch.no_grad())
            torch.manual_seed(0)
            model, call = build()
            STATE["tap"], STATE["ids"] = [], None
            with torch.no_grad():
                plain = call()
            taps, STATE["tap"] = STATE["tap"], None
            torch.manual_seed(0)
            model, call = build()
            with torch.no_grad():
                plain2 = call()
            torch.manual_seed(0)
            model, call = build()
            threads = threading.active_count()
            with torch.no_grad(), regard.watch(model, keep=keep) as seen:
                out = call()
        if not same(plain, plain2):
            problems.append("(test: not deterministic)")
        if not same(plain2, out):
            problems.append("OUTPUT changed")
        if hooks_left(model):
            problems.append(f"LEFT {hooks_left(model)[:3]}")
        if threading.active_count() != threads:
            problems.append("LEFT threads")
        wrong, lost, worst = compare(seen, taps, tol)
        problems += wrong[:3] + ([f"... {len(wrong)} in all"] if len(wrong) > 3 else [])
        text, said = str(seen), message(seen)
        got = re.search(r"(\d+) of (\d+) rows kept", text)
        known = bool(said) or (got and got[1] != got[2])
        if lost and not known:
            problems.append(f"LOST {len(lost)} rows, no message")
        bad = re.search(r"(\d+) failed, (\d+) cannot", text)
        info = f"lost {len(lost)}" if lost else ""
        if bad and (bad[1] != "0"):
            problems.append(f"CERTIFICATE {bad[0]}")
        if bad and bad[2] != "0":
            info += f" [{bad[2]} cannot tell]"
        if any(c.reason for c in seen.coverage()) or not seen.records:
            info += " [REFUSED]"
        if said:
            info += " | " + " / ".join(dict.fromkeys(x[:110] for x in said))
        if extra is not None:
            problems += extra(seen, model) or []
        if verbose:
            print(text)
        info += f" err {worst:.1g}"
    except Exception as e:  # noqa: BLE001
        problems.append(f"CRASH {type(e).__name__}: {e}")
        traceback.print_exc(limit=-4)
        info = ""
    finally:
        STATE["tap"] = None
    COUNT["bad" if problems else "ok"] += 1
    verdict = "DEFECT: " + "; ".join(problems) if problems else "ok"
    print(f"{name} | {verdict} | {info} ({time.time() - start:.1f}s)", flush=True)
