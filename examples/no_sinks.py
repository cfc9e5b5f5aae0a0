"""Remove attention sinks: hide the first token, early or late, or remove sink heads.

    python examples/no_sinks.py [model]       needs: pip install "regard[torch]"

Heads put much of their weight on the first token, although its value is small: they
attend to it to write little. Look at the loss: hiding it only from later queries, as a
sliding window does, ruins the model. Hidden from all others, it has a successor.
"""

from contextlib import nullcontext
from typing import Any

import torch
from models import find_smollm
from torch.nn.functional import cross_entropy

import regard
from regard.seen import Seen

TEXT = (
    "The old keeper counted seventeen grey ships before the fog came from the north. "
    "He lit the lamp, closed the heavy door and wrote their names into the book."
)
LATE, MANY = 8, 40  # the first query that counts, and heads to remove


def main() -> None:
    """Hide tokens, then remove heads."""
    model, tokenizer = regard.load(find_smollm())
    tokens = torch.tensor([tokenizer.encode(TEXT)])

    def read(**removed: Any) -> tuple[float, Seen]:
        """Return the loss of later tokens with something removed, and what was seen."""
        ablation = regard.knock_out(model, **removed) if removed else nullcontext()
        with torch.no_grad(), ablation, regard.watch(model, keep="qkv") as seen:
            logits = model(tokens)
        return float(cross_entropy(logits[0, LATE:-1], tokens[0, LATE + 1 :])), seen

    def show(what: str, **removed: Any) -> None:
        """Print the loss, and the weight on the first two tokens."""
        loss, seen = read(**removed)
        first, second = seen.weights(rows=slice(LATE, None)).mean((0, 1, 2))[:2]
        print(f"{what:33}  {loss:.2f}    {first:4.0%}    {second:4.0%}")

    _, seen = read()
    sizes = sum(x.v.norm(dim=-1).mean(0) for x in seen.records)  # (N,)
    print(f"size of its value: {float(sizes[0] / sizes[1:].mean()):.2f} of the others")
    print(f"{'removed':33}  loss  token 0  token 1")
    show("nothing")
    show("token 0, from later ones", keys=[0], queries=slice(LATE, None))
    show("token 1, from later ones", keys=[1], queries=slice(LATE, None))
    show("token 0, from all others", keys=[0], queries=slice(1, None))
    heads = seen.table().sort("sink").rows[["layer", "head"]].tolist()
    show(f"{MANY} heads with the strongest sinks", heads=heads[:MANY])
    show(f"{MANY} heads with the weakest sinks", heads=heads[-MANY:])


if __name__ == "__main__":
    main()
