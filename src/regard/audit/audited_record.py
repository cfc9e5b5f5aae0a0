"""A record prepared for an audit, with what the user knows about its tokens.

The user may specify which tokens are padding, which document each belongs to, and the
expected mask. Everything else is read from the record: as torch tensors on the host, in
float32 or wider, and with a mask instead of large negative scores.

Next: row_summary.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regard.arrays import Array, convert
from regard.errors import MaskError, OptionError, ShapeError
from regard.masks.algebra import Mask
from regard.masks.patterns import causal, expect_array, padding, same
from regard.masks.tiles import Edges, Proof
from regard.recording.record import Record, covers_record

HIDDEN = -3e4  # lower logits are fill values of masks, not scores
HOST = torch.empty(0)
FUTURE, OUTSIDE = "weight on the future", "weight outside of expect"


@dataclass(frozen=True, kw_only=True)
class AuditedRecord:
    """A record in torch, and what is known about its tokens."""

    record: Record
    sequence: int
    from_logits: bool  # q holds the logits themselves, and k rows of the identity
    real: Tensor  # (Nq,), rows that are not padding
    told: bool = False  # whether the user specified the padding
    forbidden: dict[str, Mask] = field(default_factory=dict)  # cells, by finding
    expected: Mask | None = None

    @property
    def at_q(self) -> Tensor:
        """The positions of the rows, (Nq,)."""
        return self.record.q_positions

    @property
    def at_k(self) -> Tensor:
        """The positions of the keys, (Nk,)."""
        return self.record.k_positions

    @property
    def sees(self) -> Tensor:
        """Which rows (H, Nq) have keys and are finite."""
        lse: Tensor = self.record.lse
        return (lse > -math.inf) & (lse < math.inf)

    @property
    def square(self) -> bool:
        """Whether this is self-attention over a whole sequence."""
        return len(self.at_q) > 2 and torch.equal(self.at_q, self.at_k)

    @property
    def placed(self) -> bool:
        """Whether the last query is the last key, unlike in cross-attention."""
        return bool(torch.equal(self.at_q[-1:], self.at_k[-1:]))


@dataclass(frozen=True, repr=False, eq=False)
class OneSequence(Mask):
    """A mask restricted to one sequence of its batch."""

    mask: Mask
    sequence: int

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        return self.mask(0 * k + self.sequence, h, q, k)  # not b: of one sequence

    def prove(self, edges: Edges) -> Proof:
        """Return the proof for this sequence."""
        proof = self.mask.prove(edges)
        empty, full = (x[min(self.sequence, len(x) - 1)][None] for x in proof)
        return Proof(empty, full)


def read_audited_record(record: Record, sequence: int) -> AuditedRecord:
    """Return a record as tensors on the host, in float32 or wider."""
    arrays = [convert(x, HOST).detach() for x in (record.q, record.k, record.lse)]
    q, k, lse = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in arrays)
    columns = find_columns(k) if record.scale == 1 else None
    mask, bias = record.mask, record.bias
    whole = Record(
        name=record.name,
        q=q if columns is None else q.clamp(min=2 * HIDDEN),  # -inf * 0 is NaN
        k=k,
        lse=lse,
        scale=record.scale,
        softcap=record.softcap,
        sink=None if record.sink is None else convert(record.sink, HOST).float(),
        q_positions=convert(record.q_positions, HOST).long(),
        k_positions=convert(record.k_positions, HOST).long(),
        mask=mask if mask is None or isinstance(mask, Mask) else convert(mask, HOST),
        bias=None if bias is None else convert(bias, HOST).detach(),
    )
    return AuditedRecord(
        record=mask_low(whole, columns),
        sequence=sequence,
        from_logits=columns is not None,
        real=torch.ones(q.shape[1], dtype=torch.bool),
    )


def mask_low(record: Record, columns: Tensor | None) -> Record:
    """Return a record whose mask also covers cells with large negative scores."""
    filled = record.bias if columns is None else record.q[..., columns]
    if filled is None:
        return record
    lse, visible = record.lse, filled > HIDDEN
    record = replace(record, lse=lse.masked_fill(lse <= HIDDEN, -math.inf))
    if bool(visible.all()):
        return record
    allowed = record.allowed()
    return replace(record, mask=visible if allowed is None else visible & allowed)


def find_columns(k: Tensor) -> Tensor | None:
    """Return the columns of keys that are rows of the identity, or None otherwise."""
    at = k[0].argmax(-1)
    ones = ((k != 0).sum(-1) == 1).all() & (k.amax(-1) == 1).all()
    rising = (at.diff() > 0).all()  # no duplicates
    return at if len(k) == 1 and bool(ones & rising) else None


def read_padding(case: AuditedRecord, valid: Any) -> Tensor | None:
    """Return which tokens of this sequence are not padding, (N,)."""
    if valid is None:
        return None
    x = convert(expect_array(valid, "valid", (("N",), ("B", "N")), "bool"), HOST)
    row: Tensor = pick_row(x, case, "valid")
    if len(case.at_k) not in (len(row), int(row.sum())):
        raise misfit(case, "valid", row)
    return row


def add_knowledge(
    case: AuditedRecord, valid: Any, documents: Any, expected: Any
) -> AuditedRecord:
    """Return a case with what the user knows about the tokens.

    Padding in the model's attention mask is not in the record, but `valid` and
    `documents` still count it; the mass on it is then missing from the row sums.
    """
    forbidden, row = {FUTURE: ~causal()}, read_padding(case, valid)
    if row is not None and len(row) == len(case.at_k):
        real = by_position(case, row, fill=1)
        forbidden["weight on padding"] = ~padding(real[None])
        case = replace(case, real=real[case.at_q])
    if documents is not None:
        axes = (("N",), ("B", "N"))
        ids = pick_row(
            convert(expect_array(documents, "documents", axes, "integral"), HOST),
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
        expected = OneSequence(expected.place(HOST), case.sequence)
        forbidden[OUTSIDE] = ~expected
        if "weight on padding" in forbidden:  # padding may be masked
            expected = expected & ~forbidden["weight on padding"]
    elif expected is not None:
        raise OptionError(
            f"expect is a {type(expected).__name__}, expected a mask such as "
            "causal() & window(4095), or a mapping from layer names to masks."
        )
    return replace(case, told=row is not None, forbidden=forbidden, expected=expected)


def pick_row(x: Tensor, case: AuditedRecord, name: str) -> Tensor:
    """Return the row of the case's sequence."""
    if x.ndim == 1:
        return x
    if case.sequence < len(x):
        return x[case.sequence]
    raise ShapeError(
        f"{name} is for {len(x)} sequences, and there is a sequence {case.sequence}. "
        "Give one row for each; those of a second pass follow those of the first."
    )


def misfit(case: AuditedRecord, name: str, row: Tensor) -> ShapeError:
    """Return the error for tokens that do not match those of the record."""
    return ShapeError(
        f"{name} is for {len(row)} tokens, and {case.record.name} has "
        f"{len(case.at_k)} keys in sequence {case.sequence}. Give all tokens of the "
        "input, generated ones too; name the layers that it is for if others differ, "
        f'as in {name}={{"encoder.*": {name}}}.'
    )


def by_position(case: AuditedRecord, x: Tensor, fill: int) -> Tensor:
    """Return values indexed by position, from values for each key."""
    last = max(int(at.max()) if len(at) else 0 for at in (case.at_q, case.at_k))
    return torch.full((last + 1,), fill, dtype=x.dtype).index_put((case.at_k,), x)


def check_reach(case: AuditedRecord, mask: Mask) -> None:
    """Raise MaskError if a formula does not cover all cells of a record."""
    for node in mask.walk():
        if not covers_record(node.extent, case.record, case.sequence):
            ends = [f"{at.min()} to {at.max()}" for at in (case.at_q, case.at_k)]
            raise MaskError(
                f"expect: {node!r} does not reach all of {case.record.name}, which has "
                f"{case.record.heads} heads, queries {ends[0]} and keys {ends[1]} in "
                f"sequence {case.sequence}. Name the layers that it is for, as in "
                'expect={"decoder.*": causal()}.'
            )
