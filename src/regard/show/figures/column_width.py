"""Maps with the width of a column: the figures of show/figure.py in a paper.

    fit_width(plot_gallery(seen), "column")
    fit_width(plot_weights(seen.layer(17), rows=labels, keys=labels), "page")

    height = height before - (width before - width) · rows / columns of a map

Next: ../figure.py
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from regard.errors import OptionError
from regard.show.figures.journal import Width, read_width

FigureKind = TypeVar("FigureKind", bound=Figure)


def fit_width(figure: FigureKind, width: Width) -> FigureKind:
    """Return a figure of maps, of show/figure.py, as wide as a column or a page.

    Letters keep their size: maps become smaller, and some tokens are not named.

    width: "column" (3.25 inches), "page" (6.75), or inches
    """
    inches = read_width(width)
    wide, high = figure.get_size_inches()
    place = figure.axes[0].get_subplotspec()
    if place is None:
        raise OptionError("expected a figure of plot_weights or plot_gallery.")
    down, across = place.get_gridspec().get_geometry()
    ends = figure.axes[0].get_xlim(), figure.axes[0].get_ylim()
    columns, rows = (abs(b - a) for a, b in ends)
    shorter = (wide - inches) / across * rows / columns * down
    figure.set_size_inches(inches, max(1.0, high - shorter))
    figure.draw_without_rendering()  # places the axes
    for axes in figure.axes:
        box = axes.get_window_extent()
        for axis, side in ((axes.xaxis, box.width), (axes.yaxis, box.height)):
            thin_labels(axis, 72 * side / figure.dpi)
    return figure


def thin_labels(axis: Any, points: float) -> None:
    """Leave out names of tokens that would overlap on an axis of this length."""
    names = [x.get_text() for x in axis.get_ticklabels()]
    if not isinstance(axis.get_major_locator(), FixedLocator) or not any(names):
        return
    size = axis.get_ticklabels()[0].get_size()
    first, last = axis.get_view_interval()
    each = points * abs(np.diff(axis.get_ticklocs()[:2]).sum() / (last - first))
    step = max(1, math.ceil(1.15 * size / max(each, 1e-9)))
    look = axis.get_ticklabels()[0]
    kept: Any = {"rotation": look.get_rotation(), "fontfamily": look.get_family()}
    kept |= {"size": size, "parse_math": False}  # a token may be "$"
    axis.set_ticks(axis.get_ticklocs()[::step], names[::step], **kept)
