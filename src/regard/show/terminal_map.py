"""Attention maps as text for a terminal, in shades or in colour.

    print(draw_weights(weights, rows=tokens, keys=tokens))        one head, or several
    print(draw_weights(seen.layer(18), heads=[8], color="dark"))  of a record
    print(draw_weights({"before": a, "after": b}))                side by side, named
    print(draw_steps(regard.explain(q, k, v)))     every step of attention
    print(draw_gallery(seen))                      every head of every layer
    print(draw_table(seen.table()))                statistics by layer
    print(draw_mask(regard.causal(), 8))           a mask or a bias

Large maps are pooled: each character shows its largest weight. Tokens are escaped.

Next: figure.py
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from regard.arrays import Array
from regard.definition.steps import Steps, shorten
from regard.errors import OptionError, ShapeError
from regard.masks.__main__ import draw_formula
from regard.masks.algebra import Mask
from regard.masks.formula import Formula
from regard.recording.record import Recording
from regard.show.loss_curve import draw_bars
from regard.show.palette import (
    Holder,
    LogScale,
    Panel,
    Scale,
    find_coarsest,
    fit_signed,
    fit_weights,
    list_records,
    measure_source,
    name_layer,
    read_gallery,
    read_panels,
    read_step,
)

if TYPE_CHECKING:
    from regard.stats.table import HeadTable

LINES, GAP = 48, 2  # most lines of a map; columns between maps
AXES = "heads from left to right; of each, queries down, keys across"
GALLERY = LogScale(1e-4, 1)
STEPS = ("dots", "scores", "capped", "logits", "weights", "out")
MARK = "\u200e"  # keeps right-to-left letters from reversing the line
# characters that would combine with a neighbour and change its width
JOINING: dict[int, str | None] = dict.fromkeys(
    [0xFE0E, 0xFE0F, *range(0x1F3FB, 0x1F400)]
)
JOINING |= {0x1F1E6 + i: chr(ord("A") + i) for i in range(26)}  # flags

Color = bool | Literal["dark", "light"]
Labels = Sequence[str] | None


def draw_weights(
    source: Any,
    *,
    rows: Labels = None,
    keys: Labels = None,
    mask: Mask | Array | None = None,
    heads: Sequence[int] | None = None,
    scale: Scale | None = None,
    color: Color = False,
    width: int = 80,
) -> str:
    """Draw weights, one map per head.

    >>> print(draw_weights([[1, 0], [0.4, 0.6]], rows=["a", "b"], keys=["a", "b"]))
         a  b
    a   ███···
    b   ▒▒▒▓▓▓
    · less   ░ 0.2   ▒ 0.4   ▓ 0.6   █ 0.8 or more   blank: masked

    source: (Nq, Nk) or (H, Nq, Nk), a Record, or {title: weights or (weights, mask)}
    rows, keys: a token for each query and key
    scale: LinearScale(0, 1), LogScale(1e-4, 1), …; fitted to the weights by default
    color: the terminal's background, "dark" (or True) or "light"; False for shades
    """
    n_maps, shape = measure_source(source, heads)
    labels = Margins.read(rows, keys, shape)
    room = width - labels.margin
    if n_maps > 1:  # two side by side, unless that requires pooling
        half = (room - GAP) // 2
        room = max(half, shape[1]) if shape[1] <= room else half
    layout = Layout.choose(shape, labels, room, color=bool(color))
    panels = read_panels(source, layout.cells, mask=mask, heads=heads)
    panels, above = name_layer(source, panels)
    scale, note = (
        (scale, "") if scale else fit_weights(panels, "".join(labels.keys[:1]))
    )
    across = max(1, (width - labels.margin + GAP) // (layout.wide(panels) + GAP))
    lines = [clean_title(above)] if above else []
    for i in range(0, len(panels), across):
        lines += lay_out_maps(panels[i : i + across], labels, layout, scale, color)
    told = f"{write_pooling(panels[0])}\n{note}".splitlines()
    lines += [*labels.list_keys(layout, width), write_legend(scale, color)]
    return "\n".join(lines + [part for x in told for part in wrap(x, width)])


@dataclass(frozen=True)
class Margins:
    """The labels beside and above a map."""

    rows: tuple[str, ...]  # a token for each query; () if unknown
    keys: tuple[str, ...]
    shape: tuple[int, int]

    @classmethod
    def read(cls, rows: Labels, keys: Labels, shape: tuple[int, int]) -> Margins:
        """Escape the tokens; raise ShapeError if there are too few or too many."""
        for name, labels, n in zip(("rows", "keys"), (rows, keys), shape, strict=True):
            if labels is not None and len(labels) != n:
                raise ShapeError(f"{name} has {len(labels)} labels, expected {n}.")
        down, across = (tuple(map(write_label, x or ())) for x in (rows, keys))
        return cls(down, across, shape)

    @property
    def margin(self) -> int:
        """The width of the left margin in columns."""
        return (
            len(str(self.shape[0]))
            + 2
            + max(map(measure_plain_width, self.rows), default=-1)
        )

    def beside(self, row: int, cells: int, *, numbered: bool) -> str:
        """Return the label of the line that starts with a row."""
        parts = [str(row)] if numbered or not self.rows else []
        if self.rows and cells == 1:
            parts.append(self.rows[row])
        if len(parts) == 2:
            parts[0] = parts[0].rjust(len(str(self.shape[0])))
        return pad_right(" ".join(parts), self.margin)

    def above(self, layout: Layout, n: int) -> str:
        """Return the header of a map of n pixels: tokens, or positions at intervals."""
        if layout.named:
            return "".join(centre(label, layout.cell) for label in self.keys)
        apart = len(str(self.shape[1])) + 1
        ladder = (m * 10**e for e in range(9) for m in (1, 2, 5))
        step = next(m for m in ladder if m * layout.cell / layout.cells[1] >= apart)
        line = [" "] * (n * layout.cell)
        for key in range(0, self.shape[1], step):
            at = key // layout.cells[1] * layout.cell
            if at + len(str(key)) <= len(line):
                line[at : at + len(str(key))] = str(key)
        return "".join(line)

    def list_keys(self, layout: Layout, width: int) -> list[str]:
        """Return a list of the keys, if neither the header nor the rows show them."""
        beside = self.rows if layout.cells[0] == 1 and not layout.half else ()
        if layout.named or layout.cells[1] > 1 or self.keys in ((), beside):
            return []
        lines = ["keys:"]
        for i, label in enumerate(self.keys):
            word = f" {i} {label}"
            if measure_plain_width(lines[-1]) + measure_plain_width(word) > width:
                lines.append("     ")
            lines[-1] += word
        return lines


@dataclass(frozen=True)
class Layout:
    """The size of a pixel in the terminal, and the number of its cells."""

    cell: int  # columns per pixel
    cells: tuple[int, int]  # queries and keys per pixel
    named: bool  # whether tokens fit above the columns
    half: bool  # whether a line has two rows of pixels

    @classmethod
    def choose(
        cls, shape: tuple[int, int], labels: Margins, room: int, *, color: bool
    ) -> Layout:
        """Return the layout with the largest pixels that fit into `room` columns."""
        n_q, n_k = shape
        word = 2 + max(map(measure_plain_width, labels.keys), default=0)
        named = bool(labels.keys) and word * n_k <= room
        cell = word if named else 2 if 2 * n_k <= room else 1
        half = color and n_q > LINES
        keys = 1 if cell > 1 else -(-n_k // max(1, room))
        lines = LINES if keys == 1 else max(1, min(LINES, n_k // keys // 2))
        rows = -(-n_q // (lines * (1 + half)))
        return cls(cell, (rows, keys), named, half)

    def wide(self, panels: Sequence[Panel]) -> int:
        """Return the width in columns of the map or its title, whichever is wider."""
        titles = (measure_plain_width(clean_title(panel.title)) for panel in panels)
        return max(int(panels[0].values.shape[1]) * self.cell, *titles)


def lay_out_maps(
    panels: Sequence[Panel], labels: Margins, layout: Layout, scale: Scale, color: Color
) -> list[str]:
    """Return the lines of maps side by side."""
    wide, gap = layout.wide(panels), " " * GAP
    n_k = panels[0].values.shape[1]
    above, left = labels.above(layout, n_k), " " * labels.margin
    lines = [left + gap.join([pad_right(above, wide)] * len(panels))]
    if any(panel.title for panel in panels):
        titles = gap.join(pad_right(clean_title(panel.title), wide) for panel in panels)
        lines.insert(0, left + titles)
    step = layout.cells[0] * (1 + layout.half)
    drawn = [paint(panel, scale, layout, color) for panel in panels]
    rest = " " * (wide - n_k * layout.cell)
    for n, parts in enumerate(zip(*drawn, strict=True)):
        beside = labels.beside(n * step, step, numbered=not layout.named)
        lines.append(beside + gap.join(part + rest for part in parts))
    return [line.rstrip(" ") for line in lines]


def paint(panel: Panel, scale: Scale, layout: Layout, color: Color) -> list[str]:
    """Return the lines of one map."""
    if not color:
        marks = np.where(panel.allowed, scale.shade(panel.values), " ")
        return ["".join(mark * layout.cell for mark in line) for line in marks]
    tints = scale.paint(panel.values, dark=color != "light").tolist()
    rows = [
        [tuple(tint) if seen else None for tint, seen in zip(line, marks, strict=True)]
        for line, marks in zip(tints, panel.allowed, strict=True)
    ]
    if not layout.half:
        pairs = [(row, row) for row in rows]
    else:
        rows += [[None] * len(rows[0])] * (len(rows) % 2)
        pairs = list(zip(rows[::2], rows[1::2], strict=True))
    return [
        "".join(map(write_pixel, up, down, [layout.cell] * len(up))) + "\x1b[0m"
        for up, down in pairs
    ]


def write_pixel(up: Any, down: Any, columns: int) -> str:
    """Return two pixels, one above the other; masked ones are left blank."""
    if up is None and down is None:
        return "\x1b[0m" + " " * columns
    front = "\x1b[{};2;{};{};{}m".format
    if up == down:
        return front(48, *up) + " " * columns
    if up is None:
        return "\x1b[0m" + front(38, *down) + "▄" * columns
    back = "\x1b[49m" if down is None else front(48, *down)
    return front(38, *up) + back + "▀" * columns


def write_legend(scale: Scale, color: Color) -> str:
    """Return a legend for the shades or colours."""
    if not color:
        return scale.legend()
    tints = scale.paint(scale.read(np.linspace(0, 1, 24)), dark=color != "light")
    bar = "".join(write_pixel(tuple(x), tuple(x), 1) for x in tints.tolist())
    steps = ", equal steps are equal factors" if isinstance(scale, LogScale) else ""
    return f"{scale.low:.2g} {bar}\x1b[0m {scale.high:.2g}{steps}   bare: masked"


def write_pooling(panel: Panel) -> str:
    """Return a description of a pixel, if it is more than one weight."""
    down, across = panel.cells
    if panel.cells == (1, 1):
        return ""
    return f"each pixel: the largest of up to {down} × {across} weights (query × key)"


def write_label(token: object) -> str:
    """Return a token as a short label without control or joining characters."""
    text = str(token).translate(JOINING)
    text = text.replace(" ", "␣") if text.isspace() else text
    label = shorten(text)
    if label and unicodedata.category(label[0])[0] == "M":
        label = "◌" + label  # a mark would combine with the character before it
    if any(unicodedata.bidirectional(c) in ("R", "AL", "AN") for c in label):
        return MARK + label + MARK
    return label


def clean_title(title: str) -> str:
    """Drop characters that are not printable, and cut the title to 60."""
    safe = "".join(c for c in title.translate(JOINING) if c.isprintable())
    return safe if len(safe) <= 60 else safe[:59] + "…"


def measure_plain_width(text: str) -> int:
    """Return the width of a text in terminal columns; marks have no width."""
    bare = [c for c in text if unicodedata.category(c) not in ("Mn", "Me", "Cf")]
    return len(bare) + sum(unicodedata.east_asian_width(c) in "WF" for c in bare)


def pad_right(text: str, width: int) -> str:
    """Pad with spaces on the right."""
    return text + " " * (width - measure_plain_width(text))


def centre(text: str, width: int) -> str:
    """Pad with spaces on both sides."""
    return pad_right(" " * ((width - measure_plain_width(text)) // 2) + text, width)


def draw_steps(
    steps: Steps,
    *,
    at: tuple[int, ...] | None = None,
    names: Sequence[str] = STEPS,
    color: Color = False,
    width: int = 80,
) -> str:
    """Draw the steps of `regard.explain`, one map below another.

    at: (b, h); the first by default
    names: the steps to draw, if present
    """
    parts = []
    for step in (x for x in steps if x.name in names):
        panel = read_step(steps, step, at)
        cells = np.where(panel.allowed, panel.values, -np.inf)
        drawn = draw_weights(
            cells,
            rows=step.rows,
            keys=step.columns or None,
            scale=None if step.name == "weights" else fit_signed(cells),
            color=color,
            width=width,
        )
        parts.append(f"{step.name}  {step.formula}   {step.shape}\n{drawn}")
    if not parts:
        raise OptionError(f"names={tuple(names)}, expected some of {STEPS}.")
    return "\n\n".join(parts)


def draw_gallery(
    source: Recording | Holder,
    *,
    sequence: int = 0,
    pixels: int | None = None,
    color: Color = False,
    width: int = 80,
) -> str:
    """Draw a small map of every head of every layer, all on one scale.

    pixels: columns of a map; by default 4 to 8, to fit a layer into a line
    """
    if pixels is None:
        heads = max(x.heads for x in list_records(source, sequence).values())
        pixels = min(8, max(4, (width - 9) // heads - 1))
    layout = Layout(1, (1, 1), named=False, half=bool(color))
    most = (pixels if color else -(-pixels // 2), pixels)
    grid = read_gallery(source, most, sequence)
    across = max(1, (width - 9) // (pixels + 1))
    lines = []
    for number, panels in grid.items():
        for i in range(0, len(panels), across):
            some = panels[i : i + across]
            last = some[-1].title.removeprefix("head ")
            drawn = zip(*(paint(x, GALLERY, layout, color) for x in some), strict=True)
            beside = {0: f"layer {number}", 1: f"{i}–{last}"}
            for n, parts in enumerate(drawn):
                lines.append(f"{beside.get(n, ''):<9}{' '.join(parts)}".rstrip(" "))
            lines.append("")
    told = f"{AXES}; {write_pooling(find_coarsest(grid))}"
    return "\n".join([*lines, write_legend(GALLERY, color), told.rstrip("; ")])


def draw_table(
    table: HeadTable, *, numbers: Sequence[str] | None = None, sequence: int = 0
) -> str:
    """Draw statistics of seen.table() by layer; blocks show means over heads.

    numbers: names of statistics; by default those that the registry charts
    """
    rows, charted = table.by_layer().pick(numbers, sequence)
    lines = [f"{'':<10}layers {rows['layer'][0]} to {rows['layer'][-1]}, mean of heads"]
    for statistic in charted:
        name = statistic.name
        low, top = (f(rows[name], initial=0) for f in (np.nanmin, np.nanmax))
        span = (top - low) or 1.0
        bars = draw_bars((rows[name] - low) / span, lost=rows["nan_rows"] > 0)
        unit = "the largest" if statistic.reduction == "max" else statistic.counted
        if np.isnan(rows[name]).all():  # there are no values
            unit = ""
        lines.append(f"{name:<10}{bars} {low:.3g} to {low + span:.3g} {unit}")
    lines += replace(table.by_layer(), rows=rows).list_nan()
    return "\n".join(line.rstrip() for line in lines)


def draw_mask(formula: Formula, n: int = 12) -> str:
    """Draw a mask or bias over n tokens: rows are queries, columns are keys."""
    return f"{formula!r}\n{draw_formula(formula, n)}"
