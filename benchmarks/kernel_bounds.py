"""Bytes and operations of a tile of the kernels, and how fast a GPU can be at best.

    python benchmarks/kernel_bounds.py      writes kernel_bounds.json and its tables

Arithmetic from formulas and data sheets: nothing is measured. A layer takes at least as
long as the slowest of four units would take alone, at its peak:

    matrix     2 D operations for each cell
    vector     instructions of the kernel for each cell, counted in its source
    exp        one for each cell; 16 in a clock in each multiprocessor
    memory     q, k, lse and the results, each read or written once

Real times are above the largest of them, as units wait for each other. A causal layer
of 32 heads over 8 key heads, D = 128, bfloat16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from marks import fill

RESULT = Path(__file__).with_suffix(".json")
MARK = "<!-- benchmark:kernel_bounds -->"
ROWS, KEYS = 128, 64  # of a tile
HEADS, SHARED, D, SIZE = 32, 8, 128, 2  # bytes of a number
LENGTHS = (8_192, 131_072)
FEATURES = 2  # of a table: the first key, and positions
# in a full tile: scale, subtract, times log2 e, add up, maximum; in rows also the lower
# limit of log w, and multiply and add for the entropy and for each feature
VECTOR = {"rows": 7 + FEATURES, "columns": 5}
OUTPUTS = {"rows": 3 + FEATURES, "columns": 2}  # numbers for each query, or key
# peaks of the data sheets: 1e12 products of bfloat16 (dense), bytes; multiprocessors,
# float32 lanes of each, clock in GHz
GPUS = {
    "A100 SXM 80 GB": (312, 2.039, 108, 64, 1.41),
    "H100 SXM": (989.4, 3.35, 132, 128, 1.98),
    "MI300X": (1307.4, 5.3, 304, 64, 2.1),
}
EXP = 16  # in one clock


def describe_tile(kernel: str) -> dict[str, Any]:
    """Return what one tile reads and computes."""
    moved = (KEYS if kernel == "rows" else ROWS) * D * SIZE
    lse = 0 if kernel == "rows" else ROWS * 4
    cells = ROWS * KEYS
    return {
        "kernel": kernel,
        "bytes": moved + lse,
        "bits": ROWS * 8,
        "matrix": 2 * cells * D,
        "vector": cells * VECTOR[kernel],
        "exp": cells,
    }


def bound(kernel: str, gpu: str, n: int) -> dict[str, Any]:
    """Return the milliseconds of each unit for a layer."""
    matrix, memory, processors, lanes, clock = GPUS[gpu]
    cells = HEADS * n * (n + 1) / 2
    once = (HEADS + SHARED) * n * D * SIZE + HEADS * n * 4 * (1 + OUTPUTS[kernel])
    rate = processors * clock * 1e9
    units = {
        "matrix": cells * 2 * D / (matrix * 1e12),
        "vector": cells * VECTOR[kernel] / (rate * lanes),
        "exp": cells / (rate * EXP),
        "memory": once / (memory * 1e12),
    }
    ms = {name: float(f"{1e3 * x:.3g}") for name, x in units.items()}
    return {"kernel": kernel, "gpu": gpu, "tokens": n, **ms}


def render(result: dict[str, Any]) -> str:
    """Return both tables."""
    lines = [
        "| kernel | bytes of a tile | its bits, if undecided | matrix | vector | exp |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {x['kernel']} | {x['bytes']:,} | {x['bits']:,} B | {x['matrix']:,} | "
        f"{x['vector']:,} | {x['exp']:,} |"
        for x in result["tiles"]
    ]
    lines += [
        "",
        "| kernel | GPU | tokens | matrix | vector | exp | memory | at least |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for x in result["bounds"]:
        units = [x[name] for name in ("matrix", "vector", "exp", "memory")]
        cells = " | ".join(f"{ms:g} ms" for ms in [*units, max(units)])
        lines.append(f"| {x['kernel']} | {x['gpu']} | {x['tokens']:,} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Compute both tables and write them."""
    result = {
        "tiles": [describe_tile(kernel) for kernel in VECTOR],
        "bounds": [bound(k, g, n) for k in VECTOR for g in GPUS for n in LENGTHS],
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    fill("docs/accelerators.md", MARK, render(result))


if __name__ == "__main__":
    main()
