"""The cells of a notebook that ends each of them with an object of ours.

`python tests/browser/notebook_cells.py FOLDER` writes cells.ipynb for JupyterLab and
cells_light.py and cells_dark.py for marimo, to look at by hand.
"""

import json
import sys
from pathlib import Path

HOSTILE = [
    "the",
    "<script>window.hacked = 1</script>",
    "</style></table><img src=x onerror='window.hacked = 1'>",
    "\u202eright to left",
    "zalgo" + "\u0301" * 60,
    "line\nbreak\x00",
    "x" * 5_000,
    "ok",
]
SETUP = f"""
import numpy as np, torch, transformers, regard
from regard.show.figure import plot_gallery, plot_mask, plot_steps, plot_table, plot_weights
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
hostile = {HOSTILE!r}
config = transformers.LlamaConfig(
    vocab_size=99, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=32, initializer_range=0.4)
model = transformers.LlamaForCausalLM(config).eval()
with torch.inference_mode(), regard.watch(model) as seen:
    model(torch.randint(5, 99, (1, 30)))
with torch.inference_mode(), regard.watch(model) as other:
    model(torch.tensor([[*seen.recording.tokens[0][:20], *range(40, 50)]]))
named, other = (x.label(lambda ids: hostile[ids[0] % 8]) for x in (seen, other))
q = np.random.default_rng(0).normal(size=(2, 8, 4))
steps = regard.explain(q, q, q, regard.causal(), tokens=hostile)
"""
CELLS = {  # name: (code of the last expression, words that the page shows)
    "seen": ("seen", "LlamaForCausalLM: 3 of 3 attention layers seen"),
    "table": ("seen.table()", "induction"),
    "record": ("seen.layer(1)", "4 of queries, 2 of keys"),
    "steps": ("steps", "weights = exp(logits) / Σ exp(logits)"),
    "coverage": ("seen.coverage()", "recorded as"),
    "audit": ("seen.audit()", ""),
    "mask": ("regard.causal() & regard.window(4)", "blue: may attend"),
    "bias": ("regard.masks.alibi([0.5, 0.125])", "queries 0 to 15 down"),
    "labels": ("seen.label(lambda ids: hostile[ids[0] % 8])", "attention layers seen"),
    "weights": ("plot_weights(seen.layer(0), heads=[0, 1])", ""),
    "gallery": ("plot_gallery(seen)", ""),
    "statistics": ("plot_table(seen.table())", ""),
    "two": (
        'named.beside(other, names=("old", "new")).widget(address="two=diff")',
        "heads by the share of weight that moved",
    ),
    "picture": (
        "named.picture(np.random.default_rng(0).random((40, 60, 3)), grid=(2, 3), "
        "tokens=range(4, 10)).widget()",
        "of the attention is on this picture",
    ),
}


def write_jupyter(path):
    """Write the cells as a notebook of Jupyter."""
    codes = [SETUP, *(code for code, _ in CELLS.values())]
    cells = [
        {
            "cell_type": "code",
            "execution_count": None,
            "id": f"cell-{i}",
            "metadata": {},
            "outputs": [],
            "source": code.strip(),
        }
        for i, code in enumerate(codes)
    ]
    name = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": name}}
    path.write_text(json.dumps(whole | {"nbformat": 4, "nbformat_minor": 5}), "utf-8")


def write_marimo(path, theme):
    """Write the cells as a notebook of marimo."""
    names = "np, regard, seen, named, other, steps, hostile, "
    names += "plot_gallery, plot_table, plot_weights"
    head = f"""# /// script
# [tool.marimo.display]
# theme = "{theme}"
# ///
import marimo

__generated_with = "0.25.2"
app = marimo.App(width="full")
"""
    lines = SETUP.strip().splitlines()
    cells = ["@app.cell\ndef _():"]
    cells += [f"    {line}" for line in lines]
    cells.append(f"    return ({names})\n")
    for code, _ in CELLS.values():
        cells.append(f"@app.cell\ndef _({names}):\n    {code}\n    return\n")
    end = 'if __name__ == "__main__":\n    app.run()\n'
    path.write_text("\n".join([head, *cells, end]), "utf-8")


def write_all(folder):
    """Write all notebooks."""
    write_jupyter(folder / "cells.ipynb")
    for theme in ("light", "dark"):
        write_marimo(folder / f"cells_{theme}.py", theme)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
