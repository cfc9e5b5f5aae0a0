"""What a model is told in a pass: its arguments, and which tokens are padding.

What hides a key is what a call adds to its scores; the arguments only tell which tokens
are padding (assemble.py compares the two).

Next: passes.py
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.lens.captured_call import may_see
from regard.lens.scores import HIDDEN


def name_arguments(
    module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a module by name, also those given by position."""
    try:
        known = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # a scripted module
        return dict(named)
    names = [x.name for x in known if x.kind is x.POSITIONAL_OR_KEYWORD]
    return {**dict(zip(names, args, strict=False)), **named}


@dataclass(frozen=True)
class Given:
    """What a pass was given."""

    tokens: Tensor | None = None  # (B, N)
    valid: Tensor | None = None  # (B, N), which tokens are no padding
    cache: Any = None  # of keys
    is_packed: bool = False  # several sequences in one row
    is_paged: bool = False  # so are the keys, in a cache of many requests


def read_given(
    module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]
) -> Given:
    """Return what a pass was given."""
    tokens = named.get("input_ids", args[0] if args else None)
    named = name_arguments(module, args, named)
    whole = isinstance(tokens, Tensor) and tokens.ndim == 2
    tokens = tokens.detach() if whole and not tokens.is_floating_point() else None
    cache, paged = named.get("past_key_values"), is_paged(named)
    if any(name.startswith("cu_seq_lens") for name in named):
        # the tokens of several sequences, one behind the other
        return Given(None, None, cache, is_packed=True, is_paged=paged)
    valid = read_valid(named.get("attention_mask"), tokens)
    return Given(tokens, valid, cache, is_paged=paged)


def is_paged(named: Mapping[str, Any]) -> bool:
    """Return whether a pass is given a cache of many requests, as of transformers."""
    return type(named.get("cache")).__name__ == "PagedAttentionCache"


def read_valid(mask: Any, tokens: Tensor | None) -> Tensor | None:
    """Return which tokens (B, N) are no padding, from what a model was given."""
    if isinstance(mask, Mapping):  # a mask for each kind of layer
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if not isinstance(mask, Tensor):
        return None
    if mask.ndim == 2:
        return read_flat(mask, tokens)
    if mask.ndim == 4 and tokens is not None and tokens.shape[1] > 1:
        seen = may_see(mask)[:, 0].any(-2)[:, : tokens.shape[1]].int()
        # no query attends to padding, which is at the ends
        return (seen.cumsum(1) * seen.flip(1).cumsum(1).flip(1)).bool()
    return None


def read_flat(mask: Tensor, tokens: Tensor | None) -> Tensor | None:
    """Return which tokens a mask (B, N) calls real."""
    if mask.shape[0] == mask.shape[1] and is_triangle(mask):
        padded = tokens is not None and tokens.shape == mask.shape and len(mask) > 2
        if not padded:  # else the calls tell, which hide it for all or for later tokens
            return None  # a causal mask
    if mask.is_floating_point() and not bool(((mask == 0) | (mask == 1)).all()):
        return mask > HIDDEN  # it is added to the scores
    return mask.bool()


def is_triangle(mask: Tensor) -> bool:
    """Return whether a square mask hides what is above its diagonal, and no more."""
    seen = mask > HIDDEN if bool((mask < 0).any()) else mask.bool()
    return len(mask) > 1 and bool((seen == torch.ones_like(seen).tril()).all())
