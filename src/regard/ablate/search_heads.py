"""Patch every head, one at a time, and measure what each of them changes.

    with regard.watch(model, keep="qkv") as source:
        model(clean)
    print(search_heads(model, corrupted, source, lambda logits: logits[:, -1, token]))

    found.values[layer, head]    measure of the corrupted run with that head patched
    found.before                 measure of the corrupted run

With queries=[slice(0, 1), slice(1, 4)] each head is patched at one place, then at the
other: found.values[layer, head, place].

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
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from regard.ablate.ablation import (
    Ablation,
    Positions,
    Tokens,
    TokensBySequence,
    check_model,
    read_ablation,
    read_tokens,
)
from regard.ablate.effect import check_evaluating, read_logits
from regard.ablate.intervene import intervene
from regard.ablate.replacement import (
    ChangedOutputs,
    MeanOutputs,
    RecordedOutputs,
    Replacement,
    read_replacement,
)
from regard.ablate.skip_prefix import Prefix
from regard.ablate.verify import Verdicts
from regard.arguments import expect_function, suggest
from regard.display import Displayed
from regard.errors import OptionError
from regard.run.chosen_layers import Layer, Layers, is_chosen, is_count, read_layers

Measure = Callable[[Tensor], Tensor]
Places = tuple[Tokens, ...] | None
Progress = Callable[[int, int], object]
SHOWN = 10  # heads that print() lists
CLOSE = 1e-4  # how far a pass that skips modules may be from one that does not


@dataclass(frozen=True, kw_only=True)
class HeadSearch(Displayed):
    """A measure with each head patched, at all tokens or at each of P places."""

    layers: tuple[str, ...]
    values: Tensor  # (L, H) or (L, H, P), float64; NaN where no head was patched
    before: float  # without a patch
    skipped: bool  # whether modules before the patched layer were not run again
    places: Places = None  # the P places; None: all tokens at once

    @property
    def changes(self) -> Tensor:
        """What each patch changes, (L, H) or (L, H, P)."""
        return self.values - self.before

    def __str__(self) -> str:
        title = name_columns(self.places)
        lines = [
            f"without a patch   {self.before:.4g}",
            f"{title}     patched   change",
        ]
        for at in rank_heads(self.changes):
            value, moved = float(self.values[at]), float(self.changes[at])
            lines.append(f"{name_row(at, self.places)}  {value:10.4g}  {moved:+7.4g}")
        return "\n".join(lines)


def rank_heads(changes: Tensor) -> list[tuple[int, ...]]:
    """Return the indices of the largest changes, (L, H) or more; NaN is no change."""
    sizes = changes.abs().flatten().nan_to_num(-1)
    count = min(SHOWN, int((sizes >= 0).sum()))
    places = torch.unravel_index(sizes.topk(count).indices, changes.shape)
    return list(zip(*(x.tolist() for x in places), strict=True))


def name_columns(places: Places) -> str:
    """Return the titles of layer, head and place."""
    return "layer  head" if places is None else "layer  head    tokens"


def name_row(at: Sequence[int], places: Places) -> str:
    """Return the layer, the head and the place of a row."""
    text = f"{at[0]:5}  {at[1]:4}"
    return text if places is None else f"{text}  {places[at[2]]!s:>8}"


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
    queries: tokens at which heads are patched; all unless given. A list of slices: at
        one of them after the other, and values are (L, H, places)
    batch: patches in one forward pass
    progress: called with the patches done and their total
    """
    check_model(model)
    expect_function("measure", measure, "logits")
    check_evaluating(model)
    refuse_cache(inputs)
    replacement = read_outputs_of(source)
    heads = replacement.heads
    sequence, tokens = RepeatedInputs(model, inputs), read_tokens("queries", queries)
    places = read_places(tokens)
    shape = len(heads), max(heads.values()), 1 if places is None else len(places)
    values = torch.full(shape, math.nan, dtype=torch.float64)
    with torch.no_grad():
        plain = sequence.run()
        before = float(read_measure(measure, plain)[0])
        if math.isnan(before):
            raise OptionError("the measure is NaN without a patch, expected a number.")
        prefix = find_prefix(sequence, plain, list(heads))
        chosen = read_layers(layers, [name for name, _ in model.named_modules()])
        passes = plan_passes(heads, chosen, shape[-1], batch)
        known = verify_layers(sequence, [layer for _, layer, _ in passes])
        done, total = 0, sum(len(rows) for *_, rows in passes)
        for i, layer, rows in passes:
            ablation = patch_rows(model, layer, rows, tokens, replacement)
            skipping = (
                nullcontext() if prefix is None else prefix.skip(layer, len(rows))
            )
            with skipping, intervene(model, ablation, known):
                logits = sequence.run(len(rows))
            values[i, *zip(*rows, strict=True)] = read_measure(measure, logits)
            done += len(rows)
            if progress is not None:
                progress(done, total)
    return HeadSearch(
        layers=tuple(heads),
        values=values[..., 0] if places is None else values,
        before=before,
        skipped=prefix is not None,
        places=places,
    )


def plan_passes(
    heads: Mapping[str, int], chosen: Layers, places: int, batch: int
) -> list[tuple[int, str, list[tuple[int, int]]]]:
    """Return the number and name of a layer, and some of its patches, for each pass.

    A patch is (head, place). Raises OptionError if there are none.
    """
    if not is_count(batch) or not batch:
        raise OptionError(f"batch={batch!r}, expected patches in a pass: 1 or more.")
    passes = []
    for i, (layer, count) in enumerate(heads.items()):
        if is_chosen(chosen, i, layer):
            rows = list(product(range(count), range(places)))
            firsts = range(0, len(rows), batch)
            passes += [(i, layer, rows[at : at + batch]) for at in firsts]
    if not passes:
        last = len(heads) - 1
        raise OptionError(f"layers={chosen}: the source has layers 0 to {last}.")
    return passes


def read_places(tokens: Tokens | TokensBySequence | None) -> Places:
    """Return the places that are patched one after the other, None if all at once."""
    if not isinstance(tokens, TokensBySequence):
        return None
    places = tuple(x for x in tokens.sequences if x is not None)
    if len(places) < len(tokens.sequences):
        raise OptionError("queries= has None, expected slices: the places to patch.")
    return places


def patch_rows(
    model: nn.Module,
    layer: str,
    rows: Sequence[tuple[int, int]],  # head, place
    tokens: Tokens | TokensBySequence | None,
    replacement: Replacement,
) -> Ablation:
    """Return what patches one head, at one place, in each row of a batch."""
    call = layer if "#" in layer else f"{layer}#1"  # no other, and no child
    some = tuple(head for head, _ in rows)
    if isinstance(tokens, TokensBySequence):
        tokens = TokensBySequence(tuple(tokens.sequences[at] for _, at in rows))
    found = read_ablation(
        model, [(call, h) for h in some], None, (None, None), replacement
    )
    return replace(found, rows=some, queries=tokens)


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
