"""Learn: attention of four words, step by step, with small numbers.

    python examples/four_tokens.py          needs: pip install regard

Every word is represented by two numbers: how much it is about water, and about money.
"bank" is about both. Look at its row in `weights`: the previous word determines its
meaning in `out`. Change the numbers, and run it again.
"""

import numpy as np

import regard
from regard.definition.steps import Steps

WORDS = {  # (water, money)
    "the": (0.0, 0.0),
    "we": (0.0, 0.0),
    "saw": (0.5, 0.5),
    "bank": (2.0, 2.0),
    "river": (4.0, 0.0),
    "loan": (0.0, 4.0),
}


def read(sentence: str) -> Steps:
    """Return every step of causal attention over the words."""
    words = sentence.split()
    x = np.array([WORDS[word] for word in words])  # (words, 2): q, k and v alike
    return regard.explain(x, x, x, regard.causal(), tokens=words)


def main() -> None:
    """Print all steps of one sentence, and what "bank" becomes in two."""
    steps = read("we saw river bank")
    for name in ("q", "dots", "scores", "logits", "weights", "out"):
        print(steps[name], end="\n\n")
    for sentence in ("we saw river bank", "we saw loan bank"):
        water, money = read(sentence)["out"].values[-1]
        print(f"{sentence}: now bank is {water:.2f} water, {money:.2f} money")


if __name__ == "__main__":
    main()
