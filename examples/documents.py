"""Read a RAG answer: the documents that it drew on, and those that it did not.

    python examples/documents.py [model]          needs: pip install "regard[torch]"

Look at the two columns: the mass that the new tokens give each document, and how far
the next token moves (KL, in nats) when the document is hidden from the model. They
disagree. Mass is where to look; name a document as the source for the second.
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
    with regard.watch(model) as seen:
        (answer,) = regard.nn.generate(model, [prompt], 4)
    print("The code word is" + tokenizer.decode(answer))
    *spans, new = seen.spans(DOCUMENTS, text=text, offsets=tokenizer.offsets(text))
    for span, document in zip(spans, DOCUMENTS, strict=True):
        pairs = [span_pairs(x, [new], [span], per="query") for x in seen.records]
        mass = sum(float(x.values.mean()) for x in pairs) / len(pairs)
        gone = regard.lens.effect(model, lambda m: m(torch.tensor([prompt])), keys=span)
        print(f"mass {mass:.3f}   hidden: KL {gone.kl[0]:.3f}   {document}")


if __name__ == "__main__":
    main()
