"""What the engine adds to the bare kernel, and what formulas save.

    python benchmarks/engine.py           writes engine.json and docs/engine.md

The two sides of a line run in turn, many times, in one process with one thread; the
ratio is the median of the pairs, so that a busy machine slows both alike. Below 1 the
engine is faster. CPU only: no GPU was measured.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from marks import fill
from memory import read_peak, reset_peak
from rich.progress import track

from regard import causal, same, window
from regard.engine import attend
from regard.engine.sdpa import sdpa_arguments

HERE = Path(__file__).parent
MARK = "<!-- benchmark:engine -->"
SDPA = torch.nn.functional.scaled_dot_product_attention
Pair = tuple[Callable[[], Any], Callable[[], Any]]


def draw(n: int) -> tuple[torch.Tensor, ...]:
    """Return q, k, v of one batch, 8 heads of 64, float32."""
    torch.manual_seed(0)
    return tuple(torch.randn(3, 1, 8, n, 64))


def backward(run: Callable[..., torch.Tensor], n: int) -> Callable[[], Any]:
    """Return a forward and backward pass."""
    arrays = [x.clone().requires_grad_() for x in draw(n)]
    weight = torch.randn(1, 8, n, 64)
    return lambda: torch.autograd.grad(run(*arrays), arrays, weight)


def make_pairs() -> dict[str, tuple[int, Callable[[], Pair]]]:
    """Return each line: how many pairs to run, and what makes them."""

    def plain(n: int) -> Pair:
        q, k, v = draw(n)
        return lambda: attend(q, k, v), lambda: SDPA(q, k, v)

    def ordered(n: int) -> Pair:
        q, k, v = draw(n)
        return lambda: attend(q, k, v, causal()), lambda: SDPA(q, k, v, is_causal=True)

    def learn(n: int) -> Pair:
        ours = backward(lambda q, k, v: attend(q, k, v, causal()).out, n)
        return ours, backward(lambda q, k, v: SDPA(q, k, v, is_causal=True), n)

    def sparse(mask: Any) -> Pair:
        q, k, v = draw(8192)
        dense = sdpa_arguments(mask, (8192, 8192))["attn_mask"]
        return lambda: attend(q, k, v, mask), lambda: SDPA(q, k, v, attn_mask=dense)

    def decode() -> Pair:
        q, k, v = draw(8192)
        one, mask = q[:, :, -1:], causal()
        return (
            lambda: attend(one, k, v, mask, q_start=8191),
            lambda: SDPA(one, k, v),
        )

    documents = same(torch.arange(8192) // 1000)
    return {
        "plain, 1,024 tokens / SDPA": (101, lambda: plain(1024)),
        "plain, 4,096 tokens / SDPA": (15, lambda: plain(4096)),
        "causal, 1,024 tokens / SDPA is_causal": (101, lambda: ordered(1024)),
        "causal, 4,096 tokens / SDPA is_causal": (15, lambda: ordered(4096)),
        "causal forward and backward, 2,048 / SDPA": (15, lambda: learn(2048)),
        "one query on 8,192 cached keys / SDPA": (1001, decode),
        "window(1023), 8,192 tokens / SDPA, dense bool mask": (
            5,
            lambda: sparse(window(1023)),
        ),
        "documents of 1,000, causal, 8,192 tokens / SDPA, dense bool mask": (
            5,
            lambda: sparse(causal() & documents),
        ),
    }


def compare(times: int, pair: Pair) -> dict[str, float]:
    """Run both sides in turn; return the median ratio and the best times."""
    for run in pair:
        run()
    rounds = [[measure(run) for run in pair] for _ in range(times)]
    ours, theirs = zip(*rounds, strict=True)
    return {
        "ratio": round(statistics.median(a / b for a, b in rounds), 3),
        "ours_ms": round(1000 * min(ours), 3),
        "theirs_ms": round(1000 * min(theirs), 3),
    }


def measure(run: Callable[[], Any]) -> float:
    """Return the seconds of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure_memory() -> float:
    """Return the growth, in MB, of one head over 65,536 tokens under a long formula."""
    n = 65_536
    q, k, v = torch.randn(3, 1, 1, n, 64)
    mask = causal() & window(1023) & same(torch.arange(n) // 5_000)
    attend(q[:, :, :600], k[:, :, :600], v[:, :, :600], window(10))
    before = reset_peak()
    attend(q, k, v, mask)
    return read_peak() - before


def render(result: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    head = "| attend / bare kernel | ratio | attend, ms | kernel, ms |"
    lines = [head, "|---|---|---|---|"]
    for name, line in result["time"].items():
        ratio, ours, theirs = line["ratio"], line["ours_ms"], line["theirs_ms"]
        lines.append(f"| {name} | {ratio:.3f} | {ours:.2f} | {theirs:.2f} |")
    memory = (
        "Memory above the inputs for `causal() & window(1023) & same(ids)` over 65,536 "
        f"tokens, one head: {result['memory_MB']:.0f} MB."
    )
    return "\n".join([*lines, "", memory])


def main() -> None:
    """Measure every line and write the results."""
    torch.set_num_threads(1)
    with torch.no_grad():
        times = {}
        for name, (rounds, make) in track(make_pairs().items(), "measuring"):
            with torch.set_grad_enabled("backward" in name):
                times[name] = compare(rounds, make())
    command = [sys.executable, __file__, "memory"]
    memory = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    about = {name: version(name) for name in ("regard", "torch")}
    about |= {"python": platform.python_version(), "machine": platform.machine()}
    about |= {"threads": 1}
    result = {"about": about, "time": times, "memory_MB": float(memory)}
    (HERE / "engine.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    fill("docs/engine.md", MARK, render(result))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        torch.set_num_threads(1)
        print(measure_memory())
    else:
        main()
