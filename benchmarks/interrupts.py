"""Interrupt a watch and an ablation everywhere, and look for what is left behind.

    python benchmarks/interrupts.py                  all places, and 2,000 random times
    python benchmarks/interrupts.py --places 60 --times 40        a sample of both

places    each opcode of our own code (and of contextlib) that runs while a block is
          entered or left: a real signal, SIGINT, is raised there
times     a thread sends the signal a random time after the block was begun

Left behind are: hooks of modules, dispatch modes, patched attributes, disabled
functions of torch, another handler of the signal, and a next watch that does not
record. The results are in interrupts.json.
"""

# ruff: noqa: SLF001 (what is left behind is private)

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from marks import fill
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import regard
from regard.ablate import knock_out
from regard.ablate.active import ACTIVE
from regard.run.monkeypatch import PATCHED

RESULT = Path(__file__).with_suffix(".json")
MARK = "<!-- benchmark:interrupts -->"
OWN = str(Path(regard.__file__).parent)
FILES = (OWN, contextlib.__file__)
Place = tuple[str, str, int, int]  # file, function, its first line, offset


class Attention(nn.Module):
    """Two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in "qkv")

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of values."""
        q, k, v = (
            y(x).unflatten(-1, (2, 4)).transpose(1, 2) for y in (self.q, self.k, self.v)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


MODEL, X = Attention().eval(), torch.randn(1, 5, 8)
CLEAN = MODEL(X)
BLOCKS = {
    "watch": lambda: regard.watch(MODEL),
    "knock_out": lambda: knock_out(MODEL, [(0, 1)]),
}


def find_leftovers() -> list[str]:
    """Return what a block left behind."""
    found = []
    hooks = [
        x for m in MODEL.modules() for x in (*m._forward_hooks, *m._forward_pre_hooks)
    ]
    if hooks:
        found.append("hooks")
    if _get_current_dispatch_mode_stack() or torch._C._len_torch_function_stack():
        found.append("modes")
    if PATCHED or ACTIVE:
        found.append("patches")
    if str(torch._C._get_torch_function_state()) != "_TorchFunctionState.ENABLED":
        found.append("disabled functions")
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        found.append("handler")
    with torch.no_grad():
        if not torch.equal(MODEL(X), CLEAN):
            found.append("outputs")
        with regard.watch(MODEL) as seen:
            MODEL(X)
    if len(seen.records) != 1:
        found.append("next watch")
    return found


class Tracer:
    """Notes the places of our own code, or raises the signal at one of them."""

    def __init__(self, target: Place | None = None) -> None:
        self.target, self.seen = target, {}
        self.on = self.has_fired = False

    def trace(self, frame: Any, event: str, _arg: Any) -> Any:
        """Trace the opcodes of our own files."""
        code = frame.f_code
        if not code.co_filename.startswith(FILES):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and self.on:
            at = (code.co_filename, code.co_name, code.co_firstlineno, frame.f_lasti)
            if self.target is None:
                self.seen.setdefault(at)
            elif at == self.target:
                self.on, self.has_fired = False, True
                signal.raise_signal(signal.SIGINT)
        return self.trace


def run_block(name: str, tracer: Tracer) -> None:
    """Enter a block, run the model, and leave it; trace entering and leaving."""
    with torch.no_grad():
        sys.settrace(tracer.trace)
        tracer.on = True
        try:
            with BLOCKS[name]():
                tracer.on = False
                sys.settrace(None)
                MODEL(X)
                sys.settrace(tracer.trace)
                sys._getframe().f_trace = tracer.trace
                tracer.on = not tracer.has_fired
        finally:
            sys.settrace(None)


def list_places(name: str) -> list[Place]:
    """Return each place of our own code in which a block is entered or left."""
    with torch.no_grad(), BLOCKS[name]():  # what is loaded once is loaded now
        MODEL(X)
    tracer = Tracer()
    run_block(name, tracer)
    return [*tracer.seen]


def interrupt_places(name: str, places: list[Place]) -> Iterator[list[str]]:
    """Yield what is left behind by an interrupt at each place."""
    for place in places:
        tracer = Tracer(place)
        with contextlib.suppress(KeyboardInterrupt):
            run_block(name, tracer)
        yield find_leftovers() if tracer.has_fired else ["not reached"]


def interrupt_times(name: str, n: int, seed: int) -> Iterator[list[str]]:
    """Yield what is left behind by interrupts at random times."""
    random.seed(seed)
    start = time.perf_counter()
    with BLOCKS[name](), torch.no_grad():
        MODEL(X)
    usual = time.perf_counter() - start
    for _ in range(n):
        done, after = threading.Event(), random.random() * usual * 1.2

        def send(done: threading.Event = done, after: float = after) -> None:
            if not done.wait(after):
                os.kill(os.getpid(), signal.SIGINT)
            done.set()

        sender = threading.Thread(target=send)
        with contextlib.suppress(KeyboardInterrupt):
            sender.start()
            with BLOCKS[name](), torch.no_grad():
                MODEL(X)
        try:
            done.set()
            sender.join()
        except KeyboardInterrupt:
            sender.join()
        yield find_leftovers()


def measure(places: int | None, times: int, seed: int = 0) -> dict[str, Any]:
    """Return how many interrupts left something behind, by block."""
    result = {}
    for name in BLOCKS:
        known = list_places(name)
        some = known
        if places is not None:
            some = random.Random(seed).sample(known, min(places, len(known)))
        found: Counter[str] = Counter()
        for left in interrupt_places(name, some):
            found.update(left)
        for left in interrupt_times(name, times, seed):
            found.update(left)
        result[name] = {
            "opcodes": len(known),
            "interrupted": len(some),
            "random times": times,
            "left behind": dict(found),
        }
    return result


def render(result: dict[str, Any]) -> str:
    """Return the table of the page."""
    lines = ["| block | opcodes | random times | left behind |", "|---|---|---|---|"]
    for name, found in result.items():
        left = ", ".join(found["left behind"]) or "nothing"
        counts = f"{found['interrupted']:,} | {found['random times']:,}"
        lines.append(f"| `{name}` | {counts} | {left} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and store the result if nothing was sampled."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--places", type=int)
    parser.add_argument("--times", type=int, default=1000)
    given = parser.parse_args()
    result = measure(given.places, given.times)
    print(json.dumps(result, indent=2))
    if given.places is None:
        RESULT.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
        fill("docs/lens_design.md", MARK, render(result))


if __name__ == "__main__":
    main()
