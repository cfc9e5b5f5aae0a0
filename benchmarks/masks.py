"""What mask formulas cost: time and peak memory, against torch in the same run.

    python benchmarks/masks.py            writes masks.json and docs/engine.md

Every line runs in a process of its own, so that peaks do not mix; the faster of three
runs counts. Times are of this machine and mean little; the ratios mean something.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from marks import fill
from memory import read_peak, reset_peak
from torch.nn.attention.flex_attention import create_block_mask

import regard
from regard import causal, same, window
from regard.engine.flex import block_mask

HERE = Path(__file__).parent
MARK = "<!-- benchmark:masks -->"
DESCRIPTIONS = {
    "ours_16384": "`causal() & window(4095) & same(ids)` to BlockMask, 16,384 tokens",
    "torch_16384": "the same by torch's `create_block_mask`",
    "ours_131072": "the same formula, 131,072 tokens",
    "dense_4096": "`attention`, 4,096 tokens, one head of 64, causal, NumPy float32",
    "blocked_4096": "the same with `block=512`",
    "blocked_65536": "`block=512`, 65,536 tokens, `causal() & window(4095)`",
}


def make_mask(n: int) -> Any:
    """Return packed documents of about 1,500 tokens, in a causal window."""
    cuts = np.sort(np.random.default_rng(0).choice(n, n // 1_500, replace=False))
    return causal() & window(4095) & same(np.searchsorted(cuts, np.arange(n), "right"))


def prepare(name: str) -> Callable[[], Any]:
    """Return what is measured, with everything loaded and warm."""
    kind, n = name.split("_", maxsplit=1)[0], int(name.split("_")[1])
    if kind in {"ours", "torch"}:
        mask = make_mask(n)
        block_mask(make_mask(4096), (512, 512))
        if kind == "ours":
            return lambda: block_mask(mask, (n, n))
        placed = mask.place(torch.empty(0))
        return lambda: create_block_mask(placed, None, None, n, n, device="cpu")

    q, k, v = np.random.default_rng(0).standard_normal((3, n, 64), dtype=np.float32)
    mask = causal() & window(4095)
    block = None if kind == "dense" else 512
    regard.attention(q[:64], k[:64], v[:64], mask, block=block)
    return lambda: regard.attention(q, k, v, mask, block=block)


def measure(name: str) -> dict[str, float]:
    """Run one line here and return its seconds and the growth of its peak memory."""
    run = prepare(name)
    before, start = reset_peak(), time.perf_counter()
    run()
    return {"seconds": time.perf_counter() - start, "MB": read_peak() - before}


def measure_apart(name: str) -> dict[str, float]:
    """Run one line in a fresh process."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, name]
    done = subprocess.run(command, env=env, capture_output=True, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def render(result: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    results = result["results"]
    lines = ["| | seconds | memory, MB |", "|---|---|---|"]
    for name, line in results.items():
        lines.append(
            f"| {DESCRIPTIONS[name]} | {line['seconds']:.2f} | {line['MB']:.0f} |"
        )
    ratio = results["torch_16384"]["seconds"] / results["ours_16384"]["seconds"]
    lines.append(
        f"\nBuilding the BlockMask is {ratio:.0f} times faster than with torch."
    )
    return "\n".join(lines)


def main() -> None:
    """Measure everything three times in turn, keep the best, write the results."""
    runs = [{n: measure_apart(n) for n in DESCRIPTIONS} for _ in range(3)]
    best = {
        name: {key: round(min(run[name][key] for run in runs), 3) for key in line}
        for name, line in runs[0].items()
    }
    about = {n: version(n) for n in ("regard", "numpy", "torch")}
    about |= {"python": platform.python_version(), "machine": platform.machine()}
    result = {"about": about | {"threads": 1}, "results": best}
    (HERE / "masks.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    fill("docs/engine.md", MARK, render(result))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(json.dumps(measure(sys.argv[1])))
    else:
        main()
