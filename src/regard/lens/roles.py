"""Which axes of an attention call are sequences, and which are heads.

The batch of a matrix product may hold sequences and heads in any order, folded into one
axis or not. Each part of it was traced back (layout.py): a part of the columns that
weights made is a head, a part of the rows that the input gave is a sequence.

    votes of q, k and v      any says feature      ->  head
                             any says row          ->  sequence
                             none says anything    ->  by convention: of four axes or
                                                       more, the third from the end

Next: observer.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from regard.lens.layout import REPEAT, Axis, Part, arrange, count, refine, split
from regard.lens.origin import FEATURE, ROW, Root

KINDS = {"right": FEATURE, "left": ROW}  # of a product of two activations
CONVENTION = "which axis is heads was decided by convention"


@dataclass(frozen=True)
class Source:
    """What one operand tells about the batch."""

    batch: Axis  # of the operand: parts of the common batch axis
    parts: Axis | None  # the same axis, traced back; None if unknown
    name: str = "q"  # q, k or v

    def list_pieces(self) -> Iterator[tuple[Part, str]]:
        """Yield parts of the common batch axis, and the kind of axis they are from."""
        sizes = None if self.parts is None else refine(self.batch, self.parts)
        if self.parts is None or sizes is None:
            return
        pairs = zip(split(self.batch, sizes), split(self.parts, sizes), strict=True)
        for (part,), (origin,) in pairs:
            kind = f"{REPEAT} {self.name}"
            if isinstance(origin.root, Root):
                kind = KINDS.get(origin.root.kind, origin.root.kind)
            yield part, kind


@dataclass(frozen=True)
class Roles:
    """The parts of the batch that are sequences, and those that are heads."""

    sequences: Axis
    heads: Axis
    shared: Axis  # the parts of heads along which keys only repeat themselves
    note: str = ""

    @property
    def own(self) -> Axis:
        """The heads of the keys."""
        return self.heads[: len(self.heads) - len(self.shared)]

    def place(self, x: Tensor, batch: Sequence[Axis], *rest: Axis) -> Tensor | None:
        """Return x (batch axes, …) as (B, H, …)."""
        return arrange(x, (*batch, *rest), (self.sequences, self.heads, *rest))

    def place_keys(
        self, x: Tensor, batch: Sequence[Axis], *rest: Axis
    ) -> Tensor | None:
        """Return x (batch axes, …) as (B, Hk, …), without repetitions."""
        if not self.shared or not set(self.shared) & set(cut_like(batch, self.shared)):
            whole = self.heads if not self.shared else self.own
            return arrange(x, (*batch, *rest), (self.sequences, whole, *rest))
        wanted = (self.sequences, self.own, self.shared, *rest)
        x = arrange(x, (*batch, *rest), wanted)
        return None if x is None else x[:, :, 0]


def cut_like(batch: Sequence[Axis], like: Axis) -> list[Part]:
    """Return the parts of `like` that some axes hold."""
    held = []
    for part in like:
        for root, step, size in (x for axis in batch for x in axis):
            if root == part.root and step <= part.step < step * size:
                held.append(part)
    return held


def assign_roles(
    sources: Sequence[Source], dims: Sequence[Axis], batch: Axis
) -> Roles | None:
    """Return the roles of the parts of a batch.

    dims: the axes of the logits, each a part of the batch, or of something else
    """
    if not batch:
        return Roles((), (), ())
    pieces = [piece for source in sources for piece in source.list_pieces()]
    parts = [part for part, _ in pieces]
    parts += [part for dim in dims for part in dim if part.root == batch[0].root]
    borders = {1, count(batch)}
    borders |= {x for part in parts for x in (part.step, part.step * part.size)}
    if any(b % a for a, b in pairwise(sorted(borders))):
        return None
    votes = {
        Part(batch[0].root, a, b // a): {
            kind
            for part, kind in pieces
            if part.step <= a and b <= part.step * part.size
        }
        for a, b in pairwise(sorted(borders))
    }
    return decide(votes, dims, {f"{REPEAT} {x.name}" for x in sources if x.name != "q"})


def decide(
    votes: dict[Part, set[str]], dims: Sequence[Axis], repeats: set[str]
) -> Roles:
    """Return the roles that these votes give, outermost parts first."""
    heads, sequences, note = [], [], ""
    for unit, said in votes.items():
        if FEATURE in said:
            heads.append(unit)
        elif ROW in said:
            sequences.append(unit)
        else:
            is_head = len(dims) > 3 and any(
                p.root == unit.root and p.step <= unit.step < p.step * p.size
                for p in dims[-3]
            )
            (heads if is_head else sequences).append(unit)
            note = CONVENTION
    heads, sequences = heads[::-1], sequences[::-1]
    shared: list[Part] = []
    for unit in reversed(heads):  # repeated inside of each head of the keys
        if not repeats or not repeats <= votes[unit]:
            break
        shared.insert(0, unit)
    return Roles(tuple(sequences), tuple(heads), tuple(shared), note)
