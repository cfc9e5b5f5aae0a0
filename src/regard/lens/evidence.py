"""What the rows of a record hold, added up tile by tile: the evidence of an audit.

    mass of row i on cells R  =  sum over j in R of exp(s_ij - lse_i)
                              =  exp(lse under R - lse_i)                   exactly

A Case is a record as tensors, with what its owner knows of the tokens: which of them
are padding, which document they belong to, who is expected to see whom. A Look is one
walk over the tiles of a case: a few numbers for each row, and one tile at a time.

Next: audit.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regard.arrays import convert
from regard.definition.contract import ALL
from regard.errors import MaskError, OptionError, ShapeError
from regard.masks.algebra import Mask
from regard.masks.patterns import causal, expect, same, where
from regard.record import Record, reaches

TILE = 256, 512  # rows and keys
HIDDEN = -3e4  # a logit below is what masks are filled with, not a score
FAR = 2**62  # beyond any position
HOST = torch.empty(0)
FUTURE, OUTSIDE = "weight on the future", "weight outside of expect"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A record as tensors, and what is known of its tokens."""

    record: Record
    sequence: int
    q: Tensor  # (H, Nq, D)
    k: Tensor  # (Hk, Nk, D)
    lse: Tensor  # (H, Nq)
    at_q: Tensor  # (Nq,)
    at_k: Tensor  # (Nk,)
    columns: Tensor | None  # (Nk,), if q is the logits themselves: where keys stand
    real: Tensor  # (Nq,), rows that are no padding
    told: bool = False  # somebody said which tokens are padding
    forbidden: dict[str, Mask] = field(default_factory=dict)  # cells of no business
    expected: Mask | None = None

    @property
    def filled(self) -> bool:
        """Whether cells may be hidden by numbers, not by the mask."""
        return self.columns is not None or self.record.bias is not None

    def sees(self, rows: slice = ALL) -> Tensor:
        """Return which rows (H, r) see something, and are numbers."""
        lse, floor = self.lse[:, rows], HIDDEN if self.filled else -math.inf
        return (lse > floor) & (lse < math.inf)

    @property
    def square(self) -> bool:
        """Whether a whole sequence looks at itself."""
        return len(self.at_q) > 2 and torch.equal(self.at_q, self.at_k)

    @property
    def placed(self) -> bool:
        """Whether the last query is the last key: not so in cross-attention."""
        return bool(torch.equal(self.at_q[-1:], self.at_k[-1:]))


def read_record(record: Record, sequence: int) -> Case:
    """Return a record as tensors, in float32 or wider."""
    arrays = [convert(x, HOST).detach() for x in (record.q, record.k, record.lse)]
    q, k, lse = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in arrays)
    columns = find_columns(k) if record.scale == 1 else None
    places = (record.q_positions, record.k_positions)
    at_q, at_k = (convert(x, HOST).long() for x in places)
    mask = record.mask.place(HOST) if isinstance(record.mask, Mask) else record.mask
    return Case(
        record=replace(record, mask=mask),
        sequence=sequence,
        q=q,
        k=k,
        lse=lse,
        at_q=at_q,
        at_k=at_k,
        columns=columns,
        real=torch.ones(len(at_q), dtype=torch.bool),
    )


def find_columns(k: Tensor) -> Tensor | None:
    """Return where keys stand that are rows of the identity, as a softmax has them."""
    at = k[0].argmax(-1)
    ones = ((k != 0).sum(-1) == 1).all() & (k.amax(-1) == 1).all()
    rising = (at.diff() > 0).all()  # no two the same
    return at if len(k) == 1 and bool(ones & rising) else None


def read_valid(case: Case, valid: Any) -> Tensor | None:
    """Return which tokens of this sequence are no padding, (N,)."""
    if valid is None:
        return None
    x = convert(expect(valid, "valid", (("N",), ("B", "N")), "bool"), HOST)
    row: Tensor = pick_row(x, case, "valid")
    if len(case.at_k) not in (len(row), int(row.sum())):
        raise misfit(case, "valid", row)
    return row


def add_knowledge(case: Case, valid: Any, documents: Any, expected: Any) -> Case:
    """Return a case with what its owner knows of the tokens.

    Padding that the model was told of is not in the record, but `valid` and `documents`
    still count it; what such rows gave to padding is then missing from their sums.
    """
    forbidden, row = {FUTURE: ~causal()}, read_valid(case, valid)
    if row is not None and len(row) == len(case.at_k):
        real = by_position(case, row, fill=1)
        forbidden["weight on padding"] = where(lambda _b, _h, _q, k: ~real[k])
        case = replace(case, real=real[case.at_q])
    if documents is not None:
        axes = (("N",), ("B", "N"))
        ids = pick_row(
            convert(expect(documents, "documents", axes, "integral"), HOST),
            case,
            "documents",
        )
        if row is not None and len(ids) == len(row) != len(case.at_k):
            ids = ids[row]
        if len(ids) != len(case.at_k):
            raise misfit(case, "documents", ids)
        forbidden["weight on other documents"] = ~same(by_position(case, ids, fill=-1))
    if isinstance(expected, Mask):
        check_reach(case, expected)
        expected = expected.place(HOST)
        forbidden[OUTSIDE] = ~expected
        if "weight on padding" in forbidden:  # hidden padding is not missed
            expected = expected & ~forbidden["weight on padding"]
    elif expected is not None:
        raise OptionError(
            f"expect is a {type(expected).__name__}, expected a mask such as "
            "causal() & window(4095), or a mapping from layer names to masks."
        )
    return replace(
        case,
        told=row is not None,
        forbidden=forbidden,
        expected=expected,
    )


def pick_row(x: Tensor, case: Case, name: str) -> Tensor:
    """Return what belongs to the sequence of a case."""
    if x.ndim == 1:
        return x
    if case.sequence < len(x):
        return x[case.sequence]
    raise ShapeError(
        f"{name} is for {len(x)} sequences, and there is a sequence {case.sequence}. "
        "Give one row for each; those of a second pass follow those of the first."
    )


def misfit(case: Case, name: str, row: Tensor) -> ShapeError:
    """Say that the tokens are not those of the record."""
    return ShapeError(
        f"{name} is for {len(row)} tokens, and {case.record.name} has "
        f"{len(case.at_k)} keys in sequence {case.sequence}. Give all tokens of the "
        "input, generated ones too; name the layers that it is for if others differ, "
        f'as in {name}={{"encoder.*": {name}}}.'
    )


def by_position(case: Case, x: Tensor, fill: int) -> Tensor:
    """Return by position what was given for each key."""
    last = max(int(at.max()) if len(at) else 0 for at in (case.at_q, case.at_k))
    return torch.full((last + 1,), fill, dtype=x.dtype).index_put((case.at_k,), x)


def check_reach(case: Case, mask: Mask) -> None:
    """Refuse a formula whose data does not reach the cells of a record."""
    for node in mask.walk():
        if not reaches(node.extent, case.record, case.sequence):
            ends = [f"{at.min()} to {at.max()}" for at in (case.at_q, case.at_k)]
            raise MaskError(
                f"expect: {node!r} does not reach all of {case.record.name}, which has "
                f"{case.q.shape[0]} heads, queries {ends[0]} and keys {ends[1]} in "
                f"sequence {case.sequence}. Name the layers that it is for, as in "
                'expect={"decoder.*": causal()}.'
            )


def score(case: Case, rows: slice, keys: slice) -> Tensor:
    """Return the logits (H, r, c) of a tile, before the mask."""
    q, record = case.q[:, rows], case.record
    if case.columns is not None:  # not q @ k: -inf * 0 is NaN
        return q[..., case.columns[keys]]
    shared = q.reshape(case.k.shape[0], -1, q.shape[-1])  # (Hk, H / Hk * r, D)
    s = (shared @ case.k[:, keys].mT * record.scale).reshape(*q.shape[:2], -1)
    if record.softcap is not None:
        s = record.softcap * torch.tanh(s / record.softcap)
    return s if record.bias is None else s + convert(record.bias[:, rows, keys], HOST)


def write(mask: Any, case: Case, rows: slice, keys: slice, *, b: int = 0) -> Tensor:
    """Return the cells (H or 1, r, c) of a mask at the positions of a tile."""
    q, k = case.at_q[rows], case.at_k[keys]
    if mask is None:
        return torch.ones(1, len(q), len(k), dtype=torch.bool)
    if not isinstance(mask, Mask):
        return convert(mask[:, rows, keys], HOST)
    h = torch.arange(case.q.shape[0])[:, None, None]
    cells = mask(torch.full((1, 1, 1), b), h, q[:, None], k)
    return cells.expand(-1 if cells.ndim > 2 else 1, len(q), len(k))


def weigh(case: Case, rows: slice, keys: slice) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the logits, visible cells and weights of a tile; None if it is hidden."""
    visible = write(case.record.mask, case, rows, keys)
    if not bool(visible.any()):
        return None
    s = score(case, rows, keys)
    if case.filled:
        visible = visible & (s > HIDDEN)
    lse = case.lse[:, rows].masked_fill(~case.sees(rows), math.inf)
    return s, visible, (s - lse[..., None]).masked_fill_(~visible, -math.inf).exp_()


def cut(case: Case) -> Iterator[tuple[slice, slice]]:
    """Yield the tiles of a record."""
    n_q, n_k = len(case.at_q), len(case.at_k)
    for i in range(0, n_q, TILE[0]):
        for j in range(0, n_k, TILE[1]):
            yield slice(i, min(i + TILE[0], n_q)), slice(j, min(j + TILE[1], n_k))


class Look:
    """What the rows (H, Nq) of a case hold."""

    def __init__(self, case: Case) -> None:
        self.case, shape = case, tuple(case.lse.shape)
        self.total, self.top, self.first = torch.zeros(3, *shape)
        self.count, self.missed = torch.zeros(2, *shape, dtype=torch.long)  # of keys
        self.seen, self.due = (  # the first and the last key, seen and expected
            [torch.full(shape, FAR), torch.full(shape, -1)] for _ in range(2)
        )
        names = tuple(case.forbidden)
        self.mass = {name: torch.zeros(shape) for name in names}
        self.cells = {name: torch.zeros(shape, dtype=torch.long) for name in names}
        self.low = {name: torch.full(shape[:1], math.inf) for name in names}
        self.high = {name: torch.full(shape[:1], -math.inf) for name in names}
        for rows, keys in cut(case):
            self.add(rows, keys)
        blind = (self.count == 0) & (case.lse == 0)  # what torch's kernel returns
        self.empty = case.real & (~case.sees() | blind) & ~case.lse.isnan()
        self.good = case.real & case.sees() & ~blind

    def add(self, rows: slice, keys: slice) -> None:
        """Add a tile."""
        case, at, b = self.case, self.case.at_k[keys], self.case.sequence
        tile = weigh(case, rows, keys)
        if case.expected is not None:
            inside = write(case.expected, case, rows, keys, b=b)
            stretch(self.due, inside, rows, at)
            missed = inside if tile is None else inside & ~tile[1]
            self.missed[:, rows] += missed.sum(-1)
        if tile is None:
            return
        s, visible, weights = tile
        self.total[:, rows] += weights.sum(-1)
        self.top[:, rows] = self.top[:, rows].maximum(weights.amax(-1))
        self.count[:, rows] += visible.sum(-1)
        stretch(self.seen, visible, rows, at)
        if keys.start == 0:
            self.first[:, rows] += weights[..., 0]
        for name, mask in case.forbidden.items():
            cells = write(mask, case, rows, keys, b=b) & visible
            if bool(cells.any()):
                self.cells[name][:, rows] += cells.sum(-1)
                self.mass[name][:, rows] += (weights * cells).sum(-1)
                low = s.masked_fill(~cells, math.inf).amin((-1, -2))
                high = s.masked_fill(~cells, -math.inf).amax((-1, -2))
                self.low[name] = self.low[name].minimum(low)
                self.high[name] = self.high[name].maximum(high)

    def is_flipped(self, name: str) -> Tensor:
        """Tell of which heads (H,) all rows see forbidden keys, and only those."""
        rows = self.good & (self.count > 0)
        return ((self.cells[name] == self.count) | ~rows).all(1) & (rows.sum(1) > 1)

    def is_soft(self, name: str) -> Tensor:
        """Tell of which heads (H,) the forbidden cells have one logit, not the top."""
        one = self.high[name] - self.low[name] <= 1e-3
        peak = (self.case.lse + self.top.log()).masked_fill(~self.good, -math.inf)
        several = self.cells[name].sum(1) > 5
        return one & several & (peak.amax(1) > self.high[name] + 0.01)


def stretch(ends: list[Tensor], cells: Tensor, rows: slice, at: Tensor) -> None:
    """Stretch the first and last position of each row to hold some cells."""
    first = torch.where(cells, at, FAR).amin(-1)
    last = torch.where(cells, at, -1).amax(-1)
    ends[0][:, rows] = ends[0][:, rows].minimum(first)
    ends[1][:, rows] = ends[1][:, rows].maximum(last)
