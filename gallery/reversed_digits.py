"""A model trained here to reverse digits: its attention is the answer.

    3 1 4 1 5 = 5 1 4 1 3

Next: coloured_square.py
"""

import torch
from entry import Entry, write_entry
from torch.nn.functional import cross_entropy

import regard
from regard.nn import CausalTransformer, Config
from regard.nn.tasks import Reverse, measure_accuracy

DIGITS, STEPS = 6, 400
TASK = Reverse(DIGITS)


def learn() -> CausalTransformer:
    """Train a model of two layers with two heads each."""
    torch.manual_seed(0)
    sizes = {"vocabulary": TASK.vocabulary, "context": TASK.length, "width": 32}
    model = CausalTransformer(Config(**sizes, layers=2, heads=2, position="learned"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        tokens, answers = TASK.batch(64, 0, step)
        logits = model(tokens)[:, :-1]
        loss = cross_entropy(logits[answers[:, 1:]], tokens[:, 1:][answers[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def make() -> Entry:
    """Measure how much weight is on the digit that is written next."""
    model = learn()
    tokens, _ = TASK.batch(1, 0, 0, held_out=True)
    with regard.watch(model) as seen, torch.no_grad():
        model(tokens)
    steps = torch.arange(DIGITS)
    rows, keys = TASK.prompt - 1 + steps, DIGITS - 1 - steps
    share = seen.weights()[:, :, rows, keys].mean(-1)  # (layers, heads)
    layer, head = divmod(int(share.argmax()), share.shape[1])
    return Entry(
        title="Digits, backwards",
        model="two layers, trained here",
        sentence="After {steps} steps the model reverses {right:.0%} of new "
        "questions of {digits} digits, and head {head} puts {share:.0%} of "
        "its weight on the digit that is written next.",
        numbers={
            "steps": STEPS,
            "right": float(measure_accuracy(model, TASK)),
            "digits": DIGITS,
            "head": f"{layer}.{head}",
            "share": float(share.max()),
        },
        write=seen.label(TASK.show).page,
        address=f"l={layer}&h={head}",
    )


if __name__ == "__main__":
    write_entry("reversed_digits")
