"""What watching vLLM costs: a watched LLM, and a server that may record.

    python3 .ci/environment.py --serving
    PYTHONPATH=tests/serving .venv.serving/bin/python benchmarks/serving.py

It writes serving.json and docs/howto/watch-vllm.md. `benchmarks/serving.py server` and
`benchmarks/serving.py watch` measure one part, and keep the result of the other one.

prefill, decode   `vllm.LLM` bare and watched, in turns, the best of several rounds: 16
                  prompts of 384 tokens and one new token; 16 of 8 and 128 new tokens
server            requests of 16 clients over loopback to three servers, in turns whose
                  order rotates: two without the plugin's directory, and one with it, of
                  which no request is recorded, then 5 %. CPU time of a server; the two
                  that are alike tell how much of a difference is chance

The model is random, with the shape of SmolLM2-135M (30 layers), in float32 on the CPU.
About ten minutes.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import transformers
from served_model import ask_many, save_model, save_tokenizer, serve
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

import regard

SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 1024,
}
ROUNDS = 5
REQUESTS = 200
PAGE = Path(__file__).parents[1] / "docs" / "howto" / "watch-vllm.md"
MARK = "<!-- benchmark:serving -->"


def save_smollm(folder: Path) -> None:
    """Save a random model with the shape of SmolLM2-135M, and a tokenizer."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)


def measure_watch(folder: Path) -> dict[str, float]:
    """Return the time of watched runs over that of bare ones."""
    llm = LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    rng = np.random.default_rng(0)
    found = {}
    for name, length, new in (("prefill", 384, 1), ("decode", 8, 128)):
        rows = [rng.integers(3, 500, length).tolist() for _ in range(16)]
        prompts = [TokensPrompt(prompt_token_ids=x) for x in rows]
        params = SamplingParams(
            max_tokens=new, temperature=0, ignore_eos=True, detokenize=False
        )

        run = partial(time_run, llm, prompts, params)
        run()
        bare, watched, whole = [], [], []
        for _ in range(ROUNDS):
            bare.append(run())
            begun = time.perf_counter()
            with regard.watch(llm) as seen:
                watched.append(run())
            whole.append(time.perf_counter() - begun)
            assert len(seen.records) == 16 * SHAPE["num_hidden_layers"]
        found[name] = min(watched) / min(bare)
        found[f"{name}_with_records"] = min(whole) / min(bare)
        found[f"{name}_seconds"] = min(bare)
    return found


def time_run(llm: LLM, prompts: list[Any], params: SamplingParams) -> float:
    """Return the seconds of one run."""
    begun = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begun


def measure_server(folder: Path, place: Path) -> dict[str, float]:
    """Return the CPU time of a server with the plugin over that of one without."""
    save_model(folder)
    with ExitStack() as stack:
        # the second run of a server would find the prompts of the first one
        plain = {"options": ("--no-enable-prefix-caching",)}
        record = {"recordings": place / "r", "files": 100_000}
        off = stack.enter_context(serve(folder, place / "off.log", **plain))
        same = stack.enter_context(serve(folder, place / "same.log", **plain))
        on = stack.enter_context(serve(folder, place / "on.log", **plain, **record))
        plan = [("off", off, 0.0), ("same", same, 0.0), ("on", on, 0.0)]
        plan += [("recorded", on, 0.05)]
        used: dict[str, list[float]] = {name: [] for name, _, _ in plan}
        for turn in range(2 * ROUNDS + 1):
            plan = [*plan[1:], plan[0]]
            for name, (port, process), share in plan:
                ask_many(port, 60, share=0.0, seed=turn)  # a server that waited is slow
                before = read_cpu_seconds(process.pid)
                ask_many(port, REQUESTS, share=share, seed=turn)
                if turn:  # the first round warms up
                    used[name].append(read_cpu_seconds(process.pid) - before)
    one = {name: float(np.median(x)) for name, x in used.items()}
    return {
        "two_without": one["same"] / one["off"],
        "none_recorded": 2 * one["on"] / (one["off"] + one["same"]),
        "a_twentieth_recorded": 2 * one["recorded"] / (one["off"] + one["same"]),
        "cpu_milliseconds_per_request": 1000 * one["off"] / REQUESTS,
    }


def read_cpu_seconds(server: int) -> float:
    """Return the CPU time that a server and its workers have used."""
    main = psutil.Process(server)
    times = [x.cpu_times() for x in (main, *main.children(recursive=True))]
    return sum(x.user + x.system for x in times)


def render(found: dict[str, Any]) -> str:
    """Return what watching costs, as Markdown."""
    lines = ["| relative to bare vLLM | requests | and the records |", "|---|---|---|"]
    for name, what in (("prefill", "prefill"), ("decode", "decoding")):
        one, both = found["watch"][name], found["watch"][f"{name}_with_records"]
        lines.append(f"| {what} | {one:.2f} | {both:.2f} |")
    for name, what in (
        ("none_recorded", "CPU time of a server that may record: no request asks"),
        ("a_twentieth_recorded", "the same, 5 % of the requests ask"),
        ("two_without", "two servers that cannot record, relative to each other"),
    ):
        lines.append(f"| {what} | {found['server'][name]:.2f} | |")
    return "\n".join(lines)


def main(parts: list[str]) -> None:
    """Measure, and write the result."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    path = Path(__file__).with_suffix(".json")
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as text:
        place = Path(text)
        if "server" in parts:
            found["server"] = measure_server(place / "small", place)
        if "watch" in parts:
            save_smollm(place / "model")
            found["watch"] = measure_watch(place / "model")
    sys.stdout.write(f"{json.dumps(found, indent=1)}\n")
    path.write_text(f"{json.dumps(found, indent=1)}\n", encoding="utf-8")
    before, _, rest = PAGE.read_text("utf-8").partition(MARK)
    after = rest.partition(MARK)[2]
    PAGE.write_text(f"{before}{MARK}\n{render(found)}\n{MARK}{after}", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or ["server", "watch"])
