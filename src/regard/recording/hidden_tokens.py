"""Tokens that a model was told are padding: which they are, and what was left.

    notes["valid"]     of each sequence, 1 for tokens and 0 for padding, as it was told
    notes["hidden"]    of each sequence, the padding that is not in its records

An inverted attention_mask hides the text and keeps the padding, and the model runs. So
`print(seen)` says what was hidden, and what looks odd about it; the audit compares it
with what is known of the tokens.

Next: ../seen.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from regard.recording.record import Recording

INVERTED = "is attention_mask inverted? 1 means attend"
SHOWN = 4  # lines of a report


@dataclass(frozen=True)
class ToldTokens:
    """All tokens of a sequence, and which the model was told are real."""

    sequence: int
    tokens: tuple[int, ...]  # () if the model was given embeddings instead
    real: tuple[bool, ...]

    @property
    def kept(self) -> int:
        """How many tokens are real."""
        return sum(self.real)

    @property
    def hidden(self) -> int:
        """How many tokens are padding."""
        return len(self.real) - self.kept

    @property
    def keeps_one_kind(self) -> bool:
        """Whether all that is kept is one token, and what is hidden is several."""
        pairs = set(zip(self.tokens, self.real, strict=bool(self.tokens)))
        return [real for _, real in pairs].count(True) == 1 and len(pairs) > 2

    @property
    def is_usual(self) -> bool:
        """Whether nothing about it is odd."""
        return self.kept > 0 and not self.keeps_one_kind

    def describe(self) -> str:
        """Return a line of the report."""
        n, which = len(self.real), f"sequence {self.sequence}"
        if not self.kept:
            return f"attention_mask hides all {n} tokens of {which}: {INVERTED}"
        text = f"attention_mask hides {self.hidden} of {n} tokens of {which}"
        if not self.keeps_one_kind:
            return text
        often = f", {self.kept} times" if self.kept > 1 else ""
        token = self.tokens[self.real.index(True)]
        return f"{text}, and keeps only token {token}{often}: {INVERTED}"


def list_told(recording: Recording) -> Iterator[ToldTokens]:
    """Yield the sequences of which the model was told that tokens are padding."""
    told, hidden = (recording.notes.get(name) for name in ("valid", "hidden"))
    if not isinstance(told, list) or not isinstance(hidden, list):
        return
    rows = zip(recording.tokens, told, hidden, strict=False)
    for sequence, (kept, row, gone) in enumerate(rows):
        if not isinstance(row, list) or not is_tokens(gone):
            continue
        real = tuple(x == 1 for x in row)
        if all(real) or len(kept) + len(gone) not in (0, len(real)):
            continue
        tokens = join_tokens(kept, gone, real) if gone else kept
        if tokens is not None:
            yield ToldTokens(sequence, tokens, real)


def is_tokens(row: object) -> bool:
    """Return whether a row of a note, maybe from a file of a stranger, holds tokens."""
    return isinstance(row, list) and all(type(x) is int for x in row)


def join_tokens(
    kept: tuple[int, ...], gone: list[int], real: tuple[bool, ...]
) -> tuple[int, ...] | None:
    """Return all tokens in their order, None if they are not as many as was told."""
    if sum(real) != len(kept):
        return None
    sources = {True: iter(kept), False: iter(gone)}
    return tuple(next(sources[x]) for x in real)


def describe_hidden(recording: Recording) -> list[str]:
    """Return the lines of a report, the odd ones first."""
    told = sorted(list_told(recording), key=lambda x: x.is_usual)
    lines = [x.describe() for x in told[:SHOWN]]
    more = len(told) - len(lines)
    rest = f"attention_mask hides tokens of {more} more sequence{'s' * (more > 1)}"
    return [*lines, rest] if more else lines
