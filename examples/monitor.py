"""Watch entropy and the largest logit of every layer while a model learns.

    python examples/monitor.py SmolLM2-135M-Instruct.Q4_1.gguf

A logit that runs away, or an entropy that falls to 0, is seen before the loss is NaN.
"""

import sys

import torch

import regard
from regard.stats import entropy
from regard.stats.presets import largest_logit

TEXT = "Attention is a weighted mean, and the weights are a softmax of scores."


def main(path: str) -> None:
    """Train a few steps with a rate that is too high, and say what the heads do."""
    model, tokenizer = regard.load(path)
    tokens = torch.tensor([tokenizer.encode(TEXT)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(4):
        with regard.watch(model) as seen:
            logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        records = seen.records
        nats = sum(float(entropy(x).values.mean()) for x in records) / len(records)
        top = max(float(largest_logit(x).values.max()) for x in records)
        print(f"step {step} loss {loss:.3f} entropy {nats:.3f} largest logit {top:.1f}")


if __name__ == "__main__":
    main(sys.argv[1])
