"""A dense oracle for hand-written attention: what a model says that it weighed.

A model calls `tap(name, weights)`: its weights, (sequences, heads, queries, keys).
In the run without a watch the weights are kept; in the watched run `tap` does nothing.
For fused operators the model taps `dense(q, k, ...)`, a softmax in float64.
"""

import os
import sys
import traceback

import numpy as np
import regard
import regard.stats
import torch
import torch.nn.attention.flex_attention
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

torch.set_num_threads(1)
VERBOSE = bool(os.environ.get("VERBOSE"))
TAPS = None  # a dict while the oracle runs


def tap(name, weights):
    """Keep weights (S, H, Nq, Nk) of a layer, if the oracle runs."""
    backward = torch._C._current_graph_task_id() != -1  # of a checkpoint
    if TAPS is not None and not backward:
        with torch.no_grad():
            w = weights() if callable(weights) else weights
            TAPS.setdefault(name, []).append(w.detach().clone().double())


def dense(q, k, scale=None, mask=None, causal=False, bias=None):
    """Return softmax weights in float64; mask True means may attend."""
    q, k = q.detach().double(), k.detach().double()
    if k.shape[1] != q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = q @ k.transpose(-1, -2) * scale
    if bias is not None:
        logits = logits + bias.double()
    if causal:
        tri = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        logits = logits.masked_fill(~tri, -torch.inf)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    return torch.softmax(logits, -1).nan_to_num(0.0)


def state_of(model):
    """Return what a watch must leave as it was."""
    import torch.nn.functional as F

    state = {}
    owners = [torch, F, torch.Tensor, nn.Module, nn.MultiheadAttention]
    owners += [nn.TransformerEncoder, nn.TransformerEncoderLayer, torch.nn.attention]
    owners += [torch._C._nn, torch.autograd.Function, torch.utils.checkpoint]
    owners += [torch.nn.attention.flex_attention, torch.special]
    for owner in owners:
        for key, value in vars(owner).items():
            if callable(value):
                state[str(owner), key] = id(value)
    for name, module in model.named_modules():
        state["keys", name] = tuple(sorted(vars(module)))
        for key, value in vars(module).items():
            if key.endswith("_hooks") and value is not None:
                state[name, key] = len(value)
        state[name, "class"] = type(module)
        state[name, "forward"] = vars(module).get("forward")
    state["dispatch"] = len(_get_current_dispatch_mode_stack())
    state["function"] = torch._C._len_torch_function_stack()
    state["global"] = [
        len(getattr(torch.nn.modules.module, x))
        for x in ("_global_forward_hooks", "_global_forward_pre_hooks")
    ]
    state["fast"] = torch.backends.mha.get_fastpath_enabled()
    state["grad"] = torch.is_grad_enabled()
    state["trace"] = sys.gettrace(), sys.getprofile()
    return state


def same_bits(a, b):
    """Compare two nested results bit by bit."""
    a, b = tree_leaves(a), tree_leaves(b)
    if len(a) != len(b):
        return False
    for x, y in zip(a, b):
        if isinstance(x, torch.Tensor):
            if x.is_nested:
                x, y = x.to_padded_tensor(0.0), y.to_padded_tensor(0.0)
            if x.shape != y.shape or x.dtype != y.dtype:
                return False
            if x.is_meta:
                continue
            if not torch.equal(x.isnan(), y.isnan()):
                return False
            if not torch.equal(x.nan_to_num(), y.nan_to_num()):
                return False
        elif isinstance(x, (int, float, str, bool, type(None))) and x != y:
            return False
    return True


def layer_weights(seen, name):
    """Return the weights of a layer by sequence, and the positions."""
    found = [r for r in seen.records if r.name == name]
    weights = [torch.as_tensor(r.weights()).double() for r in found]
    return found, weights


def compare(seen, taps, *, tol, joined=False):
    """Return a list of defects and a list of remarks.

    joined: every call is a pass of its own, whose sequences are sequences of one layer
    """
    if joined:
        taps = {n: [[t for call in calls for t in call]] for n, calls in taps.items()}
    bad, remarks = [], []
    cover, extra = {}, []
    for c in seen.coverage():
        old = cover.get(c.name)
        if old is None or old.reason and not c.reason:
            cover[c.name] = c
        extra.append(c)
    said = str(seen)
    for name, calls in taps.items():
        for i, truth in enumerate(calls):
            label = name if i == 0 else f"{name}#{i + 1}"
            c = cover.get(label)
            records, weights = layer_weights(seen, label)
            if not records:
                heard = sum(x.calls for x in extra if x.name == name and x.reason)
                if c is None and heard and heard >= len(calls) - 1:
                    remarks.append(f"{label!r} counted with {name!r}: not recorded")
                elif c is None:
                    bad.append(f"{label!r}: not listed, no record")
                elif c.reason:
                    remarks.append(f"{label!r} reported: {c.reason}")
                elif not c.attention:
                    bad.append(f"{label!r}: listed as no attention")
                elif sum(t.numel() for t in truth):
                    bad.append(f"{label!r}: no record, no reason; note {c.note!r}")
                continue
            if c is None:
                bad.append(f"{label!r}: a record, but not in the coverage")
            elif c.note:
                remarks.append(f"{label!r} note: {c.note}")
            if c is not None and c.reason:
                bad.append(f"{label!r}: a record and a reason: {c.reason}")
            got_shape = [tuple(w.shape) for w in weights]
            want = [tuple(t.shape) for t in truth]
            if got_shape != want:
                flat = [m for w in weights for m in w]
                true = [m for t in truth for m in t]
                same = len(flat) == len(true) and all(
                    a.shape == b.shape and torch.allclose(a, b, atol=tol, rtol=0)
                    for a, b in zip(flat, true)
                )
                how = "same matrices, folded" if same else "shapes differ"
                line = f"{label!r}: {how}: {got_shape[:3]} for {want[:3]}"
                told = c is not None and (c.note or c.left_out)
                loose = len(flat) == len(true) and all(
                    any(a.shape == b.shape and (a - b).abs().max() < tol for b in true)
                    for a in flat
                )
                same = same or loose and "by convention" in c.note
                same = same or "counted as queries" in c.note
                if same and told:
                    remarks.append(line)
                else:
                    bad.append(line + (f" left out {c.left_out}" if c else ""))
                continue
            for s, (w, t) in enumerate(zip(weights, truth)):
                both = w.isnan() & t.isnan()
                diff = (w - t).masked_fill(both, 0).abs()
                err = diff.max().item() if w.numel() else 0.0
                if not err <= tol:
                    bad.append(f"{label!r}[{s}]: off by {err:.3g}")
                    break
            for r in records:
                k = torch.as_tensor(r.k_positions)
                if k.tolist() != list(range(len(k))):
                    remarks.append(f"{label!r} keys at {k.tolist()[:6]}")
                if r.certificate is not None and getattr(r.certificate, "failed", 0):
                    bad.append(f"{label!r}: the certificate failed")
    known = {
        n if i == 0 else f"{n}#{i + 1}" for n, c in taps.items() for i in range(len(c))
    }
    for name in dict.fromkeys(r.name for r in seen.records):
        if name not in known:
            _, w = layer_weights(seen, name)
            note = cover[name].note if name in cover else "not covered"
            shapes = [tuple(x.shape) for x in w[:2]]
            if "changed after the softmax" in note:
                remarks.append(f"{name!r}: shown, noted: {note}")
                continue
            bad.append(f"{name!r}: shown, but not in the oracle: {shapes} {note!r}")
    for c in seen.coverage():
        total = c.in_records + sum(c.left_out.values())
        if c.attention and not c.reason and c.rows != total:
            bad.append(f"{c.name!r}: {c.rows} rows, {total} accounted for")
        if "observer failed" in c.reason or "observer failed" in c.note:
            bad.append(f"{c.name!r}: {c.reason} {c.note}")
        if c.name not in known and c.reason:
            remarks.append(f"{c.name!r} also reported: {c.reason}")
    if "certified:" in said and " 0 failed" not in said:
        if "not certified:" not in said:
            bad.append("certificate: " + said.splitlines()[-1])
    for c in extra:
        if VERBOSE and len([x for x in extra if x.name == c.name]) > 1:
            remarks.append(f"{c.name!r} {c.via} {c.kept}/{c.calls} {c.reason}|{c.note}")
    return bad, remarks


def check_views(seen):
    """Save and open, other libraries, statistics: the same numbers."""
    import tempfile

    bad = []
    if not seen.records:
        return bad
    with tempfile.TemporaryDirectory() as folder:
        seen.save(folder + "/a.regard")
        again = regard.open(folder + "/a.regard")
        for one, two in zip(seen.records, again.records, strict=True):
            a, b = torch.as_tensor(one.weights()), torch.as_tensor(two.weights())
            if not torch.allclose(a, b, atol=1e-5, equal_nan=True):
                bad.append(f"{one.name!r}: other weights after save and open")
                break
    first = [r for r in seen.records]
    table = seen.table()
    rows = table.rows if hasattr(table, "rows") else None
    if VERBOSE == 2:
        print(rows)
    for r in first:
        w = torch.as_tensor(r.weights()).double()
        n = torch.as_tensor(r.to("numpy").weights()).double()
        if not torch.allclose(w, n, atol=1e-5, equal_nan=True):
            bad.append(f"{r.name!r}: other weights in numpy")
        if w.shape[1] and w.shape[2] and not w.isnan().any():
            e = torch.special.entr(w).sum(-1)
            got = torch.as_tensor(np.asarray(regard.stats.entropy(r))).double()
            if got.shape == e.shape and not torch.allclose(got, e, atol=1e-3):
                bad.append(f"{r.name!r}: entropy off by {(got - e).abs().max():.3g}")
    return bad


def flatten_grads(model):
    return [p.grad for p in model.parameters()]


def check(
    name, make, *, tol=3e-5, grads=False, watch=None, seed=0, after=None, joined=False
):
    """Run a situation three times and print one line.

    make() returns (model, call); call() runs the model and returns its outputs.
    """
    global TAPS
    if len(sys.argv) > 1 and not any(a in name for a in sys.argv[1:]):
        return
    try:
        torch.manual_seed(seed)
        model, call = make()

        def run():
            torch.manual_seed(seed + 1)
            model.zero_grad(set_to_none=True)
            out = call()
            return [out, flatten_grads(model)] if grads else out

        run()  # lazy modules, caches
        plain = run()
        TAPS = taps = {}
        run()
        TAPS = None
        before = state_of(model)
        with regard.watch(model, **(watch or {})) as seen:
            watched = run()
        changed = [k for k, v in state_of(model).items() if before.get(k) != v]
        again = run()
        bad, remarks = compare(seen, taps, tol=tol, joined=joined)
        if not same_bits(plain, watched):
            bad.append("the outputs differ under the watch")
        if not same_bits(plain, again):
            bad.append("the outputs differ after the watch")
        if changed:
            bad.append(f"left behind: {changed[:4]}")
        bad += check_views(seen)
        if after is not None:
            bad += after(model, seen, taps) or []
    except BaseException as error:  # noqa: BLE001
        TAPS = None
        if VERBOSE:
            traceback.print_exc(limit=-3)
        text = " ".join(str(error).split())[:200]
        bad, remarks = [f"CRASH {type(error).__name__}: {text}"], []
    if bad:
        print(f"{name} | DEFECT: " + "; ".join(bad), flush=True)
    else:
        print(f"{name} | ok", flush=True)
    if VERBOSE:
        for x in remarks:
            print("      ", x)
