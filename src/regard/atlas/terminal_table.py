"""Print an atlas in a terminal: a row for each layer, a cell for each head.

    print(draw_atlas_table(table, "induction"))
    print(draw_difference(prose, code, "induction", ("prose", "code"), color="dark"))

    layer 17   ··· ░░░ ···      shades or colours show means
    layer 18   ▓▓+ ··  ░░-      in a difference, + and - mark significant changes

The page uses the same texts: what an atlas was made from, what it left out, the kind of
its intervals, how many heads are marked, and how many would be by chance. Names are
untrusted: control characters and line breaks in them have no effect.

Next: page.py
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

import numpy as np

from regard.atlas.settings import SEQUENCE, STUDENT
from regard.atlas.table import AtlasDifference, AtlasTable, compare_atlases, count_aside
from regard.atlas.tally import DOUBTS, Numbers
from regard.errors import OptionError
from regard.show.palette import LinearScale, Scale, Signed
from regard.show.terminal_map import Color, clean_title, write_legend
from regard.stats.registry import find_statistic

MOST = 10  # heads listed
WIDEST = 6  # maximum columns of a cell
MARGIN = 11  # columns for the name of a layer
NARROWEST = 20  # minimum columns to draw in
WIDEST_TERMINAL = 1_000
REASONS = 4  # maximum reasons listed for documents left out
INTERVALS = {
    STUDENT: "half of a 95 % Student interval over documents (too narrow if few of "
    "them carry the mean)",
    SEQUENCE: "half of a 95 % confidence sequence over documents, valid for each head "
    "whenever the run stopped",
}


def draw_atlas_table(
    table: AtlasTable, statistic: str, *, color: Color = False, width: int = 80
) -> str:
    """Draw one statistic of every head, and list the top heads."""
    width = limit_width(width)
    mean = table.mean(statistic)
    scale, entry = fit_scale(mean), find_statistic(statistic)
    first, which = list_places(mean), "largest"
    if entry.ascending:
        first, which = first[::-1], "smallest"
    best = write_values(table, statistic, first[:MOST])
    return "\n".join(
        [
            *wrap(f"{statistic}: {entry.summary}", width),
            *wrap(describe_atlas(table.about), width),
            *wrap(tell_left_out(table.about), width),
            "",
            *draw_cells(mean, scale, color=color, width=width),
            write_legend(scale, color).replace("masked", "no value"),
            "",
            *wrap(f"{which}, in {entry.unit}, ± {tell_interval([table])}:", width),
            *(f"{name_head(x)}  {y}" for x, y in zip(first, best, strict=False)),
        ]
    )


def draw_head(table: AtlasTable, layer: int, head: int, *, width: int = 80) -> str:
    """List all statistics of one head, with its examples."""
    if not (0 <= layer < len(table.heads) and 0 <= head < table.heads[layer]):
        raise OptionError(
            f"there is no head {head} in layer {layer}; there are {len(table.heads)} "
            f"layers, with {min(table.heads)} to {max(table.heads)} heads."
        )
    width = limit_width(width)
    lines = [f"layer {layer} head {head}: {clean_title(table.layers[layer])}"]
    lines += wrap(f"± is {tell_interval([table])}", width)
    lines += wrap(tell_left_out(table.about), width)
    for name in table.statistics:
        entry = find_statistic(name)
        (pair,) = write_values(table, name, [(layer, head)])
        lines += ["", f"{name}  {pair} {entry.unit}: {entry.summary}"]
        for rank, x in enumerate(table.examples(name, layer, head)):
            before, token, after = map(escape_line, (x.before, x.token, x.after))
            room = max(8, width - 10 - len(token))  # two thirds of it before the token
            words = f"{before[-room * 2 // 3 :]}[{token}]{after[: room // 3]}"
            document = clean_title(x.document) or "a document that is gone"
            at = f"{document}, token {x.position}"
            lines += [f"  {rank}. {x.value:.3g}  {at}", f"     {words}"]
    return "\n".join(lines)


def escape_line(text: str) -> str:
    """Return a text on one line, without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split(" "))


def draw_difference(
    a: AtlasTable,
    b: AtlasTable,
    statistic: str,
    names: Sequence[str],
    *,
    color: Color = False,
    width: int = 80,
) -> str:
    """Draw the difference b - a of two atlases, and list the marked heads."""
    width = limit_width(width)
    first, second = (clean_title(name) for name in names)
    found = compare_atlases(a, b, statistic)
    signs = np.where(found.difference > 0, "+", "-")
    values: Numbers = found.difference
    scale: LinearScale = fit_signs(found)
    if not color:  # shades cannot show a sign
        values, scale = np.abs(values), LinearScale(0, scale.high)
    marks = np.where(found.marked, signs, " ")
    told = f"{statistic}: {find_statistic(statistic).summary}; {second} less {first}"
    return "\n".join(
        [
            *wrap(told, width),
            *(
                line
                for x in (a, b)
                for told in (describe_atlas(x.about), tell_left_out(x.about))
                for line in wrap(told, width)
            ),
            "",
            *draw_cells(values, scale, marks=marks, color=color, width=width),
            write_legend(scale, color).replace("masked", "no value"),
            *wrap(f"+ marked, more in {second}   - marked, more in {first}", width),
            *wrap(tell_marked(found), width),
            "",
            *wrap(
                f"largest that are marked, in {a.unit(statistic)}, "
                f"± {tell_interval([a, b])}:",
                width,
            ),
            *list_marked((a, b), statistic, found, (first, second)),
        ]
    )


def list_marked(
    tables: Sequence[AtlasTable],
    statistic: str,
    found: AtlasDifference,
    names: Sequence[str],
) -> Iterator[str]:
    """Yield a line for each of the largest marked differences."""
    size = np.where(found.marked, np.abs(found.difference), np.nan)
    places = list_places(size)[:MOST]
    both = (write_values(x, statistic, places) for x in tables)
    for at, *values in zip(places, *both, strict=True):
        parts = [f"{name_head(at)}  {write_pair(found.difference[at], found.half[at])}"]
        parts += [f"{name} {x}" for name, x in zip(names, values, strict=True)]
        yield "   ".join(parts)


def draw_cells(
    values: Numbers,
    scale: Scale,
    *,
    marks: Any = None,
    color: Color = False,
    width: int = 80,
) -> Iterator[str]:
    """Yield the lines of a grid (layers, heads); marks: a character for each cell."""
    heads, least = values.shape[1], 1 if marks is None else 2
    cell = min(WIDEST, max(least, (width - MARGIN) // heads))  # columns
    across = max(1, (width - MARGIN) // cell)
    for i in range(0, heads, across):
        last = min(heads, i + across) - 1
        named = "head 0" if heads == 1 else f"heads {i} to {last}, from left to right"
        yield f"{'':<{MARGIN}}{named}"
        for layer, row in enumerate(values[:, i : i + across]):
            ends = [""] * len(row) if marks is None else marks[layer, i : i + across]
            line = paint_row(row, ends, scale, cell, color)
            yield f"{f'layer {layer}':<{MARGIN}}{line}".rstrip(" ")


def paint_row(
    row: Numbers, ends: Sequence[str], scale: Scale, cell: int, color: Color
) -> str:
    """Return a line of cells; cells without a value are blank."""
    known = np.isfinite(row)
    values = np.where(known, row, scale.low)
    shades = scale.shade(values)
    tints = scale.paint(values, dark=color != "light").tolist()
    gap = " " if cell > 2 else ""
    parts = []
    for at, end in enumerate(ends):
        text = shades[at] * (cell - len(gap + end)) + end
        if not known[at]:
            text = " " * (cell - len(gap))
        elif color:
            r, g, b = tints[at]
            ink = 0 if 0.3 * r + 0.6 * g + 0.1 * b > 127 else 255
            front = f"\x1b[48;2;{r};{g};{b};38;2;{ink};{ink};{ink}m"
            text = f"{front}{end:^{cell - len(gap)}}\x1b[0m"
        parts.append(text + gap)
    return "".join(parts)


def fit_scale(*grids: Numbers) -> LinearScale:
    """Return a scale for all numbers that starts at 0 unless all are far from it."""
    known = np.concatenate([x[np.isfinite(x)] for x in grids])
    low, high = float(known.min(initial=np.inf)), float(known.max(initial=-np.inf))
    if not low <= high:
        return LinearScale(0, 1)
    if 0 < low < high / 2 or low == high > 0:
        low = 0.0
    return LinearScale(low, high if high > low else low + 1)


def fit_signs(found: AtlasDifference) -> Signed:
    """Return a scale for differences, centred on 0."""
    known = np.abs(found.difference[np.isfinite(found.difference)])
    return Signed(float(known.max(initial=0)) or 1.0)


def list_places(values: Numbers) -> list[tuple[int, int]]:
    """Return the (layer, head) of every finite number, largest first."""
    places = [(i, j) for i, j in np.argwhere(np.isfinite(values)).tolist()]
    return sorted(places, key=lambda at: -values[at])


def name_head(at: tuple[int, int]) -> str:
    """Return the name of a head, padded to a fixed width."""
    return f"{f'layer {at[0]} head {at[1]}':<18}"


def write_pair(mean: float, half: float) -> str:
    """Return a mean ± half its interval, rounded to two digits of the interval."""
    if not math.isfinite(mean):
        return "no value"
    if not math.isfinite(half):
        return f"{mean:.3g} ± ?"
    digits = max(0, 1 - math.floor(math.log10(half))) if half > 0 else 3
    if digits > 6:
        return f"{mean:.3g} ± {half:.0e}"
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def write_values(table: AtlasTable, statistic: str, places: Any) -> list[str]:
    """Return the means of heads ± half their intervals, and why these may not hold."""
    mean, half = table.mean(statistic), table.half(statistic)
    doubt = [DOUBTS[int(x)] for x in (table.doubt(statistic)[at] for at in places)]
    notes = [f" ({x})" if x else "" for x in doubt]
    pairs = [write_pair(mean[at], half[at]) for at in places]
    return [pair + note for pair, note in zip(pairs, notes, strict=True)]


def tell_marked(found: AtlasDifference) -> str:
    """Describe how many differences are marked, and how many would be by chance."""
    known = int(np.isfinite(found.half).sum())
    if not known:
        return "Nothing is marked: no interval is known."
    exact = found.interval == STUDENT
    once, about = ("1", "about") if exact else ("at most 1", "at most")
    return (
        f"{found.marked.sum():,} of {known:,} heads are marked: they differ by more "
        f"than an interval that holds for all heads at once (if nothing differed, "
        f"{once} comparison in 20 would mark any). {found.alone:,} differ by more than "
        f"their own 95 % interval; by chance {about} {found.chance:.3g} would."
    )


def tell_interval(tables: Sequence[AtlasTable]) -> str:
    """Describe the kind of interval after ±, for one atlas or two."""
    kinds = [table.interval for table in tables]
    if len({*kinds}) == 1:
        return INTERVALS[kinds[0]]
    first, second = (INTERVALS[kind] for kind in kinds)
    return f"{first} in the first atlas, and {second} in the second"


def limit_width(width: int) -> int:
    """Clamp the terminal width: COLUMNS may be 0, 1 or a billion."""
    return min(max(width, NARROWEST), WIDEST_TERMINAL)


def tell_left_out(about: Mapping[str, Any]) -> str:
    """Describe what the numbers leave out, and why; "" if nothing."""
    parts = []
    if out := about.get("left_out"):
        items = count_words(sum(out.values()), "item")
        parts.append(f"{items} left out of the corpus ({list_reasons(out)})")
    if copies := about.get("copies"):
        parts.append(count_words(copies, "exact copy", "exact copies") + " left out")
    if aside := count_aside(about):
        documents = count_words(sum(aside.values()), "document")
        parts.append(f"{documents} set aside ({list_reasons(aside)})")
    if missed := about.get("missed"):
        layers, why = count_words(len(missed), "layer"), Counter(missed.values())
        parts.append(f"{layers} not measured ({list_reasons(why)})")
    return f"Not in these numbers: {'; '.join(parts)}." if parts else ""


def count_words(n: int, word: str, words: str = "") -> str:
    """Return a count with its noun, singular or plural."""
    return f"{n:,} {word if n == 1 else words or word + 's'}"


def list_reasons(counts: Mapping[str, int]) -> str:
    """Return the most frequent reasons with their counts."""
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    parts = [f"{count:,}: {clean_title(reason)}" for reason, count in ordered[:REASONS]]
    if rest := ordered[REASONS:]:
        parts.append(f"{sum(count for _, count in rest):,}: other reasons")
    return "; ".join(parts)


def describe_atlas(about: Mapping[str, Any]) -> str:
    """Describe what an atlas was made from, as far as it is known."""
    who = " over ".join(
        clean_title(str(about[x])) for x in ("model", "corpus") if x in about
    )
    parts = [f"{about[x]:,} {x}" for x in ("documents", "tokens") if x in about]
    if about.get("length"):
        parts.append(f"at most {about['length']:,} tokens at once")
    if "packed" in about:
        packed = "several documents" if about["packed"] else "one document"
        parts.append(f"{packed} in a sequence")
    if "precision" in about:
        parts.append(clean_title(str(about["precision"])))
    if about.get("whole") is False:
        parts.append("a random part of it")
    return f"{who or 'an atlas'}: {', '.join(parts)}" if parts else who or "an atlas"
