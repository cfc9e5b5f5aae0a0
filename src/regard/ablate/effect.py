"""Measure the effect of an ablation: run a model with it and without it.

    print(effect(model, run, heads=[(3, 5)]))

Next: ../seen.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.ablate.ablation import Positions, check_model
from regard.ablate.knock_out import knock_out
from regard.arguments import expect_function, suggest
from regard.display import Displayed
from regard.errors import OptionError
from regard.masks.algebra import Mask
from regard.run.chosen_layers import Layer


@dataclass(frozen=True, kw_only=True)
class Effect(Displayed):
    """The effect of an ablation. Tuples have one entry per sequence of the batch."""

    logits: float  # the largest change of any logit
    kl: tuple[float, ...]  # of the last token's distribution, before || after, in nats
    before: tuple[tuple[int, float], ...]  # the likeliest next token, its probability
    after: tuple[tuple[int, float], ...]
    loss: tuple[float, float] | None = None  # before and after, if there is one

    def __str__(self) -> str:
        lines = [f"largest change of a logit   {self.logits:.4g}"]
        if self.loss is not None:
            old, new = self.loss
            lines.append(f"loss   {old:.4f} -> {new:.4f}   ({new - old:+.4f})")
        lines.append("sequence        KL   next token before              after")
        rows = zip(self.kl, self.before, self.after, strict=True)
        for i, (kl, (old, p), (new, q)) in enumerate(rows):
            lines.append(f"{i:8} {kl:9.4g}   {old:>10} {p:6.1%}  {new:>10} {q:6.1%}")
        return "\n".join(lines)


@suggest
def effect(
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    heads: Sequence[tuple[Layer, int]] | None = None,
    *,
    layers: Sequence[Layer] | None = None,
    keys: Positions | None = None,
    queries: Positions | None = None,
    mask: Mask | None = None,
) -> Effect:
    """Run a model with and without an ablation, and return what it changed.

    run: called with the model; returns logits (..., vocabulary), or an object with
        .logits and optionally .loss. The second-to-last axis is that of the tokens.
    """
    check_model(model)
    expect_function("run", run, "model")
    check_evaluating(model)
    with torch.no_grad():
        old, old_loss = read_logits(run(model))
        with knock_out(
            model, heads, layers=layers, keys=keys, queries=queries, mask=mask
        ):
            new, new_loss = read_logits(run(model))
    if old.shape != new.shape:
        raise OptionError(
            f"run returned logits {tuple(old.shape)}, and {tuple(new.shape)} with the "
            "cut; expected the same shape. Run one forward pass, not a generation."
        )
    first, second = (torch.log_softmax(last_of(x), -1) for x in (old, new))  # (B, V)
    kl = torch.where(first == -math.inf, 0, first.exp() * (first - second)).sum(-1)
    change = torch.where(old == new, 0, old - new).abs().max()  # inf - inf is none
    losses = None if old_loss is None or new_loss is None else (old_loss, new_loss)
    return Effect(
        logits=float(change),
        kl=tuple(kl.tolist()),
        before=tuple(guess(first)),
        after=tuple(guess(second)),
        loss=losses,
    )


def check_evaluating(model: nn.Module) -> None:
    """Raise OptionError if a model is in training mode."""
    if model.training:
        raise OptionError(
            "the model is in training mode, and its dropout would differ between the "
            "two runs. Call model.eval() first."
        )


def read_logits(done: Any) -> tuple[Tensor, float | None]:
    """Return the logits and the loss of a model's output."""
    logits = done if isinstance(done, Tensor) else getattr(done, "logits", None)
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise OptionError(
            f"run returned a {type(done).__name__}, expected logits, or something "
            "with .logits. Write run=lambda model: model(tokens)."
        )
    loss = getattr(done, "loss", None)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits, None if loss is None else float(loss)


def last_of(logits: Tensor) -> Tensor:
    """Return the logits of each sequence's last token, (B, V)."""
    logits = logits[..., -1, :] if logits.ndim > 2 else logits
    return logits.reshape(-1, logits.shape[-1])


def guess(logs: Tensor) -> Iterator[tuple[int, float]]:
    """Yield the likeliest token of each row, and its probability."""
    best = logs.max(-1)
    yield from zip(best.indices.tolist(), best.values.exp().tolist(), strict=True)
