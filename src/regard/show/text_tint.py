"""The tint of a text: what a selection of tokens attends to, or what attends to it.

    w[h, i, j] = exp(logits[h, i, j] - lse[h, i])    weight of query i on key j, head h

    "attended"     tint[j] = over h of  mean over i in the selection of  w[h, i, j]
    "attending"    tint[i] = over h of  sum over j in the selection of   w[h, i, j]

By value, w is multiplied by the length of the value of its key, as a share of the
longest value that is known:  w[h, i, j] · |v[h, j]| / longest.

"Over h" is the mean over the heads, or their largest. Both tints are shares of
attention between 0 and 1: how much of its attention the selection gives to a token, and
how much of its own a token gives to the selection. Tokens are numbered by position.
Only the rows or columns of the selection are computed, never the whole square.

Next: text_request.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.arrays import to_numpy
from regard.definition.contract import ALL
from regard.errors import OptionError
from regard.masks.algebra import Mask
from regard.masks.tiles import Edges
from regard.recording.record import Record
from regard.stats.columns import cut_rows
from regard.stats.replay import to_torch
from regard.threads import fit_threads, one_thread, run_in_order

CELLS = 2**22  # logits computed at a time: 16 MB in float32
ROWS = 16_384  # most rows at a time: their queries are copied

Show = Literal["attended", "attending"]
Combine = Literal["mean", "max"]
By = Literal["weight", "value", "rollout"]  # rollout: text_rollout.py
Floats = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class TextSelection:
    """The tokens that were selected, by position, and what to show of them."""

    first: int
    last: int  # the last one of a passage; `first` for one token
    show: Show = "attended"
    combine: Combine = "mean"
    by: By = "weight"

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last:
            raise OptionError(
                f"first={self.first} and last={self.last}, expected 0 <= first <= last."
            )
        known = {"show": Show, "combine": Combine, "by": By}
        for name, kinds in ((name, get_args(kind)) for name, kind in known.items()):
            given = getattr(self, name)
            if given not in kinds:
                words = " or ".join(f'"{kind}"' for kind in kinds)
                raise OptionError(f"{name}={str(given)[:40]!r}, expected {words}.")


@dataclass(frozen=True, eq=False)
class TokenTint:
    """One number per token of a sequence."""

    values: Floats  # (tokens,); 0 where `allowed` is False
    allowed: NDArray[np.bool_]  # whether any head may attend, so that 0 is a weight


@dataclass(frozen=True, eq=False)
class RecordTint:
    """The tint of one record: of its keys, or of its queries."""

    positions: NDArray[np.int64]
    total: Floats  # over its heads: the sum, or the largest
    allowed: NDArray[np.bool_]
    heads: int  # 0 if no query of the record is selected


def tint_tokens(
    chosen: Sequence[tuple[Record, Sequence[int]]],
    selection: TextSelection,
    *,
    tokens: int,
    longest: float = 1.0,
) -> TokenTint:
    """Return the tint of every token of a sequence.

    chosen: records of the sequence, each with the numbers of its heads; if they may
        have values that are not finite, as mark_nonfinite returns them
    tokens: how many tokens the sequence has
    longest: by value: the length of the longest value
    """
    values, allowed = np.zeros(tokens), np.zeros(tokens, bool)
    add = np.maximum if selection.combine == "max" else np.add
    heads = 0
    cells = sum(len(h) * r.k.shape[1] * r.q.shape[-1] for r, h in chosen)
    with one_thread() as limit:
        many = fit_threads(cells * (1 + selection.last - selection.first), limit)
        for found in run_in_order(
            partial(tint_record, selection, longest), chosen, many
        ):
            here = found.positions < tokens  # a record may go on after the known text
            at, total, seen = found.positions[here], found.total[here], found.allowed
            with np.errstate(invalid="ignore"):  # NaN stays NaN
                if is_consecutive(at):  # much faster than by index
                    run = slice(at[0], at[0] + len(at))
                    values[run] = add(values[run], total)
                    allowed[run] |= seen[here]
                else:
                    add.at(values, at, total)
                    np.logical_or.at(allowed, at, seen[here])
            heads += found.heads
    if selection.combine == "mean":
        values /= max(1, heads)
    return TokenTint(values, allowed)


@torch.no_grad()  # type: ignore[untyped-decorator]
def tint_record(
    selection: TextSelection, longest: float, chosen: tuple[Record, Sequence[int]]
) -> RecordTint:
    """Return the tint of the keys or the queries of one record."""
    record, heads = chosen
    places = [to_numpy(x) for x in (record.q_positions, record.k_positions)]
    rows, keys = (
        np.flatnonzero((x >= selection.first) & (x <= selection.last)) for x in places
    )
    attended = selection.show == "attended"
    if attended:
        record = cut_rows(record, rows)
    positions = places[1] if attended else places[0]
    of_heads = to_torch(record.q).new_zeros(
        len(heads), len(positions), dtype=torch.float64
    )
    allowed = np.zeros(len(positions), bool)
    width = len(positions) if attended else len(keys)
    sizes = None
    if selection.by == "value":
        sizes = measure_values(record)[
            [h * len(record.k) // record.heads for h in heads]
        ]
        sizes = (sizes if attended else sizes[:, keys])[:, None] / longest
    step = min(ROWS, CELLS // max(1, len(heads) * width))
    for part in cut_slices(record.q.shape[1], step):
        if not attended and may_not_look(record, places[0][part], places[1][keys]):
            continue
        weights, seen = weigh_rows(record, part, heads, None if attended else keys)
        weights = weights if sizes is None else weights * sizes
        if attended:
            of_heads += weights.sum(1, dtype=torch.float64) / len(rows)
            allowed |= to_numpy(seen.any(1).any(0))
        else:
            of_heads[:, part] = weights.sum(2, dtype=torch.float64)
            allowed[part] = to_numpy(seen.any(2).any(0))
    total = of_heads.amax(0) if selection.combine == "max" else of_heads.sum(0)
    used = len(rows) if attended else len(keys)
    return RecordTint(
        positions.astype(np.int64), to_numpy(total), allowed, len(heads) if used else 0
    )


def weigh_rows(
    record: Record, rows: slice, heads: Sequence[int], keys: NDArray[np.int64] | None
) -> tuple[Tensor, Tensor]:
    """Return weights and where a query may attend, both (heads, rows, keys)."""
    # a slice of all heads shares the keys of a group; a list copies them
    which = ALL if list(heads) == list(range(record.heads)) else np.asarray(heads)
    logits = to_torch(record.logits(rows, ALL if keys is None else keys, heads=which))
    seen = logits > -torch.inf
    lse = to_torch(record.lse)[list(heads), rows, None]
    return torch.exp(logits - lse).masked_fill_(~seen, 0), seen  # lse may be NaN


def measure_values(record: Record) -> Tensor:
    """Return the length of every value, (Hk, Nk), in float64."""
    if record.v is None:
        raise OptionError(
            f'{record.name} has no values. Record with regard.watch(model, keep="qkv").'
        )
    return torch.linalg.vector_norm(to_torch(record.v).double(), dim=-1)


def may_not_look(record: Record, queries: Places, keys: Places) -> bool:
    """Return whether the mask proves that no query may look at any of the keys."""
    if not isinstance(record.mask, Mask) or not (queries.size and keys.size):
        return not keys.size
    ends = queries.min(), queries.max(), keys.min(), keys.max()
    edges = Edges(*(np.full((1, 1, 1, 1), x) for x in ends))
    return bool(record.mask.place(np.empty(0)).prove(edges).empty.all())


def is_consecutive(positions: Places) -> bool:
    """Return whether positions rise one by one."""
    return len(positions) > 0 and bool((np.diff(positions) == 1).all())


def cut_slices(n: int, step: int) -> Iterator[slice]:
    """Yield slices of at most `step` of n, at least one of each."""
    step = max(1, step)
    for first in range(0, n, step):
        yield slice(first, min(n, first + step))
