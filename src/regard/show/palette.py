"""The pixels of a map, and the scales that map numbers to colours.

    read_panels(weights, (4, 4))   a pixel is the largest of 4 × 4 weights

    LinearScale(0, 1)  weights                     light to dark, or dark to light
    LogScale(1e-4, 1)  weights of long texts       the same colours, logarithmic
    Signed(3)          scores, from -3 to 3        two colours, neutral at 0

Colours follow a path through OKLab in perceptually even steps. Lightness only falls, or
only rises on a dark page, so that the order is also visible in grey, in print and to
colour-blind readers. Masked pixels get no colour.

If the first token takes most of the weight, `fit_weights` ends the scale at the largest
weight elsewhere, and the legend gives the number.

Next: terminal_map.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from regard.arrays import Array, is_array, to_numpy
from regard.definition.steps import Step, Steps
from regard.errors import ArrayError, OptionError, ShapeError
from regard.masks.algebra import Mask
from regard.masks.free_axes import find_lead
from regard.recording.record import Record, Recording

Numbers = NDArray[np.float64]
Colours = NDArray[np.uint8]  # (..., 3)

SIZE = 256  # colours of a colour map
SHADES = "·░▒▓█"  # instead of colours
SINK = 0.3  # mean weight on the first key from which it counts as a sink
FEW, FAINT = 8, 0.01  # maps with so few keys have no sink; lowest end of a scale
TINT = 0.08  # makes the lowest colour differ from a terminal's background

# colour stops of a path: (lightness, chroma, hue in degrees)
LIGHT = ((0.985, 0.025, 105), (0.78, 0.10, 160), (0.54, 0.09, 235), (0.26, 0.10, 275))
DARK = ((0.13, 0.025, 290), (0.42, 0.14, 325), (0.70, 0.155, 395), (0.97, 0.06, 460))
COLD, WARM = (
    ((0.40, 0.10, 255), (0.72, 0.09, 250)),
    ((0.72, 0.12, 55), (0.42, 0.10, 45)),
)
PALE_TWO = (*COLD, (0.975, 0, 0), *WARM)
ICE, SAND = ((0.88, 0.06, 235), (0.55, 0.10, 250)), ((0.56, 0.11, 50), (0.89, 0.08, 75))
DEEP_TWO = (*ICE, (0.20, 0, 0), *SAND)


@dataclass(frozen=True, eq=False)
class Panel:
    """One map; each pixel is the largest of its cells."""

    title: str
    values: Numbers  # (query pixels, key pixels)
    allowed: NDArray[np.bool_]  # whether any cell of a pixel is unmasked
    cells: tuple[int, int]  # queries and keys per pixel
    shape: tuple[int, int]  # queries and keys of the map
    first: float  # weight on key 0, mean over the queries after the first


class Holder(Protocol):
    """An object with a recording, such as Seen."""

    @property
    def recording(self) -> Recording:
        """The recorded attention calls."""


@dataclass(frozen=True)
class Scale(ABC):
    """The numbers that the first and the last colour represent."""

    low: float
    high: float
    stops: ClassVar[tuple[Any, Any]] = (LIGHT, DARK)

    def __post_init__(self) -> None:
        if not self.low < self.high or not np.isfinite([self.low, self.high]).all():
            raise OptionError(f"{self}, expected a low below the high, both finite.")

    @abstractmethod
    def place(self, values: ArrayLike) -> Numbers:
        """Return the places of numbers, from 0 (first colour) to 1 (last colour)."""

    @abstractmethod
    def read(self, place: ArrayLike) -> Numbers:
        """Return the numbers at these places."""

    def colours(self, *, dark: bool = False) -> Colours:
        """Return the colour map, (SIZE, 3)."""
        return trace(self.stops[dark])

    def paint(self, values: ArrayLike, *, dark: bool = False) -> Colours:
        """Return the colours of numbers for a terminal, (..., 3)."""
        place = TINT + (1 - TINT) * self.place(values)
        if isinstance(self, Signed):  # its background colour is in the middle
            place = self.place(values)
        at = np.round(place * (SIZE - 1)).astype(int)
        return np.asarray(self.colours(dark=dark)[at])

    def shade(self, values: ArrayLike) -> NDArray[np.str_]:
        """Return a character for each number, one of SHADES."""
        steps = np.minimum(self.place(values) * len(SHADES), len(SHADES) - 1)
        return np.asarray(np.asarray(list(SHADES))[steps.astype(int)])

    def legend(self) -> str:
        """Return a legend: the lowest number of each character of SHADES."""
        ends = self.read(np.arange(1, len(SHADES)) / len(SHADES))
        pairs = zip(SHADES[1:], ends, strict=True)
        steps = "   ".join(f"{mark} {end:.2g}" for mark, end in pairs)
        return f"{SHADES[0]} less   {steps} or more   blank: masked"


class LinearScale(Scale):
    """Equal colour steps for equal differences."""

    def place(self, values: ArrayLike) -> Numbers:
        """Return the places of numbers, from 0 (first colour) to 1 (last colour)."""
        x = np.asarray(values, np.float64)
        return np.clip((x - self.low) / (self.high - self.low), 0, 1)

    def read(self, place: ArrayLike) -> Numbers:
        """Return the numbers at these places."""
        return self.low + np.asarray(place, np.float64) * (self.high - self.low)


class LogScale(Scale):
    """Equal colour steps for equal factors; up to low, the first colour."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low <= 0:
            raise OptionError(f"{self}, expected low > 0: write LogScale(1e-4, 1).")

    def place(self, values: ArrayLike) -> Numbers:
        """Return the places of numbers, from 0 (first colour) to 1 (last colour)."""
        x = np.clip(np.asarray(values, np.float64), self.low, self.high)
        return np.asarray(np.log(x / self.low) / np.log(self.high / self.low))

    def read(self, place: ArrayLike) -> Numbers:
        """Return the numbers at these places."""
        rise = np.asarray(place, np.float64) * np.log(self.high / self.low)
        return np.asarray(self.low * np.exp(rise))


class Signed(LinearScale):
    """From -high to high in two colours, neutral at 0."""

    stops: ClassVar[tuple[Any, Any]] = (PALE_TWO, DEEP_TWO)

    def __init__(self, high: float) -> None:
        super().__init__(-high, high)


def fit_weights(panels: Sequence[Panel], token: str = "") -> tuple[Scale, str]:
    """Return one scale for several maps of weights, and a note about it.

    token: the token at key 0
    """
    top = max((float(p.values.max()) for p in panels), default=0)
    after = max((float(p.values[:, 1:].max(initial=0)) for p in panels), default=0)
    shares = [p.first for p in panels if p.shape[1] > FEW]
    if max(shares, default=0) < SINK:
        return LinearScale(0, top or 1.0), ""
    end = max(after, FAINT) if after < top / 2 else top
    least, most = f"{min(shares):.2f}", f"{max(shares):.2f}"
    taken = most if least == most else f"{least} to {most}"
    return LinearScale(0, end), (
        f"key 0{token and f' ({token.strip()})'} takes {taken} of the weight on "
        f"average; the largest weight from key {panels[0].cells[1]} on is "
        f"{after:.2g}, colours end at {end:.2g}"
    )


def fit_signed(values: ArrayLike) -> Signed:
    """Return a scale centred at 0 for the finite numbers."""
    x = np.abs(np.asarray(values, np.float64))
    return Signed(float(x[np.isfinite(x)].max(initial=0)) or 1.0)


def measure_source(source: Any, heads: Any = None) -> tuple[int, tuple[int, int]]:
    """Return the number of maps, and the queries and keys of each."""
    if isinstance(source, Record):
        n = source.heads if heads is None else len(heads)
        shapes = [(int(source.q.shape[1]), int(source.k.shape[1]))] * n
    else:
        shapes = [found.values.shape for found in name_maps(source, heads)]
    if len(set(shapes)) != 1 or 0 in shapes[0]:
        raise ShapeError(
            f"maps of the shapes {shapes}, expected one or more of the same shape, "
            "with at least one query and key."
        )
    return len(shapes), shapes[0]


class Cells(NamedTuple):
    """One map of an array, before pooling."""

    title: str
    head: int | None  # None: not known
    values: Numbers  # (Nq, Nk)
    mask: Any = None


def name_maps(source: Any, heads: Any = None) -> Iterator[Cells]:
    """Yield each map of the given arrays, with its title."""
    if isinstance(source, Mapping):
        for title, given in source.items():
            x, mask = given if isinstance(given, tuple) else (given, None)
            for found in name_maps(x, heads):
                name = f"{title} {found.title}".strip()
                yield found._replace(title=name, mask=mask)
        return
    x = to_numpy(source if is_array(source) else np.asarray(source))
    if x.ndim not in (2, 3):
        raise ShapeError(
            f"weights of shape {x.shape}, expected (Nq, Nk) or (H, Nq, Nk). Write "
            "weights[0] for the first of a batch."
        )
    n = len(x) if x.ndim == 3 else 0
    chosen = range(n) if heads is None else heads
    if not all(0 <= h < n for h in chosen):
        raise OptionError(f"heads={heads} of weights of shape {x.shape}.")
    maps = [Cells(f"head {h}", h, x[h].astype(np.float64)) for h in chosen]
    for found in maps if x.ndim == 3 else [Cells("", None, x.astype(np.float64))]:
        if np.isnan(found.values).any():
            i, j = np.argwhere(np.isnan(found.values))[0].tolist()
            name = found.title or "the map"
            raise ArrayError(f"{name} has NaN at query {i}, key {j}.")
        yield found


def read_panels(
    source: Any,
    cells: tuple[int, int] = (1, 1),
    *,
    mask: Mask | Array | None = None,
    heads: Sequence[int] | None = None,
) -> list[Panel]:
    """Return the maps, pooled to `cells` = (queries, keys) per pixel.

    source: (Nq, Nk) or (H, Nq, Nk), a Record, or {title: weights or (weights, mask)}
    """
    _, shape = measure_source(source, heads)
    if isinstance(source, Record):
        if mask is not None:
            raise OptionError("mask= with a Record, which has its own: leave it out.")
        return walk_panels(source, cells, heads)
    panels = []
    for title, head, values, own in name_maps(source, heads):
        allowed = write_mask(mask if own is None else own, head, shape)
        allowed = allowed & (values > -np.inf)
        x = np.where(allowed, values, -np.inf)
        first = np.where(allowed, values, 0)[1:, 0].sum() / max(1, shape[0] - 1)
        for axis, size in enumerate(cells):
            edges = np.arange(0, shape[axis], size)
            x = np.maximum.reduceat(x, edges, axis=axis)
        seen = x > -np.inf
        panels.append(Panel(title, np.where(seen, x, 0), seen, cells, shape, first))
    return panels


def name_layer(source: Any, panels: list[Panel]) -> tuple[list[Panel], str]:
    """Return the maps and the layer as a heading; one map has it in its title."""
    name = source.name if isinstance(source, Record) else ""
    if not name or len(panels) > 1:
        return panels, name
    return [replace(panels[0], title=f"{name} {panels[0].title}")], ""


def walk_panels(record: Record, cells: tuple[int, int], heads: Any) -> list[Panel]:
    """Return the maps of a record without storing its (Nq, Nk) weights."""
    from regard.stats.pooled import PooledMap  # noqa: PLC0415 (it needs torch)
    from regard.stats.rows import mass  # noqa: PLC0415
    from regard.stats.tile import AllowedMap  # noqa: PLC0415
    from regard.stats.tile_walk import walk  # noqa: PLC0415

    chosen = list(range(record.heads) if heads is None else heads)
    found = walk(record, PooledMap(cells), AllowedMap(cells), heads=chosen)
    values, allowed = (np.asarray(x) for x in found)
    for h, i, j in np.argwhere(np.isnan(values))[:1] * [1, *cells]:
        raise ArrayError(f"{record.name} head {chosen[h]}: NaN by query {i}, key {j}.")
    shape = (int(record.q.shape[1]), int(record.k.shape[1]))
    at_first = (np.arange(shape[1]) == 0)[:, None]
    share = np.asarray(mass(record, at_first))[:, 1:, 0].sum(-1) / max(1, shape[0] - 1)
    return [
        Panel(f"head {h}", x.astype(np.float64), seen, cells, shape, float(share[h]))
        for h, x, seen in zip(chosen, values, allowed, strict=True)
    ]


def write_mask(mask: Any, head: int | None, shape: Any) -> NDArray[np.bool_]:
    """Return the boolean mask (Nq, Nk) of one head; None: it is the same for all."""
    if mask is None:
        return np.ones(shape, bool)
    if isinstance(mask, Mask):
        lead = () if head is None else (max([head + 1, *find_lead(mask)[-1:]]),)
        mask = mask.dense((*lead, *shape))
    given = cells = to_numpy(mask if is_array(mask) else np.asarray(mask)).astype(bool)
    try:
        cells = cells[head if len(cells) > 1 else 0] if cells.ndim == 3 else cells
        return np.broadcast_to(cells, shape)
    except (IndexError, ValueError):
        raise ShapeError(f"mask {given.shape}, expected {shape}, or H of it.") from None


def read_step(steps: Steps, step: Step, at: tuple[int, ...] | None = None) -> Panel:
    """Return a step as a map, for batch and head `at` = (b, h) or the first."""
    at = (0,) * len(step.lead) if at is None else at
    inside = [-n <= i < n for i, n in zip(at, step.lead, strict=False)]
    if len(at) != len(step.lead) or not all(inside):
        raise OptionError(f"at={at}, expected an index for each of {step.lead}.")
    sizes = zip(at, step.shape, step.lead, strict=False)
    at = tuple(i * size // full for i, size, full in sizes)  # the shared head
    values = to_numpy(step.values[(*at, ...)]).reshape(len(step.rows), -1)
    mask = None
    if step.name == "weights" and "logits" in (x.name for x in steps):
        mask = to_numpy(steps["logits"].values[(*at, ...)]) > -np.inf
    (panel,) = read_panels(values, mask=mask)
    return panel


def list_records(source: Recording | Holder, sequence: int = 0) -> dict[int, Record]:
    """Return the records of a sequence by layer number, as in seen.layers."""
    found = source if isinstance(source, Recording) else source.recording
    names = list(dict.fromkeys(record.name for record in found.records))
    pairs = zip(found.records, found.sequences, strict=True)
    here = [x for x, n in pairs if n == sequence and x.q.shape[1] and x.k.shape[1]]
    records = {names.index(x.name): x for x in reversed(here)}  # the first wins
    if not records:
        raise OptionError(f"there is no sequence {sequence} with a layer to draw.")
    return dict(sorted(records.items()))


def read_gallery(
    source: Recording | Holder, most: tuple[int, int], sequence: int = 0
) -> dict[int, list[Panel]]:
    """Return the maps of each layer, with at most `most` pixels (down, across)."""
    if min(most) < 1:
        raise OptionError(f"pixels={most[1]}, expected 1 or more.")
    return {
        n: read_panels(x, (-(-x.q.shape[1] // most[0]), -(-x.k.shape[1] // most[1])))
        for n, x in list_records(source, sequence).items()
    }


def find_coarsest(grid: Mapping[int, list[Panel]]) -> Panel:
    """Return the first map, with the most queries and keys per pixel of any."""
    down, across = map(max, zip(*(x[0].cells for x in grid.values()), strict=True))
    return replace(next(iter(grid.values()))[0], cells=(down, across))


def join_maps(grid: list[list[Panel]], gap: int) -> tuple[Numbers, tuple[int, int]]:
    """Return all maps in one array, NaN where empty, and their distances."""
    shapes = [panel.values.shape for row in grid for panel in row]
    down, across = (max(sides) + gap for sides in zip(*shapes, strict=True))
    heads = max(map(len, grid))
    joined = np.full((len(grid) * down - gap, heads * across - gap), np.nan)
    for i, row in enumerate(grid):
        for j, panel in enumerate(row):
            height, width = panel.values.shape
            place = joined[i * down :, j * across :][:height, :width]
            place[panel.allowed] = panel.values[panel.allowed]
    return joined, (down, across)


def trace(stops: Any) -> Colours:
    """Return SIZE colours along a path, (SIZE, 3)."""
    return np.round(np.clip(walk_path(stops), 0, 1) * 255).astype(np.uint8)


def walk_path(stops: Any) -> Numbers:
    """Return SIZE colours along a path, not clipped to the sRGB range."""
    lightness, chroma, hue = np.asarray(stops, np.float64).T
    lab = lightness, chroma * np.cos(np.radians(hue)), chroma * np.sin(np.radians(hue))
    at, t = np.linspace(0, 1, len(stops)), np.linspace(0, 1, SIZE)
    path = np.stack([np.interp(t, at, x) for x in lab], -1)
    # OKLab to linear light: Ottosson 2020, bottosson.github.io/posts/oklab
    to_cones = [
        [1, 0.3963377774, 0.2158037573],
        [1, -0.1055613458, -0.0638541728],
        [1, -0.0894841775, -1.2914855480],
    ]
    to_light = [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.7076147010],
    ]
    cones = path @ np.asarray(to_cones).T
    light = cones**3 @ np.asarray(to_light).T
    curve = 1.055 * np.abs(light) ** (1 / 2.4) - 0.055
    return np.asarray(np.where(light <= 0.0031308, 12.92 * light, curve))
