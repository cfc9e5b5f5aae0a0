"""What it costs to watch a real model: time, memory, and where others stop.

    python benchmarks/lens.py               writes lens.json and docs/lens.md
    python benchmarks/lens.py generation    measures only that again
    python benchmarks/lens.py small         measures only the model with small layers

SmolLM2-135M in float32, one thread. Times: the same forward pass unwatched and watched
(q, k and lse of all 30 layers kept), in turn in one process; the ratio is that of the
best CPU seconds of several rounds. Small layers: a Llama with 48 layers of width 64, at
64 tokens, where Python takes longer than arithmetic: one pass, and ten in one watch;
beside it, the same under a dispatch mode that does nothing. Memory: the peak above the
loaded model, in a fresh process each. Eager is transformers with
output_attentions=True, under a limit of 18 GB; the peers under the same limit are in
peers.json, written by peers.py in an environment of their own. Generation: 128 tokens
after a prompt of 1,024, greedy, in turn, the best of ten rounds of each, and its
records against those of one pass over the final text. CPU only.
"""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from marks import fill
from memory import read_peak, reset_peak
from rich.progress import track
from smollm import find_smollm
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers import logging as transformers_logging

from regard.seen import watch

HERE = Path(__file__).parent
NOT_RUN = "not run"  # already out of memory at half the length
MARK = "<!-- benchmark:lens -->"
SIZES = {1024: 8, 2048: 5, 4096: 3, 8192: 2}  # tokens: rounds
SMALL, LAYERS, SMALL_ROUNDS = 64, 48, 10  # tokens and width; layers; rounds
PROMPT, NEW = 1024, 128
GENERATIONS = 10  # rounds; a shared machine disturbs single ones
WAYS = ("unwatched", "watched", "eager")
LIMIT = 18 * 2**30
PEERS = {
    "transformer_lens": "TransformerLens, patterns only",
    "transformer_lens_all": "its default cache",
    "nnsight": "nnsight",
}


def load(implementation: str = "sdpa") -> Any:
    """Return SmolLM2 from its package."""
    transformers_logging.set_verbosity_error()
    path = find_smollm()
    return AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        attn_implementation=implementation,
    ).eval()


def draw(n: int) -> torch.Tensor:
    """Return n tokens."""
    return torch.randint(5, 40_000, (1, n), generator=torch.Generator().manual_seed(0))


def forward(model: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the logits of the last token."""
    with torch.inference_mode():
        done = model(tokens, use_cache=False, logits_to_keep=1, **options)
    return done.logits  # type: ignore[no-any-return]


def measure_memory(how: str, n: int) -> dict[str, float]:
    """Return the peak of one pass above the loaded model, in MB, and what is kept."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    model = load("eager" if how == "eager" else "sdpa")
    forward(model, draw(64))
    before, start = reset_peak(), time.process_time()
    if how == "eager":
        forward(model, draw(n), output_attentions=True)
        return {"MB": read_peak() - before, "seconds": time.process_time() - start}
    with watch(model) if how == "watched" else nullcontext() as seen:
        forward(model, draw(n))
    kept = 0
    if seen is not None:
        for record in seen.recording.records:
            arrays = (record.q, record.k, record.lse)
            kept += sum(x.numel() * x.element_size() for x in arrays)
    return {"MB": read_peak() - before, "kept_MB": kept / 2**20}


def run_apart(how: str, n: int) -> dict[str, float] | None:
    """Measure in a process of its own; None if it died."""
    command = [sys.executable, __file__, how, str(n)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def find_ratio(rounds: list[tuple[float, ...]], way: int = 1) -> float:
    """Return the best seconds of one way over those of the first."""
    best = [min(seconds) for seconds in zip(*rounds, strict=True)]
    return round(best[way] / best[0], 3)


def compare_times(model: Any, n: int) -> dict[str, float]:
    """Run both ways in turn; return the ratio and the best seconds."""
    rounds: list[tuple[float, ...]] = []
    for _ in range(SIZES[n]):
        start = time.process_time()
        plain = forward(model, draw(n))
        middle = time.process_time()
        with watch(model):
            watched = forward(model, draw(n))
        rounds.append((middle - start, time.process_time() - middle))
        assert torch.equal(plain, watched)
    return {"ratio": find_ratio(rounds), "unwatched_s": round(min(rounds)[0], 2)}


class Nothing(TorchDispatchMode):  # type: ignore[misc]
    """A dispatch mode that runs each operator and does nothing else."""

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def compare_small(passes: int) -> dict[str, float]:
    """Run a model with many small layers unwatched, watched, and under `Nothing`."""
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=SMALL,
        intermediate_size=2 * SMALL,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
    )
    model, tokens = LlamaForCausalLM(config).eval(), draw(SMALL) % 1000
    rounds: list[tuple[float, ...]] = []
    for _ in range(SMALL_ROUNDS):
        seconds = []
        for way in (nullcontext(), watch(model), Nothing()):
            start = time.process_time()
            with torch.no_grad(), way:
                for _ in range(passes):
                    model(tokens, use_cache=False)
            seconds.append(time.process_time() - start)
        rounds.append(tuple(seconds))
    return {"ratio": find_ratio(rounds), "nothing": find_ratio(rounds, 2)}


def compare_generation(model: Any) -> dict[str, float]:
    """Generate both ways in turn; the tokens must be the same."""
    prompt, rounds = draw(PROMPT), list[tuple[float, ...]]()
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    for _ in range(GENERATIONS):
        start = time.process_time()
        plain = model.generate(prompt, **options, pad_token_id=0)
        middle = time.process_time()
        with watch(model) as steps:
            watched = model.generate(prompt, **options, pad_token_id=0)
        rounds.append((middle - start, time.process_time() - middle))
        assert torch.equal(plain, watched)
    with watch(model) as whole:
        forward(model, watched[:, :-1])  # the last token was never read
    pairs = zip(steps.records, whole.records, strict=True)
    worst = max(float((a.weights() - b.weights()).abs().max()) for a, b in pairs)
    return {"ratio": find_ratio(rounds), "error": worst}


def render(result: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    peers = json.loads((HERE / "peers.json").read_text("utf-8"))["sizes"]
    columns = ("tokens", "watched / unwatched, time", "unwatched, MB", "watched, MB")
    columns += ("of which q, k, lse, MB", "eager with weights, MB")
    columns += tuple(f"{name}, MB" for name in PEERS.values())
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for n, x in result["sizes"].items():
        others = [x["eager"], *(peers.get(n, {}).get(name, NOT_RUN) for name in PEERS)]
        cells = [f"{int(n):,}", f"{x['ratio']:.3f}", f"{x['unwatched']['MB']:,.0f}"]
        cells += [f"{x['watched'][name]:,.0f}" for name in ("MB", "kept_MB")]
        cells += [write_peer(other) for other in others]
        lines.append(f"| {' | '.join(cells)} |")
    about = result["generation"]
    text = f"Generating {NEW} tokens after {PROMPT:,}, watched / unwatched: "
    text += f"{about['ratio']:.3f}; the recorded weights are within "
    text += f"{about['error']:.0e} of those of a single forward pass."
    once, often = (result["small"][name] for name in ("once", "often"))
    small = f"{LAYERS} layers of width {SMALL} at {SMALL} tokens, where Python takes "
    small += f"longer than arithmetic: {once['ratio']:.1f} for one pass and "
    small += f"{often['ratio']:.1f} for ten in one watch. A dispatch mode that does "
    small += f"nothing takes {once['nothing']:.1f}."
    return "\n".join([*lines, "", text, "", small])


def write_peer(found: Any) -> str:
    """Return what another way needed."""
    if found == NOT_RUN:
        return NOT_RUN
    return f"{found['MB']:,.0f}" if isinstance(found, dict) else "OOM at 18 GB"


def write(result: dict[str, Any]) -> None:
    """Write the numbers, and the table into its page."""
    (HERE / "lens.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    fill("docs/lens.md", MARK, render(result))


def main() -> None:
    """Measure and write the results."""
    model, sizes = load(), {}
    forward(model, draw(64))
    before = json.loads((HERE / "lens.json").read_text("utf-8"))
    if sys.argv[1:] == ["generation"]:  # the rest stays as it was measured
        write(before | {"generation": compare_generation(model)})
        return
    small = {"once": compare_small(1), "often": compare_small(10)}
    if sys.argv[1:] == ["small"]:
        write(before | {"small": small})
        return
    for n in track(SIZES, "measuring"):
        sizes[str(n)] = {how: run_apart(how, n) for how in WAYS}
        sizes[str(n)] |= compare_times(model, n)
    names = ("regard", "torch", "transformers")
    about: dict[str, Any] = {name: version(name) for name in names}
    about |= {
        "python": platform.python_version(),
        "threads": 1,
        "rounds": list(SIZES.values()),
    }
    generation = compare_generation(model)
    write({"about": about, "sizes": sizes, "generation": generation, "small": small})


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 3:
        print(json.dumps(measure_memory(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
