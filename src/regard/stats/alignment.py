"""Which tokens of two prompts correspond, by a diff of their ids.

    one     the cat sat  on the mat        0 1 2 3 4 5
    other   the dog sat  on the mat  .     0 1 2 3 4 5 6
    aligned the  -  sat  on the mat        0   2 3 4 5

Next: comparison.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from regard.arrays import Array, to_numpy
from regard.errors import OptionError, ShapeError
from regard.recording.record import Record

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Pair = tuple[Numbers, Numbers]  # indices in the first and in the second


@dataclass(frozen=True, eq=False)
class Alignment:
    """Positions that correspond; None if the two sequences are the same."""

    pair: Pair | None
    how: str


def align_tokens(one: Sequence[int], other: Sequence[int]) -> Alignment:
    """Return the tokens that a diff finds in both; unknown ones are taken as equal."""
    if not one or not other or tuple(one) == tuple(other):
        n = max(len(one), len(other))
        return Alignment(None, f"the same {n} tokens" if n else "tokens unknown")
    blocks = SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
    pairs = [(x.a + i, x.b + i) for x in blocks for i in range(x.size)]
    if not pairs:
        raise OptionError(
            "the two prompts have no token in common, so no query corresponds to "
            "another. Write spans=(spans_of_one, spans_of_other) to compare named "
            "parts of them, as seen.spans returns."
        )
    first, second = np.array(pairs, np.int64).T
    how = f"{len(pairs)} tokens in common, of {len(one)} and {len(other)}"
    return Alignment((first, second), how)


def align_records(one: Record, other: Record, known: Alignment) -> tuple[Pair, Pair]:
    """Return the rows and the keys of two records that correspond."""
    rows = pair_indices(one.q_positions, other.q_positions, known)
    keys = pair_indices(one.k_positions, other.k_positions, known)
    if rows is not None and keys is not None:
        return rows, keys
    shapes = [(x.q.shape[1], x.k.shape[1]) for x in (one, other)]
    raise ShapeError(
        f"{one.name} has {shapes[0][0]} queries and {shapes[0][1]} keys in one "
        f"recording, {shapes[1][0]} and {shapes[1][1]} in the other, at positions that "
        "do not correspond. Record the same tokens, or write spans=(…, …)."
    )


def pair_indices(one: Array, other: Array, known: Alignment) -> Pair | None:
    """Return the indices of positions that correspond; None if they cannot be found."""
    mine, theirs = to_numpy(one), to_numpy(other)
    if known.pair is None:
        same = mine.shape == theirs.shape and bool((mine == theirs).all())
        whole = np.arange(len(mine))
        return (whole, whole) if same else None
    ends = [int(x.max(initial=-1)) + 1 for x in (*known.pair, mine, theirs)]
    found = []
    for positions, wanted in zip((mine, theirs), known.pair, strict=True):
        at = np.full(max(ends), -1)
        at[positions] = np.arange(len(positions))
        found.append(at[wanted])
    there = (found[0] >= 0) & (found[1] >= 0)
    return (found[0][there], found[1][there]) if there.any() else None
