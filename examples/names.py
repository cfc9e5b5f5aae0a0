"""Find the heads that solve the indirect-object task, with confidence intervals.

    python examples/names.py [model]       needs: pip install "regard[torch]"

"When Mary and John went to the shop, John gave a drink to" ends with " Mary". In the
other prompt of a pair it is Mary who gives. The measure is the logit of the name that
is right minus that of the other one. Each head is patched, one at a time, with what it
outputs in the other prompt. Look at the signs: the measure falls without a head that
works for the right name, and rises without one that works against it. The mean over
pairs of names and places comes with a confidence interval.
"""

from itertools import permutations

import torch
from models import find_smollm
from torch import Tensor

import regard
from regard.ablate import average_searches, search_heads

PAIRS, LAYERS = 8, range(17, 30)  # earlier layers change little
NAMES = ("Mary", "John", "Tom", "Anna", "Paul", "Sarah", "James", "Emma")
PLACES = ("shop", "park", "school", "office", "station")
TEXT = "When {0} and {1} went to the {2}, {3} gave a drink to"


def main() -> None:
    """Search the heads over many pairs of prompts."""
    model, tokenizer = regard.load(find_smollm())
    dice = torch.Generator().manual_seed(0)
    names = list(permutations(NAMES, 2))
    found = []
    for i in torch.randperm(len(names), generator=dice)[:PAIRS].tolist():
        (a, b), place = names[i], PLACES[i % len(PLACES)]
        right, wrong = (tokenizer.encode(f" {x}")[0] for x in (a, b))
        text, other = (
            torch.tensor([tokenizer.encode(TEXT.format(a, b, place, x))])
            for x in (b, a)
        )

        def measure(logits: Tensor, right: int = right, wrong: int = wrong) -> Tensor:
            return logits[:, -1, right] - logits[:, -1, wrong]

        with regard.watch(model, keep="qkv") as source, torch.no_grad():
            model(other)
        found.append(search_heads(model, text, source, measure, layers=LAYERS))
    solved = sum(x.before > 0 for x in found)
    mean = sum(x.before for x in found) / len(found)
    print(f"the right name has the larger logit in {solved} of {PAIRS} prompts")
    print(f"logit difference without a patch   {mean:+.2f}")
    print(average_searches(found))


if __name__ == "__main__":
    main()
