"""The sentences of an answer, as ranges of its tokens.

    answer      It opens at six. The code is 7.
    tokens      It| opens| at| six|.| The| code| is| 7|.        0:5 and 5:10

Every token belongs to one sentence, that of its last character, so that the
log-probabilities of the sentences add up to that of the answer. A sentence ends at a
line break, or at . ! ? before a space.

Next: hidden_documents.py
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from regard.models.inputs import find_tokenizer
from regard.nn.chat_template import HALF
from regard.nn.tokens import Tokenizer

END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+|(?<=[。！？])|\n+")


def decode_answer(words: Any, tokens: Sequence[int]) -> str:
    """Return the text of some tokens, with every space."""
    tokenizer = find_tokenizer(words)
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.decode(tokens)
    how = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(list(tokens), **how))


def split_sentences(text: str) -> list[int]:
    """Return where each sentence of a text ends, one past its last character."""
    ends = [x.end() for x in END.finditer(text) if text[: x.end()].strip()]
    if not ends or text[ends[-1] :].strip():
        return [*ends, len(text)]
    return [*ends[:-1], len(text)]


def find_sentences(words: Any, tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Return the tokens of each sentence, (first, one past the last)."""
    ends = split_sentences(decode_answer(words, tokens))
    found: list[tuple[int, int]] = []
    start = at = 0
    for i in range(len(tokens)):
        reached = len(decode_answer(words, tokens[: i + 1]).rstrip(HALF))
        while at < len(ends) - 1 and reached > ends[at]:
            at += 1
            if i > start:
                found.append((start, i))
                start = i
    return [*found, (start, len(tokens))]
