"""Find induction heads, ablate and patch them, and look at one on the map.

    python examples/induction.py [model]     needs: pip install "regard[torch,serve]"

Forty random tokens are repeated once. An induction head attends from a token to the one
that followed it the first time. Look at the loss on the second half: without twelve of
them, or with what they output after another first half, it is worse than a uniform
guess (10.8). Then the map opens at the strongest head. Ctrl-C ends it.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from models import find_smollm
from torch.nn.functional import cross_entropy

import regard
from regard.ablate import knock_out, patch_heads
from regard.seen import Seen

N, MANY = 40, 12  # tokens, and heads to ablate


def main() -> None:
    """Find induction heads, ablate them, and show the map."""
    model, tokenizer = regard.load(find_smollm())
    dice = torch.Generator().manual_seed(0)
    once = torch.randint(1000, 40_000, (1, N), generator=dice)
    tokens = torch.cat([once, once], 1)

    def lose(change: AbstractContextManager[None]) -> float:
        """Return the loss on the second half, with some heads changed."""
        with torch.no_grad(), change:
            logits = model(tokens)
        return float(cross_entropy(logits[0, N:-1], tokens[0, N + 1 :]))

    with regard.watch(model) as seen, torch.no_grad():
        model(tokens)
    table = seen.table().sort("induction")
    print(table.head(4))
    places = table.rows[["layer", "head"]].tolist()
    some = torch.randperm(len(places) - MANY, generator=dice)[:MANY]
    first = torch.randint(1000, 40_000, (1, N), generator=dice)
    with regard.watch(model, keep="qkv") as source, torch.no_grad():
        model(torch.cat([first, once], 1))
    print(f"loss on the second half {lose(nullcontext()):.2f}    ablated  patched")
    for heads in (places[:1], places[:MANY], [places[MANY + i] for i in some]):
        name = f"{len(heads)} {'strongest' if places[0] in heads else 'others'}"
        ablated = lose(knock_out(model, heads))
        patched = lose(patch_heads(model, source, heads))
        print(f"{name:31} {ablated:7.2f}  {patched:7.2f}")
    notes = {"address": "l={}&h={}".format(*places[0])}  # where the map opens
    found = seen.label(tokenizer.decode).recording
    Seen(replace(found, notes=found.notes | notes)).show()


if __name__ == "__main__":
    main()
