"""KV cache eviction: five policies choose the keys to keep before the answer.

    python examples/eviction.py [model]          needs: pip install "regard[torch]"

One of six facts in a prompt answers the question. Each policy keeps a quarter of the
keys; the others are masked for the question and everything after it, in all layers.
Look at the next token, which should begin the code word, its change (KL, in nats), and
the kept tokens. Scores are summed over layers and heads; the papers score per head.
"""

import numpy as np
import torch
from models import find_smollm

import regard
from regard.ablate import effect
from regard.stats.published import h2o, snapkv, tova

FACTS = """The bakery on Mill Street opens at six in the morning.
Last winter the river froze for the first time.
The old mill was sold to a painter from the coast.
The code word of the library is marzipan.
Two bridges lead across the river, one of stone.
The mayor keeps bees behind the town hall."""
QUESTION = "What is the code word of the library?"


def main() -> None:
    """Score the keys, mask all but the best, and ask again."""
    model, tokenizer = regard.load(find_smollm())
    text = tokenizer.chat([{"role": "user", "content": f"{FACTS}\n{QUESTION}"}])
    tokens = tokenizer.encode(text + "The code word of the library is", whole=False)
    old = len(tokenizer.encode(text[: text.index(QUESTION)], whole=False))
    words = [tokenizer.decode([x]).replace("\n", " ") for x in tokens]

    def ask(model: torch.nn.Module) -> torch.Tensor:
        return model(torch.tensor([tokens]))

    with regard.watch(model) as seen, torch.no_grad():
        ask(model)
    last = len(tokens) - old  # the tokens of the question
    scores = {
        "snapkv": sum(snapkv(x, last=last).values.sum(0) for x in seen.records),
        "h2o": sum(h2o(x).values.sum(0)[:old].numpy() for x in seen.records),
        "tova": sum(tova(x).values[:old] for x in seen.records),
        "recent": np.arange(old),
        "random": np.random.default_rng(0).random(old),
    }
    for name, score in scores.items():
        kept = {0, *np.argsort(score)[-(old // 4) :].tolist()}  # with the sink
        gone = sorted(set(range(old)) - kept)
        done = effect(model, ask, keys=gone, queries=range(old, len(tokens)))
        told = [f"{tokenizer.decode([x])!r} {p:.0%}" for x, p in done.after]
        print(f"{name}: KL {done.kl[0]:.2f}", *told)
        print("  ", "".join(words[i] if i in kept else "." for i in range(old)))


if __name__ == "__main__":
    main()
