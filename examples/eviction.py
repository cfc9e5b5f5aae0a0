"""The score by which SnapKV would keep or drop keys of a cache, for one layer.

python examples/eviction.py SmolLM2-135M-Instruct.Q4_1.gguf scores.npy
"""

import sys

import numpy as np
import torch

import regard
from regard.stats.presets import snapkv

TEXT = "In the ledger of the harbour every ship has a line: its name, flag and cargo. "


def main(path: str, out: str) -> None:
    """Save the scores of the keys of layer 12, (key heads, keys)."""
    model, tokenizer = regard.load(path)
    tokens = tokenizer.encode(TEXT * 8)
    with regard.watch(model) as seen, torch.no_grad():
        model(torch.tensor([tokens]))
    scores = np.asarray(snapkv(seen.layer(12), last=32))
    np.save(out, scores)
    for group, row in enumerate(scores):
        best = np.sort(np.argsort(row)[-8:])
        kept = " ".join(tokenizer.decode([tokens[i]]).strip() for i in best)
        print(f"key head {group} would keep: {kept}")


if __name__ == "__main__":
    main(*sys.argv[1:])
