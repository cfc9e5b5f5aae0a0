"""Watch training: a run that learns, and one that diverges before its loss shows it.

    python examples/training.py          needs: pip install "regard[torch]"

Two small models learn to copy digits, the second with a learning rate far too high. At
step 10, neither loss shows any learning. Look at the heads of the second: its logits
explode, and with an entropy of 0 no gradient passes the softmax. Then two heads of the
first: layer 0 attends one token back, so layer 1 finds a digit in the token after it.
"""

from contextlib import nullcontext

import torch
from torch.nn.functional import cross_entropy

import regard
from regard.nn import CausalTransformer, Config
from regard.nn.tasks import Copy
from regard.show.terminal_map import draw_weights

TASK = Copy(5)
SIZES = {"vocabulary": TASK.vocabulary, "context": TASK.length, "width": 32}


def learn(rate: float, steps: int) -> CausalTransformer:
    """Train a model, and print loss, entropy and largest logit at some steps."""
    torch.manual_seed(0)
    model = CausalTransformer(Config(**SIZES, layers=2, heads=2, position="rotary"))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for step in range(steps + 1):
        tokens, answers = TASK.batch(64, 0, step)
        look = step in (0, 10, 50, steps)
        with regard.watch(model) if look else nullcontext() as seen:
            logits = model(tokens)[:, :-1]
        loss = cross_entropy(logits[answers[:, 1:]], tokens[:, 1:][answers[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if look:
            rows = seen.table().rows  # one per sequence, layer and head
            bits, top = rows["entropy"].mean(), rows["logit"].max()
            print(f"step {step:3}: loss {loss:.2f} entropy {bits:.2f} logit {top:.1f}")
    return model.eval()


def main() -> None:
    """Train twice, then draw two heads of the healthy model."""
    model, _ = learn(0.01, 150), learn(0.2, 50)
    tokens, _ = TASK.batch(1, 0, 0, held_out=True)
    with regard.watch(model) as seen, torch.no_grad():
        model(tokens)
    words = list(TASK.show(tokens[0]))
    for layer, head in ((0, 1), (1, 0)):
        print(draw_weights(seen.layer(layer), rows=words, keys=words, heads=[head]))


if __name__ == "__main__":
    main()
