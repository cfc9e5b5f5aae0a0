r"""What the figures of a paper share: widths, fonts, visible tokens, colours.

    read_width("column")        3.25 inches, one of two columns; "page" is 6.75
    read_fonts(texts)           installed fonts that have their characters
    fonts.write(" a\n")         "·a⏎": every character of a token can be seen

A character that no installed font has is written as its number, \u6f22, and a note
below the figure says so. Text is never taken for a formula.

Next: journal_figure.py
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np
from numpy.typing import ArrayLike

from regard.errors import OptionError
from regard.show.palette import LogScale, Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

    from regard.show.figures.journal_figure import JournalFigure

INCHES = {"column": 3.25, "page": 6.75}
LEAST, MOST = 1.5, 20.0  # inches
POINT = 72  # per inch
BODY, SMALL = 7.0, 6.0  # font sizes; a journal asks for 5 to 7 or more
INK, PALE, GRID, MARKED = "#222222", "#8A8A8A", "#DDDDDD", "#D55E00"
SIGNS = {" ": "·", "\n": "⏎", "\t": "⇥"}
FONTS = ("DejaVu Sans", "Noto Sans", "Noto Sans CJK SC", "Noto Sans CJK JP")
HOLLOW = "Last Resort"  # its letters are boxes
LONGEST = 40  # characters of a token
SHAPING = (3, 11)  # the matplotlib that joins Arabic letters and orders Hebrew ones

Width = str | float
P = ParamSpec("P")


def read_width(width: Width) -> float:
    """Return a width in inches."""
    if isinstance(width, str) and width in INCHES:
        return INCHES[width]
    if isinstance(width, int | float) and LEAST <= width <= MOST:
        return float(width)
    raise OptionError(
        f'width={width!r:.40}, expected "column" ({INCHES["column"]} inches), "page" '
        f"({INCHES['page']}), or a number of inches from {LEAST} to {MOST}."
    )


def without_tex(plot: Callable[P, JournalFigure]) -> Callable[P, JournalFigure]:
    """Draw without LaTeX, even if matplotlib is set to it: a token may be "$"."""

    @wraps(plot)
    def draw(*args: P.args, **options: P.kwargs) -> JournalFigure:
        try:
            from matplotlib import rc_context  # noqa: PLC0415
        except ModuleNotFoundError as missing:
            raise ImportError(
                f'a figure needs {missing.name}: pip install "regard[show]"'
            ) from missing
        with rc_context({"text.usetex": False}):
            return plot(*args, **options)

    return draw


def open_journal(size: tuple[float, float], twin: str) -> JournalFigure:
    """Return a new figure, size in inches."""
    from regard.show.figures.journal_figure import JournalFigure  # noqa: PLC0415

    figure = JournalFigure(figsize=size, dpi=200, facecolor="white")
    figure.twin = twin
    return figure


@dataclass(frozen=True)
class Fonts:
    """Fonts for some texts."""

    families: tuple[str, ...]
    known: frozenset[int] = field(repr=False)  # code points
    missing: tuple[str, ...] = ()  # characters that no installed font has
    shaped: bool = True  # whether right-to-left letters are joined and ordered

    def write(self, token: str, *, space: str = SIGNS[" "]) -> str:
        """Return a token as characters that can all be seen."""
        return write_visible(token, self.known, space=space)

    def measure(self, text: str, size: float = BODY) -> float:
        """Return the width of a text in points."""
        return measure_text(text, self.families, size)

    @property
    def note(self) -> str:
        """What a figure with these fonts cannot show; "" if it shows all."""
        notes = []
        if self.missing:
            n, some = len(self.missing), ", ".join(map(escape, self.missing[:3]))
            of = f"{n} characters have" if n > 1 else "1 character has"
            more = " and others" if n > 3 else ""
            notes.append(f"{of} no font here, and a number instead: {some}{more}.")
        if not self.shaped:
            notes.append("Right-to-left letters are unordered: matplotlib before 3.11.")
        return " ".join(notes)


def read_fonts(texts: Iterable[str]) -> Fonts:
    """Return fonts that have the characters of some texts, the user's first."""
    import matplotlib as mpl  # noqa: PLC0415 (it may be missing)
    from matplotlib.font_manager import fontManager  # noqa: PLC0415

    chosen = find_family()
    letters = {ord(c) for text in texts for c in text[:LONGEST] if is_visible(c)}
    needed = letters | {ord(sign) for sign in (*SIGNS.values(), "◌", "…", "\\")}
    there = [
        x.name
        for x in fontManager.ttflist
        if (x.style, x.weight) == ("normal", 400) and not x.name.startswith(HOLLOW)
    ]
    first = [FONTS[0], *(name for name in FONTS[1:] if name in there)]
    families, known = [], set(map(ord, "0123456789abcdefu"))
    for name in dict.fromkeys([chosen, *first, *sorted(there)]):
        have = read_letters(name)
        if name in (chosen, FONTS[0]) or have & needed:
            families.append(name)
            known |= have
            needed -= have
        if not needed and FONTS[0] in families:
            break
    new = tuple(map(int, mpl.__version__.split(".")[:2])) >= SHAPING
    right = any(unicodedata.bidirectional(chr(c)) in ("R", "AL") for c in letters)
    missing = tuple(sorted(chr(c) for c in letters - known))
    return Fonts(tuple(families), frozenset(known), missing, new or not right)


def find_family() -> str:
    """Return the installed font that matplotlib's settings name first."""
    from matplotlib.font_manager import FontProperties as Settings  # noqa: PLC0415
    from matplotlib.font_manager import findfont, get_font  # noqa: PLC0415

    return str(get_font(findfont(Settings())).family_name)


@cache
def read_letters(family: str) -> frozenset[int]:
    """Return the code points of an installed font; none if its letters are bitmaps."""
    from matplotlib.font_manager import findfont, get_font  # noqa: PLC0415

    try:
        font: Any = get_font(findfont(family))
    except (OSError, RuntimeError, ValueError):  # a file that FreeType cannot read
        return frozenset()
    return frozenset(font.get_charmap()) if font.scalable else frozenset()


@cache
def measure_text(text: str, families: tuple[str, ...], size: float) -> float:
    """Return the width of a text in points, without the rounding of a screen."""
    from matplotlib.font_manager import FontProperties  # noqa: PLC0415
    from matplotlib.textpath import TextToPath  # noqa: PLC0415

    properties = FontProperties(family=list(families), size=size)
    width, _, _ = TextToPath().get_text_width_height_descent(
        text, properties, ismath=False
    )
    return float(width)


def is_visible(c: str) -> bool:
    """Return whether a character has a shape of its own."""
    return unicodedata.category(c)[0] not in "CZ" and not 0xFE00 <= ord(c) <= 0xFE0F


def escape(c: str) -> str:
    """Return the number of a character, as Python writes it."""
    return f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}"


def write_visible(
    token: str, known: frozenset[int] | None = None, *, space: str = SIGNS[" "]
) -> str:
    r"""Return a token as characters that can all be seen, at most LONGEST.

    >>> write_visible(" a\n")
    '·a⏎'

    known: code points that have a letter; by default all
    """
    signs, shown = SIGNS | {" ": space}, ""
    for c in token[:LONGEST]:
        drawn = is_visible(c) and (known is None or ord(c) in known)
        shown += signs.get(c) or (c if drawn else escape(c))
        if len(shown) > LONGEST:
            return shown[: LONGEST - 1] + "…"
    shown += "…" * (len(token) > LONGEST)
    # a mark would join what stands before it
    joins = bool(shown) and unicodedata.category(shown[0])[0] == "M"
    return f"◌{shown}" if joins else shown


def paint_values(scale: Scale, values: ArrayLike) -> Any:
    """Return the colours of numbers, (..., 3) from 0 to 1."""
    at = np.rint(scale.place(values) * 255).astype(int)
    return scale.colours()[at] / 255


def choose_ink(colour: ArrayLike) -> str:
    """Return black or white, whichever has more contrast with a colour (WCAG 2)."""
    x = np.asarray(colour, np.float64)
    light = np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)
    bright = float(light @ [0.2126, 0.7152, 0.0722])
    return "black" if (bright + 0.05) / 0.05 >= 1.05 / (bright + 0.05) else "white"


def make_colours(scale: Scale) -> ScalarMappable:
    """Return a scale as matplotlib has it."""
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415
    from matplotlib.colors import ListedColormap, LogNorm, Normalize  # noqa: PLC0415

    log = isinstance(scale, LogScale)
    norm = (LogNorm if log else Normalize)(scale.low, scale.high, clip=True)
    return ScalarMappable(norm, ListedColormap(scale.colours() / 255))


def add_key(
    figure: JournalFigure,
    scale: Scale,
    *,
    place: tuple[float, float, float, float],
    largest: float,
) -> Axes:
    """Add a colour bar; an arrow at its end if a value exceeds it.

    place: left, bottom, width and height of the figure, from 0 to 1
    """
    axes = figure.add_axes(place)
    arrow = "max" if largest > 1.001 * scale.high else "neither"
    bar: Any = figure.colorbar(
        make_colours(scale), axes, orientation="horizontal", extend=arrow
    )
    bar.outline.set(linewidth=0.4, edgecolor=INK)
    style = {"labelfontfamily": find_family(), "labelsize": SMALL, "colors": INK}
    bar.ax.tick_params(**style, length=2, width=0.4, pad=1.5)
    bar.ax.tick_params(which="minor", length=0)
    if not isinstance(scale, LogScale):
        ends = [scale.low, scale.high]
        bar.set_ticks(ends, labels=[shorten_number(x) for x in ends])
    return bar.ax  # type: ignore[no-any-return]


def shorten_number(x: float) -> str:
    """Return a number with two or three significant digits.

    >>> [shorten_number(x) for x in (0, 0.04567, 0.5, 12.34, 1234.5)]
    ['0', '0.046', '0.50', '12.3', '1,234']
    """
    if x == 0:
        return "0"
    digits = 2 if abs(x) < 1 else 3
    left = int(np.floor(np.log10(abs(x)))) + 1
    return f"{x:,.{max(0, digits - left)}f}" if left > -3 else f"{x:.1e}"


def write_words(
    axes: Axes,
    at: tuple[float, float],
    words: str,
    *,
    size: float = BODY,
    color: str = INK,
    fonts: Sequence[str] = (),
    side: tuple[str, str] = ("left", "baseline"),
) -> Any:
    """Write words as they are at (x, y), which is their side (ha, va)."""
    ha, va = side
    style: Any = {"fontsize": size, "color": color, "ha": ha, "va": va}
    style |= {"fontfamily": list(fonts) or find_family()}
    return axes.text(*at, words, parse_math=False, usetex=False, **style)


def dress_axes(axes: Axes, x: str, y: str) -> None:
    """Style axes with numbers: thin lines, small labels, no box."""
    family = find_family()
    for axis, words in ((axes.xaxis, x), (axes.yaxis, y)):
        axis.labelpad = 2
        axis.set_label_text(words, fontsize=BODY, color=INK, fontfamily=family)
    style: Any = {"labelfontfamily": family, "labelsize": SMALL, "colors": INK}
    axes.tick_params(**style, length=2, width=0.5, pad=2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(linewidth=0.5, color=INK)
    axes.set_axisbelow(True)


def wrap_note(words: str, width: float, size: float = SMALL) -> str:
    """Return words in lines that fit into a width in inches."""
    families, lines = (find_family(), FONTS[0]), [""]
    for word in words.split():
        longer = f"{lines[-1]} {word}".strip()
        fits = measure_text(longer, families, size) <= width * POINT - 6
        lines[-1:] = [longer] if fits or not lines[-1] else [lines[-1], word]
    return "\n".join(lines)
