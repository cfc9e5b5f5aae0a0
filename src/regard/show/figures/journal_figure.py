"""A figure for a paper: its files have the size in inches that was asked for.

    figure.save("induction")      induction.svg, .pdf, .png and .txt
    figure.savefig("a.pdf")       one of them
    figure.twin                   the same as text

Letters stay letters: a PDF has TrueType fonts (type 42), an SVG has <text> elements and
the letters of their fonts that it needs, so it looks the same where no such font is
installed. A file has no date: the same figure is the same file.

Next: journal.py
"""

from __future__ import annotations

import base64
import re
from functools import cache
from html import unescape
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.font_manager import findfont

from regard.show.notebook_figure import NotebookFigure

DOTS = 600  # per inch of a PNG, as journals ask for text and lines
KINDS = (".svg", ".pdf", ".png")
PRINT: dict[Any, Any] = {
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.hashsalt": "regard",
    "text.usetex": False,  # a token may be "$" or "\\"
    "savefig.bbox": None,  # "tight" would change the width
}
TEXT = re.compile(r"<text\b([^>]*)>(.*?)</text>", flags=re.DOTALL)
FAMILY = re.compile(r"'([^']+)'")


class JournalFigure(NotebookFigure):
    """A figure that saves its files, and has a text that says the same."""

    twin: str = ""

    def save(self, path: str | Path) -> tuple[Path, ...]:
        """Write an SVG, a PDF, a PNG and the text; return their paths.

        path: without an ending, "figures/induction"
        """
        base = Path(path)
        if base.suffix in (*KINDS, ".txt"):
            base = base.with_suffix("")
        base.parent.mkdir(parents=True, exist_ok=True)
        paths = tuple(base.with_name(base.name + kind) for kind in KINDS)
        for one in paths:
            self.savefig(one, dpi=DOTS)
        words = base.with_name(base.name + ".txt")
        words.write_text(self.twin + "\n", "utf-8")
        return (*paths, words)

    def savefig(self, fname: Any, **options: Any) -> None:  # matplotlib's own
        """Write one file, as matplotlib does; letters stay letters."""
        kind = str(options.get("format") or Path(str(fname)).suffix[1:])
        if kind != "svg":
            undated = {"metadata": {"CreationDate": None}} if kind == "pdf" else {}
            with rc_context(PRINT | {"svg.fonttype": "path"}):
                super().savefig(fname, **(undated | options))
            return
        page = BytesIO()
        with rc_context(PRINT | {"svg.fonttype": "none"}):
            undated = {"metadata": {"Date": None}}
            super().savefig(page, **(undated | options | {"format": "svg"}))
        drawn = embed_fonts(page.getvalue().decode()).encode()
        if isinstance(fname, str | Path):
            Path(fname).write_bytes(drawn)
        else:
            fname.write(drawn)

    def render(self, kind: str) -> bytes:
        """Return the figure for a notebook, as a file of a kind, "svg" or "png"."""
        page = BytesIO()
        # an embedded font would be that of the whole notebook
        with rc_context(PRINT | {"svg.fonttype": "path"}):
            super().savefig(page, format=kind, dpi=2 * self.find_dots())
        return page.getvalue()

    def __str__(self) -> str:
        return self.twin


def embed_fonts(svg: str) -> str:
    """Return an SVG with the letters of its texts, as a font of each family."""
    needed: dict[str, set[str]] = {}
    for style, words in TEXT.findall(svg):
        for family in FAMILY.findall(style):
            needed.setdefault(family, set()).update(unescape(words))
    faces = [write_face(x, frozenset(needed[x])) for x in sorted(needed)]
    return svg.replace("<defs>", f"<defs>\n  <style>{''.join(faces)}</style>", 1)


@cache
def write_face(family: str, letters: frozenset[str]) -> str:
    """Return the rule of a font with these letters, or "" if it has none of them."""
    from fontTools import subset  # noqa: PLC0415 (it comes with matplotlib)
    from fontTools.ttLib import TTFont  # noqa: PLC0415

    path = findfont(family, fallback_to_default=False)
    font = TTFont(path, fontNumber=0, recalcTimestamp=False)
    if "FFTM" in font:  # the dates of FontForge
        del font["FFTM"]
    there = sorted({ord(x) for x in letters} & set(font.getBestCmap()))
    if not there:
        return ""
    cutter = subset.Subsetter(subset.Options(hinting=False))
    cutter.populate(unicodes=there)
    cutter.subset(font)
    font.flavor = "woff"
    page = BytesIO()
    font.save(page)
    data = base64.b64encode(page.getvalue()).decode()
    source = f"url(data:font/woff;base64,{data})"
    return f'@font-face{{font-family:"{family}";src:{source}}}'
