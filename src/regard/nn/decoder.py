"""A causal language model as torch modules, configurable as GPT-2, Llama or between.

    tokens (B, N) ─▶ embedding (+ positions) ─▶ blocks ─▶ norm ─▶ logits (B, N, V)

`regard.plain.Decoder` computes the same function of the same weights in NumPy. It is
the reference for the tests of this file.

Next: generation.py
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache as cache_result
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.definition.position import angles, sinusoidal
from regard.errors import OptionError, ShapeError
from regard.masks.algebra import Mask
from regard.masks.patterns import causal, padding, window
from regard.nn.attention import Linear, Rotation, apply_matrix
from regard.nn.block import TransformerBlock, make_dropout, make_norm
from regard.nn.cache import Cache, Slot
from regard.plain.config import Config


class CausalTransformer(nn.Module):  # type: ignore[misc]
    """Decoder-only transformer that returns the logits of each next token.

    >>> config = Config(vocabulary=100, context=64, width=32, layers=2, heads=4)
    >>> model = CausalTransformer(config)
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 100])
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        if config.position == "learned":
            self.positions = nn.Embedding(config.context, config.width)
        self.dropout = make_dropout(config)
        self.blocks = nn.ModuleList(
            TransformerBlock(config) for _ in range(config.layers)
        )
        self.norm = make_norm(config) if config.norm_first else nn.Identity()
        if not config.tied:
            self.head = Linear(config.width, config.vocabulary, bias=False)
        # Not buffers: model.half() would round them.
        self.tables = make_tables(config)
        self.masks = [make_mask(config.find_window(i)) for i in range(config.layers)]
        self.draw_weights()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding, under the name that it has in transformers."""
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        """Return the module whose weight makes logits."""
        return self.embed if self.config.tied else self.head

    def draw_weights(self) -> None:
        """Initialize the weights from torch's random generator."""
        for name, weight in self.named_parameters():
            mean, width = self.config.start_from(name)
            nn.init.normal_(weight, mean, width)

    def forward(
        self,
        tokens: Tensor,  # (B, N)
        *,
        valid: Tensor | None = None,  # (B, N), False for padding
        cache: Cache | None = None,  # of earlier tokens; these tokens are appended
        logits_to_keep: int = 0,  # of the last positions; 0: of all
    ) -> Tensor:
        """Return the logits (B, N, vocabulary) of the next token at each position."""
        x = self.read(tokens, valid=valid, cache=cache)
        return self.predict(x[:, -logits_to_keep:])

    def predict(self, x: Tensor) -> Tensor:
        """Return the logits (..., vocabulary) of hidden states x (..., width)."""
        head = self.embed if self.config.tied else self.head
        return apply_matrix(x, head.weight)

    def read(
        self, tokens: Tensor, *, valid: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Return the final hidden states (B, N, width), the input of predict."""
        at = self.place(tokens, valid, cache)
        masks, slots = self.choose_keys(tokens, cache)
        x = self.embed(tokens)
        if self.config.position == "learned":
            x = x + self.positions.weight[at]
        elif self.config.position == "sinusoidal":
            x = x + self.look_up("waves", at, x)
        if valid is not None:  # one object for equal masks: they are compiled once
            real = {id(mask): mask & padding(valid) for mask in masks}
            masks = [real[id(mask)] for mask in masks]
        x = self.dropout(x)
        rotation = self.turn(at, x)
        for block, mask, slot in zip(self.blocks, masks, slots, strict=True):
            x = block(x, mask, rotation=rotation, slot=slot)
        if cache is not None:
            cache.lengths = cache.lengths + tokens.shape[1]
        return self.norm(x)

    def choose_keys(
        self, tokens: Tensor, cache: Cache | None
    ) -> tuple[Sequence[Any], Sequence[Slot | None]]:
        """Return the mask and the cache slot of each layer."""
        layers = range(self.config.layers)
        if cache is None:
            return self.masks, [None] * len(layers)
        n = tokens.shape[1]
        if n > 1 or not isinstance(cache.lengths, int):
            return self.masks, cache.slots(n)
        # A single new token attends to all returned keys, so it needs no mask.
        recent = [self.config.find_window(i) for i in layers]
        return [None] * len(layers), cache.slots(1, recent=recent)

    def place(
        self, tokens: Tensor, valid: Tensor | None, cache: Cache | None
    ) -> slice | Tensor:
        """Return the position of every token: a slice, or (B, N) if they differ."""
        if valid is not None and cache is not None:
            raise OptionError(
                "valid= cannot be combined with cache=: a cache keeps the length of "
                "each sequence itself. Pass generate() a list of prompts."
            )
        start, end = 0 if cache is None else cache.lengths, tokens.shape[1]
        if valid is not None:
            end = int(valid.sum(1).max())
        elif cache is not None:
            end = cache.longest + end
        context = self.config.context
        if end > context and self.config.position != "none":
            raise ShapeError(
                f"{end} tokens, but this model reads {context} at most. "
                f"Pass the last {context}: tokens[:, -{context}:]."
            )
        if valid is not None:
            return (valid.cumsum(1) - 1).clamp(min=0)
        if isinstance(start, int):
            return slice(start, end)
        return start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)

    def turn(self, at: slice | Tensor, like: Tensor) -> Rotation | None:
        """Return the rotary tables of these positions, or None if not rotary."""
        if self.config.position != "rotary":
            return None
        cos, sin = self.look_up("cos", at, like), self.look_up("sin", at, like)
        return (cos, sin) if isinstance(at, slice) else (cos[:, None], sin[:, None])

    def look_up(self, table: str, at: slice | Tensor, like: Tensor) -> Tensor:
        """Return rows of a float64 table, rounded once to the dtype of like."""
        return self.tables[table][at if isinstance(at, slice) else at.cpu()].to(like)


@cache_result
def make_mask(size: int | None) -> Mask:
    """Return the mask of a layer with a window, or of one without."""
    return causal() if size is None else causal() & window(size - 1)


def make_tables(config: Config) -> dict[str, Tensor]:
    """Return the fixed position tables in float64."""
    if config.position == "rotary":
        places, stretch = np.arange(config.context), config.stretch or 1.0
        at = angles(places, config.head, base=config.base, stretch=stretch)
        # for both halves; the first sine is negated
        cos, sin = config.gain * np.cos(at), config.gain * np.sin(at)
        tables = {"cos": np.hstack([cos, cos]), "sin": np.hstack([-sin, sin])}
    elif config.position == "sinusoidal":
        waves = sinusoidal(config.context, config.width, base=config.base)
        tables = {"waves": waves}
    else:
        tables = {}
    return {name: torch.from_numpy(x) for name, x in tables.items()}
