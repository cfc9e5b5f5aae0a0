"""Compare what a model was told is padding with what is known of its tokens.

    no tokens left              attention_mask hides a whole sequence
    tokens hidden as padding    it hides tokens that are real, by pad= or valid=
    one kind of token left      nothing is known, but what it keeps is one token again
                                and again, and what it hides is a text

What is hidden is not in the records, so that no weight can show these errors.

Next: audit.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.arrays import convert
from regard.audit.audited_record import HOST
from regard.audit.finding import Finding, Level
from regard.recording.hidden_tokens import ToldTokens, list_told
from regard.recording.record import Recording

MASK = "attention_mask"


def judge_told(recording: Recording, valid: Any, pad: int | None) -> Iterator[Finding]:
    """Yield a finding for each sequence whose mask hides what is no padding.

    valid, pad: as for the audit
    """
    for told in list_told(recording):
        real, known = torch.tensor(told.real), find_known(told, valid, pad)
        hidden = 0 if known is None else int((known & ~real).sum())
        if not told.kept:
            yield tell(told, "no tokens left", told.hidden)
        elif known is not None and hidden:
            swapped = bool((real & ~known).any())  # it keeps padding, too
            level: Level = "error" if swapped else "warning"
            yield tell(told, "tokens hidden as padding", hidden, level)
        elif known is None and told.keeps_one_kind:
            yield tell(told, "one kind of token left", told.hidden, "warning")


def tell(told: ToldTokens, what: str, n: int, level: Level = "error") -> Finding:
    """Return a finding about the mask that the model was given."""
    numbers: dict[str, float] = {"tokens": n, "sequence": told.sequence}
    return Finding(what=what, layer=MASK, numbers=numbers, level=level)


def find_known(told: ToldTokens, valid: Any, pad: int | None) -> Tensor | None:
    """Return which tokens are known to be real, None if that is not known."""
    if pad is not None and told.tokens:
        return find_real(told.tokens, pad)
    if valid is None or isinstance(valid, dict):
        return None
    rows = convert(valid, HOST)
    row: Tensor = rows[min(told.sequence, len(rows) - 1)] if rows.ndim == 2 else rows
    return row.bool() if len(row) == len(told.real) else None


def read_kept(told: ToldTokens, valid: Any, pad: int | None, n: int) -> Any:
    """Return `valid` for the n keys of a record, if its mask hid what is no padding."""
    known, real = find_known(told, valid, pad), torch.tensor(told.real)
    if known is None or not bool((known & ~real).any()):
        return valid
    fits = {len(real): known, int(real.sum()): known[real]}
    return fits.get(n, valid)  # else the tokens are those of an encoder


def find_real(tokens: tuple[int, ...], pad: int) -> Tensor:
    """Return which tokens are not leading or trailing `pad`; inside, it ends a text."""
    real = torch.tensor(tokens) != pad
    return (real.cumsum(0) > 0) & (real.flip(0).cumsum(0).flip(0) > 0)
