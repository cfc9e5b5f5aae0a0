"""Mergeable sums over documents, for every head and statistic.

    y, n      of one document: the sum of a statistic over its queries, their number
    mean      Σ y / Σ n                                       over all queries
    half      t · √(D/(D - 1) · Σ n²(y/n - mean)²) / Σ n      of a 95 % interval

The random draws are documents, not tokens: the tokens of one text are correlated, so
the interval is that of a ratio of two sums over D documents. Its squares are kept
around their own centre c, to avoid cancellation, and shifted when tallies merge:

    W = Σ n²,   c = Σ n²·y/n / W,   S = Σ n²(y/n - c)²
    S of all = Σ S_i + Σ W_i (c_i - c)²

So six numbers are enough. Four more, Σ nʲ y³⁻ʲ, give the skewness G of the documents:
if it is large, few of them differ from the others, and the interval is too narrow. By
Cochran's rule it takes D > 25 G² documents.

The maximum and the places of the largest values are kept too, and merge as well. The
first token can only attend to itself, so it is never one of these places.

Next: store.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.stats.registry import find_statistic
from regard.student import FEW, SURE, student

Numbers = NDArray[np.float64]
CUBES = ("y3", "ny2", "n2y", "n3")  # Σ y³, Σ n y², …; of earlier versions NaN
SUMS = ("documents", "queries", "total", "weight", "centre", "spread", *CUBES)
DOUBTS = ("", "few documents differ", "all documents are equal")  # about an interval
PLACE = np.dtype(  # where the value of a head is largest
    [("value", "f8"), ("document", "i8"), ("piece", "i4"), ("position", "i4")]
)
NOWHERE = np.array((-np.inf, -1, -1, -1), PLACE)


@dataclass(frozen=True, eq=False)
class Tally:
    """Sums by statistic and head; the heads of all layers share one axis."""

    layers: tuple[str, ...]
    heads: tuple[int, ...]  # of each layer
    statistics: tuple[str, ...]
    sums: Numbers  # (statistics, all heads, 6), in the order of SUMS
    peak: Numbers  # (statistics, all heads), the maximum; -inf if none
    top: NDArray[Any]  # (statistics, all heads, k) of PLACE, the largest first

    @property
    def places(self) -> list[tuple[int, int]]:
        """The (layer, head) of every row."""
        return [(x, head) for x, n in enumerate(self.heads) for head in range(n)]

    @property
    def mean(self) -> Numbers:
        """The mean over all queries, (statistics, all heads); NaN if there are none."""
        return divide(self.sums[..., 2], self.sums[..., 1])

    @property
    def deviation(self) -> Numbers:
        """The standard error of the mean, over documents."""
        d, n = self.sums[..., 0], self.sums[..., 1]
        spare = np.where(d < FEW, np.nan, d - 1)
        return divide(np.sqrt(divide(d * self.squares, spare)), n)

    @property
    def squares(self) -> Numbers:
        """The sum of (y - mean n)² over documents."""
        weight, centre, spread = np.moveaxis(self.sums[..., 3:6], -1, 0)
        return np.asarray(spread + weight * (centre - self.mean) ** 2)

    @property
    def doubt(self) -> NDArray[np.int64]:
        """Why Student's interval may not hold, as an index of DOUBTS."""
        weight, centre, spread, y3, ny2, n2y, n3 = np.moveaxis(self.sums, -1, 0)[3:]
        d, r, squares = np.maximum(self.sums[..., 0], 1), self.mean, self.squares
        cube = y3 - 3 * r * ny2 + 3 * r**2 * n2y - r**3 * n3  # Σ (y - r n)³
        most = np.maximum(d / 25, 30 / d)  # of G²; it exceeds 30 / d rarely by chance
        size = squares / (spread + weight * centre**2 + 1e-300)
        skewed = (d * cube**2 > most * squares**3) & (size > 1e-9)  # less is rounding
        return np.where(d < FEW, 0, np.where(size < 1e-24, 2, skewed))

    def half(self, sure: float = SURE) -> Numbers:
        """Return half of the interval of each mean; NaN below FEW documents."""
        freedom = np.maximum(self.sums[..., 0] - 1, 1.0)
        return np.asarray(student(sure, freedom) * self.deviation)


def divide(a: Numbers, b: Numbers) -> Numbers:
    """Return a / b, NaN where b is 0."""
    out: Numbers = np.divide(a, b, out=np.full(np.shape(a), np.nan), where=b != 0)
    return out


def tally_document(
    layers: Sequence[str],
    numbers: Sequence[dict[str, Numbers]],
    statistics: Sequence[str],
    *,
    document: int,
    piece: int = 0,
) -> Tally:
    """Return the tally of one chunk of one document.

    numbers: by layer, then by statistic, (H, Nq); NaN for queries without a value
    """
    heads = [next(iter(found.values())).shape[0] for found in numbers]
    shape = (len(statistics), sum(heads))
    sums, peak = np.zeros((*shape, len(SUMS))), np.full(shape, -np.inf)
    top = np.full((*shape, 1), NOWHERE)
    for s, name in enumerate(statistics):
        first = 0
        for found, count in zip(numbers, heads, strict=True):
            at = slice(first, first + count)
            first += count
            rows = found.get(name, np.full((count, 0), np.nan))  # no values
            there = ~np.isnan(rows)
            n, y = there.sum(1), np.where(there, rows, 0).sum(1)
            sums[s, at] = sum_draw(n, y)
            if not rows.shape[1]:
                continue
            known = np.where(there, rows, -np.inf)
            peak[s, at] = known.max(1)
            known[:, : find_statistic(name).forced] = -np.inf
            best = known.argmax(1)
            value = known[np.arange(count), best]
            found_at = top[s, at, 0]
            found_at["value"], found_at["position"] = value, best
            found_at["document"], found_at["piece"] = document, piece
            top[s, at, 0] = np.where(np.isfinite(value), found_at, NOWHERE)
    return Tally(tuple(layers), tuple(heads), tuple(statistics), sums, peak, top)


def tally_nothing(statistics: tuple[str, ...]) -> Tally:
    """Return an empty tally without layers."""
    s = len(statistics)
    sums, peak = np.zeros((s, 0, len(SUMS))), np.zeros((s, 0))
    return Tally((), (), statistics, sums, peak, np.zeros((s, 0, 1), PLACE))


def join_pieces(pieces: Sequence[Tally]) -> Tally:
    """Merge the tallies of a document's chunks into one draw."""
    whole = merge_tallies(pieces, keep=1)
    n, y = whole.sums[..., 1], whole.sums[..., 2]
    return replace(whole, sums=sum_draw(n, y))


def sum_draw(n: NDArray[Any], y: Numbers) -> Numbers:
    """Return the six sums of one document."""
    cubes = (np.asarray(n, float) ** j * y ** (3 - j) for j in range(4))
    return np.stack([n > 0, n, y, n * n, y / np.maximum(n, 1), 0 * y, *cubes], -1)


def merge_sums(sums: Numbers) -> Numbers:
    """Merge (parts, statistics, heads, 6) into (statistics, heads, 6)."""
    plain = sums[..., :4].sum(0)
    weight, centre, spread = np.moveaxis(sums[..., 3:6], -1, 0)
    # relative to the first centre: small differences keep their precision
    base = centre[0]
    share = np.divide(weight, plain[..., 3], out=0 * weight, where=weight > 0)
    middle = base + (share * (centre - base)).sum(0)
    moved = (spread + weight * (centre - middle) ** 2).sum(0)
    both = np.stack([middle, moved], -1)
    return np.concatenate([plain, both, sums[..., 6:].sum(0)], -1)


def merge_tallies(tallies: Sequence[Tally], *, keep: int) -> Tally:
    """Merge tallies, with the `keep` largest places of each head."""
    tallies = align(tallies)
    first = tallies[0]
    top = np.concatenate([x.top for x in tallies], -1)
    # a total order, so the result does not depend on the merge order
    ranks = np.lexsort(
        (top["position"], top["piece"], top["document"], -top["value"]), axis=-1
    )
    return replace(
        first,
        sums=merge_sums(np.stack([x.sums for x in tallies])),
        peak=np.max([x.peak for x in tallies], axis=0),
        top=np.take_along_axis(top, ranks[..., :keep], -1),
    )


def align(tallies: Sequence[Tally]) -> list[Tally]:
    """Return tallies with the same layers; a missing layer adds nothing."""
    names = {(x.layers, x.heads) for x in tallies}
    if len(names) == 1:
        return list(tallies)
    known: list[tuple[str, int]] = []
    for x in tallies:
        at = len(known)
        for key in reversed([*zip(x.layers, x.heads, strict=True)]):
            if key in known:
                at = known.index(key)
            else:  # before the layers that ran after it
                known.insert(at, key)
    return [add_layers(x, tuple(known)) for x in tallies]


def add_layers(tally: Tally, known: tuple[tuple[str, int], ...]) -> Tally:
    """Return a tally extended to all known layers; the new ones are empty."""
    ends = np.cumsum([0, *tally.heads])
    mine = {
        key: slice(a, b)
        for key, a, b in zip(
            zip(tally.layers, tally.heads, strict=True), ends, ends[1:], strict=False
        )
    }

    def fill(whole: NDArray[Any], blank: Any) -> NDArray[Any]:
        parts = [
            whole[:, mine[key]]
            if key in mine
            else np.full((len(whole), key[1], *whole.shape[2:]), blank)
            for key in known
        ]
        return np.concatenate(parts, 1)

    layers, heads = (tuple(x) for x in zip(*known, strict=True))
    return replace(
        tally,
        layers=layers,
        heads=heads,
        sums=fill(tally.sums, 0.0),
        peak=fill(tally.peak, -np.inf),
        top=fill(tally.top, NOWHERE),
    )
