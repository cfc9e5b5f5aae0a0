"""Confidence intervals that stay valid when the data decide when to stop.

    y, n        of one document: the sum of a statistic over its queries, their number
    r           E[y] / E[n], the mean over all queries: what the interval covers
    x           (y - r n) / N, for 0 <= y <= n <= N, so -1 <= x <= 1 and E[x] = 0
    M(λ)        exp(λ Σ x - ψ(λ) Σ x²),   ψ(λ) = -log(1 - λ) - λ,   0 < λ < 1

A Student interval is valid at one sample size chosen in advance. A run that checks it
after every shard and stops when it is narrow stops too early when the variance happens
to look small. A confidence sequence holds at all sample sizes at once, hence at any
stopping time (Howard, Ramdas, McAuliffe and Sekhon 2021, Annals of Statistics 49).

(log(1 + λx) - λx) / x² increases with x and is -ψ(λ) at x = -1, so each factor of M is
at most 1 + λx (Fan, Grama and Liu 2015, EJP 20, Lemma 4.1), whose expectation is 1. So
M(λ) is a non-negative supermartingale, as is a mixture over fixed λ, and it ever
reaches 2/α with probability at most α/2 (Ville). The interval holds the r that neither
M nor its mirror image (y -> n - y, r -> 1 - r) rejects in this way:

    Σ λ_k's weight · M(λ_k) < 2/α        Σ x  = (Σ y - r Σ n) / N
                                         Σ x² = (S + W (c - r)²) / N²

S, W and c are those of tally.py: the sums that are kept for the Student interval are
enough, in any order. M(λ) decreases in r, so that the set is an interval, because
2 ψ(λ) <= λ for λ <= 0.58. The guarantee is for each head, not for all heads at once.

Next: job.py
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from regard.atlas.tally import SUMS, Numbers, Tally
from regard.stats.registry import find_statistic
from regard.student import SURE

RATES = 0.58 * 0.5 ** np.arange(16)  # the λ of the mixture, down to 2e-5
SHARES = 1 / np.arange(1, 17) / np.sum(1 / np.arange(1, 17))  # their weights
PENALTIES = -np.log1p(-RATES) - RATES  # ψ(λ)
STEPS = 52  # halvings of an interval, to the precision of float64
ROUNDING = 1e-3  # relative tolerance of the bounds: a weight may be 1.0000002
MOST = 2.0**40  # growth above which the estimate is inf


def scale_sums(tally: Tally, *, length: int, pieces: int) -> Numbers:
    """Return Σ y, Σ n, W, c and S for queries in [0, 1] and documents of length 1.

    NaN where a query was outside the bounds of its statistic: there is no interval.
    """
    _, n, y, weight, centre, spread = np.moveaxis(tally.sums[..., :6], -1, 0)
    bounds = [find_statistic(name).bound(length) for name in tally.statistics]
    low, high = np.array(bounds).reshape(-1, 2, 1).swapaxes(0, 1)
    span, most = high - low, length * pieces
    known = (span < math.inf) & (tally.peak <= high + ROUNDING * span) & (n > 0)
    low, span = np.where(known, low, 0.0), np.where(known, span, np.nan)
    parts = (
        (y - low * n) / span / most,
        n / most,
        weight / most**2,
        (centre - low) / span,
        spread / (span * most) ** 2,
    )
    return np.stack(np.broadcast_arrays(*parts))


def compute_evidence(sums: Numbers, r: Numbers) -> Numbers:
    """Return the log of the mixture of M: the evidence that the mean is above r."""
    y, n, weight, centre, spread = (x[..., None] for x in sums)
    r = r[..., None]
    logs = RATES * (y - r * n) - PENALTIES * (spread + weight * (centre - r) ** 2)
    top = logs.max(-1)
    mixed: Numbers = top + np.log((SHARES * np.exp(logs - top[..., None])).sum(-1))
    return mixed


def mirror(sums: Numbers) -> Numbers:
    """Return the sums of n - y: an upper bound of y is a lower bound of these."""
    y, n, weight, centre, spread = sums
    return np.stack([n - y, n, weight, 1 - centre, spread])


def is_narrow(
    tally: Tally, width: float, *, length: int, pieces: int, sure: float = SURE
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Return whether half the interval of each mean is at most `width` of its range."""
    sums, enough = scale_sums(tally, length=length, pieces=pieces), threshold(sure)
    narrow = np.ones(tally.peak.shape, bool)
    for side in (sums, mirror(sums)):
        end = side[0] / side[1] - width
        narrow &= (end <= 0) | (compute_evidence(side, end) >= enough)
    return narrow


def find_half(tally: Tally, *, length: int, pieces: int, sure: float = SURE) -> Numbers:
    """Return half the interval of each mean, (statistics, heads); NaN where unknown.

    The larger of its two sides: the mean lies in [mean - half, mean + half].
    """
    sums, enough = scale_sums(tally, length=length, pieces=pieces), threshold(sure)
    half = np.zeros(tally.peak.shape)
    for side in (sums, mirror(sums)):
        mean = side[0] / side[1]
        low, high = np.zeros_like(mean), mean  # low is rejected, or 0
        for _ in range(STEPS):
            middle = (low + high) / 2
            rejected = compute_evidence(side, middle) >= enough
            low = np.where(rejected, middle, low)
            high = np.where(rejected, high, middle)
        half = np.maximum(half, mean - low)
    bounds = (find_statistic(name).bound(length) for name in tally.statistics)
    span: Numbers = np.array([[high - low] for low, high in bounds])
    return half * span


def threshold(sure: float) -> float:
    """Return the evidence at which one side rejects, log(2/α)."""
    return math.log(2 / (1 - sure))


def estimate_growth(
    tally: Tally, width: float, *, rows: list[int], length: int, pieces: int
) -> float:
    """Return how many times as many documents would make every interval narrow.

    rows: indices of the statistics that count. Returns inf if no number is enough.
    """

    def reach(growth: float) -> bool:
        # Σ y, Σ n, W and S grow with the documents; the centre does not
        by = np.where(np.array(SUMS) == "centre", 1.0, growth)
        grown = replace(tally, sums=tally.sums * by)
        narrow = is_narrow(grown, width, length=length, pieces=pieces)
        return bool(narrow[rows][tally.sums[rows, :, 0] > 0].all())

    high = 1.0
    while not reach(high):
        high *= 2
        if high > MOST:
            return math.inf
    low = high / 2
    while high > 1 and high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reach(middle) else (middle, high)
    return high
