"""Explain: one head of a real model as a figure and a page for a talk.

    python examples/pronoun.py [model]          needs: pip install "regard[torch,show]"

Which head attends from "it" to its antecedent? The strongest one in one sentence is
drawn: pronoun.png for a slide, pronoun.html (with all other heads) for a browser.
Look at its weights in the other sentences before you call it a pronoun head.
"""

import torch
from models import find_smollm

import regard
from regard.show.figure import plot_weights

SENTENCES = {  # and what "it" refers to
    "The animal did not cross the street because it was too tired.": " animal",
    "The cake was gone because it was so good.": " cake",
    "After the storm the bridge was closed because it was damaged.": " bridge",
    "My brother sold the car because it was too old.": " car",
}


def main() -> None:
    """Find the head in the first sentence, draw it, and test it on the others."""
    model, tokenizer = regard.load(find_smollm())
    best, found = None, []
    for sentence, noun in SENTENCES.items():
        tokens = tokenizer.encode(sentence)
        words = [tokenizer.decode([token]) for token in tokens]
        with regard.watch(model) as seen, torch.no_grad():
            model(torch.tensor([tokens]))
        it, key = words.index(" it"), words.index(noun)
        rows = [torch.as_tensor(x.weights(slice(it, it + 1))) for x in seen.records]
        weights = torch.stack(rows)[:, :, 0, key]  # (layers, heads)
        if best is None:
            best = layer, head = divmod(int(weights.argmax()), weights.shape[1])
            print(f"layer {layer} head {head} of {weights.numel()} heads")
            record = seen.layer(layer)
            figure = plot_weights(record, rows=words, keys=words, heads=[head])
            figure.savefig("pronoun.png", dpi=150)
            seen.label(tokenizer.decode).page("pronoun.html")
            print(f"pronoun.png, pronoun.html#l={layer}&h={head}&pin={it}")
        higher = int((weights > weights[best]).sum())
        found.append((float(weights[best]), higher, noun))
    for weight, higher, noun in found:
        print(f"{weight:.2f} from it to{noun:8} {higher} heads give more")


if __name__ == "__main__":
    main()
