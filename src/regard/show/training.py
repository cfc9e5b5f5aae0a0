"""The attention of a head during training: the loss, and maps at some steps.

    film = Film(model, tokens, (0, 50, 200))      numbers of steps; 0 is before training
    losses = train(model, task, plan, watch=film)
    plot_training(losses, film, layer=1, head=0).savefig("training.pdf")
    print(draw_training(losses, film, layer=1, head=0))          the same as text

At each of these steps a forward pass on the same tokens is recorded. Weights, dropout
and random numbers of the run do not change. All heads are kept, as q, k and lse, so the
head to show can be chosen later.

Next: patch_overlay.py
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import OptionError
from regard.recording.record import Recording
from regard.show.figure import (
    BESIDE,
    LEAST,
    PAGES,
    add_bar,
    draw_panel,
    entitle,
    label_all,
    make_figure,
    measure_labels,
    size_map,
    write_around,
)
from regard.show.loss_curve import draw_curve, plot
from regard.show.palette import Panel, Scale, fit_weights, read_panels
from regard.show.terminal_map import Color, Labels, Margins, draw_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSS = 1.4  # inches


@dataclass(frozen=True, eq=False)
class Film:
    """Record a model after some of its training steps; pass it to `train` as watch=."""

    model: Any
    tokens: Any  # (N,) or (1, N), as the model reads them
    steps: Collection[int]  # numbers of steps taken; 0 is before the first
    seen: dict[int, Recording] = field(
        default_factory=dict, repr=False
    )  # by steps taken

    def __post_init__(self) -> None:
        if not self.steps or min(self.steps) < 0:
            raise OptionError(f"steps={self.steps}, expected one or more, from 0 on.")
        shape = np.shape(self.tokens)
        if len(shape) not in (1, 2) or shape[:-1] not in ((), (1,)):
            raise OptionError(
                f"tokens of shape {shape}, expected one sequence: write tokens[:1]."
            )
        if 0 in self.steps:
            self.look(0)

    def __call__(self, step: int, loss: float) -> None:
        """Record if this step was requested; called after each step, counted from 0."""
        if step + 1 in self.steps:
            self.look(step + 1)

    def look(self, taken: int) -> None:
        """Run the model on the tokens, and keep a recording of every head."""
        import torch  # noqa: PLC0415 (drawing does not need it)

        from regard.lens.watch import capture  # noqa: PLC0415

        device = next(self.model.parameters()).device
        tokens = torch.as_tensor(self.tokens).to(device)
        was_training = self.model.training
        self.model.eval()  # no dropout in the maps
        try:
            with capture(self.model) as watcher, torch.inference_mode():
                self.model(tokens.reshape(1, -1))
        finally:
            self.model.train(was_training)
        self.seen[taken] = watcher.recording

    def read(self, layer: int | str, head: int) -> dict[int, Panel]:
        """Return the maps of a head by the number of steps taken."""
        if not self.seen:
            raise OptionError(
                "nothing is on the film yet: write train(…, watch=film), and choose "
                f"some of its steps, not {sorted(self.steps)}."
            )
        records = {n: self.seen[n].layer(layer) for n in sorted(self.seen)}
        heads = next(iter(records.values())).heads
        if not 0 <= head < heads:
            raise OptionError(f"head={head}, expected 0 to {heads - 1}.")
        found = {n: read_panels(x, heads=[head]) for n, x in records.items()}
        return {n: panel for n, (panel,) in found.items()}

    def name(self, layer: int | str, head: int) -> str:
        """Return the name of a head."""
        first = self.seen[min(self.seen)]
        return f"{first.layer(layer).name} head {head}"


def draw_training(
    losses: Sequence[float],
    film: Film,
    *,
    layer: int | str,
    head: int,
    labels: Labels = None,
    scale: Scale | None = None,
    color: Color = False,
    width: int = 80,
) -> str:
    """Draw the loss curve, and below it the maps of a head, as text.

    labels: a label for each of the film's tokens
    """
    panels = film.read(layer, head)
    maps = {write_step(n): (x.values, x.allowed) for n, x in panels.items()}
    drawn = draw_weights(
        maps, rows=labels, keys=labels, scale=scale, color=color, width=width
    )
    curve = draw_curve(losses, width=min(60, width - 12), height=6)
    return f"loss\n{curve}\n\n{film.name(layer, head)}\n{drawn}"


def plot_training(
    losses: Sequence[float],
    film: Film,
    *,
    layer: int | str,
    head: int,
    labels: Labels = None,
    scale: Scale | None = None,
    columns: int = 4,
) -> Figure:
    """Draw the loss curve, and below it the maps of a head.

    labels: a label for each of the film's tokens
    columns: most maps side by side
    """
    page, panels = PAGES[0], film.read(layer, head)
    n, shape = len(panels), next(iter(panels.values())).shape
    margins = Margins.read(labels, labels, shape)
    first = "".join(margins.keys[:1])
    scale, note = (scale, "") if scale else fit_weights(list(panels.values()), first)
    width, height = size_map(shape, LEAST, BESIDE)
    down, beside = -(-n // max(1, columns)), 0.5 + measure_labels(margins.rows)
    across = -(-n // down)  # fill the rows of maps evenly
    size = width * across + 0.9 + beside, LOSS + (height + 0.25) * down + 0.7 + beside
    figure, _ = make_figure(size, (1, 1), 0, page)
    spec = figure.add_gridspec(1 + down, across, height_ratios=[LOSS, *[height] * down])
    curve = figure.add_subplot(spec[0, :])
    plot({"": losses}, axes=curve)
    places = [divmod(i, across) for i in range(n)]
    grid = [figure.add_subplot(spec[1 + i, j]) for i, j in places]
    for axes, (taken, panel) in zip(grid, panels.items(), strict=True):
        curve.axvline(taken, color=page.ink, linewidth=0.7, linestyle=":")
        draw_panel(axes, panel, scale, page)
        entitle(axes, write_step(taken), page)
    add_bar(figure, grid, scale, page, what="weight", inches=height * down)
    above = f"{film.name(layer, head)}\nits weights at the dotted steps of the loss"
    write_around(figure, above, note, page)
    shown = [(j == 0, across * i + j + across >= n) for i, j in places]
    pairs = zip(grid, shown, strict=True)
    label_all(figure, [(x, margins, at, ("query", "key")) for x, at in pairs], page)
    return figure


def write_step(taken: int) -> str:
    """Return the title of a map."""
    if not taken:
        return "before training"
    return f"after {taken:,} step{'s' * (taken > 1)}"
