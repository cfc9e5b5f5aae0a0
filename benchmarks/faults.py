"""How many kernels with one random fault pass `regard check`.

    python benchmarks/faults.py           judges 200, writes faults.json, docs/check.md
    python benchmarks/faults.py 7 40      seed 7, 40 faults: prints only

Each kernel is one of faulty_kernels.py. It counts only if some call shows that it is
wrong: the kernel without the fault agrees with the definition there, the faulty one
does not.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faulty_kernels import KINDS, Fault, draw_fault, make_kernel
from marks import fill

from regard.judge.difference import TOLERANCE, compare_arrays
from regard.judge.inputs import (
    CallFailedError,
    Inputs,
    NotAskedError,
    compute_expected,
    expect_gradients,
)
from regard.judge.run_check import CASES, check
from regard.judge.size_cases import SIZES
from regard.judge.subject import Subject
from regard.judge.value_cases import VALUES

HERE = Path(__file__).parent
MARK = "<!-- benchmark:faults -->"
SEED, MANY = 27182, 200  # the seed of the table; the cases were written with others
TRIES = 60
CELLS = 300_000


def draw_sizes(rng: np.random.Generator, wants: dict[str, Any]) -> dict[str, int]:
    """Return small sizes, but for those that a fault needs."""
    high = {"b": 3, "h": 4, "i": 9, "j": 9, "d": 8, "e": 8}
    sizes = {a: int(rng.integers(1, n + 1)) for a, n in high.items()}
    if rng.random() < 0.3:
        sizes["j"] = sizes["i"]
    for axis, n in wants.items():
        if axis in sizes or axis == "g":
            sizes[axis] = n
    shared = sizes.setdefault("g", sizes["h"])
    if sizes["h"] % shared:
        sizes["h"] = shared
    if "j" not in wants and "i" in wants and rng.random() < 0.3 and sizes["i"] < 400:
        sizes["j"] = sizes["i"]
    return sizes


def draw_inputs(rng: np.random.Generator, fault: Fault) -> Inputs:
    """Return a call that the fault may show in."""
    wants, n = fault.wants, draw_sizes(rng, fault.wants)
    q = rng.normal(size=(n["b"], n["h"], n["i"], n["d"]))
    k = rng.normal(size=(n["b"], n["g"], n["j"], n["d"]))
    v = rng.normal(size=(n["b"], n["g"], n["j"], n["e"]))
    if "size" in wants:
        q, v = (x * max(1, 3 * wants["size"]) for x in (q, v))
    if "high" in wants:
        k[..., 0] = 1
        q[..., 0] = wants["high"] * n["d"] ** 0.5 * rng.uniform(0.9, 1.3, q.shape[:3])
    if "zeros" in wants:
        q[rng.random(q.shape[:3]) < 0.5] = 0
        v[rng.random(v.shape[:3]) < 0.5] = 0
        k[:, :, -1] = k[:, :, 0]
    inputs = Inputs(q=q, k=k, v=v)
    if "nan" in wants:
        x = getattr(inputs, str(rng.choice(["q", "k", "v"])))
        x[tuple(rng.integers(m) for m in x.shape)] = np.nan
        return inputs
    return add_options(rng, inputs, fault)


def add_options(rng: np.random.Generator, inputs: Inputs, fault: Fault) -> Inputs:
    """Return a call with some of the options that the signature has."""
    (batch, heads, n_q, n_k), found = inputs.shape, inputs
    if fault.signature == "plain":
        return found
    if rng.random() < 0.5:
        shape = [n if rng.random() < 0.7 else 1 for n in (batch, heads, n_q)]
        mask = rng.random((*shape, n_k)) < rng.choice([0.3, 0.7, 0.95])
        found = replace(found, mask=mask)
    if rng.random() < 0.5:
        placed = fault.signature == "full" and n_k > n_q
        if n_q == n_k or placed:
            found = replace(found, causal=True, q_start=n_k - n_q)
    if fault.signature == "full":
        if rng.random() < 0.4 and n_q * n_k < CELLS:
            found = replace(found, bias=rng.normal(size=(1, heads, n_q, n_k)))
        if rng.random() < 0.3 and not fault.backward and "high" not in fault.wants:
            found = replace(found, softcap=3.0)
        if rng.random() < 0.3:
            found = replace(found, sink=rng.normal(size=heads))
        if rng.random() < 0.3 or "scale" in fault.wants:
            found = replace(found, scale=fault.wants.get("scale", 0.7))
    return found


def shows(fault: Fault, right: Subject, wrong: Subject, inputs: Inputs) -> bool:
    """Tell whether the faulty kernel is wrong, and the other right, on a call."""
    precision = fault.wants.get("dtype", "float64")
    room = TOLERANCE[precision]
    visible = 1e-6 if precision == "float64" else 10 * room
    if fault.backward:
        g = np.random.default_rng(0).normal(
            size=(*inputs.q.shape[:3], inputs.v.shape[-1])
        )
        expected = expect_gradients(inputs.round(precision), g)
        good, bad = (s.ask_gradients(inputs, g, precision) for s in (right, wrong))
        pairs = [*zip(good, bad, expected, strict=True)]
        room, visible = 10 * room, max(1e-6, 20 * room)
    else:
        answer = compute_expected(inputs.round(precision))
        good, bad = (s.ask(inputs, precision) for s in (right, wrong))
        pairs = [
            (getattr(good, n), getattr(bad, n), getattr(answer, n))
            for n in ("out", "lse")
        ]
    if any(compare_arrays(x, y, atol=room) for x, _, y in pairs):
        return False  # out of what the kernel promises, such as an overflow
    return any(compare_arrays(x, y, atol=visible) for _, x, y in pairs)


def find_witness(fault: Fault, rng: np.random.Generator) -> Inputs | None:
    """Return a call on which the faulty kernel is wrong, if there is one."""
    right, wrong = (
        Subject(*kernel, limit=float("inf"))
        for kernel in (
            make_kernel(fault.library, fault.signature, lambda _, x, __: x),
            fault.kernel(),
        )
    )
    for _ in range(TRIES):
        inputs = draw_inputs(rng, fault)
        if np.prod([float(n) for n in inputs.shape]) > CELLS:
            continue
        try:
            if shows(fault, right, wrong, inputs):
                return inputs
        except (NotAskedError, CallFailedError):
            continue
    return None


def draw_faults(seed: int, many: int) -> tuple[list[Fault], int]:
    """Return faults of all kinds, and how many were discarded: they change nothing."""
    found: list[Fault] = []
    discarded = 0
    while len(found) < many:
        kind = KINDS[len(found) % len(KINDS)]
        rng = np.random.default_rng([seed, len(found), discarded])
        fault = draw_fault(rng, kind)
        if find_witness(fault, rng) is None:
            discarded += 1
        else:
            found.append(fault)
    return found, discarded


def judge(seed: int, many: int) -> dict[str, Any]:
    """Draw faults, judge each, and count those that pass."""
    began = time.perf_counter()
    faults, discarded = draw_faults(seed, many)
    survivors, caught, small = [], Counter(), 0
    for fault in faults:
        report = check(*fault.kernel(), level="kernel")
        small += not [x for x in report.failed if x.case not in (*SIZES, *VALUES)]
        if report.ok:
            survivors.append(fault)
            print(f"passes: {fault.kind}: {fault}", flush=True)
        else:
            caught[report.failed[0].name] += 1
    kinds = {k: sum(f.kind == k for f in faults) for k in KINDS}
    passed = {k: sum(f.kind == k for f in survivors) for k in KINDS}
    return {
        "seed": seed,
        "cases": len(CASES),
        "faults": len(faults),
        "backward": sum(f.backward for f in faults),
        "discarded": discarded,
        "pass": len(survivors),
        "pass without sizes.py and values.py": small,
        "kinds": {k: {"faults": kinds[k], "pass": passed[k]} for k in KINDS},
        "survivors": [f"{f.kind}: {f}" for f in survivors],
        "first failure": dict(caught.most_common()),
        "seconds": round(time.perf_counter() - began),
    }


def main() -> None:
    """Judge the faults of the table, or of another seed."""
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        found = judge(int(sys.argv[1]), int(sys.argv[2]))
        print(
            json.dumps({k: x for k, x in found.items() if k != "survivors"}, indent=1)
        )
        return
    found = judge(SEED, MANY)
    (HERE / "faults.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    fill("docs/check.md", MARK, render(found))


def render(found: dict[str, Any]) -> str:
    """Return the table."""
    lines = ["| fault depends on | kernels | pass |", "|---|---:|---:|"]
    words = {
        "index": "an index",
        "size": "a size",
        "dtype": "a dtype",
        "value": "a value",
    }
    for kind, counts in found["kinds"].items():
        lines.append(f"| {words[kind]} | {counts['faults']} | {counts['pass']} |")
    lines.append(f"| **all** | **{found['faults']}** | **{found['pass']}** |")
    lines += ["", *(f"- passes: {text}" for text in found["survivors"])]
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    main()
