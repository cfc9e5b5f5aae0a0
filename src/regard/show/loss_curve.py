"""Loss curves of training runs, as text and as a figure.

    print(draw_curve(losses))                        blocks, for a terminal
    plot({"copy": losses}).savefig("loss.pdf")       lines, for a paper

Each point is a mean over neighbouring steps, as the loss of one batch is noisy.

Next: nn/train.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from regard.errors import ShapeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLOCKS = " ▁▂▃▄▅▆▇█"
# Okabe and Ito's palette, which is safe for colour-blind readers
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK = "#333333"
POINTS = 200  # most points of a line in a figure


def draw_curve(losses: Sequence[float], *, width: int = 60, height: int = 10) -> str:
    """Return the curve as a chart of blocks, from 0 to the highest mean.

    A mean that is not finite is left blank, and the last line says so.

    >>> print(draw_curve([4, 3, 2, 1.5, 1.2, 1], width=6, height=3))
    4 ┤█▂
      │██▄▁
    0 ┤████▇▆
      └──────
       1    6 steps
    """
    _, means = average(losses, width)
    if means.ndim > 1:
        raise ShapeError(
            f"losses of shape {np.shape(losses)}, expected those of a run."
        )
    seen = np.isfinite(means)
    top = float(means[seen].max(initial=0)) or 1.0
    high = np.where(seen, means, 0) / top * height * 8
    eighths = np.where(seen, np.maximum(1, np.round(high)), 0).astype(int)
    most = f"{top:.3g}"
    margin = len(most)
    lines = []
    for row in reversed(range(height)):
        label = most if row == height - 1 else "0" if row == 0 else ""
        cells = "".join(BLOCKS[n] for n in np.clip(eighths - 8 * row, 0, 8))
        tick = "┤" if label else "│"
        lines.append(f"{label:>{margin}} {tick}{cells}".rstrip())
    steps, note = f"{len(losses):,}", "" if seen.all() else ", blank: no number"
    lines.append(f"{'':>{margin}} └{'─' * len(means)}")
    lines.append(f"{'':>{margin}}  1{steps:>{max(2, len(means) - 1)}} steps{note}")
    return "\n".join(lines)


def average(
    values: ArrayLike, points: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the centres and means of at most `points` equal ranges of steps."""
    numbers = np.asarray(values, np.float64)
    if not numbers.ndim or not numbers.size:
        raise ShapeError(
            f"losses of shape {numbers.shape}, expected a number for each step."
        )
    n = numbers.shape[-1]
    edges = np.linspace(0, n, min(points, n) + 1).round().astype(int)
    means = np.add.reduceat(numbers, edges[:-1], axis=-1) / np.diff(edges)
    return (edges[:-1] + edges[1:] + 1) / 2, means


def plot(
    curves: Mapping[str, ArrayLike],
    *,
    axes: Axes | None = None,
    every: int = 1,
    label: str = "loss",
    log: bool = True,
) -> Figure:
    """Draw named curves into a new figure, or into the given axes.

    curves: (steps,), or (runs, steps): a line for the median, a shade for all runs
    every: number of steps from one value to the next
    """
    if axes is None:
        axes = open_figure((4.2, 2.8)).subplots()
    for i, (name, values) in enumerate(curves.items()):
        colour = COLOURS[i % len(COLOURS)]
        steps, runs = average(np.atleast_2d(np.asarray(values)), POINTS)
        steps = steps * every
        axes.plot(steps, np.median(runs, 0), color=colour, linewidth=1.4, label=name)
        if len(runs) > 1:
            low, high = runs.min(0), runs.max(0)
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    dress(axes, label, log=log, named=len(curves) > 1)
    return axes.get_figure(root=True)  # type: ignore[return-value]


def open_figure(size: tuple[float, float]) -> Figure:
    """Return a new figure, size in inches, that a notebook shows."""
    try:
        import matplotlib.figure  # noqa: F401, PLC0415 (it may be missing)

        from regard.show.notebook_figure import NotebookFigure  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        raise ImportError(
            f'a figure needs {missing.name}: pip install "regard[show]"'
        ) from missing
    return NotebookFigure(figsize=size, dpi=200, layout="constrained")


def dress(axes: Axes, label: str, *, log: bool, named: bool) -> None:
    """Style the axes: labels, thin grid lines, no box, a legend if named."""
    if log:
        axes.set_yscale("log")
    axes.set_xlabel("step", fontsize=9, color=INK)
    axes.set_ylabel(label, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK, which="both", width=0.6)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(linewidth=0.6, color=INK)
    axes.margins(x=0.01)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    if named:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)


def draw_bars(shares: NDArray[Any], *, lost: NDArray[np.bool_]) -> str:
    """Return a block for each share from 0 to 1; NaN is blank, or "?" where lost.

    lost: where a NaN was computed; any other NaN is a missing value
    """
    steps = np.nan_to_num(np.clip(np.round(shares * 8), 1, 8)).astype(int)
    return "".join(
        "?" if unknown and not step else BLOCKS[step]
        for step, unknown in zip(steps, lost, strict=True)
    )
