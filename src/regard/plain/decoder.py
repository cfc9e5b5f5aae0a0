"""A causal language model in plain arrays: logits, and token generation.

    x      = embedding of each token  (+ its position)
    x      = block(x), for every layer
    logits = norm(x) Eᵀ                    E is the embedding if tied, else the head

With the weights of a real model it is that model: slow, short, the reference for nn.

Next: sample.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from regard.arrays import Array, convert, namespace, to_numpy
from regard.definition.position import sinusoidal
from regard.errors import ShapeError
from regard.masks.patterns import causal, window
from regard.plain.config import Config
from regard.plain.layer import block, norm
from regard.plain.linear import Linear, Weights, select_weights
from regard.plain.sample import GREEDY, Sampling, make_generators


def init_weights(config: Config, seed: int = 0) -> dict[str, Array]:
    """Return randomly initialized weights, as the config specifies."""
    rng = np.random.default_rng(seed)
    shapes = config.shapes()
    return {name: rng.normal(*config.start_from(name), shape) for name, shape in shapes}


@dataclass(frozen=True)
class Decoder:
    """A config and its weights; all weights are arrays of one library.

    >>> config = Config(vocabulary=100, context=64, width=32, layers=2, heads=4)
    >>> decoder = Decoder(config, init_weights(config))
    >>> decoder(np.asarray([1, 2, 3])).shape
    (3, 100)
    """

    config: Config
    weights: Weights

    def __post_init__(self) -> None:
        expected = dict(self.config.shapes())
        given = {name: tuple(x.shape) for name, x in self.weights.items()}
        for name in [*expected, *given]:
            if expected.get(name) != given.get(name):
                raise ShapeError(
                    f"{name}: given {given.get(name, 'nothing')}, "
                    f"expected {expected.get(name, 'nothing')}. "
                    "dict(config.shapes()) lists what this config needs."
                )

    def __call__(self, tokens: Array) -> Array:
        """Return the logits (..., N, vocabulary) of the token after each token."""
        config, weights = self.config, self.weights
        n = tokens.shape[-1]
        if n > config.context and config.position != "none":
            raise ShapeError(
                f"{n} tokens, but this model reads {config.context} at most. "
                f"Pass the last {config.context}: tokens[..., -{config.context}:]."
            )
        embedding = weights["embed.weight"]
        xp = namespace(tokens=tokens, embedding=embedding)
        x = xp.take(embedding, xp.reshape(tokens, (-1,)), axis=0)
        x = xp.reshape(x, (*tokens.shape, config.width))
        if config.position == "learned":
            x = x + weights["positions.weight"][:n, :]
        elif config.position == "sinusoidal":
            waves = convert(sinusoidal(n, config.width, base=config.base), x)
            x = x + xp.astype(waves, x.dtype)
        for i in range(config.layers):
            mask, size = causal(), config.find_window(i)
            mask = mask if size is None else mask & window(size - 1)
            own = select_weights(weights, f"blocks.{i}.")
            x = block(x, own, config, mask=mask, positions=np.arange(n))
        if config.norm_first:
            x = norm(x, weights, "norm", config)
        return Linear(embedding if config.tied else weights["head.weight"])(x)

    def generate(
        self,
        tokens: Sequence[int],
        n_new: int,
        *,
        sampling: Sampling = GREEDY,
        seed: int = 0,
    ) -> Iterator[int]:
        """Yield new tokens one by one, without a KV cache.

        If the text is longer than the context, the model reads its last tokens.
        """
        tokens = list(tokens)
        (rng,) = make_generators(seed, [tokens])
        for _ in range(n_new):
            recent = np.asarray(tokens[-self.config.context :])
            logits = self(convert(recent, self.weights["embed.weight"]))
            tokens.append(sampling.pick(to_numpy(logits[-1, :]), tokens, rng))
            yield tokens[-1]
