"""The recorded attention of a model: one Record per layer and sequence.

    weights[i, j] = exp(capped(scale q_i · k_j) + bias_ij - lse_i)     where allowed

So q, k and lse suffice to recompute any row, column or cell of the weights exactly, in
memory linear in N. Positions are absolute: row i of q is token q_positions[i] of its
sequence. Padding is removed, and a generation is one Record, prefill and decode steps.

Next: stats/rows.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from regard.arrays import (
    Array,
    accumulator,
    constant,
    convert,
    count_from,
    holds,
    is_array,
    namespace,
    to_numpy,
)
from regard.definition.attention import compute_logits
from regard.definition.contract import ALL
from regard.errors import ArrayError, MaskError, OptionError, ShapeError
from regard.masks.algebra import Mask
from regard.masks.formula import Extent

Part = slice | Array  # of the rows or the keys: a range, or an array of indices
Heads = int | slice
FLOATS, WHOLE, BITS = "real floating", "integral", "bool"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The attention of one layer over one sequence."""

    name: str  # of the module: "model.layers.3.self_attn"
    q: Array  # (H, Nq, D)
    k: Array  # (Hk, Nk, D)
    lse: Array  # (H, Nq), including the sink if there is one
    scale: float
    q_positions: Array  # (Nq,), the token position of each row
    k_positions: Array  # (Nk,)
    v: Array | None = None  # (Hk, Nk, Dv), if recorded
    softcap: float | None = None
    sink: Array | None = None  # (H,)
    mask: Mask | Array | None = None  # a formula of positions, or (H or 1, Nq, Nk)
    bias: Array | None = None  # (H or 1, Nq, Nk), added to the scores

    def __post_init__(self) -> None:
        check_record(self)

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return int(self.q.shape[0])

    def allowed(
        self, rows: Part = ALL, keys: Part = ALL, *, heads: Heads = ALL
    ) -> Array | None:
        """Return where the mask lets queries look; None means no mask.

        rows, keys: a slice, or an array of indices
        heads: a slice, or the number of one head, which leaves out its axis

        The result has the shape (heads or 1, rows, keys).
        """
        if not isinstance(self.mask, Mask):
            return self.cut(self.mask, rows, keys, heads)
        q, k = (convert(x, self.q) for x in (self.q_positions, self.k_positions))
        q, k = q[rows], k[keys]
        cells = self.evaluate(q[:, None], k[None, :], heads)
        shape = (*cells.shape[:-2], q.shape[0], k.shape[0])
        return namespace(cells=cells).broadcast_to(cells, shape)

    def evaluate(self, q: Array, k: Array, heads: Heads = ALL) -> Array:
        """Return the cells of a mask that is a formula, (heads or 1, ...).

        q, k: positions with two axes that broadcast together, in the library of q
        """
        assert isinstance(self.mask, Mask)
        xp, at = namespace(q=self.q), count_from(0, self.heads, self.q)
        b, h = (xp.reshape(x, (1, -1, 1, 1)) for x in (at[:1], at[heads]))
        q, k = (xp.astype(x, at.dtype)[None, None, ...] for x in (q, k))
        cells = self.mask.place(self.q)(b, h, q, k)[0, ...]
        return cells[0, ...] if isinstance(heads, int) else cells

    def cut(self, x: Array | None, rows: Part, keys: Part, heads: Heads) -> Any:
        """Return a part of the mask or the bias, (H or 1, Nq, Nk)."""
        if x is None:
            return None
        if x.shape[0] == 1:
            heads = 0 if isinstance(heads, int) else ALL
        return x[heads, ...][..., rows, :][..., keys]

    def logits(
        self, rows: Part = ALL, keys: Part = ALL, *, heads: Heads = ALL
    ) -> Array:
        """Return capped(scale q kᵀ) + bias, -inf where the mask forbids.

        Parts are named as in `allowed`; the shape is (heads, rows, keys). The logits
        before the mask are those of replace(record, mask=None).
        """
        xp = namespace(q=self.q, k=self.k)
        dtype, group = accumulator(xp, self.q, self.k), self.heads // self.k.shape[0]
        shared: Any = ALL
        if isinstance(heads, int):
            shared = heads // group
        elif heads != ALL:
            shared = convert(np.arange(self.heads)[heads] // group, self.k)
        q, k = self.q[heads, ...][..., rows, :], self.k[shared, ...][..., keys, :]
        bias = self.cut(self.bias, rows, keys, heads)
        *_, logits = compute_logits(
            xp.astype(q, dtype, copy=False),
            xp.astype(k, dtype, copy=False),
            self.allowed(rows, keys, heads=heads),
            None if bias is None else xp.astype(bias, dtype, copy=False),
            scale=self.scale,
            softcap=self.softcap,
        )
        return logits

    def weights(
        self, rows: Part = ALL, heads: slice = ALL, *, keys: Part = ALL
    ) -> Array:
        """Return the weights of some rows of some heads, (heads, rows, keys)."""
        xp, logits = namespace(q=self.q), self.logits(rows, keys, heads=heads)
        lse = self.lse[heads, ...][..., rows, None]
        blind = lse == -math.inf  # so are all logits of the row
        return xp.exp(logits - xp.where(blind, constant(0, lse), lse))


@dataclass(frozen=True, kw_only=True)
class Covered:
    """The coverage of one attention module: how, or why not, it was recorded."""

    name: str
    via: str  # how it was intercepted: "sdpa", "transformers", …; "" if it was not
    calls: int = 0  # softmaxes and fused calls that were heard
    kept: int = 0  # how many of them are in records
    error: float = 0.0  # of its output, recomputed from the record
    reason: str = ""  # why it was not recorded
    attention: bool = True  # False: a gate, a router or an output
    note: str = ""  # what a reader of its records must know


@dataclass(frozen=True, kw_only=True)
class Recording:
    """All records of a model, with its tokens and coverage; can be saved to a file."""

    model: str  # name of the model's class
    records: tuple[Record, ...] = ()  # by sequence, then by layer in call order
    sequences: tuple[int, ...] = ()  # the sequence number of each record
    tokens: tuple[tuple[int, ...], ...] = ()  # of each sequence; () if unknown
    texts: tuple[tuple[str, ...], ...] = ()  # text of each token; () if unknown
    coverage: tuple[Covered, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.sequences) != len(self.records):
            raise OptionError(
                f"{len(self.sequences)} sequences for {len(self.records)} records, "
                "expected one sequence number per record."
            )

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the recorded layers, in the order in which they were called."""
        return tuple(dict.fromkeys(record.name for record in self.records))

    def layer(self, which: int | str, *, sequence: int = 0) -> Record:
        """Return the record of a layer, by number or name, for one sequence."""
        names = self.layers
        if isinstance(which, int) and -len(names) <= which < len(names):
            which = names[which]
        for record, number in zip(self.records, self.sequences, strict=True):
            if record.name == which and number == sequence:
                return record
        last = max(self.sequences, default=-1)
        raise OptionError(
            f"there is no layer {which!r} with sequence {sequence}; there are "
            f"{len(names)} layers (see seen.layers) and sequences 0 to {last}."
        )


def check_record(record: Record) -> None:
    """Raise an error for numbers and arrays that do not match."""
    scale, cap = record.scale, record.softcap
    if not isinstance(scale, Real) or not math.isfinite(scale):
        raise OptionError(f"{record.name}: scale={scale!r}, expected a finite number.")
    if cap is not None and not (isinstance(cap, Real) and 0 < cap < math.inf):
        raise OptionError(f"{record.name}: softcap={cap!r}, expected more than 0.")
    q, k, v = record.q, record.k, record.v
    check_array(record.name, "q", q, FLOATS, 3)
    check_array(record.name, "k", k, FLOATS, 3)
    (H, Nq, D), (Hk, Nk, width) = q.shape, k.shape
    if width != D or min(H, Hk, D) < 1 or H % Hk:
        raise ShapeError(
            f"{record.name}: q is {tuple(q.shape)} and k is {tuple(k.shape)}, expected "
            "(H, Nq, D) and (Hk, Nk, D) with H a multiple of Hk."
        )
    check_array(record.name, "lse", record.lse, FLOATS, 2, (H, Nq))
    check_array(record.name, "q_positions", record.q_positions, WHOLE, 1, (Nq,))
    check_array(record.name, "k_positions", record.k_positions, WHOLE, 1, (Nk,))
    if v is not None:
        check_array(record.name, "v", v, FLOATS, 3)
        check_array(record.name, "v", v, FLOATS, 3, (Hk, Nk, v.shape[2]))
    if record.sink is not None:
        check_array(record.name, "sink", record.sink, FLOATS, 1, (H,))
    if record.bias is not None:
        check_array(
            record.name, "bias", record.bias, FLOATS, 3, (1, Nq, Nk), (H, Nq, Nk)
        )
    if isinstance(record.mask, Mask):
        check_mask_extent(record, record.mask)
    elif record.mask is not None:
        check_array(record.name, "mask", record.mask, BITS, 3, (1, Nq, Nk), (H, Nq, Nk))


def check_mask_extent(record: Record, mask: Mask) -> None:
    """Raise MaskError if a formula does not cover every head and position."""
    for node in mask.walk():
        if not covers_record(node.extent, record):
            raise MaskError(
                f"{record.name}: {node!r} does not cover all heads and positions of "
                f"q {tuple(record.q.shape)} and k {tuple(record.k.shape)}."
            )


def covers_record(known: Extent, record: Record, sequence: int = 0) -> bool:
    """Return whether data covers every head and position of a record."""
    far = None if known.k is None else (0, known.k)
    heads = known.heads in (None, record.heads)
    batch = known.batch is None or sequence < known.batch
    rows, keys = (
        covers_positions(known.q, record.q_positions),
        covers_positions(far, record.k_positions),
    )
    return heads and batch and rows and keys


def covers_positions(known: tuple[int, int] | None, positions: Array) -> bool:
    """Return whether the known range (first, one past the last) covers positions."""
    if known is None or positions.shape[0] == 0:
        return True
    at = to_numpy(positions)
    return bool(known[0] <= at.min() and at.max() < known[1])


def check_array(
    layer: str, name: str, x: Any, kind: str, ndim: int, *shapes: tuple[int, ...]
) -> None:
    """Raise an error unless x is an array of this kind, with one of these shapes."""
    if not is_array(x) or not holds(x, kind):
        found = x.dtype if is_array(x) else type(x).__name__
        raise ArrayError(f"{layer}: {name} is {found}, expected {kind} numbers.")
    if x.ndim != ndim or (shapes and tuple(x.shape) not in shapes):
        expected = " or ".join(map(str, dict.fromkeys(shapes))) or f"{ndim} axes"
        raise ShapeError(
            f"{layer}: {name} has shape {tuple(x.shape)}, expected {expected}."
        )
