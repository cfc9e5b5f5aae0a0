"""Find induction heads, ablate them, and look at one on the map.

    python examples/induction.py [model]     needs: pip install "regard[torch,serve]"

Forty random tokens are repeated once. An induction head attends from a token to the one
that followed it the first time, so the model can continue. Look at the loss on the
second half: without one head it rises, without twelve it is worse than a uniform guess
(10.8 for 49,152 tokens), and twelve other heads hardly matter. Then the map opens in a
browser, at the strongest head: its line is 39 tokens off the diagonal. Ctrl-C ends it.
"""

from contextlib import nullcontext
from dataclasses import replace

import torch
from models import find_smollm
from torch.nn.functional import cross_entropy

import regard
from regard.ablate import knock_out
from regard.seen import Seen

N, MANY = 40, 12  # tokens, and heads to ablate


def main() -> None:
    """Find induction heads, ablate them, and show the map."""
    model, tokenizer = regard.load(find_smollm())
    dice = torch.Generator().manual_seed(0)
    once = torch.randint(1000, 40_000, (1, N), generator=dice)
    tokens = torch.cat([once, once], 1)

    def lose(heads: list[tuple[int, int]]) -> float:
        """Return the loss on the second half, without some heads."""
        with torch.no_grad(), knock_out(model, heads=heads) if heads else nullcontext():
            logits = model(tokens)
        return float(cross_entropy(logits[0, N:-1], tokens[0, N + 1 :]))

    with regard.watch(model) as seen, torch.no_grad():
        model(tokens)
    table = seen.table().sort("induction")
    print(table.head(4))
    places = [(int(row["layer"]), int(row["head"])) for row in table.rows]
    others = torch.randperm(len(places) - MANY, generator=dice)[:MANY] + MANY
    print(f"loss on the second half   {lose([]):.2f}")
    print(f"without the first head    {lose(places[:1]):.2f}")
    print(f"without the first {MANY}      {lose(places[:MANY]):.2f}")
    print(f"without {MANY} others         {lose([places[i] for i in others]):.2f}")
    layer, head = places[0]
    notes = {"address": f"l={layer}&h={head}"}  # where the map opens
    found = seen.label(tokenizer.decode).recording
    Seen(replace(found, notes=found.notes | notes)).show()


if __name__ == "__main__":
    main()
