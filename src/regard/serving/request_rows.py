"""The rows of one request, put together from the batches in which an engine ran it.

    step 1    positions 0 … 63      a chunk of the prompt
    step 2    positions 64 … 99     the rest of it
    step 3    position  100         a new token
    step 4    positions 0 … 100     again, after a preemption

Rows are placed by their position, and the last row of a position counts, so chunks,
decoding steps and preemption all become one record. A prefix that the
engine had in its cache has keys and no queries: the record has the rows that were run.

    weights[i, j] = exp(capped(scale q_i · k_j) - lse_i)     where allowed

Next: paged_cache.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from regard.arrays import Array, convert, namespace
from regard.masks.algebra import Mask
from regard.masks.patterns import causal, window
from regard.recording.evidence import Covered
from regard.recording.record import Record


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """What one attention layer does with its queries and keys."""

    name: str
    scale: float
    is_causal: bool = True
    window: int | None = None  # a query sees this many keys, itself included
    softcap: float | None = None
    sink: Array | None = None  # (H,)
    keys_of: str = ""  # the layer whose keys it attends to, if not its own

    @property
    def mask(self) -> Mask | None:
        """Its mask, a formula of positions."""
        if self.window is not None:
            return window(self.window - 1, 0 if self.is_causal else self.window - 1)
        return causal() if self.is_causal else None


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a layer."""

    first: int  # position of the first one
    rows: Array  # (n, heads, D)

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.first + int(self.rows.shape[0])


@dataclass
class LayerRows:
    """What is known of one layer of a request."""

    q: list[Piece] = field(default_factory=list)
    k: list[Piece] = field(default_factory=list)
    v: list[Piece] = field(default_factory=list)
    known: int = 0  # keys 0 … known - 1 were seen, or cannot be
    nbytes: int = 0

    def add_keys(self, first: int, k: Array) -> None:
        """Add keys that were in the cache."""
        self.put(self.k, first, k)
        self.known = max(self.known, first + int(k.shape[0]))

    def add(self, first: int, q: Array, k: Array | None, v: Array | None) -> None:
        """Add the rows of a step."""
        self.put(self.q, first, q)
        if k is not None:
            self.add_keys(first, k)
        if v is not None:
            self.put(self.v, first, v)

    def put(self, pieces: list[Piece], first: int, rows: Array) -> None:
        """Add rows to others of their kind."""
        pieces.append(Piece(first, rows))
        self.nbytes += int(rows.nbytes)


@dataclass
class RequestRows:
    """All that is known of one request."""

    name: str
    tokens: dict[int, int] = field(default_factory=dict)  # by position
    layers: dict[str, LayerRows] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of all rows."""
        return sum(layer.nbytes for layer in self.layers.values())

    def layer(self, name: str) -> LayerRows:
        """Return the rows of a layer."""
        return self.layers.setdefault(name, LayerRows())

    def add_tokens(self, first: int, tokens: list[int]) -> None:
        """Add the tokens of a step, by position."""
        self.tokens.update(enumerate(tokens, first))

    def list_tokens(self) -> tuple[int, ...]:
        """Return the tokens in order; () if some are not known."""
        found = tuple(self.tokens[i] for i in sorted(self.tokens))
        return found if sorted(self.tokens) == list(range(len(found))) else ()


def place(pieces: list[Piece]) -> tuple[Array, Array]:
    """Return rows in the order of their positions, and these; the last of each counts.

    The rows are (heads, N, D), the positions an array of the same library.
    """
    end = max(piece.end for piece in pieces)
    like = pieces[0].rows
    xp = namespace(rows=like)
    rows = xp.empty((end, *like.shape[1:]), dtype=like.dtype, device=like.device)
    known = np.zeros(end, bool)
    for piece in pieces:
        rows[piece.first : piece.end] = piece.rows
        known[piece.first : piece.end] = True
    at = np.flatnonzero(known)
    positions = convert(at, like)
    if at.size < end:
        rows = rows[positions]
    return xp.permute_dims(rows, (1, 0, 2)), positions


ComputeLse = Callable[[Array, Array, LayerFacts, int], Array]  # -> (H, Nq)


def make_record(
    facts: LayerFacts, request: RequestRows, compute_lse: ComputeLse
) -> Record:
    """Return the record of one layer of a request."""
    own = request.layer(facts.name)
    theirs = request.layer(facts.keys_of) if facts.keys_of else own
    q, q_at = place(own.q)
    k, k_at = place(theirs.k)
    v = place(theirs.v)[0] if theirs.v else None
    gaps = [x for x in (q_at, k_at) if int(x[-1]) - int(x[0]) + 1 != x.shape[0]]
    if gaps:
        raise ValueError("some of its rows between others are missing")
    start = int(q_at[0]) - int(k_at[0])
    lse = compute_lse(q, k, facts, start)
    return Record(
        name=facts.name,
        q=q,
        k=k,
        v=v,
        lse=lse,
        scale=facts.scale,
        q_positions=q_at,
        k_positions=k_at,
        softcap=facts.softcap,
        sink=facts.sink,
        mask=facts.mask,
    )


def refuse_layer(covered: Covered, reason: str) -> Covered:
    """Return the coverage of a layer whose records are not kept."""
    return replace(covered, kept=0, reason=reason, note="")
