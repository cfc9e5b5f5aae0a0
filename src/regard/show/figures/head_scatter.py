"""Two statistics of every head: one dot per head, coloured by its layer.

    plot_head_scatter(seen.table(), "previous", "induction")
    print(draw_head_scatter(seen.table(), "previous", "induction"))

    dot = (table[x], table[y])        registry.py has the names of the statistics

The heads with the largest values are named "17.5": layer 17, head 5.

Next: layer_bars.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from regard.errors import OptionError
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
from regard.show.palette import LinearScale, Numbers
from regard.stats.registry import Statistic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from regard.show.figures.journal_figure import JournalFigure
    from regard.stats.table import HeadTable

DOT = 9.0  # square points
DARK = 64  # first of the 256 colours: lighter ones are hard to see on paper
LEFT, BOTTOM, RIGHT, TOP = 32.0, 26.0, 30.0, 5.0  # margins in points
SIDES = (  # of a dot, where its name may be: points to the right, up, alignment
    (4, 0, "left"),
    (-4, 0, "right"),
    (0, 6.5, "center"),
    (4, 5, "left"),
    (-4, 5, "right"),
    (0, 12, "center"),
    (0, -7, "center"),
)
LEADER = {"arrowstyle": "-", "linewidth": 0.3, "color": INK, "shrinkB": 1.5}
LEADER |= {"shrinkA": 0.5}
COLUMNS, ROWS = 60, 16  # of the text twin


@dataclass(frozen=True, eq=False)
class HeadDots:
    """The dots of a scatter plot."""

    layer: NDArray[np.int64]
    head: NDArray[np.int64]
    x: Numbers
    y: Numbers
    axes: tuple[Statistic, Statistic]
    left_out: int  # heads without a value

    def name(self, i: int) -> str:
        """Return the name of a head: "17.5"."""
        return f"{self.layer[i]}.{self.head[i]}"

    def find_largest(self, n: int) -> list[int]:
        """Return the n heads with the largest x and with the largest y."""
        found = [i for v in (self.x, self.y) for i in np.argsort(-v, kind="stable")[:n]]
        return list(dict.fromkeys(map(int, found)))

    @property
    def note(self) -> str:
        """How many heads have no dot; "" if none."""
        n = self.left_out
        return f"{n} head{'s have' if n > 1 else ' has'} no value." if n else ""


def read_dots(table: HeadTable, x: str, y: str, sequence: int = 0) -> HeadDots:
    """Return the dots of two statistics of a table."""
    rows, (first, second) = table.pick([x, y], sequence)
    known = np.isfinite(rows[x]) & np.isfinite(rows[y])
    if not known.any():
        raise OptionError(f"no head has a value of both {x!r} and {y!r}.")
    here = rows[known]
    return HeadDots(
        here["layer"].astype(np.int64),
        here["head"].astype(np.int64),
        here[x].astype(np.float64),
        here[y].astype(np.float64),
        (first, second),
        int((~known).sum()),
    )


def title_axis(statistic: Statistic) -> str:
    """Return the label of an axis: the statistic and its unit."""
    name, unit = statistic.name, statistic.unit
    return name if name == unit else f"{name} ({unit})"


@without_tex
def plot_head_scatter(
    table: HeadTable,
    x: str,
    y: str,
    *,
    named: int = 3,
    width: Width = "column",
    sequence: int = 0,
) -> JournalFigure:
    """Draw a dot for each head at two of its statistics.

    x, y: names of statistics, "previous"
    named: how many heads to name, of those with the largest x and the largest y
    width: "column" (3.25 inches), "page" (6.75), or inches
    """
    dots, inches = read_dots(table, x, y, sequence), read_width(width)
    note = wrap_note(f"{dots.note} Names: layer.head.".strip(), inches)
    extra = 8 * len(note.splitlines())
    across = inches * POINT
    down = 0.68 * min(across, 4.5 * POINT) + extra
    figure = open_journal((inches, down / POINT), write_dots(dots, named))
    bottom, right = BOTTOM + extra, across - RIGHT
    inner = right - LEFT, down - bottom - TOP
    box = LEFT / across, bottom / down, inner[0] / across, inner[1] / down
    axes = figure.add_axes(box, label="scatter")
    colours = colour_layers(dots.layer)
    drawn = axes.scatter(
        dots.x, dots.y, DOT, colours, edgecolors=INK, linewidths=0.25, clip_on=False
    )
    drawn.set(gid="heads", zorder=3)
    dress_axes(axes, *map(title_axis, dots.axes))
    axes.grid(color=GRID, linewidth=0.4)
    for axis, values in ((axes.xaxis, dots.x), (axes.yaxis, dots.y)):
        set_limits(axis, values)
    add_layer_key(figure, dots, (right + 8) / across, box[1], box[3])
    name_heads(axes, dots, dots.find_largest(named))
    style: Any = {"fontsize": SMALL, "color": INK, "fontfamily": find_family()}
    figure.text(2 / across, 3 / down, note, va="bottom", parse_math=False, **style)
    return figure


def set_limits(axis: Any, values: Numbers) -> None:
    """Set the limits of an axis: from 0, unless there are values below it."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    room = 0.04 * ((high - low) or 1.0)
    ends = low - (room if low < 0 else 0), high + room
    axis.set_major_locator(MaxNLocator(6))
    (axis.axes.set_xlim if axis.axis_name == "x" else axis.axes.set_ylim)(*ends)


def colour_layers(layers: NDArray[np.int64]) -> Numbers:
    """Return the colour of each layer: the last one is the darkest."""
    table = LinearScale(0, 1).colours()[DARK:] / 255
    last = max(1, int(layers.max()))
    return np.asarray(table[np.rint(layers / last * (len(table) - 1)).astype(int)])


def add_layer_key(
    figure: JournalFigure, dots: HeadDots, left: float, bottom: float, height: float
) -> None:
    """Add a colour bar of the layers."""
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415
    from matplotlib.colors import ListedColormap, Normalize  # noqa: PLC0415

    last = max(1, int(dots.layer.max()))
    table = ListedColormap(LinearScale(0, 1).colours()[DARK:] / 255)
    place = figure.add_axes((left, bottom, 5 / POINT / figure.get_figwidth(), height))
    bar: Any = figure.colorbar(ScalarMappable(Normalize(0, last), table), place)
    bar.outline.set(linewidth=0.4, edgecolor=INK)
    bar.set_ticks([0, last], labels=["0", str(last)])
    style = {"labelfontfamily": find_family(), "labelsize": SMALL, "colors": INK}
    bar.ax.tick_params(**style, length=2, width=0.4, pad=1.5)
    words = {"fontsize": SMALL, "color": INK, "fontfamily": find_family()}
    bar.set_label("layer", labelpad=-4, **words)


def name_heads(axes: Axes, dots: HeadDots, which: list[int]) -> None:
    """Write the names of heads beside their dots, where no other name is.

    Of the free sides, the one with the fewest other dots; none, if none is free.
    """
    dots_at = axes.transData.transform(np.stack([dots.x, dots.y], -1))
    taken: list[Any] = []
    for i in which:
        found = []
        for dx, dy, ha in SIDES:
            text = axes.annotate(
                dots.name(i),
                (dots.x[i], dots.y[i]),
                (dx, dy),
                textcoords="offset points",
                fontsize=SMALL,
                color=INK,
                fontfamily=find_family(),
                ha=ha,
                va="center",
                zorder=4,
                arrowprops=LEADER,
            )
            box = text.get_window_extent()
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 + 12
            inside = inside and axes.bbox.y0 <= box.y0
            if inside and not any(box.overlaps(other) for other in taken):
                found.append((int(box.padded(3).count_contains(dots_at)), text, box))
            else:
                text.remove()
        for rest in sorted(found, key=lambda x: x[0])[1:]:
            rest[1].remove()
        taken += [x[2] for x in sorted(found, key=lambda x: x[0])[:1]]


def draw_head_scatter(
    table: HeadTable, x: str, y: str, *, named: int = 3, sequence: int = 0
) -> str:
    """Return the scatter plot as text: a digit counts the heads of a place."""
    return write_dots(read_dots(table, x, y, sequence), named)


def write_dots(dots: HeadDots, named: int) -> str:
    """Return the dots as text, and the values of the named heads."""
    ends = [(min(0.0, v.min()), max(0.0, v.max())) for v in (dots.x, dots.y)]
    counts = np.zeros((ROWS, COLUMNS), int)
    places = [
        np.minimum(((v - low) / ((high - low) or 1) * n).astype(int), n - 1)
        for v, (low, high), n in zip(
            (dots.x, dots.y), ends, (COLUMNS, ROWS), strict=True
        )
    ]
    np.add.at(counts, (ROWS - 1 - places[1], places[0]), 1)
    (left, right), (low, high) = ([shorten_number(float(e)) for e in x] for x in ends)
    margin = max(map(len, (low, high)))
    lines = [title_axis(dots.axes[1])]
    for i, row in enumerate(counts.tolist()):
        label = high if i == 0 else low if i == ROWS - 1 else ""
        cells = "".join(" " if n == 0 else str(n) if n < 10 else "+" for n in row)
        lines.append(f"{label:>{margin}} {'┤' if label else '│'}{cells}".rstrip())
    lines.append(f"{'':>{margin}} └{'─' * COLUMNS}")
    lines.append(f"{'':>{margin}}  {left}{right:>{COLUMNS - len(left)}}")
    lines.append(f"{title_axis(dots.axes[0]):>{margin + 2 + COLUMNS}}")
    lines.append("a digit: how many heads, + for ten or more")
    lines += [dots.note] if dots.note else []
    for i in dots.find_largest(named):
        pairs = zip(dots.axes, (dots.x[i], dots.y[i]), strict=True)
        values = ", ".join(f"{s.name} {shorten_number(float(v))}" for s, v in pairs)
        lines.append(f"{dots.name(i)}: {values}")
    return "\n".join(lines)
