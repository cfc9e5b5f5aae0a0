"""The models of regard itself, and the families that its other tests watch."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from wild.case import Case
from wild.libraries.recipe import feed, list_recipes, words
from wild.stir import Run

SIZES: dict[str, Any] = {
    "vocabulary": 64,
    "context": 32,
    "width": 32,
    "layers": 2,
    "heads": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "kv_heads": 2,
        "activation": "swiglu",
        "norm": "rms",
        "position": "rotary",
        "bias": False,
    },
    "sliding": {"position": "rotary", "window": 5},
    "qk-norm": {"qk_norm": True, "norm": "rms", "head_width": 16},
    "sinusoidal": {"position": "sinusoidal", "norm_first": False},
}


def make_decoder(options: dict[str, Any]) -> tuple[nn.Module, Run]:
    """Make one of regard's models."""
    from regard.nn import CausalTransformer, Config  # noqa: PLC0415

    return CausalTransformer(Config(**SIZES | options)), feed(words())


def make_padded() -> tuple[nn.Module, Run]:
    """Make one of regard's models, with padding."""
    model, _ = make_decoder(CONFIGS["llama"])
    (tokens,), valid = words(), torch.ones(2, 16, dtype=torch.bool)
    valid[1, 10:] = False
    return model, lambda model: model(tokens, valid=valid)


def make_generation() -> tuple[nn.Module, Run]:
    """Make one of regard's models generate."""
    from regard.nn import generate  # noqa: PLC0415

    model, _ = make_decoder(CONFIGS["llama"])
    return model, lambda model: torch.tensor(generate(model, [[3, 5, 7], [2, 4]], 5))


def make_family(name: str) -> tuple[nn.Module, Run]:
    """Make a model of tests/families.py."""
    from families import FAMILIES  # noqa: PLC0415

    model, inputs = FAMILIES[name].build()
    return model, feed(inputs)


FAMILIES = (
    "mha",
    "mha-no-weights",
    "mha-padding",
    "mha-head-mask",
    "mha-more-keys",
    "torch-encoder",
    "torch-encoder-padding",
    "torch-decoder",
    "sdpa",
    "sdpa-grouped",
    "sdpa-flat",
    "flex",
    "flex-capped",
    "written",
    "written-einsum",
    "written-bmm",
    "written-modules",
    "written-hidden",
)


def list_cases() -> Iterable[Case]:
    """Yield the models of regard and of its tests."""
    makers: dict[str, Any] = {
        name: partial(make_decoder, some) for name, some in CONFIGS.items()
    }
    makers |= {"padded": make_padded, "generation": make_generation}
    yield from list_recipes("regard", makers, needs=())
    plain = {name: partial(make_family, name) for name in FAMILIES}
    yield from list_recipes("torch", plain, needs=())
