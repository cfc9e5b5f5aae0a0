"""Two atlases compared: which heads behave differently in code than in prose.

Next: reversed_digits.py
"""

from pathlib import Path

import numpy as np
from atlas_of_prose import measure
from entry import Entry, write_entry

from regard.atlas.page import write_page
from regard.atlas.table import compare_atlases

STATISTIC = "induction"


def make() -> Entry:
    """Mark the heads that differ by more than an interval for all heads at once."""
    prose, code = measure("prose"), measure("code")
    found = compare_atlases(prose, code, STATISTIC)
    size = np.where(found.marked, np.abs(found.difference), -1)
    layer, head = np.unravel_index(np.argmax(size), size.shape)
    return Entry(
        title="Code is not prose",
        model="SmolLM2-135M",
        sentence="Of {heads} heads, {marked} differ in induction between code and "
        "prose by more than an interval for all heads at once; head {head} "
        "most, by {change:+.2f} ± {half:.2f}.",
        numbers={
            "heads": int(found.marked.size),
            "marked": int(found.marked.sum()),
            "head": f"{layer}.{head}",
            "change": float(found.difference[layer, head]),
            "half": float(found.half[layer, head]),
        },
        write=lambda path: write_page(
            Path(path), [prose, code], names=["prose", "code"]
        ),
        address=f"s={STATISTIC}&v=diff&l={layer}&h={head}",
    )


if __name__ == "__main__":
    write_entry("prose_and_code")
