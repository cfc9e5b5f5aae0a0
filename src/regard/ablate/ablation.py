"""An ablation: whole heads, or some of the keys that they attend to.

    no keys     the output of the chosen heads is 0, or that of a replacement
    keys        the chosen heads cannot attend to these keys, from some or all queries;
                or k and v of these keys are replaced
    mask        the chosen heads attend only where a formula allows it, too

A list of slices hides other keys in each sequence of a batch, so that one pass
compares several ablations of a text.

An Ablation is given once, for positions in the whole sequence. `make_edit` translates
it to one call whose queries and keys have known positions.

Next: locate.py
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.ablate.replacement import CallPlace, Replacement
from regard.errors import MaskError, OptionError
from regard.masks.algebra import Mask
from regard.masks.formula import check_extents
from regard.recording.spans import Span
from regard.run.call_edit import NOTHING, CallEdit
from regard.run.chosen_layers import (
    Layer,
    is_chosen,
    is_count,
    is_integer,
    is_layer,
    read_layer,
    read_layers,
)

EVERY_HEAD = ()  # all heads; the call determines how many there are
Place = slice | range | Span
Positions = Place | Sequence[int] | Sequence[Place | None]  # None: no token


@dataclass(frozen=True)
class Tokens:
    """Token positions; -1 is the last. A slice may end beyond it, indices may not."""

    at: slice | tuple[int, ...]

    def holds(self, positions: Tensor) -> Tensor:
        """Return whether each position (…, N) is one of these; padding is at -1."""
        end = positions.amax(-1, keepdim=True) + 1  # of each sequence

        def find(x: int) -> Tensor:
            return end + x if x < 0 else torch.full_like(end, x)

        if isinstance(self.at, tuple):
            found = torch.stack([positions == find(x) for x in self.at]).any(0)
            return found & (positions >= 0)
        start, step = find(self.at.start or 0).clamp(min=0), self.at.step or 1
        stop = end if self.at.stop is None else find(self.at.stop)
        inside = (positions >= start) & (positions < stop)
        return inside & ((positions - start) % step == 0)

    @property
    def must_reach(self) -> int:
        """How many tokens there have to be."""
        some = self.at if isinstance(self.at, tuple) else (self.at.start or 0,)
        return max(-x if x < 0 else x + 1 for x in some)

    def __str__(self) -> str:
        if isinstance(self.at, tuple):
            return ",".join(map(str, self.at))
        start, stop = self.at.start or 0, self.at.stop
        if stop == start + 1:
            return str(start)
        text = f"{start}:{'' if stop is None else stop}"
        return text if self.at.step is None else f"{text}:{self.at.step}"


@dataclass(frozen=True)
class TokensBySequence:
    """Token positions of each sequence of a batch; None: none of them."""

    sequences: tuple[Tokens | None, ...]

    @property
    def at(self) -> tuple[slice | tuple[int, ...] | None, ...]:
        """The positions, as they were given."""
        return tuple(None if x is None else x.at for x in self.sequences)

    def holds(self, positions: Tensor) -> Tensor:
        """Return whether each position (B or 1, N) is one of these, (B, N)."""
        rows = positions.expand(len(self.sequences), -1)
        found = torch.zeros_like(rows, dtype=torch.bool)
        for i, tokens in enumerate(self.sequences):
            if tokens is not None:
                found[i] = tokens.holds(rows[i])
        return found

    @property
    def must_reach(self) -> int:
        """How many tokens there have to be in the longest sequence."""
        return max(x.must_reach for x in self.sequences if x is not None)


def read_tokens(name: str, given: Any) -> Tokens | TokensBySequence | None:
    """Validate and return positions, of every or of each sequence, or raise."""
    if isinstance(given, list | tuple):
        kinds = [x is None or isinstance(x, slice | range | Span) for x in given]
        if all(kinds) and any(x is not None for x in given):
            return TokensBySequence(tuple(read_same_tokens(name, x) for x in given))
    return read_same_tokens(name, given)


def read_same_tokens(name: str, given: Any) -> Tokens | None:
    """Validate and return positions that are the same in every sequence, or raise."""
    if given is None:
        return None
    if isinstance(given, Span):  # it iterates over its two ends only
        given = range(given.start, given.stop)
    refusal = OptionError(
        f"{name}={given!r}, expected positions of tokens, counted from 0: a slice, a "
        f"range or a list of integers. Write {name}=slice(0, 4), or {name}=[-1] for "
        "the last token."
    )
    if isinstance(given, slice):
        if not is_span(given):
            raise refusal
        return Tokens(given)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise refusal
    numbers = given.tolist() if isinstance(given, Tensor) else list(given)
    if not numbers or not all(map(is_integer, numbers)):
        raise refusal
    at = tuple(map(operator.index, numbers))
    return Tokens(at)


def is_span(given: slice) -> bool:
    """Return whether a slice has integers, goes forwards and is not surely empty."""
    start, stop, step = given.start or 0, given.stop, given.step
    if not all(x is None or is_integer(x) for x in (start, stop, step)):
        return False
    same = stop is not None and (start < 0) == (stop < 0)  # counted from the same end
    return (step is None or step > 0) and stop != 0 and not (same and start >= stop)


@dataclass(frozen=True)
class Ablation:
    """What is ablated."""

    heads: tuple[tuple[Layer, int], ...] | None  # None: all heads
    layers: tuple[Layer, ...] | None  # of which layers; None: of all
    keys: Tokens | TokensBySequence | None  # None: the heads are removed, or all keys
    queries: Tokens | TokensBySequence | None  # None: from all queries
    replacement: Replacement | None = None  # of the outputs; None: 0
    rows: tuple[int, ...] | None = None  # one head for each sequence of the batch
    mask: Mask | None = None  # where the heads may attend; None: no other mask

    @property
    def removes(self) -> bool:
        """Whether the chosen heads output 0."""
        return not self.hides and self.replacement is None

    @property
    def reads(self) -> bool:
        """Whether outputs are only kept: a trace, which has a turn of its own."""
        return getattr(self.replacement, "turn", None) is not None

    @property
    def hides(self) -> bool:
        """Whether the chosen heads cannot attend to some keys."""
        hidden = self.keys is not None or self.mask is not None
        return hidden and self.replacement is None

    @property
    def needs_queries(self) -> bool:
        """Whether an edit depends on which tokens the queries are."""
        replaced = self.replacement is not None and self.replacement.by_position
        return replaced or self.queries is not None or self.mask is not None

    @property
    def needs_positions(self) -> bool:
        """Whether an edit depends on which tokens the queries or the keys are."""
        return self.needs_queries or self.keys is not None

    def heads_of(self, number: int, name: str) -> tuple[int, ...] | None:
        """Return the chosen heads of a layer: EVERY_HEAD for all, None for none."""
        if self.heads is not None:
            found = {h for layer, h in self.heads if is_layer(layer, number, name)}
            return tuple(sorted(found)) or None
        return EVERY_HEAD if is_chosen(self.layers, number, name) else None

    @property
    def asked(self) -> tuple[Layer, ...]:
        """The layers given by name or number."""
        return tuple(x for x, _ in self.heads or ()) + (self.layers or ())

    @property
    def batch(self) -> int | None:
        """How many sequences a call must have; None: any number."""
        both = (self.keys, self.queries)
        sizes = (len(x.sequences) for x in both if isinstance(x, TokensBySequence))
        return next(sizes, None if self.rows is None else len(self.rows))


def check_model(model: Any) -> None:
    """Raise OptionError unless this is an nn.Module."""
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"nothing can be cut out of a {type(model).__name__}, expected a "
            "torch.nn.Module."
        )


def read_ablation(
    model: nn.Module,
    heads: Sequence[tuple[Layer, int]] | None,
    layers: Sequence[Layer] | None,
    spans: tuple[Positions | None, Positions | None],  # keys and queries
    replacement: Replacement | None = None,
    *,
    mask: Mask | None = None,
) -> Ablation:
    """Validate the arguments and return an Ablation, or raise OptionError."""
    check_model(model)
    check_mask(mask, spans[0])
    names = [name for name, _ in model.named_modules()]
    if heads is not None and layers is not None:
        raise OptionError(
            "heads= and layers= together: heads already name their layers. Write "
            "heads=[(layer, head)], or layers=[layer] for all heads of it."
        )
    keys, queries = read_tokens("keys", spans[0]), read_tokens("queries", spans[1])
    both = [x for x in (keys, queries) if isinstance(x, TokensBySequence)]
    if len({len(x.sequences) for x in both}) > 1:
        raise OptionError(
            f"keys= of {len(both[0].sequences)} sequences and queries= of "
            f"{len(both[1].sequences)}, expected lists of the same length: one item "
            "for each sequence of the batch."
        )
    hides = keys is not None or mask is not None
    if queries is not None and not hides and replacement is None:
        raise OptionError(
            "queries= without keys=: what should they not see? Write "
            "keys=slice(None) for everything."
        )
    pairs = None if heads is None else read_pairs(heads, names)
    found = Ablation(pairs, read_layers(layers, names), keys, queries, replacement)
    return replace(found, mask=mask)


def check_mask(mask: Any, keys: Any) -> None:
    """Raise OptionError unless a mask is a formula, given alone."""
    if mask is not None and not isinstance(mask, Mask):
        raise OptionError(
            f"mask is a {type(mask).__name__}, expected a formula such as "
            "regard.window(64)."
        )
    if mask is not None and keys is not None:
        raise OptionError(
            "keys= and mask= together: write two ablations in one `with`, or one "
            "formula."
        )


def read_pairs(heads: Any, names: Sequence[str]) -> tuple[tuple[Layer, int], ...]:
    """Return (layer, head) pairs, given as such or as {layer: heads}."""
    if isinstance(heads, Mapping):
        heads = [(layer, head) for layer, some in heads.items() for head in some]
    pairs = [read_pair(x) for x in (heads if isinstance(heads, Iterable) else [heads])]
    if not pairs:
        raise OptionError("an empty list of heads: leave it out for all.")
    return tuple((read_layer(layer, names), head) for layer, head in pairs)


def read_pair(pair: Any) -> tuple[Any, int]:
    """Return (layer, head)."""
    as_list = getattr(pair, "tolist", None)  # a row of an array
    pair = pair if as_list is None else as_list()
    if isinstance(pair, tuple | list) and len(pair) == 2 and is_count(pair[1]):
        return pair[0], operator.index(pair[1])
    raise OptionError(
        f"{pair!r} is no head, expected (layer, head), both counted from 0, the layer "
        'also by its name. Write heads=[(3, 5)] or heads=[("blocks.3.attention", 5)].'
    )


def mark_heads(
    ablation: Ablation,
    chosen: tuple[int, ...],
    heads: int | None,  # None: they are folded into the batch
    device: torch.device,
) -> Tensor:
    """Return which heads are chosen, (1 or B, H, 1, 1)."""
    heads = heads or 1
    if ablation.rows is not None:
        rows = torch.tensor(ablation.rows, device=device)
        return (rows[:, None] == torch.arange(heads, device=device))[..., None, None]
    some = torch.full((1, heads, 1, 1), chosen == EVERY_HEAD, device=device)
    some[:, list(chosen)] = True
    return some


def make_replacement(
    ablation: Ablation, replacement: Replacement, place: CallPlace
) -> CallEdit:
    """Return the edit of a call whose outputs are replaced at some of its tokens."""
    q_taken, k_taken = place.q_taken, place.k_taken
    if ablation.queries is not None:
        q_taken = q_taken & ablation.queries.holds(place.q_at)
    if ablation.keys is not None:
        k_taken = k_taken & ablation.keys.holds(place.k_at)
    chosen = replace(place, q_taken=q_taken, k_taken=k_taken)
    return CallEdit(replaced=(replacement.replace(chosen),))


def make_edit(ablation: Ablation, some: Tensor, q_at: Tensor, k_at: Tensor) -> CallEdit:
    """Return the edit of a call from which something is removed.

    some: the chosen heads, (1 or B, H, 1, 1)
    q_at, k_at: positions, (B or 1, Nq or Nk)
    """
    if ablation.mask is not None:
        cells = hide_by_mask(ablation.mask, some.shape[1], q_at, k_at)
    elif ablation.keys is None:
        return CallEdit(gone=some)
    else:
        cells = ablation.keys.holds(k_at)[:, None, None]
        cells = cells.expand(-1, 1, q_at.shape[1], -1)
    if ablation.queries is not None:
        cells = cells & ablation.queries.holds(q_at)[:, None, :, None]
    return CallEdit(cells=some & cells) if bool(cells.any()) else NOTHING


def hide_by_mask(mask: Mask, heads: int, q_at: Tensor, k_at: Tensor) -> Tensor:
    """Return which cells a formula does not allow, (B, H or 1, Nq, Nk); no padding."""
    batch, device = len(k_at), k_at.device
    n_q, n_k = int(q_at.max()) + 1, int(k_at.max()) + 1
    try:
        check_extents(mask, (batch, heads, n_q, n_k), q_start=0)
    except MaskError as error:
        raise OptionError(f"mask={error}") from error
    b = torch.arange(batch, device=device)[:, None, None, None]
    h = torch.arange(heads, device=device)[None, :, None, None]
    q, k = q_at[:, None, :, None], k_at[:, None, None, :]
    allowed = mask.place(k_at)(b, h, q.clamp(min=0), k.clamp(min=0))
    return (q >= 0) & (k >= 0) & ~allowed
