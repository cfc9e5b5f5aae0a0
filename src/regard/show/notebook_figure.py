"""A matplotlib figure that a notebook shows without pyplot or a magic command.

    plot_weights(seen.layer(17))      as the last line of a cell

IPython only knows figures of pyplot, after %matplotlib inline; others print as
<Figure size …>. This one is an SVG, or a PNG if the SVG would be large.

Next: loss_curve.py
"""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

LARGE = 50_000  # bytes of an SVG
DOTS = 110  # per inch of a PNG: about the pixels of a screen


class NotebookFigure(Figure):
    """A figure that displays itself."""

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Any = None
    ) -> dict[str, str]:
        del include, exclude  # a notebook takes what it can show
        kind, data = self._mime_()
        if kind == "image/png":
            data = data.partition(",")[2]  # Jupyter wants base64 alone
        return {"text/plain": str(self), kind: data}

    def _mime_(self) -> tuple[str, str]:
        """Return the picture and its type, as marimo asks for it."""
        svg = self.render("svg").decode()
        if len(svg) <= LARGE:
            return "image/svg+xml", svg[svg.index("<svg") :]
        png = base64.b64encode(self.render("png")).decode()
        return "image/png", f"data:image/png;base64,{png}"

    def render(self, kind: str) -> bytes:
        """Return the figure as a file of a kind, "svg" or "png"."""
        page = BytesIO()
        with rc_context({"svg.fonttype": "path"}):  # the fonts of a reader may differ
            self.savefig(page, format=kind, dpi=DOTS)
        return page.getvalue()
