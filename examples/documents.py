"""Say which retrieved document an answer drew on.

    python examples/documents.py SmolLM2-135M-Instruct.Q4_1.gguf

Mass explains nothing by itself, so each document is also hidden from the model.
"""

import sys

import torch

import regard
from regard.stats import span_pairs

DOCUMENTS = [
    "The bakery on Mill Street opens at six in the morning.",
    "The library of the town has a code word: marzipan.",
    "Last winter the river froze for the first time.",
]
ASK = "\n".join([*DOCUMENTS, "The code word of the library, in one word?"])


def main(path: str) -> None:
    """Ask a question about three documents."""
    model, tokenizer = regard.load(path)
    text = tokenizer.chat([{"role": "user", "content": ASK}]) + "The code word is"
    prompt = tokenizer.encode(text, whole=False)
    with regard.watch(model) as seen:
        print(tokenizer.decode(regard.nn.generate(model, [prompt], 8)[0]))
    *documents, new = seen.spans(DOCUMENTS, text=text, offsets=tokenizer.offsets(text))
    for span in documents:
        pairs = (span_pairs(x, [new], [span], per="sum") for x in seen.records)
        mass = sum(float(x.values.sum()) for x in pairs)
        gone = regard.lens.effect(model, lambda m: m(torch.tensor([prompt])), keys=span)
        print(f"document {span}: mass {mass:.1f}; hidden: KL {gone.kl[0]:.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
