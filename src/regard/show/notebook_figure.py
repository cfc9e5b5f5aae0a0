"""A matplotlib figure that a notebook shows without pyplot or a magic command.

    plot_weights(seen.layer(17))      as the last line of a cell

IPython only knows figures of pyplot, after %matplotlib inline; others print as
<Figure size …>. This one is an SVG, or a PNG if the SVG would be large.

Next: loss_curve.py
"""

from __future__ import annotations

import base64
import re
from io import BytesIO
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

LARGE = 50_000  # bytes of an SVG
DOTS = 96  # CSS pixels per inch
WIDEST = 660  # CSS pixels: JupyterLab does not make wide pictures smaller
SIZE = re.compile(r'(?:width|height)="[\d.]+pt" (.*?)(?:width|height)="[\d.]+pt"')


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
            return "image/svg+xml", self.narrow(svg[svg.index("<svg") :])
        png = base64.b64encode(self.render("png")).decode()
        return "image/png", f"data:image/png;base64,{png}"

    def narrow(self, svg: str) -> str:
        """Return an SVG that is at most WIDEST; its viewBox scales what is in it."""
        width, height = self.get_size_inches() * min(DOTS, self.find_dots())
        size = rf'width="{width:.0f}" height="{height:.0f}" \1'
        return SIZE.sub(size, svg, count=1)

    def find_dots(self) -> float:
        """Return the dots per inch that make the figure WIDEST."""
        return WIDEST / float(self.get_figwidth())

    def render(self, kind: str) -> bytes:
        """Return the figure as a file of a kind, "svg" or "png"."""
        page = BytesIO()
        with rc_context({"svg.fonttype": "path"}):  # the fonts of a reader may differ
            self.savefig(page, format=kind, dpi=min(DOTS, self.find_dots()))
        return page.getvalue()
