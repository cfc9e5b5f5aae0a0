"""Say how much each new token looks back at what it was given.

    python examples/lookback.py SmolLM2-135M-Instruct.Q4_1.gguf

The lookback ratio of a generation, token by token: a classifier on these numbers of
all heads finds answers that do not follow their context (Chuang et al. 2024).
"""

import sys

import numpy as np

import regard
from regard.stats.presets import lookback_ratio

PROMPT = "The lighthouse was built in 1871. When was the lighthouse built?"


def main(path: str) -> None:
    """Print the mean ratio of all heads for each new token."""
    model, tokenizer = regard.load(path)
    prompt = tokenizer.encode(tokenizer.chat([{"role": "user", "content": PROMPT}]))
    with regard.watch(model) as seen:
        (answer,) = regard.nn.generate(model, [prompt], 12)
    ratios = [lookback_ratio(x, len(prompt)).values for x in seen.records]
    table = np.stack(ratios)  # (layers, heads, new tokens that were read)
    for token, ratio in zip(answer, table.mean((0, 1)), strict=False):
        print(f"{ratio:.3f} {'#' * int(40 * ratio):<40} {tokenizer.decode([token])!r}")


if __name__ == "__main__":
    main(sys.argv[1])
