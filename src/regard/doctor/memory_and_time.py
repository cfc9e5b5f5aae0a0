"""Measure memory and time on a device, next to those of the bare kernel.

    memory    the peak of one engine call, next to the size of one matrix of weights
    time      engine / scaled_dot_product_attention, and watched / unwatched model

Times are the best of several rounds in which both sides run in turn, so that other
work on the machine slows both. A ratio above the limit is "slow", not "broken": another
program may have used the device.

Next: ../commands/doctor.py
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard.doctor.examined import Trial
from regard.engine.choose import attend
from regard.masks.patterns import causal, window
from regard.nn.decoder import CausalTransformer
from regard.plain.config import Config
from regard.seen import watch

MEMORY = "memory is linear in the sequence length"
COST = "the cost is close to that of the bare kernel"
HEADS, LENGTH, WIDTH = 8, 4096, 64
FRACTION = 8  # a call may use one eighth of the memory of a matrix of weights
ROUNDS, SLOW = 5, 1.5
STATUS, REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MODEL = Config(vocabulary=64, context=1024, width=576, layers=4, heads=9)


def draw_long_arrays(n: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return q, k and v (1, H, N, D) in float32."""
    generator = torch.Generator().manual_seed(0)
    arrays = torch.randn(3, 1, HEADS, n, WIDTH, generator=generator)
    return tuple(arrays.to(device))


def check_memory(device: torch.device) -> Iterator[Trial]:
    """Compare the peak of a call with a matrix of weights, which grows as N²."""
    trial = Trial(MEMORY, f"engine, {LENGTH:,} tokens", str(device))
    matrix = HEADS * LENGTH**2 * 4 / 1e6
    (q, k, v), mask = draw_long_arrays(LENGTH, device), causal() & window(1023)
    attend(q[:, :, :64], k[:, :, :64], v[:, :, :64], mask, q_start=0)
    used = measure_peak(lambda: attend(q, k, v, mask, q_start=0), device)
    if used is None:
        yield trial.end("not run", says="torch cannot tell the peak of its memory.")
        return
    yield trial.end(
        "holds" if used <= matrix / FRACTION else "broken",
        f"{used:,.0f} MB; one matrix of weights has {matrix:,.0f} MB",
        f"at most {matrix / FRACTION:,.0f} MB",
    )


def measure_peak(run: Callable[[], Any], device: torch.device) -> float | None:
    """Return the memory that a call adds at its peak, in MB; None if unknown."""
    if device.type == "cpu":
        if not REFS.exists():  # only Linux has it
            return None
        REFS.write_text("5", encoding="utf-8")  # forget the peak so far
        before = read_process_peak()
        run()
        return read_process_peak() - before
    try:
        torch.accelerator.reset_peak_memory_stats(device)
        start = torch.accelerator.max_memory_allocated(device)
        run()
        return float(torch.accelerator.max_memory_allocated(device) - start) / 1e6
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def read_process_peak() -> float:
    """Return the peak memory of this process, in MB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text(encoding="utf-8"))
    return int(found[1]) / 1024 if found else 0.0


def check_times(device: torch.device) -> Iterator[Trial]:
    """Compare the engine with the bare kernel, and a watched with a bare model."""
    q, k, v = draw_long_arrays(1024, device)
    yield compare_times(
        "engine, causal, 1,024 tokens",
        lambda: attend(q, k, v, causal(), q_start=0),
        lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
        device,
    )
    torch.manual_seed(0)
    model = CausalTransformer(MODEL).eval().to(device)
    tokens = torch.randint(0, MODEL.vocabulary, (1, 1024)).to(device)

    def run_watched() -> None:
        with watch(model):
            model(tokens)

    yield compare_times(
        "watched model, 1,024 tokens", run_watched, lambda: model(tokens), device
    )


def compare_times(
    subject: str,
    ours: Callable[[], Any],
    bare: Callable[[], Any],
    device: torch.device,
) -> Trial:
    """Run both sides in turn; compare the best times."""
    times: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        for _ in range(ROUNDS + 1):
            for run, seconds in zip((ours, bare), times, strict=True):
                wait_for_device(device)
                start = time.perf_counter()
                run()
                wait_for_device(device)
                seconds.append(time.perf_counter() - start)
    best, theirs = (min(seconds[1:]) for seconds in times)  # the first round warms up
    ratio = best / theirs
    return Trial(COST, subject, str(device)).end(
        "holds" if ratio <= SLOW else "slow",
        f"{ratio:.2f} times, {1e3 * best:.1f} ms",
        f"at most {SLOW}",
    )


def wait_for_device(device: torch.device) -> None:
    """Wait until a device has finished its work: a copy to the host comes after it."""
    torch.zeros(1, device=device).cpu()
