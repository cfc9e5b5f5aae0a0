"""What a model is given in a pass: tokens, a cache, and which tokens are padding.

What hides a key is what a call adds to its scores. The arguments of the model only say
which tokens are padding; lens/assemble.py and positions.py compare the two.

Next: passes.py
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.run.cells import HIDDEN, may_see

LENGTH = "get_seq_length"  # a method of the caches of transformers


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
    valid: Tensor | None = None  # (B, N), which tokens are not padding
    cache: Any = None  # of keys; a weak reference while the pass runs
    before: int | None = None  # tokens in the cache, None if there is none
    is_shifted: bool = False  # the tokens of a decoder begin with padding
    is_packed: bool = False  # several sequences in one row
    is_paged: bool = False  # so are the keys, in a cache of many requests

    def complete(self, inner: Given) -> Given:
        """Return this with what only the model in a wrapper was given."""
        mine = {x.name: getattr(self, x.name) for x in fields(self)}
        known = {x: y for x, y in mine.items() if y is not None and y is not False}
        return replace(inner, **known)


def read_given(
    module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]
) -> Given:
    """Return what a pass was given."""
    tokens = named.get("input_ids", args[0] if args else None)
    named = name_arguments(module, args, named)
    whole = isinstance(tokens, Tensor) and tokens.ndim == 2
    tokens = tokens.detach() if whole and not tokens.is_floating_point() else None
    cache = named.get("past_key_values")
    if cache is None:
        kinds = (x for x in named.values() if callable(getattr(x, LENGTH, None)))
        cache = next(kinds, None)
    is_packed = any(name.startswith("cu_seq_lens") for name in named)
    if is_packed:  # the tokens of several sequences, one behind the other
        tokens = valid = None
    else:
        valid = read_valid(named.get("attention_mask", named.get("valid")), tokens)
        arrays = (x for x in named.values() if isinstance(x, Tensor) and x.ndim == 3)
        if valid is not None and sum(x.shape[:2] == valid.shape for x in arrays) > 1:
            valid = None  # of which of two sequences is it?
    inner = read_valid(named.get("decoder_attention_mask"), None)
    return Given(
        tokens,
        valid,
        refer_to(cache),
        before=count_tokens(cache),
        is_shifted=inner is not None and not bool(inner[:, 0].all()),
        is_packed=is_packed,
        # a cache of many requests, as of transformers
        is_paged=type(named.get("cache")).__name__ == "PagedAttentionCache",
    )


def count_tokens(cache: Any) -> int | None:
    """Return how many tokens a cache of transformers holds, None if it has no keys."""
    try:
        return int(getattr(cache, LENGTH)())
    except (
        AttributeError,
        TypeError,
        ValueError,
    ):  # a tuple, or a state of another kind
        return None


def refer_to(cache: Any) -> Any:
    """Return a weak reference to a cache, None if there is none."""
    try:
        return None if cache is None else weakref.ref(cache)
    except TypeError:  # a tuple of tensors
        return None


def read_valid(mask: Any, tokens: Tensor | None) -> Tensor | None:
    """Return which tokens (B, N) are no padding, from what a model was given."""
    if isinstance(mask, Mapping):  # a mask for each kind of layer
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if not isinstance(mask, Tensor):
        return None
    if mask.ndim == 2:
        return read_flat(mask, tokens)
    if mask.ndim == 4 and tokens is not None and tokens.shape[1] > 1:
        seen = may_see(mask).any(1).any(-2)[:, : tokens.shape[1]].int()
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
