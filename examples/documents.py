"""Read a RAG answer: the documents that it is based on.

    python examples/documents.py [model]          needs: pip install "regard[torch]"

Look at the two columns: the attention mass from the new tokens to each document, and
how much the next token changes (KL, in nats) when the document is ablated. They
disagree. Use the mass to decide where to look, and the ablation to name the source.
"""

import torch
from models import find_smollm

import regard
from regard.stats import span_pairs

DOCUMENTS = [
    "The bakery on Mill Street opens at six in the morning.",
    "The library of the town has a code word: marzipan.",
    "Last winter the river froze for the first time.",
]
ASK = "\n".join([*DOCUMENTS, "The code word of the library, in one word?"])


def main() -> None:
    """Ask a question about three documents."""
    model, tokenizer = regard.load(find_smollm())
    text = tokenizer.chat([{"role": "user", "content": ASK}]) + "The code word is"
    prompt = tokenizer.encode(text, whole=False)
    tokens = torch.tensor([prompt])
    with regard.watch(model) as seen:
        (answer,) = regard.nn.generate(model, [prompt], 4)
    print("The code word is" + tokenizer.decode(answer))
    *spans, new = seen.spans(DOCUMENTS, text=text, offsets=tokenizer.offsets(text))
    for span, document in zip(spans, DOCUMENTS, strict=True):
        pairs = [span_pairs(x, [new], [span], per="query") for x in seen.records]
        mass = sum(float(x.values.mean()) for x in pairs) / len(pairs)
        gone = regard.ablate.effect(model, lambda m: m(tokens), keys=span)
        print(f"mass {mass:.3f}   ablated: KL {gone.kl[0]:.3f}   {document}")


if __name__ == "__main__":
    main()
