"""Dense oracles that do not use regard, and the comparison with what it shows.

final_text: one unpadded pass in float64 with eager attention over the final text.
logged: a log of each softmax and fused call of a run, as dense weights.
"""

import contextlib
import copy
import os
import sys
import traceback
import warnings

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
SDPA = torch.nn.functional.scaled_dot_product_attention
SOFTMAXES = (torch.softmax, torch.nn.functional.softmax, torch.Tensor.softmax)
VERBOSE = bool(os.environ.get("VERBOSE"))


class Log(TorchFunctionMode):
    """Log the dense weights of every attention call: (module name, weights)."""

    def __init__(self, model):
        super().__init__()
        self.model, self.stack, self.calls, self.handles = model, [], [], []

    def __enter__(self):
        for name, m in self.model.named_modules():
            self.handles += [
                m.register_forward_pre_hook(
                    lambda *_, n=name: self.stack.append(n) or None
                ),
                m.register_forward_hook(
                    lambda *_: [self.stack.pop(), None][1], always_call=True
                ),
            ]
        return super().__enter__()

    def __exit__(self, *args):
        for h in self.handles:
            h.remove()
        return super().__exit__(*args)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = self.stack[-1] if self.stack else ""
        if func is SDPA:
            self.calls.append((name, dense(*args, **kwargs)))
        elif func in SOFTMAXES and out.ndim >= 3:
            self.calls.append((name, out.detach().double().clone()))
        return out

    def of(self, name, heads=4):
        """Return the weights of a module's calls, with heads that were packed apart."""
        found = [w for n, w in self.calls if n == name]
        return [
            w if w.shape[1] == heads
            else w.reshape(len(w), heads, -1, w.shape[-1]) for w in found
        ]


def dense(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    enable_gqa=False,
):
    """Return the weights of scaled_dot_product_attention in float64."""
    q, k = q.detach().double(), k.detach().double()
    if k.shape[1] != q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    x = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if is_causal:
        hide = ~torch.ones(x.shape[-2:], dtype=torch.bool).tril()
        x = x.masked_fill(hide, -torch.inf)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            x = x.masked_fill(~attn_mask, -torch.inf)
        else:
            x = x + attn_mask.double()
    return x.softmax(-1).nan_to_num(0.0)


def final_text(model, ids, **more):
    """Return attentions (layers of (H, N, N)) of one pass over one text, float64."""
    twin = copy.deepcopy(model).double().eval()
    twin.set_attn_implementation("eager")
    with torch.no_grad():
        out = twin(
            input_ids=torch.as_tensor(ids)[None],
            output_attentions=True,
            use_cache=False,
            attention_mask=torch.ones(1, len(ids)).long(),
            **more,
        )
    return [x[0].double().numpy() for x in out.attentions]


def spread(model, factor=4.0):
    """Make the attention of a random model far from uniform: scale q and k."""
    g = torch.Generator().manual_seed(7)
    for name, p in model.named_parameters():
        last = name.split(".")[-2] if "." in name else name
        p.data = p.data + 0.02 * torch.randn(p.shape, generator=g).to(p.dtype)
        if p.ndim == 2 and last in ("q_proj", "k_proj", "query", "key", "q", "k"):
            p.data *= factor
    return model.eval()


def dense_record(record, n_queries, n_keys):
    """Return (H, n_queries, n_keys) of a record by its positions; NaN: no row."""
    w = np.asarray(torch.as_tensor(np.asarray(record.weights())).double())
    out = np.full((w.shape[0], n_queries, n_keys), np.nan)
    qp = np.asarray(record.q_positions).astype(int)
    kp = np.asarray(record.k_positions).astype(int)
    if qp.max() >= n_queries or kp.max() >= n_keys:
        raise Defect(f"positions up to {qp.max()}, {kp.max()} of {n_queries, n_keys}")
    if len(set(qp.tolist())) != len(qp) or len(set(kp.tolist())) != len(kp):
        raise Defect("a position twice")
    out[:, qp] = 0
    for i, p in enumerate(qp):
        out[:, p, kp] = w[:, i]
    return out


class Defect(Exception):
    """What regard did wrong."""


def compare(seen, expected, rows=None, tol=1e-3, layers=None, name=""):
    """Compare records with expected[sequence][layer], (H, N, N).

    rows: by sequence, how many rows from 0 on must be there; default N - 1
    """
    bad = []
    for b, texts in enumerate(expected):
        for i, want in enumerate(texts):
            want = np.asarray(want)
            n = want.shape[1] - 1 if rows is None else rows
            n = n[b] if isinstance(n, (list, tuple)) else n
            which = i if layers is None else layers[i]
            try:
                r = seen.layer(which, sequence=b)
            except Exception as e:
                bad.append(f"no record {which} of {b}: {type(e).__name__} {e}"[:200])
                continue
            try:
                got = dense_record(r, *want.shape[1:])
            except Defect as e:
                bad.append(f"{which}/{b}: {e}")
                continue
            have = ~np.isnan(got[0, :, 0])
            lost = [j for j in range(n) if not have[j]]
            if lost:
                bad.append(f"{which}/{b}: rows lost {lost}")
            if have[n:].any():
                bad.append(f"{which}/{b}: more rows than {n}: {np.flatnonzero(have)}")
            some = np.flatnonzero(have)
            off = np.abs(got[:, some] - want[:, some]).max(initial=0)
            if not off <= tol:
                at = np.abs(got[:, some] - want[:, some]).max((0, 2))
                where = some[at > tol]
                bad.append(f"{which}/{b}: WRONG by {off:.3g} in rows {where}"[:120])
    return bad


def state_of(model):
    """Return what a watch could leave behind."""
    import transformers.modeling_utils as mu

    hooks = [
        (n, len(getattr(m, a)))
        for n, m in model.named_modules()
        for a in vars(m)
        if a.endswith("hooks") and a.startswith("_")
    ]
    attrs = [
        (n, sorted(k for k in vars(m) if not k.startswith("_")))
        for n, m in model.named_modules()
    ]
    interface = sorted(
        (k, id(mu.ALL_ATTENTION_FUNCTIONS[k])) for k in mu.ALL_ATTENTION_FUNCTIONS
    )
    classes = [
        (type(m).__name__, id(type(m).forward), id(type(m).__call__))
        for m in model.modules()
    ]
    F = torch.nn.functional
    functions = [
        id(x)
        for x in (
            F.scaled_dot_product_attention,
            F.softmax,
            torch.softmax,
            torch.Tensor.softmax,
            torch.nn.Module.__call__,
            torch.nn.Module._call_impl,
            F.multi_head_attention_forward,
            torch.compile,
            torch.utils.checkpoint.checkpoint,
            torch.func.functional_call,
            torch.vmap,
        )
    ]
    from transformers import cache_utils as cu

    for cls in vars(cu).values():
        if isinstance(cls, type):
            functions += [
                (cls.__name__, k, id(v)) for k, v in vars(cls).items() if callable(v)
            ]
    g = [
        len(getattr(torch.nn.modules.module, k))
        for k in vars(torch.nn.modules.module)
        if k.startswith("_global") and k.endswith("hooks")
    ]
    modes = len(_get_current_dispatch_mode_stack())
    modes = modes, len(torch.overrides._get_current_function_mode_stack())
    return hooks, attrs, interface, classes, functions, g, modes


def same(a, b):
    """Return whether two results are bit-equal."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.shape == b.shape and bool(
            torch.equal(a, b) or torch.equal(torch.isnan(a), torch.isnan(b))
            and torch.equal(a.nan_to_num(), b.nan_to_num())
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return True


def notes(seen):
    """Return the notes and reasons of the coverage, and the certificate's lines."""
    out = []
    for x in seen.coverage():
        if x.reason and x.attention is not False:
            out.append(f"REASON {x.name}: {x.reason}")
        elif x.note:
            out.append(f"note {x.name}: {x.note}")
    out += [s for s in str(seen).splitlines() if "certif" in s]
    return out


def watched(model, run, again=True, **options):
    """Run twice, plain and watched; return (seen, result, problems)."""
    import regard

    bad = []
    if again:  # first, since a first run may leave something behind by itself
        torch.manual_seed(0)
        plain = run(model)
    before = state_of(model)
    torch.manual_seed(0)
    with regard.watch(model, **options) as seen:
        result = run(model)
    after = state_of(model)
    for what, a, b in zip(
        ("hooks", "attributes", "interface", "classes", "functions", "global hooks",
         "modes"), before, after,
    ):
        if a != b:
            bad.append(f"left behind: {what}")
    if again and not same(plain, result):
        bad.append("OUTPUT CHANGED")
    bad += invariants(seen)
    return seen, result, bad


def invariants(seen):
    """Return what does not add up: rows that are lost, certificates, false alarms."""
    bad = []
    for x in seen.coverage():
        left = sum(x.left_out.values())
        if x.rows != x.in_records + left:
            bad.append(f"{x.name}: {x.rows} rows, {x.in_records} kept, {left} told")
        if x.kept != x.calls and not (x.reason or x.note):
            bad.append(f"{x.name}: {x.kept} of {x.calls} calls kept, no message")
    names = [x.name for x in seen.coverage()]
    for name in dict.fromkeys(names):
        if name not in seen.layers or names.count(name) > 1:
            continue
        n = sum(r.shape[1] for r in seen.records if r.name == name)
        told = [x.in_records for x in seen.coverage() if x.name == name][0]
        if n != told:
            bad.append(f"{name}: {n} rows in the records, {told} told")
    for r in seen.records:
        if r.certificate is not None and r.certificate.failed:
            bad.append(f"certificate of {r.name} fails")
        w = np.asarray(torch.as_tensor(np.asarray(r.weights())).double())
        total = w.sum(-1)
        if r.sink is None and not (
            (abs(total - 1) < 2e-2) | (total == 0) | np.isnan(total)
        ).all():
            bad.append(f"{r.name}: rows do not sum to 1")
    return bad


SITUATIONS = []


def situation(f):
    """Register a situation: a function that returns a list of problems."""
    if f.__module__ == "__main__":
        SITUATIONS.append(f)
    return f


def report(seen=None):
    """Print notes, if asked for."""
    if VERBOSE and seen is not None:
        for x in notes(seen):
            print("     ", x[:400])


def main():
    """Run all situations, or those that are named."""
    names = sys.argv[1:]
    for f in SITUATIONS:
        name = f.__name__
        if names and not any(x in name for x in names):
            continue
        try:
            with contextlib.redirect_stderr(open(os.devnull, "w")) if not VERBOSE \
                    else contextlib.nullcontext():
                bad = f()
        except Exception as e:
            if VERBOSE:
                traceback.print_exc()
            bad = [f"CRASH {type(e).__name__}: {e}"[:300]]
        if bad is None:
            print(f"({name} is not built)", flush=True)
            continue
        bad = [x for x in bad if x]
        print(f"{name} | " + ("DEFECT: " + "; ".join(bad[:4]) if bad else "ok"),
              flush=True)
