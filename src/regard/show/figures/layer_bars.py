"""Statistics by layer: a bar for the mean of its heads, a dot for each head.

    plot_layer_bars(seen.table(), "induction")
    plot_layer_bars(seen.table(), ["previous", "induction"])     one above the other
    print(draw_layer_bars(seen.table(), "induction"))

    bar = mean over heads, or the largest if the registry reduces it so

Next: head_grid.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import OptionError
from regard.show.figures.head_scatter import title_axis
from regard.show.figures.journal import (
    GRID,
    INK,
    POINT,
    SMALL,
    Width,
    dress_axes,
    find_family,
    open_journal,
    read_width,
    shorten_number,
    without_tex,
    wrap_note,
)
from regard.stats.registry import Statistic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from regard.show.figures.journal_figure import JournalFigure
    from regard.stats.table import HeadTable, Rows

BAR = "#56B4E9"
LEFT, RIGHT, TOP, HIGH = 32.0, 4.0, 5.0, 78.0  # points; HIGH: of one statistic
LONGEST = 40  # characters of the longest bar of the text twin


def pick_layers(
    table: HeadTable, names: str | Sequence[str], sequence: int
) -> tuple[Rows, Rows, list[Statistic]]:
    """Return the rows of the heads, those of the layers, and the statistics."""
    wanted = [names] if isinstance(names, str) else list(names)
    heads, statistics = table.pick(wanted, sequence)
    layers, _ = table.by_layer().pick(wanted, sequence)
    for name in wanted:
        if not np.isfinite(heads[name]).any():
            raise OptionError(f"no head has a value of {name!r}.")
    return heads, layers, statistics


@without_tex
def plot_layer_bars(
    table: HeadTable,
    names: str | Sequence[str],
    *,
    width: Width = "column",
    sequence: int = 0,
) -> JournalFigure:
    """Draw statistics by layer, one chart for each statistic.

    names: a statistic, "induction", or several
    width: "column" (3.25 inches), "page" (6.75), or inches
    """
    heads, layers, statistics = pick_layers(table, names, sequence)
    inches, n = read_width(width), len(statistics)
    note = wrap_note(tell_bars(table, statistics, sequence), inches)
    below = 26.0 + 8 * len(note.splitlines())
    across, down = inches * POINT, n * (HIGH + TOP) + below
    twin = draw_layer_bars(table, names, sequence=sequence)
    figure = open_journal((inches, down / POINT), twin)
    wide = (across - LEFT - RIGHT) / across
    for i, statistic in enumerate(statistics):
        bottom = below + (n - 1 - i) * (HIGH + TOP)
        place = LEFT / across, bottom / down, wide, HIGH / down
        axes = figure.add_axes(place, label=statistic.name)
        draw_bars_of(axes, heads, layers, statistic)
        axes.tick_params(labelbottom=i == n - 1)
        if i < n - 1:
            axes.set_xlabel("")
    style: Any = {"fontsize": SMALL, "color": INK, "fontfamily": find_family()}
    figure.text(2 / across, 3 / down, note, va="bottom", parse_math=False, **style)
    return figure


def draw_bars_of(axes: Axes, heads: Rows, layers: Rows, statistic: Statistic) -> None:
    """Draw the bars of the layers and the dots of the heads."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    name = statistic.name
    known = np.isfinite(layers[name])
    at, values = layers["layer"][known], layers[name][known]
    for bar, layer in zip(axes.bar(at, values, 0.76, color=BAR), at, strict=True):
        bar.set(gid=f"{name}-{layer}", linewidth=0)
    axes.scatter(heads["layer"], heads[name], 3, INK, lw=0, alpha=0.55, zorder=3)
    dress_axes(axes, "layer", title_axis(statistic))
    axes.grid(axis="y", color=GRID, linewidth=0.4)
    axes.axhline(0, color=INK, linewidth=0.5)
    axes.set_xlim(-0.7 + heads["layer"].min(), heads["layer"].max() + 0.7)
    low, high = (f(heads[name], initial=0) for f in (np.nanmin, np.nanmax))
    room = 0.05 * ((high - low) or 1)
    axes.set_ylim(low - room * (low < 0), high + room)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(4))


def tell_bars(table: HeadTable, statistics: Sequence[Statistic], sequence: int) -> str:
    """Return what bars and dots are, and where there are no values."""
    kinds = {x.reduction for x in statistics}
    largest = " and ".join(x.name for x in statistics if x.reduction == "max")
    bar = "the mean of the heads"
    if kinds == {"max"}:
        bar = "the largest of the heads"
    elif len(kinds) == 2:
        bar += f", of {largest} the largest"
    rows = table.rows[table.rows["sequence"] == sequence]
    lost = ". ".join(replace(table, rows=rows).list_nan())
    return f"Bar: {bar}; dot: a head. {lost}".strip()


def draw_layer_bars(
    table: HeadTable, names: str | Sequence[str], *, sequence: int = 0
) -> str:
    """Return the bars as text, with their numbers and the range of the heads."""
    heads, layers, statistics = pick_layers(table, names, sequence)
    lines: list[str] = []
    for statistic in statistics:
        name = statistic.name
        lines += [f"{title_axis(statistic)}   bar   least to largest head"]
        top = np.nanmax(np.abs(layers[name]))
        for row in layers:
            mine = heads[name][heads["layer"] == row["layer"]]
            known = mine[np.isfinite(mine)]
            bar, value, ends = "", "–", ""
            if np.isfinite(row[name]):
                bar = "█" * round(abs(row[name]) / (top or 1) * LONGEST)
                value = shorten_number(float(row[name]))
            if len(known):
                low, high = float(known.min()), float(known.max())
                ends = f"{shorten_number(low)} to {shorten_number(high)}"
            line = f"{row['layer']:>3} │{bar:<{LONGEST}} {value:>7}  {ends}"
            lines.append(line.rstrip())
    return "\n".join([*lines, tell_bars(table, statistics, sequence)])
