"""Situations (e): knock_out and patch_heads against a hook that zeroes the head."""

import continued as c
import torch
from half import Alibi, Cap, Fp32, Sdpa, Sink, Temperature, Window
from oracle import COUNT, STATE, Core, Net, flat, hooks_left, tokens

import regard

BF, FP = torch.bfloat16, torch.float16


def distance(a, b):
    a, b = flat(a), flat(b)
    assert len(a) == len(b)
    return max(float((x.float() - y.float()).abs().max()) for x, y in zip(a, b))


def made(run, core, dtype, **kw):
    torch.manual_seed(0)
    net = Net(core(), low="min", **kw).to(dtype)
    return net, lambda: run(net, tokens(2, 14))


def check(name, run, core, dtype=torch.float32, head=(1, 2), auto=None, watch=False):
    problems, info = [], ""
    try:
        with torch.no_grad(), torch.autocast("cpu", BF, enabled=auto is not None):
            plain = made(run, core, dtype)[1]()
            net, call = made(run, core, dtype)
            net.attn[head[0]].knocked = head[1]
            wanted = call()
            net, call = made(run, core, dtype)
            if watch:
                with regard.watch(net) as seen, regard.knock_out(net, heads=[head]):
                    got = call()
                info += f" {len(seen.records)} records"
            else:
                with regard.knock_out(net, heads=[head]):
                    got = call()
            left = hooks_left(net)
            net, call = made(run, core, dtype)
            zero = lambda z: z * 0  # noqa: E731
            with regard.patch_heads(net, zero, [head]):
                patched = call()
            net, call = made(run, core, dtype)
            with regard.patch_heads(net, lambda z: z, [head]):
                same = call()
        size = distance(plain, wanted)
        for label, x, y in (
            ("knock_out", got, wanted), ("patch to 0", patched, wanted),
            ("patch with itself", same, plain),
        ):  # fmt: skip
            d = distance(x, y)
            if d > 1e-6 * size:
                problems.append(f"{label} is off by {d:.2g} of {size:.2g}")
        problems += [f"LEFT {left[:2]}"] if left else []
        info += f" effect {size:.2g}"
    except Exception as e:  # noqa: BLE001
        problems.append(f"CRASH {type(e).__name__}: {str(e)[:150]}")
    STATE["ids"] = None
    COUNT["bad" if problems else "ok"] += 1
    verdict = "DEFECT: " + "; ".join(problems) if problems else "ok"
    print(f"edit {name} | {verdict} | {info}", flush=True)


def forward(net, t):
    return [net(t[:, :9])]


def main():
    for core in (Core, Fp32, Sdpa, Cap, Sink, Temperature, Alibi, Window):
        for dtype in (torch.float32, BF, FP):
            name = f"{core.__name__} {str(dtype)[6:]}"
            check(name, forward, core, dtype)
    for core in (Core, Fp32, Sdpa):
        check(f"autocast {core.__name__}", forward, core, auto=True)
        for run in c.RUNS:
            check(f"{run.__name__} {core.__name__}", run, core, head=(0, 1))
            if core is Fp32:
                check(f"{run.__name__} watched", run, core, BF, (0, 1), watch=True)
    for kind in c.KINDS:
        for core in (Core, Sdpa):
            name = f"becomes {kind.__name__} from {core.__name__}"
            check(name, c.becomes(kind), core, head=(1, 1))
    print(COUNT)


if __name__ == "__main__":
    main()
