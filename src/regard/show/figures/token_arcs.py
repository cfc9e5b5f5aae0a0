"""One head over a short text: an arc from each query to the keys that it attends to.

    plot_token_arcs(seen, 17, 5)                  layer 17, head 5
    plot_token_arcs(seen, 17, 5, least=0.3)       only weights of at least 0.3
    print(draw_token_arcs(seen, 17, 5))

    width of the line of arc (i, j) = THICK points × weight[i, j]

An arc above the text leads from a token back to an earlier one, an arc below it on to a
later one. A ring is the weight of a token on itself.

Next: sound_map.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from regard.arrays import to_numpy
from regard.errors import ArrayError, OptionError
from regard.recording.record import Recording
from regard.show.figures.journal import (
    BODY,
    POINT,
    SMALL,
    Fonts,
    Width,
    open_journal,
    read_fonts,
    read_width,
    shorten_number,
    without_tex,
    wrap_note,
    write_visible,
    write_words,
)
from regard.show.figures.tinted_text import choose_records, read_texts
from regard.show.palette import FEW, SINK, Holder, Numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from regard.show.figures.journal_figure import JournalFigure

THICK = 2.5  # points: the line of a weight of 1
ARC, FAINT = "#0072B2", "#CFCFCF"  # an arc; one to a sink
APART, NARROW = 4.0, 8.5  # points between horizontal labels; of an upright label
HIGHEST = 80.0  # points: the highest arc
RING = 2.6  # points: radius
LONG = 14  # characters of a label


@dataclass(frozen=True, eq=False)
class TokenArcs:
    """The weights of one head between the tokens of a passage."""

    what: str  # the layer and the head
    first: int  # the position of the first token
    texts: tuple[str, ...]
    queries: NDArray[np.int64]  # positions of the rows
    weights: Numbers  # (queries, tokens)
    least: float

    def list_arcs(self) -> list[tuple[int, int, float]]:
        """Return (query, key, weight) of each arc, positions in the passage."""
        found = np.argwhere(self.weights >= self.least)
        rows = (self.queries - self.first).tolist()
        return [(rows[i], j, float(self.weights[i, j])) for i, j in found.tolist()]

    @property
    def sink(self) -> float:
        """The mean weight of later tokens on token 0; 0 if it is no sink."""
        later = self.queries > 0
        if self.first or len(self.texts) <= FEW or not later.any():
            return 0.0
        share = float(self.weights[later, 0].mean())
        return share if share >= SINK else 0.0

    def tell(self) -> str:
        """Return what is drawn and how much is not, in words."""
        drawn = sum(weight for _, _, weight in self.list_arcs())
        share = drawn / max(1, len(self.queries))
        return (
            f"{self.what}: weights of at least {shorten_number(self.least)}, "
            f"{share:.2f} of all weight." + self.sink_note
        )

    @property
    def sink_note(self) -> str:
        """What grey arcs are, in words; "" if there are none."""
        share = f"{self.sink:.2f}"
        return f" Grey: to token 0, which takes {share} on average." * (self.sink > 0)


def read_arcs(
    source: Recording | Holder,
    layer: int,
    head: int,
    *,
    least: float = 0.1,
    span: tuple[int, int] | None = None,
    sequence: int = 0,
) -> TokenArcs:
    """Return the weights of one head between the tokens of a passage."""
    if not 0 < least <= 1:
        raise OptionError(f"least={least}, expected a weight above 0, at most 1.")
    recording = source if isinstance(source, Recording) else source.recording
    texts = read_texts(recording, sequence)
    ((record, _),) = choose_records(recording, sequence, {layer: [head]})
    first, last = (0, len(texts) - 1) if span is None else span
    if not 0 <= first <= last < len(texts):
        raise OptionError(f"span={span}, expected 0 <= first <= last < {len(texts)}.")
    at_q, at_k = (to_numpy(x) for x in (record.q_positions, record.k_positions))
    rows = np.flatnonzero((at_q >= first) & (at_q <= last))
    keys = np.flatnonzero((at_k >= first) & (at_k <= last))
    found = to_numpy(record.weights(rows, keys=keys, heads=[head]))[0]
    for i, j in np.argwhere(np.isnan(found))[:1].tolist():
        raise ArrayError(
            f"{record.name} head {head}: NaN at query {at_q[rows[i]]}, key "
            f"{at_k[keys[j]]}."
        )
    weights = np.zeros((len(rows), 1 + last - first))
    weights[:, at_k[keys] - first] = found
    what = f"Layer {layer}, head {head}"
    words = texts[first : last + 1]
    return TokenArcs(what, first, words, at_q[rows].astype(np.int64), weights, least)


@without_tex
def plot_token_arcs(
    source: Recording | Holder,
    layer: int,
    head: int,
    *,
    least: float = 0.1,
    span: tuple[int, int] | None = None,
    width: Width = "column",
    sequence: int = 0,
) -> JournalFigure:
    """Draw the weights of one head as arcs between the tokens of a short text.

    least: the smallest weight that is drawn
    span: (first, last), the tokens to draw; by default all
    width: "column" (3.25 inches), "page" (6.75), or inches
    """
    arcs = read_arcs(source, layer, head, least=least, span=span, sequence=sequence)
    fonts, inches = read_fonts(arcs.texts), read_width(width)
    labels = [cut_label(fonts.write(x)) for x in arcs.texts]
    centres, upright = place_labels(labels, fonts, inches)
    pairs = [(q, k) for q, k, _ in arcs.list_arcs()]
    farthest = max((abs(q - k) for q, k in pairs), default=1) or 1
    sides = [
        max((abs(q - k) for q, k in pairs if (k > q) == later), default=0)
        for later in (False, True)
    ]
    up, under = (
        raise_arc(n, farthest) + 2 * THICK if n else RING * 2 + 3 for n in sides
    )
    longest = max(fonts.measure(x) for x in labels)
    band = (longest if upright else BODY) + 6
    under = under if sides[1] else 0.0
    words = f"{arcs.tell()} {tell_sides(sides)} {fonts.note}"
    note = wrap_note(words.strip(), inches).splitlines()
    height = up + band + under + 8 * len(note) + 6
    figure = open_journal((inches, height / POINT), write_arcs(arcs))
    axes = figure.add_axes((0, 0, 1, 1), label="arcs")
    axes.set(xlim=(0, inches * POINT), ylim=(height - up, -up))
    axes.set_axis_off()
    for q, k, weight in arcs.list_arcs():
        rise, later = raise_arc(abs(q - k), farthest), k > q
        level = (band, rise) if later else (0.0, -rise)
        curve = draw_arc(axes, (centres[q], centres[k]), level, weight)
        curve.set_gid(f"arc-{arcs.first + q}-{arcs.first + k}")
        if k == 0 and arcs.sink:
            curve.set(edgecolor=FAINT, zorder=0.5)
    for n, (x, label) in enumerate(zip(centres, labels, strict=True)):
        side = ("center", "top") if upright else ("center", "baseline")
        y = 3.0 if upright else BODY + 1
        drawn = write_words(axes, (x, y), label, fonts=fonts.families, side=side)
        drawn.set(rotation=90 if upright else 0, gid=f"token-{arcs.first + n}")
    for n, line in enumerate(note):
        write_words(axes, (2, band + under + 8 * (n + 1)), line, size=SMALL)
    return figure


def cut_label(label: str) -> str:
    """Return a label of at most LONG characters."""
    return label if len(label) <= LONG else label[: LONG - 1] + "…"


def place_labels(
    labels: list[str], fonts: Fonts, inches: float
) -> tuple[list[float], bool]:
    """Return the centre of each label in points, and whether they stand upright."""
    room, n = inches * POINT - 4, len(labels)
    widths = [max(APART, fonts.measure(x)) + APART for x in labels]
    if sum(widths) <= room:
        edges = np.cumsum([2 + (room - sum(widths)) / 2, *widths])
        return ((edges[:-1] + edges[1:]) / 2).tolist(), False
    if n * NARROW > room:
        raise OptionError(
            f"{n} tokens do not fit into {inches} inches, expected at most "
            f"{int(room // NARROW)}: write span=(first, last) for a part of them"
            + (', or width="page".' if inches < 6 else ".")
        )
    return (2 + (np.arange(n) + 0.5) * room / n).tolist(), True


def raise_arc(distance: int, farthest: int) -> float:
    """Return the height of an arc in points."""
    highest = min(HIGHEST, 14.0 + 6.0 * farthest)
    return float(highest * (distance / farthest) ** 0.7)


def draw_arc(
    axes: Axes, ends: tuple[float, float], level: tuple[float, float], weight: float
) -> Any:
    """Draw an arc from level[0], level[1] high; a ring if both ends are the same."""
    from matplotlib.patches import Circle, PathPatch  # noqa: PLC0415
    from matplotlib.path import Path  # noqa: PLC0415

    (a, b), (y, rise) = ends, level
    style: Any = {"fill": False, "edgecolor": ARC, "linewidth": THICK * weight}
    if a == b:
        return axes.add_patch(Circle((a, y - RING - 1.5), RING, **style))
    top = y + rise * 4 / 3  # a Bézier curve reaches three quarters of it
    curve = Path(
        [(a, y), (a, top), (b, top), (b, y)],
        [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4],
    )
    return axes.add_patch(PathPatch(curve, alpha=0.8, capstyle="butt", **style))


def tell_sides(sides: list[int]) -> str:
    """Return what an arc means, in words."""
    above = "Above: a token and an earlier one that it attends to"
    return f"{above}; below: a later one." if sides[1] else f"{above}."


def draw_token_arcs(
    source: Recording | Holder,
    layer: int,
    head: int,
    *,
    least: float = 0.1,
    span: tuple[int, int] | None = None,
    sequence: int = 0,
) -> str:
    """Return the arcs as text: the keys of each token, largest first."""
    arcs = read_arcs(source, layer, head, least=least, span=span, sequence=sequence)
    return write_arcs(arcs)


def write_arcs(arcs: TokenArcs) -> str:
    """Return a line for each query: its token, and the keys with their weights."""
    labels = (cut_label(write_visible(x)) for x in arcs.texts)
    names = [f"{i} {label}" for i, label in enumerate(labels, arcs.first)]
    lines, found = [arcs.tell()], arcs.list_arcs()
    for q in (arcs.queries - arcs.first).tolist():
        mine = sorted((x for x in found if x[0] == q), key=lambda x: -x[2])
        keys = ", ".join(f"{names[k]} {shorten_number(w)}" for _, k, w in mine)
        lines.append(f"{names[q]} → {keys or 'nothing'}")
    return "\n".join(lines)
