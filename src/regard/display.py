"""HTML of an object that is the last expression of a notebook cell.

    class Steps(Displayed):
        def to_html(self) -> str: ...        made of the functions below

JupyterLab, marimo, VS Code and others call _repr_mimebundle_ or _repr_html_. The HTML
has no scripts, no style sheet and no links, so nothing is requested and it survives in
a notebook that is not trusted. Text takes the colour of the notebook and backgrounds
are transparent, so it is readable in a light and in a dark theme. All text is escaped:
names and tokens may come from a stranger's file. The text shown without HTML is that of
print(), cut at LONGEST.

Next: masks/formula.py
"""

from __future__ import annotations

import base64
import html
import struct
import unicodedata
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from regard.errors import RegardError

LONGEST = 20_000  # characters of the text of an object
STACK = 3  # marks on one character: more would cover other lines
WORD = 120  # characters of a name or a token
LINES = 400  # characters of a sentence
SIDE = 48  # most pixels of a picture per side
FAINTEST = 1e-3  # weights from here on are visible
LEVELS = 31  # of opacity: few of them compress well
INK = (31, 119, 208)  # a blue that is visible on white and on black
TABLE = (
    "margin:.3em 0;width:auto;background:transparent;text-align:right;"
    "border-collapse:collapse;font-variant-numeric:tabular-nums"
)
CELL = "padding:.2em .5em"  # marimo has none
LEFT, RIGHT = (f' style="{CELL};text-align:{side}"' for side in ("left", "right"))


class Displayed:
    """The base class of objects that notebooks show as HTML, with print() as text."""

    def to_html(self) -> str:
        """Return the HTML of a cell; by default the text of print()."""
        return write_pre(cut_text(str(self)))

    def _repr_html_(self) -> str:
        try:
            body = self.to_html()
        except RegardError as error:  # as `seen` inside of its `with` block
            body = write_pre(str(error))
        return f'<div style="overflow-x:auto">{body}</div>'

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Any = None
    ) -> dict[str, str]:
        del include, exclude  # a notebook takes what it can show
        try:
            text = cut_text(str(self))
        except RegardError as error:
            text = str(error)
        return {"text/plain": text, "text/html": self._repr_html_()}


def cut_text(text: str) -> str:
    """Return a text of at most LONGEST characters, cut at the end of a line."""
    if len(text) <= LONGEST:
        return text
    kept = text[:LONGEST].rpartition("\n")[0]
    more = text.count("\n") - kept.count("\n")
    return f"{kept}\n… and {more} more lines; print() shows all of them"


def escape_text(text: object, most: int = WORD) -> str:
    """Return text as HTML, at most `most` characters, with controls as their codes.

    Controls include those that reverse the direction of what follows, and zero. Of the
    marks that are stacked on a character, STACK are kept.

    >>> escape_text("<b>")
    '&lt;b&gt;'
    """
    safe, marks = [], 0
    for c in str(text)[: most + 1]:
        kind = unicodedata.category(c)
        marks = marks + 1 if kind[0] == "M" else 0
        if marks > STACK:
            continue
        hidden = kind[0] == "C" or kind in ("Zl", "Zp")
        safe.append(f"\\u{ord(c):04x}" if hidden else c)
    more = "…" if len(str(text)) > most else ""
    return html.escape("".join(safe[:most])) + more


def write_pre(text: str) -> str:
    """Return lines of text in a fixed width."""
    lines = "\n".join(escape_text(line, LINES) for line in text.split("\n"))
    style = "margin:0;background:transparent;color:inherit;line-height:1.3"
    return f'<pre style="{style}">{lines}</pre>'


def write_line(text: str, *, strong: bool = False) -> str:
    """Return a sentence as a paragraph."""
    safe = escape_text(text, LINES)
    inner = f"<strong>{safe}</strong>" if strong else safe
    return f'<p style="margin:.3em 0">{inner}</p>'


def write_code(before: str, code: str, after: str = "") -> str:
    """Return a hint: a sentence with code in it."""
    parts = (
        escape_text(before),
        f"<code>{escape_text(code)}</code>",
        escape_text(after),
    )
    return f'<p style="margin:.3em 0;opacity:.75">{" ".join(filter(None, parts))}</p>'


def write_html_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    texts: int = 0,
    last_text: bool = False,
    shades: Sequence[Sequence[float]] | None = None,
) -> str:
    """Return a table of escaped text, numbers to the right.

    texts: how many of the columns, from the left, are text
    last_text: whether the last column is text, too
    shades: of each cell, from 0 to 1, how strong its background is; NaN is 0
    """
    parts = [f'<table style="{TABLE}">']

    def is_text(column: int, n: int) -> bool:
        return column < texts or (last_text and column == n - 1)

    if head:
        cells = (
            f"<th{LEFT if is_text(i, len(head)) else RIGHT}>{escape_text(x, 32)}</th>"
            for i, x in enumerate(head)
        )
        parts.append(f"<thead><tr>{''.join(cells)}</tr></thead>")
    parts.append("<tbody>")
    for i, row in enumerate(rows):
        shade = [0.0] * len(row) if shades is None else shades[i]
        cells = (
            f"<td{style_cell(shade[j], is_text(j, len(row)))}>{escape_text(x)}</td>"
            for j, x in enumerate(row)
        )
        parts.append(f"<tr>{''.join(cells)}</tr>")
    return "".join([*parts, "</tbody></table>"])


def style_cell(shade: float, text: bool) -> str:  # noqa: FBT001 (of one table only)
    """Return the style of a cell."""
    if text:
        return LEFT
    if not shade > 0.005:
        return f' style="{CELL}"'
    colour = ",".join(map(str, INK))
    return f' style="{CELL};background:rgba({colour},{min(1, shade) * 0.5:.2f})"'


def write_facts(facts: Iterable[tuple[str, object]]) -> str:
    """Return names with their values."""
    rows = (
        f'<tr><th scope="row"{LEFT}>{escape_text(name)}</th>'
        f"<td{LEFT}>{escape_text(x, LINES)}</td></tr>"
        for name, x in facts
    )
    return f'<table style="{TABLE}"><tbody>{"".join(rows)}</tbody></table>'


def write_pictures(
    pictures: Iterable[tuple[str, np.ndarray[Any, Any]]], *, cell: int = 0
) -> str:
    """Return small pictures side by side, each with its title below.

    pictures: (title, opacity (rows, columns) from 0 to 1)
    cell: pixels of a cell on the screen; by default, a picture has about 100
    """
    parts = []
    for title, opacity in pictures:
        rows, columns = opacity.shape
        pixels = cell or max(1, round(100 / max(rows, columns, 1)))
        name = escape_text(title)
        image = base64.b64encode(encode_png(opacity)).decode()
        parts.append(
            '<figure style="display:inline-block;margin:.3em .8em .3em 0">'
            f'<img alt="{name}" width="{columns * pixels}" height="{rows * pixels}" '
            'style="image-rendering:pixelated;border:1px solid;background:transparent;'
            f'max-width:none" src="data:image/png;base64,{image}">'
            f"<figcaption>{name}</figcaption></figure>"
        )
    return f"<div>{''.join(parts)}</div>"


def encode_png(opacity: np.ndarray[Any, Any]) -> bytes:
    """Return a picture of one colour with this opacity, (rows, columns), as a PNG."""
    rows, columns = opacity.shape
    steps = np.round(np.clip(np.nan_to_num(opacity), 0, 1) * LEVELS)
    pixels = np.empty((rows, columns, 4), np.uint8)
    pixels[..., :3], pixels[..., 3] = INK, steps * (255 / LEVELS)
    lines = np.zeros((rows, 1 + 4 * columns), np.uint8)  # each begins with its filter
    lines[:, 1:] = pixels.reshape(rows, -1)
    head = struct.pack(">IIBBBBB", columns, rows, 8, 6, 0, 0, 0)
    parts = (
        (b"IHDR", head),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data))
        + name
        + data
        + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )


def shade_weights(weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return weights as opacity: 0.001 is 0, 1 is 1, on a logarithmic scale.

    Larger ones are pooled to SIDE pixels, each the largest of its weights.
    """
    pooled = np.nan_to_num(np.asarray(weights, float))
    for axis in (0, 1):
        n = pooled.shape[axis]
        if n > SIDE:
            cuts = np.linspace(0, n, SIDE, endpoint=False).astype(int)
            pooled = np.maximum.reduceat(pooled, cuts, axis=axis)
    logs = np.log(np.clip(pooled, FAINTEST, 1)) / -np.log(FAINTEST)
    return np.asarray(1 + logs)
