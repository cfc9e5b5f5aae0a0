"""The blocks of a text: chat messages, documents and pages, found by their tokens.

    <|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ …
    0 "user"                            5 "assistant"

    a token that starts a message     the word after it names the block
    a token that ends a document      the next block is "document 2", "document 3", …
    a form feed                       the next block is "page 2", …

A block goes on to the start of the next one. Text without such tokens is one block
without a name. Spans that the user named, seen.mark(spans), come first: what is between
them has no name.

Next: map_source.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from regard.recording.record import Recording
from regard.recording.spans import Span

ROLES = re.compile(  # starts of messages: ChatML, Llama 3, Gemma, Phi, GPT-OSS, GLM
    r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<\|start\|>|<\|turn>"
)
SPEAKERS = re.compile(r"<\|(system|user|assistant|tool|observation)\|>")
ENDS = {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"}
WORDS = 4  # most tokens of a role: "assist", "ant"


def describe_text(
    tokens: Sequence[int], texts: Sequence[str], ways: dict[str, str], spans: Any = ()
) -> dict[str, Any]:
    """Return what a page needs to know of the text of a sequence, ready for JSON.

    ways: other tints than by weight, with the reason if they are not there
    spans: that the user named; a file is untrusted
    """
    count = max(len(tokens), len(texts))
    return {
        "tokens": list(tokens),
        "texts": list(texts),
        "count": count,
        "blocks": name_spans(spans, count) or find_blocks(texts),
        "ways": ways,
    }


def mark_spans(recording: Recording, spans: Iterable[Span], sequence: int) -> Recording:
    """Return a recording with a note of named spans."""
    given = [[x.name, x.start, x.stop] for x in spans]
    known = recording.notes.get("spans", {}) | {str(sequence): given}
    return replace(recording, notes=recording.notes | {"spans": known})


def name_spans(spans: Any, count: int) -> list[dict[str, Any]]:
    """Return the blocks of named spans, [name, start, stop]; none if one is not valid.

    >>> name_spans([["question", 0, 4], ["answer", 4, 6]], 6)
    [{'start': 0, 'name': 'question'}, {'start': 4, 'name': 'answer'}]
    >>> name_spans([["question", 0, 4]], 6)  # the rest has no name
    [{'start': 0, 'name': 'question'}, {'start': 4, 'name': ''}]
    """
    found: dict[int, str] = {}
    for span in spans if isinstance(spans, list) else ():
        match span:
            case [str(name), int(start), int(stop)] if 0 <= start < stop <= count:
                found.setdefault(stop, "")
                found[start] = name
            case _:
                return []
    return [{"start": i, "name": found[i]} for i in sorted(found) if i < count]


def find_blocks(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the first token and the name of each block; none if there are no names.

    >>> find_blocks(["<|user|>", "Hi", "<|assistant|>", "Hello"])
    [{'start': 0, 'name': 'user'}, {'start': 2, 'name': 'assistant'}]
    >>> find_blocks(["One", ".", "<|endoftext|>", "Two"])
    [{'start': 0, 'name': 'document 1'}, {'start': 3, 'name': 'document 2'}]
    """
    found: dict[int, str] = {}
    for i, text in enumerate(texts):
        if not text.startswith("<"):
            continue
        if ROLES.fullmatch(text):
            found[i] = name_role(texts[i + 1 : i + 1 + WORDS])
        elif speaker := SPEAKERS.fullmatch(text):
            found[i] = speaker[1]
    if not found:
        found = number_blocks(texts, "document", lambda text: text in ENDS)
    if not found:
        found = number_blocks(texts, "page", lambda text: "\f" in text)
    if found and 0 not in found:
        found[0] = "start"
    return [{"start": i, "name": found[i]} for i in sorted(found)]


def name_role(texts: Sequence[str]) -> str:
    """Return the words up to the end of a line or a special token.

    >>> name_role(["assist", "ant", "<|end_header_id|>", "Hello"])
    'assistant'
    """
    words = ""
    for text in texts:
        if "\n" in text or text.startswith("<"):
            words += text.partition("\n")[0] if not text.startswith("<") else ""
            break
        words += text
    return words.strip()[:40] or "message"


def number_blocks(texts: Sequence[str], name: str, ends: Any) -> dict[int, str]:
    """Return numbered blocks if a token inside of the text ends one."""
    starts = [i + 1 for i, text in enumerate(texts[:-1]) if ends(text)]
    starts = [0, *(i for i in starts if i < len(texts) and not ends(texts[i]))]
    if len(starts) < 2:
        return {}
    return {start: f"{name} {n}" for n, start in enumerate(starts, start=1)}
