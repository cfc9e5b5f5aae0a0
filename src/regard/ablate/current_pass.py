"""What the model was told in the forward pass that is running: its cache and padding.

    before      tokens in the cache
    valid       which tokens are no padding, (B, N)

A wrapper may have neither: then the model inside of it tells. A later step of a
generation may have no mask, and keeps that of the first.

Next: locate.py
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.lens.call_edit import PendingCall
from regard.lens.captured_call import make_four
from regard.lens.padding import read_valid


class CurrentPass(threading.local):
    """The inputs of the forward pass in this thread (thread-local)."""

    def __init__(self) -> None:
        self.before: int | None = None  # tokens in the cache, None if there is none
        self.valid: Tensor | None = None  # (B, N), which tokens are no padding
        self.is_told = False  # whether a mask was given in this pass
        self.is_shifted = False  # whether the tokens of a decoder begin with padding
        self.sizes: dict[str, tuple[int, ...]] = {}  # of a module's first array
        self.slots: dict[str, Any] = {}  # of our own caches
        self.numbers: dict[str, int] = {}  # calls of a module

    def begin(
        self,
        given: tuple[Any, ...],
        told: Mapping[str, Any],
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        """Store the cache and the padding of a pass, or of a model in a wrapper.

        given: what the model was given;  told: the same, by name
        is_first, is_last: of the models that are called one inside of the other
        """
        if is_first:
            self.numbers.clear()
            self.before, self.is_told = None, False
        elif self.numbers:  # a layer has attended
            return
        if self.before is None:
            self.before = count_tokens(given)
        inner = read_valid(told.get("decoder_attention_mask"), None)
        self.is_shifted = inner is not None and not bool(inner[:, 0].all())
        valid = read_padding(given, told)
        if valid is not None and not self.is_told:
            self.valid, self.is_told = valid, True
        elif is_last and not (self.is_told or self.before):
            self.valid = None


def count_tokens(given: tuple[Any, ...]) -> int | None:
    """Return how many tokens a cache of transformers holds, None if it has no keys."""
    caches = (x for x in given if callable(getattr(x, "get_seq_length", None)))
    cache = next(caches, None)
    try:
        return None if cache is None else int(cache.get_seq_length())
    except (TypeError, ValueError):  # a state of another kind than keys and values
        return None


def read_padding(given: tuple[Any, ...], told: Mapping[str, Any]) -> Tensor | None:
    """Return which tokens (B, N) are no padding, from what a model was given."""
    tokens = told.get("input_ids", given[0] if given else None)
    mask = told.get("attention_mask", told.get("valid"))
    return read_valid(mask, tokens if isinstance(tokens, Tensor) else None)


def is_owned(
    valid: Tensor, hidden: Tensor, call: PendingCall, first: int, *, cross: bool
) -> bool:
    """Return whether a call hides the padding (B, N) from all of its other tokens."""
    batch, n = len(valid), first + call.n_k
    valid = torch.nn.functional.pad(valid, (0, max(0, n - valid.shape[1])), value=True)
    real = valid[:, None, None, first:n].to(hidden.device)  # (B, 1, 1, Nk)
    if hidden.ndim == 3 and call.heads is None and hidden.shape[0] % batch == 0:
        hidden = hidden.unflatten(0, (batch, -1))  # heads were folded into the batch
    hidden = make_four(hidden)
    if hidden.shape[0] not in (1, batch):
        return False
    done = (hidden | real).all(-1)  # (B, H, Nq)
    if (
        not cross and call.n_q == call.n_k
    ):  # rows of padding may see everything, or nothing
        odd = hidden.all(-1) | (~hidden).all(-1)
        done = done | (odd & ~real[:, :, 0])
    return bool(done.all())


def number(slots: Tensor, valid: Tensor | None) -> Tensor:
    """Return which tokens are in these slots (B or 1, N); -1 is padding."""
    if valid is None:
        return slots
    more = max(0, int(slots.max()) + 1 - valid.shape[1])  # generated since then
    real = torch.nn.functional.pad(valid, (0, more), value=True).to(slots.device)
    at = torch.where(real, real.cumsum(1) - 1, -1)  # (B, N)
    return at.gather(1, slots.expand(at.shape[0], -1))
