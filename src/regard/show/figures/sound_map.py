"""Attention over a sound, on a time axis: of words, or of moments of the sound.

    cross = seen.layer("model.decoder.layers.3.encoder_attn")         of Whisper
    plot_sound_map(cross, 30, words=words, heads=[2], until=4.5, sound=features[0])
    plot_sound_map(seen.layer(5), 4.5)           an audio encoder: moments × moments
    print(draw_sound_map(cross, 30, words=words))

    cell[i, j] = mean over heads h of weight[h, i, j]
    key j      = the time from j · seconds / keys to (j + 1) · seconds / keys

With words, the line is the path that aligns them with the time (../sound_path.py).
Whisper hears 30 seconds, whatever the sound has: `until` ends the axis with the sound,
and a note says how much weight is on what follows. `sound` is the spectrogram that the
model was given.

Next: ../patch_overlay.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from regard.arrays import is_array, to_numpy
from regard.errors import ArrayError, OptionError, ShapeError
from regard.recording.record import Record
from regard.show.figures.journal import (
    POINT,
    SMALL,
    Fonts,
    Width,
    add_key,
    dress_axes,
    make_colours,
    open_journal,
    read_fonts,
    read_width,
    shorten_number,
    without_tex,
    wrap_note,
    write_visible,
    write_words,
)
from regard.show.palette import LinearScale, Numbers, Scale
from regard.show.sound_path import find_times
from regard.show.terminal_map import measure_plain_width, pad_right

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from regard.show.figures.journal_figure import JournalFigure

ROW, TALL, SPECTRUM = 9.0, 150.0, 42.0  # points: a word, a map of moments, the sound
LEFT, RIGHT, TOP, APART = 30.0, 6.0, 4.0, 4.0  # points
PIXELS = 400  # most cells across: each is the largest of its keys
TALLEST = 9.0  # inches
COLUMNS = 60  # of the text twin
LONG = 14  # characters of a word


@dataclass(frozen=True, eq=False)
class SoundMap:
    """The weights of some queries over the time of a sound."""

    name: str  # of the layer and its heads
    words: tuple[str, ...]  # of the queries; () if these are moments
    weights: Numbers  # (queries, keys until the end of the axis)
    step: float  # seconds of a key
    query_step: float  # seconds of a query that is a moment
    outside: float  # mean weight on keys after the end of the axis

    @property
    def end(self) -> float:
        """The end of the axis in seconds."""
        return float(self.weights.shape[1] * self.step)

    def name_time(self, first: int, last: int) -> str:
        """Return the time of some keys in words."""
        return f"{first * self.step:.2f}–{(last + 1) * self.step:.2f} s"

    def pool(self, most: int) -> tuple[Numbers, int]:
        """Return at most so many columns, each the largest of its keys; how many."""
        cells = -(-self.weights.shape[1] // most)
        edges = np.arange(0, self.weights.shape[1], cells)
        return np.maximum.reduceat(self.weights, edges, axis=1), cells

    def tell(self) -> str:
        """Return what a cell is, and what is not drawn, in words."""
        out = f"{self.outside:.2f} of the weight is on what follows."
        return f"{self.name}. {out if self.outside >= 0.005 else ''}".strip()


def read_sound_map(
    record: Record,
    seconds: float,
    *,
    words: Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    until: float | None = None,
) -> SoundMap:
    """Return the weights over time, the mean of some heads.

    seconds: of the sound that all keys of the record cover
    """
    n_heads, n_q, n_k = record.shape
    until = seconds if until is None else until
    if not 0 < until <= seconds:
        raise OptionError(
            f"seconds={seconds} and until={until}, expected 0 < until <= seconds."
        )
    if words is not None and len(words) != n_q:
        raise ShapeError(f"{len(words)} words, expected one for each of {n_q} queries.")
    chosen = list(range(n_heads) if heads is None else heads)
    if not chosen or not set(chosen) <= set(range(n_heads)):
        raise OptionError(f"heads={heads}, expected some of 0 to {n_heads - 1}.")
    mean = to_numpy(record.weights(heads=chosen)).astype(np.float64).mean(0)
    for i, j in np.argwhere(np.isnan(mean))[:1].tolist():
        raise ArrayError(f"{record.name}: NaN at query {i}, key {j}.")
    step = seconds / n_k
    kept = min(n_k, int(np.ceil(until / step - 1e-9)))
    query_step = seconds / n_q
    if words is None:  # moments after the end are not drawn, either
        mean = mean[: int(np.ceil(until / query_step - 1e-9))]
    of = f"head {chosen[0]}" if len(chosen) == 1 else f"mean of {len(chosen)} heads"
    outside, texts = float(mean[:, kept:].sum(1).mean()), tuple(words or ())
    name = f"{record.name}, {of}"
    return SoundMap(name, texts, mean[:, :kept], step, query_step, outside)


@without_tex
def plot_sound_map(
    record: Record,
    seconds: float,
    *,
    words: Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    until: float | None = None,
    sound: Any = None,
    scale: Scale | None = None,
    width: Width = "column",
) -> JournalFigure:
    """Draw weights over the time of a sound, with its spectrogram above if given.

    seconds: of the sound that all keys of the record cover: 30 for Whisper
    words: a text for each query; without them, queries are moments of the sound
    until: the end of the axis in seconds
    sound: (features, frames), the spectrogram of these seconds
    width: "column" (3.25 inches), "page" (6.75), or inches
    """
    found = read_sound_map(record, seconds, words=words, heads=heads, until=until)
    inches, fonts = read_width(width), read_fonts(found.words)
    scale = scale or fit_sound(found)
    spectrum = None if sound is None else read_spectrum(sound, found, seconds)
    labels = [cut_word(fonts.write(x)) for x in found.words]
    left = max(LEFT, *(fonts.measure(x, SMALL) + 6 for x in ("", *labels)))
    _, cells = found.pool(PIXELS)
    pooled = f" A cell is the largest of {cells} keys." if cells > 1 else ""
    note = wrap_note(f"{found.tell()}{pooled} {fonts.note}", inches).splitlines()
    high = len(labels) * ROW if labels else TALL
    above = TOP + (SPECTRUM + APART if spectrum is not None else 0)
    down, across = above + high + 48.0 + 8 * len(note), inches * POINT
    if down > TALLEST * POINT:
        raise OptionError(
            f"{len(labels)} words are {down / POINT:.0f} inches tall, expected at most "
            f"{TALLEST:.0f}: draw some of the queries, cut_rows(record, rows)."
        )
    figure = open_journal((inches, down / POINT), write_sound(found, scale))
    wide = across - left - RIGHT
    place = left / across, 1 - (above + high) / down, wide / across, high / down
    axes = figure.add_axes(place, label="weights")
    draw_weights_over_time(axes, found, scale, labels, fonts)
    if spectrum is not None:
        top = left / across, 1 - (TOP + SPECTRUM) / down, wide / across, SPECTRUM / down
        above_it = figure.add_axes(top, label="sound", sharex=axes)
        draw_spectrum(above_it, spectrum, found)
    bar = left / across, (8 * len(note) + 16) / down, min(100, wide) / across, 5 / down
    add_key(figure, scale, place=bar, largest=float(found.weights.max()))
    paper = figure.add_axes((0, 0, 1, 1), label="note", zorder=-1)
    paper.set(xlim=(0, across), ylim=(0, down))
    paper.set_axis_off()
    for n, line in enumerate(reversed(note)):
        write_words(paper, (2, 3 + 8 * n), line, size=SMALL)
    return figure


def fit_sound(found: SoundMap) -> Scale:
    """Return a scale from 0 to the largest weight."""
    return LinearScale(0, float(found.weights.max()) or 1.0)


def read_spectrum(sound: Any, found: SoundMap, seconds: float) -> Numbers:
    """Return the frames of a spectrogram until the end of the axis."""
    x = to_numpy(sound if is_array(sound) else np.asarray(sound)).astype(np.float64)
    if x.ndim != 2 or not x.size:
        raise ShapeError(
            f"a sound of shape {x.shape}, expected (features, frames): write "
            "features[0] for the first of a batch."
        )
    return x[:, : max(1, round(found.end / seconds * x.shape[1]))]


def cut_word(word: str) -> str:
    """Return a word of at most LONG characters."""
    return word if len(word) <= LONG else word[: LONG - 1] + "…"


def draw_weights_over_time(
    axes: Axes, found: SoundMap, scale: Scale, labels: Sequence[str], fonts: Fonts
) -> None:
    """Draw a row for each query; time runs to the right."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    values, cells = found.pool(PIXELS)
    n, end = len(values), found.end
    colours: Any = make_colours(scale)
    right = values.shape[1] * cells * found.step  # the last cell may reach further
    bottom = n if labels else n * found.query_step
    image = axes.imshow(
        values,
        norm=colours.norm,
        cmap=colours.cmap,
        interpolation="nearest",
        extent=(0, right, bottom, 0),
        aspect="auto",
    )
    image.set_gid("weights")
    dress_axes(axes, "time (s)", "" if labels else "query, time (s)")
    axes.set(xlim=(0, end), ylim=(bottom, 0))
    axes.xaxis.set_major_locator(MaxNLocator(7))
    if labels:
        x = (find_times(found.weights).ravel() + 0.5) * found.step
        y = np.repeat(np.arange(n) + 0.5, 2)
        for colour, thick in (("white", 2.0), ("#D55E00", 1.0)):
            axes.plot(x, y, color=colour, linewidth=thick)[0].set_gid("path")
        plain: Any = {"fontfamily": list(fonts.families), "fontsize": SMALL}
        axes.set_yticks(np.arange(n) + 0.5, labels, parse_math=False, **plain)
        axes.tick_params(axis="y", length=0)


def draw_spectrum(axes: Axes, spectrum: Numbers, found: SoundMap) -> None:
    """Draw a spectrogram in greys, low frequencies below."""
    axes.imshow(
        spectrum,
        cmap="Greys",
        interpolation="antialiased",
        origin="lower",
        extent=(0, found.end, 0, len(spectrum)),
        aspect="auto",
    ).set_gid("spectrum")
    dress_axes(axes, "", "")
    axes.tick_params(labelbottom=False, labelleft=False, left=False)


def draw_sound_map(
    record: Record,
    seconds: float,
    *,
    words: Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    until: float | None = None,
    scale: Scale | None = None,
) -> str:
    """Return the weights over time as text, with the strongest time of each query."""
    found = read_sound_map(record, seconds, words=words, heads=heads, until=until)
    return write_sound(found, scale or fit_sound(found))


def name_rows(found: SoundMap) -> list[str]:
    """Return the name of each query: its word, or its time."""
    if found.words:
        return [cut_word(write_visible(x)) for x in found.words]
    return [f"{i * found.query_step:.2f} s" for i in range(len(found.weights))]


def write_sound(found: SoundMap, scale: Scale) -> str:
    """Return a line of shades for each query, the time of its largest weight beside."""
    values, cells = found.pool(COLUMNS)
    names = name_rows(found)
    margin = max(map(measure_plain_width, names))
    best: NDArray[np.int64] = found.weights.argmax(1)
    lines = [f"{found.tell()} 0 to {found.end:.2f} s"]
    times = find_times(found.weights) if found.words else None
    for i, (name, marks, j) in enumerate(
        zip(names, scale.shade(values), best, strict=True)
    ):
        when = f"{found.name_time(j, j)}  {shorten_number(float(found.weights[i, j]))}"
        path = "" if times is None else f"  path {found.name_time(*times[i])}"
        lines.append(f"{pad_right(name, margin)} {''.join(marks)}  {when}{path}")
    pooled = f"each character: the largest of {cells} keys" if cells > 1 else ""
    legend = scale.legend().replace("   blank: masked", "")
    return "\n".join([*lines, legend, *filter(None, [pooled])])
