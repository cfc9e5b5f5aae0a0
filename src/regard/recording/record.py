"""The recorded attention of a model: one Record per layer and sequence.

    weights[i, j] = exp(capped(scale q_i · k_j) + bias_ij - lse_i)     where allowed

So q, k and lse suffice to recompute any row, column or cell of the weights exactly, in
memory linear in N. Positions are absolute: row i of q is token q_positions[i] of its
sequence. Padding is removed, and a generation is one Record, prefill and decode steps.

Next: stats/rows.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, overload

import numpy as np

from regard.arrays import (
    Array,
    accumulator,
    convert,
    convert_library,
    count_from,
    holds,
    is_array,
    make_like,
    namespace,
    to_numpy,
)
from regard.definition.attention import compute_logits
from regard.definition.contract import ALL
from regard.display import Displayed
from regard.errors import ArrayError, MaskError, OptionError, ShapeError
from regard.masks.algebra import Mask
from regard.masks.formula import Extent
from regard.masks.free_axes import find_axes
from regard.recording.evidence import Certificate, Covered, LseOrigin
from regard.recording.indices import (
    Index,
    Selection,
    describe_range,
    read_index,
    read_selection,
    read_whole,
)
from regard.recording.memory import expect_room
from regard.recording.record_picture import show_record, write_record
from regard.recording.row_sums import blank_wrong_rows

FLOATS, WHOLE, BITS = "real floating", "integral", "bool"


@dataclass(frozen=True, kw_only=True)
class Record(Displayed):
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
    origin: LseOrigin = LseOrigin.RECORD  # of lse
    certificate: Certificate | None = None  # of the record as it was made

    def __post_init__(self) -> None:
        check_record(self)

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return int(self.q.shape[0])

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the weights: heads, queries, keys."""
        return self.heads, int(self.q.shape[1]), int(self.k.shape[1])

    @property
    def itemsize(self) -> int:
        """The bytes of one weight."""
        xp = namespace(q=self.q, k=self.k)
        return int(xp.finfo(accumulator(xp, self.q, self.k)).bits) // 8

    def to(self, library: Any) -> Record:
        """Return the record with arrays of "numpy", "torch" or "jax", or of a module.

        JAX stores float64 as float32 unless its option jax_enable_x64 is set.
        """
        like = make_like(library)

        def move(x: Any) -> Any:
            if isinstance(x, Mask):
                return x.place(like)
            return convert_library(x, like) if is_array(x) else x

        return replace(self, **{name: move(x) for name, x in vars(self).items()})

    def select(self, rows: Index, keys: Index, heads: Index) -> Selection:
        """Return the part of the record that these indices name."""
        return read_selection(self.shape, rows, keys, heads)

    def allowed(
        self, rows: Index = ALL, keys: Index = ALL, *, heads: Index = ALL
    ) -> Array | None:
        """Return where the mask lets queries look; None means no mask.

        rows, keys, heads: an int, a slice, a list or an array (indices.py)

        The result has the shape (heads or 1, rows, keys), without the axes of which
        one entry was selected by an int.
        """
        part = self.select(rows, keys, heads)
        if not isinstance(self.mask, Mask):
            return part.squeeze(self.cut(self.mask, part))
        q, k = (convert(x, self.q) for x in (self.q_positions, self.k_positions))
        q, k = q[self.place(part.rows)], k[self.place(part.keys)]
        cells = self.evaluate(q[:, None], k[None, :], self.place(part.heads))
        shape = (*cells.shape[:-2], q.shape[0], k.shape[0])
        return part.squeeze(namespace(cells=cells).broadcast_to(cells, shape))

    def place(self, index: Any) -> Any:
        """Return an index array in the library and on the device of q."""
        return convert(index, self.q) if isinstance(index, np.ndarray) else index

    def evaluate(self, q: Array, k: Array, heads: Any = ALL) -> Array:
        """Return the cells of a mask that is a formula, (heads or 1, ...).

        q, k: positions with two axes that broadcast together, in the library of q
        """
        assert isinstance(self.mask, Mask)
        xp, at = namespace(q=self.q), count_from(0, self.heads, self.q)
        b, h = (xp.reshape(x, (1, -1, 1, 1)) for x in (at[:1], at[heads]))
        q, k = (xp.astype(x, at.dtype)[None, None, ...] for x in (q, k))
        cells = self.mask.place(self.q)(b, h, q, k)[0, ...]
        return cells[0, ...] if isinstance(heads, int) else cells

    def cut(self, x: Array | None, part: Selection) -> Any:
        """Return a part of the mask or the bias, (H or 1, Nq, Nk)."""
        if x is None:
            return None
        heads = part.heads
        if x.shape[0] == 1:
            heads = 0 if isinstance(heads, int) else ALL
        rows, keys = self.place(part.rows), self.place(part.keys)
        return x[self.place(heads), ...][..., rows, :][..., keys]

    def logits(
        self, rows: Index = ALL, keys: Index = ALL, *, heads: Index = ALL
    ) -> Array:
        """Return capped(scale q kᵀ) + bias, -inf where the mask forbids.

        Parts are named as in `allowed`; the shape is (heads, rows, keys). The logits
        before the mask are those of replace(record, mask=None).
        """
        part = self.select(rows, keys, heads)
        return part.squeeze(self.compute_logits(part))

    def compute_logits(self, part: Selection) -> Array:
        """Return the logits with the axes of a single row and key."""
        xp = namespace(q=self.q, k=self.k)
        dtype, group = accumulator(xp, self.q, self.k), self.heads // self.k.shape[0]
        shared: Any = ALL
        if isinstance(part.heads, int):
            shared = part.heads // group
        elif isinstance(part.heads, np.ndarray) or part.heads != ALL:
            shared = self.place(np.arange(self.heads)[part.heads] // group)
        rows, keys = self.place(part.rows), self.place(part.keys)
        q = self.q[self.place(part.heads), ...][..., rows, :]
        k = self.k[shared, ...][..., keys, :]
        bias = self.cut(self.bias, part)
        *_, logits = compute_logits(
            xp.astype(q, dtype, copy=False),
            xp.astype(k, dtype, copy=False),
            self.allowed(part.rows, part.keys, heads=part.heads),
            None if bias is None else xp.astype(bias, dtype, copy=False),
            scale=self.scale,
            softcap=self.softcap,
        )
        return logits

    def weights(
        self, rows: Index = ALL, heads: Index = ALL, *, keys: Index = ALL
    ) -> Array:
        """Return the weights of some rows of some heads, (heads, rows, keys).

        record.weights(5, 0)                     of row 5 and head 0, (Nk,)
        record.weights([0, -1], keys=slice(8))   of two rows and eight keys, (H, 2, 8)
        """
        part = self.select(rows, keys, heads)
        size = part.count(self.shape) * self.itemsize
        expect_room(size, "record.weights()", stacklevel=3)
        return self.compute_weights(part)

    def compute_weights(self, part: Selection) -> Array:
        """Return weights without a warning about their size."""
        lse = self.lse[self.place(part.heads), ...]
        lse = lse[..., self.place(part.rows)][..., None]
        logits = self.compute_logits(part)
        return part.squeeze(blank_wrong_rows(self, part, logits, lse))

    def __str__(self) -> str:
        return write_record(self)

    def to_html(self) -> str:
        """Return the facts, and small maps of some heads if they are quick to draw."""
        return show_record(self)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Return the weights as a NumPy array, (H, Nq, Nk)."""
        return np.asarray(to_numpy(self.weights()), dtype=dtype, copy=copy)


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

    @overload
    def layer(self, which: int | str, *, sequence: int = 0) -> Record: ...

    @overload
    def layer(self, which: Any, *, sequence: int = 0) -> tuple[Record, ...]: ...

    def layer(self, which: Any, *, sequence: int = 0) -> Any:
        """Return the record of a layer, by number or name, for one sequence.

        which: a list, a slice or an array of them gives a tuple of records
        """
        number = self.find_sequence(sequence)
        pairs = zip(self.records, self.sequences, strict=True)
        mine = {r.name: r for r, n in reversed([*pairs]) if n == number}  # the first
        if isinstance(which, str) or read_whole(which) is not None:
            return self.find_layer(which, mine, number)
        if isinstance(which, list | tuple) and any(isinstance(x, str) for x in which):
            return tuple(self.find_layer(x, mine, number) for x in which)
        found = read_index(which, len(self.layers), "layer")
        if isinstance(found, slice):  # those that read the sequence
            return tuple(mine[x] for x in self.layers[found] if x in mine)
        assert isinstance(found, np.ndarray)
        return tuple(self.find_layer(x, mine, number) for x in found)

    def find_sequence(self, sequence: Any) -> int:
        """Return the number of a sequence; -1 is the last one."""
        n = max(self.sequences, default=-1) + 1
        number = read_whole(sequence)
        if number is None or not -n <= number < n:
            raise OptionError(
                f"there is no sequence {sequence!r}, expected {describe_range(n)}."
            )
        return number % n

    def find_layer(self, which: Any, mine: dict[str, Record], sequence: int) -> Record:
        """Return a layer of those that read the sequence."""
        names, number = self.layers, read_whole(which)
        if number is not None and -len(names) <= number < len(names):
            which = names[number]
        if which in mine:
            return mine[which]
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
        if "batch" in find_axes(node, record.q) or not covers_record(
            node.extent, record
        ):
            raise MaskError(
                f"{record.name}: {node!r} does not cover all heads and positions of "
                f"q {tuple(record.q.shape)} and k {tuple(record.k.shape)}, or is not "
                "for one sequence."
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
