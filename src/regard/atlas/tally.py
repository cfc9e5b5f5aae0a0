"""What some documents add up to, for every head and statistic: it merges.

    y, n      of one document: the sum of a number over its queries, and how many
    mean      Σ y / Σ n                                       over all queries
    half      t · √(D/(D - 1) · Σ n²(y/n - mean)²) / Σ n      of a 95 % interval

Documents are what is drawn at random, not tokens: the tokens of one text resemble each
other, so the interval is that of a ratio of two sums over D documents. Its squares are
kept around their own centre c, where nothing cancels, and moved when tallies merge:

    W = Σ n²,   c = Σ n²·y/n / W,   S = Σ n²(y/n - c)²
    S of all = Σ S_i + Σ W_i (c_i - c)²

So six numbers are enough. The largest number and the places where a head did it most
are kept beside them and merge too. The first token has no choice but to look at itself,
so it is no place of note.

Next: store.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.stats.registry import find_statistic

Numbers = NDArray[np.float64]
SUMS = ("documents", "queries", "total", "weight", "centre", "spread")
PLACE = np.dtype(  # where a head did something most
    [("value", "f8"), ("document", "i8"), ("piece", "i4"), ("position", "i4")]
)
NOWHERE = np.array((-np.inf, -1, -1, -1), PLACE)
FEW = 8  # fewer documents have no interval
SURE = 0.95


@dataclass(frozen=True, eq=False)
class Tally:
    """Sums by statistic and head; heads of all layers stand in one row."""

    layers: tuple[str, ...]
    heads: tuple[int, ...]  # of each layer
    statistics: tuple[str, ...]
    sums: Numbers  # (statistics, all heads, 6), as SUMS says
    peak: Numbers  # (statistics, all heads), the largest number; -inf: none
    top: NDArray[Any]  # (statistics, all heads, k) of PLACE, the largest first

    @property
    def places(self) -> list[tuple[int, int]]:
        """The layer and the head of every row."""
        return [(x, head) for x, n in enumerate(self.heads) for head in range(n)]

    @property
    def mean(self) -> Numbers:
        """Over all queries, (statistics, all heads); NaN where there were none."""
        return divide(self.sums[..., 2], self.sums[..., 1])

    @property
    def deviation(self) -> Numbers:
        """Of the mean, as one more draw of documents would change it."""
        d, n, _, weight, centre, spread = np.moveaxis(self.sums, -1, 0)
        rest = spread + weight * (centre - self.mean) ** 2
        spare = np.where(d < FEW, np.nan, d - 1)
        return divide(np.sqrt(divide(d * rest, spare)), n)

    def half(self, sure: float = SURE) -> Numbers:
        """Half of the interval of each mean; NaN for few documents."""
        return student(sure, self.sums[..., 0] - 1) * self.deviation


def divide(a: Numbers, b: Numbers) -> Numbers:
    """Return a / b, NaN where b is 0."""
    out: Numbers = np.divide(a, b, out=np.full(np.shape(a), np.nan), where=b != 0)
    return out


def student(sure: float, freedom: Numbers) -> Numbers:
    """Return how many deviations an interval reaches, of Student's t.

    Four terms of its expansion around the normal: at 7 degrees of freedom less than
    0.01 % off, and 1 % if it is to hold for 2,000 heads at once.
    """
    z = NormalDist().inv_cdf((1 + sure) / 2)
    v = np.maximum(freedom, 1.0)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = 79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z
    return z + first / v + second / v**2 + third / v**3 + fourth / 92160 / v**4


def tally_document(
    layers: Sequence[str],
    numbers: Sequence[dict[str, Numbers]],
    statistics: Sequence[str],
    *,
    document: int,
    piece: int = 0,
) -> Tally:
    """Return the tally of one piece of one document.

    numbers: by layer, then by statistic, (H, Nq); a query without a number is NaN
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
            rows = found.get(name, np.full((count, 0), np.nan))  # no query has it
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
    """Return the tally of no document, of which no layer is known."""
    s = len(statistics)
    sums, peak = np.zeros((s, 0, len(SUMS))), np.zeros((s, 0))
    return Tally((), (), statistics, sums, peak, np.zeros((s, 0, 1), PLACE))


def join_pieces(pieces: Sequence[Tally]) -> Tally:
    """Return the tally of one document from those of its pieces, which are no draws."""
    whole = merge_tallies(pieces, keep=1)
    n, y = whole.sums[..., 1], whole.sums[..., 2]
    return replace(whole, sums=sum_draw(n, y))


def sum_draw(n: NDArray[Any], y: Numbers) -> Numbers:
    """Return the six numbers of one document."""
    return np.stack([n > 0, n, y, n * n, y / np.maximum(n, 1), 0 * y], -1)


def merge_sums(sums: Numbers) -> Numbers:
    """Return the six numbers of all, from (parts, statistics, heads, 6)."""
    plain = sums[..., :4].sum(0)
    weight, centre, spread = np.moveaxis(sums[..., 3:], -1, 0)
    # seen from one of them, as differences are small
    base = centre[0]
    share = np.divide(weight, plain[..., 3], out=0 * weight, where=weight > 0)
    middle = base + (share * (centre - base)).sum(0)
    moved = (spread + weight * (centre - middle) ** 2).sum(0)
    return np.concatenate([plain, np.stack([middle, moved], -1)], -1)


def merge_tallies(tallies: Sequence[Tally], *, keep: int) -> Tally:
    """Return one tally of all; of the places, the `keep` largest of each head."""
    tallies = align(tallies)
    first = tallies[0]
    top = np.concatenate([x.top for x in tallies], -1)
    # a total order, so that no order of merging can show
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
    """Return tallies of the same layers: one that a model left out adds nothing."""
    names = {(x.layers, x.heads) for x in tallies}
    if len(names) == 1:
        return list(tallies)
    known: list[tuple[str, int]] = []
    for x in tallies:
        at = len(known)
        for key in reversed([*zip(x.layers, x.heads, strict=True)]):
            if key in known:
                at = known.index(key)
            else:  # before what ran after it
                known.insert(at, key)
    return [add_layers(x, tuple(known)) for x in tallies]


def add_layers(tally: Tally, known: tuple[tuple[str, int], ...]) -> Tally:
    """Return the same with more layers, in which nothing was seen."""
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
