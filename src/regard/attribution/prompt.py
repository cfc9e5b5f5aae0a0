"""The prompt of an answer, and which of its tokens belong to each document.

    messages ─▶ chat template ─▶ text ─▶ tokens, and the characters of each
    documents                      └──▶ one span of tokens per document

A document must occur once: hiding one of two copies would hide nothing.

Next: sentences.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from regard.errors import OptionError
from regard.models.inputs import (
    encode_string,
    find_tokenizer,
    has_template,
    is_chat,
    write_chat,
)
from regard.nn.tokens import Tokenizer
from regard.recording.spans import Offsets, Span, find_tokens


@dataclass(frozen=True)
class Prompt:
    """A text, its tokens, and the tokens of each document in it."""

    text: str
    is_whole: bool  # the tokens that begin and end a text were added
    tokens: tuple[int, ...]
    spans: tuple[Span, ...]  # in the order of the documents


def locate_prompt(words: Any, messages: Any, documents: Any) -> Prompt:
    """Return a prompt with its documents.

    words: the tokenizer, or the processor that holds it
    messages: a text, or the messages of a chat
    documents: {name: text}, or a list of texts
    """
    if isinstance(messages, str):
        text, is_whole = messages, True
    elif not is_chat(messages):
        raise OptionError(
            f"messages is {messages!r:.60}, expected a text or the messages of a chat. "
            'Write messages=[{"role": "user", "content": text}].'
        )
    elif has_template(words):
        text, is_whole = write_chat(words, messages), False
    else:  # a model that continues texts
        text, is_whole = "\n\n".join(str(x["content"]) for x in messages), True
    tokens, offsets = encode_with_offsets(words, text, whole=is_whole)
    spans = tuple(
        find_tokens(name, *find_once(name, document, text), offsets)
        for name, document in read_documents(documents).items()
    )
    for one, other in pairwise(sorted(spans, key=lambda x: x.start)):
        if other.start < one.stop:
            raise OptionError(
                f"documents {one.name!r} and {other.name!r} share tokens of the "
                "prompt, expected documents that do not overlap. Put a line break "
                "between them, or leave one of them out."
            )
    return Prompt(text, is_whole, tuple(tokens), spans)


def read_documents(documents: Any) -> dict[str, str]:
    """Return the texts of the documents by name; the default is their number."""
    if isinstance(documents, Mapping):
        named = {str(name): x for name, x in documents.items()}
    elif isinstance(documents, Sequence) and not isinstance(documents, str):
        named = {str(i): x for i, x in enumerate(documents)}
    else:
        named = {}
    if not named or not all(isinstance(x, str) and x.strip() for x in named.values()):
        raise OptionError(
            f"documents is {documents!r:.60}, expected texts that occur in the "
            "messages. Write documents=[first, second], or {name: text}."
        )
    return {name: x.strip() for name, x in named.items()}  # as chat templates do


def find_once(name: str, document: str, text: str) -> tuple[int, int]:
    """Return the characters of a document, or raise unless it occurs once."""
    count, start = text.count(document), text.find(document)
    if count == 1:
        return start, start + len(document)
    what = f"document {name!r}, {document!r:.60},"
    if count:
        raise OptionError(
            f"{what} occurs {count} times in the prompt, expected once: with one of "
            "them hidden, the model would read the other. Remove the copies from the "
            "messages."
        )
    raise OptionError(
        f"{what} does not occur in the prompt, expected every document in it, letter "
        'by letter. Write messages=[{"role": "user", "content": "\\n".join(documents) '
        "+ question}]."
    )


def encode_with_offsets(
    words: Any, text: str, *, whole: bool
) -> tuple[list[int], Offsets]:
    """Return the tokens of a text, and the characters of each."""
    tokenizer = find_tokenizer(words)
    if isinstance(tokenizer, Tokenizer):
        read = tokenizer.read(text, whole=whole)
        return list(read.ids), list(read.offsets)
    if not getattr(tokenizer, "is_fast", False):
        raise OptionError(
            f"a {type(tokenizer).__name__} does not tell the characters of its tokens. "
            "Load a fast tokenizer: AutoTokenizer.from_pretrained(name, use_fast=True)."
        )
    done = tokenizer(text, add_special_tokens=whole, return_offsets_mapping=True)
    return [int(i) for i in done["input_ids"]], done["offset_mapping"]


def encode_answer(words: Any, prompt: Prompt, answer: str) -> list[int]:
    """Return the tokens of an answer after a prompt."""
    n = len(prompt.tokens)
    joined = encode_string(words, prompt.text + answer, whole=prompt.is_whole)
    alone = encode_string(words, answer, whole=False)
    tokens = joined[n:] if tuple(joined[:n]) == prompt.tokens else alone
    if not tokens:
        raise OptionError(
            f"answer={answer!r}, expected a text. Leave it out to generate one."
        )
    return tokens
