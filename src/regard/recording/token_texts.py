"""Give the tokens of a recording their texts.

    texts[s][i] = decode([tokens[s][i]])

Next: ../seen.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from regard.recording.record import Recording


def label_tokens(recording: Recording, decode: Callable[[list[int]], str]) -> Recording:
    """Return a copy with the text of every token, decode([token])."""
    texts = tuple(tuple(decode([i]) for i in row) for row in recording.tokens)
    return replace(recording, texts=texts)
