"""A text as lines: which tokens stand on which line, as in the text view of the map.

    tokens → words → lines     a word is split only if it is wider than a line
    a newline ends its line    two of them leave an empty one

Next: head_scatter.py
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

CLOSED = re.compile("[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]")


def break_lines(
    texts: Sequence[str], widths: Sequence[float], room: float
) -> tuple[list[int], int]:
    """Return the line of each token; a word is split only if it is wider than a line.

    A newline ends its line, two of them leave an empty one.
    """
    at: list[int] = []
    line, x, word = 0, 0.0, 0
    apart = not any(" " in text for text in texts)
    for i, (text, wide) in enumerate(zip(texts, widths, strict=True)):
        if starts_word(texts, i, apart=apart):
            word = i
        if x + wide > room and x:
            line += 1
            moved = word if at[word:] and at[word - 1 : word] == [line - 1] else i
            at[moved:] = [line] * (i - moved)
            x = sum(widths[moved:i])
            if x + wide > room and x:  # the word alone is wider than a line
                line, x = line + 1, 0.0
        at.append(line)
        x += wide
        if "\n" in text:
            line, x, word = line + min(2, text.count("\n")), 0.0, i + 1
    return at, max(at) + 1


def starts_word(texts: Sequence[str], i: int, *, apart: bool) -> bool:
    """Return whether a line may be broken before a token.

    apart: whether each token is a word, except those that begin with "##"
    """
    before = texts[i - 1] if i else " "
    if texts[i][:1].isspace() or before[-1:].isspace():
        return True
    if CLOSED.search(texts[i]):  # written without spaces
        return True
    return apart and not texts[i].startswith("##")


def is_from_right(texts: Sequence[str]) -> bool:
    """Return whether most letters of a line are of a script read from the right."""
    kinds = [unicodedata.bidirectional(c) for c in "".join(texts) if c.isalpha()]
    return sum(kind in ("R", "AL") for kind in kinds) > len(kinds) / 2
