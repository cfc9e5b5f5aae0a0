"""Random weights that attend: a model of the field as the judge wants it."""

import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import nn

from wild.torchvision_operators import declare

declare()  # before any library imports torchvision, also from inside
Run = Callable[[nn.Module], Any]


def stir(model: nn.Module) -> nn.Module:
    """Add noise to all weights and return the model, in eval mode.

    Models start with weights so small that every key gets the same attention, and with
    zeros where a mistake would be multiplied away. The noise keeps the size of a
    layer's output, also without a norm after it.
    """
    with torch.no_grad():
        for module in model.modules():
            for weight in module.parameters(recurse=False):
                # quantised ones are tensors of another type
                if type(weight.data) is torch.Tensor and weight.is_floating_point():
                    weight.copy_(weight.where(~weight.isnan(), 0.0))  # never set
                    weight.add_(torch.randn_like(weight), alpha=choose(module, weight))
    return model.eval()


def choose(module: nn.Module, weight: torch.Tensor) -> float:
    """Return how much noise a weight gets."""
    if isinstance(module, nn.Embedding):
        return 0.5
    if weight.ndim in {2, 4, 5}:
        return 1 / math.sqrt(max(math.prod(weight.shape[1:]), 1))
    return 0.1


def calibrate(model: nn.Module, run: Run) -> None:
    """Let the batch norms measure what they normalise, with the weights of now.

    Else activations grow from layer to layer until a logit of attention is 1e8, and
    no float32 can tell the weights.
    """
    kind = nn.modules.batchnorm._BatchNorm
    norms = [
        x for x in model.modules() if isinstance(x, kind) and x.track_running_stats
    ]
    before = [x.momentum for x in norms]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    try:
        with torch.no_grad():
            if norms:
                run(model)
    except ValueError:  # one value for a channel: there is nothing to measure
        pass
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
        norm.eval().running_var.clamp_(min=0.1)  # a constant channel stays one


@contextmanager
def mark_empty() -> Iterator[None]:
    """Fill new memory with NaN: some models never set a weight that a file would."""
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)


def seeded(make: Callable[[], tuple[nn.Module, Run]]) -> tuple[nn.Module, Run]:
    """Make a model from a seed, and leave the generators as they were."""
    state = random.getstate()  # Keras and hyper-connections draw from Python's
    with torch.random.fork_rng():
        torch.manual_seed(0)
        random.seed(0)
        with mark_empty():
            model, run = make()
        calibrate(stir(model), run)
    random.setstate(state)
    return model, run
