"""Tokens a second: regard, transformers, llama.cpp, and what the memory allows.

    python benchmarks/generate.py         writes generate.json and docs/models.md

SmolLM2-135M-Instruct from one GGUF file, greedy, 128 new tokens after a prompt of 128,
2 threads, in one process, in turn; reading the prompt is counted. Each line is the best
of its rounds. The limit is the time to read every weight once a token, at the speed
with which two threads add up a large array in the same run. llama.cpp computes with the
quantized weights of the file, so its numbers are not the same model's; it is left out
if llama-cpp-python is not installed. CPU only.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from marks import fill
from rich.progress import Progress
from smollm import find_smollm
from transformers import AutoModelForCausalLM
from transformers import logging as transformers_logging

from regard.nn.generation import generate
from regard.nn.weights import load

HERE = Path(__file__).parent
MARK = "<!-- benchmark:generate -->"
TOKENS, ROUNDS, THREADS = 128, 5, 2
Run = Callable[[], list[int]]


def make_ours(path: Path, dtype: torch.dtype, prompt: list[int]) -> Run:
    """Return our generation."""
    model, _ = load(path, dtype=dtype)
    return lambda: generate(model, [prompt], TOKENS)[0]


def make_theirs(path: Path, dtype: torch.dtype, prompt: list[int]) -> Run:
    """Return that of transformers, with the same weights in the same dtype."""
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    model = model.to(dtype).eval()
    tokens = torch.tensor([prompt])

    def run() -> list[int]:
        found = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            pad_token_id=0,
        )
        return found[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    return run


def make_llama_cpp(path: Path, prompt: list[int]) -> Run:
    """Return that of llama.cpp, on the quantized weights."""
    from llama_cpp import Llama  # noqa: PLC0415

    model = Llama(str(path), n_ctx=512, n_threads=THREADS, verbose=False)

    def run() -> list[int]:
        model.reset()
        steps = model.generate(prompt, temp=0.0, repeat_penalty=1.0)
        return [token for token, _ in zip(steps, range(TOKENS), strict=False)]

    return run


def measure_bandwidth() -> float:
    """Return the GB a second at which a large array is read."""
    x = torch.ones(150_000_000)
    best = min(clock(x.sum)[0] for _ in range(9))
    return 4 * x.numel() / best / 1e9


def clock(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a run, and what it gave."""
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def render(result: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    lines = [
        "| SmolLM2-135M, tokens/s | regard | transformers | ratio | limit |",
        "|---|---|---|---|---|",
    ]
    for name in ("float32", "bfloat16"):
        x = result["speed"][name]
        lines.append(
            f"| {name} | {x['regard']:.1f} | {x['transformers']:.1f} | "
            f"{x['ratio']:.2f} | {x['limit']:.0f} |"
        )
    about = f"Memory bandwidth: {result['bandwidth_GB_s']:.1f} GB/s. "
    if "llama.cpp" in result["speed"]:
        speed = result["speed"]["llama.cpp"]
        about += (
            "llama.cpp, on the quantized weights of the same file (Q4_1), reaches "
            f"{speed['llama.cpp']:.1f} tokens/s; their limit is "
            f"{speed['limit']:.0f}."
        )
    return "\n".join([*lines, "", about.strip()])


def main() -> None:
    """Measure and write the results."""
    torch.set_num_threads(THREADS)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    path = find_smollm()
    _, tokenizer = load(path)
    prompt = tokenizer.encode((HERE.parent / "LICENSE").read_text("utf-8"))[:TOKENS]
    runs: dict[tuple[str, str], Run] = {}
    sizes = {"float32": 4 * 134_515_008, "bfloat16": 2 * 134_515_008}
    for name in sizes:
        runs[name, "regard"] = make_ours(path, getattr(torch, name), prompt)
        runs[name, "transformers"] = make_theirs(path, getattr(torch, name), prompt)
    if importlib.util.find_spec("llama_cpp"):
        runs["llama.cpp", "llama.cpp"] = make_llama_cpp(path, prompt)
        sizes["llama.cpp"] = path.stat().st_size
    taken: dict[tuple[str, str], float] = dict.fromkeys(runs, float("inf"))
    tokens, bandwidth = {}, 0.0
    with Progress() as progress:
        for _ in progress.track(range(ROUNDS + 1), description="measuring"):
            bandwidth = max(bandwidth, measure_bandwidth())
            for key, run in runs.items():
                seconds, tokens[key] = clock(run)
                taken[key] = min(taken[key], seconds)
    assert tokens["float32", "regard"] == tokens["float32", "transformers"]
    speed: dict[str, dict[str, float]] = {name: {} for name in sizes}
    for (name, who), seconds in taken.items():
        speed[name][who] = round(TOKENS / seconds, 2)
    for name, size in sizes.items():
        speed[name]["limit"] = round(bandwidth * 1e9 / size, 1)
        if name != "llama.cpp":
            both = speed[name]
            both["ratio"] = round(both["regard"] / both["transformers"], 3)
    names = ("regard", "torch", "transformers")
    about: dict[str, Any] = {name: version(name) for name in names}
    about |= {"python": platform.python_version(), "threads": THREADS}
    result = {"about": about, "bandwidth_GB_s": round(bandwidth, 2), "speed": speed}
    (HERE / "generate.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    fill("docs/models.md", MARK, render(result))


if __name__ == "__main__":
    main()
