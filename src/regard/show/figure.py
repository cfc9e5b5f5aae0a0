"""Attention maps as matplotlib figures: the counterpart of terminal_map.py.

    plot_weights(seen.layer(17), heads=[5], rows=tokens, keys=tokens).savefig("5.pdf")
    plot_weights({"no mask": a, "causal": (b, causal())})      side by side
    plot_steps(regard.explain(q, k, v, causal()))              every step, labelled
    plot_gallery(seen)                                         layers × heads
    plot_table(seen.table())                                   statistics by layer
    plot_mask(causal() & window(3))                            a formula

The caller owns the figure: pyplot is not used. Masked cells are hatched.

Next: notebook_figure.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.arrays import Array
from regard.definition.steps import Steps
from regard.errors import OptionError
from regard.masks.algebra import Mask
from regard.masks.formula import Formula
from regard.masks.mask_picture import pick_head
from regard.recording.record import Recording
from regard.show.loss_curve import COLOURS, dress, open_figure
from regard.show.palette import (
    Holder,
    LinearScale,
    LogScale,
    Panel,
    Scale,
    find_coarsest,
    fit_signed,
    fit_weights,
    join_maps,
    list_records,
    measure_source,
    name_layer,
    read_gallery,
    read_panels,
    read_step,
)
from regard.show.terminal_map import (
    GALLERY,
    MARK,
    STEPS,
    Labels,
    Margins,
    clean_title,
    measure_plain_width,
    write_pooling,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from regard.stats.table import HeadTable

FONT = "DejaVu Sans"  # comes with matplotlib
FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "PingFang SC", "Microsoft YaHei")
POINTS, LONG = 7, 12  # font size and most characters of a label
PIXELS = 600  # most pixels per side of a map: printing shows no more
FEW = 8  # a map with no more rows and columns shows its numbers
APART = 3  # label at least every third token, otherwise positions
CELL, LEAST, ALONE, BESIDE = 0.135, 1.8, 5.5, 2.9  # inches: a cell, the side of a map
Labelled = tuple["Axes", Margins, tuple[bool, bool], tuple[str, str]]


@dataclass(frozen=True)
class FigureColors:
    """The colours of a figure other than those of the scale."""

    paper: str
    ink: str
    hatch: str
    dark: bool


PAGES = (
    FigureColors("#FFFFFF", "#222222", "#CCCCCC", dark=False),
    FigureColors("#15151A", "#E6E6E6", "#4A4A54", dark=True),
)


def plot_weights(
    source: Any,
    *,
    rows: Labels = None,
    keys: Labels = None,
    mask: Mask | Array | None = None,
    heads: Sequence[int] | None = None,
    scale: Scale | None = None,
    columns: int = 4,
    dark: bool = False,
) -> Figure:
    """Draw weights, one map per head, all on the same colour scale.

    source: (Nq, Nk) or (H, Nq, Nk), a Record, or {title: weights or (weights, mask)}
    rows, keys: a token for each query and key
    scale: LinearScale(0, 1), LogScale(1e-4, 1), …; fitted to the weights by default
    columns: number of maps side by side
    """
    n, shape = measure_source(source, heads)
    labels, page = Margins.read(rows, keys, shape), PAGES[dark]
    cells = -(-shape[0] // PIXELS), -(-shape[1] // PIXELS)
    panels = read_panels(source, cells, mask=mask, heads=heads)
    panels, above = name_layer(source, panels)
    first = "".join(labels.keys[:1])
    scale, note = (scale, "") if scale else fit_weights(panels, first)
    across = max(1, min(columns, n))
    width, height = size_map(shape, LEAST, ALONE if n == 1 else BESIDE)
    down = -(-n // across)
    beside, below = (0.5 + measure_labels(x) for x in (labels.rows, labels.keys))
    below *= 1 + (n % across > 0)  # maps above an incomplete row have labels, too
    below += 0.2 * bool(above)
    size = width * across + 0.9 + beside, (height + 0.25) * down + below
    figure, grid = make_figure(size, (down, across), n, page)
    for axes, panel in zip(grid, panels, strict=True):
        draw_panel(axes, panel, scale, page)
        entitle(axes, panel.title, page)
    what = write_pooling(panels[0]) or "weight"
    add_bar(figure, grid, scale, page, what=what, inches=height * down)
    write_around(figure, above, note, page)
    shown = [(i % across == 0, i + across >= n) for i in range(n)]
    pairs = zip(grid, shown, strict=True)
    label_all(figure, [(x, labels, at, ("query", "key")) for x, at in pairs], page)
    return figure


def plot_steps(
    steps: Steps,
    *,
    at: tuple[int, ...] | None = None,
    names: Sequence[str] = STEPS,
    columns: int = 3,
    dark: bool = False,
) -> Figure:
    """Draw the steps of `regard.explain` and their formulas, one scale per step.

    at: (b, h); the first by default
    names: the steps to draw, if present
    """
    chosen, page = [step for step in steps if step.name in names], PAGES[dark]
    if not chosen:
        raise OptionError(f"names={tuple(names)}, expected some of {STEPS}.")
    shape = len(chosen[0].rows), len(steps["weights"].columns)
    across = max(1, min(columns, len(chosen)))
    down = -(-len(chosen) // across)
    width, height = size_map(shape, 2.2, BESIDE)
    size = (width + 0.9) * across, (height + 0.9) * down
    figure, grid = make_figure(size, (down, across), len(chosen), page)
    parts: list[Labelled] = []
    for axes, step in zip(grid, chosen, strict=True):
        panel = read_step(steps, step, at)
        weights = step.name == "weights"
        scale = fit_weights([panel])[0] if weights else fit_signed(panel.values)
        draw_panel(axes, panel, scale, page)
        entitle(axes, f"{step.name}\n{fill(step.formula, 38)}", page)
        add_bar(figure, [axes], scale, page, what="", inches=height)
        words = "query", "key" if step.columns else "feature"
        labels = Margins.read(step.rows, step.columns or None, panel.shape)
        parts.append((axes, labels, (True, True), words))
    label_all(figure, parts, page)
    return figure


def plot_gallery(
    source: Recording | Holder,
    *,
    sequence: int = 0,
    pixels: int | None = None,
    dark: bool = False,
) -> Figure:
    """Draw a small map of every head of every layer of a sequence, on one scale.

    pixels: most pixels per side of a map; by default as many as are printed
    """
    page, gap = PAGES[dark], 2
    layers = list_records(source, sequence)
    heads = max(layer.heads for layer in layers.values())
    side = max(0.17, min(0.6, 6 / heads, 8.5 / len(layers)))  # inches, to fit a page
    pixels = int(side * 180) if pixels is None else pixels
    grid = read_gallery(source, (pixels, pixels), sequence)
    mosaic, (down, across) = join_maps(list(grid.values()), gap)
    size = side * heads + 1.1, side * len(grid) + 0.6
    figure, (axes,) = make_figure(size, (1, 1), 1, page)
    whole = Panel("", mosaic, ~np.isnan(mosaic), (1, 1), mosaic.shape, 0)
    draw_panel(axes, whole, GALLERY, page, numbers=False)
    axes.patch.set(hatch=None)  # no hatching between maps
    axes.spines[:].set_visible(False)
    axes.set_xlabel("head", fontsize=8, color=page.ink)
    axes.set_ylabel("layer", fontsize=8, color=page.ink)
    sides = (axes.xaxis, range(heads), across), (axes.yaxis, list(grid), down)
    for axis, names, step in sides:
        at = np.arange(0, len(names), -(-POINTS * 2 // int(side * 72)))
        axis.set_ticks((at + 0.5) * step - gap / 2 - 0.5, [str(names[i]) for i in at])
    axes.tick_params(length=0)
    what = write_pooling(find_coarsest(grid)) or "weight"
    add_bar(figure, [axes], GALLERY, page, what=what, inches=side * len(grid))
    return figure


def plot_table(
    table: HeadTable, *, numbers: Sequence[str] | None = None, sequence: int = 0
) -> Figure:
    """Draw statistics of seen.table() by layer: a dot per head, a line for the mean."""
    heads, charted = table.pick(numbers, sequence)
    (layers, _), n = table.by_layer().pick(numbers, sequence), len(charted)
    figure, grid = make_figure((2.4 * n, 2.1), (1, n), n, PAGES[0])
    for axes, statistic in zip(grid, charted, strict=True):
        name, unit = statistic.name, statistic.counted
        axes.scatter(heads["layer"], heads[name], 5, COLOURS[5], lw=0, label="a head")
        mean = "the largest" if statistic.reduction == "max" else "their mean"
        axes.plot(layers["layer"], layers[name], color=COLOURS[0], label=mean)
        title = name if unit == name else f"{name} ({unit})"
        dress(axes, title, log=False, named=False)
        axes.set_xlabel("layer", fontsize=9)
        label_axis(axes.xaxis, (), 0, 1, ())
        if np.nanmin(heads[name], initial=0) >= 0:
            axes.set_ylim(bottom=0)
        axes.margins(x=0.03)
    mixed = any(x.reduction == "max" for x in charted)  # some lines are not means
    for axes in grid if mixed else grid[:1]:
        axes.legend(frameon=False, fontsize=7)
    write_around(figure, "", "; ".join(table.list_nan()), PAGES[0])
    return figure


def plot_mask(formula: Formula, n: int = 12, *, dark: bool = False) -> Figure:
    """Draw a mask or bias over n tokens, for its last head."""
    page, (cells, which) = PAGES[dark], pick_head(formula, n)
    figure, (axes,) = make_figure((3.2, 2.9), (1, 1), 1, page)
    truth = cells.dtype == bool
    (panel,) = read_panels(np.where(cells, 0.6, -np.inf) if truth else cells)
    scale = LinearScale(0, 1) if truth else fit_signed(cells)
    draw_panel(axes, panel, scale, page, numbers=False)
    below = "hatched: may not see" if truth else ""
    title = (fill(repr(formula), 44), which, below)
    entitle(axes, "\n".join(filter(None, title)), page)
    if not truth:
        add_bar(figure, [axes], scale, page, what="added to scores", inches=2.4)
    labels = Margins((), (), (n, n))
    label_all(figure, [(axes, labels, (True, True), ("query", "key"))], page)
    return figure


def make_figure(
    size: tuple[float, float], grid: tuple[int, int], n: int, page: FigureColors
) -> tuple[Figure, list[Axes]]:
    """Return a new figure (size in inches) with n axes in a grid (down, across)."""
    figure = open_figure(size)
    figure.set_facecolor(page.paper)
    spec = figure.add_gridspec(*grid)
    places = [spec[divmod(i, grid[1])] for i in range(n)]
    return figure, [figure.add_subplot(place) for place in places]


def size_map(shape: tuple[int, int], least: float, most: float) -> tuple[float, float]:
    """Return the width and height of a map in inches, the longer from least to most."""
    sides = [n * CELL for n in shape]
    stretch = min(most, max(least, *sides)) / max(sides)
    height, width = (max(0.8, side * stretch) for side in sides)
    return width, height


def draw_panel(
    axes: Axes, panel: Panel, scale: Scale, page: FigureColors, *, numbers: bool = True
) -> None:
    """Draw one map; a small one shows its numbers, unless numbers=False."""
    from matplotlib.colors import ListedColormap, LogNorm, Normalize  # noqa: PLC0415

    low, high = scale.low, scale.high
    log = isinstance(scale, LogScale)
    (n_q, n_k), (down, across) = panel.shape, panel.cells
    height, width = panel.values.shape
    axes.imshow(
        np.ma.masked_array(panel.values, ~panel.allowed),
        norm=LogNorm(low, high, clip=True) if log else Normalize(low, high),
        cmap=ListedColormap(scale.colours(dark=page.dark) / 255),
        interpolation="nearest",
        extent=(-0.5, width * across - 0.5, height * down - 0.5, -0.5),
        aspect="equal" if 0.2 < n_q / n_k < 5 else "auto",
    )
    axes.set(xlim=(-0.5, n_k - 0.5), ylim=(n_q - 0.5, -0.5))
    axes.patch.set(facecolor=page.paper, edgecolor=page.hatch, hatch="/////")
    axes.spines[:].set(linewidth=0.5, color=page.ink)
    axes.tick_params(labelsize=POINTS, colors=page.ink, length=2, width=0.5)
    if numbers and max(n_q, n_k) <= FEW:
        light = scale.colours(dark=page.dark) @ [0.299, 0.587, 0.114] > 140
        for i, j in np.argwhere(panel.allowed).tolist():
            x = panel.values[i, j]
            ink = "black" if light[round(float(scale.place(x)) * 255)] else "white"
            axes.text(j, i, f"{x:.2f}", color=ink, size=6, ha="center", va="center")


def entitle(axes: Axes, title: str, page: FigureColors) -> None:
    """Write a title above a map."""
    safe = "\n".join(map(clean_title, title.splitlines()))
    axes.set_title(safe, fontsize=8, color=page.ink, parse_math=False)


def add_bar(
    figure: Figure,
    axes: Sequence[Axes],
    scale: Scale,
    page: FigureColors,
    *,
    what: str,
    inches: float,
) -> None:
    """Add a colour bar, with an arrow if some weights exceed its end."""
    images: list[Any] = [x.images[0] for x in axes]
    beyond = max(image.get_array().max() for image in images) > 1.001 * scale.high
    ends = "max" if beyond else "neither"
    bar: Any = figure.colorbar(
        images[0], ax=list(axes), extend=ends, shrink=0.9, aspect=8 * inches, pad=0.02
    )
    bar.set_label(what, fontsize=POINTS, color=page.ink)
    bar.ax.tick_params(labelsize=POINTS, colors=page.ink, length=2, width=0.5)
    bar.outline.set(linewidth=0.5, edgecolor=page.ink)


def write_around(figure: Figure, above: str, note: str, page: FigureColors) -> None:
    """Write a title above the figure and a note below it, if given."""
    if above:
        safe = "\n".join(map(clean_title, above.splitlines()))
        figure.suptitle(safe, fontsize=8, color=page.ink, parse_math=False)
    if note:
        text = fill(note, int(figure.get_figwidth() * 19))
        figure.supxlabel(text, fontsize=6.5, color=page.ink, parse_math=False)


def label_all(figure: Figure, parts: Sequence[Labelled], page: FigureColors) -> None:
    """Label the axes with as many tokens as fit."""
    fonts, known = find_fonts()
    for _ in range(2):  # labels take up room, which changes how many fit
        figure.draw_without_rendering()
        for axes, labels, shown, names in parts:
            box = axes.get_window_extent()
            sides = (
                (axes.yaxis, labels.rows, labels.shape[0], box.height),
                (axes.xaxis, labels.keys, labels.shape[1], box.width),
            )
            for (axis, tokens, n, room), word in zip(sides, names, strict=True):
                step = -(-int(POINTS * 1.3 * figure.dpi / 72 * n) // int(room))
                label_axis(axis, [write_tick(x, known) for x in tokens], n, step, fonts)
                alone = (tokens and step <= APART) or word == "feature"
                words = word if alone else f"{word} position"
                axis.set_label_text(words, fontsize=8, color=page.ink)
            axes.tick_params(labelleft=shown[0], labelbottom=shown[1])
            axes.yaxis.label.set_visible(shown[0])
            axes.xaxis.label.set_visible(shown[1])


def label_axis(
    axis: Any, tokens: Sequence[str], n: int, step: int, fonts: Sequence[str]
) -> None:
    """Label every `step`-th token of an axis, or positions if these are too few."""
    if tokens and step <= APART:
        at = range(0, n, step)
        turned = 90 if axis.axis_name == "x" else 0
        texts = {"rotation": turned, "fontfamily": fonts, "parse_math": False}
        axis.set_ticks(list(at), [tokens[i] for i in at], **texts)
        return
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    axis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axis.set_major_formatter("{x:,.0f}")


def find_fonts() -> tuple[list[str], set[int]]:
    """Return the installed fonts and the code points they cover."""
    from matplotlib.font_manager import findfont, fontManager, get_font  # noqa: PLC0415

    there = set(fontManager.get_font_names())
    fonts = [FONT, *(name for name in FONTS if name in there)]
    known = (get_font(findfont(name)).get_charmap() for name in fonts)
    return fonts, {code for table in known for code in table}


def write_tick(label: str, known: set[int]) -> str:
    """Return a short label; characters missing from the fonts are escaped."""
    bare = label.replace(MARK, "")
    text = "".join(c if ord(c) in known else f"\\u{ord(c):04x}" for c in bare)
    return text if len(text) <= LONG else text[: LONG - 1] + "…"


def measure_labels(labels: Sequence[str]) -> float:
    """Return the width of the longest label in inches."""
    return 0.055 * max((min(LONG, measure_plain_width(x)) for x in labels), default=4)
