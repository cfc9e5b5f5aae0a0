"""What it costs to patch every head of SmolLM2, in forward passes.

    python benchmarks/search_heads.py      writes search_heads.json and docs/lens.md

Two prompts of 128 tokens, all 270 heads: a search (heads of a layer in one batch, the
modules before it not run again, logits of the last token only), and patches one at a
time, of nine heads. Unit: one forward pass of the same prompt, with all of its logits,
in the same process, the best of several, in between.
CPU time with one thread, so that other work on the machine counts little.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from marks import fill
from smollm import find_smollm

import regard
from regard.ablate import patch_heads, search_heads

HERE = Path(__file__).parent
MARK = "<!-- benchmark:search_heads -->"
TOKENS, ROUNDS = 128, 5


def measure_seconds(run: Callable[[], Any]) -> float:
    """Return the CPU seconds of a call."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def main() -> None:
    """Measure, and write the result."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, _ = regard.load(find_smollm())
    clean, corrupted = torch.randint(100, 40_000, (2, 1, TOKENS))
    with torch.no_grad():
        with regard.watch(model, keep="qkv") as source:
            model(clean)
        bare = min(measure_seconds(lambda: model(corrupted)) for _ in range(ROUNDS))
        found: Any = None

        def search() -> None:
            nonlocal found
            inputs = {"tokens": corrupted, "logits_to_keep": 1}
            found = search_heads(
                model, inputs, source, lambda logits: logits[:, -1, 0], batch=9
            )

        searched = measure_seconds(search)
        single = []
        for head in range(9):

            def patch(head: int = head) -> None:
                with patch_heads(model, source, [(15, head)]):
                    model(corrupted)

            single.append(measure_seconds(patch))
            bare = min(bare, measure_seconds(lambda: model(corrupted)))
    result = {
        "tokens": TOKENS,
        "heads": int(found.values.numel()),
        "skipped": found.skipped,
        "forward seconds": round(bare, 4),
        "search, forward passes": round(searched / bare, 1),
        "one patch, forward passes": round(min(single) / bare, 2),
    }
    text = json.dumps(result, indent=2)
    (HERE / "search_heads.json").write_text(text + "\n", "utf-8")
    fill("docs/lens.md", MARK, render(result))
    print(text)


def render(result: dict[str, Any]) -> str:
    """Return the result as a sentence."""
    return (
        f"All {result['heads']} heads of SmolLM2, two prompts of {result['tokens']} "
        f"tokens, logits of the last: a search takes as long as "
        f"{result['search, forward passes']:.0f} forward passes; a patch of one head "
        "in a whole pass takes "
        f"{result['one patch, forward passes']:.2f}."
    )


if __name__ == "__main__":
    main()
