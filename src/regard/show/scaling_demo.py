"""Why scores are scaled, and what common mistakes do to the weights.

    print(draw_scaling())                      the largest weight, scaled or not
    plot_scaling().savefig("scaling.pdf")      the same as a figure
    print(draw_mistakes())                     one causal head, right and wrong
    plot_mistakes().savefig("mistakes.pdf")
    plot_mistakes(list_mistakes(q, k, v))      with your arrays

If the entries of q and k have variance 1, a score q · k has variance d_k. Without
1/√d_k a wider head is sharper, until one key takes all the weight and gradients vanish.

One draw of four tokens is noisy, so the line is the median of many draws. The dots are
the draw that the documents print (docs/errata.md).

Next: training.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.arrays import Array, to_numpy
from regard.definition.attention import attention
from regard.errors import OptionError
from regard.masks.patterns import causal
from regard.show.figure import PAGES, make_figure, plot_weights
from regard.show.loss_curve import COLOURS, dress
from regard.show.palette import LinearScale
from regard.show.terminal_map import Color, draw_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTHS = (4, 16, 64, 256, 512)
TOKENS = 4
SEEDS = tuple(range(42, 142))  # the first is that of the documents
SCALED, BARE = "scaled by 1/√d_k", "not scaled"
Scaling = dict[str, NDArray[np.float64]]  # (seeds, widths)


def measure_scaling(
    widths: Sequence[int] = WIDTHS, seeds: Sequence[int] = SEEDS
) -> Scaling:
    """Return the largest weight for random q and k, by seed and head width.

    >>> {name: x[0].round(4).tolist() for name, x in measure_scaling().items()}
    {'scaled by 1/√d_k': [0.665, 0.4708, 0.4617, 0.7101, 0.749], \
'not scaled': [0.9048, 0.8828, 0.9888, 1.0, 1.0]}
    """
    if not widths or not seeds or min(widths) < 1:
        raise OptionError(
            f"widths={widths} and {len(seeds)} seeds, expected at least one of each, "
            "and widths from 1 on."
        )
    states = [np.random.RandomState(seed) for seed in seeds]  # as in the documents
    found: dict[str, list[Any]] = {SCALED: [], BARE: []}
    for width in widths:
        drawn = [(x.randn(TOKENS, width), x.randn(TOKENS, width)) for x in states]
        q, k = (np.stack(x) for x in zip(*drawn, strict=True))  # (seeds, TOKENS, width)
        for name, scale in ((SCALED, None), (BARE, 1.0)):
            weights = attention(q, k, k, scale=scale, see=("weights",)).weights
            found[name].append(to_numpy(weights).max((-2, -1)))
    return {name: np.stack(columns, -1) for name, columns in found.items()}


def draw_scaling(widths: Sequence[int] = WIDTHS, seeds: Sequence[int] = SEEDS) -> str:
    """Draw the experiment as a text table."""
    found = measure_scaling(widths, seeds)
    lines = [
        "largest weight".ljust(18) + "".join(f"{f'd_k = {w}':>11}" for w in widths)
    ]
    for name, values in found.items():
        for title, row in (
            (name, values[0]),
            (f"  median of {len(seeds)}", np.median(values, 0)),
            ("  lowest", values.min(0)),
            ("  highest", values.max(0)),
        ):
            lines.append(title.ljust(18) + "".join(f"{x:>11.4f}" for x in row))
    told = f"random q and k of {TOKENS} tokens, of variance 1"
    return "\n".join([*lines, f"{told}; the first rows are of seed {seeds[0]}"])


def plot_scaling(
    widths: Sequence[int] = WIDTHS, seeds: Sequence[int] = SEEDS
) -> Figure:
    """Draw the experiment: lines are medians, shades all seeds, dots the first."""
    found = measure_scaling(widths, seeds)
    figure, (axes,) = make_figure((4.2, 2.6), (1, 1), 1, PAGES[0])
    for (name, values), colour, line in zip(
        found.items(), COLOURS, ("o-", "s--"), strict=False
    ):
        low, high = values.min(0), values.max(0)
        axes.fill_between(widths, low, high, color=colour, alpha=0.13, linewidth=0)
        middle = np.median(values, 0)
        axes.plot(widths, middle, line[1:], color=colour, linewidth=1.4)
        axes.plot(widths, values[0], line[0], color=colour, markersize=3.5)
        label = name.replace("1/√d_k", r"$1/\sqrt{d_k}$")
        axes.plot([], [], line, color=colour, markersize=3.5, label=label)
    dress(axes, "largest weight", log=False, named=False)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(widths), list(map(str, widths)))
    axes.set_xlabel(
        f"width $d_k$ of a head\n(lines: median of {len(seeds)} draws, shade: all of "
        f"them, dots: seed {seeds[0]})",
        fontsize=8,
    )
    axes.margins(x=0.03)
    axes.set_ylim(0, 1.04)
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    return figure


class Variant(NamedTuple):
    """The weights of one causal head, computed in one way."""

    title: str
    weights: NDArray[np.float64]  # (N, N)

    def tell(self) -> tuple[str, str]:
        """Return the row sums and the mean of the row maxima, as text."""
        sums, tops = self.weights.sum(-1), self.weights[1:].max(-1, initial=0)
        least, most = (f"{x:.2g}" for x in (sums.min(), sums.max()))
        ends = most if least == most else f"{least} … {most}"
        # tops leaves out the first row, which has only one key
        return f"rows sum to {ends}", f"largest of a row: {tops.mean():.2f} on average"


def list_mistakes(q: Array, k: Array, v: Array) -> tuple[Variant, ...]:
    """Return the weights of a causal head (N, d): correct, and with three mistakes."""

    def weigh(mask: Any, scale: float | None) -> NDArray[np.float64]:
        found = attention(q, k, v, mask, scale=scale, see=("weights",)).weights
        return to_numpy(found).astype(np.float64)

    if getattr(q, "ndim", 0) != 2:
        raise OptionError(
            "one head is wanted, (N, d): write q[0, 0], k[0, 0], v[0, 0]."
        )
    d_v = int(v.shape[-1])
    late = np.tril(weigh(None, None))  # the rows are not renormalised
    return (
        Variant("right", weigh(causal(), None)),
        Variant("no scale", weigh(causal(), 1.0)),
        Variant("scale by d_v", weigh(causal(), 1 / math.sqrt(d_v))),
        Variant("mask after softmax", late),
    )


def make_example(
    tokens: int = 6, d_k: int = 64, d_v: int = 16, *, seed: int = 42
) -> tuple[Array, Array, Array]:
    """Return random q, k and v of variance 1; v has a different width."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, tokens, d_k))
    return q, k, rng.normal(size=(tokens, d_v))


def draw_mistakes(
    mistakes: Sequence[Variant] | None = None, *, color: Color = False, width: int = 80
) -> str:
    """Draw the maps, by default of an example, as text with each mistake's effect."""
    found = list_mistakes(*make_example()) if mistakes is None else mistakes
    maps = {x.title: (x.weights, causal()) for x in found}
    drawn = draw_weights(maps, scale=LinearScale(0, 1), color=color, width=width)
    wide = max(len(x.title) for x in found)
    told = (f"{x.title:<{wide}}  {', '.join(x.tell())}" for x in found)
    return "\n".join([drawn, *told])


def plot_mistakes(
    mistakes: Sequence[Variant] | None = None, *, dark: bool = False
) -> Figure:
    """Draw the maps side by side, with the effect of each mistake in its title."""
    found = list_mistakes(*make_example()) if mistakes is None else mistakes
    maps = {"\n".join([x.title, *x.tell()]): (x.weights, causal()) for x in found}
    return plot_weights(maps, scale=LinearScale(0, 1), columns=len(maps), dark=dark)
