"""Check generations of the small families: their records, and a head that is removed.

    records    weights of each generated sequence == those of eager attention, which is
               given the whole sequence alone, without padding and without a cache
    removed    logits without a head == logits with a hook that sets its output to 0

Prompts are padded on the left; caches grow, have a fixed size, or keep a window. Here
a new version of transformers breaks things first: it chooses other kernels and other
layouts for each of these cases.

Next: statistics_results.py
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from regard.ablate.knock_out import knock_out
from regard.doctor.examined import Trial, judge_error
from regard.doctor.watched_families import (
    HEADS,
    WEIGHT_ERROR,
    SmallFamily,
    run_family,
    run_generation,
    try_families,
)
from regard.seen import Seen, watch

GENERATED = "records of padded generations are those of eager attention"
REMOVED = "a removed head is the one that a hook removes"
CACHES: dict[str, dict[str, str]] = {
    "growing cache": {},
    "static cache": {"cache_implementation": "static"},
}
SHARE = 1e-2  # of the effect of the head, by which the two may differ
PROJECTIONS = ("c_proj", "o_proj", "out_proj", "o", "output.dense")
REMOVED_HEAD = 1


def check_generations(device: torch.device) -> Iterator[Trial]:
    """Watch generations of every family on a device, and remove a head."""
    yield from try_families(REMOVED, check_generation, device)


def check_generation(family: SmallFamily, device: torch.device) -> Iterator[Trial]:
    """Yield whether records are right, and whether the right head is removed."""
    model = family.build().to(device)
    inputs = {name: x.to(device) for name, x in family.draw_inputs().items()}
    for cache, options in CACHES.items() if family.generates else [("", {})]:
        subject = f"{family.name}, {cache}".removesuffix(", ")

        def run(options: dict[str, str] = options) -> list[Tensor]:
            if family.generates:
                return run_generation(model, inputs, **options)
            return run_family(family, model, inputs)

        with watch(model) as seen:
            plain = run()
        if family.generates:
            trial = Trial(GENERATED, subject, str(device))
            padding = (inputs["attention_mask"] == 0).sum(1)
            yield check_sequences(trial, model, plain[0], padding, seen)
        trial = Trial(REMOVED, subject, str(device))
        yield check_removed(trial, model, seen.coverage()[0].name, run, plain)


def check_sequences(
    trial: Trial, model: nn.Module, sequences: Tensor, padding: Tensor, seen: Seen
) -> Trial:
    """Compare the records of generated sequences with eager attention to each alone."""
    says = "; ".join(f"{x.name}: {x.reason}" for x in seen.coverage() if x.reason)
    if says:
        return trial.end("broken", says=says)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    error = 0.0
    for b, (tokens, hidden) in enumerate(zip(sequences, padding, strict=True)):
        with torch.no_grad():
            out = eager(tokens[None, hidden:-1], output_attentions=True)
        for layer, weights in enumerate(out.attentions):
            found = seen.layer(layer, sequence=b).weights()
            if found.shape != weights[0].shape:
                says = f"{tuple(found.shape)}, expected {tuple(weights[0].shape)}"
                return trial.end("broken", says=f"Weights of shape {says}.")
            error = max(error, measure_change([found], [weights[0]]))
    return judge_error(trial, error, WEIGHT_ERROR)


def check_removed(
    trial: Trial,
    model: nn.Module,
    layer: str,
    run: Callable[[], list[Tensor]],
    plain: list[Tensor],
) -> Trial:
    """Compare an ablation with a hook that sets the output of a head to 0."""

    def clear(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        heads = args[0].unflatten(-1, (HEADS, -1)).clone()
        heads[..., REMOVED_HEAD, :] = 0
        return (heads.flatten(-2), *args[1:])

    handle = find_projection(model, layer).register_forward_pre_hook(clear)
    try:
        expected = run()
    finally:
        handle.remove()
    with knock_out(model, heads=[(0, REMOVED_HEAD)]):
        found = run()
    effect = measure_change(plain, expected)
    share = measure_change(found, expected) / effect if effect else math.inf
    trial = judge_error(trial, share, SHARE)
    return replace(trial, measured=f"{trial.measured} of its effect")


def find_projection(model: nn.Module, layer: str) -> nn.Module:
    """Return the module that projects the joined heads of a layer."""
    modules = dict(model.named_modules())
    for parent in (layer, layer.rpartition(".")[0]):
        for name in PROJECTIONS:
            if f"{parent}.{name}" in modules:
                return modules[f"{parent}.{name}"]
    raise LookupError(f"{layer} has none of {', '.join(PROJECTIONS)}")


def measure_change(one: list[Tensor], other: list[Tensor]) -> float:
    """Return the largest difference of two lists of arrays."""
    pairs = zip(one, other, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)
