"""What the ring costs: CPU time of all ranks together, against one process.

    python benchmarks/ring.py             writes ring.json and a line in docs/engine.md

Two gloo ranks, one thread each, 8,192 tokens, causal, 8 heads of 64. In every round all
ranks run the ring, then rank 0 runs the same call alone; the ratio is the median of the
rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from marks import fill

from regard import causal
from regard.engine import attend, ring

HERE = Path(__file__).parent
MARK = "<!-- benchmark:ring -->"
N, WORLD, ROUNDS = 8192, 2, 9


def forward(run: Callable[..., Any], arrays: torch.Tensor) -> Callable[[], Any]:
    """Return a forward pass."""
    return lambda: run(*arrays).out


def backward(run: Callable[..., Any], arrays: torch.Tensor) -> Callable[[], Any]:
    """Return a forward and backward pass."""
    arrays = arrays.clone().requires_grad_()
    return lambda: torch.autograd.grad(run(*arrays).out.sum(), arrays)


def spend(run: Callable[[], Any]) -> float:
    """Return the CPU seconds of this process for one run."""
    start = time.process_time()
    run()
    return time.process_time() - start


def work(rank: int, folder: str) -> None:
    """Be one rank; rank 0 writes the ratios down."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    whole = torch.randn(3, 1, 8, N, 64)
    places = ring.zigzag(N, WORLD)
    shard = whole[..., ring.list_positions(places[rank]), :].contiguous()
    result = {}
    for name, make in (("forward", forward), ("forward and backward", backward)):
        together = make(lambda *x: ring.attend(*x, causal(), places=places), shard)
        alone = make(lambda *x: attend(*x, causal()), whole)
        ratios = []
        for _ in range(ROUNDS + 1):
            dist.barrier()
            spent = torch.tensor(spend(together))
            dist.all_reduce(spent)
            ratios.append(float(spent) / spend(alone) if rank == 0 else 0.0)
        result[name] = round(statistics.median(ratios[1:]), 3)  # the first: warming up
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


def render(result: dict[str, Any]) -> str:
    """Return the result as a sentence."""
    lines = [f"{ratio:.2f} {name}" for name, ratio in result["ratio"].items()]
    return (
        f"Total CPU time of {result['ranks']} ranks relative to one process, "
        f"{result['tokens']:,} tokens, causal, float32: {', '.join(lines)}."
    )


def main() -> None:
    """Start the ranks and write the result."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder,), nprocs=WORLD)
        ratio = json.loads(Path(folder, "result.json").read_text("utf-8"))
    result = {"ranks": WORLD, "tokens": N, "torch": torch.__version__, "ratio": ratio}
    (HERE / "ring.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    fill("docs/engine.md", MARK, render(result))


if __name__ == "__main__":
    main()
