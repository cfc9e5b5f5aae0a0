"""Attention over the patches of a picture: the weights of one query as a grid.

    with regard.watch(vit) as seen:
        vit(pixels)
    plot_patches(seen.layer(-1), 0, picture=pixels[0])       the class token, all heads
    plot_patches(seen.layer(3), (4, 7), grid=(14, 14))       a patch: row 4, column 7
    print(draw_patches(seen.layer(3), (4, 7)))               the same as text

A vision model reads special tokens first (a class token, registers), then the patches
row by row, so special tokens = keys - rows × columns.

The weights on patches do not sum to 1; the weight on special tokens is printed. Over a
picture, colour shows the weight, and a patch without weight shows the grey picture.

Next: palette.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from regard.arrays import to_numpy
from regard.errors import OptionError
from regard.recording.record import Record
from regard.show.figure import (
    BESIDE,
    LEAST,
    PAGES,
    POINTS,
    FigureColors,
    add_bar,
    draw_panel,
    entitle,
    label_axis,
    make_figure,
    size_map,
    write_around,
)
from regard.show.palette import LinearScale, Numbers, Panel, Scale, read_panels
from regard.show.terminal_map import (
    Color,
    Layout,
    Margins,
    clean_title,
    lay_out_maps,
    write_legend,
)
from regard.show.vision_input import find_grid, read_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Query = int | tuple[int, int]
PALE, VEIL = 0.4, 0.75  # contrast of a picture, and its highest opacity


@dataclass(frozen=True, eq=False)
class Patches:
    """The weights of one query of one head."""

    head: int
    query: Query
    weights: Numbers  # (rows, columns)
    allowed: NDArray[np.bool_]
    special: Numbers  # weights on the tokens before the patches

    def tell(self) -> str:
        """Return a summary of what the grid cannot show."""
        i, j = np.unravel_index(int(self.weights.argmax()), self.weights.shape)
        itself = isinstance(self.query, tuple)
        parts = [
            self.tell_special(),
            f"{self.weights[self.query]:.2f} on itself" if itself else "",
            f"most on ({i}, {j}), {self.weights[i, j]:.2f}",
        ]
        return ", ".join(filter(None, parts))

    def tell_special(self) -> str:
        """Return the weight on the tokens before the patches, as text."""
        n, total = self.special.size, self.special.sum()
        return f"{total:.2f} on {count_special(n)}" if n else ""


def read_patches(
    record: Record,
    query: Query = 0,
    *,
    grid: tuple[int, int] | None = None,
    heads: Sequence[int] | None = None,
) -> list[Patches]:
    """Return the weights of one query on every patch, for some heads or all.

    query: (row, column) of a patch, or the number of a special token
    grid: rows and columns of patches; by default the largest square that fits
    """
    rows, columns, special = find_grid(record, grid)
    heads = range(record.heads) if heads is None else heads
    if not heads or not set(heads) <= set(range(record.heads)):
        raise OptionError(f"heads={heads}, expected some of 0 to {record.heads - 1}.")
    at = find_query(query, (rows, columns), special)
    found = np.flatnonzero(to_numpy(record.q_positions) == at)
    if not found.size:
        raise OptionError(f"query={query}: {record.name} kept no query at {at}.")
    row = slice(int(found[0]), int(found[0]) + 1)
    weights = to_numpy(record.weights(row)).astype(np.float64)[:, 0]  # (H, Nk)
    mask = record.allowed(row)
    cells = np.ones((1, 1), bool) if mask is None else to_numpy(mask)[:, 0]
    cells = np.broadcast_to(cells, weights.shape)
    shape = rows, columns
    return [
        Patches(
            h,
            query,
            weights[h, special:].reshape(shape),
            cells[h, special:].reshape(shape),
            weights[h, :special],
        )
        for h in heads
    ]


def find_query(query: Query, grid: tuple[int, int], special: int) -> int:
    """Return the position of a query among the tokens."""
    rows, columns = grid
    if isinstance(query, tuple):
        i, j = query
        if 0 <= i < rows and 0 <= j < columns:
            return special + i * columns + j
    elif 0 <= query < special:
        return query
    raise OptionError(
        f"query={query}, expected (row, column) of one of {rows} × {columns} patches, "
        f"or the number of one of {special} special tokens."
    )


def title_patches(record: Record, found: Patches) -> str:
    """Return a title that names the layer and the query."""
    n, (rows, columns) = found.special.size, found.weights.shape
    if isinstance(found.query, tuple):
        after = f", after {count_special(n)}" if n else ""
        name = f"patch {found.query} of {rows} × {columns}{after}"
    else:
        token = "class token" if n == 1 else f"special token {found.query} of {n}"
        name = f"{token}, before {rows} × {columns} patches"
    return f"{record.name}\nquery: {name}".strip()


def count_special(n: int) -> str:
    """Return the number of special tokens as text."""
    return f"{n} special token{'s' * (n > 1)}"


def make_panels(found: Sequence[Patches], cells: tuple[int, int]) -> list[Panel]:
    """Return the grids as maps, with `cells` (rows, columns) of patches per pixel."""
    maps = {f"head {x.head}": (x.weights, x.allowed) for x in found}
    return read_panels(maps, cells)


def fit_patches(found: Sequence[Patches]) -> Scale:
    """Return a scale that ends at the largest weight on a patch."""
    return LinearScale(0, max(float(x.weights.max()) for x in found) or 1.0)


def draw_patches(
    record: Record,
    query: Query = 0,
    *,
    grid: tuple[int, int] | None = None,
    heads: Sequence[int] | None = None,
    scale: Scale | None = None,
    color: Color = False,
    width: int = 80,
) -> str:
    """Draw the grids as text, and list the weight on special tokens.

    query: (row, column) of a patch, or the number of a special token
    grid: rows and columns of patches; by default the largest square that fits
    """
    found = read_patches(record, query, grid=grid, heads=heads)
    scale = scale or fit_patches(found)
    labels = Margins((), (), found[0].weights.shape)
    room = width - labels.margin
    layout = Layout.choose(labels.shape, labels, room, color=bool(color))
    panels = make_panels(found, layout.cells)
    across = max(1, (room + 2) // (layout.wide(panels) + 2))
    lines = [clean_title(x) for x in title_patches(record, found[0]).splitlines()]
    for i in range(0, len(panels), across):
        lines += lay_out_maps(panels[i : i + across], labels, layout, scale, color)
    lines.append(write_legend(scale, color))
    if layout.cells != (1, 1):
        down, over = layout.cells
        lines.append(f"each pixel: the largest of up to {down} × {over} patches")
    return "\n".join([*lines, *(f"head {x.head}: {x.tell()}" for x in found)])


def plot_patches(
    record: Record,
    query: Query = 0,
    *,
    picture: Any = None,
    grid: tuple[int, int] | None = None,
    heads: Sequence[int] | None = None,
    scale: Scale | None = None,
    columns: int = 4,
    dark: bool = False,
) -> Figure:
    """Draw the grids, over the picture if given; a frame marks the query.

    query: (row, column) of a patch, or the number of a special token
    picture: (H, W), (H, W, 3) or (3, H, W), as passed to the model
    grid: rows and columns of patches; by default the largest square that fits
    """
    found = read_patches(record, query, grid=grid, heads=heads)
    scale, page = scale or fit_patches(found), PAGES[dark]
    panels, shape = make_panels(found, (1, 1)), found[0].weights.shape
    image = None if picture is None else read_picture(picture)
    n = len(panels) + (image is not None)
    down = -(-n // max(1, columns))
    across = -(-n // down)  # fill the rows of maps evenly
    width, height = size_map(shape, LEAST, BESIDE)
    size = (width + 0.25) * across + 1, (height + 0.6) * down + 0.6
    figure, axes = make_figure(size, (down, across), n, page)
    maps = axes[n - len(panels) :]
    if image is not None:
        axes[0].imshow(image, extent=place_picture(shape))
        entitle(axes[0], "the picture", page)
    for place, panel, patches in zip(maps, panels, found, strict=True):
        draw_panel(place, panel, scale, page, numbers=image is None)
        if image is not None:
            place.imshow(veil(image, panel, scale, page), extent=place_picture(shape))
        entitle(place, f"{panel.title}\n{patches.tell_special()}".strip(), page)
    for place in axes:
        dress_grid(place, shape, query, page)
    axes[0].set_ylabel("row", fontsize=8, color=page.ink)
    axes[0].set_xlabel("column", fontsize=8, color=page.ink)
    add_bar(figure, maps, scale, page, what="weight", inches=height * down)
    write_around(figure, title_patches(record, found[0]), "", page)
    return figure


def veil(image: Numbers, panel: Panel, scale: Scale, page: FigureColors) -> Numbers:
    """Return the pale grey picture, more transparent under weights, (H, W, 4)."""
    grey = image @ [0.299, 0.587, 0.114]
    grey = PALE * grey if page.dark else 1 - PALE * (1 - grey)
    i, j = (
        np.arange(n) * cells // n
        for n, cells in zip(grey.shape, panel.values.shape, strict=True)
    )
    seen = VEIL * (1 - scale.place(panel.values)) ** 2 * panel.allowed  # keep hatching
    return np.stack([grey, grey, grey, seen[np.ix_(i, j)]], -1)


def place_picture(shape: tuple[int, ...]) -> tuple[float, float, float, float]:
    """Return the extent of a picture over a grid of patches."""
    return -0.5, shape[1] - 0.5, shape[0] - 0.5, -0.5


def dress_grid(
    axes: Axes, shape: tuple[int, ...], query: Query, page: FigureColors
) -> None:
    """Number rows and columns, and frame the patch of the query."""
    axes.spines[:].set(linewidth=0.5, color=page.ink)
    axes.tick_params(labelsize=POINTS, colors=page.ink, length=2, width=0.5)
    for axis, n in ((axes.yaxis, shape[0]), (axes.xaxis, shape[1])):
        label_axis(axis, (), n, 1, ())
    if isinstance(query, tuple):
        i, j = query
        x, y = [j - 0.5, j + 0.5], [i - 0.5, i + 0.5]
        around = [x[0], x[1], x[1], x[0]], [y[0], y[0], y[1], y[1]]
        for colour, thick in (("white", 2.6), ("#D55E00", 1.3)):
            axes.fill(*around, fill=False, edgecolor=colour, linewidth=thick)
