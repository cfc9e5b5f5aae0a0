"""One statistic of every head as a grid: a row for each layer, a column for each head.

    plot_head_grid(seen.table(), "induction")
    print(draw_head_grid(seen.table(), "induction"))

    cell[layer, head] = table[name]

A head without a value is hatched; where a layer has no such head, the paper is bare.

Next: token_arcs.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from regard.errors import OptionError
from regard.show.figures.head_scatter import title_axis
from regard.show.figures.journal import (
    INK,
    POINT,
    SMALL,
    Width,
    add_key,
    dress_axes,
    find_family,
    make_colours,
    open_journal,
    read_width,
    shorten_number,
    without_tex,
    wrap_note,
)
from regard.show.palette import LinearScale, Numbers, Scale, Signed
from regard.stats.registry import Statistic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from regard.show.figures.journal_figure import JournalFigure
    from regard.stats.table import HeadTable

LEFT, RIGHT, TOP = 26.0, 4.0, 4.0  # margins in points
WIDE, HIGH, SMALLEST = 24.0, 8.0, 2.0  # points: the largest cell, the smallest
NAMED = 3  # heads named below the grid
HATCH = "#BBBBBB"


@dataclass(frozen=True, eq=False)
class HeadGrid:
    """A statistic by layer and head."""

    statistic: Statistic
    layers: NDArray[np.int64]
    values: Numbers  # (layers, heads); NaN where there is no value
    exists: NDArray[np.bool_]  # whether a layer has such a head

    def find_largest(self) -> list[tuple[int, int]]:
        """Return the rows and columns of the largest values."""
        order = np.argsort(-self.values, axis=None, kind="stable")[:NAMED]
        found = [divmod(int(i), self.values.shape[1]) for i in order]
        return [x for x in found if np.isfinite(self.values[x])]

    def tell(self) -> str:
        """Return the largest values, and how many heads have none, in words."""
        most = ", ".join(
            f"{self.layers[i]}.{h} {shorten_number(float(self.values[i, h]))}"
            for i, h in self.find_largest()
        )
        n = int((self.exists & ~np.isfinite(self.values)).sum())
        lost = f" {n} head{'s have' if n > 1 else ' has'} no value." if n else ""
        return f"Largest (layer.head): {most}.{lost}"


def read_grid(table: HeadTable, name: str, sequence: int = 0) -> HeadGrid:
    """Return one statistic of a table by layer and head."""
    rows, (statistic,) = table.pick([name], sequence)
    if not np.isfinite(rows[name]).any():
        raise OptionError(f"no head has a value of {name!r}.")
    layers, at = np.unique(rows["layer"], return_inverse=True)
    values = np.full((len(layers), int(rows["head"].max()) + 1), np.nan)
    exists = np.zeros(values.shape, bool)
    values[at, rows["head"]] = rows[name]
    exists[at, rows["head"]] = True
    return HeadGrid(statistic, layers.astype(np.int64), values, exists)


def fit_grid(grid: HeadGrid) -> Scale:
    """Return a scale from 0, or one with two colours if values are below 0."""
    known = grid.values[np.isfinite(grid.values)]
    if known.min() < 0:
        return Signed(float(np.abs(known).max()))
    return LinearScale(0, float(known.max()) or 1.0)


@without_tex
def plot_head_grid(
    table: HeadTable,
    name: str,
    *,
    scale: Scale | None = None,
    width: Width = "column",
    sequence: int = 0,
) -> JournalFigure:
    """Draw one statistic of every head, by layer and head.

    name: a statistic, "induction"
    width: "column" (3.25 inches), "page" (6.75), or inches
    """
    grid, inches = read_grid(table, name, sequence), read_width(width)
    scale = scale or fit_grid(grid)
    across, (n, heads) = inches * POINT, grid.values.shape
    wide = min(WIDE, (across - LEFT - RIGHT) / heads)
    high = min(HIGH, wide)
    if wide < SMALLEST:
        raise OptionError(
            f"{heads} heads do not fit into {inches} inches: write "
            f"width={(heads * SMALLEST + LEFT + RIGHT) / POINT + 0.05:.1f} or more."
        )
    note = wrap_note(f"{title_axis(grid.statistic)}. {grid.tell()}", inches)
    below = 48.0 + 8 * len(note.splitlines())
    down = n * high + TOP + below
    figure = open_journal((inches, down / POINT), write_grid(grid, scale))
    place = LEFT / across, below / down, heads * wide / across, n * high / down
    axes = figure.add_axes(place, label="grid")
    fill_cells(axes, grid, scale)
    largest = float(np.nanmax(grid.values))
    bar = LEFT / across, (below - 34) / down, min(100, across / 3) / across, 5 / down
    add_key(figure, scale, place=bar, largest=largest)
    style: Any = {"fontsize": SMALL, "color": INK, "fontfamily": find_family()}
    figure.text(2 / across, 3 / down, note, va="bottom", parse_math=False, **style)
    return figure


def fill_cells(axes: Axes, grid: HeadGrid, scale: Scale) -> None:
    """Draw the cells as vectors; those without a value are hatched."""
    from matplotlib.patches import Rectangle  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    n, heads = grid.values.shape
    colours: Any = make_colours(scale)
    edges = np.arange(heads + 1) - 0.5, np.arange(n + 1) - 0.5
    cells = np.ma.masked_invalid(grid.values)
    mesh = axes.pcolormesh(
        *edges, cells, norm=colours.norm, cmap=colours.cmap, lw=0.3, edgecolors="white"
    )
    mesh.set_gid("heads")
    for i, h in np.argwhere(grid.exists & ~np.isfinite(grid.values)).tolist():
        lost = Rectangle((h - 0.5, i - 0.5), 1, 1, fill=False, edgecolor=HATCH)
        lost.set(hatch="/////", linewidth=0.3)
        axes.add_patch(lost)
    dress_axes(axes, "head", "layer")
    axes.set(xlim=(-0.5, heads - 0.5), ylim=(n - 0.5, -0.5))
    axes.spines[:].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    names = dict(enumerate(grid.layers.tolist()))
    axes.yaxis.set_major_formatter(lambda y, _: str(names.get(round(y), "")))


def draw_head_grid(
    table: HeadTable, name: str, *, scale: Scale | None = None, sequence: int = 0
) -> str:
    """Return the grid as text: a shade for each head."""
    grid = read_grid(table, name, sequence)
    return write_grid(grid, scale or fit_grid(grid))


def write_grid(grid: HeadGrid, scale: Scale) -> str:
    """Return the grid as shades; ? is a head without a value."""
    known = np.isfinite(grid.values)
    marks = np.where(known, scale.shade(np.nan_to_num(grid.values)), "?")
    marks = np.where(grid.exists, marks, " ")
    lines = [title_axis(grid.statistic), "layer  heads from left to right"]
    for layer, row in zip(grid.layers.tolist(), marks, strict=True):
        lines.append(f"{layer:>5}  {''.join(2 * str(x) for x in row)}".rstrip())
    legend = scale.legend().replace("   blank: masked", "")
    if (grid.exists & ~known).any():
        legend += "   ? no value"
    return "\n".join([*lines, legend, grid.tell()])
