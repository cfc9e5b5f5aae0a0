"""Situations (d) and (f): statistics, files, audits, threads, errors."""

import gc
import tempfile
import threading
from pathlib import Path

import continued as c
import torch
from half import Alibi, Cap, Fp32, Mixed, OneKey, Sdpa, Sink, make
from oracle import COUNT, STATE, Core, compare, hooks_left, situation, tokens

import regard

BF, FP, F32 = torch.bfloat16, torch.float16, torch.float32


def say(name, problems, info=""):
    COUNT["bad" if problems else "ok"] += 1
    verdict = "DEFECT: " + "; ".join(map(str, problems)) if problems else "ok"
    print(f"{name} | {verdict} | {info}", flush=True)


def statistics(tol):
    """Table, file, audit and page, compared with the shown weights and the truth."""

    def extra(seen, model):
        bad = []
        for f in seen.audit():
            if f.level != "info" if hasattr(f, "level") else True:
                bad.append(f"AUDIT {str(f)[:120]}")
        with tempfile.TemporaryDirectory() as d:
            seen.save(Path(d) / "x.regard")
            again = regard.open(Path(d) / "x.regard", verify=True)
            for a, b in zip(seen.records, again.records, strict=True):
                x, y = torch.as_tensor(a.weights()), torch.as_tensor(b.weights())
                if (x - y).abs().max() > 1e-6:
                    bad.append(f"FILE {a.name} {(x - y).abs().max()}")
                if a.certificate != b.certificate or a.origin != b.origin:
                    bad.append("FILE certificate or origin is lost")
            if str(again) != str(seen):
                bad.append("FILE print differs")
            try:
                seen.page(Path(d) / "x.html")
            except ValueError as e:
                bad.append(f"PAGE {e}")
            if str(again.table()) != str(seen.table()):
                bad.append("FILE table differs")
        bad += check_table(seen, tol)
        return bad

    return extra


def check_table(seen, tol):
    """Entropy, sink, previous, self of each head, from the shown weights."""
    bad, table = [], seen.table()
    at = 0
    lines = [x for x in str(table).splitlines() if x.strip() and x.strip()[0].isdigit()]
    head = str(table).splitlines()[0].split()
    for r in seen.records:
        W = torch.as_tensor(r.weights()).double()
        q, k = (torch.as_tensor(x) for x in (r.q_positions, r.k_positions))
        for h in range(r.heads):
            if at >= len(lines):
                return bad
            line = dict(zip(head, lines[at].split(), strict=False))
            at += 1
            w = W[h]
            mine = {
                "entropy": (-(w * w.clamp_min(1e-300).log2()).sum(-1)).mean(),
                "sink": w[:, 0].mean(),
                "self": (w * (q[:, None] == k)).sum() / len(q),
            }
            for n, x in mine.items():
                if n in line and line[n] != "–" and abs(float(line[n]) - x) > tol:
                    bad.append(f"TABLE {r.name} {h} {n}: {line[n]}, not {x:.3f}")
    return bad[:3]


class Boom(Exception):
    pass


def truth(make_, n=0):
    torch.manual_seed(n)
    net, call = make_()
    STATE["tap"], STATE["ids"] = [], None
    with torch.no_grad():
        out = call()
    taps, STATE["tap"] = STATE["tap"], None
    torch.manual_seed(n)
    return *make_(), taps, out


def raising(error, layer=1, after=2):
    net, call, taps, _ = truth(c.build(c.grow, Core))
    count = [0]

    def hook(*_):
        count[0] += 1
        if count[0] > after:
            raise error

    handle = net.attn[layer].o.register_forward_hook(hook)
    bad = []
    try:
        with torch.no_grad(), regard.watch(net) as seen:
            call()
    except (Boom, KeyboardInterrupt, GeneratorExit):
        pass
    handle.remove()
    if hooks_left(net):
        bad.append(f"LEFT {hooks_left(net)[:2]}")
    bad += compare(seen, taps, 2e-4)[0][:3]
    with torch.no_grad(), regard.watch(net) as seen:
        call()
    bad += compare(seen, taps, 2e-4)[0][:3]
    say(f"error {type(error).__name__} in layer {layer} after {after}", bad)


def threads():
    net, call, taps, _ = truth(c.build(c.interleaved, Core))
    bad, outs = [], []
    with regard.watch(net) as seen:
        def work():
            with torch.no_grad():
                outs.append(call())

        many = [threading.Thread(target=work) for _ in range(3)]
        [x.start() for x in many]
        [x.join() for x in many]
    bad += compare(seen, taps, 2e-4)[0][:3]
    text = str(seen).splitlines()
    say("three threads in one watch", bad, f"{len(seen.records)} records {text[-1]}")
    net2, call2, _, _ = truth(c.build(c.grow, Core), 1)
    net, call, taps, _ = truth(c.build(c.grow, Core))
    with torch.no_grad(), regard.watch(net) as seen:
        t = threading.Thread(target=call2)
        t.start()
        call()
        t.join()
    bad = compare(seen, taps, 2e-4)[0][:3]
    say("another model in another thread", bad, f"{len(seen.records)} records")


def nested():
    net, call, taps, out = truth(c.build(c.grow, Core))
    with torch.no_grad(), regard.watch(net) as a:
        call()
        with regard.watch(net) as b:
            call()
        with regard.watch(net.attn[0]) as d:
            call()
    bad = [x for s in (a, b) for x in compare(s, taps, 2e-4)[0][:2]]
    say("nested watches", bad, f"{len(a.records)} {len(b.records)} {len(d.records)}")
    one, two = regard.watch(net), regard.watch(net)
    with torch.no_grad():
        x, y = one.__enter__(), two.__enter__()
        call()
        one.__exit__(None, None, None)
        call()
        two.__exit__(None, None, None)
    bad = [z for s in (x, y) for z in compare(s, taps, 2e-4)[0][:2]]
    bad += [f"LEFT {hooks_left(net)}"] if hooks_left(net) else []
    got = call()
    if not all(torch.equal(g, o) for g, o in zip(got, out, strict=True)):
        bad.append("OUTPUT changed")
    say("watches that overlap", bad, f"{len(x.records)} {len(y.records)}")


def generator():
    net, call, taps, _ = truth(c.build(c.grow, Core))

    def stream():
        with torch.no_grad(), regard.watch(net) as seen:
            keep.append(seen)
            for n in range(4, 10):
                yield net(tokens(2, 14)[:, :n])

    keep = []
    g = stream()
    for _ in range(3):
        next(g)
        net(tokens(2, 5, seed=99))  # outside, while the generator waits
    g.close()
    gc.collect()
    bad = [f"LEFT {hooks_left(net)[:2]}"] if hooks_left(net) else []
    wrong = compare(keep[0], taps, 2e-4)[0]
    info = f"{len(keep[0].records)} records, of others {len(wrong)}"
    say("a generator that is closed", bad, info)


def numpy_edits():
    for add in (0.05, 0.2, 1.0, 4.0):
        for dtype in (F32, FP):
            class Edited(Fp32):
                def logits(self, m, q, k, mask, add=add):
                    s = super().logits(m, q, k, mask)
                    s.detach().numpy()[:, 1, :, 0] += add
                    return s

            half = dtype is FP
            situation(
                f"numpy adds {add} {str(dtype)[6:]}", make(Edited(), dtype), half=half
            )


class SpoiledMask(Fp32):
    """A mask that is almost -inf in half precision: -11, -8."""

    low = -11.0

    def logits(self, m, q, k, mask):
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        n = k.shape[2]
        hide = torch.arange(n) > torch.arange(n - q.shape[2], n)[:, None]
        return s.masked_fill(hide, self.low)


class Spoiled8(SpoiledMask):
    low = -8.0


class Spoiled30(SpoiledMask):
    low = -30.0


def main():
    for error in (Boom(), KeyboardInterrupt(), GeneratorExit()):
        for layer in (0, 1):
            for after in (0, 3):
                raising(error, layer, after)
    threads()
    nested()
    generator()
    numpy_edits()
    for core in (SpoiledMask, Spoiled8, Spoiled30):
        for dtype in (F32, BF, FP):
            name = f"{core.__name__} {str(dtype)[6:]}"
            situation(name, make(core(), dtype), half=dtype is not F32)
            situation(name + " steps", make(core(), dtype, steps=4),
                      half=dtype is not F32)  # fmt: skip
    for core in (Fp32, Sdpa, Cap, Sink, Alibi, OneKey):
        for dtype in (F32, BF, FP):
            tol = 2e-3 if dtype is F32 else 1e-2
            name = f"statistics {core.__name__} {str(dtype)[6:]}"
            half = dtype is not F32
            situation(name, make(core(), dtype, steps=3), half=half,
                      extra=statistics(tol))  # fmt: skip
    for run in (c.prefix, c.branches, c.grow_ending, c.permuted_cache):
        STATE["follow"] = False
        situation(f"statistics {run.__name__}", c.build(run, Sdpa),
                  extra=statistics(2e-3))  # fmt: skip
        STATE["follow"] = True
    print(COUNT)


if __name__ == "__main__":
    main()
