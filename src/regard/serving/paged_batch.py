"""The batches of transformers' generate_batch: whose rows they are, and what they see.

    rows    | a a a a | b | c c |          cu_seq_lens_q   0 4 5 7
    keys    | a a a a | b b b b b | c c |  cu_seq_lens_k   0 4 9 11

A batch is one row of tokens, request after request. Request b is decoded here: it has
one query, and five keys, of which four were in the cache. A layer with a window is
given only the last keys of a request. What follows is padding.

Next: paged_recorder.py
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.run.cells import may_see
from regard.serving.request_rows import LayerFacts, Piece, RequestRows

MISFIT = "the rows of a batch are not those of its requests"
MASKED = "its mask is neither causal nor a window of positions, request by request"
BIASED = "its scores have a bias, which is not recorded"


@dataclass
class PagedRequest:
    """A request, and the objects in which transformers keeps its state."""

    rows: RequestRows
    session: int  # which of the caches it uses
    states: list[Any]  # a request that is preempted gets a new one

    @property
    def end(self) -> int:
        """One past the last position that was run, 0 if nothing is recorded."""
        pieces = (piece for layer in self.rows.layers.values() for piece in layer.q)
        return max((piece.end for piece in pieces), default=0)

    def list_tokens(self) -> tuple[int, ...]:
        """Return the tokens that were run, and those of a prefix in the cache.

        A request knows them all: its prompt, and what was generated.
        """
        state, end = self.states[-1], self.end
        known = tuple(state.initial_tokens) + tuple(state.generated_tokens)
        return known[:end] if len(known) >= end else ()


@dataclass(frozen=True)
class Scheduled:
    """What a batch runs of one request."""

    state: Any
    first: int  # position of its first row
    count: int  # rows


@dataclass(frozen=True)
class Cut:
    """The part of a batch that one request is, for one kind of layer."""

    request: PagedRequest
    first: int  # position of the first row
    rows: slice  # of the queries
    keys: slice  # of the keys that the cache returned

    @property
    def end(self) -> int:
        """One past the position of the last row, and of the last key."""
        return self.first + int(self.rows.stop - self.rows.start)

    @property
    def first_key(self) -> int:
        """The position of the first key."""
        return self.end - int(self.keys.stop - self.keys.start)


@dataclass
class PagedBatch:
    """A batch that was prepared, and runs next in its thread."""

    cache: weakref.ref[Any]
    scheduled: list[Scheduled]
    cuts: dict[str, list[Cut]] = field(default_factory=dict)  # by kind of layer
    masks: dict[str, Tensor] = field(default_factory=dict)  # that were checked


@dataclass
class BatchedCall:
    """One call of an attention function with a paged cache."""

    function: Any
    given: Sequence[Any]  # module, query, key, value, mask, …
    named: Mapping[str, Any]
    allocator: Any = None  # of the layer's part of the cache
    k: Tensor | None = None  # (1, Hk, keys, D), as the cache returned it
    v: Tensor | None = None  # (1, Hk, keys, Dv)
    out: Any = None  # (1, rows, H, Dv)
    edited: bool = False  # a torch function mode may change what it is given

    @property
    def q(self) -> Tensor:
        """The queries, (1, H, rows, D)."""
        found: Tensor = self.given[1]
        return found

    @property
    def mask(self) -> Tensor | None:
        """What is added to the scores, (1, 1, rows, keys)."""
        if len(self.given) > 4:
            found: Tensor | None = self.given[4]
            return found
        return self.named.get("attention_mask")

    @property
    def window(self) -> int | None:
        """How many keys a query of the layer sees, None for all before it."""
        return getattr(self.allocator, "sliding_window", None)


def cut_batch(
    call: BatchedCall, batch: PagedBatch, requests: list[PagedRequest]
) -> list[Cut]:
    """Return the parts of a batch, by the lengths that the model was given."""
    q_ends = read_ends(call.named["cu_seq_lens_q"], len(requests))
    k_ends = read_ends(
        call.named["cu_seq_lens_k"][call.allocator.layer_type], len(requests)
    )
    if call.named.get("block_table") is not None:
        k_ends = q_ends  # the kernel reads the cache: only new keys are given
    cuts = [
        Cut(request, part.first, slice(*q_ends[i : i + 2]), slice(*k_ends[i : i + 2]))
        for i, (request, part) in enumerate(zip(requests, batch.scheduled, strict=True))
    ]
    counts = [cut.rows.stop - cut.rows.start for cut in cuts]
    if counts != [part.count for part in batch.scheduled]:
        raise ValueError(MISFIT)
    if any(cut.first_key < 0 or cut.first_key > cut.first for cut in cuts):
        raise ValueError(MISFIT)
    return cuts


def read_ends(cumulative: Tensor, requests: int) -> list[int]:
    """Return where requests begin and end, without those that are padding."""
    found: list[int] = cumulative[: requests + 1].tolist()
    return found


def check_batch_mask(mask: Tensor, cuts: Sequence[Cut], window: int | None) -> None:
    """Raise ValueError unless a mask is what a record says of it: (1, H, rows, keys).

    Every request sees its own keys, up to each query, and those of no other.
    """
    given = mask[0, :, : cuts[-1].rows.stop]
    expected = torch.zeros(given.shape[1:], dtype=torch.bool, device=mask.device)
    for cut in cuts:
        q = torch.arange(cut.first, cut.end, device=mask.device)[:, None]
        k = torch.arange(cut.first_key, cut.end, device=mask.device)
        allowed = k <= q
        expected[cut.rows, cut.keys] = (
            allowed if window is None else allowed & (q - k < window)
        )
    seen = may_see(given)
    if not bool((seen == expected).all()):
        raise ValueError(MASKED)
    if mask.is_floating_point() and bool((given * seen).any()):
        raise ValueError(BIASED)


def read_call_facts(name: str, call: BatchedCall) -> tuple[LayerFacts, str]:
    """Return what a layer does with its queries and keys, and a note.

    The functions of transformers apply different options: "paged|eager" has no
    softcap, and "sdpa" neither this nor sinks.
    """
    kind = getattr(call.function, "__name__", "")
    asked = softcap = call.named.get("softcap")
    sink = call.named.get("s_aux")
    if kind == "eager_paged_attention_forward":
        softcap, sink = None, getattr(call.given[0], "sinks", None)
    elif kind == "sdpa_attention_forward":
        softcap = sink = None
    scale = call.named.get("scaling")
    if call.named.get("position_bias") is not None:
        raise ValueError(BIASED)
    facts = LayerFacts(
        name=name,
        scale=call.q.shape[-1] ** -0.5 if scale is None else float(scale),
        window=call.window,
        softcap=softcap,
        sink=None if sink is None else sink.detach().clone(),
    )
    return facts, "" if asked == softcap else (
        f"its softcap of {asked:g} is not applied: {kind} ignores it"
    )


def copy_rows(x: Tensor, part: slice) -> Tensor:
    """Return some rows of (1, heads, rows, D) as (rows, heads, D), copied."""
    return x[0, :, part].detach().transpose(0, 1).clone()


def crop_pieces(pieces: list[Piece], end: int) -> list[Piece]:
    """Return the pieces before a position."""
    kept = [piece for piece in pieces if piece.first < end]
    return [Piece(piece.first, piece.rows[: end - piece.first]) for piece in kept]
