"""Say which heads are sinks, and how much of all mass rests on the first token.

python examples/sinks.py SmolLM2-135M-Instruct.Q4_1.gguf
"""

import sys

import torch

import regard

TEXT = "The old keeper counted seventeen grey ships before the fog came from the north."


def main(path: str) -> None:
    """Print the strongest sinks of a model on one text."""
    model, tokenizer = regard.load(path)
    with regard.watch(model) as seen, torch.no_grad():
        model(torch.tensor([tokenizer.encode(TEXT)]))
    table = seen.table()
    print(table.sort("sink").head(5))
    sinks = table.rows[table.rows["sink"] > 0.3]  # the threshold of Gu et al. 2024
    print(f"{len(sinks)} of {len(table)} heads are sinks")
    print(f"{table.rows['sink'].mean():.0%} of all mass is on the first token")


if __name__ == "__main__":
    main(sys.argv[1])
