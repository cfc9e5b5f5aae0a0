"""Draw every mask and bias in the terminal: `python -m regard.masks`.

    ■ allowed    · masked         ░ ▒ ▓ █ a bias, from its lowest to its highest value

Rows are queries, columns are keys.

Next: algebra.py
"""

from __future__ import annotations

import click
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.masks.biases import alibi, log_offsets, table
from regard.masks.formula import Formula
from regard.masks.mask_picture import pick_head
from regard.masks.patterns import (
    array,
    causal,
    everything,
    keys,
    last,
    padding,
    per_head,
    prefix,
    same,
    where,
    window,
)

LADDER = "░▒▓█"
GAP = 4  # columns between two drawings


def list_patterns(n: int) -> list[tuple[str, str, Formula]]:
    """Return (call, description, formula) of each pattern, for n tokens."""
    short, ids = n - 3, np.arange(n) // (n // 3)
    valid = np.arange(n)[None] >= 3
    checks = (np.arange(n)[:, None] + np.arange(n)) % 2 == 0
    sides, eight = np.linspace(-1, 1, 9)[None], np.arange(8.0)[None]
    every_third = where(lambda _b, _h, q, k: (q - k) % 3 == 0)
    own = per_head([causal(), window(1, 1)])
    return [
        ("everything()", "Every query sees every key: an encoder.", everything()),
        ("causal()", "Itself and all earlier tokens: a language model.", causal()),
        ("window(2)", "Itself and the two tokens before it.", window(2)),
        ("window(2, 1)", "Two tokens before it, one after it.", window(2, 1)),
        ("last(3)", "The last three tokens, with itself, as in Mistral.", last(3)),
        ("keys(2, 5)", "Keys 2, 3 and 4, for every query.", keys(2, 5)),
        ("prefix(4)", "Causal, after a prefix visible to all.", prefix(4)),
        ("window(2) | keys(0, 1)", "Plus a sink token.", window(2) | keys(0, 1)),
        (
            f"padding(lengths=[{short}])",
            "The end is padding.",
            padding(lengths=[short]),
        ),
        ("padding(valid)", "The start is padding.", padding(valid)),
        ("causal() & padding(valid)", "Left-padded text.", causal() & padding(valid)),
        ("same(ids)", "Only within the same document.", same(ids)),
        ("causal() & same(ids)", "Packed documents.", causal() & same(ids)),
        ("~same(ids)", "Only other documents.", ~same(ids)),
        ("where(fn)", "Any function: (q - k) % 3 == 0.", every_third),
        ("array(x)", "Any array.", array(checks)),
        ("per_head([causal(), window(1, 1)])", "One per head.", own),
        ("alibi([0.5])", "A penalty proportional to distance.", alibi([0.5])),
        ("table(values)", "A value per offset; far offsets are clipped.", table(sides)),
        (
            "table(values, log_offsets(8, far=16))",
            "T5: far offsets share a bucket.",
            table(eight, log_offsets(8, far=16)),
        ),
    ]


def draw_formula(formula: Formula, n: int) -> str:
    """Draw the last head of a formula over n tokens, two characters per cell.

    If others differ, the first line says which one it is.
    """
    cells, which = pick_head(formula, n)
    if cells.dtype == bool:
        marks = np.where(cells, "■", "·")
    else:
        low, high = cells.min(), cells.max()
        level = (cells - low) / (high - low) * (len(LADDER) - 1)
        marks = np.asarray(list(LADDER))[level.round().astype(int)]
    return "\n".join([*filter(None, [which]), *(" ".join(row) for row in marks)])


def draw_all(n: int, width: int) -> Table:
    """Arrange the drawings in columns, each with a title and a description."""
    across = max(1, (width + GAP) // (2 * n - 1 + GAP))
    table = Table.grid(padding=(0, GAP, 0, 0))
    for _ in range(across):
        table.add_column(width=2 * n - 1, vertical="bottom")
    patterns = list_patterns(n)
    for i in range(0, len(patterns), across):
        some = patterns[i : i + across]
        table.add_row(*(Text(call, style="bold") for call, _, _ in some))
        table.add_row(*(Text(sentence, style="dim") for _, sentence, _ in some))
        table.add_row(
            *(Text(draw_formula(formula, n) + "\n") for _, _, formula in some)
        )
    return table


@click.command()
@click.option(
    "--tokens", default=12, show_default=True, help="Number of tokens to draw."
)
def main(tokens: int) -> None:
    """Draw every mask and bias: rows are queries, columns are keys."""
    if tokens < 9:
        raise click.BadParameter("at least 9 tokens are needed to tell patterns apart")
    console = Console(highlight=False)
    console.print(draw_all(tokens, console.width))


if __name__ == "__main__":
    main(prog_name="python -m regard.masks")
