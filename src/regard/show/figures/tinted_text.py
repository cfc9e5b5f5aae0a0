"""A text, each token tinted by a number: what a selection attends to.

    plot_tinted_text(seen, 12)                        of token 12, the mean of all heads
    plot_tinted_text(seen, (12, 15), heads={17: [5]})                of one head
    plot_tinted_text(seen, TextSelection(12, 12, "attending", "max"))
    print(draw_tinted_text(seen, 12))                                as text

    tint[j] = mean over heads h, mean over selected i of  weight[h, i, j]   text_tint.py

The selection has a frame. Tokens to which no selected token may attend are grey. A
space is a pale dot, a newline is ⏎. If the first token takes most of the weight, the
colours end at the largest weight elsewhere, and a note says so.

Next: text_lines.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.errors import ArrayError, OptionError
from regard.recording.record import Record, Recording
from regard.show.figures.journal import (
    MARKED,
    PALE,
    POINT,
    SIGNS,
    SMALL,
    Fonts,
    Width,
    add_key,
    choose_ink,
    open_journal,
    paint_values,
    read_fonts,
    read_width,
    shorten_number,
    without_tex,
    wrap_note,
    write_visible,
    write_words,
)
from regard.show.figures.text_lines import break_lines, is_from_right
from regard.show.palette import (
    FAINT,
    FEW,
    SINK,
    Holder,
    LinearScale,
    LogScale,
    Numbers,
    Scale,
)
from regard.show.terminal_map import measure_plain_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from regard.show.figures.journal_figure import JournalFigure
    from regard.show.text_tint import TextSelection

Heads = Mapping[int, Sequence[int] | None]

LINE, BOX = 12.0, 9.6  # points: from line to line, the height of a box
PAD, GAP = 0.3, 1.0  # points: beside the letters of a box, between letters of two
APART = 2.4  # points between tokens of a text that has no spaces
TALLEST = 9.0  # inches of a page
LARGEST = 5  # tokens listed below the text
COLUMNS = 80  # of the text twin


class TokenPlace(NamedTuple):
    """Where a token stands."""

    x: float  # its left edge in points
    line: int
    right: bool = False  # whether the line runs from the right


@dataclass(frozen=True, eq=False)
class TintedText:
    """A passage, with a number for each of its tokens."""

    first: int  # the position of its first token
    texts: tuple[str, ...]
    values: Numbers  # (tokens,)
    allowed: NDArray[np.bool_]  # whether the number is a weight
    selected: NDArray[np.bool_]
    what: str  # the values, in words
    outside: float  # the sum of the values before and after the passage

    @property
    def apart(self) -> bool:
        """Whether tokens are separate words, as those of BERT."""
        return len(self.texts) > 1 and not any(" " in x for x in self.texts)


@without_tex
def plot_tinted_text(
    source: Recording | Holder,
    select: Any,
    *,
    heads: Heads | None = None,
    span: tuple[int, int] | None = None,
    scale: Scale | None = None,
    width: Width = "column",
    sequence: int = 0,
) -> JournalFigure:
    """Draw a text, tinted by what some of its tokens attend to.

    select: the position of a token, (first, last) of a passage, or a TextSelection
    heads: numbers by layer, {17: [5], 18: None}, None for all heads of the layer; by
        default, all heads of all layers that read the text
    span: (first, last), the tokens to draw; by default all
    width: "column" (3.25 inches), "page" (6.75), or inches
    """
    text = read_tinted(source, select, heads=heads, span=span, sequence=sequence)
    inches, (fitted, note) = read_width(width), fit_tint(text)
    scale, note = (fitted, note) if scale is None else (scale, "")
    fonts = read_fonts(text.texts)
    room = inches * POINT - 2
    places, lines = place_tokens(text, fonts, room)
    notes = [text.what, note, tell_outside(text), fonts.note]
    below = [line for x in notes if x for line in wrap_note(x, inches).splitlines()]
    height = lines * LINE + 23 + 8 * len(below)
    if height > TALLEST * POINT:
        raise OptionError(
            f"{len(text.texts)} tokens are {height / POINT:.0f} inches tall, expected "
            f"at most {TALLEST:.0f}: write span=(first, last) for a part of them"
            + (', or width="page".' if inches < 6 else ".")
        )
    figure = open_journal((inches, height / POINT), write_twin(text, scale, note))
    axes = figure.add_axes((0, 0, 1, 1), label="text")
    axes.set(xlim=(-1, inches * POINT - 1), ylim=(height, 0))
    axes.set_axis_off()
    for i, place in enumerate(places):
        draw_token(axes, text, i, place, scale=scale, fonts=fonts)
    top = lines * LINE + 6
    draw_key(figure, text, scale, top)
    for n, words in enumerate(below):
        write_words(axes, (0, top + 22 + 8 * n), words, size=SMALL)
    return figure


def read_tinted(
    source: Recording | Holder,
    select: Any,
    *,
    heads: Heads | None = None,
    span: tuple[int, int] | None = None,
    sequence: int = 0,
) -> TintedText:
    """Return the tint of every token of a passage."""
    from regard.show.text_tint import TextSelection, tint_tokens  # noqa: PLC0415

    if not isinstance(select, TextSelection):
        first, last = (select, select) if isinstance(select, int) else select
        select = TextSelection(first, last)
    recording = source if isinstance(source, Recording) else source.recording
    texts = read_texts(recording, sequence)
    n = len(texts)
    if select.last >= n:
        raise OptionError(
            f"token {select.last} is selected, expected 0 to {n - 1}: the text has "
            f"{n} tokens."
        )
    chosen = choose_records(recording, sequence, heads)
    tint = tint_tokens(chosen, select, tokens=n)
    for at in np.flatnonzero(np.isnan(tint.values))[:1]:
        raise ArrayError(f"the tint of token {at} is NaN: a weight of it is NaN.")
    low, high = (0, n - 1) if span is None else span
    if not 0 <= low <= high < n:
        raise OptionError(f"span={span}, expected 0 <= first <= last < {n}.")
    here = np.arange(n)
    shown = (here >= low) & (here <= high)
    return TintedText(
        low,
        texts[low : high + 1],
        tint.values[shown],
        tint.allowed[shown],
        ((here >= select.first) & (here <= select.last))[shown],
        describe_selection(select, texts, [(x, list(h)) for x, h in chosen], heads),
        float(tint.values[~shown].sum()) if select.show == "attended" else 0.0,
    )


def read_texts(recording: Recording, sequence: int) -> tuple[str, ...]:
    """Return the text of each token of a sequence."""
    texts = recording.texts[sequence] if sequence < len(recording.texts) else ()
    if not texts:
        raise OptionError(
            f"the tokens of sequence {sequence} have no text: write "
            "seen = seen.label(tokenizer.decode)."
        )
    return tuple(texts)


def choose_records(
    recording: Recording, sequence: int, heads: Heads | None
) -> list[tuple[Record, list[int]]]:
    """Return the records that read the text, with the chosen heads of each."""
    from regard.show.map_source import MapSource  # noqa: PLC0415 (it needs torch)
    from regard.show.text_request import select_heads  # noqa: PLC0415

    if heads is not None and not heads:
        raise OptionError("heads={} names no head: leave it out for all heads.")
    names = [
        f"{layer}.{head}" if head is not None else f"{layer}"
        for layer, numbers in (heads or {}).items()
        for head in ([None] if numbers is None else numbers)
    ]
    source = MapSource(recording)
    try:
        return select_heads(source, sequence, ",".join(names))
    finally:
        source.close()


def describe_selection(
    select: TextSelection,
    texts: Sequence[str],
    chosen: list[tuple[Record, list[int]]],
    heads: Heads | None,
) -> str:
    """Return what the values are, in words."""
    first, last = select.first, select.last
    name = write_visible("".join(texts[first : last + 1]))
    which = f"token {first}" if first == last else f"tokens {first} to {last}"
    count = sum(len(h) for _, h in chosen)
    of = f"{'largest' if select.combine == 'max' else 'mean'} of {count} heads"
    if count == 1:
        layer = f"layer {next(iter(heads))}, " if heads else ""
        of = f"{layer}head {chosen[0][1][0]}"
    if select.show == "attended":
        return f"Weight from {which} ({name}) on each token, {of}."
    return f"Weight of each token on {which} ({name}), {of}."


def fit_tint(text: TintedText) -> tuple[Scale, str]:
    """Return a scale for the values, and a note if it ends before the largest."""
    top = float(text.values.max(initial=0))
    rest = float(text.values[1:].max(initial=0))
    sink = text.first == 0 and len(text.values) > FEW and text.values[0] >= SINK
    if not sink or rest >= top / 2:
        return LinearScale(0, top or 1.0), ""
    end = max(rest, FAINT)
    name, most = write_visible(text.texts[0]), shorten_number(float(text.values[0]))
    return LinearScale(0, end), (
        f"Token 0 ({name}) has {most}; colours end at {shorten_number(end)}, the "
        "largest elsewhere."
    )


def tell_outside(text: TintedText) -> str:
    """Return the weight on tokens that are not drawn, in words."""
    if text.outside < 0.005:
        return ""
    return f"{text.outside:.2f} is on tokens that are not drawn."


def place_tokens(
    text: TintedText, fonts: Fonts, room: float
) -> tuple[list[TokenPlace], int]:
    """Return the place of each token, and the number of lines."""
    widths = [measure_token(x, fonts, room) for x in text.texts]
    gap = APART if text.apart else GAP
    at, lines = break_lines(text.texts, [x + gap for x in widths], room)
    places = [TokenPlace(0.0, 0)] * len(at)
    for line in range(lines):
        here = [i for i, n in enumerate(at) if n == line]
        x, right = 0.0, is_from_right([text.texts[i] for i in here])
        for i in here:
            left = room - x - widths[i] if right else x
            places[i] = TokenPlace(left, line, right=right)
            x += widths[i] + gap
    return places, lines


def split_token(token: str, fonts: Fonts, room: float) -> tuple[str, str]:
    """Return the spaces before a token as dots, and the rest as it is drawn."""
    body = token.lstrip(" ")
    dots, letters = SIGNS[" "] * (len(token) - len(body)), fonts.write(body)
    if not token:
        return SIGNS[" "], ""  # an empty token can be seen, too
    while fonts.measure(dots + letters) > room:  # one long word, a narrow figure
        dots, letters = dots[:-1] if not letters else dots, letters[:-2] + "…"
    return dots, letters


def measure_token(token: str, fonts: Fonts, room: float) -> float:
    """Return the width of a token in points."""
    return sum(fonts.measure(x) for x in split_token(token, fonts, room))


def draw_token(
    axes: Axes,
    text: TintedText,
    i: int,
    place: TokenPlace,
    *,
    scale: Scale,
    fonts: Fonts,
) -> None:
    """Draw the box of a token and its letters; the spaces before them are pale."""
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    x, y, number = place.x, place.line * LINE, text.first + i
    dots, letters = split_token(text.texts[i], fonts, axes.get_xlim()[1] - 1)
    parts = fonts.measure(dots), fonts.measure(letters)
    fill: Any = paint_values(scale, text.values[i]) if text.allowed[i] else "none"
    box = Rectangle(
        (x - PAD, y + 1), sum(parts) + 2 * PAD, BOX, facecolor=fill, linewidth=0
    )
    box.set_gid(f"box-{number}")
    if text.selected[i]:
        box.set(edgecolor=MARKED, linewidth=0.9, zorder=2)
    axes.add_patch(box)
    ink, base = choose_ink(fill) if text.allowed[i] else PALE, y + 1 + 0.74 * BOX
    if dots:
        at = x + parts[1] if place.right else x
        drawn = write_words(axes, (at, base), dots, color=ink, fonts=fonts.families)
        drawn.set(alpha=0.45 if letters else 1, zorder=3)
    if letters:
        at = x if place.right else x + parts[0]
        drawn = write_words(axes, (at, base), letters, color=ink, fonts=fonts.families)
        drawn.set(gid=f"token-{number}", zorder=3)


def draw_key(figure: JournalFigure, text: TintedText, scale: Scale, top: float) -> None:
    """Draw the colour bar, top points below the upper edge."""
    width, height = figure.get_size_inches() * POINT
    place = 4 / width, 1 - (top + 5) / height, 100 / width, 5 / height
    largest = float(text.values.max(initial=0))
    add_key(figure, scale, place=place, largest=largest)


def draw_tinted_text(
    source: Recording | Holder,
    select: Any,
    *,
    heads: Heads | None = None,
    span: tuple[int, int] | None = None,
    scale: Scale | None = None,
    sequence: int = 0,
) -> str:
    """Return the tinted text as text, with a line of shades below each line."""
    text = read_tinted(source, select, heads=heads, span=span, sequence=sequence)
    fitted, note = fit_tint(text)
    if scale is not None:
        fitted, note = scale, ""
    return write_twin(text, fitted, note)


def write_twin(text: TintedText, scale: Scale, note: str) -> str:
    """Return a passage in lines, each with its shades below; ^ marks the selection."""
    shown = [write_visible(x) or SIGNS[" "] for x in text.texts]
    gap = " " * text.apart
    widths = [measure_plain_width(x) + len(gap) for x in shown]
    at, lines = break_lines(text.texts, widths, COLUMNS)
    marks = np.where(text.allowed, scale.shade(text.values), " ")
    rows = []
    for line in range(lines):
        here = [i for i, n in enumerate(at) if n == line]
        size = [measure_plain_width(shown[i]) for i in here]
        pairs = list(zip(here, size, strict=True))
        rows.append(gap.join(shown[i] for i in here))
        rows.append(gap.join(str(marks[i]) * n for i, n in pairs))
        rows.append(gap.join(("^" if text.selected[i] else " ") * n for i, n in pairs))
    order = np.argsort(-text.values, kind="stable")[:LARGEST].tolist()
    most = ", ".join(
        f"{text.first + i} {shown[i]} {shorten_number(float(text.values[i]))}"
        for i in order
        if text.allowed[i]
    )
    steps = "equal steps are equal factors" if isinstance(scale, LogScale) else ""
    rows = [row.rstrip(" ") for row in rows]
    told = [text.what, scale.legend(), steps, note, tell_outside(text)]
    return "\n".join([*filter(None, rows), *filter(None, told), f"largest: {most}"])
