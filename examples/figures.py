"""Draw the steps of attention, one head, all heads, and numbers of all heads.

python examples/figures.py SmolLM2-135M-Instruct.Q4_1.gguf docs/pictures
"""

import sys
from pathlib import Path

import numpy as np
import torch

import regard
from regard.show.figure import plot_gallery, plot_steps, plot_table, plot_weights

TEXT = (
    "The cat sat on the mat because it was warm. The dog, which had chased the cat all "
    "day, sat on the floor because the cat sat on the mat."
)


def main(path: str, folder: str) -> None:
    """Write four figures."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    words = ["Life", "is", "short", "eat", "dessert", "first"]
    x = np.random.default_rng(0).normal(size=(len(words), 4))
    steps = regard.explain(x, x, x, regard.causal(), tokens=words)
    plot_steps(steps).savefig(out / "steps.png", dpi=100)
    model, tokenizer = regard.load(path)
    tokens = tokenizer.encode(TEXT)
    with regard.watch(model) as seen, torch.inference_mode():
        model(torch.tensor([tokens]))
    labels = [tokenizer.decode([i]) for i in tokens]
    head = plot_weights(seen.layer(17), rows=labels, keys=labels, heads=[5])
    head.savefig(out / "head.png", dpi=100)
    plot_gallery(seen).savefig(out / "gallery.png", dpi=110)
    plot_table(seen.table()).savefig(out / "table.png", dpi=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
