"""Patch every head, one at a time, and measure what each of them changes.

    with regard.watch(model, keep="qkv") as source:
        model(clean)
    print(search_heads(model, corrupted, source, lambda logits: logits[:, -1, token]))

    found.values[layer, head]    measure of the corrupted run with that head patched
    found.before                 measure of the corrupted run

The heads of a layer are rows of one batch, and the modules before the layer are not run
again (skip_prefix.py), so that a search costs about half a forward pass for each head.
What is edited is verified once (verify.py): the inputs are the same in every pass. If
the measure reads the last token only, add logits_to_keep=1 to the inputs of the model.

Next: effect.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.ablate.ablation import Positions, check_model, read_ablation
from regard.ablate.effect import check_evaluating, read_logits
from regard.ablate.intervene import intervene
from regard.ablate.replacement import (
    ChangedOutputs,
    MeanOutputs,
    RecordedOutputs,
    read_replacement,
)
from regard.ablate.skip_prefix import Prefix
from regard.ablate.verify import Verdicts
from regard.arguments import expect_function, suggest
from regard.display import Displayed
from regard.errors import OptionError
from regard.lens.chosen_layers import (
    Layer,
    Layers,
    is_chosen,
    is_count,
    read_layers,
)

Measure = Callable[[Tensor], Tensor]
Progress = Callable[[int, int], object]
SHOWN = 10  # heads that print() lists
CLOSE = 1e-4  # how far a pass that skips modules may be from one that does not


@dataclass(frozen=True, kw_only=True)
class HeadSearch(Displayed):
    """A measure with each head patched."""

    layers: tuple[str, ...]
    values: Tensor  # (L, H), float64; NaN where no head was patched
    before: float  # without a patch
    skipped: bool  # whether modules before the patched layer were not run again

    @property
    def changes(self) -> Tensor:
        """What each patch changes, (L, H)."""
        return self.values - self.before

    def __str__(self) -> str:
        change = self.changes
        lines = [
            f"without a patch   {self.before:.4g}",
            "layer  head     patched   change",
        ]
        for layer, head in rank_heads(change):
            value, moved = float(self.values[layer, head]), float(change[layer, head])
            lines.append(f"{layer:5}  {head:4}  {value:10.4g}  {moved:+7.4g}")
        return "\n".join(lines)


def rank_heads(changes: Tensor) -> list[tuple[int, int]]:
    """Return the layers and heads of the largest changes (L, H); NaN is no change."""
    sizes = changes.abs().flatten().nan_to_num(-1)
    count = min(SHOWN, int((sizes >= 0).sum()))
    places = sizes.topk(count).indices.tolist()
    return [divmod(at, changes.shape[1]) for at in places]


class RepeatedInputs:
    """A model and the inputs of one sequence, repeated for each row of a batch."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any] | Tensor) -> None:
        self.model = model
        self.tokens = (inputs,) if isinstance(inputs, Tensor) else ()
        self.named = {} if isinstance(inputs, Tensor) else dict(inputs)
        for name, x in (*self.named.items(), *(("inputs", x) for x in self.tokens)):
            if isinstance(x, Tensor) and (not x.ndim or x.shape[0] != 1):
                raise OptionError(
                    f"{name} has shape {tuple(x.shape)}, expected one sequence: "
                    "(1, N). Give one text at a time."
                )

    def run(self, rows: int = 1) -> Tensor:
        """Return the logits of each row, (rows, N, vocabulary)."""

        def repeat(x: Any) -> Any:
            return x.expand(rows, *x.shape[1:]) if isinstance(x, Tensor) else x

        named = {name: repeat(x) for name, x in self.named.items()}
        return read_logits(self.model(*map(repeat, self.tokens), **named))[0]


@suggest
def search_heads(
    model: nn.Module,
    inputs: Mapping[str, Any] | Tensor,
    source: Any,
    measure: Measure,
    *,
    layers: Sequence[Layer] | None = None,
    queries: Positions | None = None,
    batch: int = 16,
    progress: Progress | None = None,
) -> HeadSearch:
    """Patch each head with its output in another run, and measure the logits.

    inputs: of one sequence: tokens (1, N), or the keyword arguments of the model
    source: a recording of one sequence with values, or average_outputs(recordings)
    measure: called with logits (B, N, vocabulary); returns a number for each of B
    layers: whose heads are patched, by name or number; all layers unless given
    queries: tokens at which heads are patched; all unless given
    batch: heads in one forward pass
    progress: called with the heads done and their total
    """
    check_model(model)
    expect_function("measure", measure, "logits")
    check_evaluating(model)
    refuse_cache(inputs)
    replacement = read_outputs_of(source)
    heads = replacement.heads
    sequence = RepeatedInputs(model, inputs)
    shape = len(heads), max(heads.values())
    values = torch.full(shape, math.nan, dtype=torch.float64)
    with torch.no_grad():
        plain = sequence.run()
        before = float(read_measure(measure, plain)[0])
        if math.isnan(before):
            raise OptionError("the measure is NaN without a patch, expected a number.")
        prefix = find_prefix(sequence, plain, list(heads))
        chosen = read_layers(layers, [name for name, _ in model.named_modules()])
        rows = plan_passes(heads, chosen, batch)
        known = verify_layers(sequence, [layer for _, layer, _ in rows])
        done, total = 0, sum(len(some) for *_, some in rows)
        for i, layer, some in rows:
            call = layer if "#" in layer else f"{layer}#1"  # no other, and no child
            ablation = read_ablation(
                model, [(call, h) for h in some], None, (None, queries), replacement
            )
            skipping = (
                nullcontext() if prefix is None else prefix.skip(layer, len(some))
            )
            with skipping, intervene(model, replace(ablation, rows=some), known):
                logits = sequence.run(len(some))
            values[i, list(some)] = read_measure(measure, logits)
            done += len(some)
            if progress is not None:
                progress(done, total)
    return HeadSearch(
        layers=tuple(heads), values=values, before=before, skipped=prefix is not None
    )


def plan_passes(
    heads: Mapping[str, int], chosen: Layers, batch: int
) -> list[tuple[int, str, tuple[int, ...]]]:
    """Return the number, the name and some heads of a layer for each pass, or raise."""
    if not is_count(batch) or not batch:
        raise OptionError(f"batch={batch!r}, expected heads in one pass: 1 or more.")
    rows = [
        (i, layer, tuple(range(first, min(first + batch, count))))
        for i, (layer, count) in enumerate(heads.items())
        if is_chosen(chosen, i, layer)
        for first in range(0, count, batch)
    ]
    if not rows:
        last = len(heads) - 1
        raise OptionError(f"layers={chosen}: the source has layers 0 to {last}.")
    return rows


def verify_layers(sequence: RepeatedInputs, names: Sequence[str]) -> Verdicts:
    """Run a model once with all heads replaced by themselves, and verify all edits."""
    same = ChangedOutputs(lambda z: z)
    ablation = read_ablation(sequence.model, None, names, (None, None), same)
    with intervene(sequence.model, ablation) as verdicts:
        sequence.run()
    return verdicts


def read_outputs_of(source: Any) -> RecordedOutputs | MeanOutputs:
    """Return the outputs of each head in a recording, or their mean, or raise."""
    found = read_replacement(source)
    if not isinstance(found, RecordedOutputs | MeanOutputs):
        raise OptionError(
            f"source is a {type(source).__name__}, expected a recording, or "
            "average_outputs(recordings)."
        )
    texts = 1 if isinstance(found, MeanOutputs) else len(set(found.recording.sequences))
    if texts > 1:
        raise OptionError(
            f"source has {texts} sequences, expected one: rows of the batch are heads. "
            "Record one text, or write average_outputs(source)."
        )
    return found


def refuse_cache(inputs: Mapping[str, Any] | Tensor) -> None:
    """Raise OptionError if inputs have a cache: every run would append to it."""
    for name, x in inputs.items() if isinstance(inputs, Mapping) else ():
        known = x is None or isinstance(x, bool | Tensor)  # as use_cache=True
        if not known and ("past" in name or "cache" in name):
            raise OptionError(
                f"{name} is a cache, to which each of several runs would append. Give "
                "all tokens, without a cache."
            )


def find_prefix(
    sequence: RepeatedInputs, plain: Tensor, layers: list[str]
) -> Prefix | None:
    """Return the prefix of each layer; None if passes without it differ from `plain`.

    A model may do more than its modules tell. So one pass from the middle layer and one
    from the last layer are compared with the whole pass.
    """
    try:
        prefix = Prefix(sequence.model, lambda _: sequence.run(), layers)
        for layer in {layers[len(layers) // 2], layers[-1]}:
            with prefix.skip(layer, 2):
                logits = sequence.run(2)
            size = max(1.0, float(plain.abs().max()))
            if not bool(((logits - plain).abs() <= CLOSE * size).all()):
                return None
    except Exception:  # noqa: BLE001 (such a model is run as a whole)
        return None
    return prefix


def read_measure(measure: Measure, logits: Tensor) -> Tensor:
    """Return a number for each sequence, or raise."""
    found = measure(logits)
    if isinstance(found, Tensor) and found.shape == logits.shape[:1]:
        return found.double().cpu()
    shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
    raise OptionError(
        f"measure returned {shape}, expected a number for each of the "
        f"{logits.shape[0]} sequences. Write lambda logits: logits[:, -1, token]."
    )
